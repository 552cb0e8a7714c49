"""The export's own choice of tensors against transformers' loading of the same folder."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

from mirrorsd.export.checkpoints import checkpoint as checkpoints
from mirrorsd.export.checkpoints.checkpoint import Checkpoint, open_checkpoint
from mirrorsd.export.checkpoints.weightless import open_model
from mirrorsd.export.verify.original import compare_original
from mirrorsd.graphs.errors import ExportError, ParityError

SIZES = {"vocab_size": 40, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "eos_token_id": 0}
HEADS = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16}
IDS = np.array([3, 7, 1, 9, 39, 12])


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def folder(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    torch.manual_seed(3)
    LlamaForCausalLM(LlamaConfig(**SIZES, **HEADS)).to(request.param).save_pretrained(tmp_path)
    return tmp_path


@pytest.fixture(params=["logits", "tensors"])
def compared(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """How far is compared, where a model fits in memory as a whole and where none does."""
    if request.param == "tensors":
        monkeypatch.setattr(checkpoints, "WHOLE_BYTES", 0)
    return str(request.param)


def with_wrong_tensor(found: Checkpoint, name: str, other: str) -> Checkpoint:
    """The checkpoint as a fault of ours would read it: a tensor of the right shape, and the wrong one."""
    return replace(found, tensors={**found.tensors, name: found.tensors[other]})


def test_a_checkpoint_that_is_read_rightly_is_accepted(folder: Path, compared: str) -> None:
    found = open_checkpoint(folder, "target")
    assert compare_original(found, open_model(found), IDS).compared == compared


@pytest.mark.parametrize(
    ("name", "other"),
    [
        ("lm_head.weight", "model.embed_tokens.weight"),
        ("model.layers.0.mlp.up_proj.weight", "model.layers.1.mlp.up_proj.weight"),
        ("model.embed_tokens.weight", "lm_head.weight"),
    ],
)
def test_a_wrong_tensor_is_refused(folder: Path, compared: str, name: str, other: str) -> None:
    found = with_wrong_tensor(open_checkpoint(folder, "draft"), name, other)
    with pytest.raises(ParityError, match=f"has other numbers for {name!r} in transformers than those that were read"):
        compare_original(found, open_model(found), IDS)


def test_one_bit_of_one_tensor_is_seen(folder: Path, compared: str, tmp_path: Path) -> None:
    """Another file than the folder's, as a wrong precedence would take it."""
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.1.mlp.down_proj.weight"].view(torch.uint8)[-1, -1] ^= 1
    (tmp_path / "old").mkdir()
    save_file(tensors, tmp_path / "old" / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "old" / "config.json").write_bytes((folder / "config.json").read_bytes())
    right, wrong = (open_checkpoint(place, "target") for place in (folder, tmp_path / "old"))
    with pytest.raises(ParityError, match=r"other numbers for 'model\.layers\.1\.mlp\.down_proj\.weight'"):
        compare_original(right, open_model(replace(right, tensors=wrong.tensors)), IDS)


def test_other_logits_are_refused(folder: Path) -> None:
    """The same tensors in a network that computes something else."""
    found = open_checkpoint(folder, "target")
    model = open_model(found)
    model.network.model.norm.variance_epsilon = 1.0
    with pytest.raises(ParityError, match="stage 'original' is not what PyTorch computes"):
        compare_original(found, model, IDS)


def test_ids_that_the_model_lacks_are_left_out(folder: Path) -> None:
    found = open_checkpoint(folder, "draft")
    assert compare_original(found, open_model(found), np.array([3, 45, 7])).compared == "logits"


def test_a_network_that_cannot_be_run_is_refused_by_the_entry(folder: Path) -> None:
    config = (folder / "config.json").read_text()
    (folder / "config.json").write_text(config.replace("{", '{"return_dict": false,', 1))
    found = open_checkpoint(folder, "target")
    with pytest.raises(
        ExportError, match=r"config\.json describes cannot be run by transformers: return_dict is False"
    ):
        open_model(found).logits(IDS[None])


def test_a_gguf_file_is_compared_too(write_gguf: Callable[..., Path]) -> None:
    found = open_checkpoint(write_gguf("Q4_1"), "target")
    assert compare_original(found, open_model(found), IDS).compared == "logits"


def test_a_gguf_file_that_does_not_fit_is_not_compared(
    write_gguf: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoints, "WHOLE_BYTES", 0)
    found = open_checkpoint(write_gguf("Q4_1"), "target")
    assert compare_original(found, open_model(found), IDS).compared == ""
