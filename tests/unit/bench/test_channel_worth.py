"""Recordings that are put right: none of it leaves them as they are, all of it makes every branch the text itself."""

from dataclasses import replace

import numpy as np
import pytest

from mirrorsd.bench.studies.channel_worth import accepted, put_right
from mirrorsd.runtime.tuning.recording import RecordedText

TOKENS = np.array([9, 5, 6, 7, 8, 3])
"""Two of the prompt, four new ones."""


@pytest.fixture
def text() -> RecordedText:
    """A draft that says 1, then 2, wherever the text goes on otherwise, and has never heard of another token."""
    windows = np.array([[1, 2, 1], [7, 2, 1], [1, 2, 1], [1, 2, 1]])
    ids = np.zeros((4, 4, 2, 2), dtype=np.int64)
    ids[:, :3, 0, 0], ids[:, :, 0, 1], ids[:, :, 1, 0] = windows, 2, 4
    exits = np.zeros((1, 4, 4, 2), dtype=np.int64)
    logprobs = {"draft_logprobs": np.zeros(ids.shape), "exit_logprobs": np.zeros(exits.shape)}
    return RecordedText(tokens=TOKENS, num_prompt=2, seed=0, windows=windows, draft_ids=ids, exit_ids=exits, **logprobs)


def test_nothing_put_right_is_what_was_recorded(text: RecordedText) -> None:
    same = put_right(text, 0.0, np.random.default_rng(0))
    assert same.reading_windows is not None and same.reading_ids is not None
    assert same.reading_windows[0].tolist() == text.windows[0].tolist()
    assert same.reading_windows[1].tolist() == [7, 1, 2]  # behind 7 the text's own head goes on
    assert accepted([same], [same.reading_windows]) == accepted([text], [text.windows])


def test_everything_put_right_is_the_text_itself(text: RecordedText) -> None:
    right = put_right(text, 1.0, np.random.default_rng(0))
    assert right.reading_windows is not None and right.reading_ids is not None
    assert right.reading_windows[1].tolist() == [7, 8, 3]
    assert right.reading_ids[1, 0, 1].tolist() == [8, 4]  # a stream's too: its first has the last place
    assert replace(right, windows=right.reading_windows).outcome(1, 3) == (2, 3)
    assert (right.draft_ids == text.draft_ids).all()
