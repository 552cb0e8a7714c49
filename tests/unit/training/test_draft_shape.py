"""Drafts that are made of some of a target's layers: what they share, what their head is, and their files."""

import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from transformers import LlamaConfig, LlamaForCausalLM, SmolLM3Config, SmolLM3ForCausalLM

from mirrorsd.families.low_rank_head import ReducedNorm
from mirrorsd.graphs.errors import ConfigError, ExportError
from mirrorsd.training.draft_shape import DraftHead, check_layers, draft_from_layers, draft_from_model
from mirrorsd.training.models.streaming_draft import StreamingDraft, StreamShape

CUT_DRAFT = Path(__file__).parents[3] / "samples" / "cut_draft.py"
HIDDEN = 32
STREAMS = StreamShape(2, 1, 4, 8)
IDS = torch.tensor([[5, 9, 1, 33, 7, 2]])


def tiny_target() -> Any:
    torch.manual_seed(4)
    config = LlamaConfig(
        vocab_size=50, hidden_size=HIDDEN, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2,
        head_dim=8, intermediate_size=48, tie_word_embeddings=True, max_position_embeddings=64, initializer_range=0.3,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


@torch.no_grad()
@pytest.mark.parametrize("head_rank", [0, HIDDEN])
def test_all_layers_and_a_full_rank_are_the_target(head_rank: int) -> None:
    target = tiny_target()
    draft = draft_from_layers(target, STREAMS, (0, 1, 2, 3), DraftHead(head_rank))
    said = draft.logits(draft(IDS, torch.tensor([2])).main)
    torch.testing.assert_close(said, target(IDS).logits, atol=1e-4, rtol=1e-4)


@torch.no_grad()
def test_layers_without_rope_stay_without_it(tmp_path: Path) -> None:
    """SmolLM3's layers 1 and 3 have none here; of a draft of 0, 3 and of 1, 2 it is the second, then the first."""
    sizes: Any = {
        "vocab_size": 50, "hidden_size": HIDDEN, "num_hidden_layers": 4, "num_attention_heads": 4,
        "num_key_value_heads": 2, "intermediate_size": 48, "no_rope_layer_interval": 2, "pad_token_id": 0,
    }  # fmt: skip
    target = SmolLM3ForCausalLM(SmolLM3Config(**sizes)).eval()
    for layers, has_rope in (((0, 3), [1, 0]), ((1, 2), [0, 1])):
        draft = draft_from_layers(target, STREAMS, layers, DraftHead(num_tokens=50))
        assert [layer.self_attn.use_rope for layer in draft.base.model.layers] == has_rope
        draft.save(tmp_path)
        again = StreamingDraft.load(tmp_path, target.get_input_embeddings().weight).base
        assert [layer.self_attn.use_rope for layer in again.model.layers] == has_rope
    target.save_pretrained(tmp_path / "target")
    runpy.run_path(str(CUT_DRAFT))["cut"](tmp_path / "target", tmp_path / "cut", 1, 1)
    assert SmolLM3Config.from_pretrained(tmp_path / "cut").no_rope_layers == [1, 0]


@torch.no_grad()
def test_a_lower_rank_keeps_the_main_directions_of_the_head() -> None:
    """No other head of that rank is nearer: the error is that of the singular values left out."""
    target = tiny_target()
    draft = draft_from_layers(target, STREAMS, (0, 3), DraftHead(12))
    norm = draft.base.model.norm
    assert isinstance(norm, ReducedNorm)
    error = target.lm_head.weight - draft.base.lm_head.weight @ norm.down.weight
    left_out = torch.linalg.svdvals(target.lm_head.weight)[12:]
    torch.testing.assert_close(error.norm(), left_out.norm(), atol=1e-4, rtol=1e-4)
    assert draft(IDS, torch.tensor([2])).streams.shape == (1, 1, 2, 12)


@torch.no_grad()
def test_a_head_of_fewer_tokens_says_the_same_of_the_first() -> None:
    target = tiny_target()
    draft = draft_from_layers(target, STREAMS, (0, 1, 2, 3), DraftHead(num_tokens=30))
    rows = draft(IDS, torch.tensor([2])).main
    torch.testing.assert_close(draft.logits(rows), target(IDS).logits[..., :30], atol=1e-4, rtol=1e-4)
    assert draft.head_rows(rows).head.shape == (30, HIDDEN)


@torch.no_grad()
@pytest.mark.parametrize("head", [DraftHead(12), DraftHead(), DraftHead(num_tokens=30)])
def test_the_shared_embedding_is_in_no_file_of_the_draft(head: DraftHead, tmp_path: Path) -> None:
    target = tiny_target()
    draft = draft_from_layers(target, STREAMS, (0, 2), head).eval()
    for weight in draft.parameters():
        weight.add_(0.01 * torch.randn_like(weight))
    draft.base.get_input_embeddings().weight.copy_(target.get_input_embeddings().weight)
    draft.save(tmp_path, dtype=torch.float32)
    with safe_open(tmp_path / "model.safetensors", framework="pt") as file:
        assert "model.embed_tokens.weight" not in set(file.keys())
        assert ("lm_head.weight" in set(file.keys())) == (head.rank > 0)
    embedding = target.get_input_embeddings().weight
    for again in (StreamingDraft.load(tmp_path, embedding), draft_from_model(tmp_path, STREAMS, embedding)):
        found, wanted = again(IDS, torch.tensor([3])), draft(IDS, torch.tensor([3]))
        torch.testing.assert_close(found.streams, wanted.streams)
        assert again.follow(found.main[0, 3], found.streams[0, 0], 33) == draft.follow(
            wanted.main[0, 3], wanted.streams[0, 0], 33
        )
    with pytest.raises(ExportError, match="a draft that shares an embedding needs its target"):
        StreamingDraft.load(tmp_path)


def test_an_embedding_that_is_trained_is_the_drafts_own(tmp_path: Path) -> None:
    draft = draft_from_layers(tiny_target(), STREAMS, (0, 2), DraftHead(12))
    draft.settle_embedding(is_trained=False)
    assert not draft.base.get_input_embeddings().weight.requires_grad
    draft.settle_embedding(is_trained=True)
    assert draft.base.get_input_embeddings().weight.requires_grad
    draft.save(tmp_path, dtype=torch.float32)
    StreamingDraft.load(tmp_path)


@pytest.mark.parametrize("layers", [(), (2, 1), (0, 4), (1, 1)])
def test_layers_that_are_not_there_are_refused(layers: tuple[int, ...]) -> None:
    with pytest.raises(ConfigError, match=r"numbers within 0\.\.3 in rising order"):
        check_layers(layers, 4, "llama")


def test_a_family_laid_out_otherwise_is_refused() -> None:
    with pytest.raises(ConfigError, match="this target's is gpt2"):
        check_layers((0, 1), 4, "gpt2")
