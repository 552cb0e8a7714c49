"""`mirrorsd train`: the text that a target writes, and the exits and drafts that learn from it."""

import typer

from mirrorsd.cli.train_draft import draft
from mirrorsd.cli.train_exit import exit_command
from mirrorsd.cli.train_report import report
from mirrorsd.cli.train_text import text

app = typer.Typer(help="Train exit adapters and streaming drafts on text that the target writes.", no_args_is_help=True)
app.command()(text)
app.command("exit")(exit_command)
app.command()(draft)
app.command()(report)
