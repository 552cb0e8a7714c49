"""Heads that others published, in the format of `speculators` (vLLM's training library), read as heads of ours.

Owns: which entries and tensors mean what, and what is refused. Does not own: files; other libraries' layouts
(`layouts.py`). No library itself is needed.

What a published head carries of its target (embedding, verifier's norm and head) is left out: here it is borrowed, but
for an embedding that was trained further. A confidence head changes no guess and is left out too. A Markov link chooses
among a shortlist (`choice.py`); one beside the target's LM head is stored with a copy of that.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import CONFIG_MAPPING

from mirrorsd.graphs.errors import ExportError

from .config import EMBEDDING, LM_HEAD, TOKEN_MAP, HeadConfig
from .layouts import PUBLISHED_KIND, in_words_of_speculators

_FAMILIES = ("llama", "qwen3")
_LEFT_OUT = ("t2d", "d2t", EMBEDDING, "verifier_norm.weight", "verifier_lm_head.weight")
_MTP_NAMES = {
    "hidden_layernorm.weight": "hidden_norm.weight",
    "token_layernorm.weight": "token_norm.weight",
    "final_layernorm.weight": "norm.weight",
    "input_proj.weight": "input_proj.weight",
}
_MARKOV = ("markov_head.markov_w1.weight", "markov_head.markov_w2.weight")


@dataclass(frozen=True, slots=True)
class PublishedHead:
    """A published head's config, and its own tensors by our names."""

    config: HeadConfig
    tensors: dict[str, Tensor]


def convert_head(
    published: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    num_target_layers: int,
    lm_head: Callable[[], Tensor] | None = None,
) -> PublishedHead:
    """Turn a published head into one of ours.

    Args:
        published: Its `config.json`.
        tensors: Its weights by their published names.
        num_target_layers: Layers of the target that it was made for; the usual taps follow from it.
        lm_head: Gives the target's LM head `[V, H]`, where that has to be copied.

    Raises:
        ExportError: It is of a kind, or has a part, that heads here do not have; the message names it.
    """
    published, tensors = in_words_of_speculators(published, tensors)
    kind = published.get(PUBLISHED_KIND)
    if kind not in _CONVERTERS:
        raise ExportError(
            f"the published head has {PUBLISHED_KIND} {kind!r}; those that can be read are {', '.join(_CONVERTERS)}"
        )
    layer = _layer_config(published)
    entries, own = _CONVERTERS[kind](published, layer, tensors, num_target_layers)
    if entries.get("link") == "markov" and LM_HEAD not in own and lm_head is not None:
        own[LM_HEAD] = lm_head()
    config = HeadConfig(**_sizes(layer), **_vocabulary(layer, own, entries), **entries)
    _take_map(tensors, own, config)
    left_out = [name for name in _LEFT_OUT if name != EMBEDDING or not config.own_embedding]
    return PublishedHead(config, {name: tensor for name, tensor in own.items() if name not in left_out})


def _layer_config(published: Mapping[str, Any]) -> Any:
    """The decoder layer's config with the family's defaults where nothing is said."""
    given = dict(published.get("transformer_layer_config") or {})
    family = given.get("model_type", "qwen3")
    if family not in _FAMILIES:
        raise ExportError(
            f"the published head's layers are of model_type {family!r}; those that can be read are "
            f"{' and '.join(_FAMILIES)}"
        )
    layer = CONFIG_MAPPING[family].from_dict(given)
    wider = published.get("target_hidden_size")
    if wider not in (None, layer.hidden_size):
        raise ExportError(
            f"the published head is {layer.hidden_size} wide and its target {wider}; here both must be the same"
        )
    if getattr(layer, "mlp_bias", False) or layer.hidden_act != "silu":
        raise ExportError(
            f"the published head's feed-forward part has hidden_act {layer.hidden_act!r} and "
            f"mlp_bias {getattr(layer, 'mlp_bias', False)}; only silu without a bias can be read"
        )
    window = getattr(layer, "sliding_window", None)
    has_window = "sliding_attention" in (getattr(layer, "layer_types", None) or ()) and window is not None
    if has_window and window < layer.max_position_embeddings:
        raise ExportError(f"the published head has layers with a sliding window of {window}, which is not supported")
    return layer


def _sizes(layer: Any) -> dict[str, Any]:
    rope = dict(layer.rope_parameters)
    return {
        "hidden_size": layer.hidden_size,
        "num_heads": layer.num_attention_heads,
        "num_kv_heads": layer.num_key_value_heads,
        "head_dim": layer.head_dim,
        "intermediate_size": layer.intermediate_size,
        "rms_norm_eps": layer.rms_norm_eps,
        "rope": rope.get("sliding_attention", rope),
        "max_positions": layer.max_position_embeddings,
        "attention_bias": bool(layer.attention_bias),
    }


