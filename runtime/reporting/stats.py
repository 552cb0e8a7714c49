"""What a finished request reports: computed once, from the ledger and the step records."""

from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from mirrorsd.runtime.decoding.request import Request, StepRecord
from mirrorsd.runtime.ledger import Ledger, Span

REUSE_SOURCES = ("early", "exit", "late")
_ENDS = {
    "eos": "the text's own end",
    "stop_token": "a stop token",
    "stop_string": "a stop string",
    "length": "cut off at max_new_tokens",
    "context": "cut off, the context is full",
}
"""Why a text ended, in words."""
_PLAIN_SHARE = 0.9
"""Of a text's tokens, when so many came one by one, the text was plain decoding's: the rest were trials."""
_LEAST_PLAIN_STEPS = 8
"""With fewer, a text says too little of how fast plain decoding is: a single step may take twice as long."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationStats:
    """Figures of one generation. Times in milliseconds are medians over steps unless said otherwise.

    Attributes:
        seconds: from the call to the last token.
        prefill_ms: from the call until the target has read the prompt, and verified what the text goes on from. All
            that is said of steps and of speed is about what came behind that.
        time_to_first_token_ms: from the call to the end of the step that decided the first returned token.
        tokens_per_second: returned tokens over the time from the end of the target's prefill to the end of the last
            step. By every method the prompt is left out, and the drafting of the first window counts.
        steps: verification passes.
        tokens_per_step: returned tokens per step, corrections and bonuses included: times `steps`, the new tokens.
        mean_accepted: returned window tokens per step, corrections and bonuses not included.
        num_drafted: drafted tokens that the target has checked.
        draft_right: share of them that were returned; None without any.
        reuse_rate: of the steps that wanted a next window, the share whose window was among the branches.
        reuse_by_source: the same, split: `early` (from the draft's own runners-up) and `exit` were ready, `late` was
            being finished when it was needed.
        repeat_rate: of the steps that wanted a next window, the share whose window was what the text had said before.
        draft_exposed_ms: mean time per step in which the target waited for the draft, the first window included.
        overlap: share of the draft's branch rounds (fallbacks apart) that lies inside the target's passes; 0 without.
        step_ms: `prefix`, `exit`, `suffix`, `draft` (all rounds of a step, or a head), `verify` (reading, accepting),
            and `host`: everything in a step that is neither a device call nor waiting for the draft.
        near_ties: returned tokens whose runner-up was so close that another row count might have chosen it.
        near_tie_positions: their absolute positions.
        steps_by_method: how many steps each method ran (one method, unless `auto` chose).
        num_prompt_tokens: tokens of the prompt.
        num_reused_tokens: prompt tokens found in the cache of the request before.
        stop_reason: why the text ended; see `GenerationResult`. Empty where nobody asked.
        plain_tokens_per_second: how fast plain decoding is on this pipeline: by the text's own plain steps, if it has
            several, else by what `auto` or `tune` has measured, else None.
        warnings: what went wrong without changing the text.
    """

    seconds: float
    prefill_ms: float
    time_to_first_token_ms: float
    tokens_per_second: float
    steps: int
    tokens_per_step: float
    mean_accepted: float
    num_drafted: int
    draft_right: float | None
    reuse_rate: float
    reuse_by_source: dict[str, float]
    repeat_rate: float
    draft_exposed_ms: float
    overlap: float
    step_ms: dict[str, float]
    near_ties: int
    near_tie_positions: list[int]
    steps_by_method: dict[str, int]
    num_prompt_tokens: int
    num_reused_tokens: int
    stop_reason: str = ""
    plain_tokens_per_second: float | None = None
    warnings: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        """One line for people: how much, how fast, how much of the draft was right, the prompt, why it ended."""
        speed = f"{round(self.tokens_per_step * self.steps)} tokens, {self.tokens_per_second:.1f} tokens/s"
        times = "" if self.times_plain is None else f", {self.times_plain:.1f} times plain"
        right = "" if self.draft_right is None else f"draft right {self.draft_right:.0%}"
        reused = f", {self.num_reused_tokens} of them known" if self.num_reused_tokens else ""
        prompt = f"prompt {self.num_prompt_tokens} tokens{reused} in {self.prefill_ms / 1e3:.2f} s"
        end = f"ended: {_ENDS.get(self.stop_reason, self.stop_reason)}" if self.stop_reason else ""
        return " | ".join(part for part in (speed + times, right, prompt, end) if part)

    @property
    def times_plain(self) -> float | None:
        """Speed over that of plain decoding, where that is known and the text was decoded otherwise.

        A text that was decoded plainly, but for a few trials, has nothing to compare: a ratio would tell how the two
        measurements of plain decoding differ.
        """
        num_plain = self.steps_by_method.get("plain", 0)
        if self.plain_tokens_per_second is None or num_plain >= _PLAIN_SHARE * self.tokens_per_step * self.steps:
            return None
        return self.tokens_per_second / self.plain_tokens_per_second

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {**asdict(self), "times_plain": self.times_plain}


def summarise(
    request: Request,
    started: float,
    ended: float,
    warnings: Sequence[str] = (),
    *,
    stop_reason: str = "",
    plain_tokens_per_second: float | None = None,
) -> GenerationStats:
    """Compute the figures of a request that took from `started` to `ended` (seconds of `perf_counter`)."""
    replayed = [step for step in request.steps if step.is_replay]
    steps = [step for step in request.steps if not step.is_replay]
    num_new = request.num_new - sum(1 + step.num_accepted for step in replayed)
    num_steps = max(len(steps), 1)
    prefilled = replayed[-1].ended if replayed else request.ledger.prefilled or (0.0 if steps else ended)
    decode_seconds = max((steps[-1].ended if steps else ended) - prefilled, 1e-9)
    wanted = Counter(step.next_source for step in steps if step.next_source != "none")
    num_wanted = max(sum(wanted.values()), 1)
    by_source = {source: wanted[source] / num_wanted for source in REUSE_SOURCES if wanted[source]}
    num_drafted = sum(step.num_window + step.num_siblings for step in steps)
    num_accepted = sum(step.num_accepted for step in steps)
    exposed = sum(span.seconds for span in request.ledger.spans if span.name == "exposed" and span.start >= prefilled)
    return GenerationStats(
        seconds=ended - started,
        prefill_ms=1e3 * (prefilled - started),
        time_to_first_token_ms=1e3 * ((steps[0].ended if steps else ended) - started),
        tokens_per_second=num_new / decode_seconds,
        steps=len(steps),
        tokens_per_step=num_new / num_steps,
        mean_accepted=num_accepted / num_steps,
        num_drafted=num_drafted,
        draft_right=num_accepted / num_drafted if num_drafted else None,
        reuse_rate=sum(by_source.values()),
        reuse_by_source=by_source,
        repeat_rate=wanted["text"] / num_wanted,
        draft_exposed_ms=1e3 * exposed / num_steps,
        overlap=measure_overlap(request.ledger.spans),
        step_ms=_step_times(steps, request.ledger),
        near_ties=len(request.near_ties),
        near_tie_positions=list(request.near_ties),
        steps_by_method=dict(Counter(step.method for step in steps)),
        num_prompt_tokens=request.num_prompt,
        num_reused_tokens=request.num_reused,
        stop_reason=stop_reason,
        plain_tokens_per_second=_speed_of_plain_steps(request) or plain_tokens_per_second,
        warnings=list(warnings),
    )


def _speed_of_plain_steps(request: Request) -> float:
    """Tokens per second of the text's plain steps, what the target waited for drafts not counted; 0 of few steps."""
    steps = [step for step in request.steps if step.method == "plain"]
    if len(steps) < _LEAST_PLAIN_STEPS:
        return 0.0
    starts = [step.started for step in steps]
    seconds = sum(step.own_seconds for step in steps)
    for span in request.ledger.spans:
        index = bisect_right(starts, span.start) - 1
        if span.name == "exposed" and index >= 0 and span.start < steps[index].ended:
            seconds -= span.seconds
    return sum(1 + step.num_accepted for step in steps) / max(seconds, 1e-9)


def measure_overlap(spans: Sequence[Span]) -> float:
    """Share of the draft's `expand` time that lies inside target passes.

    A round from 0 to 4 s beside passes from 1 to 3 s and from 3 to 4 s overlaps for 3 of 4 seconds:

    >>> spans = [Span("draft", "expand", 0, 4), Span("target", "prefix", 1, 3), Span("target", "suffix", 3, 4)]
    >>> measure_overlap(spans)
    0.75
    """
    passes = sorted((s.start, s.end) for s in spans if s.is_of_pass)
    starts = [start for start, _ in passes]
    total = inside = 0.0
    for span in spans:
        if span.device != "draft" or span.name != "expand":
            continue
        total += span.seconds
        first = max(bisect_left(starts, span.start) - 1, 0)
        for start, end in passes[first:]:
            if start >= span.end:
                break
            inside += max(0.0, min(end, span.end) - max(start, span.start))
    return inside / total if total else 0.0


def _step_times(steps: Sequence[StepRecord], ledger: Ledger) -> dict[str, float]:
    """Median milliseconds per step of each part."""
    if not steps:
        return {}
    starts = [step.started for step in steps]
    parts: list[dict[str, float]] = [defaultdict(float) for _ in steps]
    for span in ledger.spans:
        index = bisect_left(starts, span.start) - 1
        if index >= 0 and span.name != "prefill" and span.start < steps[-1].ended:
            parts[index][f"{span.device}.{span.name}"] += span.seconds
    rows = [_split_step(step, part) for step, part in zip(steps, parts, strict=True)]
    return {name: round(1e3 * float(np.median([row[name] for row in rows])), 4) for name in rows[0]}


def _split_step(step: StepRecord, part: dict[str, float]) -> dict[str, float]:
    target = {name.removeprefix("target."): s for name, s in part.items() if name.startswith("target.")}
    head = target.pop("head", 0.0)  # the target's device runs it while the target waits
    busy = sum(target.values())
    exposed = part["host.exposed"]
    return {
        "prefix": target.get("prefix", 0.0) + sum(s for name, s in target.items() if name.startswith("middle")),
        "exit": target.get("exit", 0.0),
        "suffix": target.get("suffix", 0.0),
        "draft": part["draft.expand"] + part["draft.fresh"] + head,
        "verify": target.get("read", 0.0) + part["host.accept"],
        "host": max(0.0, step.ended - step.started - busy - exposed),
    }
