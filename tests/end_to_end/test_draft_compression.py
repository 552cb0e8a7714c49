"""Compressing the draft of a real bundle: what is written, what is measured, and what is refused."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import openvino as ov
import pytest

import mirrorsd.cli.commands.compile as compile_command
from mirrorsd.cli.application import run
from mirrorsd.devices.openvino.core import new_core
from mirrorsd.export import draft_compression, recompress
from mirrorsd.export.compression_plan import DraftCompression
from mirrorsd.export.draft_compression import compress_weights
from mirrorsd.export.verify.draft import DraftRun, Tree
from mirrorsd.export.verify.draft_accuracy import TEXT_IDS, DraftTexts, compare_drafts, draft_inputs, share_interval
from mirrorsd.graphs.bundle_files import read_bundle
from mirrorsd.graphs.errors import ConfigError, ExportError
from mirrorsd.graphs.manifest import DraftAccuracy, Manifest
from mirrorsd.graphs.quality_bounds import warnings_of

TEXTS = DraftTexts((tuple(range(3, 75)),), tuple(tuple((5 * i + j) % 290 + 3 for i in range(30)) for j in range(2)))


@pytest.fixture
def few_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The target writes nothing: what counts here is what happens to the bundle."""
    monkeypatch.setattr(recompress, "write_texts", lambda *_, **__: TEXTS)


def element_types(model: ov.Model) -> dict[str, int]:
    constants = [node for node in model.get_ops() if node.get_type_name() == "Constant"]
    matrices = [node for node in constants if len([size for size in node.get_output_shape(0) if size > 8]) >= 2]
    found: dict[str, int] = {}
    for node in matrices:
        name = node.get_element_type().get_type_name()
        found[name] = found.get(name, 0) + 1
    return found


