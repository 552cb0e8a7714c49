"""Windows and agreement, on a draft that answers from a table."""

from types import SimpleNamespace

import pytest
import torch

from mirrorsd.graphs.errors import ConfigError
from mirrorsd.training.models.streaming_draft import DraftHidden
from mirrorsd.training.reports.draft_report import fill_window, measure_agreement, measure_windows
from mirrorsd.training.text.self_text import SelfText, cut_before_loop


class CountingDraft:
    """After token t the main row says t + 1 (40 after `slip`), stream j says t + 1 + j + drift."""

    num_streams = 2

    def __init__(self, slip: int = -1, drift: int = 0) -> None:
        self.slip, self.drift = slip, drift

    def __call__(self, ids: torch.Tensor, tips: torch.Tensor) -> DraftHidden:
        main = torch.where(ids == self.slip, 40, ids + 1)
        ahead = torch.arange(1, 3) + self.drift
        streams = ids[:, tips, None] + 1 + ahead
        return DraftHidden(self._one_hot(main), self._one_hot(streams))

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden

    def linked(self, streams: torch.Tensor, last: torch.Tensor, earlier: torch.Tensor) -> torch.Tensor:
        return streams

    def follow(self, main: torch.Tensor, streams: torch.Tensor, own: int) -> list[int]:
        return torch.cat((main[None], streams)).argmax(-1).tolist()

    def _one_hot(self, ids: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.one_hot(ids, 50).float()


def test_one_pass_gives_main_and_streams() -> None:
    assert fill_window(CountingDraft(), [5], passes=1, gamma=6) == [6, 7, 8]


def test_a_second_pass_keeps_what_agrees_and_goes_on() -> None:
    assert fill_window(CountingDraft(), [5], passes=2, gamma=6) == [6, 7, 8, 9, 10, 11]
    assert fill_window(CountingDraft(), [5], passes=2, gamma=5) == [6, 7, 8, 9, 10]


def test_a_second_pass_replaces_the_first_token_that_disagrees() -> None:
    # Streams run one token ahead: pass 1 gives 6, 8, 9. Main says 7 after 6: 6 stays, 7 follows, then the streams at 6.
    assert fill_window(CountingDraft(drift=1), [5], passes=2, gamma=6) == [6, 7, 9, 10]


def test_accepted_lengths_follow_the_target() -> None:
    text = SelfText(list(range(5, 16)), prompt_length=1)  # ten tokens, 6..15
    statistics = measure_windows(CountingDraft(), [text], passes=1)
    assert statistics.accepted == [3, 3, 2]  # 3 + correction, 3 + correction, and what is left
    slipped = measure_windows(CountingDraft(slip=6), [text], passes=2)
    assert slipped.accepted[0] == 1
    assert statistics.summary()["mean_accepted"] == pytest.approx(8 / 3, abs=1e-3)


def test_agreement_per_stream() -> None:
    text = SelfText(list(range(5, 16)), prompt_length=2)
    found = measure_agreement(CountingDraft(), [text])
    assert found == {"positions": 9, "main": 1.0, "streams": [1.0, 1.0]}
    assert measure_agreement(CountingDraft(drift=1), [text])["streams"] == [0.0, 0.0]


def test_windows_need_a_pass() -> None:
    with pytest.raises(ConfigError, match="passes is 0"):
        measure_windows(SimpleNamespace(), [], passes=0)


def test_a_text_is_cut_before_its_loop() -> None:
    looping = SelfText([1, 2, 1, 2, 5, 6, 7, 5, 6, 7, 5, 6, 7], prompt_length=4)  # the prompt may repeat itself
    assert cut_before_loop(looping, length=3).tokens == [1, 2, 1, 2, 5, 6, 7]
    steady = SelfText(list(range(9)), prompt_length=2)
    assert cut_before_loop(steady, length=3) == steady
