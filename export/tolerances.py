"""How far an exported part may be from PyTorch, by precision, and the refusal where it is further.

Owns: the numbers. Does not own: how they are measured (`verify_target.py`, `verify_draft.py`), and the bounds beyond
which quality is worth a warning (`graphs/quality_bounds.py`): those may be passed.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from mirrorsd.graphs.errors import ParityError
from mirrorsd.graphs.manifest import VerifyResult


@dataclass(frozen=True, slots=True, kw_only=True)
class Tolerance:
    """Largest error of a logit or log-probability, and smallest share of equal best tokens."""

    max_abs_error: float
    top1_agreement: float


TARGET_TOLERANCES = {
    "fp32": Tolerance(max_abs_error=1e-4, top1_agreement=1.0),
    "fp16": Tolerance(max_abs_error=0.1, top1_agreement=0.98),
    "bf16": Tolerance(max_abs_error=0.8, top1_agreement=0.95),
    "int8": Tolerance(max_abs_error=2.0, top1_agreement=0.9),
    "int4": Tolerance(max_abs_error=8.0, top1_agreement=0.5),
}
"""Quantised weights are held against the unquantised model: these catch broken graphs, they promise no quality."""

DRAFT_TOLERANCES = {
    "fp32": Tolerance(max_abs_error=1e-4, top1_agreement=1.0),
    "fp16": Tolerance(max_abs_error=0.1, top1_agreement=0.98),
}
"""Of the draft as it was before its weights were compressed; what that costs is `draft_accuracy` in the manifest."""


def check_parity(results: Iterable[VerifyResult], tolerance: Tolerance) -> None:
    """Accept `results` or refuse the export.

    Raises:
        ParityError: an error above, or an agreement below, the tolerance; it names the stage.
    """
    for result in results:
        is_exact_enough = result.max_abs_error <= tolerance.max_abs_error  # False for NaN too
        if is_exact_enough and result.top1_agreement >= tolerance.top1_agreement:
            continue
        raise ParityError(
            f"stage {result.stage!r} differs from PyTorch over {result.positions} positions: largest error "
            f"{result.max_abs_error:.3g} (allowed {tolerance.max_abs_error:.3g}), same best token "
            f"{result.top1_agreement:.2%} (wanted {tolerance.top1_agreement:.0%}). Nothing was written: "
            "try a higher precision, or report this model"
        )
