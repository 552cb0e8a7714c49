"""What `mirrorsd tune` found and what texts have taught, kept in the user's cache for the same machine and bundle.

One small file per bundle and card. It holds numbers about speed only, no text and no token of one: using it, losing it
or faking it changes no token.
"""

import hashlib
import json
import logging
import os
import platform
import threading
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from importlib import metadata
from itertools import chain
from pathlib import Path
from time import perf_counter
from typing import Any, Self

from mirrorsd.device_maps import DeviceMap
from mirrorsd.device_maps.card import APART, LAYOUTS
from mirrorsd.device_maps.pace import Curve, check_curve
from mirrorsd.devices.layouts import processor_name
from mirrorsd.graphs import names
from mirrorsd.graphs.documents import build, parse_json, read_text
from mirrorsd.graphs.errors import ConfigError
from mirrorsd.graphs.user_cache import folder_of
from mirrorsd.graphs.whole_file import write_whole
from mirrorsd.runtime.devices.inventory import ONNX_PACKAGES
from mirrorsd.runtime.policy.account import Knowledge
from mirrorsd.runtime.policy.learned import Learned, check_learned, learned_of
from mirrorsd.runtime.policy.roots import RootScores
from mirrorsd.texts.config import SpeculationConfig
from mirrorsd.texts.setting_rules import require

_METHODS = tuple(method for method in names.METHODS if method != "auto")
_LEAST, _MOST = 1e-3, 1e6
_KEEPS_EVERY_S = 10.0
"""Between two times that what texts teach is kept: a program that is killed loses no more."""
_DAMAGE = (ConfigError, OSError, ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError)
"""What reading a document of any content may raise."""
_log = logging.getLogger("mirrorsd")
_writing = threading.Lock()


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
        learned: what texts have taught since, or without any tuning (`policy/learned.py`).
    """

    card: str
    fingerprint: str
    speculation: dict[str, Any] = field(default_factory=dict)
    predicted_step_ms: float = 0.0
    measured_step_ms: float = 0.0
    tokens_per_second: dict[str, float] = field(default_factory=dict)
    root_scores: dict[str, Any] = field(default_factory=dict)
    target_ms: Curve = ()
    layout: str = APART
    sampled_speculation: dict[str, Any] = field(default_factory=dict)
    sampled_tokens_per_second: dict[str, float] = field(default_factory=dict)
    tokens_per_step: dict[str, float] = field(default_factory=dict)
    sampled_tokens_per_step: dict[str, float] = field(default_factory=dict)
    learned: Learned = field(default_factory=dict)

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
        check_learned(self.learned)

    @property
    def is_tuned(self) -> bool:
        """Whether `mirrorsd tune` found settings; else there is only what texts have taught."""
        return bool(self.speculation)

    def write(self, bundle: Path) -> Path:
        """Keep it, whole or not at all."""
        path = _place(bundle, self.card)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, (json.dumps(asdict(self), indent=2) + "\n").encode())
        return path

    @classmethod
    def read(cls, bundle: Path, card: DeviceMap) -> Self | None:
        """What was found for this card, if it fits this machine, its devices, these versions and this bundle.

        A file that is damaged is left out with a warning that says so: it holds nothing but speed. One of another
        machine or version is left out, too, and said to be so where information is logged.
        """
        path = _place(bundle, card.name)
        if not path.is_file():
            return None
        try:
            document = parse_json(read_text(path))
            if document["fingerprint"] == fingerprint(bundle, card):
                return build(cls, document)
            _log.info("%s is of another machine, version or bundle, and is not used", path)
            return None
        except _DAMAGE as error:
            _log.warning(
                "%s is damaged (%s: %s) and is not used: settings are those of device map %s. Delete the file, or run "
                "`mirrorsd tune` again.",
                *(path, type(error).__name__, error, card.name),
            )
            return None


class Keeper:
    """Keeps what texts teach about a bundle on a card: now and then, and at the end. Never fails: it is but speed."""

    def __init__(self, bundle: Path, card: DeviceMap, layout: str, known: Knowledge) -> None:
        self._bundle, self._card, self._layout, self._known = bundle, card, layout, known
        self._fingerprint = fingerprint(bundle, card)
        self._kept = learned_of(known)
        self._next = 0.0

    def text_ended(self) -> None:
        """Keep what it has taught, unless that was done a moment ago."""
        if perf_counter() >= self._next:
            self.keep()

    def keep(self) -> None:
        """Keep what is new since the last time, whole or not at all; what another process has tuned meanwhile stays."""
        self._next = perf_counter() + _KEEPS_EVERY_S
        learned = learned_of(self._known)
        if learned == self._kept or not _writing.acquire(blocking=False):  # a signal's handler may come here, too
            return
        try:
            found = Tuned.read(self._bundle, self._card)
            if found is None or not (found.is_tuned or found.layout == self._layout):
                found = Tuned(card=self._card.name, fingerprint=self._fingerprint, layout=self._layout)
            if found.layout == self._layout:
                replace(found, learned=learned).write(self._bundle)
            self._kept = learned
        except _DAMAGE as error:
            _log.info("what texts have taught is not kept: %s", error)
        finally:
            _writing.release()


def fingerprint(bundle: Path, card: DeviceMap) -> str:
    """Hash of processor, cores, the card's devices and pace, the runtimes' versions and the bundle's manifest."""
    parts = [platform.machine(), processor_name(), str(os.cpu_count()), str(card.pace)]
    parts += [card.target.runtime, card.target.provider, card.target.device, card.draft.device, card.exit.device]
    if not (card.target.is_on_cpu and card.draft.is_on_cpu and card.exit.device == "target"):
        from mirrorsd.devices.hardware import device_names

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