def _vocabulary(layer: Any, own: dict[str, Tensor], entries: dict[str, Any]) -> dict[str, Any]:
    """The entries of a head over the vocabulary that is stored, or of the target's where none is."""
    if LM_HEAD not in own:
        return {"vocab_size": layer.vocab_size, "num_logits": layer.vocab_size, "vocabulary": "shared"}
    if entries.get("link") == "markov":
        own["table.weight"] = own.pop(_MARKOV[0])
        own[LM_HEAD] = torch.cat((own[LM_HEAD], own.pop(_MARKOV[1]).to(own[LM_HEAD].dtype)), dim=1)
    count = int(own[LM_HEAD].shape[0])
    kind = "own" if count == layer.vocab_size else "reduced"
    return {"vocab_size": layer.vocab_size, "num_logits": count, "vocabulary": kind}


def _take_map(tensors: Mapping[str, Tensor], own: dict[str, Tensor], config: HeadConfig) -> None:
    """Published maps say how far a token's id is from its number: number 3 with 40 is token 43."""
    if config.vocabulary != "reduced":
        return
    if "d2t" not in tensors:
        raise ExportError(
            f"the published head names {config.num_logits} of {config.vocab_size} tokens, and has no d2t to say which"
        )
    own[TOKEN_MAP] = torch.arange(config.num_logits) + tensors["d2t"].long()


def _num_guesses(published: Mapping[str, Any]) -> int:
    methods = (published.get("speculators_config") or {}).get("proposal_methods") or [{}]
    count = methods[0].get("speculative_tokens")
    if not count:
        raise ExportError("the published head's config does not say how many tokens it guesses (speculative_tokens)")
    return int(count)


def _taps(published: Mapping[str, Any], entry: str, num_target_layers: int) -> tuple[int, ...]:
    found = published.get(entry) or (2, num_target_layers // 2, num_target_layers - 3)
    return tuple(int(tap) for tap in found)


Converted = tuple[dict[str, Any], dict[str, Tensor]]


def _eagle3(published: Mapping[str, Any], layer: Any, tensors: dict[str, Tensor], num_target_layers: int) -> Converted:
    first = "layers.0.hidden_norm.weight"
    if first in tensors:
        tensors["hidden_norm.weight"] = tensors.pop(first)
    norm = "joined" if published.get("norm_before_fc") else "each" if published.get("fc_norm") else "none"
    entries = {
        "head_kind": "eagle3",
        "taps": _taps(published, "eagle_aux_hidden_state_layer_ids", num_target_layers),
        "length": _num_guesses(published),
        "num_layers": layer.num_hidden_layers,
        "tap_norm": norm,
        "norm_before_residual": bool(published.get("norm_before_residual")),
        "feeds_norm": bool(published.get("norm_output")),
        "qk_norm": layer.model_type == "qwen3",
        "own_embedding": bool(published.get("embed_requires_grad")) and EMBEDDING in tensors,
    }
    return entries, tensors


def _peagle(published: Mapping[str, Any], layer: Any, tensors: dict[str, Tensor], num_target_layers: int) -> Converted:
    """EAGLE-3 whose guesses are rows of one pass: an unknown token beside an unknown state."""
    if published.get("mask_token_id") is None:
        raise ExportError("the published head's config has no mask_token_id: what its unknown rows read is not known")
    entries, own = _eagle3(published, layer, tensors, num_target_layers)
    given = {"mask_token": int(published["mask_token_id"]), "own_embedding": EMBEDDING in own}
    return {**entries, **given}, own


def _dflash(published: Mapping[str, Any], layer: Any, tensors: dict[str, Tensor], num_target_layers: int) -> Converted:
    is_spark = published[PUBLISHED_KIND] == "dspark"
    samples_anchor = bool(published.get("sample_from_anchor", is_spark))
    if published.get("mask_token_id") is None:
        raise ExportError("the published head's config has no mask_token_id: what its unknown rows read is not known")
    entries: dict[str, Any] = {
        "head_kind": "block",
        "taps": _taps(published, "aux_hidden_state_layer_ids", num_target_layers),
        "length": int(published.get("block_size", 8)) - (0 if samples_anchor else 1),
        "num_layers": layer.num_hidden_layers,
        "mask_token": int(published["mask_token_id"]),
        "samples_anchor": samples_anchor,
        "qk_norm": True,
    }
    rank = int(published.get("markov_rank", 256)) if is_spark else 0
    if rank:
        kind = published.get("markov_head_type", "vanilla")
        if kind != "vanilla":
            raise ExportError(f"the published head's markov_head_type is {kind!r}; only 'vanilla' can be read")
        entries |= {"link": "markov", "link_rank": rank}
    return entries, {name: tensor for name, tensor in tensors.items() if not name.startswith("confidence_head.")}


def _mtp(published: Mapping[str, Any], layer: Any, tensors: dict[str, Tensor], num_target_layers: int) -> Converted:
    renamed: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        of_layer = name.removeprefix("mtp_layers.0.")
        if of_layer != name:
            renamed[_MTP_NAMES.get(of_layer, f"layers.0.{of_layer}")] = tensor
    entries = {
        "head_kind": "eagle3",
        "taps": (num_target_layers,),
        "length": _num_guesses(published),
        "num_layers": 1,
        "joins": "projection",
        "feeds_norm": True,
        "qk_norm": layer.model_type == "qwen3",
    }
    return entries, renamed


_CONVERTERS = {"eagle3": _eagle3, "peagle": _peagle, "dflash": _dflash, "dspark": _dflash, "mtp": _mtp}
