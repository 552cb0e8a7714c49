"""`mirrorsd devices`: what this machine has, which device maps fit, and what `auto` picks."""

from dataclasses import asdict
from typing import TYPE_CHECKING, NamedTuple

from rich.table import Table

from mirrorsd.cli.input import options
from mirrorsd.cli.output.console import add_row, print_json, print_table
from mirrorsd.cli.output.machine import describe_machine, installed_versions
from mirrorsd.device_maps import builtin_names, load_device_map

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mirrorsd.runtime import DeviceInventory
    from mirrorsd.runtime.doctor.hardware import DeviceDetail


class CardFit(NamedTuple):
    """Whether a card can be used here; `missing` says why not, one sentence each."""

    name: str
    description: str
    missing: list[str]


def devices(as_json: options.AsJson = False) -> None:
    """Show what this machine has and which device maps fit."""
    from mirrorsd.runtime import choose_device_map, device_inventory
    from mirrorsd.runtime.doctor.hardware import hardware_details

    details = hardware_details()
    inventory = device_inventory()
    fits = card_fits(inventory)
    chosen = choose_device_map("auto", inventory).device_map
    if as_json:
        cards = [{"name": fit.name, "fits": not fit.missing, "missing": fit.missing} for fit in fits]
        place = {"machine": describe_machine(), "versions": installed_versions()}
        hardware = {"hardware": [asdict(detail) for detail in details]}
        print_json(place | {"devices": asdict(inventory), "device_maps": cards, "auto": chosen.name} | hardware)
        return
    print_table(_machine_table(inventory))
    print_table(_hardware_table(details))
    print_table(_fit_table(fits))
    print(f"auto picks {chosen.name}")


def card_fits(inventory: "DeviceInventory") -> list[CardFit]:
    """Hold every built-in card against the machine."""
    from mirrorsd.runtime import missing_devices

    cards = [load_device_map(name) for name in builtin_names()]
    return [CardFit(card.name, card.description, missing_devices(card, inventory)) for card in cards]


def _machine_table(inventory: "DeviceInventory") -> Table:
    table = Table("this machine", "")
    for key, value in (describe_machine() | installed_versions()).items():
        add_row(table, key, str(value))
    add_row(table, "ONNX Runtime providers", ", ".join(inventory.providers))
    add_row(table, "OpenVINO devices", ", ".join(inventory.openvino_devices))
    add_row(table, "NPU plugin", "present" if inventory.has_npu_plugin else "absent")
    return table


def _hardware_table(details: "Sequence[DeviceDetail]") -> Table:
    table = Table("device", "name", "driver", "memory MB", "")
    for detail in details:
        sizes = [size for size in (detail.memory_free, detail.memory_total) if size is not None]
        memory = " free of ".join(f"{size / 1e6:.0f}" for size in sizes)
        add_row(table, detail.device, detail.full_name, detail.driver, memory, detail.extra)
    return table


def _fit_table(fits: list[CardFit]) -> Table:
    table = Table("device map", "fits", "what it is, or what is missing")
    for fit in fits:
        add_row(table, fit.name, "no" if fit.missing else "yes", "\n".join(fit.missing) or fit.description)
    return table
