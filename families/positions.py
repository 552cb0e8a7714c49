"""How far positions reach, by a config.json: kinds of rotary positions, their lengths, sliding windows.

Owns: reading that out of a config's entries. Does not own: which kinds are supported (`registry.py`), the tables
(`export/stages/rotary_tables.py`).
"""

import math
from collections.abc import Mapping
from typing import Any


def rope_kinds(rope: Mapping[str, Any]) -> list[str]:
    """Kinds of rotary positions: one, or one per kind of layer.

    >>> rope_kinds({"type": "linear"}), rope_kinds({"full_attention": {"rope_type": "yarn"}})
    (['linear'], ['yarn'])
    """
    return [str(part.get("rope_type", part.get("type", "default"))) for part in _tables(rope)]


def _tables(rope: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """What is said of rotary positions: at once, or by kind of layer."""
    return [part for part in rope.values() if isinstance(part, Mapping)] or [rope]


def most_positions(config: Mapping[str, Any]) -> int:
    """Positions that a completed config was made for.

    Long rope uses one set of tables up to the length that the model was first trained on and another beyond it, which
    would have to change in the middle of a text: only the first set is exported. YaRN, which a config may have beside
    the length that the model was trained on, stretches that by its factor; one of null is the stretch that the config
    has already.
    """
    limit = int(config["max_position_embeddings"])
    rope = config.get("rope_parameters") or {}
    trained = [
        part.get("original_max_position_embeddings") or limit
        for part in _tables(rope)
        if part.get("rope_type") == "longrope"
    ]
    factor = rope.get("factor")
    if rope.get("rope_type") == "yarn" and isinstance(factor, int | float) and 0 < factor < math.inf:
        limit = max(limit, int(factor * rope["original_max_position_embeddings"]))
    return min(limit, *map(int, trained)) if trained else limit


def smallest_window(config: Mapping[str, Any]) -> int | None:
    """Tokens that a layer with a sliding window sees, by a completed config; None where no layer has one."""
    window, kinds = config.get("sliding_window"), config.get("layer_types")
    has_window = window is not None and (kinds is None or "sliding_attention" in kinds)
    return int(window) if has_window and window is not None else None
