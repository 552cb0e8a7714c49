"""Passes over the rows of several sessions at once, on the processor.

Owns: the bindings of the packed stages, sharing out what a pass says. Does not own: the stages' rewriting
(`packed_graph`), who is in a slot and who a guest (`seating`), the caches' memory (`rooms`), who is in a pass
(`devices/workers`).
"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray

from mirrorsd.devices.onnxruntime.device import rewritten
from mirrorsd.devices.onnxruntime.packed_graph import (
    Heads,
    NotPackableError,
    Sizes,
    guest_rows,
    of_guest,
    of_table,
    packed,
)
from mirrorsd.devices.onnxruntime.providers import ONNX_ERRORS
from mirrorsd.devices.onnxruntime.stage import OnnxStage, Place, RowBuffers, Tensor, host_scalar, run_options
from mirrorsd.graphs import names
from mirrorsd.graphs.contract import TargetShape
from mirrorsd.graphs.errors import DeviceError, raised_as
from mirrorsd.graphs.manifest import Segment, TargetEntry
from mirrorsd.runtime.backends.onnxruntime.bound_pass import OpenedTarget
from mirrorsd.runtime.backends.onnxruntime.rooms import Caches, Places, Room, Rooms, moved, new_caches
from mirrorsd.runtime.backends.onnxruntime.seating import (
    NUM_GUESTS,
    Plan,
    Seated,
    Slots,
    have_places,
    plan_of,
    seated,
)
from mirrorsd.runtime.backends.protocol import MOST_SEATED, TargetBatch
from mirrorsd.runtime.ledger import NO_OUTPUT, Ledger, Span, TargetOutput, TargetPass
from mirrorsd.texts.config import LONGEST_WINDOW

_MOST_AT_A_TABLE = 2
"""Slots that are attended together. More would all pay for the longest of more texts, one gives two cores uneven work.
With four, two and one, passes of SmolLM2 take 17.9, 18.3 and 20.7 ms for eight behind 300 tokens, 16.3, 12.7 and 14.8
for two behind 900, 22.9, 19.3 and 20.6 for eight behind 30 to 900 (`bench/studies/company/joint_passes.py BUNDLE`)."""
_PASSES_ASKED = (((6, 5), (5, 1)), ((11, 1), (6, 1)), ((12, 9), (7, 4)))
"""Pasts and rows of two texts, when a batch is asked whether it gives the bits of passes alone; one sum is odd."""


class BatchedSession(Protocol):
    """What a session has for a batch; `row_group` as in `TargetSession`."""

    row_group: int

    @property
    def caches(self) -> Caches:
        """Past and present keys and values, by name."""

    def move_to(self, caches: Caches) -> None:
        """Use other caches from now on, in which its text is already."""

    def joins(self, running: "SharedRun", taps: Mapping[int, Tensor]) -> None:
        """Its rows are in a batch that is `running`; `taps` of them will be there afterwards."""


class SharedRun:
    """The flag that ends a batch early, once all who are in it want that: others' rows are wanted still.

    Attributes:
        is_ended: whether all did.
    """

    def __init__(self, options: ort.RunOptions, num_sessions: int) -> None:
        self.is_ended = False
        self._options, self._num_wanted = options, num_sessions

    def give_up(self) -> None:
        """One session wants no more of it. From any thread."""
        self._num_wanted -= 1
        if not self._num_wanted:
            self.is_ended = True
            self._options.terminate = True


class _Rows(NamedTuple):
    """The rows of a pass, what the stages are told of them, and where each pass's own begin, logits too."""

    tokens: NDArray[np.int64]
    plan: Plan
    inputs: dict[str, NDArray[Any]]
    first: list[int]
    first_logits: list[int]


Stages = Sequence[tuple[Segment, OnnxStage]]


