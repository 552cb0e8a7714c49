from pathlib import Path

import numpy as np
import onnx_ir as ir
import onnxruntime as ort

from mirrorsd.export.weights.weights_file import WeightsFile

GRAPH = """
<ir_version: 10, opset_import: ["" : 21]>
stage (float[2,32] x) => (float[2,32] y) <float[1,1] w = {0}, float[1] b = {0}> { h = MatMul(x, w) y = Add(h, b) }
"""


def _stage(weight: np.ndarray) -> ir.Model:
    model = ir.from_onnx_text(GRAPH)
    for name, array in (("w", weight), ("b", np.ones(32, np.float32))):
        value = model.graph.initializers[name]
        value.const_value, value.shape = ir.tensor(array, name=name), ir.Shape(array.shape)
    return model


def test_equal_tensors_share_their_bytes_and_stages_run(tmp_path: Path) -> None:
    weight = np.arange(1024, dtype=np.float32).reshape(32, 32)
    stages = {"one": weight, "two": weight.copy(), "three": weight + 1}
    with WeightsFile(tmp_path / "weights.bin") as weights:
        for name, array in stages.items():
            model = _stage(array)
            list(weights.move_weights(model))
            ir.save(model, tmp_path / f"{name}.onnx")
    assert (tmp_path / "weights.bin").stat().st_size == 2 * weight.nbytes
    rows = np.eye(2, 32, dtype=np.float32)
    for name, array in stages.items():
        session = ort.InferenceSession(str(tmp_path / f"{name}.onnx"), providers=["CPUExecutionProvider"])
        np.testing.assert_array_equal(session.run(None, {"x": rows})[0], array[:2] + 1)


def test_small_tensors_stay_in_the_graph(tmp_path: Path) -> None:
    with WeightsFile(tmp_path / "weights.bin") as weights:
        model = _stage(np.zeros((32, 32), np.float32))
        list(weights.move_weights(model))
    assert not isinstance(model.graph.initializers["b"].const_value, ir.ExternalTensor)


def test_a_file_goes_on_from_a_recorded_state(tmp_path: Path) -> None:
    """What came after the state is cut off; what is in the state is not computed again."""
    path, weight = tmp_path / "weights.bin", np.arange(1024, dtype=np.float32).reshape(32, 32)
    with WeightsFile(path) as weights:
        assert weights.missing_bytes([_stage(weight), _stage(weight + 1)]) == 2 * weight.nbytes
        assert list(weights.move_weights(_stage(weight))) == [weight.nbytes]
        state = weights.flushed()
        list(weights.move_weights(_stage(weight + 1)))
    with WeightsFile(path, state) as weights:
        assert weights.missing_bytes([_stage(weight), _stage(weight + 2)]) == weight.nbytes
        assert list(weights.move_weights(_stage(weight))) == [0]
        assert list(weights.move_weights(_stage(weight + 2))) == [weight.nbytes]
    stored = np.fromfile(path, np.float32).reshape(2, 32, 32)
    np.testing.assert_array_equal(stored, [weight, weight + 2])
