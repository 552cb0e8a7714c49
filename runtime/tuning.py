"""Finding the fastest way to speculate on this machine: times of the parts, replays at those times, then contests.

Many settings are replayed from recorded texts at the parts' times (both devices at work), so that windows grow as long
as this machine's target makes rows cheap. The best few decode for real, and measured tokens per second decide.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from time import perf_counter
from typing import TypeVar

import numpy as np

from mirrorsd.device_maps import Pace
from mirrorsd.runtime.draft_session import RowBlock
from mirrorsd.runtime.engine import Engine
from mirrorsd.runtime.generation import GenerationResult
from mirrorsd.runtime.generation_config import SpeculationConfig
from mirrorsd.runtime.ledger import Ledger

ROW_COUNTS = (1, 2, 4, 8, 16)
_REPEATS = 12
_SIDE_BY_SIDE_SECONDS = 0.4

Timing = TypeVar("Timing")
Decode = Callable[[SpeculationConfig, str, str], GenerationResult]
"""Settings, method, prompt -> a finished text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PartTimes:
    """Medians in milliseconds.

    Attributes:
        target: by number of rows: `prefix`, `exit`, `suffix`.
        draft: by number of rows of a round.
        target_slowdown: a target pass beside a busy draft, over one alone.
        draft_slowdown: a draft round beside a busy target, over one alone.
    """

    target: dict[int, dict[str, float]]
    draft: dict[int, float]
    target_slowdown: float
    draft_slowdown: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Contest:
    """What one setting did."""

    speculation: SpeculationConfig
    method: str
    tokens_per_second: float
    step_ms: float
    predicted_step_ms: float
    mean_accepted: float
    reuse_rate: float


def measure_parts(engine: Engine) -> PartTimes:
    """Time every part, first alone, then both devices at once."""
    target = engine.target_worker.run(engine.target_model.new_session)
    draft = engine.draft_worker.run(engine.draft_model.new_session)

    def target_pass(num_rows: int) -> Ledger:
        ledger = Ledger()
        rows = np.zeros(num_rows, dtype=np.int64)
        target.run(rows, 64, with_logits=False, ledger=ledger, on_exit=lambda _: None)
        return ledger

    def draft_round(num_rows: int) -> float:
        started = perf_counter()
        draft.run([RowBlock([0] * num_rows, 64, 64)], range(num_rows))
        return 1e3 * (perf_counter() - started)

    def busy(work: Callable[[], object]) -> list[float]:
        times, end = [], perf_counter() + _SIDE_BY_SIDE_SECONDS
        while perf_counter() < end:
            started = perf_counter()
            work()
            times.append(1e3 * (perf_counter() - started))
        return times

    by_rows = {rows: _stage_medians(engine.target_worker.run(partial(_many, target_pass, rows))) for rows in ROW_COUNTS}
    by_size = {
        size: float(np.median(engine.draft_worker.run(partial(_many, draft_round, size)))) for size in draft.round_sizes
    }
    smallest = min(draft.round_sizes)
    side_target = engine.target_worker.submit(lambda: busy(lambda: target_pass(8)))
    side_draft = engine.draft_worker.submit(lambda: busy(lambda: draft_round(smallest)))
    target_alone = sum(by_rows[8].values())
    times = PartTimes(
        target=by_rows,
        draft=by_size,
        target_slowdown=float(np.median(side_target.result())) / target_alone,
        draft_slowdown=float(np.median(side_draft.result())) / by_size[smallest],
    )
    target.close()
    draft.close()
    return times


