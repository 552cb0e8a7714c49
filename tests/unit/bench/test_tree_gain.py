"""Windows with second choices at their least certain rows."""

import numpy as np
import pytest

from mirrorsd.bench.tree_gain import tokens_per_step
from mirrorsd.runtime.tuning.recording import RecordedText


def make_text(second_at_1: int) -> tuple[RecordedText, tuple[np.ndarray, np.ndarray]]:
    """A text `0 | 1 2 3 4` whose first window goes wrong at its second token; all other windows are wrong at once."""
    windows = np.array([[1, 9, 9], [9, 9, 9], [9, 9, 9], [9, 9, 9]])
    empty = np.zeros((4, 4, 1, 1))
    text = RecordedText(
        tokens=np.arange(5),
        num_prompt=1,
        seed=0,
        windows=windows,
        draft_ids=empty.astype(np.int64),
        draft_logprobs=empty.astype(np.float32),
        exit_ids=empty.astype(np.int64),
        exit_logprobs=empty.astype(np.float32),
    )
    second = np.full((4, 4), 7)
    second[0, 1] = second_at_1
    gap = np.array([[0.5, 0.1, 0.9, 0.9]] * 4)
    return text, (second, gap)


@pytest.mark.parametrize(
    ("second_at_1", "num_leaves", "expected"),
    [
        (2, 0, 4 / 3),  # committed: 1 2, then 3, then 4
        (2, 1, 4 / 2),  # the leaf 2 catches the miss at the least certain row: 1 2 3, then 4
        (8, 1, 4 / 3),  # a leaf that is wrong changes nothing
    ],
)
def test_a_leaf_that_is_the_correction_commits_one_token_more(
    second_at_1: int, num_leaves: int, expected: float
) -> None:
    assert tokens_per_step([make_text(second_at_1)], 3, num_leaves) == pytest.approx(expected)
