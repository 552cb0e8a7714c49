import doctest
from dataclasses import replace

import numpy as np
import pytest

from mirrorsd.export.verify import comparison
from mirrorsd.export.verify.comparison import Comparison, divergences, log_softmax
from mirrorsd.export.verify.tolerances import TOLERANCES, check_parity, tolerance_of
from mirrorsd.graphs.errors import ParityError
from mirrorsd.graphs.manifest import VerifyResult

RIGHT = VerifyResult(
    stage="suffix",
    max_abs_error=5.0,
    top1_agreement=1.0,
    positions=256,
    text="t",
    max_relative_error=1e-3,
    mean_divergence=1e-6,
)


def compared(logits: np.ndarray, others: np.ndarray) -> VerifyResult:
    comparison = Comparison("suffix")
    comparison.add(logits, others, others.std(axis=-1))
    is_equal = logits.argmax(-1) == others.argmax(-1)
    comparison.add_choices(is_equal, divergences(log_softmax(logits), log_softmax(others)))
    return comparison.result("t")


def test_only_errors_relative_to_the_spread_count() -> None:
    """An error of 5 is nothing where logits spread over thousands."""
    check_parity([RIGHT], TOLERANCES["float32"])
    for worse in (
        {"max_relative_error": 3e-3},
        {"max_relative_error": float("nan")},
        {"mean_divergence": 2e-5},
        {"mean_divergence": float("nan")},
        {"top1_agreement": 0.98},
    ):
        with pytest.raises(ParityError, match=r"stage 'suffix' is not what PyTorch computes .* over 256 positions"):
            check_parity([replace(RIGHT, **worse)], TOLERANCES["float32"])


def test_wider_logits_may_differ_by_more() -> None:
    rng = np.random.default_rng(0)
    narrow = rng.normal(size=(20, 500)).astype(np.float32)
    noise = rng.normal(size=(20, 500)).astype(np.float32) * 1e-4
    ones, tens = compared(narrow + noise, narrow), compared(10 * (narrow + noise), 10 * narrow)
    assert tens.max_abs_error > 9 * ones.max_abs_error
    assert tens.max_relative_error == pytest.approx(ones.max_relative_error, rel=1e-2)
    check_parity([ones, tens], TOLERANCES["float32"])
    with pytest.raises(ParityError, match=r"largest error \S+ standard deviations"):
        check_parity([compared(narrow[::-1], narrow)], TOLERANCES["float32"])


@pytest.mark.parametrize("wrong", [np.nan, np.inf])
def test_what_is_no_number_is_infinitely_wrong(wrong: float) -> None:
    logits = np.arange(12, dtype=np.float32).reshape(3, 4)
    broken = logits.copy()
    broken[1, 2] = wrong
    with np.errstate(invalid="ignore"):
        for found in (compared(broken, logits), compared(logits, broken)):
            assert found.max_relative_error == found.mean_divergence == float("inf")


def test_an_error_that_the_user_accepts_stands_for_all_bounds() -> None:
    far = replace(RIGHT, max_relative_error=0.05, mean_divergence=1.0, top1_agreement=0.5)
    check_parity([far], tolerance_of("float32", 0.06))
    with pytest.raises(ParityError, match=r"allowed 0\.04\).* accept it with --accept-error"):
        check_parity([far], tolerance_of("float32", 0.04))


def test_every_kind_of_float_has_a_tolerance() -> None:
    from mirrorsd.export.checkpoints.loading import DTYPE_BY_PRECISION

    assert set(TOLERANCES) == {str(dtype).removeprefix("torch.") for dtype in DTYPE_BY_PRECISION.values()}


def test_worked_example() -> None:
    assert doctest.testmod(comparison).failed == 0
