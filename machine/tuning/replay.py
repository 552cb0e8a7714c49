"""Recorded models behind the real protocols: sessions of draft and target that look up what was said.

Owns how a row of a replay finds its place in a recording. Does not own time, which `simulation` hands in.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from mirrorsd.devices.draft_memory import RowBlock, TipGuesses
from mirrorsd.devices.slot_draft import NoiseSource
from mirrorsd.graphs.contract import DraftShape
from mirrorsd.graphs.manifest import Head
from mirrorsd.machine.tuning.recording import RecordedText, Recording
from mirrorsd.runtime.backends.protocol import DraftSession, HeadGuesses, Kept, TargetSession
from mirrorsd.runtime.ledger import ExitGuesses, Ledger, TargetOutput
from mirrorsd.runtime.sampling.logit_processors import ShortlistFilter

_ALIAS_STRIDE = 7919


class Place(NamedTuple):
    """Where a row stands: `depth` tokens into the continuation recorded after `head`; `is_alias` if only alike."""

    head: int
    depth: int
    is_alias: bool = False


class Places:
    """Follows texts through one recorded text.

    A token that goes on with the text leads to the next head; one that goes on with the draft's own continuation leads
    down it. Any other text was never recorded: it goes on like some other place of the same text, the same one every
    time. So all that can become the output is replayed as it was said, and branches that will be thrown away cost what
    such branches cost.
    """

    def __init__(self, text: RecordedText) -> None:
        self._text = text
        self._first = text.num_prompt

    def at(self, position: int) -> Place:
        """The place of the text's own token at a position; heads before the first one are the prompt's."""
        return Place(position - self._first + 1, 0)

    def after(self, place: Place, token: int) -> Place:
        """Where `token` leads to from `place`."""
        head, depth, is_alias = place
        text = self._text
        if head < 0 or (depth == 0 and not is_alias and head < text.num_heads and self._is_next(head, token)):
            return Place(head + 1, 0)
        if depth < text.depth and head < text.num_heads and (is_alias or text.windows[head, depth] == token):
            return Place(head, depth + 1, is_alias)
        return Place((head * _ALIAS_STRIDE + token + depth) % text.num_heads, 0, True)

    def _is_next(self, head: int, token: int) -> bool:
        return bool(self._text.tokens[self._first + head] == token)


def replayed_context(text: RecordedText) -> int:
    """Most tokens of a replay: one of a text that ends by itself has room behind it, as the real run had."""
    return len(text.tokens) + (text.depth + 1 if text.ends else 0)


class ReplayDraft(DraftSession):
    """A `DraftSession` that says what was recorded; `spend(num_rows)` takes the time of a round."""

    prefill_rows = 4096

    def __init__(
        self, recording: Recording, text: RecordedText, num_streams: int, spend: Callable[[int], None]
    ) -> None:
        num_candidates = text.draft_ids.shape[3]
        self.shape = DraftShape(
            num_layers=1,
            vocab_size=recording.vocab_size,
            num_kv_heads=1,
            head_dim=1,
            num_streams=num_streams,
            num_candidates=num_candidates,
        )
        self.round_sizes, self.max_tips = recording.round_sizes, recording.max_tips
        self.capacity = len(text.tokens) + 4096
        self._text, self._spend = text, spend
        self._places = Places(text)
        self._slots: dict[int, Place] = {}
        self._rows: list[Place] = []

    def is_prepared(self, num_slots: int) -> bool:
        """Always."""
        return True

    def prepare(self, num_slots: int) -> None:
        """Nothing to prepare."""

    def use_noise(self, source: NoiseSource | None) -> None:
        """What was recorded was ranked with its noise."""

    def run(self, blocks: Sequence[RowBlock], tip_rows: Sequence[int]) -> TipGuesses:
        self._rows = []
        for block in blocks:
            place = self._before(block)
            for token in block.tokens:
                place = self._places.after(place, int(token))
                self._rows.append(place)
        self._spend(len(self._rows))
        last = self._text.num_heads - 1
        heads = [min(max(self._rows[row].head, 0), last) for row in tip_rows]
        depths = [self._rows[row].depth for row in tip_rows]
        ahead = 1 + self.shape.num_streams
        ids, logprobs = self._text.draft_ids, self._text.draft_logprobs
        return TipGuesses(ids[heads, depths, :ahead], logprobs[heads, depths, :ahead])

    def keep_rows(self, rows: Sequence[int], slots: Sequence[int]) -> None:
        self._slots.update(zip(slots, (self._rows[row] for row in rows), strict=True))

    def move_slots(self, sources: Sequence[int], destinations: Sequence[int]) -> None:
        self._slots.update(zip(destinations, [self._slots[slot] for slot in sources], strict=True))

    def forget_after(self, num_slots: int) -> None:
        self._slots = {slot: place for slot, place in self._slots.items() if slot < num_slots}

    def close(self) -> None:
        """Nothing to release."""

    def _before(self, block: RowBlock) -> Place:
        """The place of the token that the block's first row follows."""
        if block.extra_slots:
            return self._slots[block.extra_slots[-1]]
        if block.lead_rows:
            return self._rows[block.lead_rows - 1]
        return self._slots[block.chain_visible - 1] if block.chain_visible else self._places.at(-1)


