"""The token that a checkpoint's tokenizer names as the end of a text, where its configs name none.

Owns: which of the tokenizer's files says it, and the token's id. Does not own: what config.json and
generation_config.json say (`checkpoint.py`), whether the tokenizer is whole (`carried_files.py`).
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mirrorsd.graphs.documents import DocumentError, parse_json, read_text

_SETTINGS = ("tokenizer_config.json", "special_tokens_map.json")
_TOKENIZER, _END = "tokenizer.json", "eos_token"


def end_token(folder: Path) -> int | None:
    """The id of the tokenizer's `eos_token`; None where it names none, or one that it does not know."""
    given = next((found for name in _SETTINGS if (found := _table(folder / name).get(_END)) is not None), None)
    token = given.get("content") if isinstance(given, Mapping) else given
    if not isinstance(token, str):
        return None
    document = _table(folder / _TOKENIZER)
    added = document.get("added_tokens")
    for entry in added if isinstance(added, list) else []:
        if isinstance(entry, Mapping) and entry.get("content") == token and type(entry.get("id")) is int:
            return int(entry["id"])
    model = document.get("model")
    vocabulary = model.get("vocab") if isinstance(model, Mapping) else None
    found = vocabulary.get(token) if isinstance(vocabulary, Mapping) else None
    return found if type(found) is int else None


def _table(path: Path) -> Mapping[str, Any]:
    """What a file says; nothing where it is missing or damaged, which whoever carries it says."""
    try:
        found = parse_json(read_text(path))
    except (OSError, DocumentError):
        return {}
    return found if isinstance(found, Mapping) else {}
