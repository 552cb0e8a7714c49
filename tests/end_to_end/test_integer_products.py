"""A bundle with products of integers: exported, checked, and every method's text plain decoding's own."""

from pathlib import Path
from typing import Any

import pytest
from random_heads import OTHERS, save_head

from mirrorsd import DeviceError, MirrorPipeline
from mirrorsd.export import ExportOptions, export_pair
from mirrorsd.graphs.bundle_files import read_bundle
from mirrorsd.runtime.backends.onnxruntime import target

SIZES: dict[str, Any] = {"context": 512, "buckets": ((8, 8), (64, 1)), "capacities": (256,)}


@pytest.fixture(scope="module")
def bundle(tiny_pair: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("integer")
    heads = tuple(str(save_head(config, folder / kind)) for kind, config in OTHERS.items())
    export_pair(
        *tiny_pair, folder / "tiny.mirror", ExportOptions(precision="int8", products="integer", heads=heads, **SIZES)
    )
    return folder / "tiny.mirror"


def test_the_manifest_says_so_and_the_export_was_checked(bundle: Path) -> None:
    manifest = read_bundle(bundle)
    assert manifest.target.storage is not None and manifest.target.storage.products == "integer"
    assert manifest.target.computes_in == "integers" and manifest.target.row_group == 1
    assert all(result.max_relative_error < 1e-3 for result in manifest.verify)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_every_method_writes_the_same_text(bundle: Path, temperature: float) -> None:
    """Heads, too, whose guesses read one LM head several times over."""
    with MirrorPipeline.load(bundle, device_map="cpu") as pipe:
        texts = {
            method: pipe.generate(
                "Once upon a time", max_new_tokens=48, method=method, temperature=temperature, seed=3
            ).token_ids
            for method in ("plain", "serial", "mirror", "lookup", "auto", *OTHERS)
        }
    assert len({tuple(ids) for ids in texts.values()}) == 1


def test_another_device_is_refused_with_what_to_do(bundle: Path) -> None:
    with pytest.raises(DeviceError, match="--products blocks"):
        MirrorPipeline.load(bundle, device_map="openvino-cpu")


def test_a_processor_that_cuts_sums_off_is_refused(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(target, "integers_are_exact", lambda placement: False)
    with pytest.raises(DeviceError, match="16 bits"):
        MirrorPipeline.load(bundle, device_map="cpu")
