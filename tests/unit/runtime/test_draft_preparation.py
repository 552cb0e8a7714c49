"""Before a request the draft gets ready for the whole text, so that nothing is compiled between two tokens."""

from collections.abc import Callable
from typing import Any

import pytest

from mirrorsd.graphs.errors import DeviceError


def test_the_draft_is_ready_for_the_whole_text_before_the_first_token(make_bench: Callable[..., Any]) -> None:
    bench = make_bench(context=256, gamma=6, roots=8)
    bench.decode([1, 2, 3], "mirror", max_new_tokens=20)
    assert bench.draft.prepared_slots == [23 + 7 * (1 + 2 * 8)]
    bench.decode([1, 2, 3], "mirror", max_new_tokens=250)
    assert bench.draft.prepared_slots[-1] == 256


def test_a_draft_that_cannot_get_ready_costs_no_token(
    make_bench: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = make_bench()
    plain = bench.decode([1, 2, 3], "plain")

    def fail(num_slots: int) -> None:
        raise DeviceError("does not compile")

    monkeypatch.setattr(bench.draft, "prepare", fail)
    with pytest.warns(RuntimeWarning, match="does not compile"):
        assert bench.decode([1, 2, 3], "mirror") == plain
    assert "does not compile" in str(bench.seat.draft_failure)
