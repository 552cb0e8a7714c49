"""Tuning a bundle: measure the parts, learn the pair, replay many settings, run the best for real, keep the fastest.

Where a card permits several layouts of the processor's cores, the models are loaded once per layout, side by side, so
that layouts compete by turns like everything else. Every step ends when its share of the time is over, or when somebody
has had enough, with what it has by then. Owns the order of these steps. Does not own the contests (`contest`), the
recordings (`recorder`), what is shown of it (`cli`).
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any, Protocol

from mirrorsd.device_maps import DeviceMap
from mirrorsd.devices.fingerprint import fingerprint
from mirrorsd.devices.inventory import choose_device_map
from mirrorsd.graphs.bundle_files import read_bundle
from mirrorsd.graphs.errors import Cancelled, DeviceError
from mirrorsd.machine.doctor.memory import SYSTEM, free_memory, memory_needs
from mirrorsd.machine.tuning.contest import (
    Contest,
    Entrant,
    best_speculation,
    candidate_settings,
    contend,
    fastest_layout,
    finalists,
    rank_settings,
)
from mirrorsd.machine.tuning.part_times import PartTimes, measure_parts, pace_of, pass_ms
from mirrorsd.machine.tuning.recorder import record_texts
from mirrorsd.machine.tuning.recording import Recording
from mirrorsd.machine.tuning.score_fitting import coverage, fit_scores
from mirrorsd.runtime.pipeline import MirrorPipeline
from mirrorsd.runtime.policy.roots import RootScores
from mirrorsd.runtime.tuned import Learned, Tuned, learned_of
from mirrorsd.texts.config import HEAD_METHODS, CancelToken, GenerationConfig

Prompt = str | list[dict[str, str]]
Pipes = dict[str, MirrorPipeline]
"""The bundle, loaded once per layout."""
Advance = Callable[[str], None]

NUM_TEXTS = 4
"""How many texts the finals decode."""
SECONDS = 80.0
"""What tuning may take; the contest that is under way by then is fought to its end."""
_ENDS = {"recording": 0.2, "greedy heats": 0.32, "sampled heats": 0.44, "greedy finals": 0.7, "sampled finals": 1.0}
"""Share of it by which a step ends: recordings and heats of SmolLM2 need less on two cores, finals take the rest."""
_FINALISTS = {"greedy": 4, "sampled": 3}
_SEEDS = {"greedy": 1, "sampled": 2}
"""How often the finals decode every text: sampled ones differ so much from seed to seed that one says little."""
_NUM_RECORDED = 3
_COVERED_ROOTS = 16
_SAMPLED = {"temperature": 1.0}
_SETTINGS = ("gamma", "roots", "root_source", "allocation", "passes", "window", "exits")


class Listener(Protocol):
    """Who is told how tuning goes on."""

    def loaded(self, pipe: MirrorPipeline) -> None:
        """A pipeline is there."""

    def begun(self) -> None:
        """All is loaded: from here on there is something to keep, however it ends."""

    def note(self, text: str) -> None:
        """Something to know that is no result."""

    def progress(self, title: str, total: int) -> AbstractContextManager[Advance]:
        """Work on `total` items begins; what it gives is called once per item, with words for what comes next."""


class Silent(Listener):
    """Nobody is told."""

    def loaded(self, pipe: MirrorPipeline) -> None: ...

    def begun(self) -> None: ...

    def note(self, text: str) -> None: ...

    @contextmanager
    def progress(self, title: str, total: int) -> Iterator[Advance]:
        yield lambda _: None


class Allowance:
    """How long tuning may go on: so many seconds from now, or until somebody has had enough."""

    def __init__(self, seconds: float, cancel: CancelToken) -> None:
        self._started, self._seconds, self.cancel = perf_counter(), seconds, cancel

    def is_over(self, step: str) -> bool:
        """Whether a step (of `_ENDS`) must end."""
        return self.cancel.is_cancelled or perf_counter() - self._started > _ENDS[step] * self._seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What tuning has measured, and what it keeps.

    Attributes:
        parts: the times of the parts, by layout.
        contests: who decoded how fast, fastest first, for greedy and for sampled texts; what was not reached is not in.
        tuned: the winner, or what an earlier run had found where there was no time for any.
    """

    parts: dict[str, PartTimes]
    contests: dict[str, list[Contest]]
    tuned: Tuned


