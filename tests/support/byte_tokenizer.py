"""A bundle's tokenizer of single bytes and special tokens: every text has one spelling, and nothing is trained."""

from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from mirrorsd.graphs import names
from mirrorsd.texts.tokenizer import BundleTokenizer


def byte_tokenizer(bundle: Path, specials: Sequence[str], template: str | None = None) -> BundleTokenizer:
    """Write it into the bundle: ids 0 to 255 in the order of the byte-level alphabet, then the special ones."""
    folder = bundle / names.TOKENIZER_FOLDER
    folder.mkdir()
    letters = {letter: place for place, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    made = Tokenizer(models.BPE(letters, []))
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    made.add_special_tokens(list(specials))
    made.save(str(folder / "tokenizer.json"))
    if template is not None:
        (folder / names.CHAT_TEMPLATE_FILE).write_text(template)
    return BundleTokenizer(bundle)