def candidate_settings(
    base: SpeculationConfig, num_streams: int, exit_layers: Sequence[int] = ()
) -> list[SpeculationConfig]:
    """The settings that compete: window length, passes, where roots come from with how many of them, and which exits.

    A bundle with several exits competes with each of them alone and with none, beside all of them as in the others.
    """
    gammas = (2, 3, 4, 5, 7, 9, 12)
    passes = (1, 2, 3) if num_streams else (1,)
    sources = (("proxy", 4), ("early", 4), ("progressive", 8), ("progressive", 16))
    by_window = [replace(base, gamma=g, passes=j) for g, j in product(gammas, passes)]
    by_roots = [replace(base, root_source=source, roots=roots) for source, roots in sources]
    choices = [(), *((layer,) for layer in exit_layers)] if len(exit_layers) > 1 else []
    by_exits = [replace(base, root_source="progressive", exits=layers) for layers in choices]
    return list(dict.fromkeys([base, *by_window, *by_roots, *by_exits]))


def contend(
    settings: Sequence[SpeculationConfig],
    methods: Sequence[str],
    prompts: Sequence[str],
    decode: Decode,
    advance: Callable[[str], None],
) -> list[Contest]:
    """Run every setting by every method on every prompt, in turn; fastest first."""
    results: dict[tuple[SpeculationConfig, str], list[GenerationResult]] = {}
    for prompt in prompts:
        for setting, method in product(settings, methods):
            results.setdefault((setting, method), []).append(decode(setting, method, prompt))
            advance(
                f"{method}, gamma {setting.gamma}, {setting.passes} passes, "
                f"{setting.roots} {setting.root_source} roots, exits {setting.exits}"
            )
    contests = [_judge(setting, method, texts) for (setting, method), texts in results.items()]
    return sorted(contests, key=lambda contest: -contest.tokens_per_second)


def predict_step_ms(result: GenerationResult) -> float:
    """The latency law (ALGORITHM.md, "Latency") with the parts' times of this very run.

    `T_prefix + T_exit + max(T_suffix, T_draft) + T_verify + P(fallback) T_fresh`; without overlap `T_target + T_draft`.
    """
    parts = result.stats.step_ms
    before, suffix = parts["prefix"] + parts["exit"], parts["suffix"]
    fresh = [span.seconds for span in result.spans if span.name == "fresh"]
    fresh_ms = 1e3 * sum(fresh) / max(result.stats.steps, 1)
    return before + suffix + parts["verify"] + fresh_ms


def _judge(setting: SpeculationConfig, method: str, texts: list[GenerationResult]) -> Contest:
    stats = [text.stats for text in texts]
    steps = [step for text in texts for step in text.steps]
    return Contest(
        speculation=setting,
        method=method,
        tokens_per_second=float(np.mean([stat.tokens_per_second for stat in stats])),
        step_ms=1e3 * float(np.mean([step.ended - step.started for step in steps])),
        predicted_step_ms=float(np.mean([predict_step_ms(text) for text in texts])),
        mean_accepted=float(np.mean([stat.mean_accepted for stat in stats])),
        reuse_rate=float(np.mean([stat.reuse_rate for stat in stats])),
    )


def _many(work: Callable[[int], Timing], num_rows: int) -> list[Timing]:
    work(num_rows)
    return [work(num_rows) for _ in range(_REPEATS)]


def _stage_medians(ledgers: list[Ledger]) -> dict[str, float]:
    names = dict.fromkeys(span.name for ledger in ledgers for span in ledger.spans if span.name != "read")
    return {
        name: 1e3 * float(np.median([sum(s.seconds for s in led.spans if s.name == name) for led in ledgers]))
        for name in names
    }


def pace_of(parts: PartTimes) -> Pace:
    """The parts' times as a pace, both devices at work: what a replay of this machine takes.

    A pass without its exits is the target's time; the prompt's tokens cost nothing.
    """
    slow = parts.target_slowdown
    target = tuple((float(rows), slow * _without_exit(stages)) for rows, stages in parts.target.items())
    draft = tuple((float(rows), parts.draft_slowdown * ms) for rows, ms in sorted(parts.draft.items()))
    return Pace(target_ms=target, draft_ms=draft, exit_ms=slow * parts.target[8].get("exit", 0.0))


def _without_exit(stages: dict[str, float]) -> float:
    return sum(ms for name, ms in stages.items() if name != "exit")
