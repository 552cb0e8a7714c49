"""`mirrorsd train`: the text that a target writes, and the exits and drafts that learn from it."""

import typer

from mirrorsd.cli.commands.train.draft import draft
from mirrorsd.cli.commands.train.exit import exit_command
from mirrorsd.cli.commands.train.report import report
from mirrorsd.cli.commands.train.text import text

app = typer.Typer(help="Train exit adapters and streaming drafts on text that the target writes.", no_args_is_help=True)
app.command()(text)
app.command("exit")(exit_command)
app.command()(draft)
app.command()(report)