def find_settings(
    bundle: Path,
    texts: Sequence[Prompt],
    *,
    device_map: str = "auto",
    max_new_tokens: int = 64,
    seconds: float = SECONDS,
    cancel: CancelToken | None = None,
    listener: Listener | None = None,
) -> Found:
    """Find the fastest way to speculate with a bundle on this machine. Changes no token, and keeps nothing.

    Args:
        bundle: the bundle's folder.
        texts: prompts or conversations to decode, `NUM_TEXTS` or so.
        device_map: a card, or `auto`.
        max_new_tokens: most tokens of a text.
        seconds: what it may take; the parts and a first text are measured anyway.
        cancel: ends it at once with what it has by then; with `Cancelled` where that is nothing.
        listener: who is told how it goes on.

    Raises:
        BundleError, ConfigError, DeviceError: as `MirrorPipeline.load`.
        Cancelled: before the parts were measured.
    """
    tell, cancel = listener or Silent(), cancel or CancelToken()
    greedy = GenerationConfig(max_new_tokens=max_new_tokens, temperature=0.0, use_defaults=False, cancel=cancel)
    configs = {"greedy": greedy, "sampled": greedy.with_overrides(_SAMPLED)}
    contests: dict[str, list[Contest]] = {kind: [] for kind in configs}
    with ExitStack() as stack:
        allowed = Allowance(seconds, cancel)
        pipes = _load(stack, bundle, device_map, tell)
        tell.begun()
        tell.note(f"takes about {seconds:.0f} s in all; it can be stopped at any time, with what it has by then")
        parts = _measure(pipes, cancel)
        pipes = {layout: pipes[layout] for layout in parts}
        recordings = _record(pipes, texts, configs, allowed, tell)
        scores = _fit(pipes, recordings, tell)
        entrants = {
            kind: _heats(kind, pipes, recording, scores, parts, allowed, tell) for kind, recording in recordings.items()
        }
        for kind, ones in entrants.items():
            contests[kind] = _finals(kind, pipes, ones, texts, configs[kind], allowed, tell)
        card = next(iter(pipes.values())).device_map
        learned = {layout: learned_of(pipe.engine.known) for layout, pipe in pipes.items()}
    tuned = _summary(bundle, card, contests, scores, parts, learned)
    return Found(parts=parts, contests=contests, tuned=_with_former(tuned, Tuned.read(bundle, card)))


def _load(stack: ExitStack, bundle: Path, device_map: str, tell: Listener) -> Pipes:
    """The pipeline of every layout that the card permits; of the first only, where memory does not hold more."""
    layouts = choose_device_map(device_map, bundle=read_bundle(bundle)).device_map.layouts
    pipes: Pipes = {}
    for layout in layouts:
        pipe = MirrorPipeline.load(bundle, device_map=device_map, use_tuned=False, layout=layout)
        pipes[layout] = stack.enter_context(pipe)
        tell.loaded(pipe)
        need = sum(part.total for part in memory_needs(pipe.manifest, pipe.device_map) if part.device == SYSTEM)
        free = free_memory(SYSTEM)
        if len(pipes) < len(layouts) and free is not None and free < need:
            tell.note(
                f"memory does not hold the models twice: of layouts {', '.join(layouts)} only {layout} is measured"
            )
            break
    return pipes


