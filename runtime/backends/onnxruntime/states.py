"""States of recurrent layers in one session: where they stand, and how they get to where a pass begins.

A state cannot be cut by a number, as a cache can. A pass reads one set of buffers and writes the other, and leaves what
its rows fed to the recurrence. After rejected rows the accepted ones run through the recurrence alone, from the state
before the pass; no product with a weight is repeated. On a processor they run in place: two thirds of the time, which
is that of moving the state (`bench/claims/models/rollback.py`). Further back lead snapshots only.

Owns: both sets, snapshots, and running accepted rows. Does not own: caches of keys and values (`target`),
which rows are accepted (the start of the next pass says it).
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray

from mirrorsd.devices.onnxruntime.stage import OnnxStage, Place, Tensor, run_options
from mirrorsd.graphs import names
from mirrorsd.graphs.contract import MOST_STATES, TargetShape, TensorSpec, fed_specs, state_specs
from mirrorsd.graphs.errors import DeviceError

SIDES = (0, 1)
_NOWHERE = (-1, -1, 0)
"""Positions before and after a pass, and rows in between, of states that nothing says anything about."""
_SPACING = 256
"""Tokens of an answer between two snapshots. To take one costs a copy of the state, less than a hundredth of a pass."""


class Snapshot:
    """The states after the first `position` tokens; `ends_prompt` where a prompt was read up to there."""

    __slots__ = ("arrays", "ends_prompt", "position")

    def __init__(self, position: int, arrays: list[NDArray[Any]], *, ends_prompt: bool) -> None:
        self.position, self.arrays, self.ends_prompt = position, arrays, ends_prompt


class AcceptedRows:
    """Runs the recurrence over rows that were accepted, from a set that holds the state before their pass.

    Passes of any size leave their rows in one place. As long as that is where it was, what was bound once is used
    again: of 18 layers there are 162 tensors, which take 0.25 ms to bind where a run of four rows takes 1.7
    (`bench/claims/models/rollback.py`).

    Attributes:
        is_in_place: whether the state behind them comes into the set that they begin with.
    """

    def __init__(self, shape: TargetShape, stage: OnnxStage, place: Place) -> None:
        self.is_in_place = not place.is_device
        self._stage, self._place = stage, place
        self._options = run_options(None, has_queue=False)
        self._specs = fed_specs(shape, shape.recurrent_layers)
        self._bindings: dict[tuple[int, int], ort.IOBinding] = {}
        self._bound: list[Tensor] = []

    def run(self, num_rows: int, fed: Mapping[str, Tensor], states: "RecurrentStates") -> None:
        """Run the first rows of those that a pass `fed`."""
        rows = [fed[spec.name] for spec in self._specs]
        if [one.value.data_ptr() for one in rows] != [one.value.data_ptr() for one in self._bound]:
            self._bindings, self._bound = {}, rows  # held, so that no other tensor can get these addresses
        key = num_rows, states.side
        if key not in self._bindings:
            self._bindings[key] = self._bind(rows, num_rows, states)
        self._stage.run(self._bindings[key], self._options)

    def _bind(self, fed: Sequence[Tensor], num_rows: int, states: "RecurrentStates") -> ort.IOBinding:
        binding, values = self._stage.session.io_binding(), states.values(states.side)
        for spec, rows in zip(self._specs, fed, strict=True):
            first = self._place.first_rows(rows, num_rows, self._stage.session, spec.name)
            binding.bind_ortvalue_input(spec.name, first.value)
        for past, present in zip(states.past, states.present, strict=True):
            binding.bind_ortvalue_input(past.name, values[past.name])
            binding.bind_ortvalue_output(present.name, values[past.name if self.is_in_place else present.name])
        return binding


class RecurrentStates:
    """Both sets of one session's states.

    Attributes:
        side: which set holds the state before the next pass; the other one is what it writes.
        past: what a pass reads, in the contract's order.
        present: what it writes.
    """

    def __init__(self, shape: TargetShape, stage: OnnxStage, place: Place) -> None:
        """Make both sets; `stage` runs accepted rows."""
        self.side = 0
        self.past, self.present = (
            state_specs(shape, shape.recurrent_layers, *named)
            for named in ((names.past_conv, names.past_state), (names.present_conv, names.present_state))
        )
        self._accepted = AcceptedRows(shape, stage, place)
        self._sets = [[place.tensor(_sizes(spec), spec.dtype) for spec in self.past] for _ in SIDES]
        self._fed: Mapping[str, Tensor] = {}
        self._before = self._after = self._num_fed = 0
        self._was_prefill = False
        self._snapshots: list[Snapshot] = []

    def values(self, side: int) -> dict[str, ort.OrtValue]:
        """What a pass binds that reads the set `side`: that set, and the other one to write to."""
        read = {spec.name: tensor.value for spec, tensor in zip(self.past, self._sets[side], strict=True)}
        written = {spec.name: tensor.value for spec, tensor in zip(self.present, self._sets[1 - side], strict=True)}
        return read | written

    def resumable(self, position: int) -> int:
        """The last position, at most `position`, at which a pass can begin."""
        if self._before <= position <= self._before + self._num_fed:
            return position
        known = [0, self._before, self._after, *(snapshot.position for snapshot in self._snapshots)]
        return max(place for place in known if place <= position)

    def begin(self, start: int, *, is_prefill: bool = False) -> None:
        """Have the state after the first `start` tokens in the set that the next pass reads.

        Raises:
            DeviceError: it is none of `resumable`, or the device failed.
        """
        self._move_to(start)
        ends_prompt = self._was_prefill and not is_prefill
        self._before = self._after = start
        self._num_fed, self._was_prefill = 0, False
        self._snapshots = [snapshot for snapshot in self._snapshots if snapshot.position <= start]
        last = self._snapshots[-1].position if self._snapshots else 0
        if start > last and (ends_prompt or start - last >= _SPACING):
            self._keep(start, ends_prompt=ends_prompt)

    def end(self, num_rows: int, fed: Mapping[str, Tensor] | None) -> None:
        """A pass is over of which so many rows count; `fed` are its own outputs, None where all its rows stay."""
        self._after = self._before + num_rows
        self._fed, self._num_fed = fed or {}, num_rows if fed else 0
        self._was_prefill = fed is None

    def read(self, position: int) -> list[NDArray[Any]]:
        """Copies of the states after `position` tokens, in the contract's order; before any token they are zeros."""
        if not position:
            return [np.zeros(_sizes(spec), dtype=spec.dtype) for spec in self.past]
        self.begin(position)
        return [tensor.read().copy() for tensor in self._sets[self.side]]

    def write(self, arrays: Sequence[NDArray[Any]], position: int) -> None:
        """Take over what `read` gave: nothing before is known any more."""
        for tensor, array in zip(self._sets[self.side], arrays, strict=True):
            tensor.write(array)
        self._before = self._after = position
        self._num_fed, self._snapshots = 0, []

    def _move_to(self, start: int) -> None:
        if start == self._before:
            return
        if start == self._after:
            self.side = 1 - self.side
        elif self._before < start < self._before + self._num_fed:
            num_rows, self._before, self._after, self._num_fed = start - self._before, *_NOWHERE
            self._accepted.run(num_rows, self._fed, self)
            self.side = self.side if self._accepted.is_in_place else 1 - self.side
        else:
            self._restore(start)

    def _keep(self, position: int, *, ends_prompt: bool) -> None:
        """Take a snapshot; where there are too many, one goes whose neighbours are nearest, ends of prompts last."""
        arrays = [tensor.read().copy() for tensor in self._sets[self.side]]
        self._snapshots.append(Snapshot(position, arrays, ends_prompt=ends_prompt))
        if len(self._snapshots) <= MOST_STATES - len(SIDES):
            return
        places = [0, *(snapshot.position for snapshot in self._snapshots)]
        gaps = [behind - before for before, behind in zip(places, places[2:], strict=False)]
        worth = [(self._snapshots[number].ends_prompt, gap) for number, gap in enumerate(gaps)]
        del self._snapshots[worth.index(min(worth))]

    def _restore(self, position: int) -> None:
        kept = next((snapshot for snapshot in self._snapshots if snapshot.position == position), None)
        if kept is None and position:
            raise DeviceError(
                f"The target has no state after {position} tokens; a pass can begin after {self.resumable(position)}."
            )
        for number, tensor in enumerate(self._sets[self.side]):
            tensor.write(kept.arrays[number] if kept is not None else np.zeros((), dtype=np.float32))


def _sizes(spec: TensorSpec) -> tuple[int, ...]:
    return tuple(int(size) for size in spec.shape)
