"""Measure a draft on text that its target wrote greedily.

Owns: agreement of the main row and the streams, the accepted length of chain windows filled by J passes, and how many
tokens per pass the draft confirms itself.
Does not own: speed; a good draft here can still be slow there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from mirrorsd.graphs.errors import ConfigError
from mirrorsd.training.models.streaming_draft import StreamingDraft
from mirrorsd.training.text.self_text import SelfText

__all__ = ["WindowStatistics", "fill_window", "measure_agreement", "measure_confirmed", "measure_windows"]


@dataclass(slots=True)
class WindowStatistics:
    """Accepted lengths of windows, one entry per step of the simulated decoding."""

    accepted: list[int] = field(default_factory=list)
    offered: list[int] = field(default_factory=list)

    def summary(self) -> dict[str, float]:
        """Return steps, mean accepted (correction not included), tokens per step (included), mean window length."""
        steps = max(len(self.accepted), 1)
        mean = sum(self.accepted) / steps
        return {
            "steps": len(self.accepted),
            "mean_accepted": round(mean, 3),
            "tokens_per_step": round(mean + 1, 3),
            "mean_window": round(sum(self.offered) / steps, 3),
        }


def fill_window(draft: StreamingDraft, context: Sequence[int], *, passes: int, gamma: int) -> list[int]:
    """Propose up to `gamma` tokens after `context` in `passes` passes of the draft.

    The first pass feeds the context: the main prediction at its last row, then the streams there. Each further pass
    feeds the window so far, keeps the longest prefix that the main rows agree with, and goes on from there: main
    prediction, then streams.

    Example with s = 2: pass 1 gives `[a, b, c]` (main, stream 1, stream 2). Fed back, the main rows predict `a` (after
    the context), `b` (after a) and `x` (after b) instead of `c`: kept are `a, b`, then `x` and the streams at row `b`:
    `[a, b, x, y, z]`.
    """
    window: list[int] = []
    for _ in range(passes):
        agreed, guesses = run_pass(draft, context, window)
        window = guesses[:gamma]
        if agreed == gamma:
            break
    return window


@torch.inference_mode()
def run_pass(draft: StreamingDraft, context: Sequence[int], window: Sequence[int]) -> tuple[int, list[int]]:
    """Feed `context` and `window`; return how much of the window the main rows agree with, and the next window."""
    first = len(context) - 1
    tips = torch.arange(first, first + len(window) + 1)
    hidden = draft(torch.tensor([[*context, *window]]), tips)
    by_main = draft.logits(hidden.main[0, first:]).argmax(-1).tolist()
    agreed = next((i for i, token in enumerate(window) if by_main[i] != token), len(window))
    own = [context[-1], *window][agreed]
    return agreed, [*window[:agreed], *draft.follow(hidden.main[0, first + agreed], hidden.streams[0, agreed], own)]


def measure_confirmed(
    draft: StreamingDraft, texts: Sequence[SelfText], *, passes: int = 4, stride: int = 8, longest: int = 96
) -> dict[str, float]:
    """Return the tokens per pass that the draft confirms itself, its first pass (which only guesses) left out.

    From every `stride`-th place of the texts the draft writes on alone. A pass confirms the streams that its main rows
    agree with, and adds one main prediction: with no streams, or useless ones, exactly 1 per pass.

    Example: a pass that agrees with two of three streams confirms 3 tokens.
    """
    counts: list[int] = []
    for text in texts:
        for place in range(text.prompt_length, min(len(text.tokens), text.prompt_length + longest), stride):
            _, window = run_pass(draft, text.tokens[:place], [])
            confirmed = 1
            for _ in range(passes - 1):
                agreed, window = run_pass(draft, text.tokens[:place], window)
                counts.append(agreed + 1 - confirmed)
                confirmed = agreed + 1
    return {"passes": len(counts), "tokens_per_pass": round(sum(counts) / max(len(counts), 1), 3)}


def measure_windows(
    draft: StreamingDraft, texts: Sequence[SelfText], *, passes: int, gamma: int = 6, longest: int = 96
) -> WindowStatistics:
    """Decode the texts again with chain windows, and count what the target would accept.

    Args:
        draft: The draft.
        texts: What the target wrote greedily; its tokens are the truth.
        passes: Passes of the draft per window (J).
        gamma: Longest window.
        longest: Tokens of each text that are decoded.

    Raises:
        ConfigError: `passes` or `gamma` is below 1.
    """
    if min(passes, gamma) < 1:
        raise ConfigError(f"passes is {passes} and gamma is {gamma}; both must be at least 1")
    statistics = WindowStatistics()
    for text in texts:
        place, end = text.prompt_length, min(len(text.tokens), text.prompt_length + longest)
        while place < end:
            window = fill_window(draft, text.tokens[:place], passes=passes, gamma=gamma)
            truth = text.tokens[place:end]
            pairs = zip(window, truth, strict=False)
            accepted = next((i for i, (ours, true) in enumerate(pairs) if ours != true), min(len(window), len(truth)))
            statistics.accepted.append(accepted)
            statistics.offered.append(len(window))
            place += accepted + 1
    return statistics


@torch.inference_mode()
def measure_agreement(draft: StreamingDraft, texts: Sequence[SelfText]) -> dict[str, Any]:
    """Return the share of positions where main row and streams equal the target's text (true text before them).

    Stream `j` is compared with the token `j` places after the one that the main row predicts; a link is told the true
    tokens before that.
    """
    hits = torch.zeros(1 + draft.num_streams)
    counts = torch.zeros(1 + draft.num_streams)
    for text in texts:
        ids = torch.tensor(text.tokens)
        rows = torch.arange(text.prompt_length - 1, len(ids) - 1)
        hidden = draft(ids[None], rows)
        known = (rows[:, None] + torch.arange(1, 1 + draft.num_streams)).clamp(max=len(ids) - 1)
        streams = draft.linked(hidden.streams[0], ids[known], ids[known - 1])
        stacked = torch.cat((hidden.main[0, rows][:, None], streams), dim=1)
        predicted = draft.logits(stacked).argmax(-1)
        for ahead in range(1 + draft.num_streams):
            inside = rows + 1 + ahead < len(ids)
            hits[ahead] += (predicted[inside, ahead] == ids[rows[inside] + 1 + ahead]).sum()
            counts[ahead] += inside.sum()
    shares = [round(share, 4) for share in (hits / counts.clamp(min=1)).tolist()]
    return {"positions": int(counts[0]), "main": shares[0], "streams": shares[1:]}
