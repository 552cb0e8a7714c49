"""`mirrorsd compile --npu`: the draft compiled for NPUs that are not here, and what their compiler says of it."""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from rich.table import Table

from mirrorsd.cli.output.console import add_row, note, print_json, print_table, progress
from mirrorsd.cli.output.failures import EXIT_FAILED
from mirrorsd.graphs import names
from mirrorsd.graphs.bundle_files import read_bundle
from mirrorsd.graphs.errors import ConfigError

if TYPE_CHECKING:
    from mirrorsd.machine.npu.compiler import ShapeReport

_MOST_NODES = 5


def compile_for_npus(bundle: Path, platforms_text: str, command: str | None, device_map: str, *, as_json: bool) -> None:
    """Compile for every platform named, keep the blobs in the bundle and print the reports.

    Exits are compiled, too, where `device_map` (whose devices need not be here) has them on an NPU.

    Raises:
        ConfigError: an unknown platform, no compiler, or a draft that no NPU takes.
        BundleError, DeviceError: see `compile_ahead`.
    """
    from mirrorsd.device_maps import ExitPlacement, load_device_map
    from mirrorsd.machine.npu.ahead import compile_ahead, plan
    from mirrorsd.machine.npu.compiler import NpuCompiler, platforms_of

    exits = ExitPlacement() if device_map == "auto" else load_device_map(device_map).exit
    platforms = platforms_of(platforms_text)
    manifest = read_bundle(bundle)
    if manifest.draft.is_for_processors:
        raise ConfigError(
            f"the draft is in {manifest.draft.precision}, which no NPU takes. Export the pair with "
            "--draft-precision int8"
        )
    compiler = NpuCompiler(command)
    note(plan(manifest, platforms, exits))
    num_shapes = len(manifest.draft.buckets) * len(manifest.draft.capacities)
    with progress("compiling", num_shapes * len(platforms)) as advance:
        reports = {one: compile_ahead(bundle, one, compiler, exits, advance) for one in platforms}
    if as_json:
        found = {name: [asdict(report) for report in of_platform] for name, of_platform in reports.items()}
        print_json({"bundle": str(bundle), "note": names.ESTIMATED, "platforms": found})
    else:
        print_reports(reports)
    if not all(report.is_compiled for of_platform in reports.values() for report in of_platform):
        raise typer.Exit(EXIT_FAILED)


def print_reports(reports: "dict[str, list[ShapeReport]]") -> None:
    """A row per shape and platform, then the costliest nodes of each platform's dearest shape."""
    for platform, of_platform in reports.items():
        title = f"NPU {platform}. {names.ESTIMATED}"
        table = Table(*_COLUMNS, title=title, title_justify="left")
        for report in of_platform:
            add_row(table, *_cells(report))
        print_table(table)
        for report in of_platform:
            if not report.is_compiled:
                print(f"{report.shape}: refused: {report.error}")
        _print_costliest(of_platform)


_COLUMNS = ("rows x tips x slots", "us", "transfers", "matrix", "kernels", "blob MB", "blob/weights", "kept")


def _cells(report: "ShapeReport") -> tuple[str, ...]:
    if not report.is_compiled:
        return (report.shape, "refused", *("-" for _ in _COLUMNS[2:]))
    us = "-" if report.estimated_us is None else f"{report.estimated_us:.0f}"
    sums = (f"{part:.0f}" for part in (report.transfers_us, report.matrix_us, report.kernels_us))
    share = f"{report.blob_bytes / max(1, report.weight_bytes):.2f}"
    return (report.shape, us, *sums, f"{report.blob_bytes / 1e6:.1f}", share, "yes" if report.is_kept else "no")


def _print_costliest(reports: "Sequence[ShapeReport]") -> None:
    costed = [report for report in reports if report.estimated_us is not None]
    if not costed:
        return
    dearest = max(costed, key=lambda report: report.estimated_us or 0.0)
    nodes = (f"{cost.node} ({cost.unit}) {cost.microseconds:.0f}" for cost in dearest.costliest[:_MOST_NODES])
    print(f"costliest nodes of {dearest.shape}, us summed over units: {', '.join(nodes)}")
    unknown: dict[str, Any] = dict.fromkeys(name for report in reports for name in report.not_costed)
    if unknown:
        print(f"kernels that the estimate counts as nothing: {', '.join(unknown)}")
