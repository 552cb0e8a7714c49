"""`mirrorsd tune` on real sessions: what it finds is kept, used, and thrown away when it no longer fits."""

import json
import re
import shutil
from pathlib import Path

import pytest

from mirrorsd import MirrorPipeline
from mirrorsd.cli.application import run
from mirrorsd.graphs.errors import ConfigError
from mirrorsd.runtime.pinning import usable_cores
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


def _num_finals(printed: str, kind: str) -> int:
    return max(int(total) for total in re.findall(rf"{kind} finals \d+/(\d+)", printed))


@pytest.mark.slow
def test_tune_measures_chooses_and_is_used(own_bundle: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["tune", str(own_bundle), "--device-map", "cpu", "--max-new-tokens", "12", "--json"]) == 0
    printed = capsys.readouterr()
    report = json.loads(printed.out)
    texts = {kind: _num_finals(printed.err, kind) / len(report[f"{kind}_contests"]) for kind in ("greedy", "sampled")}
    assert texts == {"greedy": 4, "sampled": 8}, "sampled texts differ from seed to seed: two seeds each"
    contests = [row for row in report["greedy_contests"] if row["layout"] == report["layout"]]
    fastest = next(row for row in contests if row["method"] != "plain")
    chosen = [row for row in contests if row["speculation"] == report["speculation"]]
    assert max(row["tokens_per_second"] for row in chosen) >= 0.97 * fastest["tokens_per_second"]
    assert contests == sorted(contests, key=lambda row: -row["tokens_per_second"])
    assert {(row["layout"], row["method"]) for row in report["sampled_contests"]} == {
        (layout, method) for layout in ("apart", "shared") for method in ("plain", "serial", "mirror")
    }
    assert report["parts"]["shared"]["target"]["8"].keys() == {"prefix", "exit", "suffix"}
    assert 0 < report["parts"]["shared"]["transfer_ms"] < 50
    assert report["seconds"] > 0
    with MirrorPipeline.load(own_bundle, device_map="cpu") as pipe:
        assert pipe.layout == report["layout"]
        assert pipe.speculation.gamma == report["speculation"]["gamma"]
        assert pipe.sampled_speculation.gamma == report["sampled_speculation"]["gamma"]
        assert "speculation: tuned on this machine" in pipe.placement
        assert [list(point) for point in pipe.engine.target_ms] == report["target_ms"]
        assert pipe.engine.root_scores.to_dict() == report["root_scores"]
        assert "both:2:sampled" in pipe.engine.root_scores.fitted
        speeds = report["tokens_per_second"]
        assert pipe.engine.books.greedy.cheapest() == max(speeds, key=speeds.get)


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


def test_the_layout_that_was_fastest_is_used(own_bundle: Path) -> None:
    prompt = "Once upon a time there was a fox"
    with MirrorPipeline.load(own_bundle, device_map="cpu") as pipe:
        assert pipe.layout == "apart"
        expected = pipe.generate(prompt, max_new_tokens=24, method="plain")
    sampled = {"sampled_speculation": {"gamma": 2}, "sampled_tokens_per_second": {"plain": 9.0, "serial": 8.0}}
    tuned_for(own_bundle, layout="shared", **sampled).write(own_bundle)
    with MirrorPipeline.load(own_bundle, device_map="cpu") as pipe:
        assert (pipe.layout, pipe.speculation.gamma, pipe.sampled_speculation.gamma) == ("shared", 3, 2)
        assert "layout: shared (the fastest when tuned)" in pipe.placement
        assert pipe.device_map.target.threads == len(usable_cores().numbers)
        assert pipe.engine.books.sampled.cheapest() == "plain"
        result = pipe.generate(prompt, max_new_tokens=24, method="serial")
        assert (result.token_ids, result.layout) == (expected.token_ids, "shared")
        sampled_text = pipe.generate(prompt, max_new_tokens=24, method="serial", temperature=1.0, seed=0)
        assert max(step.num_window for step in sampled_text.steps) == 2


def test_a_layout_asked_for_wins_and_takes_no_settings_tuned_for_another(own_bundle: Path) -> None:
    tuned_for(own_bundle, layout="shared").write(own_bundle)
    with MirrorPipeline.load(own_bundle, device_map="cpu", layout="apart") as pipe:
        assert (pipe.layout, pipe.speculation.gamma, pipe.device_map.target.cores) == ("apart", 6, (0,))
        assert "speculation: defaults of cpu" in pipe.placement


def test_files_from_before_layouts_count_as_apart(own_bundle: Path) -> None:
    path = tuned_for(own_bundle).write(own_bundle)
    known = ("card", "fingerprint", "speculation", "predicted_step_ms", "measured_step_ms", "tokens_per_second")
    document = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps({name: document[name] for name in known}), encoding="utf-8")
    tuned = Tuned.read(own_bundle, "cpu")
    assert tuned is not None
    assert (tuned.layout, tuned.speculation["gamma"]) == ("apart", 3)


@pytest.mark.parametrize("content", ["{", None])
def test_a_damaged_file_is_named(own_bundle: Path, content: str | None) -> None:
    path = tuned_for(own_bundle).write(own_bundle)
    other_scores = json.loads(path.read_text(encoding="utf-8")) | {"root_scores": {"both:3": [[1.0], [1.0], [1.0]]}}
    path.write_text(content or json.dumps(other_scores), encoding="utf-8")
    with pytest.raises(ConfigError, match=r"tuned-cpu.json is damaged.*mirrorsd tune"):
        Tuned.read(own_bundle, "cpu")


def test_a_card_says_whether_windows_are_cut(own_bundle: Path, tmp_path: Path) -> None:
    card = tmp_path / "whole.toml"
    card.write_text('name = "whole"\n[speculation]\nwindow = "full"\n', encoding="utf-8")
    with MirrorPipeline.load(own_bundle, device_map=str(card)) as pipe:
        assert pipe.speculation.window == "full"
