"""Nobody waits for a draft's shapes: they are made ready beside the target; the text is decoded plainly meanwhile."""

import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from mirrorsd.graphs.errors import Cancelled, DeviceError
from mirrorsd.runtime import ledger
from mirrorsd.runtime.ledger import Joint
from mirrorsd.testing.fake import FakeDraft

METHODS = ("serial", "mirror", "auto")
Make = Callable[..., Any]


class Unready(FakeDraft):
    """A draft that prepares until it is let go, and then fails if it is told to."""

    def __init__(self, handler: Callable[[list[int]], list[int]], **options: Any) -> None:
        super().__init__(handler, num_ready=0, **options)
        self.asked: list[int] = []
        self.may_go = threading.Event()
        self.problem: str | None = None

    def prepare(self, num_slots: int) -> None:
        self.asked.append(num_slots)
        assert self.may_go.wait(30.0)
        if self.problem:
            raise DeviceError(self.problem)
        super().prepare(num_slots)


@pytest.fixture
def unready(draft_handler: Callable[[float, int], Any]) -> Iterator[Unready]:
    draft = Unready(draft_handler(0.8, 3), vocab_size=16, num_streams=3)
    yield draft
    draft.may_go.set()


def let_go_after(bench: Any, draft: Unready, num_passes: int) -> None:
    """Let the draft become ready while the target's pass of that number runs."""
    run = bench.target.run

    def counting(*arguments: Any, **options: Any) -> Any:
        if bench.target.num_passes == num_passes:
            draft.may_go.set()
            bench.engine.preparing_worker.run(lambda: None)
        return run(*arguments, **options)

    bench.target.run = counting


@pytest.mark.parametrize("method", METHODS)
def test_a_text_goes_on_plainly_while_the_draft_gets_ready(make_bench: Make, unready: Unready, method: str) -> None:
    bench = make_bench(draft=unready)
    plain = bench.decode([1, 2, 3], "plain")
    assert bench.decode([1, 2, 3], method) == plain
    assert unready.num_passes == 0
    assert {step.num_window for step in bench.last_request.steps} == {0}


@pytest.mark.parametrize("takes_turns", [True, False])
@pytest.mark.parametrize("method", METHODS)
def test_the_draft_joins_in_the_middle_of_a_text(
    make_bench: Make, unready: Unready, method: str, *, takes_turns: bool
) -> None:
    bench = make_bench(draft=unready, takes_turns=takes_turns, is_steady=True)
    plain = bench.decode([1, 2, 3], "plain", max_new_tokens=100)
    let_go_after(bench, unready, bench.target.num_passes + 10)
    assert bench.decode([1, 2, 3], method, max_new_tokens=100) == plain
    windows = [step.num_window for step in bench.last_request.steps]
    assert set(windows[:10]) == {0}
    assert max(windows[10:16]) > 0 or method == "auto"
    assert max(windows) > 0
    assert unready.texts_fed[0] == [1]


@pytest.mark.parametrize("method", METHODS)
def test_it_gets_ready_for_the_whole_text_once(make_bench: Make, unready: Unready, method: str) -> None:
    unready.may_go.set()
    bench = make_bench(draft=unready, gamma=6, roots=8)
    for _ in range(2):
        bench.decode([1, 2, 3], method, max_new_tokens=20)
        bench.engine.preparing_worker.run(lambda: None)
    assert unready.asked == [23 + 7 * (1 + 2 * 8)]
    bench.decode([1, 2, 3], method, max_new_tokens=250)
    assert unready.asked[-1] == 256


@pytest.mark.parametrize("takes_turns", [True, False])
def test_in_company_no_draft_gets_ready_that_nobody_asks(
    make_bench: Make, unready: Unready, monkeypatch: pytest.MonkeyPatch, *, takes_turns: bool
) -> None:
    """On shared cores its compiler would hold up everybody's passes, and `auto` takes no windows from it there."""
    unready.may_go.set()
    bench = make_bench(draft=unready, takes_turns=takes_turns)
    with monkeypatch.context() as patched:
        patched.setattr(ledger, "ALONE", Joint(1))
        bench.decode([1, 2, 3], "auto", max_new_tokens=20)
        bench.engine.preparing_worker.run(lambda: None)
    assert (unready.asked == []) == takes_turns
    bench.decode([1, 2, 3], "auto", max_new_tokens=20)
    bench.engine.preparing_worker.run(lambda: None)
    assert unready.asked, "alone it may draft"


