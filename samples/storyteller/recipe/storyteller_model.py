"""The storyteller's architecture and the target's training loss."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from story_tokenizer import SPECIAL_TOKENS, VOCABULARY_SIZE
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

EXIT_LAYER = 3
EXIT_WEIGHT = 0.3


def make_config(*, hidden: int = 384, layers: int = 6, heads: int = 6, intermediate: int = 896) -> LlamaConfig:
    """Return the configuration of the target; the draft is the same with smaller numbers."""
    return LlamaConfig(
        vocab_size=VOCABULARY_SIZE,
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=2,
        head_dim=64,
        intermediate_size=intermediate,
        tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        max_position_embeddings=1024,
        rms_norm_eps=1e-5,
        pad_token_id=SPECIAL_TOKENS.index("<|pad|>"),
        bos_token_id=SPECIAL_TOKENS.index("<|bos|>"),
        eos_token_id=SPECIAL_TOKENS.index("<|end|>"),
    )


def next_token_losses(model: LlamaForCausalLM, ids: Tensor, is_exit_trained: bool = True) -> tuple[Tensor, Tensor]:
    """Return the loss at the last layer and at the exit layer (the exit's on every second sequence).

    Args:
        model: The target.
        ids: `[B, S + 1]` token ids.
        is_exit_trained: Without it, no gradient flows from the exit.
    """
    inputs, labels = ids[:, :-1], ids[:, 1:]
    hidden = model.model.embed_tokens(inputs)
    rotary = model.model.rotary_emb(hidden, torch.arange(inputs.shape[1])[None])
    exit_loss = hidden.new_zeros(())
    for number, layer in enumerate(model.model.layers, start=1):
        hidden = layer(hidden, attention_mask=None, position_embeddings=rotary)
        if number == EXIT_LAYER:
            with torch.set_grad_enabled(is_exit_trained and torch.is_grad_enabled()):
                exit_loss = _head_loss(model, hidden[::2], labels[::2])
    return _head_loss(model, hidden, labels), exit_loss


def _head_loss(model: LlamaForCausalLM, hidden: Tensor, labels: Tensor) -> Tensor:
    logits = model.lm_head(model.model.norm(hidden)).float()
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())
