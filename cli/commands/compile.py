"""`mirrorsd compile`: every static shape of the draft checked, compiled for a card's device, and kept on disk."""

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.table import Table

from mirrorsd.cli.commands.npu import compile_for_npus
from mirrorsd.cli.input import options
from mirrorsd.cli.input.given_text import given_text
from mirrorsd.cli.output.console import add_row, note, print_json, print_table, progress
from mirrorsd.cli.output.failures import EXIT_FAILED
from mirrorsd.cli.output.machine import describe_machine, installed_versions
from mirrorsd.graphs import names
from mirrorsd.graphs.bundle_files import read_bundle
from mirrorsd.graphs.errors import ConfigError
from mirrorsd.graphs.manifest import DraftEntry
from mirrorsd.graphs.user_cache import fetched_folder

if TYPE_CHECKING:
    from mirrorsd.device_maps import DeviceMap
    from mirrorsd.export.compression_plan import DraftCompression
    from mirrorsd.graphs.manifest import DraftAccuracy
    from mirrorsd.machine.doctor.draft_check import ShapeCheck
    from mirrorsd.machine.npu.conformance import Conformance

_NUM_IDS = 512


def compile(
    context: typer.Context,
    bundle: options.Bundle,
    device_map: options.DeviceMapName = "auto",
    text: Annotated[Path | None, typer.Option(help="A text to compare on; a built-in one without it.")] = None,
    weights: Annotated[
        Literal["int8", "int4"] | None, typer.Option(help="First compress an fp32 draft's weights.")
    ] = None,
    draft_group: options.DraftGroup = 128,
    draft_data_aware: options.DraftDataAware = False,
    allow_draft_loss: options.AllowDraftLoss = False,
    npu: options.Npu = None,
    npu_compiler: options.NpuCompilerCommand = None,
    as_json: options.AsJson = False,
) -> None:
    """Compile the draft for a card's device ahead of time, and check that it still computes the same."""
    from mirrorsd.runtime import choose_device_map

    if weights is None:
        options.refuse_without("--weights", context, "draft_group", "draft_data_aware", "allow_draft_loss")
    if npu is None:
        options.refuse_without("--npu", context, "npu_compiler")
    elif weights is None:
        options.refuse_without("--weights", context, "text")
    if (weights or npu) and fetched_folder().resolve() in bundle.resolve().parents:
        raise ConfigError(
            f"{bundle.name} is kept in the cache as it was fetched or packed, for all who name it: copy the folder "
            f"{bundle}, and compile the copy."
        )
    given = given_text(text, "--text")
    asked = None if weights is None else _asked(weights, draft_group, draft_data_aware, allow_draft_loss)
    if npu is not None:
        if asked is not None:
            compress(bundle, asked, given)
        compile_for_npus(bundle, npu, npu_compiler, device_map, as_json=as_json)
        return
    card = choose_device_map(device_map, bundle=read_bundle(bundle)).device_map
    if asked is not None:
        compress(bundle, asked, given)
    checks, exits = check_shapes(bundle, card, given), check_exits(bundle, card)
    if as_json:
        found = {name: asdict(conformance) for name, conformance in exits.items()}
        print_json(report(bundle, card, checks) | ({"exits": found} if found else {}))
    else:
        print_checks(card, checks)
        print_exits(exits)
    if not all(check.is_fine for check in checks) or any(found.problems for found in exits.values()):
        raise typer.Exit(EXIT_FAILED)


def _asked(weights: str, group_size: int, is_data_aware: bool, allows_loss: bool) -> "DraftCompression":
    from mirrorsd.export.compression_plan import DraftCompression

    return DraftCompression(
        weights=weights, group_size=group_size, is_data_aware=is_data_aware, allows_loss=allows_loss
    )


def compress(bundle: Path, asked: "DraftCompression", text: str | None) -> None:
    """Compress the bundle's draft, and say what that costs.

    Raises:
        BundleError, ConfigError, ExportError: see `recompress_bundle`.
    """
    from mirrorsd.export.recompress import recompress_bundle

    accuracy = recompress_bundle(bundle, asked, text).draft_accuracy
    assert accuracy is not None
    note(accuracy_line(accuracy))


def accuracy_line(accuracy: "DraftAccuracy") -> str:
    """What compression costs, in words."""
    main, *streams = accuracy.agreement
    shares = f"{main:.1%}{', streams ' + ', '.join(f'{share:.1%}' for share in streams) if streams else ''}"
    return (
        f"draft weights {accuracy.scheme}: {accuracy.accepted_share:.1%} of the accepted length "
        f"({accuracy.accepted_after:.2f} of {accuracy.accepted_before:.2f} over {accuracy.num_windows} windows), "
        f"same top-1 as in fp32 {shares} of {accuracy.num_positions} positions"
    )


