"""What the page is made of: nothing from elsewhere but what is named, with licence and hash."""

import hashlib
import json
import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
PAGE = ROOT / "server" / "page"
VENDORED = json.loads((PAGE / "vendor" / "vendored.json").read_text(encoding="utf-8"))
OWN = sorted(path for path in PAGE.iterdir() if path.suffix in (".js", ".css", ".html"))


def test_every_vendored_file_is_the_one_that_is_named() -> None:
    assert set(VENDORED) == {path.name for path in (PAGE / "vendor").glob("*.js")}
    for name, entry in VENDORED.items():
        assert hashlib.sha256((PAGE / "vendor" / name).read_bytes()).hexdigest() == entry["sha256"]
        assert (PAGE / "vendor" / entry["licence_file"]).read_text(encoding="utf-8")


@pytest.mark.parametrize("path", OWN, ids=lambda path: path.name)
def test_nothing_comes_from_elsewhere(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert not re.findall(r"(?:https?:)?//[a-z0-9-]+\.[a-z]{2,}", text)
    assert not re.search(r"\b(?:eval|innerHTML|outerHTML|insertAdjacentHTML|document\.write)\b", text)
    assert len(text.splitlines()) <= 400


def test_the_page_has_no_script_or_style_of_its_own_inside() -> None:
    html = (PAGE / "index.html").read_text(encoding="utf-8")
    assert not re.search(r"<style|\sstyle=|\son[a-z]+=|<script(?![^>]* src=)", html)


def test_the_page_ships() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert "page/**/*" in settings["tool"]["setuptools"]["package-data"]["mirrorsd.server"]
