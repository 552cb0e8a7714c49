import doctest
from typing import Any

import pytest

from mirrorsd.export import exit_choice
from mirrorsd.export.exit_choice import choose_exit_layer
from mirrorsd.graphs.errors import ExportError

SHARES = {
    "2": {"untrained": {"4": 0.5, "16": 0.6}, "adapter": {"4": 0.55, "16": 0.65}},
    "3": {"untrained": {"4": 0.4, "16": 0.5}, "adapter": {"4": 0.9, "16": 0.95}},
    "5": {"untrained": {"4": 0.99, "16": 0.99}, "adapter": {"4": 0.99, "16": 0.99}},
}


def _choose(coverage: Any, **changes: Any) -> int:
    return choose_exit_layer(coverage, 6, **({"with_adapter": (2, 3, 5), "num_candidates": 16} | changes))


def test_the_docstring_is_right() -> None:
    assert doctest.testmod(exit_choice).failed == 0


def test_without_measurements_it_is_half_depth() -> None:
    assert _choose({}) == 3
    assert _choose({"positions": 3}) == 3
    assert _choose({"layers": SHARES}, num_candidates=1) == 3


def test_coverage_counts_for_the_time_it_leaves() -> None:
    """0.65 * 4/6 = 0.43 after 2, 0.95 * 3/6 = 0.475 after 3, 0.99 * 1/6 after 5."""
    assert _choose({"layers": SHARES}) == 3


def test_an_adapter_that_is_not_exported_does_not_count() -> None:
    assert _choose({"layers": SHARES}, with_adapter=(2,)) == 2
    assert _choose({"layers": SHARES}, with_adapter=()) == 2


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        ({"6": SHARES["5"]}, r"exit after layer 6, this target allows 1\.\.5"),
        ({"two": SHARES["2"]}, "exit after layer two"),
        ({"2": "rubbish"}, "layer 2 has no shares"),
        ({"2": {"untrained": {}}}, "layer 2 has no shares"),
        ({"2": {"adapter": {"4": "much"}}}, "layer 2 has no shares"),
        ("rubbish", "'layers' is no object"),
    ],
)
def test_a_file_of_another_model_is_refused(layers: Any, message: str) -> None:
    with pytest.raises(ExportError, match=rf"exit_coverage\.json cannot be used: .*{message}.*name an exit layer"):
        _choose({"layers": layers})