def _measure(pipes: Pipes, cancel: CancelToken) -> dict[str, PartTimes]:
    """The parts' times in every layout, or in those that there was time for; the pipelines know them from here on."""
    parts: dict[str, PartTimes] = {}
    for layout, pipe in pipes.items():
        try:
            parts[layout] = measure_parts(pipe.engine, cancel)
        except Cancelled:
            if not parts:
                raise
            break
        pipe.engine.known.target_ms = pass_ms(parts[layout])
    return parts


def _record(
    pipes: Pipes, texts: Sequence[Prompt], configs: dict[str, GenerationConfig], allowed: Allowance, tell: Listener
) -> dict[str, Recording]:
    """Record a few texts, greedy and sampled by turns, as far as there is time; both kinds or none."""
    pipe, found = next(iter(pipes.values())), dict[str, list[Recording]]()
    with tell.progress("recording", 2 * _NUM_RECORDED) as advance:
        for number, text in enumerate(texts[:_NUM_RECORDED]):
            for kind, config in configs.items():
                if allowed.cancel.is_cancelled or (number and allowed.is_over("recording")):
                    break
                try:
                    seeded = config.with_overrides({"seed": number}) if config.is_sampling else config
                    found.setdefault(kind, []).append(record_texts(pipe, [text], seeded, advance=advance))
                except Cancelled:
                    break
    if len(found) < len(configs):
        return {}
    return {kind: replace(ones[0], texts=tuple(t for one in ones for t in one.texts)) for kind, ones in found.items()}


def _fit(pipes: Pipes, recordings: dict[str, Recording], tell: Listener) -> RootScores:
    """The root scores of the recorded texts; the pipelines use them from here on."""
    if not recordings:
        return RootScores()
    gamma = next(iter(pipes.values())).speculation.gamma
    scores = fit_scores(list(recordings.values()), gamma)
    for kind, recording in recordings.items():
        pair = [coverage(recording, one, "both", gamma, [_COVERED_ROOTS])[0] for one in (RootScores(), scores)]
        tell.note(f"roots found among {_COVERED_ROOTS}, {kind}: {pair[0]:.2f} by default scores, {pair[1]:.2f} fitted")
    for one in pipes.values():
        one.engine.known.root_scores = scores
    return scores


def _heats(
    kind: str,
    pipes: Pipes,
    recording: Recording,
    scores: RootScores,
    parts: dict[str, PartTimes],
    allowed: Allowance,
    tell: Listener,
) -> list[Entrant]:
    """Replay every setting at the measured times of every layout; the best few, plain and all heads run for real."""
    entrants = []
    for layout, pipe in pipes.items():
        exit_layers = [point.layer for point in pipe.manifest.target.exits]
        settings = candidate_settings(pipe.speculation, pipe.manifest.draft.shape.num_streams, exit_layers)
        paces = {
            method: pipe.device_map.pace or pace_of(parts[layout], is_side_by_side=method == "mirror")
            for method in ("mirror", "serial")
        }
        with tell.progress(f"replaying {layout}", 2 * len(settings)) as advance:
            ranked = rank_settings(
                recording, settings, paces, scores, advance, partial(allowed.is_over, f"{kind} heats")
            )
        entrants += [Entrant(layout, *chosen) for chosen in finalists(ranked, _FINALISTS[kind])]
        undrafted = ("plain", "lookup", *(head for head in HEAD_METHODS if head in pipe.methods))
        entrants += [Entrant(layout, method, pipe.speculation) for method in undrafted]
    return entrants


