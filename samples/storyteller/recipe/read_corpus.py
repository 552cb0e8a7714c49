"""Read the corpus folder (`*.jsonl.xz`) strictly.

Owns: opening, decoding and checking the files, and the split into training and held-back documents.
Does not own: what becomes of the text (`corpus_mix.py`).
"""

from __future__ import annotations

import json
import lzma
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

HELD_BACK_ONE_IN = 50


class CorpusError(ValueError):
    """The corpus is not what the recipe needs: a file is missing, or a line of it cannot be read."""


def read_set(corpus: Path, name: str) -> Iterator[dict[str, Any]]:
    """Yield the records of one set.

    Args:
        corpus: Folder with the `.jsonl.xz` files.
        name: The set, for example `fairy_tales`.

    Raises:
        CorpusError: No such file, a line that is empty, not UTF-8 or not a JSON object; the line's number is named.
    """
    path = corpus / f"{name}.jsonl.xz"
    if not path.is_file():
        raise CorpusError(f"{path} does not exist; the recipe needs the set {name!r} in the corpus folder")
    with lzma.open(path, "rb") as lines:
        for number, line in enumerate(lines, start=1):
            yield _parse_line(line, f"{path.name}, line {number}")


def _parse_line(line: bytes, where: str) -> dict[str, Any]:
    try:
        text = line.decode("utf-8")
    except UnicodeDecodeError as error:
        raise CorpusError(
            f"{where}: not UTF-8 ({error.reason} at byte {error.start}); re-encode the file as UTF-8"
        ) from error
    if not text.strip():
        raise CorpusError(f"{where}: the line is empty; expected one JSON object per line")
    try:
        record = json.loads(text)
    except json.JSONDecodeError as error:
        raise CorpusError(f"{where}: not JSON ({error.msg}); expected one JSON object per line") from error
    if not isinstance(record, dict):
        raise CorpusError(f"{where}: found a JSON {type(record).__name__}, expected an object")
    return record


def is_held_back(key: str) -> bool:
    """Say whether the document named `key` belongs to validation (one in fifty, the same ones every time).

    >>> is_held_back("a tale") == is_held_back("a tale")
    True
    """
    return zlib.crc32(key.encode("utf-8")) % HELD_BACK_ONE_IN == 0