class _Bound:
    """What packed stages are bound to, until memory goes that they know; a pass binds what was not so in the last one.

    Attributes:
        bindings: of each stage.
        results: what the last pass has written, by name.
    """

    def __init__(self, stages: Stages, places: Sequence[str], buffers: RowBuffers) -> None:
        """Begin with nothing bound but the lengths of what is attended at these `places`."""
        self._stages, self._buffers = stages, buffers
        self._ports = [
            ({port.name for port in stage.session.get_inputs()}, {port.name for port in stage.session.get_outputs()})
            for _, stage in stages
        ]
        self.bindings = [stage.session.io_binding() for _, stage in stages]
        self.results: dict[str, Tensor] = {}
        self._lengths: dict[str, tuple[NDArray[np.int32], NDArray[Any]]] = {}
        for of in places:
            (total, value), seqlens = host_scalar(), np.zeros(1, np.int32)
            self._lengths[of] = seqlens, total
            self._bind(names.SEQLENS_K + of, ort.OrtValue.ortvalue_from_numpy(seqlens))
            self._bind(names.TOTAL_LENGTH + of, value)
            self.set_length(of, 1)
        self._room: Room | None = None
        self._guests: list[Caches | None] = [None] * NUM_GUESTS
        self._plan: Plan | None = None
        self._kept: dict[str, Any] = {}
        self._sizes = (0, 0)

    def holds(self, caches: Caches) -> bool:
        """Whether a guest's caches are bound, or were in the last pass."""
        return any(found is caches for found in self._guests)

    def set_length(self, of: str, length: int) -> None:
        """Say how long the longest text at a place is."""
        seqlens, total = self._lengths[of]
        seqlens[0], total[()] = length - 1, length

    def take_caches(self, room: Room, guests: Sequence[Caches]) -> None:
        """The slots' room and the guests' caches."""
        if room is not self._room:
            self._room = room
            for name, value in room.values.items():
                self._bind(name, value)
        for guest, caches in enumerate(guests):
            if caches is not self._guests[guest]:
                self._guests[guest] = caches
                for name, value in caches.items():
                    self._bind(of_guest(name, guest), value)

    def take_rows(self, rows: _Rows, entry: TargetEntry, place: Place) -> None:
        """What the stages are told of a pass's rows, and memory for what they say."""
        inputs = rows.inputs if rows.plan is self._plan else rows.inputs | rows.plan.fixed
        self._plan, self._kept = rows.plan, rows.inputs
        for name, array in inputs.items():
            self._bind(name, ort.OrtValue.ortvalue_from_numpy(array))
        sizes = rows.tokens.shape[1], len(rows.inputs[names.LOGIT_ROWS])
        if sizes != self._sizes:
            self._bind_results(*sizes, entry.shape, place)
            self._sizes = sizes

    def _bind(self, name: str, value: ort.OrtValue) -> None:
        for binding, (inputs, outputs) in zip(self.bindings, self._ports, strict=True):
            if name in inputs:
                binding.bind_ortvalue_input(name, value)
            elif name in outputs:
                binding.bind_ortvalue_output(name, value)

    def _bind_results(self, num_rows: int, num_logits: int, shape: TargetShape, place: Place) -> None:
        buffers = self._buffers
        size = (1, num_rows, shape.hidden_size)
        hidden: Tensor | None = None
        for (segment, stage), binding, (_, outputs) in zip(self._stages, self.bindings, self._ports, strict=True):
            if hidden is not None:
                binding.bind_ortvalue_input(names.HIDDEN, hidden.value)
            name, hidden = names.HIDDEN if hidden is None else names.NEXT_HIDDEN, None
            if segment is not self._stages[-1][0]:
                hidden = buffers.rows(stage, name, size, shape.dtype)
                binding.bind_ortvalue_output(name, hidden.value)
            for layer in segment.taps:
                tap = hidden if layer == segment.end_layer else None
                tap = tap or buffers.rows(stage, names.tap(layer), size, shape.dtype)
                self.results[names.tap(layer)] = tap
                if names.tap(layer) in outputs:
                    binding.bind_ortvalue_output(names.tap(layer), tap.value)
        stage, binding = self._stages[-1][1], self.bindings[-1]
        found = {
            names.LOGITS: buffers.rows(stage, names.LOGITS, (1, num_logits, shape.vocab_size), shape.logits_dtype),
            names.ARGMAX_IDS: place.message((1, num_logits), "int64"),
            names.ARGMAX_GAP: place.message((1, num_logits), "float32"),
        }
        for name, tensor in found.items():
            binding.bind_ortvalue_output(name, tensor.value)
        self.results.update(found)


