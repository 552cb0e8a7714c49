"""A head's folder: whom it was made for, what is refused, and heads that others published."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from random_heads import EAGLE3, MEDUSA, STREAMING, random_network, save_head
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

from mirrorsd.export.checkpoints.head import open_head, open_heads
from mirrorsd.families.heads import HeadConfig
from mirrorsd.graphs.errors import ConfigError, ExportError

SIZES = {"hidden_size": 64, "vocab_size": 300, "num_hidden_layers": 4, "model_type": "llama"}
TARGET: Any = SimpleNamespace(folder=Path("the-target"), config=SIZES, tensors={})
PUBLISHED = json.loads((Path(__file__).parents[2] / "families" / "published_heads.json").read_text(encoding="utf-8"))


def a_target(**sizes: int) -> LlamaForCausalLM:
    """A target of `SIZES`, with the layers that streams want."""
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 96}
    own = {name: size for name, size in SIZES.items() if name != "model_type"}
    return LlamaForCausalLM(LlamaConfig(**{**own, **heads, **sizes}))


def test_streams_borrow_the_targets_last_layers_and_store_none(tmp_path: Path) -> None:
    model, folder = a_target(), save_head(STREAMING, tmp_path / "head")
    of_adapters = {f"adapters.{place}.{part}.weight" for place in range(3) for part in ("norm", "down", "up")}
    assert set(load_file(folder / "model.safetensors")) == {"stream_embeddings", *of_adapters}
    network = open_head(folder, TARGET).network(model, torch.float32)
    for number, theirs in enumerate(model.model.layers[2:]):
        own = dict(network.layers[number].named_parameters())
        assert all(own[name] is weight for name, weight in theirs.named_parameters())
    assert network.norm.weight is model.model.norm.weight


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"num_hidden_layers": 6}, "pass layers 2 to 3 of a target, the last ones; this target's last one is 5"),
        ({"model_type": "gemma2"}, r"those of gemma2 \(silu\) are not supported, only those of llama and qwen3"),
        ({"hidden_act": "gelu"}, r"those of llama \(gelu\) are not supported"),
    ],
)
def test_a_target_that_cannot_lend_its_layers_is_refused(tmp_path: Path, config: dict[str, Any], words: str) -> None:
    target: Any = SimpleNamespace(folder=Path("the-target"), config={**SIZES, **config})
    with pytest.raises(ConfigError, match=words):
        open_head(save_head(STREAMING, tmp_path / "head"), target)


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        ({"attention_bias": True}, r"only one of head and target has layers\.0\.self_attn\.k_proj\.bias"),
        ({"intermediate_size": 100}, r"layers\.0\.mlp\.gate_proj\.weight to be \[96, 64\], .* is \[100, 64\]"),
    ],
)
def test_layers_of_other_sizes_are_not_borrowed(tmp_path: Path, sizes: dict[str, int], words: str) -> None:
    head = open_head(save_head(STREAMING, tmp_path / "head"), TARGET)
    with pytest.raises(ConfigError, match=words):
        head.network(a_target(**sizes), torch.float32)


def test_a_head_is_what_its_folder_says(tmp_path: Path) -> None:
    head = open_head(save_head(EAGLE3, tmp_path / "head"), TARGET)
    assert head.entry.kind == "eagle3"
    assert head.entry.file == "target/head-eagle3.onnx"
    assert head.shape.taps == (1, 2, 3)
    assert (head.shape.num_layers, head.shape.num_kv_heads, head.shape.head_dim) == (1, 2, 16)
    assert head.entry.num_tokens == 200
    assert open_head(save_head(MEDUSA, tmp_path / "other"), TARGET).shape.taps == (5,), "behind the final norm"


def test_a_head_says_how_long_it_was_trained(tmp_path: Path) -> None:
    folder = save_head(MEDUSA, tmp_path / "head")
    assert open_head(folder, TARGET).entry.source.training_seconds is None
    (folder / "training.json").write_text('{"seconds": 240.5, "counts": "core"}', encoding="utf-8")
    assert open_head(folder, TARGET).entry.source.training_seconds == 240.5
    (folder / "training.json").write_text('{"seconds": "long"}', encoding="utf-8")
    with pytest.raises(ExportError, match=r"training.json has seconds 'long'; expected a number"):
        _ = open_head(folder, TARGET).entry


def test_what_a_head_borrows_is_the_targets_own_parameter(tmp_path: Path) -> None:
    config = replace(EAGLE3, vocabulary="shared", num_logits=300)
    model = a_target()
    network = open_head(save_head(config, tmp_path / "head"), TARGET).network(model, torch.float32)
    assert network.embed_tokens.weight is model.model.embed_tokens.weight
    assert network.lm_head.weight is model.lm_head.weight
    own = random_network(config).state_dict()["fc.weight"]
    torch.testing.assert_close(network.state_dict()["fc.weight"], own)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (replace(MEDUSA, hidden_size=32), "a target with hidden_size 32; the-target has 64"),
        (replace(MEDUSA, vocab_size=301, num_logits=301), "a target with vocab_size 301; the-target has 300"),
        (replace(EAGLE3, taps=(1, 2, 9)), "after 9 layers; a target of 4 layers gives those after 1 to 4, and 'final'"),
        (replace(EAGLE3, taps=(0, 2, 3)), "after 0 layers"),
        (replace(MEDUSA, length=32), "guesses 32 tokens; a window has at most 31"),
    ],
)
def test_a_head_of_another_target_is_refused(tmp_path: Path, config: HeadConfig, words: str) -> None:
    with pytest.raises(ExportError, match=words):
        open_head(save_head(config, tmp_path / "head"), TARGET)


def test_two_heads_of_a_kind_are_refused(tmp_path: Path) -> None:
    folders = tuple(str(save_head(MEDUSA, tmp_path / name)) for name in "ab")
    with pytest.raises(ExportError, match="two heads are of the kind 'medusa'"):
        open_heads(folders, TARGET)


def test_damaged_folders_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"has no config\.json"):
        open_head(tmp_path, TARGET)
    folder = save_head(MEDUSA, tmp_path / "head")
    whole = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(whole[:-10])
    with pytest.raises(ExportError, match="is truncated"):
        open_head(folder, TARGET)
    (folder / "model.safetensors").unlink()
    with pytest.raises(ExportError, match=r"has no model\.safetensors: train it again"):
        open_head(folder, TARGET)
    save_file({"heads.0.0.linear.weight": torch.zeros(3, 3)}, folder / "model.safetensors")
    with pytest.raises(ExportError, match=r"do not belong together .*Missing key.*size mismatch for heads\.0\.0"):
        open_head(folder, TARGET).network(a_target(), torch.float32)


@pytest.mark.parametrize("case", PUBLISHED.values(), ids=PUBLISHED)
def test_a_published_head_is_read_from_its_folder(
    tmp_path: Path, case: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """How it guesses is tested beside the conversion; here, that files of that form become a head of this target."""
    (tmp_path / "config.json").write_text(json.dumps(case["config"]), encoding="utf-8")
    tensors = {name: torch.full(shape, 0.5) for name, shape in case["tensors"].items()}
    maps = {"d2t": torch.arange(20), "t2d": torch.arange(40) % 2 == 0} if case["has_d2t"] else {}
    save_file({**tensors, **maps}, tmp_path / "model.safetensors")
    layer = case["config"].get("transformer_layer_config", case["config"])
    lm_head = torch.zeros(layer["vocab_size"], layer["hidden_size"])
    monkeypatch.setattr("mirrorsd.export.checkpoints.head.lm_head_of", lambda target: lm_head)
    sizes = {"hidden_size": layer["hidden_size"], "vocab_size": layer["vocab_size"], "num_hidden_layers": 12}
    target: Any = SimpleNamespace(folder=Path("the-target"), config=sizes)
    head = open_head(tmp_path, target)
    network = head.network(a_target(**sizes), torch.float32)
    assert head.entry.kind == network.config.head_kind in ("eagle3", "block")
    assert max(head.shape.taps) <= 12


def test_a_head_of_the_hub_s_cache_says_where_it_comes_from(tmp_path: Path) -> None:
    folder = tmp_path / "models--owner--head" / "snapshots" / ("a" * 40)
    folder.parent.mkdir(parents=True)
    source = open_head(save_head(EAGLE3, folder), TARGET).entry.source
    assert (source.name, source.revision) == ("owner/head", "a" * 40)
