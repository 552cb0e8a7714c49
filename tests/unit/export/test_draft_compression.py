"""What is said where a compressed draft loses too much: what else can be asked for."""

import pytest

from mirrorsd.export.compression_plan import DraftCompression
from mirrorsd.export.draft_compression import _check_loss
from mirrorsd.graphs.errors import ExportError
from mirrorsd.graphs.manifest import DraftAccuracy


@pytest.mark.parametrize(
    ("weights", "gentler"),
    [("int8", "fp16"), ("int8-rows", "--draft-precision fp32"), ("int4", "int8"), ("int4-blocks", "int8")],
)
def test_a_refused_draft_names_a_gentler_form(weights: str, gentler: str) -> None:
    """`--device-map auto` may have chosen the form: who asked for none is told how to have floats."""
    sizes = {"agreement": (0.5,), "accepted_before": 2.0, "accepted_after": 1.0, "num_windows": 9, "num_positions": 9}
    accuracy = DraftAccuracy(scheme=weights, share_interval=(0.4, 0.6), **sizes)  # type: ignore[arg-type]
    with pytest.raises(ExportError, match=rf"choose {gentler}.*--allow-draft-loss"):
        _check_loss(accuracy, DraftCompression(weights=weights))
    _check_loss(accuracy, DraftCompression(weights=weights, allows_loss=True))
