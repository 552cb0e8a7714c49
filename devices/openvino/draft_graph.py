"""The draft's graph as a device takes it: read, made static, compiled for one placement, taken back from a blob.

Owns: what OpenVINO is told for that. Does not own: which shapes are wanted and where blobs are kept
(`draft_compiler`), the properties themselves (`draft_shapes`).
"""

from pathlib import Path

import openvino as ov

from mirrorsd.device_maps import DraftPlacement
from mirrorsd.devices.openvino.core import new_core
from mirrorsd.devices.openvino.draft_shapes import (
    OPENVINO_ERRORS,
    cache_type,
    device_options,
    host_options,
    keep_small_constants,
    said_of,
    static_shapes,
    tile_options,
    weightless_options,
    with_cache_of,
)
from mirrorsd.devices.openvino.joined_attention import join_attention, pays_to_join
from mirrorsd.devices.openvino.npu_graph import NpuParts, cut_for_npu
from mirrorsd.devices.openvino.npu_request import HostParts
from mirrorsd.graphs.errors import DeviceError, raised_as
from mirrorsd.graphs.manifest import DraftEntry


class DraftGraph:
    """One draft's graph for one placement.

    Attributes:
        entry: the draft in the manifest.
        placement: where it runs.
        core: OpenVINO.
        cache_type: what keys and values are kept in.
        device: what OpenVINO calls the device.
    """

    def __init__(self, bundle: Path, entry: DraftEntry, placement: DraftPlacement) -> None:
        self.entry, self.placement, self.core = entry, placement, new_core()
        self._path = bundle / entry.file
        self.device, self._options = device_options(placement)
        self._weightless = weightless_options(placement, self.weights)
        if host := host_options(placement):
            self.core.set_property("CPU", host)
        self.cache_type = cache_type(self.core, entry, placement)

    @property
    def weights(self) -> Path:
        """The file of its weights."""
        return self._path.with_suffix(".bin")

    @property
    def is_cut(self) -> bool:
        """Whether the device computes a part of a pass, and the host the rest."""
        return self.placement.device == "NPU"

    @property
    def is_weightless(self) -> bool:
        """Whether blobs name the bundle's weights instead of repeating them."""
        return bool(self._weightless)

    def compile(self, rows: int, tips: int, capacity: int, *, is_shared: bool, chooses_tiles: bool) -> ov.CompiledModel:
        """Compile one static shape, or a model for all where it `is_shared`; an NPU `chooses_tiles` by its rows.

        Raises:
            DeviceError: the device does not take it.
        """
        model = self.read() if is_shared else self.device_model(rows, tips, capacity)
        longest = max(self.entry.capacities) if is_shared else capacity
        if self._weightless:
            keep_small_constants(model)
        if pays_to_join(self.entry.shape, self.placement, longest, self.cache_type):
            join_attention(model)
        try:
            if not self.is_cut:
                model = with_cache_of(model, self.entry, self.cache_type)
            options = self._options | self._weightless | (tile_options(model) if chooses_tiles else {})
            return self.core.compile_model(model, self.device, options)
        except OPENVINO_ERRORS as error:
            advice = "Choose another device map (`mirrorsd devices`)."
            raise DeviceError(
                f"OpenVINO could not compile the draft for {self.device} "
                f"({rows} rows, {tips} tips, {capacity} slots): {said_of(self._path, error, advice)}"
            ) from error

    def take_back(self, blob: ov.Tensor) -> ov.CompiledModel:
        """The compiled model that a blob holds, which must outlive it: the model computes on the blob's own memory.

        Raises what OpenVINO raises where the device does not take it.
        """
        return self.core.import_model(blob, self.device, self._options | self._weightless)

    def static_model(self, rows: int, tips: int, capacity: int) -> ov.Model:
        """The draft's graph with numbers for `N`, `R` and `C`.

        Raises:
            DeviceError: OpenVINO cannot read it, or not with these shapes.
        """
        model = self.read()
        try:
            model.reshape(static_shapes(self.entry, rows, tips, capacity))
        except OPENVINO_ERRORS as error:
            raise DeviceError(
                f"OpenVINO cannot read the draft as {rows} rows, {tips} tips, {capacity} slots: {error}"
            ) from error
        return model

    def device_model(self, rows: int, tips: int, capacity: int) -> ov.Model:
        """What the device computes of one static shape: for an NPU its part alone.

        Raises:
            DeviceError: OpenVINO cannot read it, or not with these shapes.
        """
        model = self.static_model(rows, tips, capacity)
        return self._parts(model).core if self.is_cut else model

    def host_parts(self, rows: int, tips: int, capacity: int) -> HostParts | None:
        """What the host computes of one static shape; None where the device computes all of it.

        Raises:
            DeviceError: OpenVINO cannot compile it.
        """
        if not self.is_cut:
            return None
        with raised_as(DeviceError, "OpenVINO cannot compile the host's part of a pass", OPENVINO_ERRORS):
            parts = self._parts(self.static_model(rows, tips, capacity))
            return HostParts(self.core, parts, self.placement.threads)

    def _parts(self, model: ov.Model) -> NpuParts:
        return cut_for_npu(model, self.entry.shape, self.cache_type)

    def read(self) -> ov.Model:
        """The graph with symbolic shapes.

        Raises:
            DeviceError: OpenVINO cannot read it.
        """
        try:
            return self.core.read_model(self._path)
        except OPENVINO_ERRORS as error:
            advice = "Copy the whole bundle again, or export it again."
            raise DeviceError(f"OpenVINO cannot read the draft: {said_of(self._path, error, advice)}") from error


def reason_in(error: Exception) -> str:
    """The last line of a vendor's message says what is wrong; those before it say where in its sources."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1][:200] if lines else type(error).__name__
