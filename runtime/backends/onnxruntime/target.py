"""The target on ONNX Runtime (CPU, CUDA and other providers).

Hidden states, caches and logits stay on the device between the stages; ids and top candidates are the only things that
travel, logits only when sampling asks for them. One binding per number of rows is made once and reused; where the
device captures graphs, each is one, replayed at fixed addresses. All passes of a session write to one place. Where the
device has a queue of ours, the layers behind an exit are in it before the exit is read.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray

from mirrorsd.device_maps import TargetPlacement
from mirrorsd.devices.containers import available_memory
from mirrorsd.devices.onnxruntime.device import OnnxDevice, check_ports, describe_stages, rewritten
from mirrorsd.devices.onnxruntime.device_memory import integers_are_exact
from mirrorsd.devices.onnxruntime.masked_graph import NotMaskableError, check_masks, mask_specs, masked
from mirrorsd.devices.onnxruntime.packed_graph import NotPackableError
from mirrorsd.devices.onnxruntime.providers import ONNX_ERRORS
from mirrorsd.devices.onnxruntime.stage import OnnxStage, Tensor
from mirrorsd.graphs import names
from mirrorsd.graphs.contract import exit_contract, recurrence_contract, segment_contract
from mirrorsd.graphs.errors import DeviceError, raised_as
from mirrorsd.graphs.manifest import Head, TargetEntry
from mirrorsd.runtime.backends.onnxruntime.batch import OnnxBatch, SharedRun, is_as_alone
from mirrorsd.runtime.backends.onnxruntime.bound_pass import BoundPass, BoundSegment, SessionPasses
from mirrorsd.runtime.backends.onnxruntime.head import OnnxHead, OnnxHeads
from mirrorsd.runtime.backends.onnxruntime.rooms import Caches, moved, new_caches
from mirrorsd.runtime.backends.onnxruntime.states import RecurrentStates
from mirrorsd.runtime.backends.openvino.exits import OpenVinoExits
from mirrorsd.runtime.backends.protocol import HeadGuesses, Kept, TargetModel, TargetSession
from mirrorsd.runtime.ledger import ExitGuesses, Ledger, TargetOutput
from mirrorsd.runtime.sampling.logit_processors import ShortlistFilter
from mirrorsd.texts.config import LONGEST_WINDOW

_NEAR_TIE_GAPS = {"float32": 1e-3, "float16": 5e-2, "bfloat16": 4e-1}
_ROWS_ASKED = 8
"""That are computed alone and together, to see whether that is the same: with fewer it might be by chance."""
_FLOATS = {"fp32", "fp16", "bf16"}
_ROOM = 2
"""Times the size of the weights' file that must be free before they are packed once more: 1.4 are taken, and another
program may want the rest."""
_CAPTURED_ROWS = tuple(1 << power for power in range((LONGEST_WINDOW + 1).bit_length()))
"""Where passes are captured, others are filled up to one of these: a session captures them all, when it opens."""


class OnnxTargetModel(TargetModel):
    """The target's graphs, loaded once. Load it on the target worker's thread."""

    def __init__(
        self,
        bundle: Path,
        entry: TargetEntry,
        placement: TargetPlacement,
        exits: OpenVinoExits | None = None,
        heads: Sequence[Head] = (),
        *,
        takes_trees: bool = False,
    ) -> None:
        """Load the stages; `exits`, if given, stand in for the target's own. A head is loaded when it is asked.

        One that `takes_trees` has masked stages in place of the bundle's own.
        """
        self._bundle = bundle
        self.entry, self.placement, self.exits_elsewhere = entry, placement, exits
        self.heads = OnnxHeads(bundle, entry, heads, takes_trees=takes_trees)
        self.device = OnnxDevice(placement)
        if entry.computes_in == "integers" and not integers_are_exact(placement):
            raise DeviceError(
                "this bundle's products are of integers, and this processor cuts sums of two of them off at 16 bits: "
                "its texts would not be those of other machines. Export it with --products blocks; or install ONNX "
                "Runtime 1.30, if this is an older one"
            )
        kept = entry.shape.kept_on_processor
        if kept and placement.provider != "CPUExecutionProvider":
            raise DeviceError(
                f"this bundle's target has {kept}, which run on the processor only; the device map asks for "
                f"{placement.provider}. Choose a device map with the target on the processor (`mirrorsd devices`)"
            )
        dtype = entry.shape.dtype
        self.takes_trees = takes_trees
        self.segments = [(s, self._open_segment(bundle / s.file, dtype)) for s in entry.segments]
        own = () if exits else entry.exits
        self.exits = {e.layer: (e, self.device.open(bundle / e.file, dtype, is_exit=True)) for e in own}
        for s, stage in self.segments:
            span = {"first_layer": s.first_layer, "end_layer": s.end_layer}
            contract = segment_contract(entry.shape, s.name, taps=s.taps, **span)
            if takes_trees:
                contract = replace(contract, inputs=(*contract.inputs, *mask_specs(dtype)))
            check_ports(stage, contract)
        for e, stage in self.exits.values():
            check_ports(stage, exit_contract(entry.shape, e.name, num_candidates=e.num_candidates))
        self.recurrence = None if entry.recurrence_file is None else self._open_recurrence(bundle)
        self._row_group: int | None = None
        self._batches: list[OnnxBatch] = []
        if takes_trees:
            with closing(OnnxTarget(self, 1)) as session:
                check_masks(session, placement.provider)

    def open_batch(self, num_slots: int) -> OnnxBatch | None:
        """What runs several sessions together: on the processor, where it gives the bits of passes alone, and fits.

        Texts of recurrent layers take turns: a pass of several would have to keep their states apart. So do those of
        targets in 16 bits: ONNX Runtime fails in the rewritten graph's `Split` there, for a reason not yet found.
        Takes the target's weights once more: ONNX Runtime packs them for every stage that it opens.
        """
        is_wide = self.entry.shape.dtype == "float32"
        if self.device.place.is_device or self.recurrence is not None or not is_wide or not self._has_room():
            return None
        try:
            with ExitStack() as closing_all:
                sessions = [closing_all.enter_context(closing(self.new_session())) for _ in range(2)]
                batch = OnnxBatch(self, self.segments, num_slots, sessions[0].row_group)
                for session in sessions:
                    closing_all.callback(batch.leave, session)
                if not is_as_alone(batch, sessions, self.entry.shape.vocab_size):
                    return None
        except NotPackableError:
            return None
        self._batches = [batch]
        return batch

    def _has_room(self) -> bool:
        weights = (self._bundle / self.entry.weights_file).stat().st_size
        return available_memory() > _ROOM * weights

    def _open_segment(self, path: Path, dtype: str) -> OnnxStage:
        """Open a segment's stage, masked where rows may form trees."""
        if not self.takes_trees:
            return self.device.open(path, dtype)
        try:
            return self.device.open(path, dtype, rewritten=rewritten(path, partial(masked, dtype=dtype)))
        except NotMaskableError as error:
            raise DeviceError(
                f"siblings need a mask in the target's attention, and {path.name} takes none: {error}"
            ) from error

    @property
    def captured_rows(self) -> tuple[int, ...]:
        """Sizes of the passes that are captured.

        With weights that are floats it is one: so a row is computed alike in passes of any size, and texts of all
        methods are the same. On an H200 a row took 1.45 ms, sixteen 1.65 (`bench/results/h200`); 32 were not timed.
        With integers a pass of one row has kernels of its own, which are much faster than any for several.
        """
        return _CAPTURED_ROWS[-1:] if _has_float_weights(self.entry) else _CAPTURED_ROWS

    def leave_batches(self, session: "OnnxTarget") -> None:
        """Its caches are about to go."""
        for batch in self._batches:
            batch.leave(session)

    def _open_recurrence(self, bundle: Path) -> OnnxStage:
        """Open the stage that runs accepted rows of recurrent layers."""
        stage = self.device.open(bundle / str(self.entry.recurrence_file), self.entry.shape.dtype)
        check_ports(stage, recurrence_contract(self.entry.shape))
        return stage

    def new_session(self) -> "OnnxTarget":
        """A session with a cache of its own on the shared graphs; where the device captures passes, they are."""
        if self._row_group is None:
            self._row_group = self._find_row_group()
        session = OnnxTarget(self, self._row_group)
        if self.device.captures:
            session.capture()
        return session

    def _find_row_group(self) -> int:
        """Rows that are computed together: what the bundle says, or pairs where this processor wants them.

        Kernels for integer weights differ between processors, so they are asked: where a row alone gets other bits than
        in a longer pass, single rows would part the texts of plain and speculative decoding.
        """
        entry = self.entry
        if self.placement.provider != "CPUExecutionProvider":
            return 1
        if entry.row_group > 1 or not entry.spare_rows or _has_float_weights(entry):
            return entry.row_group
        session, tokens = OnnxTarget(self, 1), np.arange(min(_ROWS_ASKED, entry.context)) % entry.shape.vocab_size
        together = session.logits(tokens, 0)
        alone = np.concatenate([session.logits(tokens[row : row + 1], row) for row in range(len(tokens))])
        session.close()
        return 1 if np.array_equal(together, alone) else 2

    def describe(self) -> str:
        """One line for `pipe.placement`, with the providers that the graphs really use."""
        stages = [stage for _, stage in self.segments] + [stage for _, stage in self.exits.values()]
        elsewhere = f"; {self.exits_elsewhere.describe()}" if self.exits_elsewhere else ""
        from mirrorsd.devices.hardware import target_name  # which loads OpenVINO

        named = f", {target_name(self.device.placement)}" if self.device.place.is_device else ""
        return describe_stages(stages, self.device) + named + elsewhere


