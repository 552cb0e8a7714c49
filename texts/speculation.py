"""How texts are to be speculated: a card's defaults, the caller's values on top; and whether a bundle can do it."""

from collections.abc import Collection, Mapping
from dataclasses import asdict, replace

from mirrorsd.device_maps import DeviceMap
from mirrorsd.graphs.errors import ConfigError
from mirrorsd.graphs.manifest import Manifest, TargetEntry
from mirrorsd.graphs.names import OWN_HEAD
from mirrorsd.texts.config import HEAD_METHODS, SpeculationConfig

Given = SpeculationConfig | Mapping[str, object]
"""How a caller says how to speculate: whole, or by the values that differ."""


def speculation_of(card: DeviceMap) -> SpeculationConfig:
    """The device map's defaults as a `SpeculationConfig`."""
    return SpeculationConfig(**asdict(card.speculation))


def resolve_speculation(defaults: SpeculationConfig, overrides: Given) -> SpeculationConfig:
    """The device map's defaults with the caller's values on top; a whole `SpeculationConfig` takes their place.

    Raises:
        ConfigError: unknown name, or a value out of its range.
    """
    if isinstance(overrides, SpeculationConfig):
        return overrides
    if not isinstance(overrides, Mapping):
        raise ConfigError(f"speculation is {overrides!r:.80}; allowed: a SpeculationConfig, or its values by name.")
    unknown = sorted(set(overrides) - set(SpeculationConfig.__dataclass_fields__))
    if unknown:
        allowed = ", ".join(SpeculationConfig.__dataclass_fields__)
        raise ConfigError(f"There is no speculation setting {unknown[0]!r}; there are {allowed}.")
    exits = overrides.get("exits")  # JSON knows no tuples
    given = {**overrides, "exits": tuple(exits)} if isinstance(exits, list) else overrides
    return replace(defaults, **given)  # type: ignore[arg-type]


def check_fits(speculation: SpeculationConfig, target: TargetEntry) -> None:
    """Refuse exits that a bundle does not have, and passes that its context does not hold.

    Raises:
        ConfigError: there is no exit after one of the layers, or `pad_rows_to` is more than the context.
    """
    if speculation.pad_rows_to > target.context:
        raise ConfigError(f"pad_rows_to is {speculation.pad_rows_to}; the bundle's context is {target.context}")
    present = [point.layer for point in target.exits]
    absent = [layer for layer in speculation.exits if layer not in present] if speculation.exits != "all" else []
    if absent:
        raise ConfigError(f"exits names layer {absent[0]}; this bundle has exits after layers {present}")


def check_head(method: str, manifest: Manifest, heads: Collection[str]) -> None:
    """Refuse a method whose head is not here; `heads` are the kinds that can run.

    Raises:
        ConfigError: the bundle has no such head, or the target's runtime runs none.
    """
    if method not in HEAD_METHODS or method in heads:
        return
    if any(head.kind == method for head in manifest.heads):
        raise ConfigError(
            f"method is {method!r}: its head runs on ONNX Runtime, beside a target that does. This device map's target "
            "runs on OpenVINO; choose another device map (`mirrorsd devices`) or method."
        )
    present = ", ".join(head.kind for head in manifest.heads) or "none"
    if method == OWN_HEAD:
        raise ConfigError(
            f"method is {method!r}; this bundle has no such head (it has: {present}). It comes with some checkpoints "
            "(`mtp.*` in their weights, as Qwen3.5's); this one's had none when it was exported."
        )
    raise ConfigError(
        f"method is {method!r}; this bundle has no such head (it has: {present}). Train one with `mirrorsd train head "
        f"--kind {method}`, and export the target again with `--head FOLDER`."
    )
