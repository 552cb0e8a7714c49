"""Training parts on every kind of family: batched text, streams and exits against Hugging Face's own forward."""

import copy
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from mirrorsd.families import parts_of
from mirrorsd.graphs.errors import ConfigError
from mirrorsd.training.exit_adapter import exit_logits
from mirrorsd.training.models.attention import training_attention, use_training_attention
from mirrorsd.training.models.streaming_draft import StreamingDraft
from mirrorsd.training.text.self_text import BatchedDecoder, SelfTextConfig, generate_batch

ROWS, STREAMS, STREAM_LAYERS = 7, 3, 2
SIZES: dict[str, Any] = {
    "vocab_size": 50, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 48, "max_position_embeddings": 64, "initializer_range": 0.3, "bos_token_id": 1,
    "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"tie_word_embeddings": True},
    "qwen3": {"head_dim": 16},
    "mistral": {"sliding_window": 5},
    "ministral": {
        "head_dim": 16, "sliding_window": 5,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    },
    "smollm3": {"no_rope_layer_interval": 2},
    "granite": {"embedding_multiplier": 3.0, "attention_multiplier": 0.3, "logits_scaling": 2.0},
    "olmo2": {},
    "phi3": {},
    "gemma2": {
        "head_dim": 16, "sliding_window": 5, "attn_logit_softcapping": 5.0, "final_logit_softcapping": 3.0,
        "query_pre_attn_scalar": 20,
    },
    "gemma3_text": {"head_dim": 16, "sliding_window": 5, "sliding_window_pattern": 2},
    "gpt2": {"num_key_value_heads": 4},
    "opt": {"num_key_value_heads": 4, "word_embed_proj_dim": 16, "ffn_dim": 48},
    "qwen3_moe": {"head_dim": 16, "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24},
    "gpt_oss": {
        "head_dim": 16, "sliding_window": 5, "num_local_experts": 6, "num_experts_per_tok": 2,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    },
}  # fmt: skip
DELTA: dict[str, Any] = {
    "head_dim": 16, "layer_types": ["linear_attention", "linear_attention", "full_attention"],
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 12,
}  # fmt: skip
RECURRENT: dict[str, dict[str, Any]] = {
    "qwen3_5_text": DELTA,
    "qwen3_next": {
        **DELTA, "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24,
        "shared_expert_intermediate_size": 24,
    },
    "lfm2": {"full_attn_idxs": [1], "conv_bias": True, "block_multiple_of": 16},
    "lfm3": {
        "num_hidden_layers": 4, "head_dim": 16, "sliding_window": 5,
        "layer_types": ["conv", "sliding_attention", "conv", "full_attention"],
    },
}  # fmt: skip
"""Families whose layers have states: they are targets, never drafts with streams."""


def tiny(family: str) -> Any:
    torch.manual_seed(3)
    sizes = SIZES | (FAMILIES | RECURRENT)[family]
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **sizes))
    model.set_attn_implementation("eager")
    return model.eval()


@pytest.fixture(params=FAMILIES)
def model(request: pytest.FixtureRequest) -> Any:
    return tiny(request.param)


@pytest.fixture(params=[*FAMILIES, *RECURRENT])
def any_model(request: pytest.FixtureRequest) -> Any:
    return tiny(request.param)


@torch.no_grad()
def test_text_in_batches_is_the_models_own(any_model: Any) -> None:
    prompts = [[1, 9, 8], [1, 30, 31, 32, 33, 34], [1], [1, 7, 6, 5]]
    whole = [greedy_tail(any_model, prompt, 9) for prompt in prompts]
    end = whole[0][2]  # so that one text ends early, and is forgotten
    tails = [tail[: tail.index(end) + 1] if end in tail else tail for tail in whole]
    config = SelfTextConfig(ends=(end,), max_new_tokens=9)
    texts = generate_batch(any_model, prompts, torch.zeros(4), config)
    assert texts == [prompt + tail for prompt, tail in zip(prompts, tails, strict=True)]


def greedy_tail(model: Any, prompt: list[int], count: int) -> list[int]:
    """What transformers writes, without a cache of anything."""
    text = list(prompt)
    while len(text) < len(prompt) + count:
        text.append(int(model(torch.tensor([text]), use_cache=False).logits[0, -1].argmax()))
    return text[len(prompt) :]