def _finals(
    kind: str,
    pipes: Pipes,
    entrants: list[Entrant],
    texts: Sequence[Prompt],
    config: GenerationConfig,
    allowed: Allowance,
    tell: Listener,
) -> list[Contest]:
    """All entrants on all texts, for real and by turns, as far as there is time; fastest first."""
    sessions: dict[Any, Any] = {}

    def decode(entrant: Entrant, asked: tuple[Prompt, int], **overrides: Any) -> Any:
        place, (prompt, seed) = (entrant.layout, entrant.speculation), asked
        if place not in sessions:
            sessions[place] = pipes[entrant.layout].session(entrant.speculation)
        given: dict[str, Any] = {"prompt": prompt} if isinstance(prompt, str) else {"messages": prompt}
        given |= {"seed": seed} if config.is_sampling else {}
        return sessions[place].generate(config=config, method=entrant.method, **given, **overrides)

    every = [(text, seed) for seed in range(_SEEDS[kind]) for text in texts]
    found: list[Contest] = []
    try:
        with tell.progress(f"{kind} finals", len(every) * len(entrants)) as advance, suppress(Cancelled):
            for entrant in entrants:
                decode(entrant, every[0], max_new_tokens=8)
            found = contend(entrants, every, decode, advance, partial(allowed.is_over, f"{kind} finals"))
    except DeviceError as error:  # what was measured before is kept
        tell.note(f"the {kind} finals ended with an error: {error}")
    for session in sessions.values():
        session.close()
    return found


def _summary(
    bundle: Path,
    card: DeviceMap,
    contests: dict[str, list[Contest]],
    scores: RootScores,
    parts: dict[str, PartTimes],
    learned: dict[str, Learned],
) -> Tuned:
    """The fastest layout, and the fastest speculation in it; times and scores alone where no text was decoded."""
    groups = [found for found in contests.values() if found]
    layout = fastest_layout(*groups) if groups else next(iter(parts))
    measured = Tuned(
        card=card.name,
        fingerprint=fingerprint(bundle, card),
        layout=layout,
        root_scores=scores.to_dict(),
        target_ms=pass_ms(parts[layout]),
        learned=learned[layout],
    )
    for kind, found in contests.items():
        here = [contest for contest in found if contest.layout == layout]
        if not here:
            continue
        best, prefix = best_speculation(here), "" if kind == "greedy" else f"{kind}_"
        given: dict[str, Any] = {f"{prefix}speculation": settings_of(best)}
        for figure in ("tokens_per_second", "tokens_per_step"):
            given[f"{prefix}{figure}"] = _best_by_method([best, *here], figure)
        if kind == "greedy":
            given |= {"predicted_step_ms": round(best.predicted_step_ms, 3), "measured_step_ms": round(best.step_ms, 3)}
        measured = replace(measured, **given)
    return measured


def _with_former(tuned: Tuned, former: Tuned | None) -> Tuned:
    """What an earlier run had found where there was no time for it in this one."""
    is_greedy, is_sampled = tuned.is_tuned, bool(tuned.sampled_speculation)
    if former is None or not (former.is_tuned or former.sampled_speculation):
        return tuned
    if not (is_greedy or is_sampled):
        return former
    if former.layout != tuned.layout:
        return tuned
    of_texts = {
        field.name for field in fields(tuned) if field.name.endswith(("speculation", "_second", "_step", "_ms"))
    }
    kept = {name for name in of_texts - {"target_ms"} if not (is_sampled if name.startswith("sampled_") else is_greedy)}
    return replace(tuned, **{name: getattr(former, name) for name in kept})


def _best_by_method(contests: list[Contest], figure: str) -> dict[str, float]:
    """A figure of each method; contests come best first, so the first of each method counts."""
    found: dict[str, float] = {}
    for contest in contests:
        found.setdefault(contest.method, round(getattr(contest, figure), 3))
    return found


def settings_of(contest: Contest) -> dict[str, Any]:
    """What a contest was run with, as far as tuning changes it."""
    return {name: getattr(contest.speculation, name) for name in _SETTINGS}


def document(found: Found) -> dict[str, Any]:
    """Everything as plain values, for JSON."""
    rows = {
        f"{kind}_contests": [{**asdict(contest), "speculation": settings_of(contest)} for contest in contests]
        for kind, contests in found.contests.items()
    }
    return {"parts": {layout: asdict(times) for layout, times in found.parts.items()}, **rows, **asdict(found.tuned)}
