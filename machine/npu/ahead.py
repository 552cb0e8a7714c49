"""Compiling a bundle's draft, and its exits where a card asks for it, for NPUs that are not here."""

import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import openvino as ov

from mirrorsd.device_maps import ExitPlacement
from mirrorsd.devices.openvino.core import new_core
from mirrorsd.devices.openvino.draft_shapes import static_shapes
from mirrorsd.devices.openvino.npu_graph import cut_for_npu
from mirrorsd.graphs.bundle_files import read_bundle
from mirrorsd.graphs.manifest import DraftEntry, Manifest
from mirrorsd.machine.npu.compiler import NpuCompiler, ShapeReport
from mirrorsd.machine.npu.report import MOST_WEIGHTS, by_use, kept_within, write_platform
from mirrorsd.runtime.backends.openvino.exits import ROW_BUCKETS, OpenVinoExits, exit_shape

Shape = tuple[int, int, int]
Named = tuple[str, Callable[[], ov.Model]]


def plan(manifest: Manifest, platforms: Sequence[str], exits: ExitPlacement) -> str:
    """What compiling ahead will do and write, in one sentence."""
    of_exits = f", and {MOST_WEIGHTS} times an exit's for the exits" if exits.device == "NPU" else ""
    draft = manifest.draft
    num_shapes = len(draft.buckets) * len(draft.capacities)
    most = MOST_WEIGHTS * _weight_bytes(manifest) / 1e6
    return (
        f"compiles {num_shapes} shapes for {', '.join(platforms)}, and writes blobs of at most {most:.0f} MB "
        f"({MOST_WEIGHTS} times the draft's weights{of_exits}) a platform into the bundle"
    )


def compile_ahead(
    bundle: Path,
    platform: str,
    compiler: NpuCompiler,
    exits: ExitPlacement,
    advance: Callable[[str], None] = lambda _: None,
) -> list[ShapeReport]:
    """Compile every shape for `platform`, and keep in the bundle as many blobs as may be.

    Exits have a room of their own: three times the weights of one.

    Raises:
        BundleError: the bundle is damaged or cannot be written.
        DeviceError: the compiler cannot be run.
    """
    manifest = read_bundle(bundle)
    entry = manifest.draft
    shapes = by_use(entry.buckets, entry.capacities)
    with tempfile.TemporaryDirectory(prefix="mirrorsd-npu-") as scratch:
        blobs = Path(scratch)

        def compiled(name: str, model: ov.Model) -> ShapeReport:
            report = compiler.compile(model, name, platform, blobs / f"{name}.blob")
            advance(f"{name} for {platform}")
            return report

        reports = [compiled("x".join(map(str, shape)), device_graph(bundle, entry, shape)) for shape in shapes]
        of_exits = [compiled(name, model()) for name, model in _exits(bundle, manifest, exits)]
        largest = max((report.weight_bytes for report in of_exits), default=0)
        marked = [*kept_within(reports, _weight_bytes(manifest)), *kept_within(of_exits, largest)]
        write_platform(bundle, platform, marked, blobs)
    return marked


def device_graph(bundle: Path, entry: DraftEntry, shape: Shape) -> ov.Model:
    """What an NPU computes of one static shape, in sixteen bits."""
    model = new_core().read_model(bundle / entry.file)
    model.reshape(static_shapes(entry, *shape))
    return cut_for_npu(model, entry.shape, ov.Type.f16).core


def _exits(bundle: Path, manifest: Manifest, placement: ExitPlacement) -> list[Named]:
    if placement.device != "NPU":
        return []
    exits = OpenVinoExits(bundle, manifest.target, placement)
    return [
        (exit_shape(Path(point.file).stem, rows), lambda layer=point.layer, rows=rows: exits.static_model(layer, rows))  # type: ignore[misc]
        for point in manifest.target.exits
        for rows in ROW_BUCKETS
    ]


def _weight_bytes(manifest: Manifest) -> int:
    return manifest.files[manifest.draft.weights_file].bytes
