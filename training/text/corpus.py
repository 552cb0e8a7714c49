"""Read documents that prompts are cut from, strictly.

Owns: the two forms of a corpus file, and the split into training and held-back documents.
Does not own: where a document is cut (`self_prompts.py`).

`.txt`: one document per line. `.jsonl`: one object per line, `{"text": "..."}` or
`{"messages": [{"role": "user", "content": "..."}, ...]}`.
"""

from __future__ import annotations

import json
import zlib
from codecs import BOM_UTF8
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mirrorsd.graphs.errors import ConfigError

__all__ = ["Document", "read_documents", "split_held_back"]

HELD_BACK_ONE_IN = 50
_FORM = '{"text": "..."} or {"messages": [{"role": "...", "content": "..."}, ...]}'


@dataclass(frozen=True, slots=True)
class Document:
    """A plain text, or a conversation (then `text` is empty)."""

    text: str = ""
    messages: tuple[dict[str, str], ...] = ()


def read_documents(path: Path) -> list[Document]:
    """Read a corpus file.

    Raises:
        ConfigError: No such file, no documents, or a line that is empty, not UTF-8 or of another form; its number is
            named.
    """
    if not path.is_file():
        raise ConfigError(f"{path} does not exist; expected a text file with one document per line, or .jsonl")
    documents = []
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            where = f"{path.name}, line {number}"
            text = _decode(line.removeprefix(BOM_UTF8), where)
            documents.append(_parse(text, where) if path.suffix == ".jsonl" else Document(text))
    if not documents:
        raise ConfigError(f"{path} is empty; expected one document per line")
    return documents


def _decode(line: bytes, where: str) -> str:
    try:
        text = line.decode("utf-8").strip()
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{where}: not UTF-8 ({error.reason} at byte {error.start}); re-encode the file as UTF-8"
        ) from error
    if not text:
        raise ConfigError(f"{where}: the line is empty; expected one document per line: remove the line")
    return text


def _parse(line: str, where: str) -> Document:
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise ConfigError(f"{where}: not JSON ({error.msg} at column {error.colno}); expected {_FORM}") from error
    except RecursionError as error:
        raise ConfigError(f"{where}: nested too deep to be read; expected {_FORM}") from error
    text, messages = (record.get(key) if isinstance(record, dict) else None for key in ("text", "messages"))
    if isinstance(text, str) and text.strip():
        document = Document(text)
    elif isinstance(messages, list) and messages and all(map(_is_message, messages)):
        document = Document(messages=tuple(messages))
    else:
        raise ConfigError(f"{where}: expected {_FORM}")
    for part in (document.text, *(message["content"] for message in document.messages)):
        _check_whole(part, where)
    return document


def _check_whole(text: str, where: str) -> None:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        half = ascii(text[error.start])
        raise ConfigError(f"{where}: {half} is half of a character; write both halves, or remove it") from error


def _is_message(message: Any) -> bool:
    return isinstance(message, dict) and all(isinstance(message.get(key), str) for key in ("role", "content"))


def split_held_back(documents: list[Document]) -> tuple[list[Document], list[Document]]:
    """Return training and held-back documents: one in fifty, the same ones every time, at least one of either.

    Raises:
        ConfigError: There is one document only.

    >>> train, held_back = split_held_back([Document(f"text {number}") for number in range(1000)])
    >>> len(train) + len(held_back), 10 <= len(held_back) <= 30
    (1000, True)
    """

    def is_held_back(document: Document) -> bool:
        return zlib.crc32(repr(document).encode("utf-8")) % HELD_BACK_ONE_IN == 0

    if len(documents) < 2:
        raise ConfigError(
            "--corpus has one document: there is none to hold back for measuring; give more, or --held-back"
        )
    held_back = [document for document in documents if is_held_back(document)]
    rest = [document for document in documents if not is_held_back(document)]
    return (rest, held_back) if rest and held_back else (documents[:-1], documents[-1:])
