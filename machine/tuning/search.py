"""Tuning a bundle: measure the parts, learn the pair, replay many settings, run the best for real, keep the fastest.

Where a card permits several layouts of the processor's cores, the models are loaded once per layout, side by side, so
that layouts compete by turns like everything else. Owns the order of these steps. Does not own the contests
(`contest`), the recordings (`recorder`), what is shown of it (`cli`).
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from mirrorsd.device_maps import DeviceMap
from mirrorsd.graphs.bundle_files import read_bundle
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
from mirrorsd.runtime.config import GenerationConfig
from mirrorsd.runtime.devices.inventory import choose_device_map
from mirrorsd.runtime.pipeline import MirrorPipeline
from mirrorsd.runtime.policy.roots import RootScores
from mirrorsd.runtime.tuned import Tuned, fingerprint

Prompt = str | list[dict[str, str]]
Pipes = dict[str, MirrorPipeline]
"""The bundle, loaded once per layout."""
Advance = Callable[[str], None]

NUM_TEXTS = 4
"""How many texts the finals decode."""
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

    def note(self, text: str) -> None:
        """Something to know that is no result."""

    def progress(self, title: str, total: int) -> AbstractContextManager[Advance]:
        """Work on `total` items begins; what it gives is called once per item, with words for what comes next."""


class Silent(Listener):
    """Nobody is told."""

    def loaded(self, pipe: MirrorPipeline) -> None: ...

    def note(self, text: str) -> None: ...

    @contextmanager
    def progress(self, title: str, total: int) -> Iterator[Advance]:
        yield lambda _: None


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What tuning has measured, and what it keeps.

    Attributes:
        parts: the times of the parts, by layout.
        contests: who decoded how fast, fastest first, for greedy and for sampled texts.
        tuned: the winner.
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
    listener: Listener | None = None,
) -> Found:
    """Find the fastest way to speculate with a bundle on this machine. Changes no token, and keeps nothing.

    Args:
        bundle: the bundle's folder.
        texts: prompts or conversations to decode, `NUM_TEXTS` or so.
        device_map: a card, or `auto`.
        max_new_tokens: most tokens of a text.
        listener: who is told how it goes on.

    Raises:
        BundleError, ConfigError, DeviceError: as `MirrorPipeline.load`.
    """
    tell = listener or Silent()
    greedy = GenerationConfig(max_new_tokens=max_new_tokens, temperature=0.0, use_defaults=False)
    configs = {"greedy": greedy, "sampled": greedy.with_overrides(_SAMPLED)}
    with ExitStack() as stack:
        pipes = _load(stack, bundle, device_map, tell)
        tell.note("measuring the parts, alone and side by side")
        parts = {layout: measure_parts(pipe.engine) for layout, pipe in pipes.items()}
        for layout, pipe in pipes.items():
            pipe.engine.known.target_ms = pass_ms(parts[layout])
        recordings, scores = _learn_pair(pipes, texts, configs, tell)
        entrants = {kind: _heats(pipes, recordings[kind], scores, parts, _FINALISTS[kind], tell) for kind in configs}
        contests = {kind: _finals(kind, pipes, entrants[kind], texts, configs[kind], tell) for kind in configs}
        card = next(iter(pipes.values())).device_map
    tuned = _summary(bundle, card, contests, scores)
    tuned = replace(tuned, target_ms=pass_ms(parts[tuned.layout]))
    return Found(parts=parts, contests=contests, tuned=tuned)


def _load(stack: ExitStack, bundle: Path, device_map: str, tell: Listener) -> Pipes:
    """The pipeline of every layout that the card permits; of the first only, where memory does not hold more."""
    layouts = choose_device_map(device_map, dtype=read_bundle(bundle).target.computes_in).device_map.layouts
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


def _learn_pair(
    pipes: Pipes, texts: Sequence[Prompt], configs: dict[str, GenerationConfig], tell: Listener
) -> tuple[dict[str, Recording], RootScores]:
    """Record a few texts, greedy and sampled, and fit the root scores to them; the pipelines use them from here on."""
    pipe = next(iter(pipes.values()))
    chosen = list(texts[:_NUM_RECORDED])
    with tell.progress("recording", 2 * len(chosen)) as advance:
        recordings = {kind: record_texts(pipe, chosen, config, advance=advance) for kind, config in configs.items()}
    gamma = pipe.speculation.gamma
    scores = fit_scores(list(recordings.values()), gamma)
    for kind, recording in recordings.items():
        pair = [coverage(recording, one, "both", gamma, [_COVERED_ROOTS])[0] for one in (RootScores(), scores)]
        tell.note(f"roots found among {_COVERED_ROOTS}, {kind}: {pair[0]:.2f} by default scores, {pair[1]:.2f} fitted")
    for one in pipes.values():
        one.engine.known.root_scores = scores
    return recordings, scores


def _heats(
    pipes: Pipes,
    recording: Recording,
    scores: RootScores,
    parts: dict[str, PartTimes],
    count: int,
    tell: Listener,
) -> list[Entrant]:
    """Replay every setting at the measured times of every layout; the best few of each, and plain, run for real."""
    entrants = []
    for layout, pipe in pipes.items():
        exit_layers = [point.layer for point in pipe.manifest.target.exits]
        settings = candidate_settings(pipe.speculation, pipe.manifest.draft.shape.num_streams, exit_layers)
        paces = {
            method: pipe.device_map.pace or pace_of(parts[layout], is_side_by_side=method == "mirror")
            for method in ("mirror", "serial")
        }
        with tell.progress(f"replaying {layout}", 2 * len(settings)) as advance:
            ranked = rank_settings(recording, settings, paces, scores, advance)
        entrants += [Entrant(layout, *chosen) for chosen in finalists(ranked, count)]
        entrants.append(Entrant(layout, "plain", pipe.speculation))
    return entrants


def _finals(
    kind: str,
    pipes: Pipes,
    entrants: list[Entrant],
    texts: Sequence[Prompt],
    config: GenerationConfig,
    tell: Listener,
) -> list[Contest]:
    """All entrants on all texts, for real and by turns; fastest first."""
    sessions: dict[Any, Any] = {}

    def decode(entrant: Entrant, asked: tuple[Prompt, int], **overrides: Any) -> Any:
        place, (prompt, seed) = (entrant.layout, entrant.speculation), asked
        if place not in sessions:
            sessions[place] = pipes[entrant.layout].session(entrant.speculation)
        given: dict[str, Any] = {"prompt": prompt} if isinstance(prompt, str) else {"messages": prompt}
        given |= {"seed": seed} if config.is_sampling else {}
        return sessions[place].generate(config=config, method=entrant.method, **given, **overrides)

    every = [(text, seed) for seed in range(_SEEDS[kind]) for text in texts]
    for entrant in entrants:
        decode(entrant, every[0], max_new_tokens=8)
    with tell.progress(f"{kind} finals", len(every) * len(entrants)) as advance:
        found = contend(entrants, every, decode, advance)
    for session in sessions.values():
        session.close()
    return found


def _summary(bundle: Path, card: DeviceMap, contests: dict[str, list[Contest]], scores: RootScores) -> Tuned:
    """The fastest layout, and the fastest speculation in it, for greedy and for sampled texts."""
    layout = fastest_layout(*contests.values())
    here = {kind: [c for c in found if c.layout == layout] for kind, found in contests.items()}
    best = {kind: best_speculation(found) for kind, found in here.items()}
    here = {kind: [best[kind], *found] for kind, found in here.items()}
    return Tuned(
        card=card.name,
        fingerprint=fingerprint(bundle, card),
        layout=layout,
        speculation=settings_of(best["greedy"]),
        predicted_step_ms=round(best["greedy"].predicted_step_ms, 3),
        measured_step_ms=round(best["greedy"].step_ms, 3),
        tokens_per_second=_best_by_method(here["greedy"], "tokens_per_second"),
        tokens_per_step=_best_by_method(here["greedy"], "tokens_per_step"),
        sampled_speculation=settings_of(best["sampled"]),
        sampled_tokens_per_second=_best_by_method(here["sampled"], "tokens_per_second"),
        sampled_tokens_per_step=_best_by_method(here["sampled"], "tokens_per_step"),
        root_scores=scores.to_dict(),
    )


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
