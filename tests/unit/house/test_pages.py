"""The pages point at files that exist, name every command and card there is, and can be read."""

import re
from pathlib import Path

import pytest

from mirrorsd.bench import measurements
from mirrorsd.cli.application import application
from mirrorsd.device_maps import builtin_names
from mirrorsd.families.registry import FAMILIES

ROOT = Path(__file__).resolve().parents[3]
MOST_WORDS = 35
PAGES = (ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md")))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    links = re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text(encoding="utf-8"))
    assert not [link for link in links if "://" not in link and not (page.parent / link).exists()]


def test_every_command_has_a_section() -> None:
    page = (ROOT / "docs" / "command-line.md").read_text(encoding="utf-8")
    names = [command.callback.__name__ for command in application().registered_commands if command.callback is not None]
    assert not [name for name in names if f"## `mirrorsd {name}" not in page]


def test_every_card_is_on_its_page() -> None:
    page = (ROOT / "docs" / "device-maps.md").read_text(encoding="utf-8")
    assert not [name for name in builtin_names() if f"`{name}`" not in page]


def test_scripts_that_the_readme_names_exist() -> None:
    named = re.findall(r"(?:scripts|bench|samples)/[a-z_/]+\.py", (ROOT / "README.md").read_text(encoding="utf-8"))
    assert named
    assert not [path for path in named if not (ROOT / path).is_file()]


def sentences(page: Path) -> list[str]:
    """A page's prose; code, tables, headings and the targets of links are none."""
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.S)
    text = re.sub(r"^\|.*$|^ {4}.*$|^#.*$", "\n\n", text, flags=re.M)
    text = re.sub(r"\]\([^)]*\)", "]", text)
    return [found for found in re.split(r"(?<=[.:;!?])\s+|\n\n|\n[*-] |\n\d+\. ", text) if found.strip()]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_no_sentence_is_longer_than_a_reader_s_breath(page: Path) -> None:
    assert not [found for found in sentences(page) if len(found.split()) > MOST_WORDS]


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 110


def test_the_readme_counts_the_families() -> None:
    """And among them those that are targets alone, by a number's name."""
    targets_alone = [family for family in FAMILIES.values() if family.recurrent or family.mixture]
    page = (ROOT / "README.md").read_text(encoding="utf-8")
    assert f"{len(FAMILIES)} families" in page
    assert len(targets_alone) == 9 and "Nine of these" in page


def test_the_measurements_are_what_the_reports_say() -> None:
    assert measurements.PAGE.read_text(encoding="utf-8") == measurements.page(), "run: python bench/measurements.py"


def test_every_report_of_a_machine_names_it() -> None:
    reports = [path for path in measurements.RESULTS.rglob("*.json") if path.parent.name != "other"]
    assert reports
    assert not [path.name for path in reports if not measurements.read(path).get("machine")]
