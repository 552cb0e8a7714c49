"""What sessions ask ONNX Runtime for."""

import numpy as np
import onnxruntime as ort
import pytest

from mirrorsd.device_maps import TargetPlacement
from mirrorsd.devices.onnxruntime import providers
from mirrorsd.devices.onnxruntime.onnx_bytes import ONNX_TYPES, model, node
from mirrorsd.devices.onnxruntime.providers import adds_exactly, provider_options, session_options, sums_are_exact
from mirrorsd.graphs import names


def is_asked(options: ort.SessionOptions) -> bool:
    try:
        return options.get_session_config_entry(names.EXACT_INTEGERS[0]) == names.EXACT_INTEGERS[1]
    except RuntimeError as unknown:
        assert "does not have" in str(unknown)
        return False


@pytest.mark.parametrize(
    ("version", "is_taken"), [("1.29.0", False), ("1.30.0", True), ("1.31.1", True), ("2.0", True)]
)
def test_exact_integers_are_asked_for_where_that_ends_no_process(
    version: str, *, is_taken: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ort, "__version__", version)
    monkeypatch.setattr(providers, "sums_are_exact", lambda: False)
    assert is_asked(session_options(TargetPlacement())) is is_taken


def test_a_processor_whose_sums_are_exact_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(providers, "sums_are_exact", lambda: True)
    assert not is_asked(session_options(TargetPlacement()))


def test_sums_are_exact_as_sessions_are_opened() -> None:
    placement = TargetPlacement()
    assert adds_exactly(session_options(placement), placement.provider, {})


@pytest.mark.skipif(not sums_are_exact(), reason="this processor's sums are exact only where asked")
def test_asking_changes_no_bits_where_sums_are_exact() -> None:
    asked = ort.SessionOptions()
    asked.add_session_config_entry(*names.EXACT_INTEGERS)
    rng = np.random.default_rng(3)
    product = node("MatMulInteger", ["rows", "weight"], ["out"])
    ports = [("rows", ONNX_TYPES["uint8"], 2)], [("out", ONNX_TYPES["int32"], 2)]
    graph = model([product], *ports, {"weight": rng.integers(-128, 128, (576, 320)).astype(np.int8)})
    both = (ort.SessionOptions(), asked)
    sessions = [ort.InferenceSession(graph, options, ["CPUExecutionProvider"]) for options in both]
    for rows in (1, 2, 8, 15, 16, 17, 64, 130):
        given = {"rows": rng.integers(0, 256, (rows, 576)).astype(np.uint8)}
        plain, precise = (session.run(None, given)[0] for session in sessions)
        assert np.array_equal(plain, precise)


@pytest.mark.parametrize("provider", ["CUDAExecutionProvider", "DmlExecutionProvider"])
def test_only_a_device_that_is_not_the_first_is_named(provider: str) -> None:
    first, second = (provider_options(TargetPlacement(provider=provider, device_id=number)) for number in (0, 1))
    assert "device_id" not in first
    assert second["device_id"] == "1"
