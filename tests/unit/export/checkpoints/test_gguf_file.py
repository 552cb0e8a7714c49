import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf_writer import VOCABULARY, write_tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2Config, GPT2LMHeadModel

from mirrorsd.export.checkpoints.carried_files import generation_defaults
from mirrorsd.export.checkpoints.checkpoint import open_checkpoint
from mirrorsd.export.checkpoints.gguf_architectures import readable_architectures
from mirrorsd.export.checkpoints.weightless import open_model
from mirrorsd.export.estimate import estimate_export
from mirrorsd.export.options import ExportOptions
from mirrorsd.export.weights.block_quantisation import pack_levels, restore_rows
from mirrorsd.export.weights.gguf_tensors import FileBlocks, GgufTensor, kinds_of
from mirrorsd.graphs.errors import ExportError
from mirrorsd.training.models.whole_model import load_whole

WriteGguf = Callable[..., Path]


def test_a_file_is_read_as_transformers_reads_it(write_gguf: WriteGguf) -> None:
    """Every weight to the bit, and rows of queries and keys in Hugging Face's order."""
    file = write_gguf("Q4_0")
    found = open_checkpoint(file, "target")
    whole: Any = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    wanted = whole.state_dict()
    assert found.tensors.keys() == wanted.keys() - {"lm_head.weight"}
    for name, tensor in found.tensors.items():
        assert torch.equal(tensor.read(torch.float32), wanted[name]), name
    assert found.source.name == "tiny" and found.source.licence == "apache-2.0"
    assert found.config["num_hidden_layers"] == 2 and found.eos_ids == (2,)


def test_a_gpt_2_is_read_with_the_head_that_its_file_has(tmp_path: Path) -> None:
    """llama.cpp writes the tied head a second time, and products the other way round than Hugging Face does."""
    torch.manual_seed(2)
    sizes = {"n_embd": 64, "n_head": 4, "n_layer": 1, "n_inner": 96, "n_positions": 48}
    whole = GPT2LMHeadModel(GPT2Config(vocab_size=len(VOCABULARY), bos_token_id=1, eos_token_id=2, **sizes)).eval()
    file = tmp_path / "gpt2.gguf"
    writer = gguf.GGUFWriter(file, "gpt2")
    counts = {"block_count": 1, "context_length": 48, "embedding_length": 64, "feed_forward_length": 96}
    for name, count in (counts | {"attention.head_count": 4}).items():
        writer.add_uint32(f"gpt2.{name}", count)
    writer.add_layer_norm_eps(1e-5)
    write_tokenizer(writer, "gpt-2")
    for name, tensor in whole.state_dict().items():
        owner, _, kind = name.rpartition(".")
        numbers = tensor.T if re.search(r"(attn|fc|proj)\.weight", name) else tensor
        of_file = gguf.get_tensor_name_map(gguf.MODEL_ARCH.GPT2, 1).get_name(owner)
        writer.add_tensor(f"{of_file}.{kind}", np.ascontiguousarray(numbers.numpy()))
    for step in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file, writer.close):
        step()
    ids = np.arange(40)[None]
    with torch.no_grad():
        wanted = whole(torch.from_numpy(ids)).logits.numpy()
    np.testing.assert_allclose(open_model(open_checkpoint(file, "target")).logits(ids), wanted, atol=1e-5)


def test_a_file_of_the_hub_s_cache_says_where_it_comes_from(write_gguf: WriteGguf, tmp_path: Path) -> None:
    """It is a link there, to content without a name."""
    content = tmp_path / "models--owner--name" / "blobs" / "0123"
    named = tmp_path / "models--owner--name" / "snapshots" / ("a" * 40) / "quants" / "tiny.gguf"
    for path in (content, named):
        path.parent.mkdir(parents=True)
    write_gguf("Q4_0").rename(content)
    named.symlink_to(content)
    found = open_checkpoint(named, "target").source
    assert (found.name, found.revision, found.licence) == ("owner/name", "a" * 40, "apache-2.0")


