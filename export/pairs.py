"""Which drafts fit which targets, as data: `pairs.toml`, read and searched.

Owns: the table, and finding a target's draft in it. Does not own: whether two checkpoints really fit (`checkpoints`).
"""

from dataclasses import dataclass
from functools import cache
from pathlib import Path

from mirrorsd.graphs.documents import build, parse_toml, read_text
from mirrorsd.graphs.errors import ConfigError
from mirrorsd.graphs.shipped_files import shipped

_TABLE = Path(__file__).with_suffix(".toml")


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """A target and what fits it.

    Attributes:
        target: its name on the hub.
        draft: that of its draft; empty where one has to be made.
        billions: parameters of the target and of the draft.
        heads: names of trained heads for it.
        licence: that of target and draft, by its usual short name.
        exported: precisions in which the pair went through an export of this project.
        measured: what was found then; empty where nothing was.
        note: what to know.
    """

    target: str
    draft: str
    billions: tuple[float, float]
    heads: tuple[str, ...] = ()
    licence: str = ""
    exported: tuple[str, ...] = ()
    measured: str = ""
    note: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Table:
    pairs: tuple[Pair, ...]


@cache
def known_pairs() -> tuple[Pair, ...]:
    """All pairs of the table, in its order."""
    return build(_Table, parse_toml(read_text(shipped(_TABLE)))).pairs


def draft_for(target: str) -> str:
    """The hub name of the draft for a target of this hub name, upper and lower case alike.

    Raises:
        ConfigError: none is known; the message says what to do.
    """
    found = next((pair for pair in known_pairs() if pair.target.lower() == target.lower()), None)
    if found is not None and found.draft:
        return found.draft
    why = f" ({found.note})" if found and found.note else ""
    raise ConfigError(
        f"no draft is known for {target}{why}: name one with --draft, a small model with the same tokenizer. "
        "`mirrorsd pairs` lists those that are known"
    )
