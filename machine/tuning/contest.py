"""Finding the fastest way to speculate on this machine: replays at the parts' times, then contests.

Many settings are replayed from recorded texts at the parts' times, so that windows grow as long as this machine's
target makes rows cheap. The best few decode for real, in every layout of the processor's cores, and measured tokens per
second decide.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import NamedTuple, TypeVar

import numpy as np

from mirrorsd.device_maps import Pace
from mirrorsd.device_maps.card import WINDOWS
from mirrorsd.graphs.errors import Cancelled
from mirrorsd.graphs.names import METHODS
from mirrorsd.machine.tuning.recording import Recording
from mirrorsd.machine.tuning.simulation import Scenario, simulate, tokens_per_second
from mirrorsd.runtime.policy.roots import RootScores
from mirrorsd.runtime.reporting.results import GenerationResult
from mirrorsd.texts.config import SpeculationConfig

_SAME_SPEED = 0.97
DRAFTING = ("mirror", "serial")
"""What has settings to find: the methods of the draft."""


class Entrant(NamedTuple):
    """One way to decode."""

    layout: str
    method: str
    speculation: SpeculationConfig


Prompt = TypeVar("Prompt")
Decode = Callable[[Entrant, Prompt], GenerationResult]
"""Entrant, prompt -> a finished text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Contest:
    """What one entrant did."""

    layout: str
    method: str
    speculation: SpeculationConfig
    tokens_per_second: float
    tokens_per_step: float
    step_ms: float
    predicted_step_ms: float
    mean_accepted: float
    reuse_rate: float


def candidate_settings(
    base: SpeculationConfig, num_streams: int, exit_layers: Sequence[int] = ()
) -> list[SpeculationConfig]:
    """The settings that compete: window length, passes, where roots come from with how many of them, and which exits.

    Lengths and passes are the most that is allowed: windows are cut to what is worthwhile, and a few compete uncut.
    A bundle with several exits competes with each of them alone and with none, beside all of them as in the others.
    """
    windows = ((3, 1), (6, 2), (12, 2), (12, 4)) if num_streams else ((3, 1), (6, 1), (12, 1))
    sources = (("proxy", 4), ("early", 8), ("early", 24), ("progressive", 8), ("progressive", 16), ("progressive", 24))
    most = windows[-1][1]
    by_window = [replace(base, gamma=g, passes=j, window=w) for (g, j), w in product(windows, WINDOWS)]
    heard = {source: "all" if source == "early" else base.exits for source, _ in sources}
    by_roots = [
        replace(base, gamma=12, passes=most, root_source=source, roots=roots, exits=heard[source])
        for source, roots in sources
    ]
    choices = [(), *((layer,) for layer in exit_layers)] if len(exit_layers) > 1 else []
    by_exits = [replace(base, gamma=12, root_source="progressive", exits=layers) for layers in choices]
    return list(dict.fromkeys([base, *by_window, *by_roots, *by_exits]))


def rank_settings(
    recording: Recording,
    settings: Sequence[SpeculationConfig],
    paces: Mapping[str, Pace],
    scores: RootScores,
    advance: Callable[[str], None] = lambda _: None,
    is_over: Callable[[], bool] = lambda: False,
) -> list[tuple[str, SpeculationConfig]]:
    """Replay every setting by every method, each method at its own pace: `(method, setting)`, fastest first.

    Once it `is_over` only the first setting of each method is replayed. Settings that differ in roots or exits only are
    one and the same to serial decoding, which has neither.
    """
    speeds: dict[tuple[str, SpeculationConfig], float] = {}
    by_window = {(setting.gamma, setting.passes, setting.window): setting for setting in reversed(settings)}
    for method, pace in paces.items():
        for number, setting in enumerate(by_window.values() if method == "serial" else settings):
            if number and is_over():
                break
            layers = None if setting.exits == "all" else setting.exits
            scenario = Scenario(pace=pace, speculation=setting, method=method, layers=layers, scores=scores)
            speeds[method, setting] = tokens_per_second(simulate(recording, scenario))
            advance(f"{method}, gamma {setting.gamma}")
    return sorted(speeds, key=lambda entry: -speeds[entry])


def finalists(ranked: Sequence[tuple[str, SpeculationConfig]], count: int) -> list[tuple[str, SpeculationConfig]]:
    """The first `count`, and the first of every method that is not among them; of mirror, with exits and without.

    An exit costs its own time, which a replay knows, and the draft's host a new plan, which it does not.
    """
    chosen = list(ranked[:count])
    for entry in ranked[count:]:
        if _kind(*entry) not in {_kind(*other) for other in chosen}:
            chosen.append(entry)
    return chosen


def _kind(method: str, setting: SpeculationConfig) -> tuple[str, bool]:
    return method, method == "mirror" and setting.root_source != "early" and bool(setting.exits)


