"""Read device cards from TOML: the built-in ones by name, a user's own by path.

Nothing is ignored: an unknown key is refused with the nearest known one, a wrong type with the expected one.
"""

import tomllib
from collections.abc import Collection
from dataclasses import MISSING, fields, is_dataclass
from difflib import get_close_matches
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, get_args, get_origin, get_type_hints

from mirrorsd.device_maps.card import DeviceMap
from mirrorsd.graphs.errors import ConfigError

_CARDS = Path(__file__).parent
_TYPE_WORDS = {str: "text", int: "a whole number", bool: "true or false", float: "a number"}


def builtin_names() -> tuple[str, ...]:
    """Names of the cards that ship with mirrorsd, sorted."""
    return tuple(sorted(path.stem for path in _CARDS.glob("*.toml")))


def load_device_map(name_or_path: str) -> DeviceMap:
    """Read the built-in card of that name, or the card file at that path (anything ending in `.toml`).

    Raises:
        ConfigError: no such card, not TOML, an unknown key, a wrong type or a value out of its range.
    """
    path = _card_path(name_or_path)
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not a valid TOML file: {error}.") from error
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}.") from error
    document.setdefault("name", path.stem)
    try:
        card = _build_table(DeviceMap, document, "")
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error
    assert isinstance(card, DeviceMap)
    return card


def _card_path(name_or_path: str) -> Path:
    if name_or_path.endswith(".toml"):
        path = Path(name_or_path)
        if not path.is_file():
            raise ConfigError(f"There is no device map file {name_or_path}. Check the path.")
        return path
    known = builtin_names()
    if name_or_path not in known:
        devices = [name for name in known if name_or_path.lower() in name.split("-")]
        nearest = (
            f"; did you mean {' or '.join(map(repr, devices))}?"
            if devices
            else _nearest(name_or_path, known, likeness=0.75)
        )
        raise ConfigError(
            f"Unknown device map {name_or_path!r}{nearest} `mirrorsd devices` says which fit this machine. "
            f"Built in: {', '.join(known)}; your own: a path that ends in .toml."
        )
    return _CARDS / f"{name_or_path}.toml"


def _build_table(kind: type, table: dict[str, Any], where: str) -> object:
    """Turn one TOML table into the dataclass `kind`; `where` is the dotted prefix for messages."""
    hints = get_type_hints(kind)
    for key in table:
        if key not in hints:
            raise ConfigError(f"unknown key '{where}{key}'{_nearest(key, hints, where)} Known: {', '.join(hints)}.")
    for field in fields(kind):
        if field.name not in table and field.default is MISSING and field.default_factory is MISSING:
            raise ConfigError(f"'{where}{field.name}' is missing.")
    return kind(**{key: _build_value(hints[key], value, where + key) for key, value in table.items()})


def _build_value(kind: Any, value: object, where: str) -> object:
    if get_origin(kind) is UnionType:
        kind = next(choice for choice in get_args(kind) if choice is not NoneType)
    if is_dataclass(kind) and isinstance(kind, type):
        if not isinstance(value, dict):
            raise ConfigError(f"{where} is {value!r}; expected a table [{where}].")
        return _build_table(kind, value, f"{where}.")
    if get_origin(kind) is tuple:
        item_kind = get_args(kind)[0]
        if not isinstance(value, list):
            raise ConfigError(f"{where} is {value!r}; expected a list.")
        return tuple(_build_value(item_kind, item, f"{where}[{index}]") for index, item in enumerate(value))
    if kind is float and type(value) is int:
        return float(value)
    # `type() is` and not isinstance: TOML's true must not pass for the number 1.
    if type(value) is not kind:
        raise ConfigError(f"{where} is {value!r}; expected {_TYPE_WORDS[kind]}.")
    return value


def _nearest(found: str, known: Collection[str], where: str = "", *, likeness: float = 0.6) -> str:
    matches = get_close_matches(found, list(known), n=1, cutoff=likeness)
    return f"; did you mean '{where}{matches[0]}'?" if matches else "."
