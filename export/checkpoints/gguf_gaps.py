"""What a GGUF file says of its model that transformers' reader does not take over: positions, windows, how text is cut.

Owns: the entries of config.json and the parts of tokenizer.json that follow from it. What is not known here is refused,
since a text would come out wrong without a word. The rules are llama.cpp's (`llama-model.cpp`, `llama-vocab.cpp`).
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Regex, decoders, normalizers, pre_tokenizers

from mirrorsd.graphs.errors import ExportError

_POSITIONS = ("rope_freqs.weight", "rope_factors_short.weight", "rope_factors_long.weight")
"""Tensors by which the angles of rotary positions are divided."""
_WIDTHS = {
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
    "attention.key_length": "head_dim",
    "context_length": "n_positions",
    "feed_forward_length": "n_inner",
}
"""Of experts, heads and GPT-2, by config.json's names; transformers takes its own defaults."""
_CAPS = ("attn_logit_softcapping", "final_logit_softcapping")
"""Of Gemma's scores and logits, with the names of config.json; here too transformers takes its defaults."""
_YARN = {"rope.scaling.yarn_beta_fast": "beta_fast", "rope.scaling.yarn_beta_slow": "beta_slow"}
"""Between how many turns positions are scaled by some, by config.json's names."""
_USUAL = {
    "rope.scaling.attn_factor": 1.0,
    "rope.scaling.yarn_attn_factor": 1.0,
    "rope.scaling.yarn_ext_factor": 1.0,
    "rope.scaling.yarn_log_multiplier": 0.0,
}
"""What else a file may say of YaRN, and what changes nothing."""
_SCALED_BY_WIDTH = {("gemma2", 46), ("gemma3_text", 62)}
"""Families and layers whose attention is scaled by the width of a head that the hidden size has, not by the head's."""
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_CUTS: Mapping[str, Sequence[str]] = {
    **dict.fromkeys(("gpt-2", "gpt2", "phi-2", "mpt", "olmo", "jina-es", "jina-de", "gigachat", "mellum"), (_GPT2,)),
    **dict.fromkeys(("a.x-4.0", "trillion", "granite-docling", "exaone4", "jina-v2-es", "jina-v2-de"), (_GPT2,)),
    **dict.fromkeys(
        ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"), (r"\p{N}", _GPT2)
    ),
    "deepseek-coder": (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+", r"\p{N}"),
}
"""By what texts are cut before merges, beside the ways that transformers knows."""
_NAMED_TEMPLATE = "tokenizer.chat_template."
_WHOLE_WORDS = ("llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2", "tekken")
"""Tokenizers whose words are looked up before they are merged; a token begins their texts, unless the file says no."""
_COMPOSED = ("qwen2", "qwen35")
"""Tokenizers that compose accents with their letters first."""
_ENDS = (
    *("<|endoftext|>", "<|end_of_text|>", "<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<end_of_turn>", "<|end|>"),
    *("<|return|>", "<|call|>", "<EOT>", "_<EOT>", "[EOT]", "<end_of_utterance>"),
    *("<|fim_pad|>", "<|repo_name|>", "<|file_sep|>"),
)
"""Tokens that end a text by what is written in them, since files name one or two of several."""
_OF_CHANNELS = {"<|return|>", "<|call|>"}
"""Beside these `<|end|>` ends a message of several, and no text (gpt-oss)."""


def ends_in(vocabulary: Mapping[str, int], num_tokens: int) -> list[int]:
    """The ids of tokens that llama.cpp ends a text at, beside those that a file names.

    Ids from `num_tokens` on are transformers' own additions.

    >>> ends_in({"<|endoftext|>": 0, "<|end|>": 1, "a": 2}, 3), ends_in({"<|end|>": 1, "<|return|>": 2, "<EOT>": 3}, 3)
    ([0, 1], [2])
    """
    passed = {"<|end|>"} if vocabulary.keys() & _OF_CHANNELS else set()
    found = [vocabulary[text] for text in _ENDS if text in vocabulary and text not in passed]
    return [token for token in found if token < num_tokens]


def complete_config(config: Any, file: Path, fields: Mapping[str, Any], tensors: Mapping[str, Any]) -> None:
    """Put into transformers' config what it has not read.

    Args:
        config: transformers' own, which is changed.
        file: for messages.
        fields: the file's values by name, as the `gguf` package has them.
        tensors: the file's tensors by name.

    Raises:
        ExportError: positions of a kind that is not known here.
    """
    given = {name.partition(".")[2]: field for name, field in fields.items()}

    def said(name: str, default: Any = None) -> Any:
        return given[name].contents() if name in given else default

    _complete_sizes(config, given)
    window = int(said("attention.sliding_window", 0))  # 0 is none, as in files of Phi-4
    if window and getattr(config, "sliding_window", window) is None:
        config.sliding_window = window
    if (config.model_type, config.num_hidden_layers) in _SCALED_BY_WIDTH:
        config.query_pre_attn_scalar = config.hidden_size // config.num_attention_heads
    elif hasattr(config, "query_pre_attn_scalar"):
        config.query_pre_attn_scalar = config.head_dim
    whole = getattr(config, "rope_parameters", None)
    if not whole:
        return
    if "rope.freq_base_swa" in given and "sliding_attention" in whole:
        whole["sliding_attention"]["rope_theta"] = float(said("rope.freq_base_swa"))
    rope = whole.get("full_attention", whole)  # where layers differ, those that see everything are scaled
    _complete_part(config, rope, file, said("rope.dimension_count"))
    factors = {name: tensors[name].data.astype(np.float64).ravel().tolist() for name in _POSITIONS if name in tensors}
    kind, factor = said("rope.scaling.type", "none"), float(said("rope.scaling.factor", said("rope.scale_linear", 1.0)))
    before = int(said("rope.scaling.original_context_length", config.max_position_embeddings))
    if len(factors) == 1:  # one set for all lengths
        (divisors,) = factors.values()
        rope.update(rope_type="longrope", short_factor=divisors, long_factor=divisors, attention_factor=1.0, factor=1.0)
        rope["original_max_position_embeddings"] = config.max_position_embeddings
    elif factors:
        short, long = (factors[name] for name in _POSITIONS[1:])
        rope.update(rope_type="longrope", short_factor=short, long_factor=long)
        rope["original_max_position_embeddings"] = before
        if "rope.scaling.attn_factor" in given:
            rope["attention_factor"] = float(said("rope.scaling.attn_factor"))
    elif kind in ("linear", "yarn") and factor != 1.0:
        if (rope.get("rope_type"), rope.get("factor")) == (kind, factor):
            return  # the family's own
        rope.update(rope_type=kind, factor=factor)
        if kind == "yarn":
            for name, usual in _USUAL.items():
                if float(said(name, usual)) not in (usual, -1.0):  # -1 leaves the choice to llama.cpp
                    raise ExportError(f"{file} has {name} {said(name)}, which is not read: export the model's folder")
            rope["original_max_position_embeddings"] = before
            rope.update({name: float(said(of_file)) for of_file, name in _YARN.items() if of_file in given})
    elif kind not in ("none", "linear", "yarn"):
        raise ExportError(f"{file} scales its positions by {kind!r}, which is not known: export the model's folder")


def _complete_sizes(config: Any, given: Mapping[str, Any]) -> None:
    """Widths, lengths and caps, where the config has a place for them; a padding that is no token is none."""
    for of_file, name in _WIDTHS.items():
        if of_file in given and hasattr(config, name):
            setattr(config, name, int(given[of_file].contents()))
    for name in _CAPS:
        if name in given and hasattr(config, name):
            setattr(config, name, float(given[name].contents()) or None)
    if (config.pad_token_id or 0) >= config.vocab_size:  # the family's default, in a file of fewer tokens
        config.pad_token_id = None


def _complete_part(config: Any, rope: dict[str, Any], file: Path, turned: Any) -> None:
    """How much of a head is turned, where the file says so."""
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    share = rope.get("partial_rotary_factor", getattr(config, "partial_rotary_factor", None))
    if turned is None or int(turned) == int(head * (1.0 if share is None else share)):
        return
    if share is None:
        raise ExportError(
            f"{file} turns {turned} of {head} numbers of a head, and the family {config.model_type} turns all: export "
            "the model's folder"
        )
    rope["partial_rotary_factor"] = int(turned) / head
    if hasattr(config, "partial_rotary_factor"):
        config.partial_rotary_factor = rope["partial_rotary_factor"]


def complete_tokenizer(tokenizer: Any, file: Path, fields: Mapping[str, Any]) -> None:
    """Have transformers' tokenizer cut texts as the file says, and have all of the file's chat templates.

    Raises:
        ExportError: texts are cut in a way that is not known here.
    """
    _add_templates(tokenizer, fields)
    from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

    given = {name: fields[f"tokenizer.ggml.{name}"].contents() for name in ("model", "pre") if _has(fields, name)}
    pre, backend = given.get("pre"), tokenizer.backend_tokenizer
    if _has(fields, "add_space_prefix") and not fields["tokenizer.ggml.add_space_prefix"].contents():
        _without_first_space(backend)
    if given.get("model") != "gpt2" or pre is None:
        return
    if pre in _CUTS:
        cuts = [pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in _CUTS[pre]]
        backend.pre_tokenizer = pre_tokenizers.Sequence(
            [*cuts, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
        )
    elif pre not in (*GGUF_PRE_TOKENIZER_SPLITS, "default"):
        raise ExportError(
            f"{file} cuts texts as {pre!r} does (tokenizer.ggml.pre), which is not known here: export the model's "
            "Hugging Face folder instead"
        )
    if pre in _COMPOSED:
        backend.normalizer = normalizers.NFC()
    if pre in _WHOLE_WORDS:
        backend.model.ignore_merges = True
        if not _has(fields, "add_bos_token"):
            tokenizer.add_bos_token = True


def _add_templates(tokenizer: Any, fields: Mapping[str, Any]) -> None:
    """Add the chat templates that have names (`tokenizer.chat_template.tool_use`) to the one that has none."""
    named = {
        name.removeprefix(_NAMED_TEMPLATE): field.contents()
        for name, field in fields.items()
        if name.startswith(_NAMED_TEMPLATE)
    }
    if named:
        default = {"default": tokenizer.chat_template} if isinstance(tokenizer.chat_template, str) else {}
        tokenizer.chat_template = default | named


def _without_first_space(backend: Any) -> None:
    """Begin no text with a space, and take none from the beginning of one, where the tokenizer does so."""
    if isinstance(backend.pre_tokenizer, pre_tokenizers.Metaspace):
        backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never", split=False)
        backend.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()])


def _has(fields: Mapping[str, Any], name: str) -> bool:
    return f"tokenizer.ggml.{name}" in fields


def check_all_read(file: Path, names: Sequence[str]) -> None:
    """Refuse tensors that nobody reads, but for positions and for what predicts further tokens.

    Raises:
        ExportError: there are some.
    """
    left = [name for name in names if name not in _POSITIONS and ".nextn." not in name and "attn_rot_embd" not in name]
    if left:
        raise ExportError(
            f"{file} holds {len(left)} tensors that its family has no place for, {left[0]!r} for one: without them the "
            "model would be another. Export its Hugging Face folder instead"
        )
