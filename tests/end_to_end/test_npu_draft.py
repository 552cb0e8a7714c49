"""The draft cut for an NPU: what the three parts compute together, what is compiled ahead, and when that is used."""

import json
import logging
import sys
from collections.abc import Callable
from pathlib import Path
from shutil import copytree

import numpy as np
import openvino as ov
import pytest

from mirrorsd.cli.application import run
from mirrorsd.device_maps import DraftPlacement, ExitPlacement
from mirrorsd.devices.draft_memory import RowBlock, TipGuesses
from mirrorsd.devices.openvino.core import new_core, on_a_thread_that_ends
from mirrorsd.devices.openvino.draft_shapes import static_shapes
from mirrorsd.devices.openvino.npu_blobs import BundleBlobs
from mirrorsd.devices.openvino.npu_graph import cut_for_npu
from mirrorsd.devices.slot_draft import SlotDraft
from mirrorsd.export.compression_plan import DraftCompression
from mirrorsd.export.recompress import recompress_bundle
from mirrorsd.graphs.bundle_files import read_bundle
from mirrorsd.machine.doctor.draft_check import best_tokens
from mirrorsd.machine.npu.ahead import device_graph
from mirrorsd.machine.npu.conformance import check_conformance
from mirrorsd.machine.npu.report import read_reports
from mirrorsd.runtime.backends.openvino.draft import OpenVinoDraftModel
from mirrorsd.runtime.backends.openvino.exits import OpenVinoExits
from mirrorsd.runtime.sampling.noise import gumbel_row

ON_CPU = DraftPlacement(device="CPU", precision="f32")
ON_NPU = DraftPlacement(device="NPU", emulated=True, precision="f32")
IN_F16 = DraftPlacement(device="NPU", emulated=True, precision="f16")
TOKENS = [5 + 7 * number % 250 for number in range(40)]


def session(bundle: Path, placement: DraftPlacement) -> SlotDraft:
    return OpenVinoDraftModel(bundle, read_bundle(bundle).draft, placement).new_session()


def tree_after_text(draft: SlotDraft) -> TipGuesses:
    """Guesses of three branches behind 20 cached tokens, one of them in slots of its own."""
    draft.run([RowBlock(TOKENS[:20], 0, 0)], [19])
    draft.keep_rows(range(20), range(20))
    draft.run([RowBlock(TOKENS[20:22], 20, 20)], [1])
    draft.keep_rows(range(2), range(30, 32))
    blocks = [RowBlock(TOKENS[22:24], 22, 20, (30, 31)), RowBlock(TOKENS[24:27], 20, 20), RowBlock([9], 21, 19)]
    return draft.run(blocks, [1, 3, 4, 5])


def test_the_three_parts_say_what_the_whole_draft_says(tiny_bundle: Path) -> None:
    whole, cut = (tree_after_text(session(tiny_bundle, placement)) for placement in (ON_CPU, ON_NPU))
    np.testing.assert_array_equal(cut.ids[..., 0], whole.ids[..., 0])
    np.testing.assert_allclose(cut.logprobs, whole.logprobs, atol=2e-4)


def test_noise_is_heard_in_the_part_behind_the_device(tiny_bundle: Path) -> None:
    found = []
    for placement in (ON_CPU, ON_NPU):
        draft = session(tiny_bundle, placement)
        silent = tree_after_text(draft).ids[..., 0].copy()
        draft.use_noise(lambda position, size: gumbel_row(7, position, size).astype(np.float32))
        noisy = tree_after_text(draft).ids[..., 0].copy()
        assert (noisy != silent).any()
        found.append(noisy)
    np.testing.assert_array_equal(*found)


def test_in_f16_the_draft_chooses_as_in_f32(tiny_bundle: Path) -> None:
    bucket = read_bundle(tiny_bundle).draft.buckets[0]
    exact, halved = (best_tokens(session(tiny_bundle, place), bucket, TOKENS) for place in (ON_CPU, IN_F16))
    assert (exact == halved).mean() >= 0.98


def test_the_device_gets_no_table_no_noise_and_16_bits(tiny_bundle: Path) -> None:
    entry = read_bundle(tiny_bundle).draft
    core = device_graph(tiny_bundle, entry, (8, 8, 256))
    kinds = {operation.get_type_name() for operation in core.get_ops()}
    assert not kinds & {"TopK", "GatherElements", "ShapeOf", "Range", "Select", "Exp", "Log"}
    tables = [op for op in core.get_ops() if op.get_type_name() == "Gather" and op.get_output_shape(0)[-1] > 1]
    assert not [op for op in tables if op.input_value(0).get_node().get_type_name() == "Constant"]
    assert {port.get_element_type() for port in (*core.inputs, *core.outputs)} == {ov.Type.f16}
    names = {port.get_any_name() for port in core.inputs}
    assert not names & {"ids", "positions", "mask", "tip_rows", "noise", "noise_rows"}


