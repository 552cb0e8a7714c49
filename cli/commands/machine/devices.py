"""`mirrorsd devices`: what this machine has, which device maps fit, and what `auto` picks."""

from dataclasses import asdict
from typing import TYPE_CHECKING

from rich import box
from rich.table import Table

from mirrorsd.cli.commands.inspect import readable_size
from mirrorsd.cli.input import options
from mirrorsd.cli.output.console import add_row, print_json, print_table
from mirrorsd.cli.output.leaving import end_on_ctrl_c
from mirrorsd.cli.output.machine import describe_machine, installed_versions
from mirrorsd.cli.output.readiness import CardFit, card_fits, fit_lines, picked_card, print_readiness, readiness
from mirrorsd.graphs.user_cache import cache_folder, list_kept

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mirrorsd.devices.hardware import DeviceDetail
    from mirrorsd.runtime import DeviceInventory


def devices(show_all: options.ShowAll = False, as_json: options.AsJson = False) -> None:
    """Show what this machine has and which device maps fit."""
    end_on_ctrl_c()
    from mirrorsd.devices.hardware import hardware_details
    from mirrorsd.devices.layouts import usable_cores
    from mirrorsd.runtime import device_inventory

    details = hardware_details()
    inventory = device_inventory()
    fits, picked = card_fits(inventory), picked_card(inventory)
    if as_json:
        cards = [{"name": fit.name, "fits": not fit.missing, "missing": fit.missing} for fit in fits]
        place = {"machine": describe_machine(), "versions": installed_versions()}
        hardware = {"hardware": [asdict(detail) for detail in details]}
        auto = None if isinstance(picked, str) else picked.name
        print_json(place | {"devices": asdict(inventory), "device_maps": cards, "auto": auto} | hardware)
        return
    print_readiness(readiness(picked, usable_cores().num_threads))
    print_table(_hardware_table(details))
    if show_all:
        print_table(_machine_table(inventory))
        print_table(_fit_table(fits))
    else:
        print("\n".join(fit_lines(fits, picked)))
    kept = list_kept()
    print(
        f"Kept about {len(kept)} bundle(s) in {cache_folder()}: {readable_size(sum(one.num_bytes for one in kept))} of "
        "compiled drafts, tuned settings and learned speeds (`mirrorsd cache list`). `mirrorsd cache clear --tuned` "
        "deletes them."
    )


def _machine_table(inventory: "DeviceInventory") -> Table:
    table = Table("this machine", "", box=box.SIMPLE_HEAD)
    for key, value in (describe_machine() | installed_versions()).items():
        add_row(table, key, str(value))
    add_row(table, "ONNX Runtime providers", ", ".join(inventory.providers) or "none")
    add_row(table, "OpenVINO devices", ", ".join(inventory.openvino_devices))
    add_row(table, "NPU plugin", "present" if inventory.has_npu_plugin else "absent")
    return table


def _hardware_table(details: "Sequence[DeviceDetail]") -> Table:
    table = Table("device", "name", "driver", "memory MB", "", box=box.SIMPLE_HEAD)
    for detail in details:
        sizes = [size for size in (detail.memory_free, detail.memory_total) if size is not None]
        memory = " free of ".join(f"{size / 1e6:.0f}" for size in sizes)
        add_row(table, detail.device, detail.full_name, detail.driver, memory, detail.extra)
    return table


def _fit_table(fits: list[CardFit]) -> Table:
    table = Table("device map", "fits", "what it is, or what is missing", box=box.SIMPLE_HEAD)
    for fit in fits:
        add_row(table, fit.name, "no" if fit.missing else "yes", "\n".join(fit.missing) or fit.description)
    return table
