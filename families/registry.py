"""The families that are supported: one entry each, and what is refused before any work.

Owns: the registry and the checks on config.json. Does not own: loading weights, or how a family's parts are found
(`decoder_parts.py`), how far its positions reach (`positions.py`).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, TypeVar

from transformers import CONFIG_MAPPING
from transformers.utils.quantization_config import Mxfp4Config

from mirrorsd.graphs.contract import RecurrentShape

from .decoder_parts import (
    DecoderParts,
    gemma2_parts,
    gemma3_parts,
    general_parts,
    gpt2_parts,
    granite_parts,
    lfm2_parts,
    opt_parts,
    qwen3_5_parts,
)
from .experts import Mixture
from .gated_delta import gated_delta_shape
from .positions import rope_kinds
from .short_conv import short_conv_shape

Built = TypeVar("Built")

_MOST_WORDS = 400
"""Characters of an error of HF's: those of torch hold pages of its own calls."""
_ROPE_TYPES = ("default", "linear", "dynamic", "llama3", "yarn", "longrope", "proportional")
_ROPE_ADVICE = MappingProxyType(
    {
        "su": "write longrope there, which it is called today: transformers reads that alone",
        "None": "set the whole entry to null where nothing is scaled: transformers does not read a type that is null",
    }
)
_EXAMPLE_ROPE = '{"rope_type": "linear", "factor": 2.0}'
_STANDARD_NAMES = (
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "max_position_embeddings",
    "intermediate_size",
    "rope_parameters",
    "sliding_window",
    "layer_types",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """One family: its name in config.json, models that people know, and what it has beyond Llama.

    `recurrent` gives the sizes of layers with a recurrence, by HF's config; None where a family has none. `mixture`
    tells the weights of experts and routers, in families that have them. `refused` says, by name of a config entry,
    what an entry that is set stands for and why it stops the export. `unread` names entries that mean something in
    other families, and that the layers of this one overlook. `read_quantised` names the methods of rounded weights that
    are read, as the floats that they stand for. `renamed` has parts of weights' names in checkpoints, and what
    transformers calls them.
    """

    model_type: str
    models: str
    beyond: str
    parts: Callable[[Any], DecoderParts] = general_parts
    recurrent: Callable[[Any], RecurrentShape | None] | None = None
    mixture: Mixture | None = None
    refused: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    unread: tuple[str, ...] = ()
    read_quantised: tuple[str, ...] = ()
    renamed: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))

    def name_of(self, stored: str) -> str:
        """What transformers calls a weight that a checkpoint has under the name `stored`."""
        for part, name in self.renamed.items():
            stored = stored.replace(part, name)
        return stored


_WINDOW = ("sliding_window",)
_WINDOW_AND_HEADS = (*_WINDOW, "num_key_value_heads", "head_dim")
_BIDIRECTIONAL = MappingProxyType({"use_bidirectional_attention": "attention in both directions"})

