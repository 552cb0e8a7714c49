"""The head that a checkpoint brings along (multi-token prediction): which of its tensors are what.

A row joins the embedding of the token that follows with the target's state behind its final norm; one layer of the
target's own kind with attention reads it. The layer's output behind a norm is what the target's LM head reads, and the
next row's state. transformers leaves these tensors out, so their layout is written down here: that of Qwen3.5 (dense).

Owns: names, sizes, and norms that are stored as distances from one. Does not own: the network (`eagle3.py`), reading.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from mirrorsd.families.heads.config import FINAL, HeadConfig
from mirrorsd.families.heads.kind import HeadKind, add_kind
from mirrorsd.graphs.names import OWN_HEAD

from .eagle3 import Eagle3Network

PREFIX = "mtp."
"""How the names of its tensors begin."""
LENGTH = 4
"""Tokens that it is asked for, of which the policy cuts what is not worth its rows. It was trained to name one."""
_OWN_NAMES = {
    "fc.weight": "input_proj.weight",
    "pre_fc_norm_embedding.weight": "token_norm.weight",
    "pre_fc_norm_hidden.weight": "hidden_norm.weight",
}
_NORM = "norm.weight"


def mtp_config(target: Mapping[str, Any]) -> HeadConfig:
    """The head of a target by its completed config.json."""
    vocab_size, rope = int(target["vocab_size"]), dict(target["rope_parameters"])
    return HeadConfig(
        head_kind=OWN_HEAD,
        taps=(FINAL,),
        length=LENGTH,
        hidden_size=int(target["hidden_size"]),
        vocab_size=vocab_size,
        num_logits=vocab_size,
        num_layers=1,
        num_heads=int(target["num_attention_heads"]),
        num_kv_heads=int(target["num_key_value_heads"]),
        head_dim=int(target["head_dim"]),
        intermediate_size=int(target["intermediate_size"]),
        rms_norm_eps=float(target.get("rms_norm_eps", 1e-6)),
        rope={name: value for name, value in rope.items() if not name.startswith("mrope_")},
        max_positions=int(target["max_position_embeddings"]),
        qk_norm=True,
        attention_bias=bool(target.get("attention_bias", False)),
        attention_gate=True,
        joins="projection",
        feeds_norm=True,
    )


def mtp_names(stored: Collection[str]) -> dict[str, str]:
    """Names of the head's tensors by the stored ones.

    >>> mtp_names(["mtp.fc.weight", "mtp.layers.0.mlp.up_proj.weight", "lm_head.weight"])
    {'mtp.fc.weight': 'input_proj.weight', 'mtp.layers.0.mlp.up_proj.weight': 'layers.0.mlp.up_proj.weight'}
    """
    bare = {name: name.removeprefix(PREFIX) for name in stored if name.startswith(PREFIX)}
    return {name: _OWN_NAMES.get(short, short) for name, short in bare.items()}


def is_offset(name: str) -> bool:
    """Whether a tensor of the head is stored as its distance from one, as this family's norms are."""
    return name.endswith(_NORM)


add_kind(OWN_HEAD, HeadKind(network=Eagle3Network, training=None))
