"""`mirrorsd push`: a packed bundle to the Hugging Face hub."""

import re
from typing import Annotated

import typer

from mirrorsd.cli.commands.sharing.card import UNKNOWN, licence_of
from mirrorsd.cli.input import options
from mirrorsd.cli.output.console import note
from mirrorsd.graphs.bundle_files import read_bundle
from mirrorsd.graphs.errors import ConfigError


def push(
    bundle: options.Bundle,
    repository: Annotated[str, typer.Argument(help="OWNER/NAME on the hub; it is made where it is not there.")],
    private: Annotated[bool, typer.Option("--private", help="A new repository is for you alone.")] = False,
) -> None:
    """Upload a folder that `mirrorsd pack` made to the Hugging Face hub."""
    from mirrorsd.hub.asking import REPOSITORY
    from mirrorsd.hub.packing import push as upload

    name = repository.removeprefix("hf:")
    if not re.fullmatch(REPOSITORY, name):
        raise ConfigError(f"REPOSITORY is {repository!r}; expected OWNER/NAME.")
    if licence_of(read_bundle(bundle)) == UNKNOWN and not private:
        raise ConfigError(
            "The licence of one of the bundle's models is not known, so it is not published; --private keeps it to you."
        )
    reference = upload(bundle, name, is_private=private)
    note("pushed; everybody who may see it says")
    print(f"mirrorsd chat {reference}")
