"""Sessions that take at least as long as a card's `[pace]` says (see `device_maps.pace`)."""

import time
from collections.abc import Callable, Collection, Iterable, Sequence
from time import perf_counter

import numpy as np
from numpy.typing import NDArray

from mirrorsd.device_maps import Pace, interpolate
from mirrorsd.device_maps.pace import Curve
from mirrorsd.devices.draft_memory import RowBlock, TipGuesses
from mirrorsd.devices.slot_draft import NoiseSource
from mirrorsd.graphs.errors import BundleError
from mirrorsd.graphs.manifest import Head
from mirrorsd.runtime.backends.protocol import DraftModel, DraftSession, HeadGuesses, Kept, TargetModel, TargetSession
from mirrorsd.runtime.ledger import ExitGuesses, Ledger, Span, TargetOutput
from mirrorsd.runtime.sampling.logit_processors import ShortlistFilter


class PacedTargetModel:
    """A target whose sessions keep the pace."""

    def __init__(self, model: TargetModel, pace: Pace, num_layers: int) -> None:
        self._model, self._pace, self._num_layers = model, pace, num_layers

    def new_session(self) -> TargetSession:
        """A paced session with a cache of its own."""
        return PacedTarget(self._model.new_session(), self._pace, self._num_layers)

    def open_batch(self, num_slots: int) -> None:
        """A pace is one of passes of one conversation."""

    def describe(self) -> str:
        """What runs, and that it is paced."""
        return f"{self._model.describe()}, PACED ({_points(self._pace.target_ms)}; exit {self._pace.exit_ms:g} ms)"


class PacedDraftModel:
    """A draft whose sessions keep the pace."""

    def __init__(self, model: DraftModel, pace: Pace) -> None:
        self._model, self._pace = model, pace

    def new_session(self) -> DraftSession:
        """A paced session with a cache of its own."""
        return PacedDraft(self._model.new_session(), self._pace)

    def describe(self) -> str:
        """What runs, and that it is paced."""
        pace = self._pace
        return f"{self._model.describe()}, PACED ({_points(pace.draft_ms)}; hand-over {pace.transfer_ms:g} ms)"


class PacedTarget(TargetSession):
    """A `TargetSession` slowed to the pace; `num_layers` places the exits within the pass."""

    def __init__(self, session: TargetSession, pace: Pace, num_layers: int) -> None:
        self.context, self.vocab_size = session.context, session.vocab_size
        self.near_tie_gap = session.near_tie_gap
        self.row_group = 1  # by the pace, every row counts
        self.heads, self.takes_trees = session.heads, session.takes_trees
        self._is_prompt = False
        self._session, self._pace, self._num_layers = session, pace, num_layers
        _check_heads(session.heads.values())

    def run(
        self,
        tokens: NDArray[np.int64],
        start: int,
        *,
        with_logits: bool | ShortlistFilter,
        ledger: Ledger,
        on_exit: Callable[[ExitGuesses], None] | None = None,
        exits: Collection[int] | None = None,
        parents: NDArray[np.int64] | None = None,
    ) -> TargetOutput:
        """Run rows; the ledger gets the paced times, not those of the stand-in."""
        started = mark = perf_counter()
        pass_ms = interpolate(self._pace.target_ms, len(tokens))
        num_exits = 0

        def hold(ms: float, name: str) -> None:
            nonlocal mark
            wait_until(started + ms / 1e3)
            now = perf_counter()
            ledger.spans.append(Span("target", name, mark, now))
            mark = now

        def deliver(guesses: ExitGuesses) -> None:
            nonlocal num_exits
            reached_ms = pass_ms * guesses.layer / self._num_layers + num_exits * self._pace.exit_ms
            hold(reached_ms, "middle" if num_exits else "prefix")
            num_exits += 1
            hold(reached_ms + self._pace.exit_ms, "exit")
            assert on_exit is not None
            on_exit(guesses)

        output = self._session.run(
            tokens,
            start,
            with_logits=with_logits,
            ledger=Ledger(),
            on_exit=deliver if on_exit else None,
            exits=exits,
            parents=parents,
        )
        hold(pass_ms + num_exits * self._pace.exit_ms, "suffix")
        self._is_prompt = False
        return output

    def guess(
        self,
        kind: str,
        tokens: NDArray[np.int64],
        start: int,
        *,
        noise: NDArray[np.float32] | None = None,
        rows: NDArray[np.int64] | None = None,
        ledger: Ledger,
    ) -> HeadGuesses:
        """Run a head, which takes its share of what the pass takes."""
        started = perf_counter()
        ms = self._pace.head_ms(self.heads[kind].read_share, len(tokens), is_prompt=self._is_prompt)
        with ledger.time("target", "head"):
            guesses = self._session.guess(kind, tokens, start, noise=noise, rows=rows, ledger=Ledger())
            wait_until(started + ms / 1e3)
        return guesses

    def prefill(self, tokens: NDArray[np.int64], start: int, *, ledger: Ledger) -> None:
        started = perf_counter()
        with ledger.time("target", "prefill"):
            self._session.prefill(tokens, start, ledger=Ledger())
            self._is_prompt = True
            wait_until(started + self._pace.prefill_ms_per_row * len(tokens) / 1e3)

    def resumable(self, position: int) -> int:
        return self._session.resumable(position)

    def read_cache(self, num_rows: int) -> Kept:
        return self._session.read_cache(num_rows)

    def write_cache(self, kept: Kept) -> None:
        self._session.write_cache(kept)

    def terminate(self) -> None:
        self._session.terminate()

    def close(self) -> None:
        """Release the device."""
        self._session.close()


