"""Text that is not text is refused before it reaches the tokenizer."""

from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from mirrorsd.graphs import names
from mirrorsd.graphs.errors import GenerationError
from mirrorsd.runtime.tokenization import BundleTokenizer


@pytest.fixture
def tokenizer(tmp_path: Path) -> BundleTokenizer:
    bytes_only = Tokenizer(models.BPE({symbol: i for i, symbol in enumerate(pre_tokenizers.ByteLevel.alphabet())}, []))
    bytes_only.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    folder = tmp_path / names.TOKENIZER_FOLDER
    folder.mkdir()
    bytes_only.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text("{{ messages[0]['content'] }}")
    return BundleTokenizer(tmp_path)


def test_half_a_surrogate_pair_is_refused(tokenizer: BundleTokenizer) -> None:
    with pytest.raises(GenerationError, match="half a surrogate pair at character 3"):
        tokenizer.encode("fox\ud83e")


def test_half_a_surrogate_pair_in_a_chat_is_refused(tokenizer: BundleTokenizer) -> None:
    with pytest.raises(GenerationError, match="half a surrogate pair at character 0"):
        tokenizer.encode_chat([{"role": "user", "content": "\udd8a"}])
    assert len(tokenizer.encode_chat([{"role": "user", "content": "ok"}])) == 2