class ReplayTarget(TargetSession):
    """A `TargetSession` over a recording, and the heads beside it.

    `spend(num_rows, reports)` takes the time of a pass and hands every exit's report over when it is due;
    `spend_head(read_share, num_rows)` takes that of a head. Nothing is cached, and a prompt's time is not replayed.
    """

    near_tie_gap = 0.0
    row_group = 1
    takes_trees = True

    def __init__(
        self,
        recording: Recording,
        text: RecordedText,
        layers: Sequence[int],
        spend: Callable[[int, list[tuple[int, Callable[[], None]]]], None],
        spend_head: Callable[[float, int], None],
    ) -> None:
        self.context, self.vocab_size = replayed_context(text), recording.vocab_size
        self.heads: Mapping[str, Head] = {head.kind: head for head in recording.heads}
        self._text, self._spend, self._spend_head = text, spend, spend_head
        self._places = Places(text)
        self._exits = [(recording.layers.index(layer), layer) for layer in layers]

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
        """What was said behind these rows; the exits are those of the replay, whatever `exits` are asked for."""
        places = [self._places.at(start)]
        before = range(len(tokens) - 1) if parents is None else parents[1:].tolist()
        for parent, token in zip(before, tokens[1:].tolist(), strict=True):
            places.append(self._places.after(places[parent], token))
        heads = [min(max(place.head, 0), self._text.num_heads - 1) for place in places]
        depths = [place.depth for place in places]
        reports: list[tuple[int, Callable[[], None]]] = []
        for index, layer in self._exits if on_exit is not None else ():
            assert on_exit is not None
            ids, logprobs = self._text.exit_ids[index, heads, depths], self._text.exit_logprobs[index, heads, depths]
            reports.append((layer, partial(on_exit, ExitGuesses(layer, ids, logprobs))))
        self._spend(len(heads), reports)
        truth = self._text.tokens[np.minimum(self._text.num_prompt + np.asarray(heads), len(self._text.tokens) - 1)]
        return TargetOutput(truth, np.ones(len(heads), np.float32), None)

    def prefill(self, tokens: NDArray[np.int64], start: int, *, ledger: Ledger) -> None:
        """Nothing to read."""

    def resumable(self, position: int) -> int:
        """Anywhere."""
        return position

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
        """What the head has guessed behind the last of `tokens`, which stands at `start + len(tokens)`."""
        head = min(max(self._places.at(start + len(tokens)).head, 0), self._text.num_heads - 1)
        self._spend_head(self.heads[kind].read_share, len(tokens))
        return HeadGuesses(self._text.head_ids[kind][head], self._text.head_logprobs[kind][head])

    def read_cache(self, num_rows: int) -> Kept:
        """Nothing is kept."""
        return Kept(0, [])

    def write_cache(self, kept: Kept) -> None:
        """Nothing to take over."""

    def terminate(self) -> None:
        """No pass is ever running when another thread could ask."""

    def close(self) -> None:
        """Nothing to release."""