def contend(
    entrants: Sequence[Entrant],
    prompts: Sequence[Prompt],
    decode: Decode[Prompt],
    advance: Callable[[str], None],
    is_over: Callable[[], bool] = lambda: False,
) -> list[Contest]:
    """Let every entrant decode every prompt, in turn; fastest first. Who comes first rotates.

    Ends behind the prompt at which it `is_over`, the first at the earliest; of one that is cancelled nothing counts.
    """
    results: dict[Entrant, list[GenerationResult]] = {}
    for number, prompt in enumerate(prompts):
        if number and is_over():
            break
        of_prompt: dict[Entrant, GenerationResult] = {}
        shift = number * max(len(entrants) // len(prompts), 1) % len(entrants)
        for entrant in (*entrants[shift:], *entrants[:shift]):
            try:
                of_prompt[entrant] = decode(entrant, prompt)
            except Cancelled:
                break
            setting = entrant.speculation
            advance(
                f"{entrant.layout}, {entrant.method}, gamma {setting.gamma}, {setting.passes} passes, "
                f"{setting.roots} {setting.root_source} roots, exits {setting.exits}"
            )
        if len(of_prompt) < len(entrants):
            break
        for entrant, result in of_prompt.items():
            results.setdefault(entrant, []).append(result)
    contests = [_judge(entrant, texts) for entrant, texts in results.items()]
    return sorted(contests, key=lambda contest: -contest.tokens_per_second)


def fastest_layout(*groups: Sequence[Contest]) -> str:
    """The layout whose best speeds have the highest geometric mean over the groups (greedy texts, sampled texts).

    Where layouts differ by 3 % or less, the one with the fastest plain decoding: that is what is left on texts that
    defeat the draft.
    """
    layouts = dict.fromkeys(contest.layout for contest in groups[0])

    def best(layout: str, methods: set[str]) -> float:
        speeds = [
            max(c.tokens_per_second for c in group if c.layout == layout and c.method in methods) for group in groups
        ]
        return float(np.exp(np.mean(np.log(speeds))))

    overall = {layout: best(layout, set(METHODS)) for layout in layouts}
    close = [layout for layout in layouts if overall[layout] >= _SAME_SPEED * max(overall.values())]
    return max(close, key=lambda layout: best(layout, {"plain"}))


def best_speculation(contests: Sequence[Contest]) -> Contest:
    """The fastest with the draft; of those by its method that differ from it by 3 % or less, the least bound one.

    That is one whose windows are cut by what they are worth, with the most passes and tokens allowed: it can follow
    texts that are easier than those of the contest, and gives up little on those that are not.
    """
    fastest = max((c for c in contests if c.method in DRAFTING), key=lambda contest: contest.tokens_per_second)
    least = _SAME_SPEED * fastest.tokens_per_second
    close = [c for c in contests if c.method == fastest.method and c.tokens_per_second >= least]

    def freedom(contest: Contest) -> tuple[bool, int, int, float]:
        given = contest.speculation
        return given.window == "worthwhile", given.passes, given.gamma, contest.tokens_per_second

    return max(close, key=freedom)


def predict_step_ms(result: GenerationResult) -> float:
    """The latency law with the parts' times of this very run.

    `T_prefix + T_exit + max(T_suffix, T_draft) + T_verify + P(fallback) T_fresh`; without overlap `T_target + T_draft`.
    """
    parts = result.stats.step_ms
    before, suffix = parts["prefix"] + parts["exit"], parts["suffix"]
    fresh = [span.seconds for span in result.spans if span.name == "fresh"]
    fresh_ms = 1e3 * sum(fresh) / max(result.stats.steps, 1)
    return before + suffix + parts["verify"] + fresh_ms


def disturbance(steps: Sequence[tuple[int, float]]) -> float:
    """Seconds that steps, `(rows, seconds)`, took beyond three times what is usual for as many rows.

    One step that waited for another program decides nothing so. Steps that are long because they bring much count
    whole.

    >>> disturbance([(1, 1.0)] * 9 + [(1, 50.0), (12, 4.0)])
    47.0
    """
    by_rows: dict[int, list[float]] = {}
    for rows, seconds in steps:
        by_rows.setdefault(rows, []).append(seconds)
    return float(sum(max(0.0, one - 3 * np.median(alike)) for alike in by_rows.values() for one in alike))


def _judge(entrant: Entrant, texts: list[GenerationResult]) -> Contest:
    stats = [text.stats for text in texts]
    num_tokens, num_steps = sum(text.num_tokens for text in texts), sum(stat.steps for stat in stats)
    steps = [(step.num_window, step.ended - step.started) for text in texts for step in text.steps]
    seconds = sum(stat.seconds - stat.prefill_ms / 1e3 for stat in stats) - disturbance(steps)
    return Contest(
        layout=entrant.layout,
        method=entrant.method,
        speculation=entrant.speculation,
        tokens_per_second=num_tokens / seconds,
        tokens_per_step=num_tokens / num_steps,
        step_ms=1e3 * seconds / num_steps,
        predicted_step_ms=float(np.mean([predict_step_ms(text) for text in texts])),
        mean_accepted=float(np.mean([stat.mean_accepted for stat in stats])),
        reuse_rate=float(np.mean([stat.reuse_rate for stat in stats])),
    )
