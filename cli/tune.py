"""`mirrorsd tune`: measure the parts, try settings on real text, keep the fastest beside the bundle."""

from dataclasses import asdict
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
    from mirrorsd.runtime.tuning import Contest, PartTimes

_FINALISTS = 4


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
    from mirrorsd.runtime.tuning import measure_parts

    questions = read_questions(prompts) if prompts else BUILT_IN_QUESTIONS
    texts = [question.turns[0] for question in questions][:4]
    with MirrorPipeline.load(bundle, device_map=device_map, use_tuned=False) as pipe:
        note_placement(pipe)
        note("measuring the parts, alone and side by side")
        parts = measure_parts(pipe.engine)
        plain, contests = _contests(pipe, texts, max_new_tokens)
        card = pipe.device_map.name
    best = contests[0]
    tuned = Tuned(
        card=card,
        fingerprint=fingerprint(bundle),
        speculation=_changed(best),
        predicted_step_ms=round(best.predicted_step_ms, 3),
        measured_step_ms=round(best.step_ms, 3),
        tokens_per_second=_best_by_method([*contests, plain]),
    )
    path = tuned.write(bundle)
    if as_json:
        print_json({"parts": asdict(parts), "contests": [_row(c) for c in contests], **asdict(tuned)})
        return
    _print_parts(parts)
    _print_contests(plain, contests)
    print(f"kept in {path.name}: predicted {tuned.predicted_step_ms} ms a step, measured {tuned.measured_step_ms} ms")


def _contests(pipe: "MirrorPipeline", texts: list[str], max_new_tokens: int) -> tuple["Contest", list["Contest"]]:
    """Heats on one text, finals on all of them; plain decoding runs beside the finals."""
    from mirrorsd import GenerationConfig
    from mirrorsd.runtime.tuning import candidate_settings, contend

    sessions: dict[Any, Any] = {}

    def decode(setting: Any, method: str, prompt: str) -> Any:
        if setting not in sessions:
            sessions[setting] = pipe.session(setting)
        session = sessions[setting]
        config = GenerationConfig(max_new_tokens=max_new_tokens, ignore_eos=True, method=method)  # type: ignore[arg-type]
        return session.generate(prompt, config)

    exit_layers = [point.layer for point in pipe.manifest.target.exits]
    settings = candidate_settings(pipe.speculation, pipe.manifest.draft.shape.num_streams, exit_layers)
    own = (pipe.speculation.root_source, pipe.speculation.roots, pipe.speculation.exits)
    by_window = [setting for setting in settings if (setting.root_source, setting.roots, setting.exits) == own]
    with progress("heats", len(settings) + len(by_window) + 1) as advance:
        decode(settings[0], "mirror", texts[0])
        advance("warm")
        # Where both sides share their cores taking turns wins, with other windows; roots mean nothing to it.
        heats = contend(settings, ["mirror"], texts[:1], decode, advance)
        heats += contend(by_window, ["serial"], texts[:1], decode, advance)
    heats.sort(key=lambda contest: -contest.tokens_per_second)
    finalists = list(dict.fromkeys(contest.speculation for contest in heats))[:_FINALISTS]
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