class OnnxBatch(TargetBatch):
    """Several sessions' rows in one pass of packed stages.

    Attributes:
        num_slots: how many sessions.
        fewest_tokens: texts with no more are not attended together: but for one, they take turns.
    """

    def __init__(
        self, model: OpenedTarget, files: Sequence[tuple[Segment, OnnxStage]], num_slots: int, row_group: int
    ) -> None:
        """Open the packed stages of a model beside its own ones, `files`; `row_group` is that of its sessions.

        Raises:
            DeviceError: there is no room, or ONNX Runtime does not take them.
            NotPackableError: see there.
        """
        entry, device = model.entry, model.device
        self.num_slots = num_slots
        num_tables = max(1, num_slots // _MOST_AT_A_TABLE)
        at_each = num_slots // num_tables
        self._entry, self._place = entry, device.place
        self._stages: list[tuple[Segment, OnnxStage]] = []
        sizes, kinds = Sizes(num_tables, at_each, NUM_GUESTS, entry.spare_rows), set[Heads]()
        self.fewest_tokens, most_tokens = 0, entry.context
        for segment, stage in files:
            found = rewritten(stage.path, partial(packed, sizes=sizes))
            kinds.add(found.heads)
            self.fewest_tokens = max(self.fewest_tokens, found.fewest)
            most_tokens = min(most_tokens, found.window or entry.context)
            self._stages.append((segment, device.open(stage.path, entry.shape.dtype, rewritten=found.model)))
        if len(kinds) != 1:
            raise NotPackableError("its stages attend in different ways")
        (heads,) = kinds
        self._slots = Slots(num_tables, at_each, heads, self.fewest_tokens, most_tokens, entry.spare_rows)
        self._buffers = RowBuffers(device.place, LONGEST_WINDOW + 1)
        most_rows = self._slots.num_attended(MOST_SEATED + row_group - 1)
        self._rooms = Rooms(entry, device.place, Places(num_tables, at_each, most_rows))
        self._spare = new_caches(entry, device.place, 1 + entry.spare_rows)
        self._running: SharedRun | None = None
        self._bound = self._nothing_bound()

    def _nothing_bound(self) -> _Bound:
        places = [of_table("", table) for table in range(self._slots.num_tables)]
        places += [of_guest("", guest) for guest in range(NUM_GUESTS)]
        return _Bound(self._stages, places, self._buffers)

    def takes(self, one: TargetPass, others: Sequence[TargetPass]) -> bool:
        try:
            passes = [*others, one]
            return have_places(passes, [self._rooms.place_of(each.session) for each in passes], self._slots)
        except DeviceError:  # there is no room for its caches: it is run alone
            return False

    def run(self, passes: Sequence[TargetPass]) -> list[TargetOutput]:
        self._running = None  # what became of the last pass says nothing of these texts
        with raised_as(DeviceError, f"ONNX Runtime could not bind {len(passes)} conversations", ONNX_ERRORS):
            taken = seated(passes, [self._rooms.place_of(one.session) for one in passes], self._slots)
            assert taken is not None  # they were asked for
            self._move_in(passes)
            rows = self._rows(passes, taken)
            guests = [_session_of(one).caches for one in taken.guests]
            self._bound.take_caches(taken.room, [*guests, *[self._spare] * (NUM_GUESTS - len(guests))])
            self._bound.take_rows(rows, self._entry, self._place)
        options = run_options(None, has_queue=False)
        running = self._running = SharedRun(options, len(passes))
        taps = self._taps_of(passes)
        for one, own in zip(passes, taps, strict=True):
            _session_of(one).joins(running, own)
            if one.on_start is not None:
                one.on_start()
        for (segment, stage), binding in zip(self._stages, self._bound.bindings, strict=True):
            started = [one.ledger.now() for one in passes]
            stage.run(binding, options)
            for one, start in zip(passes, started, strict=True):
                name = "prefill" if one.with_logits is None else segment.name
                one.ledger.spans.append(Span("target", name, start, one.ledger.now()))
        for own, first, one in zip(taps, rows.first, passes, strict=True):
            for layer, tap in own.items():
                tap.write(self._bound.results[names.tap(layer)].read()[:, first : first + len(one.tokens)])
        return [self._output(one, first) for one, first in zip(passes, rows.first_logits, strict=True)]

    @property
    def is_given_up(self) -> bool:
        return self._running is not None and self._running.is_ended

    def leave(self, session: BatchedSession) -> None:
        """Let go of a session's caches, on the target's thread."""
        if self._rooms.leave(session) or self._bound.holds(session.caches):
            self._bound = self._nothing_bound()

    def _move_in(self, passes: Sequence[TargetPass]) -> None:
        """Have every session's text in its place."""
        for one in passes:
            session = _session_of(one)
            room, number = self._rooms.place_of(session)
            caches = room.caches_of(number)
            if session.caches is not caches:
                moved(session.caches, caches, range(one.start))
                session.move_to(caches)

    def _rows(self, passes: Sequence[TargetPass], taken: Seated) -> _Rows:
        """Lay the rows out pass by pass, and say where each is attended.

        All rows together are whole groups, and so are those with logits: the shortest pass has some more, if need be.
        """
        tokens, positions, logit_rows = list[int](), list[int](), list[int]()
        first, first_logits, counts = list[int](), list[int](), list[tuple[int, int]]()
        seats, group = {id(one): slot for slot, one in taken.slots.items()}, _session_of(passes[0]).row_group
        shortest = min(passes, key=lambda one: len(one.tokens))
        num_missing = -sum(len(one.tokens) for one in passes) % group
        for one in passes:
            found = one.tokens.tolist() + [0] * (num_missing if one is shortest else 0)
            first.append(len(tokens))
            first_logits.append(len(logit_rows))
            counts.append((seats.get(id(one), -1), len(found)))
            tokens += found
            positions += range(one.start, one.start + len(found))
            if one.with_logits is not None:
                logit_rows += range(first[-1], len(tokens))
        logit_rows += [0] * (-len(logit_rows) % group if logit_rows else 1)
        planned = plan_of(tuple(counts), self._slots)
        told = planned.told(np.array(positions, np.int64), taken.room.num_rows)
        for table, length in enumerate(told.lengths):
            self._bound.set_length(of_table("", table), length)
        for guest in range(NUM_GUESTS):
            length = 1
            if guest < len(taken.guests):
                length = taken.guests[guest].start + len(planned.fixed[guest_rows(guest)])
            self._bound.set_length(of_guest("", guest), length)
        inputs = told.inputs | {
            names.INPUT_IDS: np.array([tokens], np.int64),
            names.LOGIT_ROWS: np.array(logit_rows, np.int64),
        }
        return _Rows(inputs[names.INPUT_IDS], planned, inputs, first, first_logits)

    def _taps_of(self, passes: Sequence[TargetPass]) -> list[dict[int, Tensor]]:
        """Room for what each session's head will read: by then another pass may have been here."""
        layers = [layer for segment, _ in self._stages for layer in segment.taps]
        shape = self._entry.shape
        return [
            {layer: self._place.tensor((1, len(one.tokens), shape.hidden_size), shape.dtype) for layer in layers}
            for one in passes
        ]

    def _output(self, one: TargetPass, first: int) -> TargetOutput:
        """Copies: the next pass may begin before they have been read."""
        if one.with_logits is None:
            return NO_OUTPUT
        own = slice(first, first + len(one.tokens))
        ids, gaps, logits = (
            self._bound.results[name].read()[0, own] for name in (names.ARGMAX_IDS, names.ARGMAX_GAP, names.LOGITS)
        )
        return TargetOutput(ids.copy(), gaps.copy(), logits.copy() if one.with_logits else None)


def is_as_alone(batch: OnnxBatch, sessions: Sequence[Any], vocab_size: int) -> bool:
    """Whether logits and caches get the same bits together as alone: the kernels of this processor are asked.

    `sessions` are two, of the batch's model, that are used for nothing else. Where their context is too short to ask,
    it is not.
    """
    fewest = batch.fewest_tokens
    text = np.arange(fewest + max(past + count for asked in _PASSES_ASKED for past, count in asked)) * 7 % vocab_size
    if len(text) > sessions[0].context:
        return False
    texts = [text, text[::-1].copy()]
    for number, asked_of_each in enumerate(_PASSES_ASKED):
        passes = []
        for session, text, (behind, count) in zip(sessions, texts, asked_of_each, strict=True):
            past = fewest + behind
            if not number:
                session.prefill(text[:past], 0, ledger=Ledger())
            rows = text[past : past + count]
            passes.append(TargetPass(session=session, tokens=rows, start=past, ledger=Ledger(), with_logits=True))
        for one, output in zip(passes, batch.run(passes), strict=True):
            asked: Any = one.session
            num_rows = one.start + len(one.tokens)
            together = [output.logits, *asked.read_cache(num_rows).rows]
            alone = [asked.logits(one.tokens, one.start), *asked.read_cache(num_rows).rows]
            if not all(np.array_equal(first, other) for first, other in zip(together, alone, strict=True)):
                return False
    return True


def _session_of(one: TargetPass) -> BatchedSession:
    session: Any = one.session
    return session  # type: ignore[no-any-return]
