"""The exits on a device of their own (an NPU, through OpenVINO): hidden states travel there, ids come back.

An exit is a norm, a projection and a top-k over a few rows: work that a target's GPU may be spared. It runs where its
answer is first looked at, on the draft's worker, while the target goes on with its suffix.
"""

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import openvino as ov
from numpy.typing import NDArray

from mirrorsd.device_maps import ExitPlacement
from mirrorsd.devices.openvino.core import new_core
from mirrorsd.devices.openvino.draft_shapes import OPENVINO_ERRORS, device_options, host_options
from mirrorsd.devices.openvino.npu_blobs import BundleBlobs
from mirrorsd.graphs import names
from mirrorsd.graphs.errors import DeviceError, raised_as
from mirrorsd.graphs.manifest import TargetEntry
from mirrorsd.runtime.ledger import ExitGuesses

ROW_BUCKETS = (1, 8, 16, 32)


def exit_shape(name: str, rows: int) -> str:
    """What an exit compiled for so many rows is called."""
    return f"{name}-{rows}"


class OpenVinoExits:
    """All exits of a target, compiled for one device by number of rows. Shared by all sessions."""

    def __init__(self, bundle: Path, entry: TargetEntry, placement: ExitPlacement) -> None:
        self.placement = placement
        self._core = new_core()
        if host := host_options(placement.as_draft):
            self._core.set_property("CPU", host)
        self._files = {point.layer: bundle / point.file for point in entry.exits}
        is_npu = placement.device == "NPU" and not placement.emulated
        self._ahead = BundleBlobs(bundle, self._core) if is_npu else None
        self._width = entry.shape.hidden_size
        self._requests: dict[tuple[int, int], _ExitRequest] = {}

    def describe(self) -> str:
        """One line for `pipe.placement`."""
        emulated = " (emulated on CPU)" if self.placement.emulated else ""
        return f"exits: openvino {self.placement.device}{emulated}, {self.placement.precision}"

    def warm_up(self, num_rows: int) -> None:
        """Compile and run what passes of up to `num_rows` rows use."""
        for layer in self._files:
            for rows in {1, num_rows}:
                self._request(layer, rows).run(np.zeros((1, rows, self._width), dtype=np.float32))

    def guess(self, layer: int, hidden: NDArray[Any]) -> ExitGuesses:
        """What the exit after `layer` layers says about `hidden [1, S, H]`; worked out when it is first looked at.

        Raises:
            DeviceError: (at that time) the device does not take the exit, or fails.
        """
        # Copied: the next pass writes into the same memory.
        rows = np.array(hidden, dtype=np.float32)
        return ExitGuesses.later(layer, partial(self._run, layer, rows))

    def _run(self, layer: int, rows: NDArray[np.float32]) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        return self._request(layer, rows.shape[1]).run(rows)

    def _request(self, layer: int, num_rows: int) -> "_ExitRequest":
        bucket = next((rows for rows in ROW_BUCKETS if rows >= num_rows), None)
        if bucket is None:
            raise DeviceError(
                f"The exit on {self.placement.device} takes up to {ROW_BUCKETS[-1]} rows, not {num_rows}."
            )
        key = (layer, bucket)
        if key not in self._requests:
            self._requests[key] = _ExitRequest(self._compile(self._files[layer], bucket), self._files[layer].stem)
        return self._requests[key]

    def _compile(self, path: Path, rows: int) -> ov.CompiledModel:
        device, options = device_options(self.placement.as_draft)
        blob = self._ahead.read(exit_shape(path.stem, rows)) if self._ahead else None
        if self._ahead is not None and blob is not None:
            try:
                return self._core.import_model(blob, device, options)
            except OPENVINO_ERRORS as error:
                self._ahead.reject(f"{device} does not take an exit's ({str(error).strip().splitlines()[-1]})")
        model = self._static_model(path, rows)
        try:
            return self._core.compile_model(model, device, options)
        except OPENVINO_ERRORS as error:
            raise DeviceError(f"OpenVINO could not compile {path.name} for {device} ({rows} rows): {error}") from error

    def static_model(self, layer: int, rows: int) -> ov.Model:
        """The graph of the exit after `layer` layers for so many rows.

        Raises:
            DeviceError: OpenVINO cannot read it.
        """
        return self._static_model(self._files[layer], rows)

    def _static_model(self, path: Path, rows: int) -> ov.Model:
        try:
            model = self._core.read_model(path)
            model.reshape({names.HIDDEN: [1, rows, self._width]})
        except OPENVINO_ERRORS as error:
            raise DeviceError(f"OpenVINO cannot read {path.name} with {rows} rows: {error}") from error
        return model


class _ExitRequest:
    """One exit at one number of rows; rows beyond those asked for are zeros and left out of the answer."""

    def __init__(self, compiled: ov.CompiledModel, name: str) -> None:
        self._name = name
        with raised_as(DeviceError, f"OpenVINO has no room for {name}", OPENVINO_ERRORS):
            self._request = compiled.create_infer_request()

    def run(self, rows: NDArray[np.float32]) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        count = rows.shape[1]
        with raised_as(DeviceError, f"OpenVINO failed while running {self._name}", OPENVINO_ERRORS):
            hidden = self._request.get_tensor(names.HIDDEN).data
            hidden[:, :count], hidden[:, count:] = rows, 0
            self._request.infer()
            ids, logprobs = (self._request.get_tensor(name).data for name in (names.EXIT_IDS, names.EXIT_LOGPROBS))
            return ids[0, :count].copy(), logprobs[0, :count].copy()
