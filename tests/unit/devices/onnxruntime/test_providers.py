"""What sessions ask ONNX Runtime for."""

import onnxruntime as ort
import pytest

from mirrorsd.device_maps import TargetPlacement
from mirrorsd.devices.onnxruntime.providers import provider_options, session_options
from mirrorsd.graphs import names


@pytest.mark.parametrize(
    ("version", "is_asked"), [("1.29.0", False), ("1.30.0", True), ("1.31.1", True), ("2.0", True)]
)
def test_exact_integers_are_asked_for_where_that_ends_no_process(
    version: str, *, is_asked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ort, "__version__", version)
    options = session_options(TargetPlacement())
    if is_asked:
        assert options.get_session_config_entry(names.EXACT_INTEGERS[0]) == names.EXACT_INTEGERS[1]
    else:
        with pytest.raises(RuntimeError, match="does not have"):
            options.get_session_config_entry(names.EXACT_INTEGERS[0])


@pytest.mark.parametrize("provider", ["CUDAExecutionProvider", "DmlExecutionProvider"])
def test_only_a_device_that_is_not_the_first_is_named(provider: str) -> None:
    first, second = (provider_options(TargetPlacement(provider=provider, device_id=number)) for number in (0, 1))
    assert "device_id" not in first
    assert second["device_id"] == "1"