@pytest.mark.parametrize("takes_turns", [True, False])
def test_no_draft_gets_ready_that_would_not_pay(make_bench: Make, unready: Unready, *, takes_turns: bool) -> None:
    """On shared cores its compiler would slow the text; where it has cores of its own, that costs nobody anything."""
    unready.may_go.set()
    bench = make_bench(draft=unready, takes_turns=takes_turns)
    known = bench.engine.known.pairs[False]
    known.start_plain(0.01)
    known.brought, known.draft_seconds = 0.0, 1.0
    bench.decode([1, 2, 3], "auto", max_new_tokens=60)
    bench.engine.preparing_worker.run(lambda: None)
    assert (unready.asked == []) == takes_turns


@pytest.mark.parametrize("method", METHODS)
def test_a_long_preparation_is_no_late_answer(make_bench: Make, unready: Unready, method: str) -> None:
    bench = make_bench(draft=unready, suffix_seconds=0.01, draft_deadline_s=0.05)
    plain = bench.decode([1, 2, 3], "plain")
    assert bench.decode([1, 2, 3], method) == plain
    assert bench.seat.draft_failure is None


@pytest.mark.parametrize("method", METHODS)
def test_a_text_is_cancelled_while_the_draft_gets_ready(make_bench: Make, unready: Unready, method: str) -> None:
    bench = make_bench(draft=unready, suffix_seconds=0.01)
    threading.Timer(0.1, bench.cancel.set).start()
    with pytest.raises(Cancelled):
        bench.decode([1, 2, 3], method, max_new_tokens=240)
    assert not unready.may_go.is_set()


@pytest.mark.parametrize("method", METHODS)
def test_a_draft_that_cannot_get_ready_costs_no_token(make_bench: Make, unready: Unready, method: str) -> None:
    bench = make_bench(draft=unready)
    unready.problem = "does not compile"
    plain = bench.decode([1, 2, 3], "plain")
    let_go_after(bench, unready, bench.target.num_passes + 5)
    with pytest.warns(RuntimeWarning, match="does not compile") as caught:
        assert bench.decode([1, 2, 3], method) == plain
    assert len(caught) == 1
    assert "does not compile" in str(bench.seat.draft_failure)
    unready.problem = None
    bench.decode([1, 2, 3], method)
    bench.engine.preparing_worker.run(lambda: None)
    bench.decode([1, 2, 3], method)
    assert bench.seat.draft_failure is None
    assert unready.num_passes > 0


def test_another_session_is_served_while_a_draft_gets_ready(make_bench: Make, unready: Unready) -> None:
    bench = make_bench(draft=unready)
    bench.decode([1, 2, 3], "serial")
    assert bench.engine.draft_worker.submit(lambda: "served").wait(5.0)
    assert bench.engine.preparing_worker.has_pending()


def test_a_text_that_repeats_itself_needs_no_draft(make_bench: Make, unready: Unready) -> None:
    """`auto` takes what the text has said before while the draft gets ready, where it is known what rows cost."""
    loop = np.eye(16)
    bench = make_bench(draft=unready, target_handler=lambda text: loop[text[-6]] if len(text) >= 6 else loop[len(text)])
    plain = bench.decode([3, 1, 4, 1, 5], "plain", max_new_tokens=60)
    assert len(bench.last_request.steps) >= 60
    bench.engine.known.target_ms = ((1.0, 10.0), (8.0, 11.0))
    assert bench.decode([3, 1, 4, 1, 5], "auto", max_new_tokens=60) == plain
    assert unready.num_passes == 0
    assert len(bench.last_request.steps) < 40
