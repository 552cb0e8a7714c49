"""What `mirrorsd tune` found, kept beside the bundle and used wherever the same machine runs the same bundle.

One small file per bundle and card. It holds speed settings only: using it, losing it or faking it changes no token.
"""

import hashlib
import json
import os
import platform
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any, Self

from mirrorsd.device_maps.card import APART, LAYOUTS
from mirrorsd.device_maps.pace import Curve, check_curve
from mirrorsd.graphs import names
from mirrorsd.graphs.errors import ConfigError
from mirrorsd.runtime.root_scores import RootScores

_PACKAGES = ("mirrorsd", "onnxruntime", "onnxruntime-gpu", "openvino")


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
        """Refuse root scores of another form, unknown layouts, and times that are none (`ValueError`)."""
        RootScores.from_dict(self.root_scores)
        if self.target_ms:
            object.__setattr__(self, "target_ms", tuple((float(rows), float(ms)) for rows, ms in self.target_ms))
            check_curve("target_ms", self.target_ms)
        if self.layout not in LAYOUTS:
            raise ValueError(f"layout is {self.layout!r}, expected one of {', '.join(LAYOUTS)}")

    def write(self, bundle: Path) -> Path:
        """Keep it beside the bundle, whole or not at all."""
        path = _place(bundle, self.card)
        scratch = path.with_suffix(".tmp")
        scratch.write_text(json.dumps(asdict(self), indent=2) + "\n", encoding="utf-8")
        os.replace(scratch, path)  # noqa: PTH105 - atomic on every system
        return path

    @classmethod
    def read(cls, bundle: Path, card: str) -> Self | None:
        """What was found for this card, if it fits this machine, these versions and this bundle.

        Raises:
            ConfigError: the file is damaged.
        """
        path = _place(bundle, card)
        if not path.is_file():
            return None
        try:
            tuned = cls(**json.loads(path.read_text(encoding="utf-8")))
        except (ValueError, TypeError, ConfigError) as error:
            raise ConfigError(f"{path} is damaged ({error}). Delete it, or run `mirrorsd tune` again.") from error
        return tuned if tuned.fingerprint == fingerprint(bundle) else None


def fingerprint(bundle: Path) -> str:
    """Hash of the processor, the number of cores, the runtimes' versions and the bundle's manifest."""
    parts = [platform.machine(), platform.processor(), str(os.cpu_count())]
    for package in _PACKAGES:
        try:
            parts.append(f"{package}={metadata.version(package)}")
        except metadata.PackageNotFoundError:
            continue
    digest = hashlib.sha256("|".join(parts).encode())
    digest.update((bundle / names.MANIFEST_FILE).read_bytes())
    return digest.hexdigest()[:16]


def _place(bundle: Path, card: str) -> Path:
    folder = bundle.resolve()
    return folder.parent / f".{folder.name}.tuned-{card}.json"
