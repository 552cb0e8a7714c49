"""How help is laid out: names in one column, words in another, options under the heading they belong to.

Plain text: brackets in a help text stay what they are, and no name is ever cut, however narrow the terminal.
"""

import re
from typing import Any

from typer.core import TyperCommand, TyperGroup

OTHERS = "Options"
"""Heading of the options that name none."""


class Command(TyperCommand):
    """A command whose options stand under headings (`rich_help_panel`), in the order in which they are declared."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write arguments first, then each heading's options; what every command has comes last."""
        sections: dict[str, list[tuple[str, str]]] = {}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if record is not None:
                is_argument = parameter.param_type_name == "argument"
                heading = "Arguments" if is_argument else getattr(parameter, "rich_help_panel", None) or OTHERS
                sections.setdefault(heading, []).append(record)
        last = sections.pop(OTHERS, [])
        for heading, records in [*sections.items(), (OTHERS, last)]:
            if records:
                with formatter.section(heading):
                    formatter.write_dl(records)


class Group(TyperGroup):
    """A group of commands, each with its whole first sentence."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write a line or two per command."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, _first_sentence(command.help)) for name, command in self.commands.items()])


def _first_sentence(text: str | None) -> str:
    """What stands before the first full stop, paragraph or colon.

    >>> _first_sentence("Show what fits: a table. More.")
    'Show what fits'
    """
    return re.split(r"[.:;](?:\s|$)|\n\n", text or "", maxsplit=1)[0].replace("\n", " ").strip()


def examples(*lines: str) -> str:
    """Command lines for the end of a help page, kept as they are: 56 characters fit everywhere.

    >>> examples("mirrorsd devices").splitlines()[1:]
    ['Examples:', '  mirrorsd devices']
    """
    return "\n".join(("\b", "Examples:", *(f"  {line}" for line in lines)))
