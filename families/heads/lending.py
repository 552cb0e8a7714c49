"""What a head borrows of its target: embedding, LM head, and for streams the last layers and the final norm.

Owns: which of the target's parameters stands for which of the head's tensors, and whether they fit.
Does not own: which tensors a kind borrows (`HeadConfig.borrowed`), reading them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from mirrorsd.families.registry import parts_of
from mirrorsd.graphs.errors import ConfigError

from .config import EMBEDDING, LM_HEAD, HeadConfig
from .network import HeadNetwork

_LENDING = ("llama", "qwen3")
"""Families whose layers heads have (`layer.py`)."""


def check_lending(config: HeadConfig, target: Mapping[str, Any]) -> None:
    """Check that the last layers of a target, by its config.json, can be those of a head that borrows them.

    Raises:
        ConfigError: They are of another family, have another activation, or the head has other layers.
    """
    if not config.borrows_layers:
        return
    family, activation = target["model_type"], target.get("hidden_act", "silu")
    if family not in _LENDING or activation != "silu":
        raise ConfigError(
            f"a {config.head_kind} head passes its rows through the target's own last layers; those of {family} "
            f"({activation}) are not supported, only those of {' and '.join(_LENDING)} with silu: choose another kind"
            " of head"
        )
    last = int(target["num_hidden_layers"]) - 1
    if config.taps[-1] != last:
        raise ConfigError(
            f"the head's streams pass layers {config.taps[0]} to {config.taps[-1]} of a target, the last ones; this "
            f"target's last one is {last}: take the target that the head was trained on"
        )


def lenders(target: Any, config: HeadConfig) -> nn.ModuleList:
    """The modules of `target` that hold what a head of `config` borrows."""
    parts = parts_of(target)
    modules = [target.get_input_embeddings(), parts.lm_head]
    if config.borrows_layers:
        modules += [parts.norm, *parts.layers[int(config.taps[0]) :]]
    return nn.ModuleList(modules)


def lent_by(target: Any, network: HeadNetwork) -> dict[str, nn.Parameter]:
    """The parameters of `target` that a head borrows, by the head's names.

    Raises:
        ConfigError: They are not those that the head wants, or of other sizes.
    """
    config, parts = network.config, parts_of(target)
    given: dict[str, Any] = {}
    if config.borrows_layers:
        check_lending(config, target.config.to_dict())
        layers = enumerate(parts.layers[int(config.taps[0]) :])
        modules: dict[str, nn.Module] = {"norm": parts.norm, **{f"layers.{number}": layer for number, layer in layers}}
        given = {f"{at}.{name}": lent for at, module in modules.items() for name, lent in module.named_parameters()}
        odd = sorted(set(given) ^ (set(config.borrowed) - {LM_HEAD}))
        if odd:
            raise ConfigError(f"only one of head and target has {odd[0]}: the target cannot lend its last layers")
    given |= {EMBEDDING: target.get_input_embeddings().weight, LM_HEAD: parts.lm_head.weight}
    for name in config.borrowed:
        found, expected = list(given[name].shape), list(network.get_parameter(name).shape)
        if found != expected:
            raise ConfigError(
                f"the head wants the target's {name} to be {expected}, this target's is {found}: it was made for "
                "another target"
            )
    return {name: given[name] for name in config.borrowed}