_QWEN3_5 = Family(
    model_type="qwen3_5_text",
    models="Qwen3.5 (dense: 0.8B to 27B)",
    beyond="Gated DeltaNet in three layers of four, gated attention with rope on part of a head",
    parts=qwen3_5_parts,
    recurrent=gated_delta_shape,
)
_LFM2 = Family(
    model_type="lfm2",
    models="LFM2 and LFM2.5 (350M to 2.6B)",
    beyond="short convolutions in place of attention in most layers, norms of queries and keys per head",
    parts=lfm2_parts,
    recurrent=short_conv_shape,
)
FAMILIES: Mapping[str, Family] = {
    family.model_type: family
    for family in (
        Family(
            model_type="llama",
            models="Llama 2, 3, 3.1, 3.2; TinyLlama",
            beyond="scaled rotary positions",
            unread=_WINDOW,
        ),
        Family(model_type="qwen2", models="Qwen2, Qwen2.5", beyond="biases in attention"),
        Family(model_type="qwen3", models="Qwen3 (dense)", beyond="norms of queries and keys per head"),
        _QWEN3_5,
        Family(
            model_type="qwen3_moe",
            models="Qwen3-30B-A3B, Qwen3-Coder-30B-A3B, Qwen3-235B-A22B",
            beyond="mixtures of experts, in all layers or some; norms of queries and keys per head",
            mixture=Mixture(),
        ),
        replace(
            _QWEN3_5,
            model_type="qwen3_5_moe_text",
            models="Qwen3.5-35B-A3B, Qwen3.6-35B-A3B",
            beyond="layers of `qwen3_5_text`, with mixtures of experts and one expert that all rows share",
            mixture=Mixture(),
        ),
        replace(
            _QWEN3_5,
            model_type="qwen3_next",
            models="Qwen3-Next-80B-A3B, Qwen3-Coder-Next",
            beyond="layers of `qwen3_5_text` with joined projections, mixtures of experts as in `qwen3_5_moe_text`",
            mixture=Mixture(),
        ),
        Family(
            model_type="qwen2_moe",
            models="Qwen1.5-MoE-A2.7B, Qwen2-57B-A14B",
            beyond="mixtures of experts, one expert that all rows share, biases in attention",
            mixture=Mixture(),
            refused=MappingProxyType({"use_sliding_window": "a sliding window of this family"}),
        ),
        Family(
            model_type="olmoe",
            models="OLMoE-1B-7B",
            beyond="mixtures of experts, norms of whole queries and keys",
            mixture=Mixture(),
            refused=MappingProxyType({"clip_qkv": "clipping of queries, keys and values"}),
        ),
        Family(
            model_type="gpt_oss",
            models="gpt-oss-20b, gpt-oss-120b",
            beyond="mixtures of experts with biases and a clamped gate, attention with sinks and windows",
            mixture=Mixture(router=".mlp.router.weight", num_experts="num_local_experts", is_turned=True),
            read_quantised=("mxfp4",),
        ),
        _LFM2,
        replace(
            _LFM2,
            model_type="lfm3",
            models="LFM3-1.7B",
            beyond="layers of `lfm2` with longer convolutions, norms on both sides, gated heads, windows, two kinds of "
            "rotary positions",
            renamed=MappingProxyType({".self_attn.gate_proj.": ".self_attn.g_proj."}),
        ),
        Family(model_type="mistral", models="Mistral 7B", beyond="sliding window"),
        Family(model_type="ministral", models="Ministral 8B", beyond="a window in some layers"),
        Family(model_type="smollm3", models="SmolLM3", beyond="layers without rotary positions"),
        Family(
            model_type="granite",
            models="Granite 3 (dense)",
            beyond="four multipliers",
            parts=granite_parts,
            unread=_WINDOW,
        ),
        Family(
            model_type="olmo2",
            models="OLMo 2",
            beyond="norms after sub-layers, norms of whole queries and keys",
            unread=_WINDOW,
        ),
        Family(
            model_type="phi3",
            models="Phi-3, Phi-3.5-mini, Phi-4, Phi-4-mini",
            beyond="fused projections, rotary positions on part of a head, long rope up to its first length",
        ),
        Family(
            model_type="gemma2",
            models="Gemma 2",
            beyond="soft caps, every other layer with a window, scaled embedding, norms on both sides",
            parts=gemma2_parts,
            refused=_BIDIRECTIONAL,
        ),
        Family(
            model_type="gemma3_text",
            models="Gemma 3 270M, 1B",
            beyond="two kinds of rotary positions, windows, norms of queries and keys",
            parts=gemma3_parts,
            refused=_BIDIRECTIONAL,
        ),
        Family(
            model_type="gpt2",
            models="GPT-2, DistilGPT-2",
            beyond="learned positions, transposed weights",
            parts=gpt2_parts,
            refused=MappingProxyType({"add_cross_attention": "cross-attention"}),
            unread=_WINDOW_AND_HEADS,
        ),
        Family(
            model_type="opt",
            models="OPT",
            beyond="learned positions, norms before or after, projections around the layers",
            parts=opt_parts,
            unread=_WINDOW_AND_HEADS,
        ),
    )
}

