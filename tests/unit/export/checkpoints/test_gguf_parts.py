"""GGUF files as strangers keep them: split, under any name, with ids that stand for none, with several ends."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch

from mirrorsd.export.checkpoints.carried_files import token_entry
from mirrorsd.export.checkpoints.checkpoint import open_checkpoint
from mirrorsd.export.checkpoints.gguf_file import parts_of
from mirrorsd.graphs.errors import ExportError
from mirrorsd.graphs.whole_file import is_gguf
from mirrorsd.hub.checkpoints import HubName

WriteGguf = Callable[..., Path]
NONE = 4294967295


def rewritten(
    file: Path, place: Path, *, names: Any = None, tokens: Any = None, without: str = "", **more: Any
) -> Path:
    """The file with other fields and tokens, and only the tensors of these names; without any, all."""
    reader = gguf.GGUFReader(file)
    writer = gguf.GGUFWriter(place, "llama")
    for name, field in reader.fields.items():
        if not name.startswith("GGUF.") and name not in ("general.architecture", without):
            found = tokens if tokens and name == "tokenizer.ggml.tokens" else field.contents()
            writer.add_key_value(name, found, field.types[0], field.types[-1] if field.types[1:] else None)
    for name, value in more.items():
        writer.add_uint32(f"tokenizer.ggml.{name}", value)
    for tensor in reader.tensors:
        if names is None or tensor.name in names:
            writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    for step in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file, writer.close):
        step()
    return place


@pytest.fixture
def split(write_gguf: WriteGguf, tmp_path: Path) -> tuple[Path, list[Path]]:
    """A whole file with a head of its own, and the same in three parts; the head is in the last."""
    whole = write_gguf("Q8_0", head="Q8_0")
    names = sorted((tensor.name for tensor in gguf.GGUFReader(whole).tensors), key="output.weight".__eq__)
    assert names[-1] == "output.weight"
    shares = [names[:7], names[7:12], names[12:]]
    parts = [tmp_path / f"big-{number:05d}-of-00003.gguf" for number in (1, 2, 3)]
    return whole, [rewritten(whole, part, names=share) for part, share in zip(parts, shares, strict=True)]


@pytest.mark.parametrize("given", [0, 1, 2])
def test_parts_are_read_together(split: tuple[Path, list[Path]], given: int) -> None:
    whole, parts = split
    wanted, found = open_checkpoint(whole, "target"), open_checkpoint(parts[given], "target")
    assert found.tensors.keys() == wanted.tensors.keys() and "lm_head.weight" in found.tensors
    assert all(
        torch.equal(found.tensors[n].read(torch.float32), t.read(torch.float32)) for n, t in wanted.tensors.items()
    )
    assert found.config == wanted.config and found.config["tie_word_embeddings"] is False
    assert found.source.name == "big" and found.source.num_parameters == wanted.source.num_parameters
    for name in ("tokenizer.json", "chat_template.jinja"):
        assert (found.folder / name).read_text() == (wanted.folder / name).read_text()


def test_a_missing_part_is_named(split: tuple[Path, list[Path]]) -> None:
    _, parts = split
    parts[1].unlink()
    with pytest.raises(ExportError, match=r"is one of 3 parts, and big-00002-of-00003.gguf is not beside it"):
        open_checkpoint(parts[0], "target")


def test_a_changed_part_is_read_again(split: tuple[Path, list[Path]]) -> None:
    _, parts = split
    first = json.loads((open_checkpoint(parts[0], "target").folder / "made_from.json").read_text())
    rewritten(parts[2], parts[2].with_name("new.gguf"), some_token_id=1).replace(parts[2])
    again = json.loads((open_checkpoint(parts[0], "target").folder / "made_from.json").read_text())
    assert first != again


@pytest.mark.parametrize(
    ("fields", "ends"),
    [
        ({"eot_token_id": 0}, (2, 0)),
        ({"eom_token_id": 3}, (2, 3)),
        ({"eot_token_id": 0, "eom_token_id": 3}, (2, 0, 3)),
        ({"eot_token_id": 2}, (2,)),
        ({"eot_token_id": NONE}, (2,)),
        ({}, (2,)),
    ],
)
def test_every_end_ends_a_text(write_gguf: WriteGguf, tmp_path: Path, fields: Any, ends: tuple[int, ...]) -> None:
    file = rewritten(write_gguf("Q8_0"), tmp_path / "ends.gguf", **fields)
    found = open_checkpoint(file, "target")
    assert found.eos_ids == ends and token_entry(found).eos_ids == ends


@pytest.mark.parametrize(
    ("controls", "ends"),
    [
        (["<|endoftext|>"], (2, 0)),  # what Qwen ends a document with, beside the end of a turn that its file names
        (["<|eot_id|>", "<|end_of_text|>"], (2, 1, 0)),
        (["<|end|>"], (2, 0)),
        (["<|end|>", "<|return|>"], (2, 1)),
        (["<s>"], (2,)),
    ],
)
def test_control_tokens_that_say_so_end_a_text(
    write_gguf: WriteGguf, tmp_path: Path, controls: list[str], ends: tuple[int, ...]
) -> None:
    """They are hidden from the reader, who would see an answer glued to the next document."""
    plain = write_gguf("Q8_0")
    tokens = gguf.GGUFReader(plain).fields["tokenizer.ggml.tokens"].contents()
    file = rewritten(plain, tmp_path / "texts.gguf", tokens=[*controls, *tokens[len(controls) :]])
    assert open_checkpoint(file, "target").eos_ids == ends


def test_a_file_that_takes_another_s_place_has_no_template_of_it(write_gguf: WriteGguf, tmp_path: Path) -> None:
    """A base model would be taken for one that chats."""
    plain = write_gguf("Q8_0")
    place = tmp_path / "model.gguf"
    shutil.copyfile(plain, place)
    folder = open_checkpoint(place, "target").folder
    (folder / "exit_adapters.safetensors").touch()
    assert (folder / "chat_template.jinja").is_file()
    rewritten(plain, tmp_path / "other.gguf", without="tokenizer.chat_template").replace(place)
    assert open_checkpoint(place, "target").folder == folder
    assert not (folder / "chat_template.jinja").exists()
    assert (folder / "exit_adapters.safetensors").is_file(), "what training has put there stays"


@pytest.mark.parametrize("name", ["padding_token_id", "unknown_token_id", "seperator_token_id"])
def test_an_id_that_stands_for_none_is_none(write_gguf: WriteGguf, tmp_path: Path, name: str) -> None:
    from transformers import AutoTokenizer

    plain = open_checkpoint(write_gguf("Q8_0"), "target")
    found = open_checkpoint(rewritten(write_gguf("Q8_0"), tmp_path / "none.gguf", **{name: NONE}), "target")
    assert found.config.get("pad_token_id") is None and token_entry(found).pad_id is None
    assert found.tensors.keys() == plain.tensors.keys() and found.eos_ids == (2,)
    theirs: Any = AutoTokenizer.from_pretrained(found.folder)
    assert theirs.pad_token is None and theirs("abba").input_ids


@pytest.mark.parametrize("name", ["model.bin", "model", "blob.gguf.part", "x.safetensors"])
def test_a_file_is_known_by_its_first_bytes(write_gguf: WriteGguf, tmp_path: Path, name: str) -> None:
    file = write_gguf("Q8_0").rename(tmp_path / name)
    assert is_gguf(file) and parts_of(file) == [file]
    found = open_checkpoint(file, "target")
    assert found.gguf == file and found.eos_ids == (2,)
    file.write_bytes(b"PK" + file.read_bytes()[2:])
    with pytest.raises(ExportError, match=r"is not a folder; give a local folder .* or a GGUF file"):
        open_checkpoint(file, "target")


def test_all_parts_are_fetched() -> None:
    assert HubName("o/n", "q/big-00002-of-00003.gguf", None).wanted == ["q/big-?????-of-00003.gguf"]
    assert HubName("o/n", "whole.gguf", None).wanted == ["whole.gguf"]
