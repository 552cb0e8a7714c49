"""Read device cards from TOML: the built-in ones by name, a user's own by path.

Nothing is ignored: an unknown key is refused with the nearest known one, a wrong type with the expected one.
"""

from collections.abc import Collection
from difflib import get_close_matches
from pathlib import Path

from mirrorsd.device_maps.card import DeviceMap
from mirrorsd.graphs.documents import DocumentError, build, parse_toml, read_text
from mirrorsd.graphs.errors import ConfigError
from mirrorsd.graphs.shipped_files import shipped

_CARDS = Path(__file__).parent


def builtin_names() -> tuple[str, ...]:
    """Names of the cards that ship with mirrorsd, sorted.

    Raises:
        ConfigError: the installation lacks them.
    """
    shipped(_CARDS / "cpu.toml")
    return tuple(sorted(path.stem for path in _CARDS.glob("*.toml")))


def load_device_map(name_or_path: str) -> DeviceMap:
    """Read the built-in card of that name, or the card file at that path (anything ending in `.toml`).

    Raises:
        ConfigError: no such card, not TOML, an unknown key, a wrong type or a value out of its range.
    """
    if not isinstance(name_or_path, str):
        raise ConfigError(f"device_map is {name_or_path!r}; allowed: a card's name, or its path, as a string.")
    path = _card_path(name_or_path)
    try:
        document = parse_toml(read_text(path))
    except DocumentError as error:
        raise ConfigError(f"{path} {error}.") from error
    try:
        return build(DeviceMap, {"name": path.stem, **document})
    except DocumentError as error:
        raise ConfigError(f"{path}: {_in_words(error)}") from error
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error


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


def _in_words(error: DocumentError) -> str:
    if error.flaw == "unknown":
        where = f"{error.parent}." if error.parent else ""
        return f"unknown key '{error.where}'{_nearest(error.name, error.known, where)} Known: {', '.join(error.known)}."
    if error.flaw == "missing":
        return f"'{error.where}' is missing."
    if not error.where:
        return f"{error}."
    expected = f"a table [{error.where}]" if error.expected == "a table" else error.expected
    return f"{error.where} is {error.found!r}; expected {expected or 'something else'}."


def _nearest(found: str, known: Collection[str], where: str = "", *, likeness: float = 0.6) -> str:
    matches = get_close_matches(found, list(known), n=1, cutoff=likeness)
    return f"; did you mean '{where}{matches[0]}'?" if matches else "."
