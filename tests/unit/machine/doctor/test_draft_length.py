"""A draft that is dead: texts are the target's all the same, so its accepted length must tell."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from mirrorsd.graphs.draft_windows import num_accepted
from mirrorsd.graphs.manifest import AcceptedLength
from mirrorsd.machine.doctor.draft_length import measure_draft
from mirrorsd.runtime.devices.workers import DeviceWorker
from mirrorsd.testing.fake import FakeDraft, FakeModel

VOCAB, NUM_PROMPT = 40, 8
ORDER = np.random.default_rng(3).permutation(VOCAB)


def next_token(text: list[int]) -> int:
    return (3 * text[-1] + sum(text[-2:-1]) + len(text)) % VOCAB


def texts() -> tuple[tuple[int, ...], ...]:
    found = []
    for first in range(3):
        text = [first, 5]
        while len(text) < 40:
            text.append(next_token(text))
        found.append(tuple(text))
    return tuple(found)


def good(text: list[int]) -> list[int]:
    """Right but for every seventh place."""
    text = list(text)
    for _ in range(3):
        text.append(next_token(text) if len(text) % 7 else 0)
    return text[-3:]


DRAFTS: dict[str, Callable[[list[int]], list[int]]] = {
    "good": good,
    "zeroed weights": lambda _: [0, 0, 0],
    "wrong order of the vocabulary": lambda text: [int(ORDER[token]) for token in good(text)],
    "garbage": lambda text: np.random.default_rng([len(text), *text]).integers(VOCAB, size=3).tolist(),
    "blind to the last token": lambda text: good(text[:-1] or text),
}


def pipe_with(handler: Callable[[list[int]], list[int]], expected: AcceptedLength | None) -> Any:
    draft = FakeModel(lambda: FakeDraft(handler, vocab_size=VOCAB, num_streams=2, capacity=64))
    engine = SimpleNamespace(draft_worker=DeviceWorker("draft"), draft_model=draft)
    return SimpleNamespace(manifest=SimpleNamespace(accepted_length=expected), engine=engine)


def at_export(accepted: float) -> AcceptedLength:
    num_windows = sum(len(text) - 1 - NUM_PROMPT for text in texts())
    return AcceptedLength(accepted=accepted, num_windows=num_windows, num_prompt=NUM_PROMPT, texts=texts())


@pytest.mark.parametrize("name", DRAFTS)
def test_a_dead_draft_is_seen_and_a_good_one_guesses_what_it_did(name: str) -> None:
    at_first = measure_draft(pipe_with(good, at_export(1.0))).now
    assert at_first is not None
    assert at_first > 1.5
    found = measure_draft(pipe_with(DRAFTS[name], at_export(at_first)))
    assert found.is_fine == (name == "good"), found.words
    if name == "good":
        assert found.now == at_first
    else:
        assert "below 0.8 of it" in found.words


def test_a_bundle_that_does_not_say_is_told_and_not_failed() -> None:
    found = measure_draft(pipe_with(DRAFTS["zeroed weights"], None))
    assert found.is_fine
    assert "does not say how good its draft was" in found.words


def test_a_draft_that_never_guessed_much_cannot_be_judged() -> None:
    found = measure_draft(pipe_with(DRAFTS["zeroed weights"], at_export(0.1)))
    assert found.is_fine
    assert "too little" in found.words


@pytest.mark.parametrize(("num_streams", "expected"), [(0, 6), (2, 6)])
def test_a_draft_that_is_always_right_has_its_whole_window_accepted(num_streams: int, expected: int) -> None:
    text = list(texts()[0])

    def best_after(rows: Any, num_cached: int) -> list[list[int]]:
        found = []
        for row in range(len(rows)):
            known = [*text[:num_cached], *rows[: row + 1]]
            for _ in range(1 + num_streams):
                known.append(next_token(known))
            found.append(known[len(known) - 1 - num_streams :])
        return found

    passes_reach = expected if num_streams == 0 else min(expected, 2 + 2 * num_streams)
    assert num_accepted(best_after, text[:10], text[10:16], num_streams) == passes_reach
