"""Making the draft's static shapes runnable: from the cache on disk where it fits, by compiling otherwise."""

import io
from pathlib import Path

import openvino as ov

from mirrorsd.device_maps import DraftPlacement
from mirrorsd.graphs.errors import DeviceError
from mirrorsd.graphs.manifest import DraftEntry
from mirrorsd.runtime.draft_cache import open_draft_cache
from mirrorsd.runtime.draft_shapes import device_options, host_options, static_shapes

_MOST_AHEAD_BYTES = 1 << 30


class DraftCompiler:
    """Compiled shapes of one draft on one placement, by (rows, tips, capacity). Owned by the draft worker."""

    def __init__(self, bundle: Path, entry: DraftEntry, placement: DraftPlacement) -> None:
        self.core = ov.Core()
        self.cache = open_draft_cache(bundle, entry, placement, self.core)
        self._path, self._entry = bundle / entry.file, entry
        self._device, self._options = device_options(placement)
        if host := host_options(placement):
            self.core.set_property("CPU", host)
        self._compiled: dict[tuple[int, int, int], ov.CompiledModel] = {}
        self._warm: set[tuple[int, int, int]] = set()
        # An imported model computes on the mapped file itself, so the mapping must outlive it.
        self._mapped: list[ov.Tensor] = []

    def compiled(self, rows: int, tips: int, capacity: int) -> ov.CompiledModel:
        """The compiled model for one static shape; from the cache, or compiled at first use.

        Raises:
            DeviceError: the device does not take it.
        """
        key = (rows, tips, capacity)
        if key not in self._compiled:
            self._compiled[key] = self._from_cache(*key) or self.compile(*key)
        return self._compiled[key]

    def warm_up(self, rows: int, tips: int, capacity: int) -> None:
        """Have this shape compiled and run once, so that its first real round pays nothing."""
        key = (rows, tips, capacity)
        if key in self._warm:
            return
        request = self.compiled(*key).create_infer_request()
        for tensor in request.input_tensors:
            tensor.data.fill(0)
        run_request(request)
        self._warm.add(key)

    def fill_cache(self) -> None:
        """Compile whatever the cache lacks, so that no later request compiles; large drafts as they are needed."""
        shapes = [(b.rows, b.tips, c) for c in sorted(self._entry.capacities) for b in self._entry.buckets]
        size = self._path.with_suffix(".bin").stat().st_size * len(shapes)
        if self.cache is None or size > _MOST_AHEAD_BYTES:
            return
        for shape in shapes:
            if self.cache.is_writable and shape not in self._compiled and not self.cache.has(_name(*shape)):
                self.compile(*shape)

    def compile(self, rows: int, tips: int, capacity: int) -> ov.CompiledModel:
        """Compile one static shape and keep it on disk.

        Raises:
            DeviceError: the device does not take it.
        """
        model = self.static_model(rows, tips, capacity)
        try:
            compiled = self.core.compile_model(model, self._device, self._options)
        except RuntimeError as error:
            raise DeviceError(
                f"OpenVINO could not compile the draft for {self._device} "
                f"({rows} rows, {tips} tips, {capacity} slots): {error}"
            ) from error
        self._keep(_name(rows, tips, capacity), compiled)
        return compiled

    def static_model(self, rows: int, tips: int, capacity: int) -> ov.Model:
        """The draft's graph with numbers for `N`, `R` and `C`.

        Raises:
            DeviceError: OpenVINO cannot read it, or not with these shapes.
        """
        try:
            model = self.core.read_model(self._path)
            model.reshape(static_shapes(self._entry, rows, tips, capacity))
        except RuntimeError as error:
            raise DeviceError(
                f"OpenVINO cannot read the draft as {rows} rows, {tips} tips, {capacity} slots: {error}"
            ) from error
        return model

    def _from_cache(self, rows: int, tips: int, capacity: int) -> ov.CompiledModel | None:
        blob = self.cache.read(_name(rows, tips, capacity)) if self.cache else None
        if self.cache is None or blob is None:
            return None
        try:
            compiled = self.core.import_model(blob, self._device, self._options)
        except RuntimeError as error:
            self.cache.reject(f"{self._device} does not take a blob back ({_reason_in(error)})")
            return None
        self._mapped.append(blob)
        return compiled

    def _keep(self, name: str, compiled: ov.CompiledModel) -> None:
        if self.cache is None or not self.cache.is_writable:
            return
        stream = io.BytesIO()
        try:
            compiled.export_model(stream)
        except RuntimeError as error:
            self.cache.give_up(f"{self._device} does not give its blobs ({_reason_in(error)})")
            return
        self.cache.write(name, stream.getvalue())


def run_request(request: ov.InferRequest) -> None:
    """Run one pass; the calling thread waits, other Python threads go on.

    Raises:
        DeviceError: the device failed.
    """
    try:
        request.infer()
    except RuntimeError as error:
        raise DeviceError(f"OpenVINO failed while running the draft: {error}") from error


def _name(rows: int, tips: int, capacity: int) -> str:
    return f"{rows}x{tips}x{capacity}"


def _reason_in(error: RuntimeError) -> str:
    """The last line of a vendor's message says what is wrong; those before it say where in its sources."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1][:200] if lines else type(error).__name__
