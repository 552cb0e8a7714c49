"""What a change of the draft's weights costs, on real text: agreement and accepted length.

Owns: the texts (what the target of a bundle writes, or before there is one pieces of the calibration text), the windows
drafted after every token of them, and the comparison. Does not own: compressing
(`draft_compression.py`), running graphs (`draft.py`, `target.py`).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import openvino as ov
import torch

from mirrorsd.export.bundle.target_graphs import TargetPlan
from mirrorsd.export.checkpoints.checkpoint import Checkpoint
from mirrorsd.export.checkpoints.weightless import open_model
from mirrorsd.export.verify.draft import CHAIN, DraftRun, LookUp, Tree, look_up_in
from mirrorsd.export.verify.rounded_weights import as_stored
from mirrorsd.export.verify.target import TargetRun
from mirrorsd.export.verify.text_passes import Pass
from mirrorsd.export.weights.block_formats import FLOAT_WEIGHTS, WeightFormats
from mirrorsd.families.low_rank_head import SHARES_EMBEDDING
from mirrorsd.graphs.draft_windows import GAMMA, num_accepted
from mirrorsd.graphs.manifest import AcceptedLength, DraftAccuracy, DraftEntry, TargetEntry
from mirrorsd.graphs.token_rows import TokenRows

Array = npt.NDArray[Any]

NUM_TEXTS = 12
NUM_LENGTH_TEXTS = 6
"""Texts that tell how good a draft is: each costs the target 48 passes."""
PROMPT_IDS, TEXT_IDS = 24, 72
NUM_DRAWS = 2000


class DraftTexts(NamedTuple):
    """Texts `[T]` of ids that a draft has to guess; two halves with nothing in common."""

    for_calibration: tuple[tuple[int, ...], ...]
    held_back: tuple[tuple[int, ...], ...]


def cut_texts(fitted: Array, measured: Array, context: int) -> DraftTexts:
    """Cut texts out of windows `[W, L]` of ids: the `measured` ones are held back, the `fitted` ones calibrate."""
    length = min(TEXT_IDS, context - GAMMA)

    def pieces(windows: Array) -> tuple[tuple[int, ...], ...]:
        starts = range(0, max(1, windows.shape[1] - length + 1), length)
        return tuple(tuple(window[start : start + length].tolist()) for window in windows for start in starts)

    return DraftTexts(pieces(fitted), pieces(measured))


def write_texts(
    bundle: Path, target: TargetEntry, ids: Sequence[int], *, with_calibration: bool, count: int = NUM_TEXTS
) -> DraftTexts:
    """Let the target, as exported into `bundle`, continue pieces of the text `ids` greedily.

    Args:
        bundle: The folder with the target's stages.
        target: Its entry.
        ids: Real text; its first half begins the texts for calibration, its second half those held back.
        with_calibration: Whether the former are wanted; they are left out otherwise.
        count: How many of each.
    """
    plan = TargetPlan(
        shape=target.shape,
        context=target.context,
        num_candidates=target.exits[0].num_candidates,
        adapters={point.layer: None for point in target.exits},
    )
    run = TargetRun(bundle, plan)
    middle = len(ids) // 2
    calibration = _continuations(run, ids[:middle], count) if with_calibration else ()
    return DraftTexts(calibration, _continuations(run, ids[middle:], count))


def measure_length(bundle: Path, target: TargetEntry, draft: DraftEntry, ids: Sequence[int]) -> AcceptedLength:
    """Measure the draft of a bundle on what its target writes after pieces of the text `ids`."""
    texts = write_texts(bundle, target, ids, with_calibration=False, count=NUM_LENGTH_TEXTS).held_back
    look_up = None if draft.embedding is None else TokenRows(bundle, draft.embedding)
    found = _walk(DraftRun(bundle / draft.file, draft.shape, TEXT_IDS, look_up), texts)
    num_windows = sum(map(len, found.accepted))
    return length_on(texts, float(found.by_text.sum()) / max(1, num_windows))


def length_on(texts: Sequence[Sequence[int]], accepted: float) -> AcceptedLength:
    """What was measured on `texts`, for the manifest."""
    num_windows = sum(max(0, len(text) - 1 - PROMPT_IDS) for text in texts)
    kept = tuple(tuple(map(int, text)) for text in texts)
    return AcceptedLength(accepted=round(accepted, 4), num_windows=num_windows, num_prompt=PROMPT_IDS, texts=kept)


def _continuations(run: TargetRun, ids: Sequence[int], count: int) -> tuple[tuple[int, ...], ...]:
    starts = np.linspace(0, max(0, len(ids) - PROMPT_IDS), count, dtype=int).tolist()
    return tuple(tuple(_continue(run, ids[start : start + PROMPT_IDS])) for start in starts)


def _continue(run: TargetRun, prompt: Sequence[int]) -> list[int]:
    """The prompt and what the target says next, to `TEXT_IDS` ids or the end of its context."""
    text = list(prompt)
    _, logits = run.forward(Pass(0, tuple(text), len(text)))
    while len(text) < min(TEXT_IDS, run.plan.context - GAMMA):
        text.append(int(logits[-1].argmax()))
        _, logits = run.forward(Pass(len(text) - 1, (text[-1],), 1))
    return text


@dataclass(slots=True)
class _Found:
    """What one draft says along the held-back texts: best tokens `[P, 1+s]`, accepted tokens of each text's windows."""

    best: Array
    accepted: list[list[int]]

    @property
    def by_text(self) -> Array:
        """Accepted tokens of each text, `[T]`."""
        return np.array([sum(windows) for windows in self.accepted])


