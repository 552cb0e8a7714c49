"""`mirrorsd pack`: a bundle as others fetch it."""

import re
from pathlib import Path
from typing import Annotated
from urllib.parse import quote

import typer

from mirrorsd.cli.commands.sharing.card import UNKNOWN, card_text, licence_of
from mirrorsd.cli.input import options
from mirrorsd.cli.output.console import as_word, note
from mirrorsd.graphs.bundle_files import read_bundle


def pack(
    bundle: options.Bundle,
    output: Annotated[
        Path | None,
        typer.Option("-o", "--output", help="An archive (.zip), or a folder for `push`; by default an archive here."),
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace what has that name.")] = False,
) -> None:
    """Pack a bundle for others: one archive, or a folder for the hub, with a card of sources, licences and figures."""
    from mirrorsd.hub.asking import readable_bytes
    from mirrorsd.hub.packing import pack as write
    from mirrorsd.hub.packing import sha256_of

    manifest, name = read_bundle(bundle), bundle.resolve().name.removesuffix(".mirror")
    place = output or Path(f"{name}.zip")
    num_bytes = write(bundle, place, card_text(manifest, name), overwrite=overwrite)
    if licence_of(manifest) == UNKNOWN:
        note(
            "warning: the licence of one of its models is not known: find it out before you pass the bundle on",
            "yellow",
        )
    if place.is_file():
        note(f"wrote {place}, {readable_bytes(num_bytes)}; where it lies at an address, others say\n")
        print(f"mirrorsd chat https://.../{quote(place.name)}#sha256={sha256_of(place)}")
    else:
        note(f"wrote {place}, {readable_bytes(num_bytes)}; read {place}/README.md, then")
        print(f"mirrorsd push {as_word(place)} OWNER/{name_on_the_hub(name)}")


def name_on_the_hub(name: str) -> str:
    """What a repository may be called for a bundle of this name.

    >>> name_on_the_hub("my Qwen3 (int8)"), name_on_the_hub("☃")
    ('my-Qwen3-int8', 'NAME')
    """
    return re.sub(r"[^A-Za-z0-9_.]+", "-", name).strip("-.") or "NAME"
