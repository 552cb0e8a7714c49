"""Whether this machine is ready, in a sentence: which card `auto` picks, and how much of the processor it uses."""

from typing import TYPE_CHECKING, NamedTuple

from rich.console import Console
from rich.text import Text

from mirrorsd.device_maps import DeviceMap, builtin_names, load_device_map
from mirrorsd.graphs.errors import DeviceError

if TYPE_CHECKING:
    from mirrorsd.runtime import DeviceInventory


class CardFit(NamedTuple):
    """Whether a card can be used here; `missing` says why not, one sentence each."""

    name: str
    description: str
    missing: list[str]
    is_paced: bool


class Readiness(NamedTuple):
    """Whether texts can be generated here, and a sentence or two about how."""

    is_ready: bool
    words: str


def card_fits(inventory: "DeviceInventory") -> list[CardFit]:
    """Hold every built-in card against the machine."""
    from mirrorsd.runtime import missing_devices

    cards = [load_device_map(name) for name in builtin_names()]
    return [
        CardFit(card.name, card.description, missing_devices(card, inventory), card.pace is not None) for card in cards
    ]


def picked_card(inventory: "DeviceInventory") -> DeviceMap | str:
    """What `auto` picks, or why it finds nothing."""
    from mirrorsd.runtime import choose_device_map

    try:
        return choose_device_map("auto", inventory).device_map
    except DeviceError as error:
        return str(error)


def readiness(picked: DeviceMap | str, num_cores: int) -> Readiness:
    """The verdict.

    >>> readiness(load_device_map("cpu"), 2)[1]
    "Uses both cores (device map cpu). `mirrorsd tune BUNDLE` finds a pair's fastest settings in 90 s."

    Args:
        picked: the card that `auto` picks, or why there is none.
        num_cores: physical cores that this process may use.
    """
    if isinstance(picked, str):
        return Readiness(False, picked)
    from mirrorsd.devices.layouts import choose_layout

    card = choose_layout(picked).device_map
    tune = "`mirrorsd tune BUNDLE` finds a pair's fastest settings in 90 s."
    caution = "" if card.tried else " Nobody has tried this card on such a machine yet: `mirrorsd doctor BUNDLE` does."
    if not card.target.is_on_cpu:
        return Readiness(True, f"Device map {card.name}: {card.description} {tune}{caution}")
    used = set(card.target.cores) | set(card.draft.cores)
    num_used = min(len(used) or max(card.target.threads, card.draft.threads), num_cores)
    return Readiness(True, f"Uses {_share(num_used, num_cores)} (device map {card.name}). {tune}{caution}")


def _share(num_used: int, num_cores: int) -> str:
    if num_used < num_cores:
        return f"{num_used} of {num_cores} cores"
    return {1: "the one core", 2: "both cores"}.get(num_cores, f"all {num_cores} cores")


def print_readiness(found: Readiness) -> None:
    """Print the verdict: its first word is green or red on a terminal."""
    word = Text("Ready.", "bold green") if found.is_ready else Text("Not ready:", "bold red")
    Console().print(Text.assemble(word, f" {found.words}"), soft_wrap=True)


def fit_lines(fits: list[CardFit], picked: DeviceMap | str) -> list[str]:
    """Which cards fit and which do not, a line each; paced ones stand in for machines that are not there."""
    mark = "" if isinstance(picked, str) else picked.name
    usable = [
        f"{fit.name} (auto)" if fit.name == mark else fit.name for fit in fits if not (fit.missing or fit.is_paced)
    ]
    others = [fit.name for fit in fits if fit.missing]
    lines = [f"Device maps that fit: {', '.join(usable) or 'none'}."]
    if others:
        lines.append(f"{len(others)} do not fit here: {', '.join(others)}; --all says what each misses.")
    return lines
