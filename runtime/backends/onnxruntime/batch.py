"""Passes over the rows of several sessions at once, on the processor.

Owns: which session has which slot, the bindings of the packed stages, sharing out what a pass says. Does not own: the
stages' rewriting (`packed_graph`), who is in a pass (`devices/workers`).

A slot keeps its session's caches bound from pass to pass. Where the session is not in a pass, spare caches of a few
rows are in their place: what a slot without rows computes is written there, and read by nobody.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray

from mirrorsd.graphs import names
from mirrorsd.graphs.errors import DeviceError, raised_as
from mirrorsd.graphs.manifest import Segment
from mirrorsd.runtime.backends.onnxruntime.bound_pass import OpenedTarget, RowBuffers
from mirrorsd.runtime.backends.onnxruntime.packed_graph import OWN_ROWS, ROWS_OF_SLOTS, SLOT_ROWS, in_slot, packed
from mirrorsd.runtime.backends.onnxruntime.providers import ONNX_ERRORS
from mirrorsd.runtime.backends.onnxruntime.stage import OnnxStage, Place, Tensor, host_scalar, run_options
from mirrorsd.runtime.backends.protocol import NO_OUTPUT, TargetBatch, TargetOutput, TargetPass
from mirrorsd.runtime.ledger import Ledger, Span

Caches = Mapping[str, ort.OrtValue]
_ROWS_ASKED, _PAST = 16, 6
"""A text's rows, and how many of them have passed, when a batch is asked whether it gives the bits of passes alone."""


class BatchedSession(Protocol):
    """What a session has for a batch."""

    @property
    def caches(self) -> Caches:
        """Past and present keys and values, by name."""

    def rows_of(self, tokens: NDArray[np.int64], start: int, *, is_prefill: bool) -> NDArray[np.int64]:
        """What is computed for so many rows: whole groups."""

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
    """Where rows stand: those of each pass, all slots' with spare ones, and whose logits are wanted."""

    tokens: NDArray[np.int64]
    slot_rows: NDArray[np.int64]
    rows_of_slots: NDArray[np.int64]
    own_rows: NDArray[np.int64]
    logit_rows: NDArray[np.int64]
    first: list[int]
    first_logits: list[int]