def refuse_onnx(entry: DraftEntry) -> None:
    """There is nothing to compile of a draft that ONNX Runtime runs.

    Raises:
        ConfigError: this is one.
    """
    if entry.is_for_processors:
        raise ConfigError(
            f"the draft is in {entry.precision}, which ONNX Runtime runs on a processor as they are: there is nothing "
            "to compile. For another device export the pair with --draft-precision int8"
        )


def check_shapes(bundle: Path, card: "DeviceMap", text: str | None = None) -> "list[ShapeCheck]":
    """Check every bucket at every capacity.

    Raises:
        BundleError: the bundle is missing or damaged.
        ConfigError: its draft is for processors.
        DeviceError: the device does not take a shape.
    """
    from mirrorsd.export.verify.text import parity_ids
    from mirrorsd.machine.doctor.draft_check import check_shape

    entry = read_bundle(bundle).draft
    refuse_onnx(entry)
    ids, _ = parity_ids(bundle / names.TOKENIZER_FOLDER / "tokenizer.json", text, _NUM_IDS)
    shapes = [(bucket, capacity) for capacity in entry.capacities for bucket in entry.buckets]
    checks = []
    with progress("compiling", len(shapes)) as advance:
        for bucket, capacity in shapes:
            checks.append(check_shape(bundle, entry, card.draft, bucket, capacity, ids))
            advance(f"{bucket.rows} rows, {bucket.tips} tips, {capacity} slots")
    return checks


def check_exits(bundle: Path, card: "DeviceMap") -> "dict[str, Conformance]":
    """Hold the exits' graphs against what an NPU takes, and compile them, where the card places them there.

    Raises:
        DeviceError: the device does not take one.
    """
    if card.exit.device == "target":
        return {}
    from mirrorsd.machine.npu.conformance import exit_conformance
    from mirrorsd.runtime.backends.openvino.exits import ROW_BUCKETS, OpenVinoExits

    entry = read_bundle(bundle).target
    exits = OpenVinoExits(bundle, entry, card.exit)
    found = exit_conformance(exits, entry)
    for rows in ROW_BUCKETS:
        exits.warm_up(rows)
    return found


def print_exits(exits: "dict[str, Conformance]") -> None:
    """A line per exit and number of rows."""
    for name, found in exits.items():
        print(f"{name}: {'; '.join(found.problems) or 'fine'}, compiled ({found.weight_bytes / 1e6:.1f} MB of weights)")


def report(bundle: Path, card: "DeviceMap", checks: "list[ShapeCheck]") -> dict[str, Any]:
    """The JSON form."""
    shapes = [{**asdict(check), "is_fine": check.is_fine} for check in checks]
    place = {"machine": describe_machine(), "versions": installed_versions()}
    head = {"bundle": str(bundle), "device_map": card.name, "is_fine": all(check.is_fine for check in checks)}
    accuracy = read_bundle(bundle).draft_accuracy
    cost = {"draft_accuracy": asdict(accuracy)} if accuracy else {}
    return head | place | cost | {"shapes": shapes}


def print_checks(card: "DeviceMap", checks: "list[ShapeCheck]") -> None:
    """Print a row per static shape, then what speaks against it."""
    where = f"{card.draft.device}{' through its wrapper on the CPU' if card.draft.emulated else ''}"
    note(f"draft for {where}, {card.draft.precision}")
    table = Table("rows", "tips", "slots", "operations", "weights MB", "ports MB", "seconds", "same top-1", "fine")
    for check in checks:
        graph = check.conformance
        sizes = (f"{graph.weight_bytes / 1e6:.1f}", f"{graph.port_bytes / 1e6:.1f}")
        seconds = f"{check.compile_seconds:.2f}{' (from disk)' if check.is_from_disk else ''}"
        agreement = f"{check.top1_agreement:.1%} of {check.num_predictions}"
        shape = (str(check.bucket.rows), str(check.bucket.tips), str(check.capacity), str(graph.num_operations))
        add_row(table, *shape, *sizes, seconds, agreement, "yes" if check.is_fine else "no")
    print_table(table)
    for check in checks:
        problems = list(check.conformance.problems)
        if not check.ignores_dead_slots:
            problems.append("hidden cache slots change the result")
        for problem in problems:
            print(f"{check.bucket.rows} rows, {check.bucket.tips} tips, {check.capacity} slots: {problem}")
