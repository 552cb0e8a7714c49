"""Fake sessions behind the real protocols: a handler decides, everything else is the real runtime.

For scheduler tests here, and for programs that embed mirrorsd and want to test against a scripted model.
"""

import threading
from collections.abc import Callable, Collection, Sequence
from typing import Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from mirrorsd.devices.draft_memory import RowBlock, TipGuesses
from mirrorsd.devices.slot_draft import NoiseSource
from mirrorsd.graphs.contract import DraftShape
from mirrorsd.graphs.errors import DeviceError
from mirrorsd.graphs.manifest import Head
from mirrorsd.runtime.backends.protocol import DraftSession, HeadGuesses, Kept, TargetBatch, TargetSession
from mirrorsd.runtime.ledger import ExitGuesses, Ledger, TargetOutput, TargetPass
from mirrorsd.runtime.sampling.logit_processors import ShortlistFilter

Session = TypeVar("Session")
TargetHandler = Callable[[list[int]], NDArray[np.floating]]
"""Text so far -> logits `[V]` of the next token."""
DraftHandler = Callable[[list[int]], Sequence[int]]
"""Text so far -> the next `1 + s` tokens."""
HeadHandler = Callable[[list[int]], Sequence[int] | NDArray[np.int64]]
"""Text so far, its head token included -> the next `K` tokens, or `[K, m]` candidates for them, best first."""


class FakeModel(Generic[Session]):
    """A model whose sessions come from `make`, one after another, and run together in `batch` if there is one."""

    def __init__(self, make: Callable[[], Session], batch: TargetBatch | None = None) -> None:
        self._make, self._batch = make, batch

    def open_batch(self, num_slots: int) -> TargetBatch | None:
        """The `batch` that was given."""
        return self._batch

    def new_session(self) -> Session:
        """The next session."""
        return self._make()

    def describe(self) -> str:
        """Say that this is a fake."""
        return "fake"


class FakeBatch(TargetBatch):
    """A `TargetBatch` that asks one session after another, and notes who was together."""

    is_given_up = False

    def __init__(self, num_slots: int = 8, fail: Callable[[Sequence[TargetPass]], None] = lambda _: None) -> None:
        """`fail` may raise what the device would."""
        self.num_slots, self._fail = num_slots, fail
        self.passes: list[list[TargetPass]] = []

    def takes(self, one: TargetPass, others: Sequence[TargetPass]) -> bool:
        return len(others) < self.num_slots

    def run(self, passes: Sequence[TargetPass]) -> list[TargetOutput]:
        if len(passes) > self.num_slots or len({id(one.session) for one in passes}) < len(passes):
            raise AssertionError("these passes are no batch")
        self.passes.append(list(passes))
        self._fail(passes)
        return [one() for one in passes]

    def copy(self, source: TargetSession, into: TargetSession, num_rows: int) -> None:
        """There are no caches."""


class FakeTarget(TargetSession):
    """A `TargetSession` that asks a handler for each row; the exit asks `exit_handler` (default: the same)."""

    near_tie_gap = 1e-6
    row_group = 1
    takes_trees = True

    def __init__(
        self,
        handler: TargetHandler,
        *,
        vocab_size: int,
        context: int = 256,
        num_candidates: int = 4,
        exit_handler: TargetHandler | None = None,
        suffix_seconds: float = 0.0,
    ) -> None:
        self.context, self.vocab_size = context, vocab_size
        self.heads: dict[str, Head] = {}
        self._guessing: dict[str, HeadHandler] = {}
        self._read: dict[str, list[int]] = {}
        self._last_pass: tuple[int, list[int]] = 0, []
        self._handler, self._exit_handler = handler, exit_handler or handler
        self._num_candidates = num_candidates
        self._suffix_seconds = suffix_seconds
        self._text: list[int] = []
        self._is_terminated = threading.Event()
        self.num_passes = 0

    def add_head(self, head: Head, handler: HeadHandler) -> None:
        """Give it a head that asks a handler.

        Rows that the last pass did not have, a token that does not follow its row, or a row that was never read while
        the head remembers rows, fail loudly.
        """
        self.heads[head.kind] = head
        self._guessing[head.kind], self._read[head.kind] = handler, []

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
        following = [int(token) for token in tokens]
        first, of_pass = self._last_pass
        numbers = range(len(tokens)) if rows is None else rows.tolist()
        read = [of_pass[row] for row in numbers if row < len(of_pass)]
        if start != first + numbers[0] or len(read) != len(tokens) or read[1:] != following[:-1]:
            raise AssertionError(f"rows {start} .. {start + len(tokens) - 1} are not those of the last pass")
        text = [*self._text[:start], *read, following[-1]]
        if self.heads[kind].shape.num_layers:
            if self._read[kind][: start + 1] != text[: start + 1] and start:
                raise AssertionError(f"the head has not read all {start} rows before these")
            self._read[kind] = text
        ids = np.array(self._guessing[kind](text), dtype=np.int64)
        ids = ids.reshape(len(ids), -1)
        return HeadGuesses(ids, np.tile(-np.arange(ids.shape[1], dtype=np.float32), (len(ids), 1)))

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
        self.num_passes += 1
        self._extend(tokens, start)
        followed = [row - 1 for row in range(len(tokens))] if parents is None else parents.tolist()
        texts: list[list[int]] = []
        for token, row in zip(self._text[start:], followed, strict=True):
            texts.append([*(texts[row] if row >= 0 else self._text[:start]), token])
        with ledger.time("target", "prefix"):
            exit_logits = np.stack([self._exit_handler(text) for text in texts])
        guesses = _top(exit_logits, self._num_candidates)
        if on_exit is not None and (exits is None or guesses.layer in exits):
            on_exit(guesses)
        with ledger.time("target", "suffix"):
            self._is_terminated.clear()
            if self._suffix_seconds and self._is_terminated.wait(self._suffix_seconds):
                raise DeviceError("The pass was terminated.")
            logits = np.stack([self._handler(text) for text in texts])
        best = np.sort(logits, axis=-1)
        gap = (best[:, -1] - best[:, -2]).astype(np.float32)
        return TargetOutput(logits.argmax(axis=-1), gap, logits if with_logits else None)

    def prefill(self, tokens: NDArray[np.int64], start: int, *, ledger: Ledger) -> None:
        self._extend(tokens, start)

    def resumable(self, position: int) -> int:
        return position

    def read_cache(self, num_rows: int) -> Kept:
        """Its cache is the text."""
        return Kept(num_rows, [np.array(self._text[:num_rows], dtype=np.int64).reshape(1, 1, num_rows, 1)])

    def write_cache(self, kept: Kept) -> None:
        self._text = kept.rows[0].ravel().tolist()

    def terminate(self) -> None:
        self._is_terminated.set()

    def close(self) -> None:
        """Nothing to release."""

    def _extend(self, tokens: NDArray[np.int64], start: int) -> None:
        if start > len(self._text):
            raise AssertionError(f"rows start at {start}, but only {len(self._text)} positions are cached")
        self._text = self._text[:start] + [int(token) for token in tokens]
        self._last_pass = start, [int(token) for token in tokens]


