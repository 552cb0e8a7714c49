"""What is particular to a kind of head, and all kinds: each is a file of `kinds/`, which adds itself.

Owns: the registry. Does not own: the names, which are those of methods too (`graphs.names`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

Taps = tuple[int | str, ...]


def _no_entries(asked: Mapping[str, int]) -> dict[str, Any]:
    return {}


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """How heads of a kind are made for a target and trained, where nothing else is asked for.

    Attributes:
        taps: What of a target with `n` layers is read by a head with `k` of its own, by `(n, k)`.
        length: Guesses per step.
        num_layers: Decoder layers.
        loss: What the kind's paper minimises, as shares of `LossMix`.
        matrix_rate: Peak learning rate of the matrices (Muon). A draft's 0.008 is too little for short trainings: on
            the storyteller Medusa's first guess was right at 4 % after 60 steps with it, at 32 % after 50 with 0.06;
            a block's at 40 % after 50 with 0.024.
        entries: Further entries of its config, by the `link_rank` and the `adapter_rank` that are asked for.
    """

    taps: Callable[[int, int], Taps]
    length: int
    num_layers: int
    loss: Mapping[str, float]
    matrix_rate: float
    entries: Callable[[Mapping[str, int]], dict[str, Any]] = _no_entries


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadKind:
    """A kind of head.

    Attributes:
        network: Its `HeadNetwork`.
        training: None where such heads come with their checkpoints and are not trained here.
        reads_tokens: Whether the tokens behind the rows are read.
        reads_one_tap: Whether it reads the target at one place only.
        borrows_layers: Whether its layers are the target's last ones.
        has_vocabularies: Whether a vocabulary of its own is one for each guess.
        layers: Fewest and most decoder layers.
    """

    network: Callable[..., Any]
    training: Training | None
    reads_tokens: bool = True
    reads_one_tap: bool = False
    borrows_layers: bool = False
    has_vocabularies: bool = False
    layers: tuple[int, float] = (1, float("inf"))


KINDS: dict[str, HeadKind] = {}
"""By name; complete once the package `heads` is imported."""


def add_kind(name: str, kind: HeadKind) -> None:
    """Add a kind.

    Raises:
        ValueError: there is one of that name.
    """
    if name in KINDS:
        raise ValueError(f"there are two kinds of heads {name!r}")
    KINDS[name] = kind
