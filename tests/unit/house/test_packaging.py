"""The package list, what ships, and the pins."""

import re
import tomllib
import zipfile
from pathlib import Path

import pytest
from loaded_scripts import load_script

from mirrorsd.cli.output.commit import COMMIT_FILE
from mirrorsd.freezing import hook_folders

ROOT = Path(__file__).resolve().parents[3]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def requirement_name(requirement: str) -> str:
    return re.split(r"[\[<>=!~; ]", requirement, maxsplit=1)[0].lower().replace("_", "-")


def test_packages_are_the_folders_with_an_init() -> None:
    found = {"mirrorsd"}
    for path in ROOT.glob("*/**/__init__.py"):
        parts = path.parent.relative_to(ROOT).parts
        if not any(part.startswith(".") or part in ("build", "dist") for part in parts):
            found.add(".".join(("mirrorsd", *parts)))
    assert set(PYPROJECT["tool"]["setuptools"]["packages"]) == found | {"optimum.commands.register"}


def test_optimum_finds_its_folder_without_an_init() -> None:
    """The folder is shared with other packages, so an `__init__.py` there would hide theirs."""
    folder = ROOT / PYPROJECT["tool"]["setuptools"]["package-dir"]["optimum.commands.register"]
    assert [path.name for path in folder.glob("*.py")] == ["register_mirrorsd.py"]


def test_nothing_else_ships_from_the_root() -> None:
    assert sorted(path.name for path in ROOT.glob("*.py")) == ["__init__.py", "__main__.py"]


def test_root_module_is_short() -> None:
    assert len((ROOT / "__init__.py").read_text(encoding="utf-8").splitlines()) <= 67


def test_every_requirement_is_pinned() -> None:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pinned = {requirement_name(line) for line in lines if "==" in line}
    project = PYPROJECT["project"]
    extras = project["optional-dependencies"]
    flavours = {"cuda", "directml"}
    wanted = [*project["dependencies"], *(need for name in extras.keys() - flavours for need in extras[name])]
    missing = {requirement_name(requirement) for requirement in wanted} - pinned - {"mirrorsd"}
    assert not missing


def test_pins_hold_on_every_system() -> None:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = [line for line in lines if line and not line.startswith("#")]
    assert all(re.fullmatch(r"[A-Za-z0-9_.-]+==[0-9][0-9A-Za-z.]*", line) for line in pins)
    assert "torch==2.13.0" in pins


def test_the_page_names_every_extra_and_what_it_brings() -> None:
    page = (ROOT / "docs" / "installing.md").read_text(encoding="utf-8")
    rows = dict(re.findall(r"^\| `([\w-]+)` \| (.*?) \|", page, flags=re.M))
    extras = PYPROJECT["project"]["optional-dependencies"]
    assert rows.keys() >= extras.keys() and not rows.keys() - extras.keys()
    for name in extras.keys() - {"dev"}:
        found = {word.lower().replace("_", "-") for word in re.findall(r"[\w-]+", rows[name])} - {"and"}
        own = {requirement_name(need) for need in extras[name]} - {"mirrorsd"}
        inner = {part for need in extras[name] for part in re.findall(r"mirrorsd\[(.*)\]", need)}
        assert found == own | {part for parts in inner for part in parts.split(",")}, name


def test_pyinstaller_finds_the_hooks() -> None:
    assert PYPROJECT["project"]["entry-points"]["pyinstaller40"] == {"hook-dirs": "mirrorsd.freezing:hook_folders"}
    (folder,) = hook_folders()
    assert {path.name for path in Path(folder).glob("hook-*.py")} == {"hook-mirrorsd.py", "hook-mirrorsd.cli.py"}
    shipped = PYPROJECT["tool"]["setuptools"]["package-data"]
    assert "hook-*.py" in shipped["mirrorsd.freezing"]
    hook = (Path(folder) / "hook-mirrorsd.py").read_text(encoding="utf-8")
    files = {
        f"{package.removeprefix('mirrorsd').strip('.').replace('.', '/')}/{pattern}".strip("/")
        for package, patterns in shipped.items()
        if package != "mirrorsd.freezing"
        for pattern in patterns
    }
    taken = {*files, COMMIT_FILE}  # a build writes the latter
    assert not [pattern for pattern in taken if f'"{pattern}"' not in hook], "what ships is taken along"


def test_version_is_one() -> None:
    import mirrorsd

    assert PYPROJECT["project"]["version"] == mirrorsd.__version__


def test_what_serves_installs_the_command_that_does() -> None:
    extras = PYPROJECT["project"]["optional-dependencies"]
    assert "mirrorsd[cli]" in extras["server"]
    assert {"typer", "rich"} <= {requirement_name(requirement) for requirement in extras["cli"]}


def test_a_wheel_of_a_commit_is_the_same_whenever_it_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And everybody may read what is unpacked of it."""
    editable_types = load_script("editable_types", monkeypatch)
    made = []
    for number, date in enumerate(((1990, 1, 1, 0, 0, 0), (2020, 1, 1, 0, 0, 0))):
        wheel = tmp_path / f"{number}.whl"
        with zipfile.ZipFile(wheel, "w") as archive:
            for name in ("mirrorsd/a.py", "mirrorsd.dist-info/RECORD"):
                archive.writestr(zipfile.ZipInfo(name, date), b"")
        editable_types.add_file(wheel, "mirrorsd/commit.txt", b"abc")
        made.append(wheel.read_bytes())
    assert made[0] == made[1]
    with zipfile.ZipFile(wheel) as archive:
        assert {info.external_attr >> 16 for info in archive.infolist()} == {0o100644}
