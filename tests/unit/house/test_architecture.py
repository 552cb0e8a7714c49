"""The page of the architecture says what the tables of the house say, and names files that exist."""

import re

from .test_import_graph import ALLOWED, ROOT
from .test_rooms import ROOMS

PAGE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")


def rows_of(title: str) -> list[list[str]]:
    """The cells of the first table under a heading, without its head."""
    section = PAGE.partition(f"## {title}\n")[2].partition("\n## ")[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in section.splitlines() if line[:1] == "|"]
    assert len(rows) > 2, title
    return rows[2:]


def test_the_map_is_the_table_of_the_import_graph() -> None:
    said = {name.strip("`/"): set(re.findall(r"`(\w+)`", may)) for name, _, may in rows_of("The map")}
    assert said == {
        folder: {name.removeprefix("mirrorsd.") for name in allowed if name.startswith("mirrorsd.")}
        for folder, allowed in ALLOWED.items()
    }


def test_the_rooms_of_the_runtime_stand_in_their_order() -> None:
    assert [name.strip("`") for name, _ in rows_of("The rooms of the runtime")] == list(ROOMS["runtime"])


def test_the_files_that_it_names_exist() -> None:
    named = re.findall(r"`([\w.]+(?:/[\w.]*)+)`", PAGE)
    assert len(named) > 30
    assert not [name for name in named if not (ROOT / name).exists()]


def test_the_names_that_it_uses_are_in_the_files_beside_them() -> None:
    pairs = re.findall(r"`(\w+)(?:\.\w+)?` \(`([\w/]+\.py)`\)", PAGE)
    assert len(pairs) > 8
    assert not [(name, file) for name, file in pairs if name not in (ROOT / file).read_text(encoding="utf-8")]