@pytest.mark.usefixtures("few_texts")
def test_compile_compresses_once_and_says_what_it_costs(
    tiny_bundle: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = tmp_path / "tiny.mirror"
    shutil.copytree(tiny_bundle, copy)
    whole = compile_command.read_bundle

    def first_shape(bundle: Path) -> Manifest:
        manifest = whole(bundle)
        few = replace(manifest.draft, buckets=manifest.draft.buckets[:1], capacities=manifest.draft.capacities[:1])
        return replace(manifest, draft=few)

    monkeypatch.setattr(compile_command, "read_bundle", first_shape)
    command = ["compile", str(copy), "--device-map", "npu-emulated", "--weights", "int8", "--json"]
    assert run(command) == 0
    accuracy = json.loads(capsys.readouterr().out)["draft_accuracy"]
    before, after = read_bundle(tiny_bundle), read_bundle(copy)
    assert (before.draft.precision, after.draft.precision) == ("fp32", "int8")
    assert after.draft_accuracy is not None
    assert accuracy["scheme"] == after.draft_accuracy.scheme == "int8"
    assert len(after.draft_accuracy.agreement) == 1 + after.draft.shape.num_streams
    assert after.draft_accuracy.num_windows == 2 * (30 - 24 - 1)
    assert after.files["draft/draft.bin"].bytes < 0.6 * before.files["draft/draft.bin"].bytes
    assert after.files["target/weights.bin"] == before.files["target/weights.bin"]
    types = element_types(new_core().read_model(copy / after.draft.file))
    # Four products a layer (of joined projections) and the tied embedding; not the tables of cosines and sines.
    assert types["i8"] == 2 * 4 + 1
    assert types["f16"] == 2
    assert "f32" not in types
    assert run(command) == 2
    assert "the draft's weights are int8 already" in capsys.readouterr().err


@pytest.mark.usefixtures("few_texts")
def test_too_much_loss_is_refused_unless_it_is_allowed(
    tiny_bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = tmp_path / "tiny.mirror"
    shutil.copytree(tiny_bundle, copy)
    poor = DraftAccuracy(
        scheme="int8",
        agreement=(0.9,),
        accepted_before=2.0,
        accepted_after=1.9,
        num_windows=9,
        num_positions=9,
        share_interval=(0.94, 0.96),
    )
    monkeypatch.setattr(draft_compression, "compare_drafts", lambda *_: poor)
    asked = DraftCompression(weights="int8")
    refusal = r"int8 weights keep 95\.0% \(94% to 96%\) of the draft's accepted length .*at least 97%.*--allow-draft"
    with pytest.raises(ExportError, match=refusal):
        recompress.recompress_bundle(copy, asked)
    assert read_bundle(copy).draft.precision == "fp32"
    manifest = recompress.recompress_bundle(copy, replace(asked, allows_loss=True))
    assert read_bundle(copy).draft_accuracy == manifest.draft_accuracy == poor
    assert "texts stay the same, but come more slowly" in warnings_of(manifest)[-1]


@pytest.mark.usefixtures("few_texts")
def test_counts_that_are_too_small_judge_nothing(
    tiny_bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two of three tokens in twelve texts may be chance: the draft is kept, and the warning says so."""
    copy = tmp_path / "tiny.mirror"
    shutil.copytree(tiny_bundle, copy)
    before, after = [1, 1, 1] + [0] * 9, [1, 1] + [0] * 10
    interval = share_interval(np.array(before), np.array(after))
    few = DraftAccuracy(
        scheme="int8",
        agreement=(0.9,),
        accepted_before=0.02,
        accepted_after=0.01,
        num_windows=150,
        num_positions=9,
        share_interval=interval,
    )
    monkeypatch.setattr(draft_compression, "compare_drafts", lambda *_: few)
    manifest = recompress.recompress_bundle(copy, DraftCompression(weights="int8"))
    assert manifest.draft.precision == "int8"
    assert "too few to tell" in warnings_of(manifest)[-1]


def test_windows_are_judged_by_what_they_would_have_accepted(tiny_bundle: Path) -> None:
    """Of texts that the draft itself writes, each of two passes finds a token; its random streams find none."""
    draft = read_bundle(tiny_bundle).draft
    model = new_core().read_model(tiny_bundle / draft.file)
    run = DraftRun(model, draft.shape, 72)
    text = list(range(3, 27))
    while len(text) < 40:
        ids, _ = run.forward(Tree(tuple(text), tuple(range(-1, len(text) - 1))), 0, np.arange(len(text)))
        text.append(int(ids[-1, 0, 0]))
    other = [*text[:24], *((token + 1) % 300 for token in text[24:])]
    own = compare_drafts(model, model, draft, DraftTexts((), (tuple(text),)), "int8")
    wrong = compare_drafts(model, model, draft, DraftTexts((), (tuple(other),)), "int8")
    assert own.num_windows == 15, "behind 24 .. 38 known tokens"
    assert own.accepted_before == own.accepted_after == 2.0
    assert wrong.accepted_before < 1.0
    assert own.share_interval == (1.0, 1.0)


@pytest.mark.parametrize(("group_size", "is_data_aware"), [(-1, False), (64, True)])
def test_int4_by_group_by_row_and_with_data(tiny_bundle: Path, group_size: int, is_data_aware: bool) -> None:
    draft = read_bundle(tiny_bundle).draft
    core = new_core()
    model = core.read_model(tiny_bundle / draft.file)
    asked = DraftCompression(weights="int4", group_size=group_size, is_data_aware=is_data_aware)
    run = DraftRun(model, draft.shape, TEXT_IDS)
    samples = list(draft_inputs(run, TEXTS.for_calibration)) if is_data_aware else None
    compressed = compress_weights(core.read_model(tiny_bundle / draft.file), asked, samples)
    shapes = {
        tuple(node.get_output_shape(0))[2:]
        for node in compressed.get_ops()
        if node.get_type_name() == "Constant" and node.get_element_type().get_type_name() == "i4"
    }
    # Rows are 64 and 96 long: 64 does not divide 96, those rows get one scale.
    assert shapes == ({()} if group_size == -1 else {(64,), ()})
    if is_data_aware:
        accuracy = compare_drafts(model, compressed, draft, TEXTS, asked.scheme)
        # A random draft is a hard case: chance would be one in 300.
        assert 1.0 > accuracy.agreement[0] > 0.2


def test_calibration_feeds_what_the_draft_is_fed(tiny_bundle: Path) -> None:
    draft = read_bundle(tiny_bundle).draft
    first, second, *_ = draft_inputs(DraftRun(tiny_bundle / draft.file, draft.shape, TEXT_IDS), TEXTS.for_calibration)
    assert first["ids"][0].tolist() == list(range(3, 27))
    assert second["ids"][0, 0] == 27
    assert (first["mask"][0, 0, 0, :72] < -1).all()
    assert (second["mask"][0, 0, :, :24] == 0).all()
    assert np.abs(second["past_key.0"][:, :, :24]).max() > 0
    assert not second["past_key.0"][:, :, 24:].any()


def test_bad_wishes_are_named() -> None:
    with pytest.raises(ConfigError, match=r"draft weights are 'int2'; allowed: int8, int4"):
        DraftCompression(weights="int2")
    assert DraftCompression(weights="int4", group_size=-1, is_data_aware=True).scheme == "int4-g-1-data"
