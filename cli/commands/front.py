"""`mirrorsd front`: one address before several servers, with exact fail-over between them."""

from typing import Annotated

import typer

from mirrorsd.cli.commands.serve import read_keys, server_package
from mirrorsd.cli.input import options
from mirrorsd.cli.output.console import note


def front(
    servers: Annotated[list[str], typer.Argument(help="Addresses of servers, or of a balancer before them.")],
    host: options.Host = options.LOOPBACK,
    port: options.Port = options.PORT,
    api_key_file: options.ApiKeyFile = None,
    allowed_host: options.AllowedHosts = None,
    allowed_origin: options.AllowedOrigins = None,
    grace: options.Grace = options.GRACE_S,
    quiet: options.Quiet = False,
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
