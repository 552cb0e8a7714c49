"""`mirrorsd trace`: a recorded trace as a picture that people can read."""

from pathlib import Path
from typing import Annotated

import typer

from mirrorsd.cli.input.requests import check_writable
from mirrorsd.cli.output.console import note
from mirrorsd.graphs.errors import ConfigError
from mirrorsd.graphs.whole_file import write_whole


def trace(
    file: Annotated[Path, typer.Argument(help="Trace written by `generate --trace`.", show_default=False)],
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="Picture to write, .html or .svg; without it FILE with .html at its end."),
    ] = None,
    start_ms: Annotated[float | None, typer.Option(help="First millisecond to draw; the middle by default.")] = None,
    length_ms: Annotated[
        float | None, typer.Option(help="Milliseconds to draw; eight steps by default.", min=0.1)
    ] = None,
) -> None:
    """Draw which device did what when, with the words that each step brought."""
    from mirrorsd.cli.output.timeline import draw
    from mirrorsd.cli.output.trace_picture import page, read_trace

    whole = read_trace(file)
    picture = output or file.with_suffix(".html")
    if picture.suffix not in (".html", ".svg"):
        raise ConfigError(f"{picture} ends in {picture.suffix or 'nothing'!r}; give a name that ends in .html or .svg.")
    if picture.resolve() == file.resolve():
        raise ConfigError(f"{picture} is the trace itself; give the picture another name with --output.")
    check_writable("--output", picture)
    begin = max(0.0, whole.length_ms / 2) if start_ms is None else start_ms
    if not begin < whole.length_ms:
        raise ConfigError(f"--start-ms is {begin:g}, but the trace ends after {whole.length_ms:.1f} ms.")
    length = length_ms or whole.usual_stretch()
    if picture.suffix == ".html":
        drawn = page(whole, begin, length)
    else:
        drawn = draw(whole.between(begin, begin + length)) + "\n"
    write_whole(picture, drawn.encode())
    note(f"wrote {picture}: {'; '.join(whole.figures())}")
