"""The table of all methods: replays become answer lines, places are joined row by row."""

import doctest
from types import SimpleNamespace
from typing import Any

import pytest
from answer_lines import line

from mirrorsd.bench.claims import methods
from mirrorsd.bench.claims.methods import PACED, REAL, SIMULATED, joined, simulated_line
from mirrorsd.cli.bench import tables
from mirrorsd.runtime.decoding.request import StepRecord


def replayed(*steps: tuple[float, int, int]) -> Any:
    """A finished request whose prompt was read after 0.5 s; steps are their ends, windows and accepted tokens."""
    records = [StepRecord(0.0, end, window, accepted, "fresh", "medusa", 0.0) for end, window, accepted in steps]
    return SimpleNamespace(ledger=SimpleNamespace(prefilled=0.5), steps=records)


def test_a_replay_becomes_an_answer_whose_clock_starts_behind_the_prompt() -> None:
    """Two turns, of 5 tokens in 2 s and of 3 in 1 s, and the turns of the next question stay where they are."""
    real = line(7, 5, 1.0, tokens=[[1, 2, 3, 4, 5], [6, 7, 8]], seed=3)
    requests = iter([replayed((1.5, 4, 2), (2.5, 4, 3)), replayed((1.5, 2, 2)), replayed((9.0, 0, 0))])
    found = simulated_line(real, requests)
    choice = found["choices"][0]
    assert choice["accept_lengths"] == [3, 2, 3], "the last step of a turn brings what is left of it"
    assert (choice["wall_time"], choice["prefill_s"], choice["tokens"]) == (
        [2.0, 1.0],
        [0.0, 0.0],
        [[1, 2, 3, 4, 5], [6, 7, 8]],
    )
    assert tables.decode_speed(found) == pytest.approx(8 / 3)
    assert len(list(requests)) == 1


def test_a_row_has_the_speeds_of_all_places() -> None:
    seconds = {
        REAL: {"plain": 2.0, "medusa": 1.0},
        PACED: {"plain": 8.0, "medusa": 5.0},
        SIMULATED: {"plain": 8.0, "medusa": 4.0},
    }
    by_place = {
        place: tables.summarise(
            {name: [[line(1, 6, of_method), line(2, 6, of_method)]] for name, of_method in found.items()}
        )
        for place, found in seconds.items()
    }
    rows = joined(by_place, 1.0)
    assert [(row["task"], row["method"]) for row in rows] == [
        ("rag", "plain"),
        ("rag", "medusa"),
        ("all", "plain"),
        ("all", "medusa"),
    ]
    assert [rows[3][place]["over_plain"] for place in (REAL, PACED, SIMULATED)] == pytest.approx([2.0, 1.6, 2.0])
    assert rows[3][PACED]["tokens_per_second"] == pytest.approx(6 / 2.5)
    assert rows[3]["temperature"] == 1.0


def test_the_examples_are_true() -> None:
    assert doctest.testmod(methods).failed == 0
