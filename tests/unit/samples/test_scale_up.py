"""Cost-scaling a checkpoint changes its price, never its logits."""

import importlib.util
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from mirrorsd.training.models.streaming_draft import StreamingDraft

SIZES = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def load_sample():
    path = Path(__file__).parents[3] / "samples" / "scale_up.py"
    spec = importlib.util.spec_from_file_location("scale_up", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("is_tied", [True, False])
@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize(("width", "depth"), [(3, 1), (1, 2), (2, 3)])
def test_logits_stay_the_same(tmp_path: Path, family: str, is_tied: bool, width: int, depth: int) -> None:
    torch.manual_seed(0)
    if family == "llama":
        model = LlamaForCausalLM(LlamaConfig(**SIZES, tie_word_embeddings=is_tied))
    else:
        model = Qwen3ForCausalLM(Qwen3Config(**SIZES, head_dim=16, tie_word_embeddings=is_tied))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, mean=1.0 if parameter.ndim == 1 else 0.0, std=0.2)
    model.save_pretrained(tmp_path / "small")
    adapters = {"layers.2.down.weight": torch.randn(4, 32), "layers.2.up.weight": torch.randn(32, 4)}
    save_file(adapters, tmp_path / "small" / "exit_adapters.safetensors")
    load_sample().scale_up(tmp_path / "small", tmp_path / "large", width, depth)
    large = AutoModelForCausalLM.from_pretrained(tmp_path / "large", dtype=torch.float32).eval()
    assert large.config.num_hidden_layers == 3 * depth
    ids = torch.randint(0, 97, (2, 20))
    with torch.no_grad():
        expected = model.eval()(ids, output_hidden_states=True)
        found = large(ids, output_hidden_states=True)
    torch.testing.assert_close(found.logits, expected.logits, atol=1e-4, rtol=0)
    moved = load_file(tmp_path / "large" / "exit_adapters.safetensors")
    wide = found.hidden_states[2 * depth] @ moved[f"layers.{2 * depth}.down.weight"].T
    narrow = expected.hidden_states[2] @ adapters["layers.2.down.weight"].T
    torch.testing.assert_close(wide, narrow, atol=1e-3, rtol=1e-4)
    assert moved[f"layers.{2 * depth}.up.weight"].shape == (32 * width, 4)


@pytest.mark.parametrize("stream_rank", [0, 4])
@pytest.mark.parametrize(("width", "depth"), [(3, 1), (2, 3)])
def test_streams_say_the_same(tmp_path: Path, stream_rank: int, width: int, depth: int) -> None:
    torch.manual_seed(0)
    streams = {"num_streams": 2, "num_stream_layers": 2, "stream_rank": stream_rank, "link_rank": stream_rank}
    draft = StreamingDraft(LlamaForCausalLM(LlamaConfig(**SIZES, tie_word_embeddings=True)), **streams)
    for parameter in draft.parameters():
        torch.nn.init.normal_(parameter, mean=1.0 if parameter.ndim == 1 else 0.0, std=0.2)
    draft.save(tmp_path / "small", dtype=torch.float32)
    load_sample().scale_up(tmp_path / "small", tmp_path / "large", width, depth)
    large = StreamingDraft.load(tmp_path / "large")
    ids, tips = torch.randint(0, 97, (1, 9)), torch.tensor([3, 8])
    last, earlier = torch.randint(0, 97, (2, 1, 2, 2))
    with torch.no_grad():
        expected, found = (one.logits(one.linked(one(ids, tips).streams, last, earlier)) for one in (draft, large))
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)
