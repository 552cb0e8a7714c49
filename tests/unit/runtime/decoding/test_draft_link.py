"""The scheduler's line to the draft: what is held back comes before whatever is asked, and after what was posted."""

from collections.abc import Iterator
from typing import cast

import pytest

from mirrorsd.runtime.decoding.links import DraftLink
from mirrorsd.runtime.devices.workers import DeviceWorker
from mirrorsd.runtime.draft.drafter import Drafter
from mirrorsd.runtime.ledger import Ledger


@pytest.fixture
def link() -> Iterator[DraftLink]:
    worker = DeviceWorker("draft")
    yield DraftLink(cast(Drafter, None), worker, 5.0, Ledger())
    worker.close()


def test_held_jobs_wait_for_the_release(link: DraftLink) -> None:
    done: list[str] = []
    link.hold(lambda: done.append("adopt"))
    link.post(lambda: done.append("round"))
    link.release()
    link.post(lambda: done.append("begin"))
    assert link.ask(lambda: [*done], []) == ["round", "adopt", "begin"]


def test_what_is_asked_comes_after_what_is_held(link: DraftLink) -> None:
    done: list[str] = []
    link.hold(lambda: done.append("first"))
    link.hold(lambda: done.append("second"))
    assert link.ask(lambda: [*done], []) == ["first", "second"]
    link.release()
    assert link.ask(lambda: [*done], []) == ["first", "second"]


def test_a_held_job_that_fails_gives_the_draft_up(link: DraftLink) -> None:
    link.hold(lambda: 1 / 0)
    with pytest.warns(RuntimeWarning, match="ZeroDivisionError"):
        assert link.ask(lambda: 3, 0) == 0
    assert not link.is_working()


def test_a_finaliser_that_interrupts_who_gives_the_draft_a_job_leaves_what_was_held(link: DraftLink) -> None:
    """A stream that nobody reads on is closed wherever Python collects it, and waits for nothing."""
    done: list[str] = []
    link.hold(lambda: done.append("held"))
    with link._worker.jobs.lock:  # type: ignore[attr-defined]
        link.release()
    assert link.ask(lambda: [*done], []) == ["held"]
