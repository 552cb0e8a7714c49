"""Mirror decoding: the next window is ready when the pass ends, and what is not prepared is drafted as in serial."""

from collections.abc import Callable
from typing import Any

import pytest

Make = Callable[..., Any]
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]


def test_with_a_draft_that_is_always_right_no_pass_waits_for_a_window(make_bench: Make, confident_exit: Make) -> None:
    """Ten passes for seventy tokens, as in serial decoding; but only the first window was drafted while one waited."""
    bench = make_bench(hit_rate=1.0, gamma=6, passes=3, is_steady=True, exit_handler=confident_exit)
    bench.decode(PROMPT, "mirror", max_new_tokens=70)
    steps = bench.last_request.steps
    assert [step.num_accepted for step in steps] == [6] * 10
    assert {step.next_source for step in steps[:-1]} <= {"early", "exit"}


def test_an_outcome_that_nothing_was_prepared_for_is_drafted_afresh(make_bench: Make) -> None:
    bench = make_bench(roots=0)
    expected = bench.decode(PROMPT, "serial")
    assert bench.decode(PROMPT, "mirror") == expected
    assert {step.next_source for step in bench.last_request.steps} == {"fresh", "none"}


@pytest.mark.parametrize(("root_source", "is_heard"), [("early", False), ("progressive", True), ("proxy", True)])
def test_the_exit_is_asked_only_where_it_counts(make_bench: Make, root_source: str, is_heard: bool) -> None:
    bench = make_bench(root_source=root_source)
    run, heard = bench.target.run, []

    def noting(*arguments: Any, on_exit: Any = None, **options: Any) -> Any:
        heard.append(on_exit is not None)
        return run(*arguments, on_exit=on_exit, **options)

    bench.target.run = noting
    bench.decode(PROMPT, "mirror")
    assert any(heard) == is_heard


@pytest.mark.parametrize(("hit_rate", "least", "most"), [(1.0, 0.9, 1.0), (0.0, 0.0, 0.2)])
def test_passes_teach_how_often_the_draft_is_right(
    make_bench: Make, hit_rate: float, least: float, most: float
) -> None:
    bench = make_bench(hit_rate=hit_rate)
    bench.decode(PROMPT, "mirror")
    bench.engine.draft_worker.run(lambda: None)
    assert least <= bench.last_decoder.source.planner.acceptance_rate <= most


def test_a_last_token_needs_no_draft(make_bench: Make) -> None:
    bench = make_bench()
    expected = bench.decode(PROMPT, "plain", max_new_tokens=1)
    assert bench.decode(PROMPT, "mirror", max_new_tokens=1) == expected
    assert bench.draft.num_passes == 0


def test_a_text_that_was_left_in_the_middle_leaves_nothing_running(make_bench: Make) -> None:
    bench = make_bench(suffix_seconds=0.001)
    expected = bench.decode(PROMPT, "plain")
    bench.decode(PROMPT, "mirror", max_new_tokens=7)
    bench.engine.draft_worker.run(lambda: None)
    assert not bench.engine.draft_worker.has_pending()
    assert bench.decode(PROMPT, "mirror") == expected