class PacedDraft(DraftSession):
    """A `DraftSession` slowed to the pace; a round carries one hand-over."""

    def __init__(self, session: DraftSession, pace: Pace) -> None:
        self.shape, self.capacity = session.shape, session.capacity
        self.round_sizes, self.max_tips, self.prefill_rows = session.round_sizes, session.max_tips, session.prefill_rows
        self._session, self._pace = session, pace

    def is_prepared(self, num_slots: int) -> bool:
        return self._session.is_prepared(num_slots)

    def prepare(self, num_slots: int) -> None:
        self._session.prepare(num_slots)

    def use_noise(self, source: NoiseSource | None) -> None:
        self._session.use_noise(source)

    def run(self, blocks: Sequence[RowBlock], tip_rows: Sequence[int]) -> TipGuesses:
        started = perf_counter()
        guesses = self._session.run(blocks, tip_rows)
        num_rows = sum(len(block.tokens) for block in blocks)
        is_prefill = num_rows > max(self.round_sizes)
        ms = self._pace.prefill_ms_per_row * num_rows if is_prefill else interpolate(self._pace.draft_ms, num_rows)
        wait_until(started + (ms + self._pace.transfer_ms) / 1e3)
        return guesses

    def keep_rows(self, rows: Sequence[int], slots: Sequence[int]) -> None:
        self._session.keep_rows(rows, slots)

    def move_slots(self, sources: Sequence[int], destinations: Sequence[int]) -> None:
        self._session.move_slots(sources, destinations)

    def forget_after(self, num_slots: int) -> None:
        self._session.forget_after(num_slots)

    def close(self) -> None:
        """Release the device."""
        self._session.close()


def wait_until(moment: float) -> None:
    """Sleep until `moment` (`perf_counter` seconds); at once if it is past."""
    left = moment - perf_counter()
    if left > 0:
        time.sleep(left)


def _check_heads(heads: Iterable[Head]) -> None:
    unknown = [head.kind for head in heads if not head.read_share]
    if unknown:
        raise BundleError(
            f"The bundle does not say how much its {unknown[0]} head reads (heads: read_share), and a paced card needs "
            "it. Export the bundle again."
        )


def _points(curve: Curve) -> str:
    return ", ".join(f"{rows:g} rows {ms:g} ms" for rows, ms in curve)
