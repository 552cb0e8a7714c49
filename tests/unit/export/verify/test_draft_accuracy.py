import weakref
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from mirrorsd.export.verify import draft_accuracy
from mirrorsd.export.verify.draft import Tree
from mirrorsd.export.verify.draft_accuracy import DraftTexts, compare_drafts
from mirrorsd.graphs.draft_windows import GAMMA, num_accepted


def test_two_drafts_are_never_in_memory_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first one is gone when the second is opened: each takes as much as its weights in fp32."""
    alive: weakref.WeakSet[Any] = weakref.WeakSet()
    opened = []

    class Run:
        def __init__(self, source: Path, *_: object) -> None:
            assert not alive
            alive.add(self)
            opened.append(source)

    def walk(run: Run, texts: object) -> draft_accuracy._Found:
        return draft_accuracy._Found(np.zeros((1, 1)), [[3, 3]])

    class Entry:
        shape = None

    monkeypatch.setattr(draft_accuracy, "DraftRun", Run)
    monkeypatch.setattr(draft_accuracy, "_walk", walk)
    entry: Any = Entry()
    found = compare_drafts(Path("before.xml"), Path("after.xml"), entry, DraftTexts((), ((1, 2),)), "int8")
    assert opened == [Path("before.xml"), Path("after.xml")]
    assert (found.accepted_before, found.accepted_after) == (3.0, 3.0)


@pytest.mark.parametrize("num_streams", [0, 1, 2, 4])
def test_one_pass_over_a_text_counts_what_passes_after_every_token_would(num_streams: int) -> None:
    """A draft that is often right, often wrong, and says something else behind every text that it is fed."""

    def said(known: Sequence[int]) -> list[int]:
        rng = np.random.default_rng(abs(hash(tuple(known))))
        true = [*text[len(known) :], *([0] * 9)]
        is_text = tuple(known) == tuple(text[: len(known)])
        return [int(true[i] if is_text and rng.random() < 0.7 else rng.integers(3)) for i in range(1 + num_streams)]

    class Run:
        shape = SimpleNamespace(num_streams=num_streams)

        def forward(self, tree: Tree, num_cached: int, tips: object) -> tuple[Any, None]:
            assert num_cached == 0
            return np.array([said(tree.ids[: row + 1]) for row in range(len(tree.ids))])[..., None], None

    def best_after(rows: Sequence[int], num_cached: int) -> list[list[int]]:
        return [said((*text[:num_cached], *rows[: row + 1])) for row in range(len(rows))]

    text = np.random.default_rng(5).integers(3, size=draft_accuracy.TEXT_IDS).tolist()
    run: Any = Run()
    places = range(draft_accuracy.PROMPT_IDS, len(text) - 1)
    expected = [num_accepted(best_after, text[:at], text[at : at + GAMMA], num_streams) for at in places]
    assert draft_accuracy._walk(run, [text]).accepted == [expected]
    assert len(set(expected)) > 3
