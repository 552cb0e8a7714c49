import pytest

from mirrorsd.export.tolerances import DRAFT_TOLERANCES, TARGET_TOLERANCES, check_parity
from mirrorsd.graphs.errors import ParityError
from mirrorsd.graphs.manifest import VerifyResult


def _result(error: float, agreement: float) -> VerifyResult:
    return VerifyResult(stage="suffix", max_abs_error=error, top1_agreement=agreement, positions=256, text="t")


def test_fp32_is_held_to_1e_4_and_every_best_token() -> None:
    check_parity([_result(9e-5, 1.0)], TARGET_TOLERANCES["fp32"])
    for worse in (_result(2e-4, 1.0), _result(0.0, 0.99), _result(float("nan"), 1.0)):
        with pytest.raises(ParityError, match="stage 'suffix' differs from PyTorch over 256 positions"):
            check_parity([worse], TARGET_TOLERANCES["fp32"])


def test_every_precision_has_a_tolerance() -> None:
    from mirrorsd.export.compression_plan import COMPRESSED
    from mirrorsd.export.options import DRAFT_PRECISIONS, TARGET_PRECISIONS

    assert set(TARGET_TOLERANCES) == set(TARGET_PRECISIONS)
    assert {*DRAFT_TOLERANCES, *COMPRESSED} == set(DRAFT_PRECISIONS)
