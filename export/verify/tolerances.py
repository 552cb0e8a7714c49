"""How far an exported part may be from PyTorch, and the refusal where it is further.

Owns: the numbers. Both sides hold the same rounded weights and compute in float32 (`rounded_weights.py`, `upcast.py`),
so what is left is arithmetic, and a graph that is wrong is far beyond it. Does not own: measuring (`comparison.py`),
and what the rounding costs: that is quality, is reported and warned about (`graphs/quality_bounds.py`), never refused.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from mirrorsd.graphs.errors import ParityError
from mirrorsd.graphs.manifest import VerifyResult


@dataclass(frozen=True, slots=True, kw_only=True)
class Tolerance:
    """Largest error in standard deviations of a row, and divergence in nats; smallest share of equal best tokens."""

    max_relative_error: float
    mean_divergence: float = float("inf")
    top1_agreement: float = 0.0


TOLERANCES = {
    "float32": Tolerance(max_relative_error=2e-3, mean_divergence=1e-5, top1_agreement=0.99),
    "float16": Tolerance(max_relative_error=1e-2, mean_divergence=1e-5, top1_agreement=0.99),
    "bfloat16": Tolerance(max_relative_error=5e-2, mean_divergence=1e-4, top1_agreement=0.98),
}
"""By the floats of the stages. Right graphs have 1e-5 in small models, 7e-5 in one of 30 layers. In 16 bits constants
between the weights are rounded too: Granite, which has four, has 2e-3 (float16) and 1e-2 (bfloat16)."""


def tolerance_of(dtype: str, accepted_error: float | None) -> Tolerance:
    """Tolerance of stages that compute in `dtype`; `accepted_error`, if the user gave one, stands for all of it."""
    return TOLERANCES[dtype] if accepted_error is None else Tolerance(max_relative_error=accepted_error)


def check_parity(results: Iterable[VerifyResult], tolerance: Tolerance) -> None:
    """Accept `results` or refuse the export.

    Raises:
        ParityError: an error or a divergence above, or an agreement below, the tolerance; it names the stage.
    """
    for result in results:
        is_close = result.max_relative_error <= tolerance.max_relative_error  # False for NaN too
        is_alike = result.mean_divergence <= tolerance.mean_divergence
        if is_close and is_alike and result.top1_agreement >= tolerance.top1_agreement:
            continue
        raise ParityError(
            f"stage {result.stage!r} is not what PyTorch computes with the same weights over {result.positions} "
            f"positions: largest error {result.max_relative_error:.3g} standard deviations of a row "
            f"(allowed {tolerance.max_relative_error:.3g}), divergence {result.mean_divergence:.3g} nats (allowed "
            f"{tolerance.mean_divergence:.3g}), same best token {result.top1_agreement:.2%} (wanted "
            f"{tolerance.top1_agreement:.0%}). No precision mends a wrong graph: please report this model. If you know "
            "the difference to be rounding, accept it with --accept-error"
        )
