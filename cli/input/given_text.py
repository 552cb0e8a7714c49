"""A text that a command is given as a file: read before anything else is done."""

from pathlib import Path

from mirrorsd.graphs.documents import DocumentError, read_text
from mirrorsd.graphs.errors import ConfigError


def given_text(path: Path | None, option: str) -> str | None:
    """What the file of an option holds; None where none was given.

    Raises:
        ConfigError: it cannot be read, is no UTF-8 text, or holds nothing.
    """
    if path is None:
        return None
    try:
        text = read_text(path)
    except DocumentError as error:
        raise ConfigError(f"{option} {path} {error}.") from error
    if not text.strip():
        raise ConfigError(f"{option} {path} holds no text. Name another file, or leave the option out.")
    return text
