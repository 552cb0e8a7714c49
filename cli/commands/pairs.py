"""`mirrorsd pairs`: bundles that are ready, targets with the drafts that fit them, and what this machine can hold."""

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from mirrorsd.cli.input import options
from mirrorsd.cli.output.console import add_row, print_json, print_table
from mirrorsd.hub.asking import readable_bytes
from mirrorsd.hub.bundles import Fetched, fetched_bundles

if TYPE_CHECKING:
    from mirrorsd.export.pairs import Pair

_PRECISIONS = (("int8", "int8"), ("int4", "int8"))
"""Of target and draft, the finer first: what most people export for their own machine."""
_SPARE = 0.8
"""Of a machine's memory, what a bundle may take: its system and a browser need the rest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """An estimate of a pair in one precision: bytes on disk, and in memory while it answers."""

    precision: str
    disk_bytes: int
    running_bytes: int


def pairs(
    online: Annotated[bool, typer.Option("--online", help="Ask the hub, too, for bundles that others pushed.")] = False,
    as_json: options.AsJson = False,
) -> None:
    """List bundles that are ready, and targets with the drafts that fit; say what this machine's memory could hold."""
    from mirrorsd.devices.containers import total_memory
    from mirrorsd.export.pairs import known_pairs
    from mirrorsd.hub.listing import offered_bundles

    memory, offered = total_memory(), offered_bundles() if online else []
    ready = [(one, running_bytes_of(one)) for one in fetched_bundles()]
    sizes = {pair.target: estimated_sizes(pair) for pair in known_pairs()}
    if as_json:
        print_json(
            {
                "memory_bytes": memory,
                "ready": [{**asdict(one), "folder": str(one.folder), "running_bytes": needs} for one, needs in ready],
                "online": [asdict(one) for one in offered],
                "pairs": [
                    {**asdict(pair), "sizes": [asdict(size) for size in sizes[pair.target]]} for pair in known_pairs()
                ],
            }
        )
        return
    if ready or offered:
        table = Table("ready", "on disk", "memory", "here")
        for one, needs in ready:
            here = "fetched" if needs is None or fits(needs, memory) else "fetched, too large for this machine"
            in_memory = "-" if needs is None else readable_bytes(needs)
            add_row(table, one.reference, readable_bytes(one.num_bytes), in_memory, here)
        for other in offered:
            size = "-" if other.num_bytes is None else readable_bytes(other.num_bytes)
            add_row(table, other.reference, size, "-", "to be fetched")
        print_table(table)
        print("mirrorsd chat REFERENCE talks with one of these.\n")
    table = Table("target, and below it its draft", f"with {readable_bytes(memory)} of memory", "what to know")
    for pair in known_pairs():
        names = "\n".join(filter(None, (pair.target, pair.draft, *pair.heads)))
        add_row(table, names, holds_words(sizes[pair.target], memory), known_words(pair))
        table.add_section()
    print_table(table)
    print("mirrorsd export TARGET takes the draft of this table; any pair with the same tokenizer can be tried.")


def estimated_sizes(pair: "Pair") -> tuple[Size, ...]:
    """What the pair would take in each of a few precisions, the finer first."""
    from mirrorsd.export.estimate import running_bytes, stored_bytes

    target, draft = (round(billions * 1e9) for billions in pair.billions)
    return tuple(
        Size(
            precision=precisions[0],
            disk_bytes=round(stored_bytes(target, precisions[0]) + stored_bytes(draft, precisions[1])),
            running_bytes=running_bytes(target, draft, *precisions),
        )
        for precisions in _PRECISIONS
    )


def holds_words(sizes: tuple[Size, ...], memory: int) -> str:
    """The finest precision that a machine's memory holds, with its sizes.

    >>> one = Size(precision="int4", disk_bytes=2 * 10**9, running_bytes=3 * 10**9)
    >>> print(holds_words((one,), 16 * 10**9))
    int4: 2.0 GB,
    3.0 GB in memory
    >>> holds_words((one,), 2 * 10**9)
    'too large: 3.0 GB in memory in int4'
    """
    found = next((size for size in sizes if fits(size.running_bytes, memory)), None)
    if found is None:
        return f"too large: {readable_bytes(sizes[-1].running_bytes)} in memory in {sizes[-1].precision}"
    return f"{found.precision}: {readable_bytes(found.disk_bytes)},\n{readable_bytes(found.running_bytes)} in memory"


def known_words(pair: "Pair") -> str:
    """In which precisions a pair was exported, what was measured, what to know, and the licence."""
    exported = f"exported here in {', '.join(pair.exported)}" if pair.exported else "not exported here"
    return "; ".join(filter(None, (exported, pair.measured, pair.note, pair.licence)))


def fits(num_bytes: int, memory: int) -> bool:
    """Whether a machine with so much memory has room for it beside its system."""
    return num_bytes <= _SPARE * memory


def running_bytes_of(one: Fetched) -> int | None:
    """What a fetched bundle takes on a processor; None where it cannot be read any more."""
    from mirrorsd.device_maps import load_device_map
    from mirrorsd.graphs import names
    from mirrorsd.graphs.errors import BundleError
    from mirrorsd.graphs.manifest_values import read_manifest
    from mirrorsd.machine.doctor.memory import memory_needs

    path = one.folder / names.MANIFEST_FILE
    try:
        manifest = read_manifest(path.read_text(encoding="utf-8"), origin=str(path))
    except (OSError, UnicodeDecodeError, BundleError):
        return None
    return sum(need.total for need in memory_needs(manifest, load_device_map("cpu")))
