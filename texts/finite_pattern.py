"""What has no parts made finite: regular expressions, strings and numbers, every text of which ends.

Owns: how often what a pattern repeats without a bound may come, how much may stand beside a pattern that has no
anchors, how long strings and numbers may become, and which values two schemas share. Does not own: what a pattern
means, which is llguidance's; a pattern that cannot be read here is left to it.

>>> finite_pattern("^[a-z]+$", 64)
'^(?:[a-z]{1,64})$'
>>> finite_pattern("_id$|^x", 64)
'^(?:(?s:.){0,64}_id|x(?s:.){0,64})$'
>>> finite_pattern("^([a-z]+[.])*$", 64)
'^(?:([a-z]{1,8}[.]){0,64})$'
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from itertools import takewhile
from math import isqrt, nextafter
from typing import Any, TypeGuard

from mirrorsd.graphs.errors import ConfigError

LEAST_ROOM = 16
"""Characters that any string may have. Where less is left, an object within its own kind is left out."""
DIGITS, DECIMALS = 18, 9
"""Of a number, before and behind the point; an exponent would have no end either."""
_WHOLE, _WIDEST = 2**53, int(nextafter(2**63, 0))
"""llguidance reads numbers as doubles, the first of which stands for two whole ones, and keeps bounds in 64 bits."""
_NARROW = 1e-6
"""A range of numbers that so few decimals would leave too little of: there it has so many values at equal distances."""
_VALUES = 33
_KINDS = {dict: "object", list: "array", str: "string", bool: "boolean", type(None): "null", int: "number"}
_LOW, _HIGH = ("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")
_OPENING = re.compile(r"\((?:\?(?:P?<\w+>|[a-zA-Z-]*:))?")
_ATOM = re.compile(r"\\[pPxu]\{[^}]*\}|\\.|\(\?[a-zA-Z-]+\)|[^\\()\[\]|]", re.DOTALL)
_TIMES = re.compile(r"\{(\d+),\}")
_REPEATED = re.compile(r"(?:[*+?]|\{\d+(?:,\d*)?\})+")
_LOOK_AROUND = re.compile(r"(?<!\\)\(\?<?[=!]")
_BEGINNINGS, _ENDS = ("^", r"\A"), ("$", r"\z")


@dataclass
class _Part:
    """A piece of a pattern with what says how often it comes; a group has alternatives, each a list of parts."""

    text: str
    times: str = ""
    alternatives: list[list["_Part"]] = field(default_factory=list)


class _UnreadableError(Exception):
    """Not a pattern as it is read here."""


def looks_around(pattern: str) -> bool:
    """Whether it says what stands before or behind a text that it does not match, which no grammar can.

    >>> looks_around("^(?!a)b"), looks_around("[(]?=b")
    (True, False)
    """
    return _LOOK_AROUND.search(pattern) is not None


def any_text(most: int) -> str:
    """The pattern of any text that is not empty."""
    return f"^(?s:.){{1,{most}}}$"


def finite_pattern(pattern: str, most: int) -> str:
    """The pattern with at most so many repetitions of whatever it repeats without a bound, and anchored at both ends.

    Within what is repeated the root of that many are allowed.

    Args:
        pattern: a regular expression that may match anywhere in a text, as in a JSON schema.
        most: see there.
    """
    try:
        read, end = _alternatives(pattern, 0)
    except _UnreadableError:
        return pattern
    if end < len(pattern):
        return pattern
    return f"^(?:{_joined(read, most, is_first=True, is_last=True)})$"


def _alternatives(pattern: str, place: int) -> tuple[list[list[_Part]], int]:
    """What stands up to the end or the closing parenthesis, and where that is."""
    found: list[list[_Part]] = [[]]
    while place < len(pattern) and pattern[place] != ")":
        if pattern[place] == "|":
            found.append([])
            place += 1
            continue
        part, place = _part(pattern, place)
        times = _REPEATED.match(pattern, place)
        if times:
            part.times, place = times[0], times.end()
        found[-1].append(part)
    return found, place


def _part(pattern: str, place: int) -> tuple[_Part, int]:
    if pattern[place] == "[":
        end = _end_of_class(pattern, place)
        return _Part(pattern[place:end]), end
    if atom := _ATOM.match(pattern, place):
        return _Part(atom[0]), atom.end()
    opening = _OPENING.match(pattern, place)
    if opening is None:
        raise _UnreadableError
    alternatives, end = _alternatives(pattern, opening.end())
    if end == len(pattern):
        raise _UnreadableError
    return _Part(opening[0], alternatives=alternatives), end + 1


def _end_of_class(pattern: str, place: int) -> int:
    """Behind the bracket that closes a class; classes may stand in classes, and one that comes first is a letter."""
    place += 2 if pattern.startswith("[^", place) else 1
    first = place
    while place < len(pattern):
        letter = pattern[place]
        if letter == "]" and place > first:
            return place + 1
        place = _end_of_class(pattern, place) if letter == "[" else place + (2 if letter == "\\" else 1)
    raise _UnreadableError


def _joined(alternatives: Sequence[list[_Part]], most: int, *, is_first: bool, is_last: bool) -> str:
    """The alternatives as text; anything may stand before the first part and behind the last one, without an anchor."""
    return "|".join(_anchored(parts, most, is_first=is_first, is_last=is_last) for parts in alternatives)


def _anchored(parts: list[_Part], most: int, *, is_first: bool, is_last: bool) -> str:
    flags = list(takewhile(lambda part: part.text.startswith("(?") and not part.alternatives, parts))
    rest = parts[len(flags) :]
    has_begun, has_ended = not is_first, not is_last
    while is_first and rest and rest[0].text in _BEGINNINGS:
        has_begun, rest = True, rest[1:]
    while is_last and rest and rest[-1].text in _ENDS:
        has_ended, rest = True, rest[:-1]
    asks = [not has_begun and number == 0 and _has_anchor(part) for number, part in enumerate(rest)]
    asks_back = [not has_ended and number == len(rest) - 1 and _has_anchor(part) for number, part in enumerate(rest)]
    around = f"(?s:.){{0,{most}}}"
    said = "".join(
        _text(part, most, is_first=first, is_last=last) for part, first, last in zip(rest, asks, asks_back, strict=True)
    )
    before = "" if has_begun or any(asks) else around
    behind = "" if has_ended or any(asks_back) else around
    return "".join(part.text for part in flags) + before + said + behind


def _text(part: _Part, most: int, *, is_first: bool, is_last: bool) -> str:
    times = _TIMES.sub(lambda found: f"{{{found[1]},{max(most, int(found[1]))}}}", part.times)
    times = re.sub(r"[*+](?!\})", lambda found: f"{{{int(found[0] == '+')},{most}}}", times)
    if not part.alternatives:
        return part.text + times
    within = max(isqrt(most), 2) if times != part.times else most
    return f"{part.text}{_joined(part.alternatives, within, is_first=is_first, is_last=is_last)}){times}"


def _has_anchor(part: _Part) -> bool:
    """Whether a group that comes once has an anchor of its own."""
    return not part.times and any(inner.text in (*_BEGINNINGS, *_ENDS) for inner in _within(part))


def _within(part: _Part) -> Iterator[_Part]:
    for parts in part.alternatives:
        for inner in parts:
            yield inner
            yield from _within(inner)


def finite_string(schema: Mapping[str, Any], room: int, room_of_all: int) -> dict[str, Any]:
    """A bound for the length of a string that has none; one with a pattern may take the room of all."""
    if "maxLength" in schema:
        return {"type": "string"}
    least = schema.get("minLength", 0)
    most = room_of_all if "pattern" in schema or "format" in schema else max(room, LEAST_ROOM)
    return {"type": "string", "maxLength": max(most, 2 * least if isinstance(least, int) else 0)}


def finite_number(schema: Mapping[str, Any], kind: str, *, is_alone: bool) -> dict[str, Any] | None:
    """Bounds for the digits of a number that has none; None where no value is left.

    Args:
        schema: one with `exact_bounds`.
        kind: `integer` or `number`.
        is_alone: whether the schema has no other types.
    """
    low, high = ([schema[name] for name in names if _is_number(schema.get(name))] for names in (_LOW, _HIGH))
    largest = 10**DIGITS
    found: dict[str, Any] = {"type": kind}
    if not high:
        found["maximum"] = min(max([largest, *(10 * abs(int(bound)) for bound in low)]), _WIDEST)
    if not low:
        found["minimum"] = -min(max([largest, *(10 * abs(int(bound)) for bound in high)]), _WIDEST)
    if kind == "integer" or "multipleOf" in schema:
        return found
    if low and high and min(high) - max(low) < _NARROW:
        return _narrow(schema, max(low), min(high)) if is_alone else None
    return found | {"multipleOf": float(f"1e-{DECIMALS}")}


def _narrow(schema: Mapping[str, Any], low: float, high: float) -> dict[str, Any] | None:
    """Numbers of a narrow range by their names; None where there are none."""
    steps = (low + (high - low) * number / (_VALUES - 1) for number in range(_VALUES))
    excluded = [schema.get("exclusiveMinimum"), schema.get("exclusiveMaximum")]
    values = sorted({value for value in steps if low <= value <= high and value not in excluded})
    return {"type": "number", "enum": values} if values else None


def exact_bounds(schema: Mapping[str, Any]) -> dict[str, Any]:
    """The schema with bounds of numbers that llguidance does not move: larger ones than it can keep move inwards.

    >>> exact_bounds({"minimum": 2**53 + 1, "exclusiveMaximum": 2**53 + 30})
    {'minimum': 9007199254741000, 'maximum': 9007199254741020}

    Raises:
        ConfigError: a bound leaves only numbers that llguidance would round.
    """
    found = dict(schema)
    for name in ("exclusiveMinimum", "minimum", "exclusiveMaximum", "maximum"):
        bound = found.get(name)
        if not _is_number(bound):
            continue
        if abs(bound) < _WHOLE:
            found[name] = int(bound) if bound == int(bound) else bound
            continue
        del found[name]
        limit, inwards = ("minimum", 1) if name in _LOW else ("maximum", -1)
        least = max(inwards * bound, -_WIDEST)
        least = _rounded_up(int(least) + (name != limit)) if least < _WIDEST else _WIDEST
        if least >= _WIDEST:
            raise ConfigError(f"The JSON schema cannot be taken: {name} leaves only numbers with too many digits.")
        beside = [inwards * found[limit]] if _is_number(found.get(limit)) else []
        found[limit] = inwards * max([least, *beside])
    return found


def _rounded_up(number: int) -> int:
    """The first number with so many zeros that it is a double, and the one that the double's shortest name tells."""
    steps: Iterator[int] = (10**count for count in range(DIGITS + 1))
    rounded = (-(-number // step) * step for step in steps)
    return next(whole for whole in rounded if float(whole) == whole == Decimal(repr(float(whole))))


def is_exact(value: Any) -> bool:
    """Whether llguidance writes a value as it is, up to the last digit of the numbers in it.

    >>> is_exact({"a": [2**60, 0.1]}), is_exact({"a": [2**60 + 1]}), is_exact(0.97137450105889131)
    (True, False, False)
    """
    if isinstance(value, list | dict):
        return all(map(is_exact, value.values() if isinstance(value, dict) else value))
    if not isinstance(value, int | float):
        return True
    if not abs(value) < _WIDEST:
        return False
    digits = repr(abs(value)).partition("e")[0].removesuffix(".0").replace(".", "")
    return float(value) == value == round(value, DIGITS) and (isinstance(value, int) or int(digits) < _WHOLE)


def _is_number(value: Any) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and value == value


def differ(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether two schemas have no value in common, by their types, or by the values that they name.

    >>> differ({"const": "a"}, {"enum": ["b", "c"]}), differ({"type": "integer"}, {"type": ["number", "null"]})
    (True, False)
    """
    try:
        return not {*_values(one)} & {*_values(other)}
    except TypeError:  # a schema names none, or values with parts
        return not _kinds(one) & _kinds(other)


def _values(schema: Mapping[str, Any]) -> Any:
    return [schema["const"]] if "const" in schema else schema.get("enum")


def _kinds(schema: Mapping[str, Any]) -> set[str]:
    """The types that a schema's own words allow, of which `number` is one with `integer`."""
    values, types = _values(schema), schema.get("type")
    if isinstance(values, list):
        return {_KINDS.get(type(value), "number") for value in values}
    named = [types] if isinstance(types, str) else types if isinstance(types, list) else _KINDS.values()
    return {"number" if name == "integer" else str(name) for name in named}


def even(room: int) -> int:
    """The power of two below: so that few rooms are told apart.

    >>> even(1000), even(1)
    (512, 1)
    """
    return 1 << (max(room, 1).bit_length() - 1)
