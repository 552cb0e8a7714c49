"""Every supported family with each of its features on: what is set in the config of its random checkpoint."""

from dataclasses import dataclass, field
from typing import Any

CONTEXT = 256
LARGEST_INT8_ERROR, SMALLEST_INT8_AGREEMENT = 0.45, 0.9
"""Error of a logit in standard deviations of all logits, and share of equal best tokens, against the fp32 model.

Random weights of width 64 are the hardest case for 8 bits; the worst of the first twelve families has 0.36 and 0.915.
"""
ROTARY = {"rope_theta": 10000.0}
SCALED_ROPE = {
    **ROTARY,
    "rope_type": "llama3",
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 96,
}
GATED_DELTA = {
    "layer_types": ["linear_attention", "full_attention"],
    "head_dim": 64,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 48,
}
EXPERTS = {"num_experts": 16, "num_experts_per_tok": 8, "moe_intermediate_size": 48}


@dataclass(frozen=True)
class Case:
    family: str
    proved_with: str
    is_tied: bool
    sizes: dict[str, Any] = field(default_factory=dict)
    largest_error: float = LARGEST_INT8_ERROR
    least_agreement: float = SMALLEST_INT8_AGREEMENT


CASES = (
    Case("llama", "llama3 rope", True, {"rope_parameters": SCALED_ROPE}),
    Case(
        "qwen2",
        "a window of 60 from layer 1 on, dynamic rope",
        True,
        {
            "use_sliding_window": True,
            "sliding_window": 60,
            "max_window_layers": 1,
            "rope_parameters": {**ROTARY, "rope_type": "dynamic", "factor": 4.0},
        },
    ),
    Case("qwen3", "heads wider than the hidden size", False, {"head_dim": 32}),
    Case(
        "qwen3_5_text",
        "two value heads for a key head, values wider than keys",
        True,
        GATED_DELTA,
        largest_error=1.0,  # one row of 200: a norm over a head whose answer is next to nothing
    ),
    Case(
        "qwen3_moe",
        "16 experts, 8 of them for a row, every second layer dense",
        False,
        {"head_dim": 32, **EXPERTS, "norm_topk_prob": True, "mlp_only_layers": [1]},
        largest_error=0.8,  # where two experts are nearly as likely, rounding may choose the other one
    ),
    Case(
        "qwen3_5_moe_text",
        "16 experts, 8 of them for a row, and one for all; two value heads for a key head",
        True,
        {**GATED_DELTA, **EXPERTS, "shared_expert_intermediate_size": 64},
        largest_error=3.5,  # a few rows of 200: such a norm, and then other experts; 0.925 of the best tokens stay
    ),
    Case(
        "qwen3_next",
        "16 experts, 8 of them for a row, and one for all; two value heads for a key head; a dense layer",
        False,
        {
            **GATED_DELTA,
            **EXPERTS,
            "shared_expert_intermediate_size": 64,
            "mlp_only_layers": [1],
        },
        largest_error=3.5,
    ),
    Case(
        "qwen2_moe",
        "12 experts, 4 of them for a row, and one for all; every second layer dense",
        False,
        {
            "num_experts": 12,
            "num_experts_per_tok": 4,
            "moe_intermediate_size": 48,
            "shared_expert_intermediate_size": 64,
            "decoder_sparse_step": 2,
        },
        largest_error=0.8,
    ),
    Case(
        "olmoe",
        "12 experts, 3 of them for a row",
        True,
        {"num_experts": 12, "num_experts_per_tok": 3},
        largest_error=2.5,  # other experts, in both layers; 0.8 and 0.9 hold where the last is 0.3 of a spread surer
        least_agreement=0.85,
    ),
    Case(
        "gpt_oss",
        "12 experts, 4 of them for a row; sinks; a window of 48 in every other layer, yarn rope",
        False,
        {
            "head_dim": 32,
            "num_local_experts": 12,
            "num_experts_per_tok": 4,
            "intermediate_size": 64,
            "sliding_window": 48,
            "layer_types": ["sliding_attention", "full_attention"],
            "swiglu_limit": 0.5,
            "rope_parameters": {
                **ROTARY,
                "rope_type": "yarn",
                "factor": 4.0,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "truncate": False,
                "original_max_position_embeddings": 96,
            },
        },
        largest_error=0.8,
    ),
    Case(
        "lfm2",
        "convolutions of three rows with biases in two layers, attention between them",
        True,
        {
            "num_hidden_layers": 3,
            "full_attn_idxs": [1],
            "conv_bias": True,
            "block_multiple_of": 16,
            "block_ffn_dim_multiplier": 1.5,
        },
        largest_error=0.8,  # three factors of a convolution are rounded, and multiplied
        least_agreement=0.85,  # near ties: it diverges by 0.002 nats
    ),
    Case(
        "lfm3",
        "convolutions of seven rows, a window of 48 in one layer of attention, rope on half of each head in the other",
        False,
        {
            "num_hidden_layers": 4,
            "head_dim": 32,
            "sliding_window": 48,
            "layer_types": ["conv", "sliding_attention", "conv", "full_attention"],
        },
        largest_error=0.8,
        least_agreement=0.85,  # 0.003 nats
    ),
    Case("mistral", "a window of 50", False, {"sliding_window": 50}),
    Case(
        "ministral",
        "a window of 48 in every other layer",
        True,
        {"head_dim": 32, "sliding_window": 48, "layer_types": ["full_attention", "sliding_attention"]},
    ),
    Case("smollm3", "every other layer without rope", True, {"no_rope_layer_interval": 2}),
    Case(
        "granite",
        "all four multipliers",
        True,
        {"embedding_multiplier": 3.0, "residual_multiplier": 0.5, "attention_multiplier": 0.3, "logits_scaling": 2.0},
    ),
    Case("olmo2", "grouped heads", False),
    Case(
        "phi3",
        "long rope on half of each head, a window of 100",
        False,
        {
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "sliding_window": 100,
            "original_max_position_embeddings": CONTEXT,
            "rope_parameters": {
                **ROTARY,
                "rope_type": "longrope",
                "partial_rotary_factor": 0.5,
                "short_factor": [1.0 + 0.1 * i for i in range(8)],
                "long_factor": [2.0 + i for i in range(8)],
                "original_max_position_embeddings": CONTEXT,
            },
        },
    ),
    Case(
        "gemma2",
        "caps of 5 (attention) and 3 (logits), a window of 48 in every other layer",
        True,
        {
            "head_dim": 32,
            "sliding_window": 48,
            "attn_logit_softcapping": 5.0,
            "final_logit_softcapping": 3.0,
            "query_pre_attn_scalar": 20,
        },
    ),
    Case(
        "gemma3_text",
        "a window of 48 in every other layer, rope of its own in the others",
        True,
        {"head_dim": 32, "sliding_window": 48, "query_pre_attn_scalar": 20, "sliding_window_pattern": 2},
    ),
    Case("gpt2", "scores scaled by layer", True, {"num_key_value_heads": 4, "scale_attn_by_inverse_layer_idx": True}),
    Case("opt", "projections around the layers", True, {"num_key_value_heads": 4, "word_embed_proj_dim": 32}),
)
