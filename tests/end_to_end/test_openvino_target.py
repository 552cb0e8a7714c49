"""OpenVINO as the target's runtime: what it computes is what ONNX Runtime computes, rollback included."""

from pathlib import Path

import numpy as np
import pytest

from mirrorsd import MirrorPipeline
from mirrorsd.device_maps import TargetPlacement
from mirrorsd.graphs.bundle_files import read_bundle
from mirrorsd.graphs.errors import DeviceError
from mirrorsd.runtime.backends.onnxruntime.target import OnnxTargetModel
from mirrorsd.runtime.backends.openvino.target import OpenVinoTargetModel
from mirrorsd.runtime.backends.protocol import TargetSession
from mirrorsd.runtime.ledger import ExitGuesses, Ledger

ON_OPENVINO = TargetPlacement(runtime="openvino", precision="f32")
SETTINGS = {"max_new_tokens": 48, "ignore_eos": True}


@pytest.fixture(scope="module")
def sessions(tiny_bundle: Path) -> tuple[TargetSession, TargetSession]:
    entry = read_bundle(tiny_bundle).target
    by_onnx_runtime = OnnxTargetModel(tiny_bundle, entry, TargetPlacement()).new_session()
    return by_onnx_runtime, OpenVinoTargetModel(tiny_bundle, entry, ON_OPENVINO).new_session()


def answers(session: TargetSession) -> list[np.ndarray]:
    """Prefill, a window, the window again after a rollback of five rows, and one row on its own."""
    tokens = np.random.default_rng(3).integers(0, session.vocab_size, 64)
    found: list[np.ndarray] = []
    exits: list[ExitGuesses] = []
    session.prefill(tokens[:20], 0, ledger=Ledger())
    for start, stop in ((20, 28), (23, 30), (30, 31)):
        window = tokens[start + 5 : stop + 5] if start == 23 else tokens[start:stop]
        output = session.run(window, start, with_logits=True, ledger=Ledger(), on_exit=exits.append)
        assert output.logits is not None
        found += [np.array(output.logits), np.array(output.argmax_gap)]
    return found + [guesses.logprobs for guesses in exits]


def test_numbers_are_those_of_onnx_runtime(sessions: tuple[TargetSession, TargetSession]) -> None:
    expected, found = (answers(session) for session in sessions)
    for left, right in zip(expected, found, strict=True):
        np.testing.assert_allclose(left, right, atol=1e-4)


def test_methods_agree_and_equal_plain_onnx_runtime(tiny_bundle: Path) -> None:
    with MirrorPipeline.load(tiny_bundle, device_map="cpu", speculation={"pad_rows_to": 8}) as pipe:
        expected = pipe.generate("Once upon a time", **SETTINGS, method="plain").token_ids
    with MirrorPipeline.load(tiny_bundle, device_map="openvino-cpu", speculation={"pad_rows_to": 8}) as pipe:
        assert "target: openvino CPU, 1 thread(s)" in pipe.placement
        for method in ("plain", "serial", "mirror"):
            assert pipe.generate("Once upon a time", **SETTINGS, method=method).token_ids == expected


def test_a_stage_that_openvino_cannot_read(tiny_bundle: Path, tmp_path: Path) -> None:
    (tmp_path / "target").mkdir()
    (tmp_path / "target" / "prefix.onnx").write_bytes(b"no model")
    with pytest.raises(DeviceError, match=r"OpenVINO could not load prefix\.onnx on CPU"):
        OpenVinoTargetModel(tmp_path, read_bundle(tiny_bundle).target, ON_OPENVINO)
