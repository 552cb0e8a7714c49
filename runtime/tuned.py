"""What `mirrorsd tune` found, kept in the user's cache and used wherever the same machine runs the same bundle.

One small file per bundle and card. It holds speed settings only: using it, losing it or faking it changes no token.
"""

import hashlib
import json
import logging
import os
import platform
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from importlib import metadata
from itertools import chain
from pathlib import Path
from typing import Any, Self

from mirrorsd.device_maps import DeviceMap
from mirrorsd.device_maps.card import APART, LAYOUTS
from mirrorsd.device_maps.pace import Curve, check_curve
from mirrorsd.graphs import names
from mirrorsd.graphs.documents import build, parse_json, read_text
from mirrorsd.graphs.errors import ConfigError
from mirrorsd.graphs.user_cache import folder_of
from mirrorsd.graphs.whole_file import write_whole
from mirrorsd.runtime.config import SpeculationConfig
from mirrorsd.runtime.devices.inventory import ONNX_PACKAGES
from mirrorsd.runtime.devices.layouts import processor_name
from mirrorsd.runtime.policy.roots import RootScores
from mirrorsd.runtime.setting_rules import require

_METHODS = ("mirror", "serial", "plain")
_LEAST, _MOST = 1e-3, 1e6
_DAMAGE = (ConfigError, OSError, ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError)
"""What reading a document of any content may raise."""
_log = logging.getLogger("mirrorsd")


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuned:
    """Speed settings that won on this machine.

    Attributes:
        card: name of the device map.
        fingerprint: of machine, versions and bundle; see `fingerprint`.
        layout: of the processor's cores; files without it were measured `apart`.
        speculation: values of `SpeculationConfig`, for greedy texts.
        predicted_step_ms: by the latency law, from the parts' times.
        measured_step_ms: in the run that won.
        tokens_per_second: best of each method in the same run; `auto` starts from them.
        tokens_per_step: of the same texts; 1 where nothing is said.
        target_ms: what the target's pass takes, exits left out, as `[rows, ms]` points; empty where nothing is said.
        root_scores: fitted to the pair, see `RootScores.to_dict`.
        sampled_speculation: as `speculation`, for sampled texts; empty if they were not measured.
        sampled_tokens_per_second: as `tokens_per_second`, for sampled texts.
        sampled_tokens_per_step: as `tokens_per_step`, for sampled texts.
    """

    card: str
    fingerprint: str
    speculation: dict[str, Any]
    predicted_step_ms: float
    measured_step_ms: float
    tokens_per_second: dict[str, float]
    root_scores: dict[str, Any] = field(default_factory=dict)
    target_ms: Curve = ()
    layout: str = APART
    sampled_speculation: dict[str, Any] = field(default_factory=dict)
    sampled_tokens_per_second: dict[str, float] = field(default_factory=dict)
    tokens_per_step: dict[str, float] = field(default_factory=dict)
    sampled_tokens_per_step: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Refuse what cannot have been measured, in words that name the field (`ConfigError`, `ValueError`)."""
        for name in ("predicted_step_ms", "measured_step_ms"):
            _check_range(name, getattr(self, name), 0.0, _MOST)
        for kind in ("", "sampled_"):
            _check_settings(f"{kind}speculation", getattr(self, f"{kind}speculation"))
            for name in (f"{kind}tokens_per_second", f"{kind}tokens_per_step"):
                for method, value in getattr(self, name).items():
                    require(method in _METHODS, "Tuned", name, method, ", ".join(_METHODS))
                    _check_range(f"{name}[{method}]", value, _LEAST, _MOST)
        for weights in RootScores.from_dict(self.root_scores).fitted.values():
            for value in chain(*weights):
                _check_range("root_scores", value, -_MOST, _MOST)
        if self.target_ms:
            object.__setattr__(self, "target_ms", tuple((float(rows), float(ms)) for rows, ms in self.target_ms))
            check_curve("target_ms", self.target_ms)
            for _, ms in self.target_ms:
                _check_range("target_ms", ms, 0.0, _MOST)
        require(self.layout in LAYOUTS, "Tuned", "layout", self.layout, ", ".join(LAYOUTS))

    def write(self, bundle: Path) -> Path:
        """Keep it, whole or not at all."""
        path = _place(bundle, self.card)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, (json.dumps(asdict(self), indent=2) + "\n").encode())
        return path

    @classmethod
    def read(cls, bundle: Path, card: DeviceMap) -> Self | None:
        """What was found for this card, if it fits this machine, its devices, these versions and this bundle.

        A file that is damaged is left out with a warning that says so: it holds nothing but speed.
        """
        path = _place(bundle, card.name)
        if not path.is_file():
            return None
        try:
            document = parse_json(read_text(path))
            return build(cls, document) if document["fingerprint"] == fingerprint(bundle, card) else None
        except _DAMAGE as error:
            _log.warning(
                "%s is damaged (%s: %s) and is not used: settings are those of device map %s. Delete the file, or run "
                "`mirrorsd tune` again.",
                *(path, type(error).__name__, error, card.name),
            )
            return None


def fingerprint(bundle: Path, card: DeviceMap) -> str:
    """Hash of the processor, its cores, the card's other devices, the runtimes' versions and the bundle's manifest."""
    parts = [platform.machine(), processor_name(), str(os.cpu_count())]
    if not (card.target.is_on_cpu and card.draft.is_on_cpu and card.exit.device == "target"):
        from mirrorsd.runtime.devices.hardware import device_names

        parts += device_names(card)
    for package in ("mirrorsd", *ONNX_PACKAGES, "openvino"):
        with suppress(metadata.PackageNotFoundError):
            parts.append(f"{package}={metadata.version(package)}")
    digest = hashlib.sha256("|".join(parts).encode())
    digest.update((bundle / names.MANIFEST_FILE).read_bytes())
    return digest.hexdigest()[:16]


def _check_range(name: str, value: Any, least: float, most: float) -> None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    require(is_number and least <= value <= most, "Tuned", name, value, f"{least:g} to {most:g}")


def _check_settings(name: str, values: dict[str, Any]) -> None:
    """Refuse what `SpeculationConfig` would."""
    known = SpeculationConfig.__slots__
    for setting in values:
        require(setting in known, "Tuned", name, setting, ", ".join(known))
    SpeculationConfig(**values)


def _place(bundle: Path, card: str) -> Path:
    return folder_of(bundle) / f"tuned-{card}.json"
