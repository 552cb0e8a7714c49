"""The runtime stays few: what a token passes, and no more. `python tests/unit/house/test_few.py` prints the figures."""

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
MOST = {
    "modules": 68,
    "lines": 13_000,
    "statements": 7_100,
    "numbers": 90,
    "numbers of policy and decoding": 25,
    "attributes of the fattest class": 12,
}


def test_the_runtime_stays_few() -> None:
    found = figures()
    assert {name: found[name] for name, most in MOST.items() if found[name] > most} == {}
    assert all(found.values()), "nothing was counted"


def figures() -> dict[str, int]:
    paths = sorted((ROOT / "runtime").rglob("*.py"))
    texts = {path: path.read_text(encoding="utf-8") for path in paths}
    deciding = [path for path in paths if path.is_relative_to(ROOT / "runtime" / "policy")]
    deciding += [path for path in paths if path.is_relative_to(ROOT / "runtime" / "decoding")]
    return {
        "modules": sum(path.name != "__init__.py" for path in paths),
        "lines": sum(len(text.splitlines()) for text in texts.values()),
        "statements": sum(statements(text) for text in texts.values()),
        "numbers": sum(len([*numbers(text)]) for text in texts.values()),
        "numbers of policy and decoding": sum(len([*numbers(texts[path])]) for path in deciding),
        "attributes of the fattest class": max(len(found) for text in texts.values() for found in attributes(text)),
    }


def statements(text: str) -> int:
    """Lines that are no docstring, comment, blank or import."""
    left_out: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        value = node.value if isinstance(node, ast.Expr) else None
        is_text = isinstance(value, ast.Constant) and isinstance(value.value, str)
        if isinstance(node, ast.Import | ast.ImportFrom) or (isinstance(node, ast.Expr) and is_text):
            left_out |= {*range(node.lineno, (node.end_lineno or node.lineno) + 1)}
    lines = enumerate(text.splitlines(), 1)
    return sum(bool(line.strip()) and line.strip()[0] != "#" and number not in left_out for number, line in lines)


def numbers(text: str) -> Iterator[str]:
    """Names in capital letters of a module that are numbers set by hand, or several in a tuple."""
    for node in ast.parse(text).body:
        if not isinstance(node, ast.Assign | ast.AnnAssign) or not is_by_hand(node.value):
            continue
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        parts = [part for target in targets for part in ast.walk(target) if isinstance(part, ast.Name)]
        yield from (part.id for part in parts if part.id.strip("_").isupper())


def is_by_hand(value: ast.expr | None) -> bool:
    """Whether it is a number, or holds one in a tuple; what another name gives is not."""
    if isinstance(value, ast.Tuple):
        return any(is_by_hand(part) for part in value.elts)
    if not isinstance(value, ast.Constant | ast.BinOp | ast.UnaryOp):
        return False
    parts = [*ast.walk(value)]
    has_number = any(isinstance(part, ast.Constant) and type(part.value) in (int, float) for part in parts)
    return has_number and not any(isinstance(part, ast.Name) for part in parts)


def attributes(text: str) -> Iterator[set[str]]:
    """What each class of a module keeps on `self`; the fields of a record are its columns, and not counted."""
    for one in ast.walk(ast.parse(text)):
        if isinstance(one, ast.ClassDef):
            parts = [part for part in ast.walk(one) if isinstance(part, ast.Attribute)]
            stored = [part for part in parts if isinstance(part.ctx, ast.Store) and isinstance(part.value, ast.Name)]
            yield {part.attr for part in stored if isinstance(part.value, ast.Name) and part.value.id == "self"}


if __name__ == "__main__":
    for name, figure in figures().items():
        print(f"{name}: {figure} of {MOST[name]}")
