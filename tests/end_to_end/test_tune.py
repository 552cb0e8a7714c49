"""`mirrorsd tune` on real sessions: what it finds is kept, used, and thrown away when it no longer fits."""

import json
import shutil
from pathlib import Path

import pytest

from mirrorsd import MirrorPipeline
from mirrorsd.cli.application import run
from mirrorsd.graphs.errors import ConfigError
from mirrorsd.runtime.tuned import Tuned, fingerprint


@pytest.fixture
def own_bundle(tiny_bundle: Path, tmp_path: Path) -> Path:
    shutil.copytree(tiny_bundle, tmp_path / "own.mirror")
    return tmp_path / "own.mirror"


def tuned_for(bundle: Path, **changes: object) -> Tuned:
    values = {
        "card": "cpu",
        "fingerprint": fingerprint(bundle),
        "speculation": {"gamma": 3, "roots": 2},
        "predicted_step_ms": 1.0,
        "measured_step_ms": 1.1,
        "tokens_per_second": {"mirror": 100.0, "serial": 95.0, "plain": 90.0},
    }
    return Tuned(**{**values, **changes})


@pytest.mark.slow
def test_tune_measures_chooses_and_is_used(own_bundle: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["tune", str(own_bundle), "--device-map", "cpu", "--max-new-tokens", "12", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    best = report["contests"][0]
    assert best["tokens_per_second"] == max(row["tokens_per_second"] for row in report["contests"])
    assert report["parts"]["target"]["8"].keys() == {"prefix", "exit", "suffix"}
    with MirrorPipeline.load(own_bundle, device_map="cpu") as pipe:
        assert pipe.speculation.gamma == best["speculation"]["gamma"]
        assert "speculation: tuned on this machine" in pipe.placement
        assert pipe.engine.root_scores.to_dict() == report["root_scores"]
        assert "both:2:sampled" in pipe.engine.root_scores.fitted
        assert pipe.engine.book.cheapest() == max(report["tokens_per_second"], key=report["tokens_per_second"].get)


def test_what_was_tuned_elsewhere_is_not_used(own_bundle: Path) -> None:
    tuned_for(own_bundle).write(own_bundle)
    assert Tuned.read(own_bundle, "cpu") is not None
    assert Tuned.read(own_bundle, "npu-emulated") is None
    tuned_for(own_bundle, fingerprint="another machine").write(own_bundle)
    assert Tuned.read(own_bundle, "cpu") is None


def test_explicit_settings_win_over_tuned_ones(own_bundle: Path) -> None:
    tuned_for(own_bundle).write(own_bundle)
    with MirrorPipeline.load(own_bundle, device_map="cpu", speculation={"gamma": 5}) as pipe:
        assert (pipe.speculation.gamma, pipe.speculation.roots) == (5, 2)


@pytest.mark.parametrize("content", ["{", None])
def test_a_damaged_file_is_named(own_bundle: Path, content: str | None) -> None:
    path = tuned_for(own_bundle).write(own_bundle)
    other_scores = json.loads(path.read_text(encoding="utf-8")) | {"root_scores": {"both:3": [[1.0], [1.0], [1.0]]}}
    path.write_text(content or json.dumps(other_scores), encoding="utf-8")
    with pytest.raises(ConfigError, match=r"tuned-cpu.json is damaged.*mirrorsd tune"):
        Tuned.read(own_bundle, "cpu")
