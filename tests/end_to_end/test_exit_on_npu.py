"""The exits on an NPU, through the NPU plugin's wrapper on the CPU: same guesses, same text; a death is survived."""

from pathlib import Path

import numpy as np
import pytest

import mirrorsd.cli.commands.compile as compile_command
from mirrorsd import MirrorPipeline
from mirrorsd.cli.application import run
from mirrorsd.device_maps import ExitPlacement, TargetPlacement, load_device_map
from mirrorsd.devices.inventory import DeviceInventory, missing_devices
from mirrorsd.graphs.bundle_files import read_bundle
from mirrorsd.graphs.errors import ConfigError, DeviceError
from mirrorsd.machine.npu.conformance import exit_conformance
from mirrorsd.runtime.backends.onnxruntime.target import OnnxTargetModel
from mirrorsd.runtime.backends.openvino.exits import OpenVinoExits
from mirrorsd.runtime.ledger import ExitGuesses, Ledger

ON_NPU = ExitPlacement(device="NPU", emulated=True, precision="f32")


@pytest.fixture
def card(tmp_path: Path) -> Path:
    path = tmp_path / "exit-npu.toml"
    place = 'device = "NPU"\nemulated = true\nprecision = "f32"\n'
    path.write_text(f"[target]\ncores = [0]\n[exit]\n{place}", encoding="utf-8")
    return path


def heard(bundle: Path, exits: OpenVinoExits | None) -> list[ExitGuesses]:
    entry = read_bundle(bundle).target
    session = OnnxTargetModel(bundle, entry, TargetPlacement(), exits).new_session()
    tokens = np.arange(3, 40)
    session.prefill(tokens[:20], 0, ledger=Ledger())
    found: list[ExitGuesses] = []
    for start, size in ((20, 7), (22, 1)):
        session.run(tokens[start : start + size], start, with_logits=False, ledger=Ledger(), on_exit=found.append)
    return found


def test_the_exit_says_the_same_there(tiny_bundle: Path) -> None:
    entry = read_bundle(tiny_bundle).target
    exits = OpenVinoExits(tiny_bundle, entry, ON_NPU)
    assert not [problem for found in exit_conformance(exits, entry).values() for problem in found.problems]
    for there, here in zip(heard(tiny_bundle, exits), heard(tiny_bundle, None), strict=True):
        assert there.layer == here.layer
        assert there.ids.shape == here.ids.shape
        assert np.mean(there.ids[:, 0] == here.ids[:, 0]) == 1.0
        np.testing.assert_allclose(there.logprobs, here.logprobs, atol=1e-3)


def test_a_pipeline_with_its_exit_on_an_npu(tiny_bundle: Path, card: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = {"max_new_tokens": 40, "ignore_eos": True}
    speculation = {"pad_rows_to": 8, "root_source": "proxy"}
    with MirrorPipeline.load(tiny_bundle, device_map=str(card), speculation=speculation) as pipe:
        assert any("exits: openvino NPU (emulated on CPU)" in line for line in pipe.placement)
        plain = pipe.generate("Once upon a time", method="plain", **settings)
        assert pipe.generate("Once upon a time", method="mirror", **settings).token_ids == plain.token_ids

        def die(*_: object) -> None:
            raise DeviceError("the NPU is gone")

        monkeypatch.setattr(OpenVinoExits, "_run", die)
        # So small a target is often done before its exit is looked at; in one of many texts it is.
        with pytest.warns(RuntimeWarning, match="the NPU is gone"):
            results = [pipe.generate("Once upon a time", method="mirror", **settings) for _ in range(24)]
        assert all(result.token_ids == plain.token_ids for result in results)
        assert any("the NPU is gone" in warning for result in results for warning in result.stats.warnings)


def test_compile_checks_the_exit_too(
    tiny_bundle: Path, card: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(compile_command, "check_shapes", lambda *_: [])
    assert run(["compile", str(tiny_bundle), "--device-map", str(card)]) == 0
    assert "exit2.onnx, 32 rows: fine, compiled" in capsys.readouterr().out


def test_more_rows_than_it_takes(tiny_bundle: Path) -> None:
    exits = OpenVinoExits(tiny_bundle, read_bundle(tiny_bundle).target, ON_NPU)
    guesses = exits.guess(2, np.zeros((1, 40, 64), np.float32))
    with pytest.raises(DeviceError, match="takes up to 32 rows, not 40"):
        _ = guesses.ids


def test_cards_with_an_exit_elsewhere(card: Path) -> None:
    loaded = load_device_map(str(card))
    assert loaded.exit == ON_NPU
    bare = DeviceInventory(
        providers=("CPUExecutionProvider",), openvino_devices=("CPU",), num_cores=2, has_npu_plugin=False
    )
    assert missing_devices(loaded, bare) == ["the exit needs OpenVINO's NPU plugin; this installation has none"]
    with pytest.raises(ConfigError, match=r"exit.emulated is true with exit.device 'target'"):
        ExitPlacement(emulated=True)
