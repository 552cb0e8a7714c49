"""`mirrorsd tune`: measure the parts, learn the pair, replay many settings, run the best for real, keep the fastest.

Where a card permits several layouts of the processor's cores, the models are loaded once per layout, side by side, so
that layouts compete by turns like everything else.
"""

from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mirrorsd.cli.commands.compare import as_asked
from mirrorsd.cli.commands.loading import note_placement
from mirrorsd.cli.input import options
from mirrorsd.cli.input.prompt_file import BUILT_IN_QUESTIONS, read_questions, spread
from mirrorsd.cli.output.console import note, print_json, progress
from mirrorsd.cli.output.tune_report import print_contests, print_parts
from mirrorsd.graphs.bundle_files import read_bundle

if TYPE_CHECKING:
    from mirrorsd import GenerationConfig, MirrorPipeline
    from mirrorsd.device_maps import DeviceMap
    from mirrorsd.runtime.policy.root_scores import RootScores
    from mirrorsd.runtime.tuned import Tuned
    from mirrorsd.runtime.tuning.contest import Contest, Entrant
    from mirrorsd.runtime.tuning.part_times import PartTimes
    from mirrorsd.runtime.tuning.recording import Recording

    Pipes = dict[str, MirrorPipeline]
    """The bundle, loaded once per layout."""
    Prompt = str | list[dict[str, str]]

_FINALISTS = {"greedy": 4, "sampled": 3}
_SEEDS = {"greedy": 1, "sampled": 2}
"""How often the finals decode every text: sampled ones differ so much from seed to seed that one says little."""
_NUM_TEXTS, _NUM_RECORDED = 4, 3
_COVERED_ROOTS = 16
_SAMPLED = {"temperature": 1.0}


def tune(
    bundle: options.Bundle,
    prompts: Annotated[Path | None, typer.Option(help="Questions to try, in Spec-Bench's form.")] = None,
    device_map: options.DeviceMapName = "auto",
    max_new_tokens: options.MaxNewTokens = 64,
    as_json: options.AsJson = False,
) -> None:
    """Find the fastest way to speculate on this machine; `generate` uses it from then on. Changes no token."""
    from mirrorsd import GenerationConfig
    from mirrorsd.runtime.tuning.part_times import measure_parts, pass_ms

    started = perf_counter()
    questions = read_questions(prompts) if prompts else BUILT_IN_QUESTIONS
    texts = as_asked(bundle, [question.turns[0] for question in spread(questions, _NUM_TEXTS)])
    greedy = GenerationConfig(max_new_tokens=max_new_tokens, temperature=0.0, use_defaults=False)
    configs = {"greedy": greedy, "sampled": greedy.with_overrides(_SAMPLED)}
    with ExitStack() as stack:
        pipes = _load(stack, bundle, device_map)
        note("measuring the parts, alone and side by side")
        parts = {layout: measure_parts(pipe.engine) for layout, pipe in pipes.items()}
        for layout, pipe in pipes.items():
            pipe.engine.target_ms = pass_ms(parts[layout])
        recordings, scores = _learn_pair(pipes, texts, configs)
        entrants = {kind: _heats(pipes, recordings[kind], scores, parts, _FINALISTS[kind]) for kind in configs}
        contests = {kind: _finals(kind, pipes, entrants[kind], texts, configs[kind]) for kind in configs}
        card = next(iter(pipes.values())).device_map
    tuned = _summary(bundle, card, contests, scores)
    tuned = replace(tuned, target_ms=pass_ms(parts[tuned.layout]))
    path = tuned.write(bundle)
    seconds = perf_counter() - started
    if as_json:
        rows = {f"{kind}_contests": [_row(contest) for contest in found] for kind, found in contests.items()}
        measured = {layout: asdict(times) for layout, times in parts.items()}
        print_json({"seconds": round(seconds, 1), "parts": measured, **rows, **asdict(tuned)})
        return
    print_parts(parts)
    for kind, found in contests.items():
        print_contests(f"{kind} texts", found)
    print(
        f"kept in {path.name}: layout {tuned.layout}; predicted {tuned.predicted_step_ms} ms a step, measured "
        f"{tuned.measured_step_ms} ms. Took {seconds:.0f} s."
    )


def _load(stack: ExitStack, bundle: Path, device_map: str) -> "Pipes":
    """The pipeline of every layout that the card permits; of the first only, where memory does not hold more."""
    from mirrorsd import MirrorPipeline
    from mirrorsd.runtime.devices.inventory import choose_device_map
    from mirrorsd.runtime.doctor.memory import SYSTEM, free_memory, memory_needs

    layouts = choose_device_map(device_map, dtype=read_bundle(bundle).target.shape.dtype).device_map.layouts
    pipes: Pipes = {}
    for layout in layouts:
        pipe = MirrorPipeline.load(bundle, device_map=device_map, use_tuned=False, layout=layout)
        pipes[layout] = stack.enter_context(pipe)
        note_placement(pipe)
        need = sum(part.total for part in memory_needs(pipe.manifest, pipe.device_map) if part.device == SYSTEM)
        free = free_memory(SYSTEM)
        if len(pipes) < len(layouts) and free is not None and free < need:
            note(f"memory does not hold the models twice: of layouts {', '.join(layouts)} only {layout} is measured")
            break
    return pipes