@torch.no_grad()
def test_a_read_text_goes_on_in_copies(any_model: Any) -> None:
    ids, following = torch.tensor([[1, 9, 8, 30, 31, 32]]), torch.tensor([4, 5, 6])
    decoder = BatchedDecoder(any_model, 8)
    use_training_attention(any_model)
    decoder.feed(ids)
    decoder.keep(torch.zeros(3, dtype=torch.long))
    found = decoder.feed(following[:, None])
    any_model.set_attn_implementation("eager")
    whole = torch.cat((ids.expand(3, -1), following[:, None]), dim=1)
    torch.testing.assert_close(found, any_model(whole, use_cache=False).logits[:, -1], atol=2e-5, rtol=1e-4)


@torch.no_grad()
def test_whole_forward_is_unchanged(any_model: Any) -> None:
    ids = torch.randint(0, 50, (2, 12))
    expected = any_model(ids).logits
    use_training_attention(any_model)
    torch.testing.assert_close(any_model(ids).logits, expected, atol=2e-5, rtol=1e-4)


@torch.no_grad()
@pytest.mark.parametrize("asked", [{"position_bias": torch.zeros(1)}, {"is_causal": False}])
def test_attention_that_nobody_knows_is_refused(asked: dict[str, Any]) -> None:
    rows = torch.zeros(1, 2, 3, 8)
    with pytest.raises(ConfigError, match=f"Identity asks for attention with {next(iter(asked))}"):
        training_attention(torch.nn.Identity(), rows, rows, rows, None, **asked)


@torch.no_grad()
def test_streams_equal_extra_rows_behind_a_mask(model: Any) -> None:
    # With one tip row, stream j at position r + j sees rows 0..r and streams 1..j: exactly j further causal rows.
    for holder in (model.config, *model.modules()):  # a draft's window never ends within the context
        if getattr(holder, "sliding_window", None):
            holder.sliding_window = 64
    plain = copy.deepcopy(model)
    draft = StreamingDraft(model, num_streams=STREAMS, num_stream_layers=STREAM_LAYERS)
    draft.stream_embeddings.data.normal_()
    ids = torch.randint(0, 50, (2, ROWS))
    tips = torch.tensor([0, 2, 6])
    hidden = draft(ids, tips)
    for place, row in enumerate(tips.tolist()):
        expected = brute_force(plain, draft.stream_embeddings, ids[:, : row + 1])
        torch.testing.assert_close(hidden.streams[:, place], expected, atol=2e-5, rtol=1e-4)


def brute_force(plain: Any, embeddings: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Return the streams of the last row: they are further rows, run through HF's own layers."""
    parts = parts_of(plain)
    positions = torch.arange(ids.shape[1] + STREAMS)[None]
    hidden = parts.embed(ids, positions[:, : ids.shape[1]])
    for number, layer in enumerate(parts.layers):
        if number == len(parts.layers) - STREAM_LAYERS:
            hidden = torch.cat((hidden, hidden[:, -1:] + embeddings), dim=1)
        size = hidden.shape[1]
        mask = torch.full((size, size), float("-inf")).triu(1)[None, None]
        angles = parts.angles(hidden, positions[:, :size])[number]
        hidden = layer(hidden, attention_mask=mask, position_embeddings=angles, position_ids=positions[:, :size])
    return parts.norm(hidden)[:, ids.shape[1] :]


@torch.no_grad()
def test_an_exit_after_the_last_layer_is_the_model(any_model: Any) -> None:
    seen: list[torch.Tensor] = []
    layers = parts_of(any_model).layers
    layers[-1].register_forward_hook(lambda module, given, out: seen.append(out[0] if isinstance(out, tuple) else out))
    layers[1].register_forward_hook(lambda module, given, out: seen.append(out[0] if isinstance(out, tuple) else out))
    outputs = any_model(torch.randint(0, 50, (1, 9)), output_hidden_states=True)
    torch.testing.assert_close(outputs.hidden_states[2], seen[0])
    torch.testing.assert_close(exit_logits(any_model, seen[1], None), outputs.logits, atol=1e-5, rtol=1e-5)
