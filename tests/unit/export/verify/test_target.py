"""A target's segments are run one after the other; memory holds one of them."""

import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mirrorsd.export.bundle.target_graphs import TargetPlan
from mirrorsd.export.verify.target import TargetRun
from mirrorsd.export.verify.text_passes import Pass
from mirrorsd.graphs.contract import TargetShape
from mirrorsd.graphs.manifest import Segment


class Opened:
    """An open segment that adds one to what flows through it."""

    def forward(self, step: Pass, flowing: Any, taps: Any = None) -> Any:
        return np.asarray(flowing)[..., None] + 1 if np.ndim(flowing) == 2 else flowing + 1


def test_a_segment_is_closed_before_the_next_one_is_opened(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    shape = TargetShape(num_layers=6, hidden_size=8, vocab_size=32, num_kv_heads=1, head_dim=8)
    plan = TargetPlan(shape=shape, context=64, num_candidates=4, adapters={2: None, 4: None})
    opened: list[weakref.ref[Opened]] = []

    def opening(run: TargetRun, segment: Segment) -> Any:
        assert [one for one in opened if one() is not None] == [], "another one is open still"
        found = Opened()
        opened.append(weakref.ref(found))
        return found

    monkeypatch.setattr(TargetRun, "_open_segment", opening)
    steps = [Pass(0, (1, 2, 3), 3), Pass(3, (4,), 1)]
    found = list(TargetRun(tmp_path, plan).outputs(steps))
    assert len(opened) == len(plan.segments) == 3
    assert [logits[:, 0].tolist() for _, logits in found] == [[4, 5, 6], [7]]
    assert [sorted(states) for states, _ in found] == [[2, 4], [2, 4]]