class LookUps(NamedTuple):
    """The rows of the target's embedding as the checkpoint has them, and as the bundle stores them."""

    exact: LookUp | None = None
    stored: LookUp | None = None


NO_LOOK_UPS = LookUps()
"""Of a draft with an embedding of its own."""


def look_ups_of(draft: Checkpoint, formats: WeightFormats, dtype: torch.dtype, texts: DraftTexts) -> LookUps:
    """The rows of all tokens of `texts` in the embedding that `draft` may share with a target of `formats`."""
    if not draft.config.get(SHARES_EMBEDDING):
        return NO_LOOK_UPS
    ids = {token for text in (*texts.for_calibration, *texts.held_back) for token in text}
    of_table = replace(FLOAT_WEIGHTS, embedding=formats.embedding, carried=formats.carried, inputs=formats.inputs)
    stored = as_stored(open_model(draft), of_table, dtype)
    return LookUps(look_up_in(open_model(draft), ids), look_up_in(stored, ids))


def compare_drafts(
    before: Path | ov.Model,
    after: Path | ov.Model,
    draft: DraftEntry,
    texts: DraftTexts,
    scheme: str,
    look_ups: LookUps = NO_LOOK_UPS,
) -> DraftAccuracy:
    """Measure both drafts on the held-back texts, one after the other: a window is drafted after every token."""
    one, other = (
        _walk(DraftRun(source, draft.shape, TEXT_IDS, look_up), texts.held_back)
        for source, look_up in zip((before, after), look_ups, strict=True)
    )
    agreement = (one.best == other.best).mean(axis=0)
    num_windows = sum(map(len, one.accepted))
    return DraftAccuracy(
        scheme=scheme,
        agreement=tuple(round(float(share), 4) for share in agreement),
        accepted_before=round(float(one.by_text.sum()) / max(1, num_windows), 4),
        accepted_after=round(float(other.by_text.sum()) / max(1, num_windows), 4),
        num_windows=num_windows,
        num_positions=len(one.best),
        share_interval=share_interval(one.by_text, other.by_text),
    )


def share_interval(before: Array, after: Array) -> tuple[float, float]:
    """Bounds, at 95 %, of the share of accepted tokens that is left, from those of each text, `[T]`.

    Texts are drawn again and again (bootstrap), as the windows within one depend on each other. Where a draw has no
    accepted token to lose, nothing is lost.

    >>> share_interval(np.array([100] * 12), np.array([90] * 12)), share_interval(np.array([0, 3]), np.array([0, 2]))
    ((0.9, 0.9), (0.6667, 1.0))
    """
    drawn = np.random.default_rng(0).integers(0, len(before), (NUM_DRAWS, len(before)))
    totals = [np.asarray(counts)[drawn].sum(axis=1) for counts in (before, after)]
    shares = np.where(totals[0] > 0, totals[1] / np.maximum(totals[0], 1), 1.0)
    low, high = np.quantile(shares, (0.025, 0.975))
    return round(float(low), 4), round(float(high), 4)


def draft_inputs(run: DraftRun, texts: Sequence[Sequence[int]]) -> Iterator[dict[str, Array]]:
    """What the draft is fed along `texts`: chains of rows over a filled cache, every row a tip."""
    for text in texts:
        num_cached = 0
        for size in (PROMPT_IDS, *(16 for _ in range(PROMPT_IDS, TEXT_IDS, 16))):
            rows = tuple(text[num_cached : num_cached + size])
            if not rows:
                break
            feeds = run.feeds(_chain(rows), num_cached, np.arange(len(rows)))
            yield {name: value.copy() for name, value in feeds.items()}
            run.infer(feeds)
            run.keep(len(rows), num_cached)
            num_cached += len(rows)


def _walk(run: DraftRun, texts: Sequence[Sequence[int]]) -> _Found:
    best: list[Array] = []
    accepted: list[list[int]] = []
    for text in texts:
        said = run.forward(_chain(tuple(text)), 0, np.arange(len(text)))[0][:, :, 0]
        best.append(said)
        accepted.append(_num_accepted(said, text, run.shape.num_streams))
    return _Found(np.concatenate(best), accepted)


def _num_accepted(said: Array, text: Sequence[int], num_streams: int) -> list[int]:
    """Accepted tokens of each window, read off what is `said` `[T, 1+s]` behind the text's own rows.

    A window counts to its first wrong token, so that no pass behind a wrong one tells more.
    """
    rows: list[list[int]] = [*said.tolist(), *([said[-1].tolist()] * GAMMA)]  # a window may pass the text's end

    def best_after(fed: Sequence[int], num_cached: int) -> list[list[int]]:
        return rows[num_cached : num_cached + len(fed)]

    places = range(PROMPT_IDS, len(text) - 1)
    return [num_accepted(best_after, text[:at], text[at : at + GAMMA], num_streams) for at in places]


def _chain(rows: tuple[int, ...]) -> Tree:
    return Tree(rows, tuple(range(CHAIN, len(rows) - 1)))
