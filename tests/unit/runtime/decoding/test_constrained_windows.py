"""Windows of constrained texts: forced tokens are one, the draft's end where they leave the form, no token changes."""

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

METHODS = ("serial", "mirror", "auto")
WAYS = ({"temperature": 0.0}, {"temperature": 1.0, "seed": 5}, {"temperature": 1.0, "seed": 5, "presence_penalty": 1.0})


class Rhythm:
    """A form by place: twice the token 3, then two below 8, then two others, and so on."""

    def __init__(self) -> None:
        self.said: list[int] = []
        self.windows: list[tuple[int, list[int]]] = []

    def may_come(self, place: int) -> range:
        return (range(3, 4), range(8), range(8, 16))[place % 6 // 2]

    def allowed(self, vocab_size: int) -> NDArray[np.bool_]:
        return np.isin(np.arange(vocab_size), self.may_come(len(self.said)))

    def look_ahead(self, window: NDArray[np.int64]) -> None:
        self.windows.append((len(self.said), window.tolist()))

    def advance(self, token: int) -> None:
        assert token in self.may_come(len(self.said))
        self.said.append(token)

    def forced(self, most: int) -> NDArray[np.int64]:
        return np.full(min(max(2 - len(self.said) % 6, 0), max(most, 0)), 3, dtype=np.int64)

    def num_allowed(self, window: NDArray[np.int64]) -> int:
        fits = [token in self.may_come(place) for place, token in enumerate(window.tolist(), len(self.said))]
        return fits.index(False) if False in fits else len(fits)


@pytest.mark.parametrize("way", WAYS, ids=["greedy", "sampled", "penalised"])
@pytest.mark.parametrize("streams", [0, 3])
def test_every_method_says_the_same_within_the_form(
    make_bench: Callable[..., Any], streams: int, way: dict[str, Any]
) -> None:
    plain, told = make_bench(streams=streams), Rhythm()
    expected = plain.decode([1, 2], "plain", constraint=told, **way)
    assert told.said == expected
    for method in METHODS:
        bench, rhythm = make_bench(hit_rate=0.8, streams=streams, gamma=5), Rhythm()
        assert bench.decode([1, 2], method, constraint=rhythm, **way) == expected
        assert bench.decode([1, 2], "plain", constraint=Rhythm(), **way) == expected


@pytest.mark.parametrize("method", ["serial", "mirror"])
def test_windows_are_what_the_form_allows(make_bench: Callable[..., Any], method: str) -> None:
    bench, rhythm = make_bench(hit_rate=1.0, gamma=5, window="full", is_steady=True), Rhythm()
    bench.decode([1, 2], method, constraint=rhythm)
    steps = bench.last_request.steps
    after_first = rhythm.windows[1:]
    assert all(token in rhythm.may_come(at + i) for at, window in after_first for i, token in enumerate(window))
    assert sum(len(window) for _, window in after_first) >= 10
    forced = [window for step, (_, window) in zip(steps, after_first, strict=False) if step.next_source == "forced"]
    assert len(forced) >= 2
    assert all(window == [3, 3] for window in forced)
    accepted = [after.num_accepted for step, after in itertools.pairwise(steps) if step.next_source == "forced"]
    assert set(accepted[:-1]) == {2}
