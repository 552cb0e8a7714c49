"""Everything a user can hand over that is not what it should be: the message, the exit status, nothing written."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from mirrorsd import ConfigError, DeviceError, GenerationError, MirrorPipeline
from mirrorsd.cli.application import run

Pair = tuple[Path, Path]


def export(pair: Pair, output: Path) -> int:
    return run(["export", str(pair[0]), "--draft", str(pair[1]), "-o", str(output)])


@pytest.fixture
def own_pair(tiny_pair: Pair, tmp_path: Path) -> Pair:
    """A copy of the tiny pair, to be damaged."""
    for folder in tiny_pair:
        shutil.copytree(folder, tmp_path / "pair" / folder.name)
    return tmp_path / "pair" / tiny_pair[0].name, tmp_path / "pair" / tiny_pair[1].name


def test_folder_without_a_model(tiny_pair: Pair, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    empty, output = tmp_path / "empty", tmp_path / "out.mirror"
    empty.mkdir()
    assert export((empty, tiny_pair[1]), output) == 3
    assert "config.json" in capsys.readouterr().err
    assert sorted(tmp_path.iterdir()) == [empty]


def test_mismatching_tokenizers(own_pair: Pair, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = own_pair[1] / "tokenizer.json"
    path.write_text(path.read_text(encoding="utf-8").replace("<|user|>", "<|human|>"), encoding="utf-8")
    assert export(own_pair, tmp_path / "out.mirror") == 3
    assert "do not fit together" in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["pair"]


def test_truncated_weights(own_pair: Pair, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = own_pair[0] / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1000])
    assert export(own_pair, tmp_path / "out.mirror") == 3
    assert "model.safetensors" in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["pair"]


def test_family_that_is_not_supported(own_pair: Pair, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = own_pair[0] / "config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps(config | {"model_type": "mamba"}), encoding="utf-8")
    assert export(own_pair, tmp_path / "out.mirror") == 3
    assert "mamba" in capsys.readouterr().err


def test_prompt_that_does_not_fit_is_refused_before_loading(
    tiny_bundle: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mirrorsd.runtime.MirrorPipeline.load", None)
    assert run(["generate", str(tiny_bundle), "once upon " * 400, "--device-map", "cpu"]) == 2
    assert "512" in capsys.readouterr().err


def test_empty_prompt(tiny_bundle: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["generate", str(tiny_bundle), "", "--device-map", "cpu"]) == 2
    assert "The prompt is empty" in capsys.readouterr().err


def test_speed_option_out_of_range(tiny_bundle: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["generate", str(tiny_bundle), "Once", "--device-map", "cpu", "-S", "gamma=0"]) == 2
    assert "gamma is 0; allowed: 1 to" in capsys.readouterr().err


def test_damaged_bundle(tiny_bundle: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bundle = tmp_path / "copy.mirror"
    shutil.copytree(tiny_bundle, bundle)
    weights = bundle / "target" / "weights.bin"
    weights.write_bytes(weights.read_bytes()[:-1])
    assert run(["generate", str(bundle), "Once", "--device-map", "cpu"]) == 3
    assert "truncated or replaced" in capsys.readouterr().err


def test_a_calibration_text_that_is_none_is_refused_first(
    own_pair: Pair, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (own_pair[0] / "calibration.txt").write_bytes(b"caf\xe9")
    monkeypatch.setattr("mirrorsd.export.pair.copy_tokenizer", None)
    assert export(own_pair, tmp_path / "out.mirror") == 3
    assert "calibration.txt is not UTF-8 text" in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["pair"]


def test_arguments_of_another_kind_are_errors_of_ours(tiny_bundle: Path) -> None:
    with pytest.raises(ConfigError, match="device_map is 5"):
        MirrorPipeline.load(tiny_bundle, device_map=5)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"pad_rows_to is 1000000; the bundle's context is \d+"):
        MirrorPipeline.load(tiny_bundle, device_map="cpu", speculation={"pad_rows_to": 1_000_000})
    with MirrorPipeline.load(tiny_bundle, device_map="cpu") as pipe, pipe.session() as session:
        with pytest.raises(GenerationError, match="of its own pipeline only"):
            session.follow(pipe)  # type: ignore[arg-type]
        with pytest.raises(DeviceError, match="1000000000 seats may take"):
            pipe.seats(10**9)
        with pytest.raises(ConfigError, match="has half of a character"):
            session.generate("x", regex="\ud800")
        deep: list[object] = []
        for _ in range(3000):
            deep = [deep]
        with pytest.raises(ConfigError, match=r"json_schema (is a|cannot be taken: recursion)"):
            session.generate("x", json_schema={"enum": deep})
        two = session.generate_several(np.int64(2), "x", max_new_tokens=2)  # type: ignore[arg-type]
        assert len(two) == 2
        pipe.seats(np.int64(1)).close()  # type: ignore[arg-type]
