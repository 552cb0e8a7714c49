"""`mirrorsd devices`: what this machine has, which device maps fit, and what `auto` picks."""

from dataclasses import dataclass

from rich.table import Table

from mirrorsd.cli import options
from mirrorsd.cli.console import print_json, print_table
from mirrorsd.cli.machine import describe_machine, installed_versions
from mirrorsd.device_maps import builtin_names, load_device_map
from mirrorsd.graphs.errors import DeviceError


@dataclass(frozen=True, slots=True, kw_only=True)
class CardFit:
    """Whether a card can be used here; `reason` says why not."""

    name: str
    description: str
    fits: bool
    reason: str


def devices(as_json: options.AsJson = False) -> None:
    """Show what this machine has and which device maps fit."""
    from mirrorsd.runtime import choose_device_map, device_inventory

    inventory = device_inventory()
    fits = [fit_of(name) for name in builtin_names()]
    chosen, reasons = choose_device_map("auto")
    if as_json:
        print_json(
            {
                "machine": describe_machine(),
                "versions": installed_versions(),
                "inventory": inventory,
                "device_maps": [{"name": fit.name, "fits": fit.fits, "reason": fit.reason} for fit in fits],
                "auto": chosen.name,
            }
        )
        return
    machine = Table("this machine", "", title_justify="left")
    for key, value in (describe_machine() | installed_versions() | inventory).items():
        machine.add_row(key, ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value))
    print_table(machine)
    print_table(_fit_table(fits))
    print(f"auto picks {chosen.name}")
    for reason in reasons:
        print(f"  {reason}")


def fit_of(name: str) -> CardFit:
    """Ask the runtime whether a card can be used here."""
    from mirrorsd.runtime import choose_device_map

    description = load_device_map(name).description
    try:
        choose_device_map(name)
    except DeviceError as error:
        return CardFit(name=name, description=description, fits=False, reason=str(error))
    return CardFit(name=name, description=description, fits=True, reason="")


def _fit_table(fits: list[CardFit]) -> Table:
    table = Table("device map", "fits", "what it is, or why not")
    for fit in fits:
        table.add_row(fit.name, "yes" if fit.fits else "no", fit.description if fit.fits else fit.reason)
    return table