_TEXT_PARTS = MappingProxyType({"qwen3_5": "qwen3_5_text", "qwen3_5_moe": "qwen3_5_moe_text"})
"""Of models that take images too, the family of their text part, which transformers loads alone as a causal LM."""
_ABOUT_THE_WHOLE = ("quantization_config", "transformers_weights", "configuration_files")
_OF_EITHER = ("bos_token_id", "eos_token_id", "pad_token_id")
"""Entries that the whole may have for its text part."""
BESIDE_THE_TEXT = ("model.visual.", "mtp.")
"""How the names of weights begin that transformers leaves out with them: what sees images, and heads of their own."""

_KNOWN_REASONS = MappingProxyType(
    {
        "gemma3": "it takes images too (the text-only checkpoints have model_type 'gemma3_text')",
        "mixtral": "its mixtures of experts are of another form than Qwen3's",
        "phimoe": "its mixtures of experts are of another form than Qwen3's",
        "granitemoe": "its mixtures of experts are of another form than Qwen3's",
        "mamba": "it has state-space layers of another kind than Gated DeltaNet",
        "mamba2": "it has state-space layers of another kind than Gated DeltaNet",
        "falcon_h1": "it has state-space layers of another kind than Gated DeltaNet",
        "lfm2_moe": "its routers choose experts by sigmoid scores with a bias",
        "gemma4": "it has inputs per layer, layers that share keys and values, and two head sizes",
        "gemma4_text": "it has inputs per layer, layers that share keys and values, and two head sizes",
        "gemma4_assistant": "it reads keys and values of Gemma 4's last layers, which is no head of a kind known here",
        "nemotron_h": "it has state-space layers of another kind than Gated DeltaNet",
        "bloom": "its positions are slopes on the attention scores (ALiBi)",
        "t5": "it is an encoder and a decoder",
    }
)


_GRANITE_4 = "granitemoehybrid"


def _reason_of_granite_4(config: Mapping[str, Any]) -> str:
    """Why a model of Granite 4 is refused: hybrids, mixtures and dense ones are one family of transformers."""
    kinds = config.get("layer_types") or config.get("layers_block_type") or ["mamba"]
    if "mamba" in kinds:
        return _KNOWN_REASONS["mamba2"]
    if config.get("num_local_experts"):
        return _KNOWN_REASONS["granitemoe"]
    return "its feed-forward parts (shared_mlp) are of another form than Granite 3's"


def parts_of(model: Any) -> DecoderParts:
    """The parts of a loaded HF causal LM of a supported family."""
    return FAMILIES[model.config.model_type].parts(model)


def loader_options(config: Mapping[str, Any]) -> dict[str, Any]:
    """What HF's loader is told so that it reads rounded weights of a method in `read_quantised` as floats."""
    return {"quantization_config": Mxfp4Config(dequantize=True)} if config.get("quantization_config") else {}


def recurrent_shape(config: Any) -> RecurrentShape | None:
    """Sizes of the recurrent layers of a model with this config of HF's; None where it has none."""
    find = FAMILIES[config.model_type].recurrent
    return None if find is None else find(config)


def text_part(config: Mapping[str, Any]) -> dict[str, Any]:
    """What a config.json says of the text model, as transformers takes it; of a model that takes images too, its part.

    A Mistral that tells its layers apart is a Ministral to transformers.

    >>> text_part({"model_type": "qwen3_5", "text_config": {"hidden_size": 64}, "vision_config": {}})
    {'hidden_size': 64, 'model_type': 'qwen3_5_text'}
    >>> text_part({"model_type": "llama", "sliding_window": 4096})
    {'model_type': 'llama'}
    """
    name, part = str(config.get("model_type")), config.get("text_config")
    if name == "mistral" and "layer_types" in config:
        return {**config, "model_type": "ministral"}
    if name not in _TEXT_PARTS or not isinstance(part, Mapping):
        unread = FAMILIES[name].unread if name in FAMILIES else ()
        return {entry: value for entry, value in config.items() if entry not in unread}
    about_all = {entry: config[entry] for entry in _ABOUT_THE_WHOLE if entry in config}
    lent = {entry: config[entry] for entry in _OF_EITHER if entry in config and part.get(entry) is None}
    return {**part, **about_all, **lent, "model_type": _TEXT_PARTS[name]}