def test_what_3720_refuses_is_found_without_its_compiler(tiny_bundle: Path) -> None:
    entry = read_bundle(tiny_bundle).draft
    whole = new_core().read_model(tiny_bundle / entry.file)
    whole.reshape(static_shapes(entry, 8, 8, 256))
    assert any("refused by the compiler for 3720" in problem for problem in check_conformance(whole).problems)
    assert check_conformance(cut_for_npu(whole, entry.shape, ov.Type.f16).core).problems == ()


Fake = Callable[[str], str]


@pytest.fixture
def compiler(tmp_path: Path) -> Fake:
    """A command that writes blobs of 1,000 bytes and refuses one platform."""

    def make(refused: str) -> str:
        script = tmp_path / "compiler.py"
        script.write_text(
            "import sys\nmodel, blob, platform, *_ = sys.argv[1:]\n"
            f"print('OpenVINO', {ov.get_version()!r})\n"
            f"if platform == {refused!r}: sys.exit('[ERROR] 1 [x] it does not fit')\n"
            "open(blob, 'wb').write(b'b' * 1000)\n"
            "print('Estimated inference latency: 250.5 us in dpu frequency 1850')\n",
            encoding="utf-8",
        )
        return f"{sys.executable} {script}"

    return make


def compiled(bundle: Path, tmp_path: Path, *words: str) -> tuple[Path, int]:
    copy = tmp_path / "copy.mirror"
    if not copy.exists():
        copytree(bundle, copy)
    return copy, run(["compile", str(copy), *words])


