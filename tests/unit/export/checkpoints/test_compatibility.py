import copy
import json
from pathlib import Path
from typing import Any

import pytest

from mirrorsd.export.checkpoints.checkpoint import Checkpoint
from mirrorsd.export.checkpoints.compatibility import check_compatible
from mirrorsd.graphs.errors import ExportError
from mirrorsd.graphs.manifest import SourceModel

TOKENIZER: dict[str, Any] = {
    "added_tokens": [{"id": 3, "content": "<|end|>"}],
    "normalizer": {"type": "NFC"},
    "pre_tokenizer": {"type": "ByteLevel"},
    "model": {"type": "BPE", "vocab": {"a": 0, "b": 1, "ab": 2}, "merges": [["a", "b"]]},
}


def _checkpoint(folder: Path, role: Any, tokenizer: dict[str, Any], **config: Any) -> Checkpoint:
    folder.mkdir()
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    source = SourceModel(name=role, family="llama", licence="unknown", num_parameters=1)
    merged = {"vocab_size": 4, "eos_token_id": 3, "bos_token_id": 0} | config
    return Checkpoint(folder=folder, role=role, config=merged, generation={}, source=source)


def _pair(tmp_path: Path, tokenizer: dict[str, Any], **config: Any) -> tuple[Checkpoint, Checkpoint]:
    target = _checkpoint(tmp_path / "target", "target", TOKENIZER)
    return target, _checkpoint(tmp_path / "draft", "draft", tokenizer, **config)


def test_equal_meaning_in_another_form_is_accepted(tmp_path: Path) -> None:
    """Merges may be written as "a b"; padding and truncation settings and up to 128 ids of padding do not matter."""
    tokenizer = copy.deepcopy(TOKENIZER) | {"padding": {"length": 3}}
    tokenizer["model"]["merges"] = ["a b"]
    check_compatible(*_pair(tmp_path, tokenizer, vocab_size=132, eos_token_id=[3]))


def test_special_tokens_may_stand_in_the_vocabulary(tmp_path: Path) -> None:
    """As in a GGUF file; and how texts are cut is the target's matter alone."""
    tokenizer = copy.deepcopy(TOKENIZER) | {"normalizer": None, "pre_tokenizer": {"type": "Whitespace"}}
    tokenizer["model"]["vocab"]["<|end|>"] = 3
    target, draft = _pair(tmp_path, tokenizer)
    check_compatible(target, draft)
    check_compatible(draft, target)


def test_a_token_without_a_row_needs_no_other(tmp_path: Path) -> None:
    """A `[PAD]` that was added to the tokenizer and never to the model."""
    tokenizer = copy.deepcopy(TOKENIZER)
    tokenizer["added_tokens"].append({"id": 4, "content": "[PAD]"})
    target, draft = _pair(tmp_path, tokenizer)
    check_compatible(target, draft)
    check_compatible(draft, target)
    with pytest.raises(ExportError, match=r"'\[PAD\]': target none, draft 4"):
        check_compatible(target, _checkpoint(tmp_path / "resized", "draft", tokenizer, vocab_size=5))


def test_a_draft_may_know_fewer_ends(tmp_path: Path) -> None:
    check_compatible(*_pair(tmp_path, TOKENIZER, eos_token_id=[2, 3]))


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("model",), None, r"tokenizer.json holds no tokenizer: its field 'model' is None; expected an object"),
        (("model",), 5, r"holds no tokenizer: its field 'model' is 5"),
        (("model", "type"), "Unigram", "target's tokenizer is of type BPE, the draft's of type Unigram"),
        (("model", "vocab"), {"a": 0, "b": 1, "ba": 2}, "differ in 2 entries, for example 'ab': target 2, draft none"),
        (("model", "merges"), [["b", "a"]], "the same vocabulary but different merges"),
        (("added_tokens",), [{"id": 5, "content": "<|end|>"}], r"vocabularies .* '<\|end\|>': target 3, draft 5"),
    ],
)
def test_a_different_tokenizer_is_refused(tmp_path: Path, path: tuple[str, ...], value: Any, message: str) -> None:
    tokenizer = copy.deepcopy(TOKENIZER)
    owner = tokenizer
    for part in path[:-1]:
        owner = owner[part]
    owner[path[-1]] = value
    with pytest.raises(ExportError, match=message):
        check_compatible(*_pair(tmp_path, tokenizer))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"vocab_size": 133}, "the target has 4 token ids, the draft 133"),
        ({"eos_token_id": 2}, r"ends a text with ids \[3\], the draft with \[2\]"),
        ({"bos_token_id": 2}, "begins a text with id 0, the draft with 2"),
    ],
)
def test_other_sizes_or_special_tokens_are_refused(tmp_path: Path, config: dict[str, Any], message: str) -> None:
    with pytest.raises(ExportError, match=message):
        check_compatible(*_pair(tmp_path, TOKENIZER, **config))


def test_a_draft_may_name_no_first_token(tmp_path: Path) -> None:
    """It reads the ids that the target's tokenizer has made: Qwen3-Coder names none, Qwen3 one."""
    check_compatible(*_pair(tmp_path, TOKENIZER, bos_token_id=None))


def test_a_missing_tokenizer_is_named(tmp_path: Path) -> None:
    target, draft = _pair(tmp_path, TOKENIZER)
    (tmp_path / "draft" / "tokenizer.json").unlink()
    with pytest.raises(ExportError, match=r"the draft's folder .* has no tokenizer.json"):
        check_compatible(target, draft)