def find_obstacle(config: Mapping[str, Any], *, is_draft: bool = False) -> str | None:
    """Say what in a config.json cannot be exported, as the end of "the target FOLDER ..."; None where all can."""
    name = str(config.get("model_type"))
    if name not in FAMILIES:
        known = _KNOWN_REASONS.get(name) if name != _GRANITE_4 else _reason_of_granite_4(config)
        reason = f": {known}" if known else ""
        return f"has model_type {name!r}, which is not supported{reason}; supported are {', '.join(FAMILIES)}"
    rounded = config.get("quantization_config")
    method = rounded.get("quant_method") if isinstance(rounded, Mapping) else None
    if rounded is not None and method not in FAMILIES[name].read_quantised:
        return "is already quantised; export the unquantised checkpoint instead"
    if is_draft and FAMILIES[name].recurrent is not None:
        return (
            f"has model_type {name!r}, whose recurrent layers hold one state for one text: a draft follows several at "
            "once. Such a model can be a target; as its draft take one with attention in all layers, or train one "
            "(`mirrorsd train draft`)"
        )
    if is_draft and FAMILIES[name].mixture is not None:
        return (
            f"has model_type {name!r}, a mixture of experts: each guess would read experts of its own, so it is no "
            "quick draft. Such a model can be a target; as its draft take a small dense one, or train one "
            "(`mirrorsd train draft`)"
        )
    if config.get("is_causal") is False:
        return "sets is_causal to false in config.json: attention in both directions is not supported"
    for entry, meaning in FAMILIES[name].refused.items():
        if config.get(entry):
            return f"sets {entry} in config.json: {meaning} is not supported"
    for entry in ("rope_scaling", "rope_parameters"):
        rope = config.get(entry) or {}
        if not isinstance(rope, Mapping):
            return f"has {entry} {rope!r} in config.json; expected a table such as {_EXAMPLE_ROPE}"
        for kind in rope_kinds(rope):
            if kind not in _ROPE_TYPES:
                known = f"supported are {', '.join(_ROPE_TYPES)}"
                return f"has in {entry} of config.json rope type {kind!r}; {_ROPE_ADVICE.get(kind, known)}"
    return None


def completed(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return config.json with every size under its usual name and HF's default where the file says nothing.

    Raises:
        ValueError: entries are of a wrong type or contradict each other; the message names them, in HF's words.
    """
    kind = CONFIG_MAPPING[config["model_type"]]
    filled = built_from(config, kind.from_dict)
    return {**config, **{name: getattr(filled, name, None) for name in _STANDARD_NAMES}}


def built_from(config: Mapping[str, Any], build: Callable[[dict[str, Any]], Built]) -> Built:
    """What HF's code builds from a config.json.

    Whatever that code raises is a fault of the entries: it takes them as they come, and any of them may be wrong.

    Raises:
        ValueError: HF's own words, and the entry without which it would be built, where there is one.
    """
    try:
        return build(dict(config))
    except Exception as error:
        reason = error_words(error)
        blamed = [name for name in config if name not in reason and _is_built_without(name, config, build)]
        place = f"{blamed[0]} is {config[blamed[0]]!r}: " if blamed else ""
        raise ValueError(f"{place}{type(error).__name__}: {reason}") from error


def error_words(error: Exception) -> str:
    """What another library's error says, on one line and not for pages.

    >>> error_words(ValueError("no  such   entry"))
    'no such entry'
    """
    return " ".join(str(error).split())[:_MOST_WORDS]


def _is_built_without(name: str, config: Mapping[str, Any], build: Callable[[dict[str, Any]], Built]) -> bool:
    if name == "model_type":
        return False
    try:
        build({entry: value for entry, value in config.items() if entry != name})
    except Exception:
        return False
    return True
