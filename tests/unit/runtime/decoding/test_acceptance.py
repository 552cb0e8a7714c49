"""A window is right as far as it says what the target chooses; the target's own next token comes on top."""

import numpy as np
import pytest

from mirrorsd.runtime.decoding.acceptance import Acceptance, accept_window
from mirrorsd.runtime.sampling.chooser import Choice


def accept(window: list[int], choices: list[int], asked: list[int] | None = None) -> Acceptance:
    """The target chooses `choices`, each a tenth further ahead of its runner-up than the one before."""

    def choose_row(row: int) -> Choice:
        if asked is not None:
            asked.append(row)
        return Choice(choices[row], (row + 1) / 10)

    return accept_window(np.array(window, dtype=np.int64), choose_row)


@pytest.mark.parametrize(
    ("window", "choices", "num_accepted", "next_token"),
    [
        ([4, 5, 9], [4, 5, 6, 7], 2, 6),
        ([9, 5, 6], [4, 5, 6, 7], 0, 4),
        ([4, 9, 6], [4, 5, 6, 7], 1, 5),
        ([4, 5, 6], [4, 5, 6, 7], 3, 7),
        ([0, 0], [0, 0, 0], 2, 0),
        ([], [4], 0, 4),
    ],
    ids=["correction", "nothing right", "right again later", "bonus", "token zero", "no window"],
)
def test_a_window_counts_up_to_its_first_difference(
    window: list[int], choices: list[int], num_accepted: int, next_token: int
) -> None:
    assert accept(window, choices)[:2] == (num_accepted, next_token)


def test_rows_behind_the_first_difference_are_never_asked() -> None:
    asked: list[int] = []
    accept([4, 9, 6, 7], [4, 5], asked)
    assert asked == [0, 1]


def test_every_committed_token_has_its_gap() -> None:
    assert accept([4, 5, 9], [4, 5, 6, 7]).gaps == (0.1, 0.2, 0.3)
    assert accept([4, 5, 6], [4, 5, 6, 7]).gaps == (0.1, 0.2, 0.3, 0.4)


def test_what_is_committed_is_what_the_target_alone_would_have_said() -> None:
    """Whatever the window: accepted tokens and the next one are a beginning of the target's choices."""
    random = np.random.default_rng(2)
    for _ in range(300):
        choices = random.integers(0, 3, 6).tolist()
        window = random.integers(0, 3, 5).tolist()
        found = accept(window, choices)
        assert [*window[: found.num_accepted], found.next_token] == choices[: found.num_accepted + 1]
        assert found.num_accepted == 5 or window[found.num_accepted] != found.next_token
