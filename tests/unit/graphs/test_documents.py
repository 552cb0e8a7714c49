"""Typed documents: what fits is built, what does not is named by its place."""

from dataclasses import dataclass
from pathlib import Path

import pytest

from mirrorsd.graphs.documents import DocumentError, build, parse_json, parse_toml, read_text


@dataclass(frozen=True, slots=True, kw_only=True)
class Wheel:
    size: float
    holes: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Car:
    name: str
    wheels: tuple[Wheel, ...]
    spare: Wheel | None = None
    parts: dict[str, Wheel] | None = None

    def __post_init__(self) -> None:
        if self.name == "":
            raise ValueError("a car needs a name")


def test_lists_become_tuples_and_whole_numbers_floats() -> None:
    found = build(Car, {"name": "a", "wheels": [{"size": 3, "holes": [1, 2]}], "spare": None})
    assert found == Car(name="a", wheels=(Wheel(size=3.0, holes=(1, 2)),))
    assert type(found.wheels[0].size) is float


@pytest.mark.parametrize(
    ("document", "flaw", "where", "words"),
    [
        ({"wheels": []}, "missing", "name", "has no 'name'"),
        ({"name": "a", "wheels": [{}]}, "missing", "wheels[0].size", "has no 'wheels"),
        ({"name": 1, "wheels": []}, "type", "name", "has 1 as 'name'; expected text"),
        ({"name": "a", "wheels": [{"size": True}]}, "type", "wheels[0].size", "expected a number"),
        ({"name": "a", "wheels": [{"size": 1, "holes": [1.5]}]}, "type", "wheels[0].holes[0]", "a whole number"),
        ({"name": "a", "wheels": [], "spare": []}, "type", "spare", "expected a table"),
        ({"name": "a", "wheels": [], "colour": 1}, "unknown", "colour", "unknown name 'colour'"),
        ({"name": "a", "wheels": [{"size": 1, "sise": 1}]}, "unknown", "wheels[0].sise", "unknown name"),
        ({"name": "a", "wheels": [], "parts": {"x": {"size": 1, "z": 1}}}, "unknown", "parts.x.z", "unknown name"),
        ([], "type", "", "is of another form; expected a table"),
        ({"name": "", "wheels": []}, "type", "", "a car needs a name"),
    ],
)
def test_every_flaw_says_where_it_is(document: object, flaw: str, where: str, words: str) -> None:
    with pytest.raises(DocumentError) as caught:
        build(Car, document)
    assert (caught.value.flaw, caught.value.where) == (flaw, where)
    assert words in str(caught.value)


def test_unknown_names_may_be_allowed() -> None:
    assert build(Wheel, {"size": 1, "colour": 2}, allows_unknown=True) == Wheel(size=1.0)


def test_a_mark_that_editors_put_in_front_is_no_part_of_the_text(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_bytes(b'\xef\xbb\xbf{"a": 1}')
    assert parse_json(read_text(path)) == {"a": 1}


def test_what_is_no_document_is_said_in_words(tmp_path: Path) -> None:
    with pytest.raises(DocumentError, match="cannot be read: No such file"):
        read_text(tmp_path / "none")
    for text in ("{", "[" * 100_000, '{"target": "\\ud800"}', '["\\uDFff"]'):
        with pytest.raises(DocumentError, match="is not valid JSON"):
            parse_json(text)
    with pytest.raises(DocumentError, match="is not a valid TOML file"):
        parse_toml("a = ")


def test_two_halves_of_a_character_are_one() -> None:
    assert parse_json('["\\ud83e\\udd8a", "\\u00e9", "a\\\\ud800"]') == ["\U0001f98a", "\xe9", "a\\ud800"]
