"""Whatever ONNX Runtime and OpenVINO raise arrives as an error of ours that says what to do."""

import builtins
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper
from onnxruntime.capi import onnxruntime_pybind11_state
from openvino import frontend

from mirrorsd.device_maps import TargetPlacement, load_device_map
from mirrorsd.devices.onnxruntime.device import OnnxDevice
from mirrorsd.devices.onnxruntime.providers import ONNX_ERRORS
from mirrorsd.devices.onnxruntime.stage import Place
from mirrorsd.devices.openvino.draft_shapes import OPENVINO_ERRORS
from mirrorsd.export.verify.target import open_stage
from mirrorsd.graphs.bundle_files import read_bundle
from mirrorsd.graphs.errors import BundleError, DeviceError, ExportError, MirrorError
from mirrorsd.runtime.backends.onnxruntime.target import OnnxTargetModel
from mirrorsd.runtime.backends.openvino.draft import OpenVinoDraftModel
from mirrorsd.runtime.backends.openvino.target import OpenVinoTargetModel

ON_OPENVINO = TargetPlacement(runtime="openvino", device="CPU")


@pytest.fixture
def own_bundle(tiny_bundle: Path, tmp_path: Path) -> Path:
    shutil.copytree(tiny_bundle, tmp_path / "own.mirror")
    return tmp_path / "own.mirror"


def unknown_operator(path: Path) -> None:
    ports = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [1]) for name in ("x", "y")]
    graph = helper.make_graph([helper.make_node("NoSuchOperator", ["x"], ["y"])], "g", ports[:1], ports[1:])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)


def missing_input(path: Path) -> None:
    ports = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [1]) for name in ("x", "y")]
    graph = helper.make_graph([helper.make_node("Add", ["x", "nowhere"], ["y"])], "g", ports[:1], ports[1:])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)


HARMS: dict[str, Callable[[Path], object]] = {
    "damaged": lambda path: path.write_bytes(b"\x00 no protobuf"),
    "cut short": lambda path: path.write_bytes(path.read_bytes()[:-200]),
    "empty": lambda path: path.write_bytes(b""),
    "missing": lambda path: path.unlink(),
    "unknown operator": unknown_operator,
    "missing input": missing_input,
}


def test_every_exception_of_both_vendors_is_known() -> None:
    """ONNX Runtime's classes by the names of its status codes: none derives from `RuntimeError`."""
    names = {error.__name__ for error in ONNX_ERRORS}
    assert names >= {"Fail", "InvalidArgument", "NoSuchFile", "NoModel", "RuntimeException", "InvalidProtobuf"}
    assert names >= {"NotImplemented", "InvalidGraph", "EPFail", "RuntimeError", "MemoryError"}
    own = vars(onnxruntime_pybind11_state).values()
    assert not [
        kind for kind in own if isinstance(kind, type) and issubclass(kind, Exception) and kind not in ONNX_ERRORS
    ]
    assert {frontend.GeneralFailure, frontend.OpConversionFailure, RuntimeError} <= set(OPENVINO_ERRORS)
    assert not {getattr(builtins, name) for name in ("Exception", "TypeError", "KeyError")} & {
        *ONNX_ERRORS,
        *OPENVINO_ERRORS,
    }, "our own mistakes must stay visible"


@pytest.mark.parametrize("harm", HARMS)
def test_a_stage_that_is_no_graph_is_named_with_what_to_do(own_bundle: Path, harm: str) -> None:
    entry = read_bundle(own_bundle).target
    HARMS[harm](own_bundle / "target" / "suffix.onnx")
    with pytest.raises((BundleError, DeviceError), match=r"suffix\.onnx") as caught:
        OnnxTargetModel(own_bundle, entry, TargetPlacement())
    if harm in ("damaged", "cut short", "missing"):
        assert isinstance(caught.value, BundleError)
        assert "export it again" in str(caught.value)
    with pytest.raises(DeviceError, match=r"(?s)suffix\.onnx on CPU.*export the bundle again"):
        OpenVinoTargetModel(own_bundle, entry, ON_OPENVINO)


def test_weights_that_are_cut_short_are_an_error_of_ours(own_bundle: Path) -> None:
    entry = read_bundle(own_bundle).target
    path = own_bundle / "target" / "weights.bin"
    path.write_bytes(path.read_bytes()[:1000])
    for model, placement in ((OnnxTargetModel, TargetPlacement()), (OpenVinoTargetModel, ON_OPENVINO)):
        with pytest.raises(MirrorError, match=r"prefix\.onnx"):
            model(own_bundle, entry, placement)


