"""The sample's draft guesses as well as its card says, and one that has lost its weights is seen."""

import shutil
from dataclasses import replace
from pathlib import Path

import openvino as ov
import pytest

from mirrorsd import MirrorPipeline
from mirrorsd.devices.openvino.core import new_core
from mirrorsd.export import ExportOptions, export_pair
from mirrorsd.export.verify import draft_accuracy
from mirrorsd.graphs.bundle_files import describe_file, read_bundle
from mirrorsd.graphs.names import MANIFEST_FILE
from mirrorsd.machine.doctor.draft_length import LEAST_KEPT, measure_draft

STORYTELLER = Path(__file__).resolve().parents[2] / "samples" / "storyteller"
ACCEPTED = 2.0
"""Tokens of a window that the storyteller's draft guesses on the texts of its export."""


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("samples") / "storyteller.mirror"
    sizes = {"context": 256, "buckets": ((8, 8), (64, 1)), "capacities": (256,)}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(draft_accuracy, "NUM_LENGTH_TEXTS", 3)  # half of what users' exports have
        export_pair(STORYTELLER / "target", STORYTELLER / "draft", output, ExportOptions(precision="fp32", **sizes))
    return output


@pytest.mark.slow
def test_the_draft_is_as_good_as_it_was(bundle: Path) -> None:
    found = read_bundle(bundle).accepted_length
    assert found is not None and found.accepted >= LEAST_KEPT * ACCEPTED
    with MirrorPipeline.load(bundle, device_map="cpu") as pipe:
        length = measure_draft(pipe)
    assert length.now is not None and length.is_fine, length.words


@pytest.mark.slow
def test_a_draft_without_its_weights_is_dead_and_texts_stay_right(bundle: Path, tmp_path: Path) -> None:
    """Every weight of the draft's layers is zero, and the manifest agrees with the files: only its guesses tell."""
    dead = tmp_path / "dead.mirror"
    shutil.copytree(bundle, dead)
    file = read_bundle(dead).draft.file
    model = new_core().read_model(dead / file)
    for node in model.get_ops():
        if node.get_type_name() == "Constant" and len(node.get_output_shape(0)) == 2 and node.data.dtype.kind == "f":
            node.output(0).replace(ov.opset15.constant(0 * node.data).output(0))
    ov.save_model(model, tmp_path / "draft.xml", compress_to_fp16=False)
    del model
    for suffix in (".xml", ".bin"):
        shutil.copy(tmp_path / f"draft{suffix}", (dead / file).with_suffix(suffix))
    manifest = read_bundle(bundle)
    described = {name: describe_file(dead / name) for name in manifest.files}
    (dead / MANIFEST_FILE).write_text(replace(manifest, files=described).to_json(), encoding="utf-8")
    prompt = {"prompt": "Once upon a time", "max_new_tokens": 24}
    with MirrorPipeline.load(bundle, device_map="cpu") as whole, MirrorPipeline.load(dead, device_map="cpu") as pipe:
        assert pipe.generate(**prompt, method="serial").token_ids == whole.generate(**prompt, method="plain").token_ids
        length = measure_draft(pipe)
    assert not length.is_fine and "below 0.8" in length.words
