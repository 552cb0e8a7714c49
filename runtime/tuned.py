"""What `mirrorsd tune` found and what texts have taught, kept in the user's cache for the same machine and bundle.

One small file per bundle and card. It holds numbers about speed only, no text and no token of one: using it, losing it
or faking it changes no token. Times that texts have taught are multiples of a pass of one row, so that they hold on a
machine that is slower today than yesterday.
"""

import json
import logging
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import chain
from math import isfinite
from pathlib import Path
from time import perf_counter
from typing import Any, Self

from mirrorsd.device_maps import DeviceMap
from mirrorsd.device_maps.card import APART, LAYOUTS
from mirrorsd.device_maps.pace import Curve, check_curve
from mirrorsd.devices.fingerprint import fingerprint
from mirrorsd.graphs import names
from mirrorsd.graphs.documents import build, parse_json, read_text
from mirrorsd.graphs.errors import ConfigError
from mirrorsd.graphs.names import HEAD_KINDS
from mirrorsd.graphs.user_cache import folder_of
from mirrorsd.graphs.whole_file import write_whole
from mirrorsd.runtime.policy.account import SourceKnowledge
from mirrorsd.runtime.policy.knowledge import Knowledge
from mirrorsd.runtime.policy.roots import RootScores
from mirrorsd.runtime.policy.windows import LearnedLengths, Ratio
from mirrorsd.texts.config import SpeculationConfig
from mirrorsd.texts.setting_rules import require

_METHODS = tuple(method for method in names.METHODS if method != "auto")
_LEAST, _MOST = 1e-6, 1e6
_SHARE_OF_KEEPING = 0.01
"""Of a program's time, at most, that keeping what texts teach takes. One that is killed loses what came since."""
Learned = dict[str, list[float]]
"""Numbers by what they say: `greedy.plain`, `sampled.draft.main` and so on."""
_KINDS = {False: "greedy", True: "sampled"}
_SOURCES = ("draft", *HEAD_KINDS)
_MOST_PASSES = 2.0
"""Passes of one row that a plain step may have taken to be kept: longer ones were measured beside another program. With
3 where one is right, `auto` repeats text 0.90 and 0.92 as fast (`bench/claims/process/first_times.py`)."""
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
        learned: what texts have taught since, or without any tuning.
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
    def read(cls, bundle: Path, card: DeviceMap, here: str = "") -> Self | None:
        """What was found for this card, if it fits this machine, its devices, these versions and this bundle.

        `here` is their fingerprint, which a thread that is kept to some cores cannot take.

        A file that is damaged is left out with a warning that says so: it holds nothing but speed. One of another
        machine or version is left out, too, and said to be so where information is logged.
        """
        path = _place(bundle, card.name)
        try:
            if not path.is_file():
                return None
            document = parse_json(read_text(path))
            if document["fingerprint"] == (here or fingerprint(bundle, card)):
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
        began = perf_counter()
        try:
            self._keep()
        finally:
            self._next = perf_counter() + (perf_counter() - began) / _SHARE_OF_KEEPING

    def _keep(self) -> None:
        learned = learned_of(self._known)
        if learned == self._kept or not _writing.acquire(blocking=False):  # a signal's handler may come here, too
            return
        try:
            found = Tuned.read(self._bundle, self._card, self._fingerprint)
            if found is None or not (found.is_tuned or found.layout == self._layout):
                found = Tuned(card=self._card.name, fingerprint=self._fingerprint, layout=self._layout)
            if found.layout == self._layout:
                replace(found, learned=learned).write(self._bundle)
            self._kept = learned
        except _DAMAGE as error:
            _log.info("what texts have taught is not kept: %s", error)
        finally:
            _writing.release()


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


