"""`mirrorsd train`: the text that a target writes, and the exits, drafts and heads that learn from it."""

import typer

from mirrorsd.cli.commands.train.draft import draft
from mirrorsd.cli.commands.train.exit import exit_command
from mirrorsd.cli.commands.train.head import head
from mirrorsd.cli.commands.train.report import report
from mirrorsd.cli.commands.train.text import text
from mirrorsd.cli.output.help_pages import Command, Group, examples

app = typer.Typer(
    help="Train exit adapters, streaming drafts and drafting heads on text that the target writes.",
    cls=Group,
    no_args_is_help=True,
    rich_markup_mode=None,
)
app.command(
    cls=Command, epilog=examples("mirrorsd train text TARGET --corpus docs.jsonl \\", "    --work WORK --part 0/2")
)(text)
app.command("exit", cls=Command, epilog=examples("mirrorsd train exit TARGET --work WORK --layers auto"))(exit_command)
app.command(cls=Command, epilog=examples("mirrorsd train draft TARGET -o DRAFT --work WORK"))(draft)
app.command(cls=Command, epilog=examples("mirrorsd train head TARGET -o HEAD --kind eagle3 --work WORK"))(head)
app.command(
    cls=Command, epilog=examples("mirrorsd train report TARGET --draft DRAFT \\", "    --prompts questions.jsonl")
)(report)
