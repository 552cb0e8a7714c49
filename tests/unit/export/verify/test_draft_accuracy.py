import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mirrorsd.export.verify import draft_accuracy
from mirrorsd.export.verify.draft_accuracy import DraftTexts, compare_drafts


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
