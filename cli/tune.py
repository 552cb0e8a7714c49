"""`mirrorsd tune`: measure the parts, learn the pair, replay many settings, run the best for real, keep the fastest."""

from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.table import Table

from mirrorsd.cli import options
from mirrorsd.cli.console import add_row, note, print_json, print_table, progress
from mirrorsd.cli.loading import note_placement
from mirrorsd.cli.prompt_file import BUILT_IN_QUESTIONS, read_questions

if TYPE_CHECKING:
    from mirrorsd import MirrorPipeline
    from mirrorsd.device_maps import Pace
    from mirrorsd.runtime.recording import Recording
    from mirrorsd.runtime.root_scores import RootScores
    from mirrorsd.runtime.tuning import Contest, PartTimes

_FINALISTS = 4
_NUM_RECORDED = 3
_COVERED_ROOTS = 16


def tune(
    bundle: options.Bundle,
    prompts: Annotated[Path | None, typer.Option(help="Questions to try, in Spec-Bench's form.")] = None,
    device_map: options.DeviceMapName = "auto",
    max_new_tokens: options.MaxNewTokens = 64,
    as_json: options.AsJson = False,
) -> None:
    """Find the fastest way to speculate on this machine; `generate` uses it from then on. Changes no token."""
    from mirrorsd import MirrorPipeline
    from mirrorsd.runtime.tuned import Tuned, fingerprint
    from mirrorsd.runtime.tuning import measure_parts, pace_of

    questions = read_questions(prompts) if prompts else BUILT_IN_QUESTIONS
    texts = [question.turns[0] for question in questions][:4]
    with MirrorPipeline.load(bundle, device_map=device_map, use_tuned=False) as pipe:
        note_placement(pipe)
        note("measuring the parts, alone and side by side")
        parts = measure_parts(pipe.engine)
        recordings, scores = _learn_pair(pipe, texts, max_new_tokens)
        pace = pipe.device_map.pace or pace_of(parts)
        plain, contests = _contests(pipe, texts, max_new_tokens, _heats(pipe, recordings[0], scores, pace))
        card = pipe.device_map.name
    best = contests[0]
    tuned = Tuned(
        card=card,
        fingerprint=fingerprint(bundle),
        speculation=_changed(best),
        predicted_step_ms=round(best.predicted_step_ms, 3),
        measured_step_ms=round(best.step_ms, 3),
        tokens_per_second=_best_by_method([*contests, plain]),
        root_scores=scores.to_dict(),
    )
    path = tuned.write(bundle)
    if as_json:
        print_json({"parts": asdict(parts), "contests": [_row(c) for c in contests], **asdict(tuned)})
        return
    _print_parts(parts)
    _print_contests(plain, contests)
    print(f"kept in {path.name}: predicted {tuned.predicted_step_ms} ms a step, measured {tuned.measured_step_ms} ms")