class OnnxBatch(TargetBatch):
    """Several sessions' rows in one pass of packed stages."""

    def __init__(self, model: OpenedTarget, files: Sequence[tuple[Segment, OnnxStage]], num_slots: int) -> None:
        """Open the packed stages of a model beside its own ones, `files`.

        Raises:
            DeviceError: there is no room, or ONNX Runtime does not take them.
            NotPackableError: see there.
        """
        entry, device = model.entry, model.device
        self.num_slots = num_slots
        self._entry, self._place = entry, device.place
        self._stages: list[tuple[Segment, OnnxStage]] = []
        for segment, stage in files:
            rewritten = packed(stage.path.read_bytes(), num_slots, entry.spare_rows)
            self._stages.append((segment, device.open(stage.path, entry.shape.dtype, rewritten=rewritten)))
        self._bindings = [stage.session.io_binding() for _, stage in self._stages]
        self._ports = [
            (
                {port.name for port in stage.session.get_inputs()},
                {port.name for port in stage.session.get_outputs()},
            )
            for _, stage in self._stages
        ]
        self._buffers = RowBuffers(device.place)
        self._slots: list[BatchedSession | None] = [None] * num_slots
        self._used_at = [0] * num_slots
        self._num_passes = 0
        self._spare = _spare_caches(model, device.place)
        self._lengths = [(np.zeros(1, np.int32), *host_scalar()) for _ in range(num_slots)]
        for slot, (seqlens, _, total) in enumerate(self._lengths):
            self._bind(in_slot(names.SEQLENS_K, slot), ort.OrtValue.ortvalue_from_numpy(seqlens))
            self._bind(in_slot(names.TOTAL_LENGTH, slot), total)
            self._bind_caches(slot, self._spare)
        self._kept: dict[str, Any] = {}
        self._sizes = (0, 0)
        self._running: SharedRun | None = None
        self._results: dict[str, Tensor] = {}

    def run(self, passes: Sequence[TargetPass]) -> list[TargetOutput]:
        with raised_as(DeviceError, f"ONNX Runtime could not bind {len(passes)} conversations", ONNX_ERRORS):
            slots = self._seat([_session_of(one) for one in passes])
            rows = self._rows(passes, slots)
            self._bind_rows(rows)
        options = run_options(None, has_queue=False)
        running = self._running = SharedRun(options, len(passes))
        taps = self._taps_of(passes, rows)
        for one, own in zip(passes, taps, strict=True):
            _session_of(one).joins(running, own)
            if one.on_start is not None:
                one.on_start()
        for (segment, stage), binding in zip(self._stages, self._bindings, strict=True):
            started = [one.ledger.now() for one in passes]
            stage.run(binding, options)
            for one, start in zip(passes, started, strict=True):
                name = "prefill" if one.with_logits is None else segment.name
                one.ledger.spans.append(Span("target", name, start, one.ledger.now()))
        for own, first, one in zip(taps, rows.first, passes, strict=True):
            for layer, tap in own.items():
                tap.write(self._results[names.tap(layer)].read()[:, first : first + len(one.tokens)])
        return [self._output(one, first) for one, first in zip(passes, rows.first_logits, strict=True)]

    @property
    def is_given_up(self) -> bool:
        return self._running is not None and self._running.is_ended

    def leave(self, session: BatchedSession) -> None:
        """Let go of a session's caches, on the target's thread."""
        for slot, found in enumerate(self._slots):
            if found is session:
                self._take(slot, None)

    def _seat(self, sessions: Sequence[BatchedSession]) -> list[int]:
        """A slot for each: its last one if nobody has it, else one that nobody is in, used longest ago."""
        self._num_passes += 1
        wanted = {id(session) for session in sessions}
        for slot, found in enumerate(self._slots):
            if found is not None and id(found) not in wanted:
                self._take(slot, None)
        slots = {id(found): slot for slot, found in enumerate(self._slots) if found is not None}
        free = sorted((slot for slot, found in enumerate(self._slots) if found is None), key=self._used_at.__getitem__)
        for session in sessions:
            if id(session) not in slots:
                slots[id(session)] = slot = free.pop(0)
                self._take(slot, session)
        for slot in slots.values():
            self._used_at[slot] = self._num_passes
        return [slots[id(session)] for session in sessions]

    def _take(self, slot: int, session: BatchedSession | None) -> None:
        self._slots[slot] = session
        self._bind_caches(slot, self._spare if session is None else session.caches)

    def _rows(self, passes: Sequence[TargetPass], slots: Sequence[int]) -> _Rows:
        """Lay the rows out slot by slot, and write how many rows each has behind it."""
        spare, at = self._entry.spare_rows, 0
        tokens: list[int] = []
        logit_rows: list[int] = []
        slot_rows: list[list[int]] = [[0]] * self.num_slots
        first, first_logits = [0] * len(passes), [0] * len(passes)
        for seqlens, total, _ in self._lengths:
            seqlens[0], total[()] = 0, 1
        own: list[list[int]] = [[]] * self.num_slots
        for number, (one, slot) in enumerate(zip(passes, slots, strict=True)):
            found = _session_of(one).rows_of(one.tokens, one.start, is_prefill=one.with_logits is None).tolist()
            at, count = len(tokens), len(found)
            first[number], first_logits[number] = at, len(logit_rows)
            tokens += found
            own[slot] = list(range(at, at + count))
            slot_rows[slot] = own[slot] + [at + count - 1] * spare
            if one.with_logits is not None:
                logit_rows += range(at, at + count)  # whole groups here too
            seqlens, total, _ = self._lengths[slot]
            length = one.start + count + spare
            seqlens[0], total[()] = length - 1, length
        places: dict[int, int] = {}
        at = 0
        for slot in range(self.num_slots):
            places.update(zip(own[slot], range(at, at + len(own[slot])), strict=True))
            at += len(slot_rows[slot])
        return _Rows(
            np.array([tokens], np.int64),
            np.array([row for rows in slot_rows for row in rows], np.int64),
            np.array([len(rows) for rows in slot_rows], np.int64),
            np.array([places[row] for row in range(len(tokens))], np.int64),
            np.array(logit_rows or [0], np.int64),
            first,
            first_logits,
        )

    def _bind_rows(self, rows: _Rows) -> None:
        self._kept = {
            names.INPUT_IDS: rows.tokens,
            SLOT_ROWS: rows.slot_rows,
            ROWS_OF_SLOTS: rows.rows_of_slots,
            OWN_ROWS: rows.own_rows,
            names.LOGIT_ROWS: rows.logit_rows,
        }
        for name, array in self._kept.items():
            self._bind(name, ort.OrtValue.ortvalue_from_numpy(array))
        sizes = rows.tokens.shape[1], len(rows.logit_rows)
        if sizes != self._sizes:
            self._bind_results(*sizes)
            self._sizes = sizes

    def _bind_results(self, num_rows: int, num_logits: int) -> None:
        shape, buffers = self._entry.shape, self._buffers
        size = (1, num_rows, shape.hidden_size)
        hidden: Tensor | None = None
        for (segment, stage), binding, (_, outputs) in zip(self._stages, self._bindings, self._ports, strict=True):
            if hidden is not None:
                binding.bind_ortvalue_input(names.HIDDEN, hidden.value)
            name, hidden = names.HIDDEN if hidden is None else names.NEXT_HIDDEN, None
            if segment is not self._stages[-1][0]:
                hidden = buffers.rows(stage, name, size, shape.dtype)
                binding.bind_ortvalue_output(name, hidden.value)
            for layer in segment.taps:
                tap = hidden if layer == segment.end_layer else None
                tap = tap or buffers.rows(stage, names.tap(layer), size, shape.dtype)
                self._results[names.tap(layer)] = tap
                if names.tap(layer) in outputs:
                    binding.bind_ortvalue_output(names.tap(layer), tap.value)
        stage, binding = self._stages[-1][1], self._bindings[-1]
        found = {
            names.LOGITS: buffers.rows(stage, names.LOGITS, (1, num_logits, shape.vocab_size), shape.logits_dtype),
            names.ARGMAX_IDS: self._place.message((1, num_logits), "int64"),
            names.ARGMAX_GAP: self._place.message((1, num_logits), "float32"),
        }
        for name, tensor in found.items():
            binding.bind_ortvalue_output(name, tensor.value)
        self._results.update(found)

    def _taps_of(self, passes: Sequence[TargetPass], rows: _Rows) -> list[dict[int, Tensor]]:
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
            self._results[name].read()[0, own] for name in (names.ARGMAX_IDS, names.ARGMAX_GAP, names.LOGITS)
        )
        return TargetOutput(ids.copy(), gaps.copy(), logits.copy() if one.with_logits else None)

    def _bind_caches(self, slot: int, caches: Caches) -> None:
        for binding, (inputs, outputs) in zip(self._bindings, self._ports, strict=True):
            for name, value in caches.items():
                port = in_slot(name, slot)
                if port in inputs:
                    binding.bind_ortvalue_input(port, value)
                elif port in outputs:
                    binding.bind_ortvalue_output(port, value)

    def _bind(self, name: str, value: ort.OrtValue) -> None:
        for binding, (inputs, _) in zip(self._bindings, self._ports, strict=True):
            if name in inputs:
                binding.bind_ortvalue_input(name, value)


