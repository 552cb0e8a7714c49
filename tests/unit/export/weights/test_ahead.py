"""Results come in order, with what the caller asked NumPy for, and no more of them are held than was said."""

import threading

import numpy as np
import pytest

from mirrorsd.export.weights.ahead import computed_ahead


@pytest.mark.parametrize("threads", [1, 3])
def test_results_come_in_the_order_of_their_items(threads: int) -> None:
    last = threading.Event()

    def make(item: int) -> int:
        if threads > 1 and item == 0:
            assert last.wait(20)  # the first is ready behind the last
        if item == threads - 1:
            last.set()
        return item * item

    assert list(computed_ahead(make, range(7), threads=threads)) == [item * item for item in range(7)]


def test_no_more_are_begun_than_there_are_threads() -> None:
    begun: list[int] = []
    results = computed_ahead(lambda item: item, (begun.append(item) or item for item in range(9)), threads=2)
    assert next(results) == 0
    assert begun == [0, 1, 2]
    results.close()


def test_what_numpy_was_asked_to_pass_over_holds_in_threads() -> None:
    zeros = np.zeros(3, np.float32)
    with np.errstate(divide="ignore"):
        assert np.isinf(next(computed_ahead(lambda one: one / zeros, [np.ones(3, np.float32)]))).all()


def test_an_error_is_the_callers() -> None:
    def fail(item: int) -> int:
        raise ValueError("of the second") if item else KeyError("of the first")

    with pytest.raises(KeyError, match="of the first"):
        list(computed_ahead(fail, [0, 1]))
