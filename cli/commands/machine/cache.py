"""`mirrorsd cache`: what is kept about bundles on this machine, and deleting it."""

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
from mirrorsd.graphs.user_cache import Kept, cache_folder, clear, list_kept

app = typer.Typer(cls=Group, help="What is kept about bundles on this machine: list or clear it.", no_args_is_help=True)


@app.command("list", cls=Command, epilog=examples("mirrorsd cache list"))
def list_cache(as_json: options.AsJson = False) -> None:
    """Show what is kept for each bundle: compiled drafts, passed checks, tuned settings, learned speeds."""
    kept = list_kept()
    if as_json:
        print_json({"folder": str(cache_folder()), "bundles": [_document(one) for one in kept]})
        return
    if kept:
        table = Table("bundle", "kept", "last used", "tuned or learned for")
        for one in kept:
            add_row(table, _name(one), readable_size(one.num_bytes), _day(one), ", ".join(one.tuned) or "-")
        print_table(table)
    print(f"{readable_size(sum(one.num_bytes for one in kept))} in {cache_folder()}")


@app.command(
    "clear",
    cls=Command,
    epilog=examples("mirrorsd cache clear pair.mirror", "mirrorsd cache clear --orphans"),
)
def clear_cache(
    bundle: Annotated[
        Path | None, typer.Argument(help="Only what is kept about this bundle.", show_default=False)
    ] = None,
    orphans: Annotated[bool, typer.Option("--orphans", help="Only about bundles that are gone.")] = False,
    tuned: Annotated[bool, typer.Option("--tuned", help="Tuned settings and learned speeds, too.")] = False,
) -> None:
    """Delete what is kept; the next load compiles and checks again. What was tuned or learned stays without --tuned."""
    chosen = [one for one in list_kept() if one.is_orphan or not orphans]
    if bundle is not None:
        chosen = [one for one in chosen if bundle.resolve() in one.bundles]
        if not chosen:
            raise ConfigError(f"Nothing is kept about {bundle}. `mirrorsd cache list` shows what is.")
    freed = sum(clear(one, with_tuned=tuned or one.is_orphan) for one in chosen)
    print(f"deleted {readable_size(freed)} of {len(chosen)} bundle(s) in {cache_folder()}")


def _name(kept: Kept) -> str:
    where = str(kept.bundles[0]) if kept.bundles else kept.folder.name
    return f"{where} (gone)" if kept.is_orphan else where


def _day(kept: Kept) -> str:
    return f"{datetime.fromtimestamp(kept.last_used, UTC):%Y-%m-%d}" if kept.last_used else "unknown"


def _document(kept: Kept) -> dict[str, object]:
    return {
        "folder": str(kept.folder),
        "bundles": [str(bundle) for bundle in kept.bundles],
        "bytes": kept.num_bytes,
        "last_used": kept.last_used,
        "tuned": list(kept.tuned),
        "is_orphan": kept.is_orphan,
    }
