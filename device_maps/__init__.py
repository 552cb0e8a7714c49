"""Where the parts of a bundle run: TOML cards, one per kind of machine, and their typed loader."""

from mirrorsd.device_maps.card import DeviceMap, DraftPlacement, ExitPlacement, SpeculationDefaults, TargetPlacement
from mirrorsd.device_maps.estimate import Estimate
from mirrorsd.device_maps.loading import builtin_names, load_device_map
from mirrorsd.device_maps.pace import Pace, interpolate

__all__ = [
    "DeviceMap",
    "DraftPlacement",
    "Estimate",
    "ExitPlacement",
    "Pace",
    "SpeculationDefaults",
    "TargetPlacement",
    "builtin_names",
    "interpolate",
    "load_device_map",
]