def is_as_alone(batch: OnnxBatch, sessions: Sequence[Any], vocab_size: int) -> bool:
    """Whether logits and caches get the same bits together as alone: the kernels of this processor are asked.

    `sessions` are two, of the batch's model, that are used for nothing else.
    """
    rows = np.arange(_ROWS_ASKED) * 7 % vocab_size
    texts = [rows, rows[::-1].copy()]
    plans = [(_PAST, 5), (_PAST - 1, 3)]
    found = []
    for session, text, (past, count) in zip(sessions, texts, plans, strict=True):
        session.prefill(text[:past], 0, ledger=Ledger())
        logits = session.logits(text[past : past + count], past)
        found.append([logits, *session.read_cache(past + count).rows])
    passes = [
        TargetPass(session=session, tokens=text[past : past + count], start=past, ledger=Ledger(), with_logits=True)
        for session, text, (past, count) in zip(sessions, texts, plans, strict=True)
    ]
    outputs = batch.run(passes)
    return all(
        np.array_equal(one, other)
        for session, output, (past, count), alone in zip(sessions, outputs, plans, found, strict=True)
        for one, other in zip([output.logits, *session.read_cache(past + count).rows], alone, strict=True)
    )


def _session_of(one: TargetPass) -> BatchedSession:
    session: Any = one.session
    return session  # type: ignore[no-any-return]


def _spare_caches(model: OpenedTarget, place: Place) -> Caches:
    """What a slot without a conversation writes to."""
    entry = model.entry
    shape = (1, entry.shape.num_kv_heads, 1 + entry.spare_rows, entry.shape.head_dim)
    layers = range(entry.shape.num_layers)
    both = ((names.past_key, names.present_key), (names.past_value, names.present_value))
    found: dict[str, ort.OrtValue] = {}
    for layer in layers:
        for past, present in both:
            found[past(layer)] = found[present(layer)] = place.tensor(shape, entry.shape.dtype).value
    return found


__all__ = ["BatchedSession", "OnnxBatch", "SharedRun", "is_as_alone"]
