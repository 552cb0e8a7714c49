"""A tiny random Llama with its tokenizer, as a GGUF file in the blocks that a test asks for."""

from pathlib import Path

import gguf
import numpy as np
from gguf.quants import quantize
from tokenizers import pre_tokenizers

LAYERS, HIDDEN, FEED_FORWARD, HEADS, KV_HEADS = 2, 64, 96, 4, 2
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
VOCABULARY = [*SPECIAL, *ALPHABET, "ab", "ba"]


def write_file(
    path: Path,
    kind: str,
    *,
    architecture: str = "llama",
    context: int = 512,
    mixed: str | None = None,
    stray: gguf.GGMLQuantizationType | None = None,
    head: bool = False,
) -> Path:
    """Write the model with matrices as `kind` ("Q4_0"), values' ones as `mixed`.

    `stray` adds a tensor of that kind, `head` an output that is not the embedding.
    """
    writer = gguf.GGUFWriter(path, architecture)
    _write_sizes(writer, architecture, context)
    _write_tokenizer(writer)
    rng = np.random.default_rng(3)
    heads = {"output.weight": (len(VOCABULARY), HIDDEN)} if head else {}
    for name, shape in (_shapes() | heads).items():
        numbers = rng.standard_normal(shape, dtype=np.float32) * 0.15
        if len(shape) == 1:
            writer.add_tensor(name, 1 + numbers)
            continue
        chosen = gguf.GGMLQuantizationType[mixed if mixed and "attn_v" in name else kind]
        writer.add_tensor(name, quantize(numbers, chosen), raw_dtype=chosen)
    if stray is not None:
        writer.add_tensor("blk.0.stray", np.zeros((2, 32), np.int32), raw_dtype=stray)
    for step in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file, writer.close):
        step()
    return path


def _shapes() -> dict[str, tuple[int, ...]]:
    head = HIDDEN // HEADS
    layer = {
        "attn_norm": (HIDDEN,),
        "attn_q": (HEADS * head, HIDDEN),
        "attn_k": (KV_HEADS * head, HIDDEN),
        "attn_v": (KV_HEADS * head, HIDDEN),
        "attn_output": (HIDDEN, HEADS * head),
        "ffn_norm": (HIDDEN,),
        "ffn_gate": (FEED_FORWARD, HIDDEN),
        "ffn_up": (FEED_FORWARD, HIDDEN),
        "ffn_down": (HIDDEN, FEED_FORWARD),
    }
    layers = {f"blk.{n}.{name}.weight": shape for n in range(LAYERS) for name, shape in layer.items()}
    return {"token_embd.weight": (len(VOCABULARY), HIDDEN), "output_norm.weight": (HIDDEN,)} | layers


def _write_sizes(writer: gguf.GGUFWriter, architecture: str, context: int) -> None:
    writer.add_string("general.license", "apache-2.0")
    writer.add_block_count(LAYERS)
    writer.add_context_length(context)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(FEED_FORWARD)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_dimension_count(HIDDEN // HEADS)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(VOCABULARY))
    if architecture == "stablelm":
        writer.add_layer_norm_eps(1e-5)


def _write_tokenizer(writer: gguf.GGUFWriter) -> None:
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(VOCABULARY)
    writer.add_token_types([3] * len(SPECIAL) + [1] * (len(VOCABULARY) - len(SPECIAL)))
    writer.add_token_merges(["a b", "b a"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_chat_template("{{ messages[0]['content'] }}")
