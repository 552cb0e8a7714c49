"""`mirrorsd cache`: what is kept about bundles on this machine, and deleting it."""

from contextlib import suppress
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from mirrorsd.cli.commands.inspect import readable_size
from mirrorsd.cli.input import options
from mirrorsd.cli.output.console import add_row, print_json, print_table
from mirrorsd.cli.output.help_pages import Command, Group, examples
from mirrorsd.graphs.errors import ConfigError
from mirrorsd.graphs.user_cache import VARIABLE, Kept, cache_folder, clear, folder_of, list_kept
from mirrorsd.hub.bundles import Fetched, fetched_as, fetched_bundles, forget, unfinished

app = typer.Typer(cls=Group, help="What is kept about bundles on this machine: list or clear it.", no_args_is_help=True)


@app.command("list", cls=Command, epilog=examples("mirrorsd cache list"))
def list_cache(as_json: options.AsJson = False) -> None:
    """Show what is kept for each bundle: compiled drafts, passed checks, tuned settings, learned speeds."""
    if cache_folder().is_file():
        raise ConfigError(f"{cache_folder()} is a file, so nothing can be kept there: {VARIABLE} names a folder.")
    kept, found = list_kept(), fetched_bundles()
    if as_json:
        documents = [{**asdict(one), "folder": str(one.folder)} for one in found]
        about = [_document(one) for one in kept]
        print_json({"folder": str(cache_folder()), "bundles": about, "fetched": documents})
        return
    if found:
        table = Table("fetched bundle", "size", "fetched on")
        for bundle in found:
            add_row(table, bundle.reference, readable_size(bundle.num_bytes), _day(bundle.when))
        print_table(table)
    if kept:
        table = Table("bundle", "kept", "last used", "tuned or learned for")
        for one in kept:
            add_row(table, _name(one), readable_size(one.num_bytes), _day(one.last_used), ", ".join(one.tuned) or "-")
        print_table(table)
    total = sum(one.num_bytes for one in kept) + sum(bundle.num_bytes for bundle in found)
    print(f"{readable_size(total)} in {cache_folder()}")


@app.command(
    "clear",
    cls=Command,
    epilog=examples(
        "mirrorsd cache clear pair.mirror", "mirrorsd cache clear hf:OWNER/NAME", "mirrorsd cache clear --orphans"
    ),
)
def clear_cache(
    bundle: Annotated[
        str | None,
        typer.Argument(help="Only what is kept about this bundle; itself, if it was fetched.", show_default=False),
    ] = None,
    orphans: Annotated[bool, typer.Option("--orphans", help="Only about bundles that are gone.")] = False,
    tuned: Annotated[bool, typer.Option("--tuned", help="Tuned settings and learned speeds, too.")] = False,
    fetched: Annotated[bool, typer.Option("--fetched", help="Bundles that were fetched, too.")] = False,
) -> None:
    """Delete what is kept; the next load makes it again. What was tuned, learned or fetched stays unless asked for."""
    chosen, gone = list_kept(), list[Fetched]()
    if bundle is not None:
        gone = _fetched(bundle)
        chosen = _about(bundle, gone)
        if not (chosen or gone):
            raise ConfigError(f"Nothing is kept about {bundle}. `mirrorsd cache list` shows what is.")
        if orphans and (gone or not all(one.is_orphan for one in chosen)):
            raise ConfigError(f"{bundle} is not gone: leave --orphans out to delete what is kept about it.")
    elif fetched:
        gone = fetched_bundles()
    chosen = [one for one in chosen if one.is_orphan or not orphans]
    freed = sum(clear(one, with_tuned=tuned or one.is_orphan) for one in chosen)
    broken_off = unfinished() if fetched and bundle is None else []
    freed += sum(forget(folder) for folder in (*(one.folder for one in gone), *broken_off))
    print(f"deleted {readable_size(freed)} of {max(len(chosen), len(gone))} bundle(s) in {cache_folder()}")


def _about(bundle: str, copies: list[Fetched]) -> list[Kept]:
    """What is kept about a bundle: known by where it was loaded, or by what lies there now."""
    places = {Path(bundle).resolve(), *(one.folder for one in copies)}
    folders = set[Path]()
    for place in places:
        with suppress(OSError):
            folders.add(folder_of(place))
    return [one for one in list_kept() if one.folder in folders or places & set(one.bundles)]


def _fetched(bundle: str) -> list[Fetched]:
    """What was fetched by this reference; an archive is known by its whole path."""
    return fetched_as(bundle) or fetched_as(str(Path(bundle).resolve()))


def _name(kept: Kept) -> str:
    where = str(kept.bundles[0]) if kept.bundles else kept.folder.name
    return f"{where} (gone)" if kept.is_orphan else where


def _day(when: float) -> str:
    return f"{datetime.fromtimestamp(when, UTC):%Y-%m-%d}" if when else "unknown"


def _document(kept: Kept) -> dict[str, object]:
    return {
        "folder": str(kept.folder),
        "bundles": [str(bundle) for bundle in kept.bundles],
        "bytes": kept.num_bytes,
        "last_used": kept.last_used,
        "tuned": list(kept.tuned),
        "is_orphan": kept.is_orphan,
    }
