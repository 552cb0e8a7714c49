"""Values without parts in a JSON schema: every string and number ends, and is written as the schema names it.

Owns: how long strings and numbers may become, which numbers llguidance would round, and which values two schemas share.
Does not own: objects and lists (`finite_schema.py`), patterns (`finite_pattern.py`).
"""

from collections.abc import Iterator, Mapping
from decimal import Decimal
from math import nextafter
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
