"""A public method says what it does, or the class that it fulfils does: nobody reads "see there"."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
LEFT_OUT = {"tests", "build", "dist"}
Classes = dict[str, list[ast.ClassDef]]


def sources() -> list[Path]:
    """Every module of the project but its tests."""
    inside = (path.relative_to(ROOT) for path in ROOT.rglob("*.py"))
    return sorted(path for path in inside if path.parts[0] not in LEFT_OUT and path.parts[0][0] != ".")


def methods_of(found: ast.ClassDef) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    return (node for node in found.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))


def base_names(found: ast.ClassDef) -> Iterator[str]:
    for base in found.bases:
        named = base.value if isinstance(base, ast.Subscript) else base
        yield named.attr if isinstance(named, ast.Attribute) else named.id if isinstance(named, ast.Name) else ""


def is_documented_above(found: ast.ClassDef, method: str, classes: Classes) -> bool:
    """Whether one of the classes that this one names as its bases says what `method` does."""
    for base in (one for name in base_names(found) for one in classes.get(name, ())):
        says = any(node.name == method and ast.get_docstring(node) for node in methods_of(base))
        if says or is_documented_above(base, method, classes):
            return True
    return False


def unsaid(tree: ast.AST, classes: Classes) -> list[str]:
    """Public methods of public classes that neither say what they do nor fulfil one that does."""
    return [
        f"{found.name}.{method.name}"
        for found in ast.walk(tree)
        if isinstance(found, ast.ClassDef) and not found.name.startswith("_")
        for method in methods_of(found)
        if not method.name.startswith("_") and not ast.get_docstring(method)
        if not any("setter" in ast.unparse(mark) or "overload" in ast.unparse(mark) for mark in method.decorator_list)
        if not is_documented_above(found, method.name, classes)
    ]


def classes_of(*trees: ast.AST) -> Classes:
    classes: Classes = {}
    for tree in trees:
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                classes.setdefault(node.name, []).append(node)
    return classes


@pytest.fixture(scope="module")
def trees() -> dict[Path, ast.AST]:
    return {path: ast.parse((ROOT / path).read_text(encoding="utf-8")) for path in sources()}


def test_every_public_method_says_what_it_does_or_fulfils_one_that_does(trees: dict[Path, ast.AST]) -> None:
    classes = classes_of(*trees.values())
    found = {str(path): names for path, tree in trees.items() if (names := unsaid(tree, classes))}
    assert found == {}, "write a sentence, or name the protocol among the class's bases"


def test_no_docstring_only_points_elsewhere(trees: dict[Path, ast.AST]) -> None:
    kinds = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    found = [
        f"{path}: {node.name}"
        for path, tree in trees.items()
        for node in ast.walk(tree)
        if isinstance(node, kinds) and (ast.get_docstring(node) or "").startswith("See ")
    ]
    assert found == []


@pytest.mark.parametrize(
    ("bases", "expected"),
    [("(Said)", []), ("(Unsaid)", ["Own.work"]), ("", ["Own.work"]), ("(Outside)", ["Own.work"]), ("(Middle)", [])],
)
def test_a_method_is_excused_by_a_base_that_documents_it_alone(bases: str, expected: list[str]) -> None:
    tree = ast.parse(
        'class Said(Protocol):\n    def work(self):\n        """Work."""\n'
        "class Middle(Said[int]):\n    x = 1\n"
        'class Unsaid(Protocol):\n    def rest(self):\n        """Rest."""\n'
        f"class Own{bases}:\n    def work(self): ...\n"
    )
    assert unsaid(tree, classes_of(tree)) == expected
