"""Which weights are in integers by row, and which numbers an embedding keeps."""

import sys
import time
from typing import Any, NamedTuple

import numpy as np
import pytest

from mirrorsd.export import integer_choice
from mirrorsd.export.integer_choice import _LEAST_GAIN, by_row, gain_of_rotation, integers_are_faster
from mirrorsd.export.weights.block_formats import BlockChoice, WeightFormats

EIGHT, FOUR = BlockChoice(bits=8), BlockChoice(bits=4)


def test_a_tied_embedding_has_the_heads_numbers() -> None:
    found = by_row(WeightFormats(layers=EIGHT, head=EIGHT, embedding=EIGHT), {}, is_tied=True)
    assert found.head is not None and found.embedding is not None
    assert (found.head.is_by_row, found.embedding.is_by_row, found.num_rescored) == (True, True, 0)


def test_the_best_logits_of_a_coarse_head_are_computed_again_with_the_embeddings_blocks() -> None:
    found = by_row(WeightFormats(layers=EIGHT, head=EIGHT, embedding=EIGHT), {}, is_tied=True, is_scan=True)
    assert found.scan is not None and found.embedding is not None
    assert (found.scan.is_by_row, found.embedding.is_by_row, found.num_rescored) == (True, False, 32)


@pytest.mark.parametrize(("head", "embedding"), [(FOUR, EIGHT), (EIGHT, FOUR), (EIGHT, None), (None, EIGHT)])
def test_weights_without_eight_bits_are_computed_once(head: BlockChoice | None, embedding: BlockChoice | None) -> None:
    found = by_row(WeightFormats(layers=EIGHT, head=head, embedding=embedding), {}, is_tied=True, is_scan=True)
    assert found.scan is None


class Rows(NamedTuple):
    name: str = "rows"
    shape: tuple[int, ...] = (1, 1, 4)


class Products:
    """Computes for so many milliseconds, and some for each row, while another process has the core for some."""

    def __init__(self, computing: float, waiting: float, by_row: float = 0) -> None:
        self._computing, self._waiting, self._by_row = computing, waiting, by_row

    def get_inputs(self) -> list[Rows]:
        return [Rows()]

    def run(self, outputs: None, given: dict[str, Any]) -> None:
        end = time.thread_time() + (self._computing + self._by_row * given["rows"].shape[1]) / 1e3
        time.sleep(self._waiting / 1e3)
        while time.thread_time() < end:
            np.zeros(8)


@pytest.mark.skipif(sys.platform == "win32", reason="a thread's own time is told in steps of 16 ms")
def test_what_else_runs_here_does_not_choose(monkeypatch: pytest.MonkeyPatch) -> None:
    times = {True: (1, 12), False: (4, 0)}
    monkeypatch.setattr(integer_choice, "_shapes", lambda _: [(128, 64)])
    monkeypatch.setattr(integer_choice, "_products", lambda _, choice: Products(*times[choice.is_by_row]))
    assert integers_are_faster({}, WeightFormats(layers=EIGHT))
    times[True], times[False] = times[False], times[True]
    assert not integers_are_faster({}, WeightFormats(layers=EIGHT))


@pytest.mark.skipif(sys.platform == "win32", reason="a thread's own time is told in steps of 16 ms")
@pytest.mark.parametrize(
    ("width", "of_others", "rotated", "found"),
    [(128, 2, 4, True), (128, 2, 6, False), (128, 30, 4, False), (64, 1, 1, False), (200, 1, 1, False)],
)
def test_rows_are_rotated_where_the_layer_gains_enough_and_they_have_several_parts(
    monkeypatch: pytest.MonkeyPatch, width: int, of_others: int, rotated: int, *, found: bool
) -> None:
    """Blocks take six milliseconds for each number of rows."""

    def products(shapes: Any, choice: BlockChoice, *, is_rotated: bool = False) -> Products:
        is_last = shapes == [(width, 64)]
        return Products((rotated if is_rotated else 6) if is_last else of_others, 0)

    monkeypatch.setattr(integer_choice, "_shapes", lambda _: [(64, 64), (width, 64)])
    monkeypatch.setattr(integer_choice, "_products", products)
    assert (gain_of_rotation({}, WeightFormats(layers=EIGHT)) >= _LEAST_GAIN) is found


@pytest.mark.skipif(sys.platform == "win32", reason="a thread's own time is told in steps of 16 ms")
def test_a_gain_with_a_prompts_rows_alone_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    times = {True: (2, 0, 0), False: (2, 0, 0.05)}
    monkeypatch.setattr(integer_choice, "_shapes", lambda _: [(64, 64)])
    monkeypatch.setattr(integer_choice, "_products", lambda _, choice: Products(*times[choice.is_by_row]))
    assert integers_are_faster({}, WeightFormats(layers=EIGHT))


def test_a_product_of_rotated_rows_can_be_timed() -> None:
    config = {"hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 128}
    assert gain_of_rotation(config, WeightFormats(layers=EIGHT)) > 0
