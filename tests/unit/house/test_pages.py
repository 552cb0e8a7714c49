"""The pages point at files that exist, and name every command and card there is."""

import re
from pathlib import Path

import pytest

from mirrorsd.cli.application import app
from mirrorsd.device_maps import builtin_names

ROOT = Path(__file__).resolve().parents[3]
PAGES = (ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md")))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    links = re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text(encoding="utf-8"))
    assert not [link for link in links if "://" not in link and not (page.parent / link).exists()]


def test_every_command_has_a_section() -> None:
    page = (ROOT / "docs" / "command-line.md").read_text(encoding="utf-8")
    names = [command.callback.__name__ for command in app.registered_commands if command.callback is not None]
    assert not [name for name in names if f"## `mirrorsd {name}" not in page]


def test_every_card_is_on_its_page() -> None:
    page = (ROOT / "docs" / "device-maps.md").read_text(encoding="utf-8")
    assert not [name for name in builtin_names() if f"`{name}`" not in page]


def test_scripts_that_the_readme_names_exist() -> None:
    named = re.findall(r"(?:scripts|bench|samples)/[a-z_/]+\.py", (ROOT / "README.md").read_text(encoding="utf-8"))
    assert named
    assert not [path for path in named if not (ROOT / path).is_file()]