def _learn_pair(
    pipes: "Pipes", texts: "list[Prompt]", configs: "dict[str, GenerationConfig]"
) -> tuple["dict[str, Recording]", "RootScores"]:
    """Record a few texts, greedy and sampled, and fit the root scores to them; the pipelines use them from here on."""
    from mirrorsd.runtime.policy.root_scores import RootScores
    from mirrorsd.runtime.tuning.recorder import record_texts
    from mirrorsd.runtime.tuning.score_fitting import coverage, fit_scores

    pipe = next(iter(pipes.values()))
    chosen = texts[:_NUM_RECORDED]
    with progress("recording", 2 * len(chosen)) as advance:
        recordings = {kind: record_texts(pipe, chosen, config, advance=advance) for kind, config in configs.items()}
    gamma = pipe.speculation.gamma
    scores = fit_scores(list(recordings.values()), gamma)
    for kind, recording in recordings.items():
        pair = [coverage(recording, one, "both", gamma, [_COVERED_ROOTS])[0] for one in (RootScores(), scores)]
        note(f"roots found among {_COVERED_ROOTS}, {kind}: {pair[0]:.2f} by default scores, {pair[1]:.2f} fitted")
    for one in pipes.values():
        one.engine.root_scores = scores
    return recordings, scores


def _heats(
    pipes: "Pipes", recording: "Recording", scores: "RootScores", parts: "dict[str, PartTimes]", count: int
) -> "list[Entrant]":
    """Replay every setting at the measured times of every layout; the best few of each, and plain, run for real."""
    from mirrorsd.runtime.tuning.contest import Entrant, candidate_settings, finalists, rank_settings
    from mirrorsd.runtime.tuning.part_times import pace_of

    entrants = []
    for layout, pipe in pipes.items():
        exit_layers = [point.layer for point in pipe.manifest.target.exits]
        settings = candidate_settings(pipe.speculation, pipe.manifest.draft.shape.num_streams, exit_layers)
        paces = {
            method: pipe.device_map.pace or pace_of(parts[layout], is_side_by_side=method == "mirror")
            for method in ("mirror", "serial")
        }
        with progress(f"replaying {layout}", 2 * len(settings)) as advance:
            ranked = rank_settings(recording, settings, paces, scores, advance)
        entrants += [Entrant(layout, *chosen) for chosen in finalists(ranked, count)]
        entrants.append(Entrant(layout, "plain", pipe.speculation))
    return entrants


def _finals(
    kind: str, pipes: "Pipes", entrants: "list[Entrant]", texts: "list[Prompt]", config: "GenerationConfig"
) -> "list[Contest]":
    """All entrants on all texts, for real and by turns; fastest first."""
    from mirrorsd.runtime.tuning.contest import contend

    sessions: dict[Any, Any] = {}

    def decode(entrant: "Entrant", asked: "tuple[Prompt, int]", **overrides: Any) -> Any:
        place, (prompt, seed) = (entrant.layout, entrant.speculation), asked
        if place not in sessions:
            sessions[place] = pipes[entrant.layout].session(entrant.speculation)
        given: dict[str, Any] = {"prompt": prompt} if isinstance(prompt, str) else {"messages": prompt}
        given |= {"seed": seed} if config.is_sampling else {}
        return sessions[place].generate(config=config, method=entrant.method, **given, **overrides)

    every = [(text, seed) for seed in range(_SEEDS[kind]) for text in texts]
    for entrant in entrants:
        decode(entrant, every[0], max_new_tokens=8)
    with progress(f"{kind} finals", len(every) * len(entrants)) as advance:
        found = contend(entrants, every, decode, advance)
    for session in sessions.values():
        session.close()
    return found


def _summary(bundle: Path, card: "DeviceMap", contests: "dict[str, list[Contest]]", scores: "RootScores") -> "Tuned":
    """The fastest layout, and the fastest speculation in it, for greedy and for sampled texts."""
    from mirrorsd.runtime.tuned import Tuned, fingerprint
    from mirrorsd.runtime.tuning.contest import best_speculation, fastest_layout

    layout = fastest_layout(*contests.values())
    here = {kind: [c for c in found if c.layout == layout] for kind, found in contests.items()}
    best = {kind: best_speculation(found) for kind, found in here.items()}
    here = {kind: [best[kind], *found] for kind, found in here.items()}
    return Tuned(
        card=card.name,
        fingerprint=fingerprint(bundle, card),
        layout=layout,
        speculation=_changed(best["greedy"]),
        predicted_step_ms=round(best["greedy"].predicted_step_ms, 3),
        measured_step_ms=round(best["greedy"].step_ms, 3),
        tokens_per_second=_best_by_method(here["greedy"], "tokens_per_second"),
        tokens_per_step=_best_by_method(here["greedy"], "tokens_per_step"),
        sampled_speculation=_changed(best["sampled"]),
        sampled_tokens_per_second=_best_by_method(here["sampled"], "tokens_per_second"),
        sampled_tokens_per_step=_best_by_method(here["sampled"], "tokens_per_step"),
        root_scores=scores.to_dict(),
    )


def _best_by_method(contests: "list[Contest]", figure: str) -> dict[str, float]:
    """A figure of each method; contests come best first, so the first of each method counts."""
    found: dict[str, float] = {}
    for contest in contests:
        found.setdefault(contest.method, round(getattr(contest, figure), 3))
    return found


def _changed(best: "Contest") -> dict[str, Any]:
    names = ("gamma", "roots", "root_source", "allocation", "passes", "window", "exits")
    return {name: getattr(best.speculation, name) for name in names}


def _row(contest: "Contest") -> dict[str, Any]:
    return {**asdict(contest), "speculation": _changed(contest)}
