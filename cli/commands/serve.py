"""`mirrorsd serve`: bundles for programs that speak OpenAI's protocol, and for the page."""

import os
from pathlib import Path
from types import ModuleType
from typing import Annotated

import typer

from mirrorsd.cli.input import options
from mirrorsd.cli.output.console import note, show_loading
from mirrorsd.device_maps import load_device_map
from mirrorsd.graphs.errors import ConfigError


def serve(
    bundles: Annotated[
        list[str],
        typer.Argument(
            help="Bundles (folders, hf:OWNER/NAME, archives), or NAME=BUNDLE: NAME is the model's name for clients."
        ),
    ],
    host: options.Host = options.LOOPBACK,
    port: options.Port = options.PORT,
    api_key_file: options.ApiKeyFile = None,
    allowed_host: options.AllowedHosts = None,
    allowed_origin: options.AllowedOrigins = None,
    seats: Annotated[int, typer.Option(help="Conversations answered at once and kept cached, per bundle.")] = 2,
    queue: Annotated[int, typer.Option(help="Requests that may wait for a seat.")] = 32,
    grace: options.Grace = options.GRACE_S,
    device_map: options.DeviceMapName = "auto",
    layout: options.Layout = None,
    pad_rows_to: options.PadRowsTo = None,
    quiet: options.Quiet = False,
) -> None:
    """Serve bundles over HTTP, as OpenAI's clients expect it."""
    server = server_package()
    settings = server.ServerSettings(
        host=host,
        port=port,
        keys=read_keys(api_key_file),
        allowed_hosts=tuple(allowed_host or ()),
        allowed_origins=tuple(allowed_origin or ()),
        seats=seats,
        queue=queue,
        grace_s=grace,
        device_map=device_map,
        layout=layout,
        speculation={} if pad_rows_to is None else {"pad_rows_to": pad_rows_to},
    )
    if device_map != "auto":
        load_device_map(device_map)  # what is no card is said before a bundle is fetched, or an address told
    server.log_to_stderr(is_quiet=quiet)
    with show_loading("looking for the bundles") as show:
        folders = server.named_folders(bundles, show)
    server.serve(folders, settings, note)


def server_package() -> ModuleType:
    """The server, where what it needs is installed.

    Raises:
        ConfigError: it is not.
    """
    try:
        from mirrorsd import server
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"{error.name} is not installed, which the server needs: pip install 'mirrorsd[server]'."
        ) from error
    return server


def read_keys(file: Path | None) -> tuple[str, ...]:
    """Keys out of a file, or else the one in the environment.

    Raises:
        ConfigError: the file cannot be read, or holds none.
    """
    if file is None:
        key = os.environ.get(options.KEY_VARIABLE, "")
        return (key,) if key else ()
    try:
        keys = tuple(line.strip() for line in file.read_text(encoding="utf-8").splitlines() if line.strip())
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--api-key-file {file} cannot be read: {error}.") from error
    if not keys:
        raise ConfigError(f"--api-key-file {file} holds no key: write one on a line.")
    return keys