def test_names_are_looked_for_without_asking_every_layer(
    write_gguf: WriteGguf, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A table of all names is made for every module that is asked, and takes milliseconds."""
    file, asked = write_gguf("Q4_0"), list[int]()
    make_table = gguf.get_tensor_name_map

    def counted(arch: Any, num_layers: int) -> Any:
        asked.append(num_layers)
        return make_table(arch, num_layers)

    monkeypatch.setattr(gguf, "get_tensor_name_map", counted)
    tensors = open_checkpoint(file, "target").tensors
    assert asked == [2] * 6  # the whole, its head, the model, and its embedding, last norm and rotation
    assert sum(".layers.1." in name for name in tensors) == 9


def test_an_export_of_the_files_own_blocks_is_estimated_by_their_forms(write_gguf: WriteGguf) -> None:
    """A weight of Q4_1 takes 4 bits, and of each block 32 for the scale, 32 for the offset, 4 for the zero point."""
    file = write_gguf("Q4_1", mixed="F16", head="MXFP4")
    estimate = estimate_export(file, file, ExportOptions(precision="file", draft_precision="int8"))
    sizes = {name: tensor.size for name, tensor in open_checkpoint(file, "draft").tensors.items()}
    floats = sum(size for name, size in sizes.items() if "norm" in name or "v_proj" in name)
    others = sum(sizes.values()) - floats - sizes["lm_head.weight"]
    of_target = (32 * floats + 9 * sizes["lm_head.weight"] + 6.125 * others) / 8
    assert estimate.bundle_bytes == pytest.approx(of_target + sum(sizes.values()) * 8.5 / 8, abs=1)


def test_tokenizer_and_chat_template_come_from_the_file(write_gguf: WriteGguf) -> None:
    folder = open_checkpoint(write_gguf("Q8_0"), "target").folder
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.decode(tokenizer("abba").input_ids) == "abba"
    assert (folder / "chat_template.jinja").read_text() == "{{ messages[0]['content'] }}"


def test_chat_templates_with_names_come_from_the_file_too(write_gguf: WriteGguf) -> None:
    file = write_gguf("Q8_0", more={"tokenizer.chat_template.tool_use": "T"})
    tokenizer: Any = AutoTokenizer.from_pretrained(open_checkpoint(file, "target").folder)
    assert tokenizer.chat_template == {"default": "{{ messages[0]['content'] }}", "tool_use": "T"}
    tokenizer = AutoTokenizer.from_pretrained(open_checkpoint(write_gguf("Q8_0", context=128), "target").folder)
    assert tokenizer.chat_template == "{{ messages[0]['content'] }}"


def test_what_a_file_recommends_for_sampling_is_taken(write_gguf: WriteGguf) -> None:
    assert generation_defaults(open_checkpoint(write_gguf("Q8_0"), "target")) == {}
    file = write_gguf("Q8_0", sampling={"temp": 0.5, "top_p": 0.75})
    found = generation_defaults(open_checkpoint(file, "target"))
    assert found == {"do_sample": True, "temperature": 0.5, "top_p": 0.75}


@pytest.mark.parametrize("kind", ["Q4_1", "Q4_K", "Q5_0", "Q6_K"])
def test_carried_blocks_are_equal_to_the_bit(write_gguf: WriteGguf, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of joined tensors whose rows are in another order in the file, some rows at a time."""
    monkeypatch.setattr("mirrorsd.export.weights.gguf_tensors.CHUNK_BYTES", 5000)
    tensors = open_checkpoint(write_gguf(kind), "target").tensors
    assert kinds_of(tensors, is_kept=True) == (kind,) and kinds_of(tensors, is_kept=False) == ()
    weight = FileBlocks(tensors).of(
        "model.layers.0.self_attn.q_proj.weight below model.layers.0.self_attn.k_proj.weight"
    )
    assert weight is not None
    bits, chunks = weight.blocks.bits, list(weight.levels())
    restored = np.concatenate([restore_rows(pack_levels(*chunk[:3], bits), weight.shape[1], bits) for chunk in chunks])
    if weight.blocks.has_minima:
        restored += np.repeat(np.concatenate([chunk.offsets for chunk in chunks]), weight.blocks.size, axis=1)
    wanted = [tensor.read(torch.float32).numpy() for tensor in weight.tensors]
    assert len(chunks) > 2 and np.array_equal(restored, np.concatenate(wanted))


def test_weights_of_one_form_can_be_joined_whatever_their_kinds(write_gguf: WriteGguf) -> None:
    """Five and eight bits are held alike; blocks of 16 are not, nor floats, nor what is rounded."""
    query, value = (f"model.layers.0.self_attn.{name}_proj.weight" for name in "qv")

    def forms(kind: str, mixed: str) -> tuple[str | None, str | None, str | None]:
        file = FileBlocks(open_checkpoint(write_gguf(kind, mixed=mixed), "target").tensors)
        return file.form(query), file.form(value), file.form(f"{query} below {value}")

    assert forms("Q5_0", "Q8_0") == ("8 bits by 32",) * 3
    assert forms("Q4_K", "Q6_K") == ("4 bits by 32, offset", "8 bits by 16", None)
    assert forms("Q4_0", "F16") == ("4 bits by 32", "floats", None)
    assert forms("Q8_0", "MXFP4") == ("8 bits by 32", None, None)


def test_a_long_tensor_is_read_in_pieces(write_gguf: WriteGguf, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mirrorsd.export.weights.gguf_tensors.CHUNK_BYTES", 1000)
    tensor = open_checkpoint(write_gguf("Q4_1"), "target").tensors["model.layers.1.self_attn.k_proj.weight"]
    assert isinstance(tensor, GgufTensor)
    pieces = list(tensor.chunks(torch.float32))
    assert len(pieces) > 1 and torch.equal(torch.cat(pieces), tensor.read(torch.float32))


def test_training_gets_a_model_that_can_be_saved(write_gguf: WriteGguf, tmp_path: Path) -> None:
    file = write_gguf("Q8_0")
    load_whole(file).save_pretrained(tmp_path / "plain")
    wanted = open_checkpoint(file, "target").tensors
    for name, tensor in open_checkpoint(tmp_path / "plain", "draft").tensors.items():
        assert torch.equal(tensor.read(torch.float32), wanted[name].read(torch.float32))


def test_a_changed_file_is_read_again_and_what_training_left_stays(write_gguf: WriteGguf) -> None:
    first = open_checkpoint(write_gguf("Q4_0"), "target")
    (first.folder / "exit_adapters.safetensors").write_bytes(b"kept")
    again = open_checkpoint(write_gguf("Q4_0", context=128), "target")
    assert again.config["max_position_embeddings"] == 128
    assert (again.folder / "exit_adapters.safetensors").read_bytes() == b"kept"


def test_an_unknown_architecture_says_which(write_gguf: WriteGguf) -> None:
    words = (
        "architecture 'wavernn', which is not read from GGUF files; read are gemma2, .*, qwen3moe. Export the model's"
    )
    with pytest.raises(ExportError, match=words):
        open_checkpoint(write_gguf("Q4_0", architecture="wavernn"), "target")
    for group in ("general", "tokenizer"):
        with pytest.raises(ExportError, match=f"architecture '{group}', which is not read"):
            open_checkpoint(write_gguf("Q4_0", architecture=group), "target")


def test_the_page_names_the_architectures_that_are_read() -> None:
    """Families of ours that transformers reads: gpt-oss's files and those of SmolLM3 are refused."""
    page = (Path(__file__).resolve().parents[4] / "docs" / "models.md").read_text(encoding="utf-8")
    said = page.partition("GGUF files are read whose architecture is one of")[2].partition(". ")[0]
    assert re.findall(r"`(\w+)`", said) == readable_architectures()
    assert {"gpt-oss", "gptoss", "smollm3", "mistral", "falcon"}.isdisjoint(readable_architectures())


def test_a_family_that_is_not_supported_says_so(write_gguf: WriteGguf) -> None:
    with pytest.raises(ExportError, match="model_type 'stablelm', which is not supported"):
        open_checkpoint(write_gguf("Q4_0", architecture="stablelm"), "target")


def test_blocks_that_nobody_can_undo_are_named(write_gguf: WriteGguf) -> None:
    with pytest.raises(ExportError, match="as I32, which the gguf package cannot turn into floats"):
        open_checkpoint(write_gguf("Q4_0", stray=gguf.GGMLQuantizationType.I32), "target")


@pytest.mark.parametrize("damage", [lambda whole: whole[:-500], lambda whole: b"FUGG" + whole[4:], lambda whole: b""])
def test_a_damaged_file_is_refused(write_gguf: WriteGguf, damage: Callable[[bytes], bytes]) -> None:
    file = write_gguf("Q4_0")
    file.write_bytes(damage(file.read_bytes()))
    with pytest.raises(ExportError, match="cannot be read as a GGUF model"):
        open_checkpoint(file, "target")


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ExportError, match=r"none\.gguf does not exist"):
        open_checkpoint(tmp_path / "none.gguf", "target")