def test_blobs_and_reports_are_part_of_the_bundle(
    tiny_bundle: Path, tmp_path: Path, compiler: Fake, capsys: pytest.CaptureFixture[str]
) -> None:
    bundle, status = compiled(
        tiny_bundle, tmp_path, "--npu", "lunar-lake,5010", "--npu-compiler", compiler("3720"), "--json"
    )
    spoken = capsys.readouterr()
    assert status == 0
    assert "compiles 6 shapes for 4000, 5010, and writes blobs of at most" in spoken.err
    document = json.loads(spoken.out)
    assert document["note"] == "Estimated by the vendor's compiler, not measured"
    assert {shape["shape"] for shape in document["platforms"]["4000"]} == {
        f"{rows}x{tips}x{size}" for rows, tips in ((8, 8), (16, 16), (64, 1)) for size in (256, 512)
    }
    manifest = read_bundle(bundle)
    assert "draft/npu/4000/8x8x256.blob" in manifest.files
    kept = [name for name in manifest.files if name.startswith("draft/npu/4000/") and name.endswith(".blob")]
    assert sum(manifest.files[name].bytes for name in kept) <= 3 * manifest.files["draft/draft.bin"].bytes
    assert run(["inspect", str(bundle)]) == 0
    shown = capsys.readouterr().out
    assert "NPU 4000. Estimated by the vendor's compiler, not measured" in shown
    assert "250" in shown
    assert run(["inspect", str(bundle), "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["npu"]["5010"]) == 6


def test_a_refusing_platform_fails_with_the_compilers_words(
    tiny_bundle: Path, tmp_path: Path, compiler: Fake, capsys: pytest.CaptureFixture[str]
) -> None:
    bundle, status = compiled(tiny_bundle, tmp_path, "--npu", "3720", "--npu-compiler", compiler("3720"))
    assert status == 1
    assert "8x8x256: refused: it does not fit" in capsys.readouterr().out
    assert [report.is_compiled for report in read_reports(bundle)["3720"]] == [False] * 6


def test_exits_are_compiled_where_a_card_has_them_on_an_npu(
    tiny_bundle: Path, tmp_path: Path, compiler: Fake, capsys: pytest.CaptureFixture[str]
) -> None:
    card = tmp_path / "exit.toml"
    card.write_text('[exit]\ndevice = "NPU"\n', encoding="utf-8")
    words = ("--npu", "4000", "--npu-compiler", compiler("-"), "--device-map", str(card), "--json")
    _, status = compiled(tiny_bundle, tmp_path, *words)
    assert status == 0
    output = capsys.readouterr()
    assert "and 3 times an exit's for the exits" in output.err
    shapes = [shape["shape"] for shape in json.loads(output.out)["platforms"]["4000"]]
    assert [shape for shape in shapes if shape.startswith("exit")] == [f"exit2-{rows}" for rows in (1, 8, 16, 32)]


class NpuHere(ov.Core):
    """A core that says that an NPU of platform 4000 is present."""

    def get_property(self, device: str, name: str) -> object:
        return "4000" if name == "DEVICE_ARCHITECTURE" else super().get_property(device, name)


def test_blobs_are_used_where_device_and_versions_fit(
    tiny_bundle: Path, tmp_path: Path, compiler: Fake, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    bundle, _ = compiled(tiny_bundle, tmp_path, "--npu", "4000", "--npu-compiler", compiler("-"))
    blob = BundleBlobs(bundle, NpuHere()).read("8x8x256")
    assert blob is not None
    assert blob.data.tobytes() == b"b" * 1000
    assert BundleBlobs(bundle, NpuHere()).read("9x9x256") is None
    assert BundleBlobs(bundle, new_core()).read("8x8x256") is None
    assert not caplog.records
    monkeypatch.setattr(ov, "get_version", lambda: "2030.1")
    with caplog.at_level(logging.WARNING):
        assert BundleBlobs(bundle, NpuHere()).read("8x8x256") is None
    assert "here is 2030.1; compiling again" in caplog.text


def test_an_exit_compiled_ahead_is_not_compiled_again(
    tiny_bundle: Path, tmp_path: Path, compiler: Fake, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    card = tmp_path / "exit.toml"
    card.write_text('[exit]\ndevice = "NPU"\n', encoding="utf-8")
    words = ("--npu", "4000", "--npu-compiler", compiler("-"), "--device-map", str(card))
    bundle, _ = compiled(tiny_bundle, tmp_path, *words)
    assert {"draft/npu/4000/exit2-1.blob", "draft/npu/4000/exit2-8.blob"} <= set(read_bundle(bundle).files)
    done: list[str] = []

    class Npu(NpuHere):
        """Takes blobs back as long as they are whole; what it computes is the processor's."""

        def import_model(self, blob: ov.Tensor, device: str, options: object) -> ov.CompiledModel:
            done.append(f"imported {blob.get_size()} bytes")
            if "damaged" in done:
                raise RuntimeError("the blob is damaged")
            return exits.static_model_on_processor(8)

        def compile_model(self, model: ov.Model, device: str, options: object) -> ov.CompiledModel:
            done.append(f"compiled for {device}")
            return super().compile_model(model, "CPU")

    class Exits(OpenVinoExits):
        def static_model_on_processor(self, rows: int) -> ov.CompiledModel:
            return on_a_thread_that_ends(lambda: ov.compile_model(self.static_model(2, rows), "CPU"))

    monkeypatch.setattr("mirrorsd.runtime.backends.openvino.exits.ov.Core", Npu)
    exits = Exits(bundle, read_bundle(bundle).target, ExitPlacement(device="NPU"))
    hidden = np.ones((1, 5, 64), np.float32)
    found = exits.guess(2, hidden).ids
    assert done == ["imported 1000 bytes"]
    done[:] = ["damaged"]
    with caplog.at_level(logging.WARNING):
        again = Exits(bundle, read_bundle(bundle).target, ExitPlacement(device="NPU")).guess(2, hidden).ids
    assert done == ["damaged", "imported 1000 bytes", "compiled for NPU"]
    assert "NPU does not take an exit's (the blob is damaged); compiling again" in caplog.text
    np.testing.assert_array_equal(found, again)


def test_a_compressed_draft_leaves_what_was_compiled_of_the_old_one_behind(
    tiny_bundle: Path, tmp_path: Path, compiler: Fake
) -> None:
    bundle, _ = compiled(tiny_bundle, tmp_path, "--npu", "4000", "--npu-compiler", compiler("-"))
    assert (bundle / "draft" / "npu").exists()
    recompress_bundle(bundle, DraftCompression(weights="int8", allows_loss=True))
    assert not [name for name in read_bundle(bundle).files if name.startswith("draft/npu/")]
    assert not (bundle / "draft" / "npu").exists()
    core = device_graph(bundle, read_bundle(bundle).draft, (8, 8, 256))
    heads = [
        node for node in core.get_ops() if node.get_type_name() == "MatMul" and node.get_output_shape(0)[-1] == 300
    ]
    kinds = {node.get_element_type() for node in _behind(heads[-1].input_value(1).get_node())}
    assert ov.Type.i8 in kinds


def _behind(node: ov.Node) -> list[ov.Node]:
    sources = [node.input_value(i).get_node() for i in range(node.get_input_size())]
    return [node, *(found for source in sources for found in _behind(source))]


def test_an_unknown_npu_is_refused_before_anything_is_written(
    tiny_bundle: Path, tmp_path: Path, compiler: Fake, capsys: pytest.CaptureFixture[str]
) -> None:
    bundle, status = compiled(tiny_bundle, tmp_path, "--npu", "moon-lake", "--npu-compiler", compiler("-"))
    assert status != 0
    assert "'moon-lake', which is no NPU that mirrorsd knows" in capsys.readouterr().err
    assert not (bundle / "draft" / "npu").exists()
