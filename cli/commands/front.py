"""`mirrorsd front`: one address before several servers, with exact fail-over between them."""

from pathlib import Path
from typing import Annotated

import typer

from mirrorsd.cli.commands.serve import KEY_VARIABLE, read_keys, server_package
from mirrorsd.cli.output.console import note


def front(
    servers: Annotated[list[str], typer.Argument(help="Addresses of servers, or of a balancer before them.")],
    host: Annotated[str, typer.Option(help="Address to listen on; others than this machine's own need a key.")] = (
        "127.0.0.1"
    ),
    port: Annotated[int, typer.Option(help="Port to listen on; 0 takes a free one.")] = 8600,
    api_key_file: Annotated[
        Path | None, typer.Option(help=f"File with a key on each line; without it ${KEY_VARIABLE} counts.")
    ] = None,
    allowed_host: Annotated[
        list[str] | None, typer.Option(help="A further name (or name:port) by which clients reach this server.")
    ] = None,
    allowed_origin: Annotated[
        list[str] | None, typer.Option(help="A site whose pages may use this server, like https://name:port.")
    ] = None,
    grace: Annotated[float, typer.Option(help="Seconds that running answers get when the server stops.")] = 10.0,
    quiet: Annotated[bool, typer.Option("--quiet", help="Log warnings and errors only.")] = False,
) -> None:
    """One address before several servers: where one dies in the middle of a text, another goes on with it."""
    server = server_package()
    from mirrorsd.server.front import build_front

    settings = server.ServerSettings(
        host=host,
        port=port,
        keys=read_keys(api_key_file),
        allowed_hosts=tuple(allowed_host or ()),
        allowed_origins=tuple(allowed_origin or ()),
        grace_s=grace,
    )
    server.log_to_stderr(is_quiet=quiet)
    app = build_front(servers, settings)
    server.run(app, settings, lambda url: note(f"listening on {url}; servers: {', '.join(servers)}"))
