"""A tiny random Llama or mixture with its tokenizer, as a GGUF file in the blocks that a test asks for."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
from gguf.constants import GGML_QUANT_SIZES
from gguf.quants import quantize
from tokenizers import pre_tokenizers

Array = npt.NDArray[Any]

LAYERS, HIDDEN, FEED_FORWARD, HEADS, KV_HEADS = 2, 64, 96, 4, 2
EXPERTS, ACTIVE, EXPERT_WIDTH = 6, 3, 768
"""Of a file that is a Qwen3 mixture; transformers knows no other width of an expert."""
MIXTURE = "qwen3moe"
WIDE = 256
"""What widths are multiples of where 256 weights make a block."""
SCALE_PLACES = {
    "Q4_0": {0: 0.02},
    "Q4_1": {0: 0.02, 2: -0.15},
    "Q5_0": {0: 0.01},
    "Q5_1": {0: 0.01, 2: -0.15},
    "Q8_0": {0: 0.001},
    "Q2_K": {80: 0.01, 82: 0.015},
    "Q3_K": {108: 0.001},
    "Q4_K": {0: 0.0003, 2: 0.0024},
    "Q5_K": {0: 0.00015, 2: 0.0024},
    "Q6_K": {208: 0.0001},
    "IQ4_NL": {0: 0.0015},
    "IQ4_XS": {0: 0.0001},
}
"""Where a block's 16-bit floats lie, by kind, and what gives weights of about 0.1."""
SPECIAL = ["<|padding|>", "<|im_start|>", "<|im_end|>"]
ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
VOCABULARY = [*SPECIAL, *ALPHABET, "ab", "ba"]


def write_file(
    path: Path,
    kind: str,
    *,
    architecture: str = "llama",
    context: int = 512,
    mixed: str | None = None,
    head: str | None = None,
    output: str | None = None,
    down: str | None = None,
    up: str | None = None,
    stray: gguf.GGMLQuantizationType | None = None,
    sampling: Mapping[str, float] | None = None,
    pre: str = "smollm",
    more: Mapping[str, float | str | bool] | None = None,
    floats: Mapping[str, Array] | None = None,
) -> Path:
    """Write the model with matrices as `kind` ("Q4_0"), values' ones as `mixed`; `stray` adds a tensor of that kind.

    `more` are values, and `floats` tensors as they are, that few files have.
    With `head`, the LM head is a matrix of its own, in that kind; `output` is that of attention, `down` and `up` those
    of feed-forward parts.
    """
    writer = gguf.GGUFWriter(path, architecture)
    sizes = [
        GGML_QUANT_SIZES[gguf.GGMLQuantizationType[name]][0] for name in (kind, mixed, head, output, down, up) if name
    ]
    width = WIDE if WIDE in sizes else HIDDEN
    _write_sizes(writer, architecture, context, width)
    write_tokenizer(writer, pre)
    for name, value in (sampling or {}).items():
        writer.add_float32(f"general.sampling.{name}", value)
    for name, given in (more or {}).items():
        add = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
        add[type(given)](name, given)  # type: ignore[operator]
    for name, numbers in (floats or {}).items():
        writer.add_tensor(name, numbers)
    rng = np.random.default_rng(3)
    for name, shape in _shapes(width, has_head=head is not None, is_mixture=architecture == MIXTURE).items():
        numbers = rng.standard_normal(shape, dtype=np.float32) * 0.15
        if len(shape) == 1:
            writer.add_tensor(name, 1 + numbers)
            continue
        if "gate_inp" in name:
            writer.add_tensor(name, numbers)
            continue
        of_part = {"attn_v": mixed, "attn_output": output, "output.weight": head, "ffn_down": down, "ffn_up": up}
        chosen = next((part for place, part in of_part.items() if place in name), None) or kind
        blocks = blocks_of(numbers.reshape(-1, shape[-1]), chosen, rng)
        blocks = blocks.reshape(*shape[:-1], blocks.shape[-1])
        writer.add_tensor(name, blocks, raw_dtype=gguf.GGMLQuantizationType[chosen])
    if stray is not None:
        writer.add_tensor("blk.0.stray", np.zeros((2, 32), np.int32), raw_dtype=stray)
    for step in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file, writer.close):
        step()
    return path


