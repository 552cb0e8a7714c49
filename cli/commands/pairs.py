"""`mirrorsd pairs`: targets, and the drafts that fit them."""

from dataclasses import asdict

from rich.table import Table

from mirrorsd.cli.input import options
from mirrorsd.cli.output.console import add_row, print_json, print_table


def pairs(as_json: options.AsJson = False) -> None:
    """List targets with the drafts and heads that fit, and what was really exported and measured."""
    from mirrorsd.export.pairs import known_pairs

    if as_json:
        print_json({"pairs": [asdict(pair) for pair in known_pairs()]})
        return
    table = Table("target", "draft", "exported here", "what to know")
    for pair in known_pairs():
        draft = ", ".join(filter(None, (pair.draft, *pair.heads))) or "-"
        add_row(table, pair.target, draft, ", ".join(pair.exported) or "no", pair.measured or pair.note)
    print_table(table)
    print("mirrorsd export TARGET takes the draft of this table; any pair with the same tokenizer can be tried.")
