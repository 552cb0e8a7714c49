"""Typed JSON and TOML: from a file's text to a dataclass, with one error that says what is wrong and where.

Owns: reading the text, the syntax, the types, missing and unknown names. Does not own: what a value may be (the
dataclass says so itself), and whose fault it is: callers turn a `DocumentError` into an error of their own.
"""

import json
import math
import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

import msgspec

Kind = TypeVar("Kind")
_WORDS = {
    "array": "a list",
    "bool": "true or false",
    "float": "a number",
    "int": "a whole number",
    "object": "a table",
    "str": "text",
}
_PLACE = re.compile(r" - at `\$\.?(.*)`$")
_WRONG_TYPE = re.compile(r"^Expected `(\w+)(?: \| null)?`")
_MISSING = re.compile(r"^Object missing required field `(.+)`")


_LONGEST = 2000
"""Characters of an error: a value of a thousand and what surrounds it are shown whole."""


class DocumentError(ValueError):
    """What is wrong with a document; `str` of it goes on from the document's name: "is not valid JSON (...)".

    Attributes:
        flaw: `text`, where nothing could be read or parsed, else what is wrong with one value.
        where: dotted path of that value, "" for the whole document; `[...]` stands for any key of a table.
        found: the value there; None where nothing is, or where `where` does not say which.
        expected: its type in words; "" where there is none.
        known: the names that are allowed beside an unknown one.
    """

    def __init__(
        self,
        words: str,
        flaw: Literal["text", "type", "missing", "unknown"] = "text",
        where: str = "",
        *,
        found: object = None,
        expected: str = "",
        known: tuple[str, ...] = (),
    ) -> None:
        super().__init__(words if len(words) <= _LONGEST else f"{words[:_LONGEST]} ...")
        self.flaw, self.where, self.found, self.expected, self.known = flaw, where, found, expected, known

    @property
    def parent(self) -> str:
        """Dotted path of the table that the value is in, or should be; "" for the whole document."""
        return self.where.rpartition(".")[0]

    @property
    def name(self) -> str:
        """The value's own name."""
        return self.where.rpartition(".")[2]


def read_text(path: Path) -> str:
    """The text of a UTF-8 file, without the mark that some editors put in front.

    Raises:
        DocumentError: it cannot be read, or is no such text.
    """
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise DocumentError(f"is not UTF-8 text ({error.reason} at byte {error.start})") from error
    except OSError as error:
        raise DocumentError(f"cannot be read: {error.strerror}") from error


def parse_json(text: str, *, names_once: bool = False) -> Any:
    """What a JSON text says; of two values of one name the last, unless `names_once` asks for a refusal.

    Raises:
        DocumentError: it is none, is nested too deeply, or has a name twice that may stand once.
    """
    try:
        found = json.loads(text, object_pairs_hook=_unique if names_once else None)
        if "\\u" in text:
            json.dumps(found, ensure_ascii=False).encode()  # half a character can be written nowhere
        return found
    except DocumentError:
        raise
    except (ValueError, RecursionError) as error:
        raise DocumentError(f"is not valid JSON ({error})") from error


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A table of `pairs`.

    >>> _unique([("a", 1), ("b", 2)])
    {'a': 1, 'b': 2}
    """
    table = dict(pairs)
    if len(table) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for number, name in enumerate(names) if name in names[:number])
        raise DocumentError(f"has {twice!r} twice", "unknown", twice)
    return table


def parse_toml(text: str) -> dict[str, Any]:
    """What a TOML text says.

    Raises:
        DocumentError: it is none, or has a number that is none.
    """
    try:
        return tomllib.loads(text, parse_float=_finite)
    except ValueError as error:
        raise DocumentError(f"is not a valid TOML file ({error})") from error


def _finite(text: str) -> float:
    found = float(text)
    if not math.isfinite(found):
        raise ValueError(f"{text} is no number here")
    return found


def build(kind: type[Kind], document: object, *, allows_unknown: bool = False) -> Kind:
    """Turn what was parsed into the dataclass `kind`, lists into tuples, and whole numbers into floats where wanted.

    Args:
        kind: a dataclass; its fields may be dataclasses, tuples, dictionaries and plain values.
        document: what a parser gave.
        allows_unknown: leave out names that `kind` does not have, instead of refusing them.

    Raises:
        DocumentError: a wrong type, a missing name, an unknown name.
    """
    try:
        built = msgspec.convert(document, kind)
    except msgspec.ValidationError as error:
        if isinstance(error.__cause__, ValueError | TypeError):  # the dataclass itself refuses a value
            raise DocumentError(str(error.__cause__), "type") from error
        raise _located(str(error), document) from error
    if not allows_unknown:
        for flaw in _unknown_names(document, built, ""):
            raise flaw
    return built


def _located(message: str, document: object) -> DocumentError:
    """The library's message as a `DocumentError`.

    >>> _located("Expected `int`, got `str` - at `$.draft.cores[0]`", {"draft": {"cores": ["a"]}}).where
    'draft.cores[0]'
    """
    place = _PLACE.search(message)
    where = place[1] if place else ""
    words = _PLACE.sub("", message)
    if missing := _MISSING.match(words):
        where = f"{where}.{missing[1]}".lstrip(".")
        return DocumentError(f"has no {where!r}", "missing", where)
    found = _value_at(document, where)
    wrong_type = _WRONG_TYPE.match(words)
    expected = _WORDS.get(wrong_type[1], "") if wrong_type else ""
    subject = f"has {found!r} as {where!r}" if where else "is of another form"
    wish = f"expected {expected}" if expected else words
    return DocumentError(f"{subject}; {wish}", "type", where, found=found, expected=expected)


def _value_at(document: object, where: str) -> object:
    for part in re.findall(r"[^.\[\]]+", where):
        if isinstance(document, Mapping):
            document = document.get(part)
        elif isinstance(document, list) and part.isdecimal():
            document = document[int(part)]
        else:
            return None
    return document


def _unknown_names(document: object, built: object, where: str) -> Iterator[DocumentError]:
    """Names of the document that became nothing."""
    if is_dataclass(built) and isinstance(document, Mapping):
        known = tuple(field.name for field in fields(built))
        for name, value in document.items():
            if name in known:
                yield from _unknown_names(value, getattr(built, name), f"{where}{name}.")
            else:
                unknown = f"{where}{name}"
                yield DocumentError(f"has an unknown name {unknown!r}", "unknown", unknown, known=known)
    elif isinstance(built, Mapping) and isinstance(document, Mapping):
        for name, value in document.items():
            yield from _unknown_names(value, built.get(name), f"{where}{name}.")
    elif isinstance(built, tuple) and isinstance(document, list):
        for number, (item, part) in enumerate(zip(document, built, strict=False)):
            yield from _unknown_names(item, part, f"{where.rstrip('.')}[{number}].")