def blocks_of(numbers: Array, kind: str, rng: np.random.Generator) -> Array:
    """`numbers` `[n, K]` in blocks; random ones where the `gguf` package makes none of that kind."""
    chosen = gguf.GGMLQuantizationType[kind]
    if "K" not in kind and "IQ" not in kind:
        return quantize(numbers, chosen)
    return random_blocks(numbers.shape, kind, rng).reshape(len(numbers), -1)


def random_blocks(shape: tuple[int, ...], kind: str, rng: np.random.Generator, spread: float = 0.0) -> Array:
    """Bytes `[n, S, b]` of any blocks for weights `[n, K]`; `spread` are powers of two that scales differ by."""
    size, num_bytes = GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    by_block = (shape[0], shape[1] // size)
    raw = rng.integers(0, 256, (*by_block, num_bytes), dtype=np.uint8)
    for place, typical in SCALE_PLACES[kind].items():
        factors = (0.5 + rng.random((*by_block, 1))) * 2.0 ** rng.uniform(-spread, spread, (*by_block, 1))
        raw[..., place : place + 2] = (typical * factors).astype(np.float16).view(np.uint8)
    return raw


def _shapes(width: int, *, has_head: bool, is_mixture: bool) -> dict[str, tuple[int, ...]]:
    head, feed_forward = width // HEADS, FEED_FORWARD if width == HIDDEN else 2 * width
    layer = {
        "attn_norm": (width,),
        "attn_q": (HEADS * head, width),
        "attn_k": (KV_HEADS * head, width),
        "attn_v": (KV_HEADS * head, width),
        "attn_output": (width, HEADS * head),
        "ffn_norm": (width,),
        "ffn_gate": (feed_forward, width),
        "ffn_up": (feed_forward, width),
        "ffn_down": (width, feed_forward),
    }
    if is_mixture:
        layer = {name: shape for name, shape in layer.items() if name not in ("ffn_gate", "ffn_up", "ffn_down")}
        layer |= {"attn_q_norm": (head,), "attn_k_norm": (head,), "ffn_gate_inp": (EXPERTS, width)}
        layer |= {f"ffn_{name}_exps": (EXPERTS, EXPERT_WIDTH, width) for name in ("gate", "up")}
        layer["ffn_down_exps"] = (EXPERTS, width, EXPERT_WIDTH)
    layers = {f"blk.{n}.{name}.weight": shape for n in range(LAYERS) for name, shape in layer.items()}
    ends = {"token_embd.weight": (len(VOCABULARY), width), "output_norm.weight": (width,)}
    return ends | ({"output.weight": (len(VOCABULARY), width)} if has_head else {}) | layers


def _write_sizes(writer: gguf.GGUFWriter, architecture: str, context: int, width: int) -> None:
    writer.add_string("general.license", "apache-2.0")
    writer.add_block_count(LAYERS)
    writer.add_context_length(context)
    writer.add_embedding_length(width)
    writer.add_feed_forward_length(FEED_FORWARD if width == HIDDEN else 2 * width)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_dimension_count(width // HEADS)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(VOCABULARY))
    if architecture == MIXTURE:
        writer.add_expert_count(EXPERTS)
        writer.add_expert_used_count(ACTIVE)
        writer.add_expert_feed_forward_length(EXPERT_WIDTH)
        writer.add_key_length(width // HEADS)
    if architecture == "stablelm":
        writer.add_layer_norm_eps(1e-5)


def write_tokenizer(writer: gguf.GGUFWriter, pre: str) -> None:
    """Write a tokenizer of single bytes and two merges, which cuts texts as `pre` does."""
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(VOCABULARY)
    writer.add_token_types([3] * len(SPECIAL) + [1] * (len(VOCABULARY) - len(SPECIAL)))
    writer.add_token_merges(["a b", "b a"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_chat_template("{{ messages[0]['content'] }}")
