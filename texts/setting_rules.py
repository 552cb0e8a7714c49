"""What a field of the settings may hold: types and values are checked where they enter, and brought to one form."""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from numbers import Integral, Real
from typing import Any, NamedTuple

import numpy as np

from mirrorsd.graphs.errors import ConfigError


class Rule(NamedTuple):
    """`allowed` says it in words; `read` returns the value in its one form, or raises `ValueError`."""

    allowed: str
    read: Callable[[Any], Any]


def require(is_fine: bool, owner: str, field: str, value: object, allowed: str) -> None:
    """Raise a `ConfigError` that names the field, the value found and what is allowed, unless `is_fine`."""
    if not is_fine:
        raise ConfigError(f"{owner}.{field} is {shown(value)}; allowed: {allowed}.")


def checked(rule: Rule, owner: str, field: str, value: object) -> Any:
    """The value in its one form.

    Raises:
        ConfigError: the rule does not allow it.
    """
    try:
        return rule.read(value)
    except ValueError:
        raise ConfigError(f"{owner}.{field} is {shown(value)}; allowed: {rule.allowed}.") from None


def shown(value: object) -> str:
    """A value in an error.

    >>> shown([3])
    '[3]'
    """
    try:
        return repr(value)
    except RecursionError:
        return f"a {type(value).__name__} that is nested too deeply"
    except ValueError:  # Python writes no number of over 4,300 digits
        return f"a {type(value).__name__} of too many digits"


def apply_rules(settings: Any, rules: Mapping[str, Rule]) -> None:
    """Check every field of a frozen dataclass and put its one form in place.

    Raises:
        ConfigError: a field holds what its rule does not allow.
    """
    for name, rule in rules.items():
        object.__setattr__(settings, name, checked(rule, type(settings).__name__, name, getattr(settings, name)))


def read_whole(value: object) -> int:
    """A whole number, numpy's included; no boolean, no `1.0`.

    Raises:
        ValueError: it is none.
    """
    if isinstance(value, bool | np.bool_) or not isinstance(value, Integral):
        raise ValueError
    return int(value)


def whole(least: int, most: int | None = None, words: str = "") -> Rule:
    """A whole number between two bounds; `words` instead of "LEAST to MOST"."""

    def read(value: object) -> int:
        number = read_whole(value)
        if number < least or (most is not None and number > most):
            raise ValueError
        return number

    return Rule(f"{words or (f'{least} or more' if most is None else f'{least} to {most}')} (a whole number)", read)


def number(is_fine: Callable[[float], bool], words: str) -> Rule:
    """A finite number for which `is_fine`."""

    def read(value: object) -> float:
        if isinstance(value, bool | np.bool_) or not isinstance(value, Real):
            raise ValueError
        try:
            found = float(value)
        except OverflowError as error:
            raise ValueError from error
        if not (math.isfinite(found) and is_fine(found)):
            raise ValueError
        return found

    return Rule(f"{words} (a number)", read)


def one_of(names: Sequence[str]) -> Rule:
    """One of the names."""

    def read(value: object) -> str:
        if not isinstance(value, str) or value not in names:
            raise ValueError
        return value

    return Rule(", ".join(names), read)


def yes_or_no() -> Rule:
    """A boolean."""

    def read(value: object) -> bool:
        if not isinstance(value, bool | np.bool_):
            raise ValueError
        return bool(value)

    return Rule("True or False", read)


def several(single: type, read_one: Callable[[Any], Any], words: str) -> Rule:
    """A tuple: of one value, of a list, tuple or one-dimensional array of values; empty for None."""

    def read(value: Any) -> tuple[Any, ...]:
        if isinstance(value, single):
            return (read_one(value),)
        if isinstance(value, np.ndarray) and value.ndim != 1:
            raise ValueError
        if value is not None and not isinstance(value, list | tuple | np.ndarray):
            raise ValueError
        return tuple(map(read_one, () if value is None else value))

    return Rule(words, read)


def read_string(value: object) -> str:
    """A string that is not empty.

    Raises:
        ValueError: it is none.
    """
    if not isinstance(value, str) or not value:
        raise ValueError
    return value


def of_type(kind: type, words: str) -> Rule:
    """An instance of a class."""

    def read(value: object) -> object:
        if not isinstance(value, kind):
            raise ValueError
        return value

    return Rule(words, read)


def read_schema(value: object) -> str:
    """A JSON schema as JSON text, its properties in the order given: an object, True or False, or such a text.

    Raises:
        ValueError: it is none, or holds what JSON does not.
    """
    try:
        document = json.loads(value) if isinstance(value, str) else value
        if not isinstance(document, Mapping | bool):
            raise ValueError
        return json.dumps(dict(document) if isinstance(document, Mapping) else document, allow_nan=False)
    except (TypeError, RecursionError) as error:
        raise ValueError from error


def read_biases(value: Any) -> tuple[tuple[int, float], ...]:
    """What logits change by: ids (JSON's are strings) and finite numbers from -100 to 100, by id.

    Raises:
        ValueError: another form.
    """
    found: dict[int, float] = {}
    for token, bias in value.items() if isinstance(value, Mapping) else _pairs(value):
        number_of_token = int(token) if isinstance(token, str) and token.isdecimal() else read_whole(token)
        if isinstance(bias, bool | np.bool_) or not isinstance(bias, Real) or not -100 <= bias <= 100:  # type: ignore[operator]
            raise ValueError
        if number_of_token < 0:
            raise ValueError
        found[number_of_token] = float(bias)
    return tuple(sorted(found.items()))


def _pairs(value: Any) -> Sequence[tuple[Any, Any]]:
    is_pairs = isinstance(value, list | tuple) and all(isinstance(one, list | tuple) and len(one) == 2 for one in value)
    if value is not None and not is_pairs:
        raise ValueError
    return value or ()


def read_mappings(value: Any) -> tuple[dict[str, Any], ...]:
    """Several objects with names of their own: a list or tuple of mappings; empty for None.

    Raises:
        ValueError: another form.
    """
    if value is not None and not isinstance(value, list | tuple):
        raise ValueError
    return tuple(read_mapping(one) for one in value or ())


def read_mapping(value: object) -> dict[str, Any]:
    """An object whose keys are strings.

    Raises:
        ValueError: another form.
    """
    if not isinstance(value, Mapping) or not all(isinstance(name, str) for name in value):
        raise ValueError
    return dict(value)


def or_unset(rule: Rule) -> Rule:
    """None too, for a field that may be left to others."""
    return Rule(f"{rule.allowed}, or None", lambda value: None if value is None else rule.read(value))
