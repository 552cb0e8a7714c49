"""What the page is made of: nothing from elsewhere but what is named, with licence and hash."""

import hashlib
import json
import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
PAGE = ROOT / "server" / "page"
VENDOR = PAGE / "vendor"
PACKAGES = json.loads((VENDOR / "vendored.json").read_text(encoding="utf-8"))
OWN = sorted(path for path in PAGE.iterdir() if path.suffix in (".js", ".css", ".html"))


def test_every_vendored_file_is_the_one_that_is_named() -> None:
    named = {name: entry for package in PACKAGES.values() for name, entry in package["files"].items()}
    licences = {package["licence_file"] for package in PACKAGES.values()}
    found = {path.relative_to(VENDOR).as_posix() for path in VENDOR.rglob("*") if path.is_file()}
    assert found == {*named, *licences, "vendored.json"}
    for name, entry in named.items():
        assert hashlib.sha256((VENDOR / name).read_bytes()).hexdigest() == entry["sha256"], name


def test_every_vendored_package_has_a_version_and_its_licence() -> None:
    for name, package in PACKAGES.items():
        assert re.fullmatch(r"\d+\.\d+\.\d+", package["version"]), name
        text = (VENDOR / package["licence_file"]).read_text(encoding="utf-8")
        assert re.search(r"licen[sc]e|redistribution", text, re.IGNORECASE), name


def test_what_vendored_styles_fetch_lies_beside_them() -> None:
    for path in VENDOR.rglob("*.css"):
        wanted = re.findall(r"url\(([^)]+)\)", path.read_text(encoding="utf-8"))
        assert not [name for name in wanted if ":" in name or name.startswith("/")]
        fonts = [name for name in wanted if name.endswith(".woff2")]
        assert fonts and not [name for name in fonts if not (path.parent / name).is_file()]


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