class OnnxTarget(TargetSession):
    """A `TargetSession` on an ONNX Runtime provider: one cache, and the bindings to it."""

    def __init__(self, model: OnnxTargetModel, row_group: int) -> None:
        entry, place = model.entry, model.device.place
        self.row_group = row_group
        self.context = entry.context - max(row_group - entry.row_group, 0)  # a group that ends there needs its room
        self.vocab_size = entry.shape.vocab_size
        self.takes_trees = model.takes_trees
        self.near_tie_gap = _NEAR_TIE_GAPS.get(entry.shape.dtype, 5e-2)
        self.heads = model.heads.entries
        self._model = model
        self._states = None if model.recurrence is None else RecurrentStates(entry.shape, model.recurrence, place)
        self._passes = SessionPasses(model, new_caches(entry, place, entry.capacity), self._states)
        self._running: ort.RunOptions | SharedRun | None = None
        self._taps: Mapping[int, Tensor] | None = None
        self._own_heads: dict[str, OnnxHead] = {}

    @property
    def caches(self) -> Caches:
        """Past and present keys and values, by name."""
        return self._passes.caches

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
        num_rows = len(tokens)
        tokens = self.rows_of(tokens, start, is_prefill=False)
        bound = self._bound(len(tokens), is_prefill=False)
        bound.write(tokens, start, num_rows, parents)
        if self._states is not None:
            with ledger.time("target", bound.segments[0].name):
                self._states.begin(start)
        for segment, before in zip(bound.segments, (None, *bound.segments), strict=False):
            segment.start()
            if before is not None and on_exit is not None and (exits is None or before.end_layer in exits):
                with ledger.time("target", "exit"):
                    guesses = self._guess(bound, before, num_rows)
                on_exit(guesses)
            with ledger.time("target", segment.name):
                is_heard = on_exit is not None and (exits is None or segment.end_layer in exits)
                segment.finish(is_needed=is_heard or segment is bound.segments[-1])
        if self._states is not None:
            self._states.end(num_rows, bound.fed)
        with ledger.time("target", "read"):
            return bound.read(num_rows, with_logits=with_logits)

    def logits(
        self, tokens: NDArray[np.int64], start: int, parents: NDArray[np.int64] | None = None
    ) -> NDArray[np.floating]:
        """A copy of what a pass says at its rows, `[S, V]`."""
        found = self.run(tokens, start, with_logits=True, ledger=Ledger(), exits=(), parents=parents).logits
        assert found is not None  # they were asked for
        return found.copy()

    def rows_of(self, tokens: NDArray[np.int64], start: int, *, is_prefill: bool) -> NDArray[np.int64]:
        """What is computed for so many rows: whole groups."""
        group = len(tokens) + -len(tokens) % self.row_group
        return self._filled_up(tokens, group if is_prefill else self._size(len(tokens), start))

    def joins(self, running: SharedRun, taps: Mapping[int, Tensor]) -> None:
        """Note that its rows are in a batch that is `running`, which leaves `taps` of them."""
        self._running, self._taps = running, taps

    def move_to(self, caches: Caches) -> None:
        """Use other caches from now on, in which its text is already."""
        self._passes.move_to(caches)

    def _filled_up(self, tokens: NDArray[np.int64], size: int) -> NDArray[np.int64]:
        """`size` rows: what comes behind the pass's own ones is overwritten by the next pass."""
        missing = size - len(tokens)
        return np.concatenate((tokens, np.zeros(missing, dtype=np.int64))) if missing else tokens

    def _size(self, num_rows: int, start: int) -> int:
        """Rows that are computed for so many: whole groups, or as many as were captured, where the cache has room."""
        if self._model.device.captures:
            room = self._model.entry.capacity - self._model.entry.spare_rows - start
            return next((size for size in self._model.captured_rows if num_rows <= size <= room), num_rows)
        return num_rows + -num_rows % self.row_group

    def capture(self) -> None:
        """Run every size of pass once, which captures it: in the middle of a text that would look like a slow step."""
        for size in self._model.captured_rows:
            self.warm_up(min(size, self.context))

    def _guess(self, bound: BoundPass, segment: BoundSegment, num_rows: int) -> ExitGuesses:
        elsewhere = self._model.exits_elsewhere
        if elsewhere is not None and segment.hidden is not None:
            return elsewhere.guess(segment.end_layer, segment.hidden.read()[:, :num_rows])
        exit_point = bound.exits[segment.end_layer]
        exit_point.run()
        ids, logprobs = exit_point.read()
        return ExitGuesses(segment.end_layer, ids[:num_rows], logprobs[:num_rows])

    def prefill(self, tokens: NDArray[np.int64], start: int, *, ledger: Ledger) -> None:
        num_rows = len(tokens)
        tokens = self.rows_of(tokens, start, is_prefill=True)
        bound = self._bound(len(tokens), is_prefill=True)
        bound.write(tokens, start, num_rows)
        with ledger.time("target", "prefill"):
            if self._states is not None:
                self._states.begin(start, is_prefill=True)
            for segment in bound.segments:
                segment.start()
                segment.finish(is_needed=segment is bound.segments[-1])
        if self._states is not None:
            self._states.end(num_rows, None)

    def resumable(self, position: int) -> int:
        return position if self._states is None else self._states.resumable(position)

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
        assert self._taps is not None  # there was a pass: the caller has its rows
        if kind not in self._own_heads:
            self._own_heads[kind] = self._model.heads.new(kind, self._model.device)
        head = self._own_heads[kind]
        self._running = head.options
        head.options.terminate = False
        with ledger.time("target", "head"):
            return head.run(self._taps, tokens, start, noise, np.arange(len(tokens)) if rows is None else rows)

    def warm_up(self, num_rows: int) -> None:
        """Run once with 1 and with `num_rows` rows, so that the first request pays nothing."""
        for size in {1, num_rows}:
            self.run(np.zeros(size, dtype=np.int64), 0, with_logits=False, ledger=Ledger(), on_exit=lambda _: None)

    def read_cache(self, num_rows: int) -> Kept:
        with raised_as(DeviceError, "ONNX Runtime could not read the cache", ONNX_ERRORS):
            rows = [value.numpy()[:, :, :num_rows].copy() for value in self._past_values()]
            return Kept(num_rows, rows, [] if self._states is None else self._states.read(num_rows))

    def write_cache(self, kept: Kept) -> None:
        with raised_as(DeviceError, "ONNX Runtime could not write the cache", ONNX_ERRORS):
            for value, new in zip(self._past_values(), kept.rows, strict=True):
                whole = value.numpy().copy()
                whole[:, :, : new.shape[2]] = new
                value.update_inplace(whole)
            if self._states is not None:
                self._states.write(kept.states, kept.num_rows)

    @property
    def copies_rows(self) -> bool:
        return not self._model.device.place.is_device and self._states is None

    def copy_rows(self, source: TargetSession, rows: range) -> None:
        assert isinstance(source, OnnxTarget)  # of the same model
        moved(source.caches, self.caches, rows)

    def _past_values(self) -> list[ort.OrtValue]:
        layers = self._model.entry.shape.attention_layers
        return [self.caches[name(layer)] for layer in layers for name in (names.past_key, names.past_value)]

    def terminate(self) -> None:
        """Ask the running pass to end early: ONNX Runtime looks at the flag between two operators.

        A pass that is others' too goes on, unless they want it as little.
        """
        running = self._running
        if isinstance(running, SharedRun):
            self._running = None
            running.give_up()
        elif running is not None:
            running.terminate = True

    def close(self) -> None:
        """Drop bindings, captured graphs, buffers and cache."""
        self._model.leave_batches(self)
        self._passes.close()
        self._taps = None
        self._own_heads.clear()

    def _bound(self, num_rows: int, *, is_prefill: bool) -> BoundPass:
        """The pass of so many rows, which is about to begin."""
        bound = self._passes.of(num_rows, is_prefill=is_prefill)
        self._taps, self._running = bound.taps, bound.options
        bound.options.terminate = False
        return bound


def _has_float_weights(entry: TargetEntry) -> bool:
    """Whether the weights of layers and head are floats."""
    return {entry.precision, entry.precision if entry.storage is None else entry.storage.head} <= _FLOATS