def learned_of(known: Knowledge) -> Learned:
    """What is worth keeping: nothing where the target's times are unknown, of which all others are multiples.

    >>> known = Knowledge(target_ms=((1.0, 20.0), (8.0, 30.0)))
    >>> known.pairs[False].start_plain(0.030)
    >>> learned_of(known)
    {'greedy.plain': [1.5, 1.0]}
    """
    if not known.target_ms:
        return {}
    unit, found = known.target_ms[0][1] / 1e3, Learned()
    for is_sampling, kind in _KINDS.items():
        pair = known.pairs[is_sampling]
        if pair.is_plain_known and pair.plain_seconds <= _MOST_PASSES * unit:
            found[f"{kind}.plain"] = [pair.plain_seconds / unit, pair.plain_tokens]
        for name, source, lengths in _sources(known, is_sampling=is_sampling):
            if source.brought is not None:
                found[f"{kind}.{name}"] = [
                    source.brought,
                    source.draft_seconds / unit,
                    source.joining_seconds / unit,
                    *(min(float(n), _MOST) for n in (source.joining_tokens, source.num_windows, source.pause)),
                ]
            if lengths.tokens_per_second:
                found[f"{kind}.{name}.speed"] = [lengths.tokens_per_second * unit]
            before = _ratios(LearnedLengths())
            now = {of: _numbers(ratios) for of, ratios in _ratios(lengths).items()}
            found |= {f"{kind}.{name}.{of}": values for of, values in now.items() if values != _numbers(before[of])}
    return {name: [round(value, 6) for value in values] for name, values in found.items()}


def check_learned(learned: Mapping[str, Sequence[float]]) -> None:
    """Refuse what cannot have been learned.

    Raises:
        ValueError: an unknown name, another number of values than it has, or a value out of its range.
    """
    sizes = {"plain": 2, "speed": 1} | {of: 2 * len(ratios) for of, ratios in _ratios(LearnedLengths()).items()}
    for key, values in learned.items():
        kind, _, rest = key.partition(".")
        name, _, of = rest.partition(".")
        is_known = kind in _KINDS.values() and (name in (*_SOURCES, "plain") if not of else name in _SOURCES)
        if not is_known or len(values) != sizes.get(of or name, 6 if not of else -1):
            raise ValueError(f"learned has {key!r} with {len(values)} values, which is nothing that texts teach")
        floors = [-_MOST] if not of and name != "plain" else []
        if of not in ("", "speed"):  # one more pass may have made a window worth less
            floors = [-_MOST if of == "gains" else 0.0, _LEAST] * (len(values) // 2)
        floors += [_LEAST if name == "plain" or of == "speed" else 0.0] * (len(values) - len(floors))
        for value, least in zip(values, floors, strict=True):
            if not (isfinite(value) and least <= value <= _MOST):
                raise ValueError(f"learned[{key}] is {value}; allowed: {least:g} to {_MOST:g}")


def recall(known: Knowledge, learned: Mapping[str, Sequence[float]]) -> None:
    """Begin with what earlier runs have learned (`check_learned` has seen it)."""
    unit = known.target_ms[0][1] / 1e3 if known.target_ms else 1.0
    for is_sampling, kind in _KINDS.items():
        pair = known.pairs[is_sampling]
        if plain := learned.get(f"{kind}.plain"):
            pair.start_plain(plain[0] * unit)
            pair.plain_tokens = plain[1]
        for head in HEAD_KINDS:
            if any(key.split(".")[:2] == [kind, head] for key in learned):
                known.head(head, is_sampling=is_sampling)
        for name, source, lengths in _sources(known, is_sampling=is_sampling):
            if of_source := learned.get(f"{kind}.{name}"):
                source.brought, draft, joining = of_source[:3]
                source.draft_seconds, source.joining_seconds = draft * unit, joining * unit
                source.joining_tokens = of_source[3]
                source.num_windows, source.pause = map(int, of_source[4:])
            if speed := learned.get(f"{kind}.{name}.speed"):
                lengths.tokens_per_second = speed[0] / unit
            for of, ratios in _ratios(lengths).items():
                values = learned.get(f"{kind}.{name}.{of}", ())
                for ratio, happened, expected in zip(ratios, values[::2], values[1::2], strict=False):
                    ratio.happened, ratio.expected = happened, expected


def _sources(known: Knowledge, *, is_sampling: bool) -> Iterator[tuple[str, SourceKnowledge, LearnedLengths]]:
    """The draft, and every head that was used, with what is known of each."""
    pair = known.pairs[is_sampling]
    yield "draft", pair, known.lengths[is_sampling]
    for kind in [*pair.heads]:  # another text may ask a head for the first time
        yield kind, *known.head(kind, is_sampling=is_sampling)


def _ratios(lengths: LearnedLengths) -> dict[str, list[Ratio]]:
    return {
        "main": [lengths.main],
        "stream": [lengths.stream],
        "gains": lengths.gains,
        "siblings": [lengths.siblings],
        "repeats": [*lengths.repeats.shares, lengths.repeats.against_draft],
    }


def _numbers(ratios: Sequence[Ratio]) -> list[float]:
    return [value for ratio in ratios for value in (ratio.happened, ratio.expected)]