def _learn_pair(
    pipe: "MirrorPipeline", texts: list[str], max_new_tokens: int
) -> tuple[list["Recording"], "RootScores"]:
    """Record a few texts, greedy and sampled, and fit the root scores to them; the pipeline uses them from here on."""
    from mirrorsd import GenerationConfig
    from mirrorsd.runtime.root_scores import RootScores
    from mirrorsd.runtime.score_fitting import coverage, fit_scores
    from mirrorsd.runtime.text_recording import record_texts

    greedy = GenerationConfig(max_new_tokens=max_new_tokens, ignore_eos=True)
    sampled = greedy.with_overrides({"temperature": 1.0, "max_new_tokens": max(max_new_tokens // 2, 1)})
    chosen = texts[:_NUM_RECORDED]
    with progress("recording", 2 * len(chosen)) as advance:
        recordings = [record_texts(pipe, chosen, config, advance=advance) for config in (greedy, sampled)]
    gamma = pipe.speculation.gamma
    scores = fit_scores(recordings, gamma)
    for recording, name in zip(recordings, ("greedy", "T=1"), strict=True):
        pair = [coverage(recording, one, "both", gamma, [_COVERED_ROOTS])[0] for one in (RootScores(), scores)]
        note(f"roots found among {_COVERED_ROOTS}, {name}: {pair[0]:.2f} by default scores, {pair[1]:.2f} fitted")
    pipe.engine.root_scores = scores
    return recordings, scores


def _heats(pipe: "MirrorPipeline", recording: "Recording", scores: "RootScores", pace: "Pace") -> list[Any]:
    """Replay every setting at the measured times; the best few run for real."""
    from mirrorsd.runtime.simulation import Scenario, simulate, tokens_per_second
    from mirrorsd.runtime.tuning import candidate_settings

    exit_layers = [point.layer for point in pipe.manifest.target.exits]
    settings = candidate_settings(pipe.speculation, pipe.manifest.draft.shape.num_streams, exit_layers)
    short = replace(recording, texts=recording.texts[:2])
    speeds: dict[Any, float] = {}
    with progress("replaying", 2 * len(settings)) as advance:
        for setting in settings:
            layers = None if setting.exits == "all" else setting.exits
            for method in ("mirror", "serial"):
                scenario = Scenario(pace=pace, speculation=setting, method=method, layers=layers, scores=scores)
                speeds[setting] = max(speeds.get(setting, 0.0), tokens_per_second(simulate(short, scenario)))
                advance(f"{method}, gamma {setting.gamma}")
    return sorted(speeds, key=lambda setting: -speeds[setting])[:_FINALISTS]


def _contests(
    pipe: "MirrorPipeline", texts: list[str], max_new_tokens: int, finalists: list[Any]
) -> tuple["Contest", list["Contest"]]:
    """Finals on all texts, for real; plain decoding runs beside them."""
    from mirrorsd import GenerationConfig
    from mirrorsd.runtime.tuning import contend

    sessions: dict[Any, Any] = {}

    def decode(setting: Any, method: str, prompt: str) -> Any:
        if setting not in sessions:
            sessions[setting] = pipe.session(setting)
        session = sessions[setting]
        config = GenerationConfig(max_new_tokens=max_new_tokens, ignore_eos=True, method=method)  # type: ignore[arg-type]
        return session.generate(prompt, config)

    decode(finalists[0], "mirror", texts[0])
    with progress("finals", len(texts) * (2 * len(finalists) + 1)) as advance:
        finals = contend(finalists, ["mirror", "serial"], texts, decode, advance)
        plain = contend(finalists[:1], ["plain"], texts, decode, advance)[0]
    return plain, finals


def _best_by_method(contests: list["Contest"]) -> dict[str, float]:
    """Contests come fastest first, so the first of each method counts."""
    found: dict[str, float] = {}
    for contest in contests:
        found.setdefault(contest.method, round(contest.tokens_per_second, 2))
    return found


def _changed(best: "Contest") -> dict[str, Any]:
    names = ("gamma", "roots", "root_source", "allocation", "passes", "exits")
    return {name: getattr(best.speculation, name) for name in names}


def _row(contest: "Contest") -> dict[str, Any]:
    return {**asdict(contest), "speculation": _changed(contest)}


def _print_parts(parts: "PartTimes") -> None:
    table = Table("rows", "prefix ms", "exit ms", "suffix ms", "draft round ms")
    for rows, stages in parts.target.items():
        cells = [f"{stages.get(name, 0.0):.2f}" for name in ("prefix", "exit", "suffix")]
        draft = parts.draft.get(rows)
        add_row(table, str(rows), *cells, "" if draft is None else f"{draft:.2f}")
    print_table(table)
    print(f"side by side: target x {parts.target_slowdown:.2f}, draft x {parts.draft_slowdown:.2f}")


def named_exits(exits: Literal["all"] | tuple[int, ...]) -> str:
    """The exits in a word or two: `all`, `none`, `12,20`."""
    return exits if exits == "all" else ",".join(map(str, exits)) or "none"


def _print_contests(plain: "Contest", contests: list["Contest"]) -> None:
    table = Table(
        "method",
        "gamma",
        "passes",
        "roots",
        "from",
        "exits",
        "tokens/s",
        "/ plain",
        "accepted",
        "reuse",
        "step ms",
        "law ms",
    )
    for contest in (*contests, plain):
        setting = contest.speculation
        add_row(
            table,
            contest.method,
            *(str(value) for value in (setting.gamma, setting.passes, setting.roots, setting.root_source)),
            named_exits(setting.exits),
            f"{contest.tokens_per_second:.1f}",
            f"{contest.tokens_per_second / plain.tokens_per_second:.2f}",
            f"{contest.mean_accepted:.2f}",
            f"{contest.reuse_rate:.2f}",
            f"{contest.step_ms:.2f}",
            f"{contest.predicted_step_ms:.2f}",
        )
    print_table(table)
