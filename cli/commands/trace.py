"""`mirrorsd trace`: a recorded trace as a picture that people can read."""

from pathlib import Path
from typing import Annotated

import typer

from mirrorsd.cli.output.console import note
from mirrorsd.cli.output.trace_picture import draw_html, draw_png, read_trace
from mirrorsd.graphs.errors import ConfigError


def trace(
    file: Annotated[Path, typer.Argument(help="Trace written by `generate --trace`.", show_default=False)],
    output: Annotated[Path, typer.Option("--output", "-o", help="Picture to write: .html or .png.")],
    start_ms: Annotated[float | None, typer.Option(help="First millisecond to draw; the middle by default.")] = None,
    length_ms: Annotated[float, typer.Option(help="Milliseconds to draw.", min=0.1)] = 60.0,
) -> None:
    """Draw which device did what when, with overlap and exposed time in figures."""
    recorded = read_trace(file)
    begin = max(0.0, recorded.length_ms / 2) if start_ms is None else start_ms
    if begin >= recorded.length_ms:
        raise ConfigError(f"--start-ms is {begin:g}, but the trace ends after {recorded.length_ms:.1f} ms.")
    part = recorded.between(begin, begin + length_ms)
    if output.suffix == ".html":
        output.write_text(draw_html(part, recorded.figures()), encoding="utf-8")
    elif output.suffix == ".png":
        draw_png(part, recorded.figures(), output)
    else:
        raise ConfigError(f"{output} ends in {output.suffix or 'nothing'!r}; give a name that ends in .html or .png.")
    note(f"wrote {output}: {', '.join(recorded.figures())}")