class FakeDraft(DraftSession):
    """A `DraftSession` that rebuilds each row's text from cache slots, exactly as the mask would show it.

    A slot that was never written, or written for another position, fails loudly: cache bookkeeping is tested for real.
    It is ready for texts of up to `num_ready` slots (default: all of them) until more is prepared.
    """

    round_sizes = (8, 16, 32)
    max_tips = 32
    prefill_rows = 16

    def __init__(
        self,
        handler: DraftHandler,
        *,
        vocab_size: int,
        num_streams: int = 0,
        num_candidates: int = 1,
        capacity: int = 256,
        num_ready: int | None = None,
    ) -> None:
        self.capacity = capacity
        self.shape = DraftShape(
            num_layers=1,
            vocab_size=vocab_size,
            num_kv_heads=1,
            head_dim=8,
            num_streams=num_streams,
            num_candidates=num_candidates,
        )
        self._handler = handler
        self._slots: dict[int, tuple[int, int]] = {}
        self._rows: list[tuple[int, int]] = []
        self.num_passes = 0
        self.texts_fed: list[list[int]] = []
        self.num_ready = capacity if num_ready is None else num_ready

    def is_prepared(self, num_slots: int) -> bool:
        return num_slots <= self.num_ready

    def prepare(self, num_slots: int) -> None:
        self.num_ready = max(self.num_ready, num_slots)

    def use_noise(self, source: NoiseSource | None) -> None:
        """Its handler knows no noise."""

    def run(self, blocks: Sequence[RowBlock], tip_rows: Sequence[int]) -> TipGuesses:
        self.num_passes += 1
        self._rows = []
        texts: list[list[int]] = []
        for block in blocks:
            start = len(self._rows)
            rows = [(block.first_position + i, int(token)) for i, token in enumerate(block.tokens)]
            self._rows += rows
            seen = [self._slots[slot] for slot in (*range(block.chain_visible), *block.extra_slots)]
            seen += self._rows[: block.lead_rows]
            texts += [_as_text(seen + rows[: i + 1]) for i in range(len(rows))]
            assert block.lead_rows <= start
        self.texts_fed += texts
        ahead = 1 + self.shape.num_streams
        ids = np.array([list(self._handler(texts[row]))[:ahead] for row in tip_rows], dtype=np.int64)
        ids = ids.reshape(len(tip_rows), ahead, 1)
        return TipGuesses(ids, np.zeros(ids.shape, dtype=np.float32))

    def keep_rows(self, rows: Sequence[int], slots: Sequence[int]) -> None:
        for row, slot in zip(rows, slots, strict=True):
            if slot >= self.capacity:
                raise AssertionError(f"slot {slot} is past the capacity {self.capacity}")
            self._slots[slot] = self._rows[row]

    def move_slots(self, sources: Sequence[int], destinations: Sequence[int]) -> None:
        moved = [self._slots[slot] for slot in sources]
        self._slots.update(zip(destinations, moved, strict=True))

    def forget_after(self, num_slots: int) -> None:
        """Forget slots: a later look at one of them fails."""
        self._slots = {slot: row for slot, row in self._slots.items() if slot < num_slots}

    def close(self) -> None:
        """Nothing to release."""


def _as_text(rows: list[tuple[int, int]]) -> list[int]:
    positions = [position for position, _ in sorted(rows)]
    if positions != list(range(len(rows))):
        raise AssertionError(f"a row sees positions {positions}: its text has holes or doubles")
    return [token for _, token in sorted(rows)]


def _top(logits: NDArray[np.floating], count: int) -> ExitGuesses:
    ids = np.argsort(-logits, axis=-1, kind="stable")[:, :count]
    shifted = logits - logits.max(axis=-1, keepdims=True)
    logprobs = shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
    return ExitGuesses(1, ids, np.take_along_axis(logprobs, ids, axis=-1).astype(np.float32))
