"""Training parts on every kind of family: batched text, streams and exits against Hugging Face's own forward."""

import copy
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from mirrorsd.families import parts_of
from mirrorsd.training.exit_adapter import exit_logits
from mirrorsd.training.models.attention import use_training_attention
from mirrorsd.training.models.streaming_draft import StreamingDraft
from mirrorsd.training.text.self_text import SelfTextConfig, generate_batch

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
}  # fmt: skip


@pytest.fixture(params=FAMILIES)
def model(request: pytest.FixtureRequest) -> Any:
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(request.param, **(SIZES | FAMILIES[request.param])))
    model.set_attn_implementation("eager")
    return model.eval()


@torch.no_grad()
def test_text_in_batches_is_the_models_own(model: Any) -> None:
    prompts = [[1, 9, 8], [1, 30, 31, 32, 33, 34]]
    expected = [prompt + greedy_tail(model, prompt, 9) for prompt in prompts]
    config = SelfTextConfig(ends=(2,), max_new_tokens=9)
    assert generate_batch(model, prompts, torch.zeros(2), config) == expected


def greedy_tail(model: Any, prompt: list[int], count: int) -> list[int]:
    text = list(prompt)
    while len(text) < len(prompt) + count and text[-1] != 2:
        text.append(int(model(torch.tensor([text]), use_cache=False).logits[0, -1].argmax()))
    return text[len(prompt) :]


@torch.no_grad()
def test_whole_forward_is_unchanged(model: Any) -> None:
    ids = torch.randint(0, 50, (2, 12))
    expected = model(ids).logits
    use_training_attention(model)
    torch.testing.assert_close(model(ids).logits, expected, atol=2e-5, rtol=1e-4)


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
def test_an_exit_after_the_last_layer_is_the_model(model: Any) -> None:
    seen: list[torch.Tensor] = []
    layers = parts_of(model).layers
    layers[-1].register_forward_hook(lambda module, given, out: seen.append(out[0] if isinstance(out, tuple) else out))
    layers[1].register_forward_hook(lambda module, given, out: seen.append(out[0] if isinstance(out, tuple) else out))
    outputs = model(torch.randint(0, 50, (1, 9)), output_hidden_states=True)
    torch.testing.assert_close(outputs.hidden_states[2], seen[0])
    torch.testing.assert_close(exit_logits(model, seen[1], None), outputs.logits, atol=1e-5, rtol=1e-5)
