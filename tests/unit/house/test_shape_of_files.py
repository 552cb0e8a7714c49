"""Long files and long functions are where a name is missing; a module's first words name modules that exist."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
FOLDERS = (
    "graphs",
    "device_maps",
    "families",
    "hub",
    "export",
    "texts",
    "devices",
    "runtime",
    "testing",
    "machine",
    "server",
    "cli",
    "training",
    "bench",
    "scripts",
)
MOST_LINES_OF_A_FILE = 400
MOST_LINES_OF_A_FUNCTION = 60
VAGUE_NAMES = {"utils", "helpers", "common", "manager", "misc"}


def source_files() -> list[Path]:
    return [ROOT / "__init__.py", *(path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py")))]


@pytest.mark.parametrize("path", source_files(), ids=lambda path: str(path.relative_to(ROOT)))
def test_shape(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert path.stem not in VAGUE_NAMES
    assert len(text.splitlines()) <= MOST_LINES_OF_A_FILE
    long_ones = [
        f"{node.name}: {node.end_lineno - node.lineno + 1} lines"
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.end_lineno is not None
        if node.end_lineno - node.lineno >= MOST_LINES_OF_A_FUNCTION
    ]
    assert not long_ones


@pytest.mark.parametrize("path", source_files(), ids=lambda path: str(path.relative_to(ROOT)))
def test_a_module_gives_each_of_its_constants_one_value(path: Path) -> None:
    """The last value would be that of the functions above it, too."""
    given = [
        name.id
        for node in ast.parse(path.read_text(encoding="utf-8")).body
        if isinstance(node, ast.Assign)
        for target in node.targets
        for name in ast.walk(target)
        if isinstance(name, ast.Name) and name.id.isupper()
    ]
    assert sorted(given) == sorted(set(given))


def known_names() -> set[str]:
    """Every module, file and identifier of the project, prose left out."""
    found: set[str] = set()
    for path in [*source_files(), *(ROOT / "tests").rglob("*.py"), *(ROOT / "samples").rglob("*.py")]:
        code = re.sub(r'"""[\s\S]*?"""', "", path.read_text(encoding="utf-8"))
        found |= {path.stem, path.name, *re.findall(r"[A-Za-z_]\w*", code)}
    return found


def test_the_modules_that_a_docstring_names_exist() -> None:
    known = known_names()
    unknown = [
        f"{path.relative_to(ROOT)} names {word}"
        for path in source_files()
        for word in re.findall(r"`([\w./]+)`", ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or "")
        if re.fullmatch(r"(\w+/)*([a-z0-9]+_[a-z0-9_]+|\w+\.py)", word) and word.rpartition("/")[2] not in known
    ]
    assert not unknown