@pytest.mark.parametrize("content", [b"", b"<net", b"<?xml version='1.0'?><net name='x' version='11'></net>"])
def test_a_draft_that_is_no_graph_is_a_device_error(own_bundle: Path, content: bytes) -> None:
    entry = read_bundle(own_bundle).draft
    (own_bundle / entry.file).write_bytes(content)
    with pytest.raises(DeviceError, match=r"OpenVINO cannot read the draft.*"):
        OpenVinoDraftModel(own_bundle, entry, load_device_map("cpu").draft).new_session().warm_up()


def test_a_wrong_shape_at_run_is_a_device_error(tiny_bundle: Path) -> None:
    stage = OnnxDevice(TargetPlacement()).open(tiny_bundle / "target" / "exit2.onnx", "float32")
    binding = stage.session.io_binding()
    binding.bind_cpu_input("hidden", np.zeros((1, 2, 3), np.float32))
    for spec in stage.session.get_outputs():
        binding.bind_output(spec.name)
    with pytest.raises(DeviceError, match=r"running the target's exit2: .*invalid dimensions for input: hidden"):
        stage.run(binding)


@pytest.mark.parametrize("is_device", [False, True])
@pytest.mark.parametrize("shape", [(10**13,), (2**40, 2**40)])
def test_a_tensor_without_room_is_a_device_error(shape: tuple[int, ...], is_device: bool) -> None:
    with pytest.raises(DeviceError, match=r"(?s)No room for a tensor .* MB\) in cpu memory: .*smaller --context"):
        Place(is_device=is_device).tensor(shape, "float32")


@pytest.mark.parametrize("model", [OnnxTargetModel, OpenVinoTargetModel])
def test_caches_without_room_are_a_device_error(
    tiny_bundle: Path, model: type[OnnxTargetModel] | type[OpenVinoTargetModel]
) -> None:
    entry = replace(read_bundle(tiny_bundle).target, context=2**31 - 2)
    placement = TargetPlacement() if model is OnnxTargetModel else ON_OPENVINO
    with pytest.raises(DeviceError, match=r"[Nn]o room|bad_alloc"):
        loaded = model(tiny_bundle, entry, placement)
        _ = [loaded.new_session() for _ in range(1000)]


def test_a_device_s_memory_begins_with_zeros() -> None:
    """A freed block of not-a-numbers is handed out again, as an allocator of a device does."""
    place = Place(is_device=True)
    for dtype in ("float32", "float16", "int64"):
        for _ in range(8):
            used = place.tensor((1, 64, 1024), dtype)
            used.write(np.full((1, 64, 1024), np.nan if dtype != "int64" else 7).astype(dtype))
            del used
            assert not place.tensor((1, 64, 1024), dtype).read().any()
    value = place.tensor((2, 3), "bfloat16").value
    assert (value.data_type(), value.shape()) == ("tensor(bfloat16)", [2, 3])


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        (
            {"hidden_size": 65},
            r"prefix.*as 'hidden' it has tensor\(float\) \[1, 'S', 64\], expected is .*\[1, 'S', 65\]",
        ),
        ({"vocab_size": 301}, r"suffix.*as 'logits' it has .* 300\], expected is .* 301\]"),
        ({"head_dim": 10**9}, r"prefix.*as 'past_key.0' it has .* 16\], expected is .* 1000000000\]"),
        ({"dtype": "float16"}, r"prefix.*as 'hidden' it has tensor\(float\) .*, expected is tensor\(float16\)"),
    ],
)
def test_sizes_that_are_not_the_stages_own_are_a_bundle_error(
    tiny_bundle: Path, sizes: dict[str, int | str], words: str
) -> None:
    entry = read_bundle(tiny_bundle).target
    with pytest.raises(BundleError, match=rf"{words}.*export it again"):
        OnnxTargetModel(tiny_bundle, replace(entry, shape=replace(entry.shape, **sizes)), TargetPlacement())


def test_stages_that_changed_places_are_a_bundle_error(tiny_bundle: Path) -> None:
    entry = read_bundle(tiny_bundle).target
    point, segment = entry.exits[0], entry.segments[-1]
    segments = (*entry.segments[:-1], replace(segment, file=point.file))
    swapped = replace(entry, segments=segments, exits=(replace(point, file=segment.file),))
    with pytest.raises(BundleError, match=r"exit2\.onnx is not the stage 'suffix'"):
        OnnxTargetModel(tiny_bundle, swapped, TargetPlacement())


def test_a_stage_that_cannot_be_opened_ends_an_export_with_an_error_of_ours(tmp_path: Path) -> None:
    unknown_operator(tmp_path / "prefix.onnx")
    with pytest.raises(ExportError, match=r"ONNX Runtime cannot open prefix\.onnx, just exported: .*NoSuchOperator"):
        open_stage(tmp_path / "prefix.onnx")
