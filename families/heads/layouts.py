"""Published heads in the layouts of other libraries than `speculators`, told in that library's words.

Read are EAGLE-3 as its authors and SpecForge write it, P-EAGLE and DSpark of SpecForge, and DFlash of its authors.
Such a folder is known by `architectures` in its config.json, which is that of the head's own layers.

Owns: what their entries and names of tensors mean. Does not own: what becomes of them (`published.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from mirrorsd.graphs.errors import ExportError

from .kind import KINDS

PUBLISHED_KIND = "speculators_model_type"
"""Entry of config.json that makes a folder a head in the format of `speculators`."""
_RENAMED = {"midlayer.": "layers.0.", "logit_head.": ""}
"""How names of tensors begin that have others here: EAGLE-3's only layer, and a wrapper of early DSpark heads."""
_REFUSED = {
    "DFlash2DraftModel": "the second DFlash chooses with convolutions and a head of its own",
    "DominoDraftModel": "Domino corrects its guesses by a recurrent network",
}
_COSTS_SPEED = "; take a head of a kind that docs/heads.md lists, or none: it changes no token, only speed"


def is_published(document: Mapping[str, Any]) -> bool:
    """Whether a config.json is that of a head that others published."""
    return PUBLISHED_KIND in document or _architecture(document) in {*_LAYOUTS, *_REFUSED}


def _architecture(document: Mapping[str, Any]) -> str:
    named = document.get("architectures")
    return str(named[0]) if isinstance(named, list) and named else ""


def in_words_of_speculators(
    published: Mapping[str, Any], tensors: Mapping[str, Tensor]
) -> tuple[Mapping[str, Any], dict[str, Tensor]]:
    """A head's config.json and its tensors by name, as `speculators` would have written them.

    Raises:
        ExportError: it has a part that heads here do not have; the message names it.
    """
    if PUBLISHED_KIND in published:
        return published, dict(tensors)
    name = _architecture(published)
    if name in _REFUSED:
        raise ExportError(f"the published head is a {name}: {_REFUSED[name]}, which is not read{_COSTS_SPEED}")
    layer = {entry: value for entry, value in published.items() if entry not in _OWN_ENTRIES}
    renamed: dict[str, Tensor] = {}
    for stored, tensor in tensors.items():
        prefix = next((begin for begin in _RENAMED if stored.startswith(begin)), "")
        renamed[_RENAMED.get(prefix, "") + stored.removeprefix(prefix)] = tensor
    return {"transformer_layer_config": layer, **_LAYOUTS[name](published)}, renamed


_OWN_ENTRIES = ("architectures", "auto_map", "eagle_config", "dflash_config", "quantization_config")


def _eagle3(published: Mapping[str, Any]) -> dict[str, Any]:
    """Taps are numbers of layers, from 0, whose output is read; how many tokens to guess is left to whoever runs it."""
    if not published.get("norm_output", True):
        raise ExportError(
            f"the published head sets norm_output to false: its output is read without a norm{_COSTS_SPEED}"
        )
    usual = KINDS["eagle3"].training
    assert usual is not None  # such heads are trained here, too
    return {
        PUBLISHED_KIND: "eagle3",
        "eagle_aux_hidden_state_layer_ids": _behind(
            (published.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids")
        ),
        "fc_norm": bool(published.get("fc_norm")),
        "target_hidden_size": published.get("target_hidden_size"),
        "speculators_config": {"proposal_methods": [{"speculative_tokens": usual.length}]},
    }


def _peagle(published: Mapping[str, Any]) -> dict[str, Any]:
    return {
        **_eagle3(published),
        PUBLISHED_KIND: "peagle",
        "mask_token_id": published.get("mask_token_id"),
        "norm_before_residual": bool(published.get("norm_before_residual")),
    }


def _dflash(published: Mapping[str, Any]) -> dict[str, Any]:
    own = published.get("dflash_config") or {}
    for entry, usual in (("shift_label", False), ("pure_draft_prefix_len", 0), ("input_embedding_scale", 1.0)):
        found = own.get(entry, published.get(entry, usual))
        if found != usual:
            raise ExportError(f"the published head has {entry} {found!r}; only {usual!r} can be read{_COSTS_SPEED}")
    if published.get("is_causal") or own.get("projector_type") not in (None, "dspark"):
        what = "is_causal true" if published.get("is_causal") else f"projector_type {own['projector_type']!r}"
        raise ExportError(f"the published head has {what}, which is not read{_COSTS_SPEED}")
    return {
        PUBLISHED_KIND: "dflash",
        "block_size": published.get("block_size"),
        "mask_token_id": own.get("mask_token_id", published.get("mask_token_id")),
        "aux_hidden_state_layer_ids": _behind(own.get("target_layer_ids") or _spread(published)),
        "sample_from_anchor": False,
    }


def _dspark(published: Mapping[str, Any]) -> dict[str, Any]:
    own = {**published, **(published.get("dflash_config") or {})}
    return {
        **_dflash(published),
        PUBLISHED_KIND: "dspark",
        "markov_rank": own.get("markov_rank", 0),
        "markov_head_type": own.get("markov_head_type", "vanilla"),
    }


def _behind(layers: Any) -> list[int] | None:
    """Numbers of layers, from 0, as how many layers were passed behind them."""
    return [int(layer) + 1 for layer in layers] if layers else None


def _spread(published: Mapping[str, Any]) -> list[int]:
    """DFlash's own choice where the config names no layers: as many as it has, from the second to the third last."""
    of_target, own = int(published["num_target_layers"]), int(published["num_hidden_layers"])
    if own == 1:
        return [of_target // 2]
    return [round(1 + number * (of_target - 4) / (own - 1)) for number in range(own)]


_LAYOUTS: Mapping[str, Callable[[Mapping[str, Any]], dict[str, Any]]] = {
    "LlamaForCausalLMEagle3": _eagle3,
    "PEagleDraftModel": _peagle,
    "DFlashDraftModel": _dflash,
    "DSparkDraftModel": _dspark,
}
