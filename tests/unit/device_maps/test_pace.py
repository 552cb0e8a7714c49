"""Paced cards: what they may say, and that a paced session takes the time it is told."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import pytest

from mirrorsd.device_maps import Pace, builtin_names, load_device_map
from mirrorsd.devices.draft_memory import RowBlock
from mirrorsd.graphs.contract import HeadShape
from mirrorsd.graphs.errors import BundleError, ConfigError
from mirrorsd.graphs.manifest import Head, SourceModel
from mirrorsd.runtime.backends import paced
from mirrorsd.runtime.backends.paced import PacedDraft, PacedDraftModel, PacedTarget, PacedTargetModel
from mirrorsd.runtime.backends.protocol import HeadGuesses
from mirrorsd.runtime.ledger import Ledger
from mirrorsd.testing.fake import FakeDraft, FakeModel, FakeTarget

PACE = Pace(target_ms=((1.0, 10.0), (8.0, 17.0)), draft_ms=((1.0, 5.0),), exit_ms=2.0, transfer_ms=1.0)


def test_paced_cards_ship_and_say_so() -> None:
    for name in ("paced-laptop", "paced-paper", "paced-slow-npu"):
        assert name in builtin_names()
        card = load_device_map(name)
        assert card.pace is not None
        assert card.description.startswith("Paced")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("target_ms = []", r"pace.target_ms is \[\]; expected \[rows, ms\] points"),
        ("target_ms = [[8, 1], [1, 2]]", "rising rows"),
        ("target_ms = [[1, 2, 3]]", "points"),
        ("target_ms = [[1, 5]]\nexit_ms = -1", "pace.exit_ms is -1.0; allowed: 0 or more"),
        ("target_ms = [[1, 5]]\nexit = 1", "unknown key 'pace.exit'; did you mean 'pace.exit_ms'"),
    ],
)
def test_faulty_pace_is_refused(tmp_path: Path, line: str, message: str) -> None:
    card = tmp_path / "mine.toml"
    card.write_text(f"[pace]\ndraft_ms = [[1, 6]]\n{line}\n", encoding="utf-8")
    with pytest.raises(ConfigError, match=message):
        load_device_map(str(card))


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> Callable[[], float]:
    """The clock of paced sessions: it stands still but for their own waiting."""
    seconds = [0.0]

    def sleep(more: float) -> None:
        seconds[0] += more

    monkeypatch.setattr(paced, "perf_counter", lambda: seconds[0])
    monkeypatch.setattr(paced.time, "sleep", sleep)
    return lambda: seconds[0]


def test_paced_target_takes_its_time_and_books_it(now: Callable[[], float]) -> None:
    """Three rows take 12 ms and the exit 2; the exit lies at half of the depth."""
    target = PacedTarget(FakeTarget(lambda text: np.arange(4.0), vocab_size=4), PACE, num_layers=2)
    ledger, arrived = Ledger(), []
    target.run(np.array([1, 2, 3]), 0, with_logits=False, ledger=ledger, on_exit=lambda _: arrived.append(now()))
    assert now() == pytest.approx(0.014)
    assert arrived == [pytest.approx(0.008)]
    assert [span.name for span in ledger.spans] == ["prefix", "exit", "suffix"]
    assert [span.seconds for span in ledger.spans] == pytest.approx([0.006, 0.002, 0.006])


class HeadedTarget(FakeTarget):
    """Its head reads a tenth of what a pass reads, and takes 0.2 ms here."""

    def __init__(self, read_share: float = 0.1) -> None:
        super().__init__(lambda text: np.arange(4.0), vocab_size=4)
        shape = HeadShape(taps=(2,), length=1, num_candidates=1, num_layers=0, num_kv_heads=0, head_dim=0)
        source = SourceModel(name="fake", family="medusa", licence="unknown", num_parameters=1)
        sizes = {"vocabulary": "own", "num_tokens": 4, "read_share": read_share}
        self.heads = {"medusa": Head(kind="medusa", file="", source=source, shape=shape, **sizes)}

    def guess(self, *arguments: Any, **options: Any) -> HeadGuesses:
        paced.time.sleep(0.0002)
        return HeadGuesses(np.zeros((1, 1), np.int64), np.zeros((1, 1), np.float32))


@pytest.mark.parametrize(("num_rows", "seconds"), [(1, 0.001), (3, 0.0012)])
def test_a_head_takes_its_share_of_a_pass(now: Callable[[], float], num_rows: int, seconds: float) -> None:
    """A tenth of the 10 ms of one row, of the 12 ms of three; what the stand-in takes changes nothing."""
    target, ledger = PacedTarget(HeadedTarget(), PACE, num_layers=2), Ledger(now)
    target.run(np.array([1, 2, 3]), 0, with_logits=False, ledger=Ledger())
    started = now()
    target.guess("medusa", np.arange(num_rows), 0, ledger=ledger)
    assert now() - started == pytest.approx(seconds)
    assert [(span.name, span.seconds) for span in ledger.spans] == [("head", pytest.approx(seconds))]


def test_a_head_reads_a_prompt_at_the_prompts_pace(now: Callable[[], float]) -> None:
    """A hundred rows of a prompt take 0.5 ms each, a tenth of that in the head, which then guesses as behind one."""
    target = PacedTarget(HeadedTarget(), replace(PACE, prefill_ms_per_row=0.5), num_layers=2)
    target.prefill(np.arange(100), 0, ledger=Ledger())
    assert now() == pytest.approx(0.05)
    target.guess("medusa", np.arange(100), 0, ledger=Ledger())
    assert now() == pytest.approx(0.05 + 0.006)


def test_a_head_of_unknown_cost_is_refused() -> None:
    with pytest.raises(BundleError, match=r"how much its medusa head reads.*Export the bundle again"):
        PacedTarget(HeadedTarget(read_share=0.0), PACE, num_layers=2)


def test_paced_draft_takes_its_time(now: Callable[[], float]) -> None:
    draft = PacedDraft(FakeDraft(lambda text: [1, 1], vocab_size=4, num_streams=1), PACE)
    guesses = draft.run([RowBlock([1], 0, 0)], [0])
    assert now() == pytest.approx(0.006)
    assert guesses.ids.shape == (1, 2, 1)


def test_paced_sessions_really_wait() -> None:
    draft = PacedDraft(FakeDraft(lambda text: [1], vocab_size=4), PACE)
    started = perf_counter()
    draft.run([RowBlock([1], 0, 0)], [0])
    assert perf_counter() - started >= 0.006


def test_paced_models_say_so() -> None:
    target = PacedTargetModel(FakeModel(lambda: FakeTarget(lambda text: np.arange(4.0), vocab_size=4)), PACE, 2)
    draft = PacedDraftModel(FakeModel(lambda: FakeDraft(lambda text: [1], vocab_size=4)), PACE)
    assert target.describe() == "fake, PACED (1 rows 10 ms, 8 rows 17 ms; exit 2 ms)"
    assert draft.describe() == "fake, PACED (1 rows 5 ms; hand-over 1 ms)"
    assert isinstance(target.new_session(), PacedTarget)
    assert isinstance(draft.new_session(), PacedDraft)
