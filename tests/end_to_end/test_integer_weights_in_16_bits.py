"""Targets of int8 and int4 weights that compute in float16, as GPUs want them: exact, and as good as in float32."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from mirrorsd import MirrorPipeline
from mirrorsd.cli.application import run
from mirrorsd.device_maps import TargetPlacement
from mirrorsd.export import ExportOptions, export_pair
from mirrorsd.graphs.bundle_files import read_bundle
from mirrorsd.graphs.quality_bounds import quality_warnings
from mirrorsd.machine.doctor.row_invariance import largest_row_difference
from mirrorsd.runtime.backends.onnxruntime.target import OnnxTargetModel
from mirrorsd.runtime.ledger import Ledger

SMALL: dict[str, Any] = {"context": 256, "buckets": ((8, 8), (64, 1)), "capacities": (256,)}
ONLY_FLOAT16 = {onnx.TensorProto.FLOAT16, onnx.TensorProto.INT64, onnx.TensorProto.INT32}


@pytest.fixture(scope="module", params=[pytest.param("int8", marks=pytest.mark.long), "int4"])
def bundle(
    request: pytest.FixtureRequest, tiny_pair: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    path: Path = tmp_path_factory.mktemp("computes") / f"{request.param}.mirror"
    export_pair(*tiny_pair, path, ExportOptions(precision=request.param, compute="fp16", **SMALL))
    return path


@pytest.mark.slow
def test_all_that_is_not_an_integer_is_float16(bundle: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = read_bundle(bundle).target
    assert target.shape.dtype == "float16"
    for segment in target.segments:
        graph = onnx.load(bundle / segment.file, load_external_data=False).graph
        packed = [node for node in graph.node if node.op_type == "MatMulNBits"]
        types = {tensor.name: tensor.data_type for tensor in graph.initializer}
        assert packed
        assert {types[node.input[2]] for node in packed} == {onnx.TensorProto.FLOAT16}, "scales"
        ports = {port.type.tensor_type.elem_type for port in graph.input if "key" in port.name or "hidden" in port.name}
        assert ports == {onnx.TensorProto.FLOAT16}, "caches and hidden states"
    assert run(["inspect", str(bundle), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["target"]["shape"]["dtype"] == "float16"


@pytest.mark.long
def test_it_is_as_good_as_in_float32(bundle: Path, tiny_pair: tuple[Path, Path], tmp_path: Path) -> None:
    """The same weights: what 16 bits of arithmetic add is small against what rounding them has cost."""
    manifest = read_bundle(bundle)
    options = ExportOptions(precision=manifest.target.precision, **SMALL)
    in_float32 = export_pair(*tiny_pair, tmp_path / "float32.mirror", options)
    found, wanted = manifest.quality, in_float32.quality
    assert found is not None and wanted is not None
    assert len(quality_warnings(found)) == len(quality_warnings(wanted))
    assert found.mean_divergence < 1.02 * wanted.mean_divergence + 1e-4
    assert found.top1_agreement > wanted.top1_agreement - 0.01


@pytest.mark.slow
def test_every_method_writes_the_same_text(bundle: Path) -> None:
    """On the processor a row has the same bits in passes of any number of rows, as in float32."""
    with MirrorPipeline.load(bundle, device_map="cpu") as pipe:
        for sampling in ({}, {"temperature": 0.8, "top_p": 0.95, "seed": 3}):
            texts = {
                method: pipe.generate("Once upon a time", method=method, max_new_tokens=40, ignore_eos=True, **sampling)
                for method in ("plain", "serial", "mirror")
            }
            assert len({tuple(text.token_ids) for text in texts.values()}) == 1
    cpuinfo = Path("/proc/cpuinfo")
    if not cpuinfo.is_file() or "avx512_vnni" not in cpuinfo.read_text(encoding="utf-8"):
        pytest.skip("the same texts, but without avx512_vnni rows differ in their last bits (docs/limits.md)")
    target = OnnxTargetModel(bundle, read_bundle(bundle).target, pipe.device_map.target).new_session()
    assert largest_row_difference(target, num_rows=64, pass_sizes=(2, 3, 8, 13)) == 0.0


@pytest.mark.slow
def test_rows_of_a_tree_are_those_of_its_chains(bundle: Path) -> None:
    entry = read_bundle(bundle).target
    plain, tree = (
        OnnxTargetModel(bundle, entry, TargetPlacement(), takes_trees=takes).new_session() for takes in (False, True)
    )
    tokens, rows, parents = np.arange(3, 20), np.array([30, 31, 32, 40]), np.array([-1, 0, 1, 0])
    for session in (plain, tree):
        session.prefill(tokens, 0, ledger=Ledger())
    found = tree.logits(rows, len(tokens), parents)
    assert np.array_equal(found[:3], plain.logits(rows[:3], len(tokens)))
    alone = plain.logits(rows[[0, 3]], len(tokens))[-1]
    assert np.abs(found[3] - alone).max() < 0.05 * alone.std()
