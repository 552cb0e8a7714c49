"""Log-probabilities of a row: a log-softmax, the same for the row alone as among others."""

import numpy as np
import pytest

from mirrorsd.graphs.errors import DeviceError
from mirrorsd.runtime.sampling.chooser import TokenChooser, token_logprob
from mirrorsd.texts.config import GenerationConfig


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
@pytest.mark.parametrize("size", [3, 700, 50_001])
def test_values_are_a_log_softmax_and_the_likeliest_come_first(size: int, dtype: type) -> None:
    logits = np.random.default_rng(size).normal(scale=4.0, size=size).astype(dtype)
    exact = logits.astype(np.float64)
    expected = exact - np.log(np.exp(exact - exact.max()).sum()) - exact.max()
    found = token_logprob(logits, 1, 5)
    assert found.value == pytest.approx(expected[1], abs=1e-5)
    order = np.argsort(-exact, kind="stable")[:5]
    assert [token for token, _ in found.top] == order.tolist()
    assert [value for _, value in found.top] == pytest.approx(expected[order], abs=1e-5)


def test_of_equals_the_lowest_ids_come_first() -> None:
    assert [token for token, _ in token_logprob(np.zeros(1000, np.float32), 3, 4).top] == [0, 1, 2, 3]


def test_a_row_s_values_do_not_depend_on_where_it_lies() -> None:
    rows = np.random.default_rng(0).normal(size=(3, 5001)).astype(np.float32)
    assert token_logprob(rows[1], 7, 3) == token_logprob(rows[1].copy(), 7, 3)
    assert token_logprob(np.asfortranarray(rows)[1], 7, 3) == token_logprob(rows[1], 7, 3)


def test_a_chooser_keeps_what_it_was_asked_for_until_it_is_taken() -> None:
    logits = np.array([1.0, 3.0, 2.0])
    chooser = TokenChooser(GenerationConfig(logprobs=True, top_logprobs=2, logit_bias={0: 50}))
    assert chooser.choose(logits, 4, None).token == 0
    found = chooser.take_logprob(4)
    assert found == token_logprob(logits, 0, 2)
    assert [token for token, _ in found.top] == [1, 2]
    assert chooser.take_logprob(4) is None
    assert TokenChooser(GenerationConfig()).take_logprob(4) is None


def test_only_what_changes_choices_changes_the_order_of_candidates() -> None:
    told = TokenChooser(GenerationConfig(logprobs=True))
    assert (told.needs_logits, told.keeps_order) == (True, True)
    biased = TokenChooser(GenerationConfig(logit_bias={3: 1.0}))
    assert (biased.needs_logits, biased.keeps_order) == (True, False)
    plain = TokenChooser(GenerationConfig())
    assert (plain.needs_logits, plain.keeps_order) == (False, True)


def test_an_infinite_logit_that_a_bias_hides_is_an_error_where_it_is_told() -> None:
    """Minus a hundred from plus infinity is still plus infinity."""
    chooser = TokenChooser(GenerationConfig(logprobs=True, logit_bias={0: -100}))
    with pytest.raises(DeviceError, match="position 4"):
        chooser.choose(np.array([np.inf, 1.0]), 4, None)
