"""Heads of every kind with integer weights, exported and run beside a real target, whose text each gives."""

from pathlib import Path
from typing import Any

import onnx_ir as ir
import pytest
from random_heads import OTHERS, save_head

from mirrorsd import MirrorPipeline
from mirrorsd.export import ExportOptions, export_pair
from mirrorsd.graphs.bundle_files import read_bundle

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
SAMPLED = {"temperature": 0.8, "seed": 3}


@pytest.fixture(scope="module")
def bundle(tiny_pair: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("every_head")
    heads = tuple(str(save_head(config, folder / kind)) for kind, config in OTHERS.items())
    sizes: dict[str, Any] = {"context": 512, "buckets": ((8, 8), (16, 16), (64, 1)), "capacities": (256, 512)}
    export_pair(*tiny_pair, folder / "all.mirror", ExportOptions(precision="int4", heads=heads, **sizes))
    return folder / "all.mirror"


def test_every_guess_is_pytorchs(bundle: Path) -> None:
    manifest = read_bundle(bundle)
    found = {result.stage: result for result in manifest.verify}
    for kind in OTHERS:
        assert found[f"head-{kind}"].max_relative_error < 1e-3
        assert found[f"head-{kind}"].top1_agreement > 0.99


def offsets_of(bundle: Path, file: str) -> set[int]:
    """Where the large weights of a stage begin in the bundle's weights file."""
    initializers = ir.load(bundle / file).graph.initializers.values()
    return {value.const_value.offset for value in initializers if isinstance(value.const_value, ir.ExternalTensor)}


def test_the_layers_of_streams_are_the_targets_own_bytes(bundle: Path) -> None:
    """Layers have 4 bits and the LM head 8, so a head that packed them like the LM head would store them again."""
    manifest = read_bundle(bundle)
    of_target = {start for segment in manifest.target.segments for start in offsets_of(bundle, segment.file)}
    shared = offsets_of(bundle, "target/head-streaming.onnx") & of_target
    assert len(shared) >= 3 * 4, "of three layers: attention's joined projections and its output; gate and up; down"
    assert len(offsets_of(bundle, "target/head-block.onnx") & of_target) < 4


@pytest.mark.parametrize("sampling", [{}, SAMPLED], ids=["greedy", "sampled"])
def test_texts_are_those_of_plain_decoding(bundle: Path, sampling: dict[str, Any]) -> None:
    prompts = ("Once upon a time", "x", "Every morning the fox went to the river and asked. " * 4)
    limits = {"max_new_tokens": 40, "ignore_eos": True}
    with MirrorPipeline.load(bundle, device_map="cpu", speculation={"prefill_rows": 24}) as pipe:
        for kind in OTHERS:
            steps = 0
            for prompt in prompts:
                expected = pipe.generate(prompt, method="plain", **limits, **sampling).token_ids
                result = pipe.generate(prompt, method=kind, **limits, **sampling)
                assert result.token_ids == expected, kind
                steps += result.stats.steps
            assert not sampling or steps < 40 * len(prompts), "some guess of each is right"
