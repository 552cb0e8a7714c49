"""`mirrorsd tune` on real sessions: what it finds is kept, used, and thrown away when it no longer fits."""

import json
import re
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mirrorsd import CancelToken, MirrorPipeline
from mirrorsd.cli.application import run
from mirrorsd.device_maps import (
    DeviceMap,
    DraftPlacement,
    SpeculationDefaults,
    TargetPlacement,
    load_device_map,
)
from mirrorsd.devices import fingerprint as fingerprint_module
from mirrorsd.devices import hardware
from mirrorsd.devices.fingerprint import fingerprint
from mirrorsd.devices.hardware import DeviceDetail
from mirrorsd.devices.layouts import Cores, usable_cores
from mirrorsd.graphs.errors import Cancelled, DeviceError
from mirrorsd.machine.tuning import search
from mirrorsd.machine.tuning.part_times import PartTimes, measure_parts
from mirrorsd.machine.tuning.search import Found, Silent, find_settings
from mirrorsd.runtime import SpeculationConfig
from mirrorsd.runtime.policy.account import Account, PairKnowledge
from mirrorsd.runtime.tuned import Tuned
from mirrorsd.texts.speculation import resolve_speculation

CPU = load_device_map("cpu")


@pytest.fixture
def own_bundle(tiny_bundle: Path, tmp_path: Path, own_cache: Path) -> Path:
    shutil.copytree(tiny_bundle, tmp_path / "own.mirror")
    return tmp_path / "own.mirror"


def tuned_for(bundle: Path, **changes: object) -> Tuned:
    values = {
        "card": "cpu",
        "fingerprint": fingerprint(bundle, CPU),
        "speculation": {"gamma": 3, "roots": 2},
        "predicted_step_ms": 1.0,
        "measured_step_ms": 1.1,
        "tokens_per_second": {"mirror": 100.0, "serial": 95.0, "plain": 90.0},
    }
    return Tuned(**{**values, **changes})


def places(value: Any, before: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    """Every field of a document: leaves, lists and objects."""
    if before:
        yield before
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in inner:
        yield from places(item, (*before, key))


def edit(document: Any, place: tuple[str | int, ...], value: object) -> None:
    for key in place[:-1]:
        document = document[key]
    document[place[-1]] = value


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
    fastest = next(row for row in contests if row["method"] in ("serial", "mirror"))
    chosen = [row for row in contests if row["speculation"] == report["speculation"]]
    assert max(row["tokens_per_second"] for row in chosen) >= 0.97 * fastest["tokens_per_second"]
    assert contests == sorted(contests, key=lambda row: -row["tokens_per_second"])
    assert {(row["layout"], row["method"]) for row in report["sampled_contests"]} == {
        (layout, method) for layout in ("apart", "shared") for method in ("plain", "serial", "mirror", "lookup")
    }
    assert report["parts"]["shared"]["target"]["8"].keys() == {"prefix", "exit", "suffix"}
    assert report["parts"]["shared"]["transfer_ms"] > 0
    assert report["seconds"] > 0
    with MirrorPipeline.load(own_bundle, device_map="cpu") as pipe:
        assert pipe.layout == report["layout"]
        assert pipe.speculation.gamma == report["speculation"]["gamma"]
        assert pipe.sampled_speculation.gamma == report["sampled_speculation"]["gamma"]
        assert "speculation: tuned on this machine" in pipe.placement
        assert [list(point) for point in pipe.engine.known.target_ms] == report["target_ms"]
        assert pipe.engine.known.root_scores.to_dict() == report["root_scores"]
        assert "both:2:sampled" in pipe.engine.known.root_scores.fitted
        speeds = report["tokens_per_second"]
        known = pipe.engine.known.pairs[False]
        taught = report["learned"].get("greedy.plain")  # by the texts of tuning itself, where nothing disturbed them
        one_row = report["target_ms"][0][1] / 1e3
        plain = taught[1] / (taught[0] * one_row) if taught else speeds["plain"]
        assert known.plain_speed == pytest.approx(plain, rel=1e-4)
        assert known.method == max(("serial", "mirror"), key=speeds.get)


class Counted(Silent):
    """Counts what was done; stops tuning when all is loaded, or when a step of that title begins."""

    def __init__(self, stopped_at: str = "") -> None:
        self.cancel, self.stopped_at, self.done = CancelToken(), stopped_at, dict[str, int]()

    def begun(self) -> None:
        self._stop_at("begun")

    def _stop_at(self, place: str) -> None:
        if place == self.stopped_at:
            self.cancel.cancel()

    @contextmanager
    def progress(self, title: str, total: int) -> Iterator[Callable[[str], None]]:
        self._stop_at(title)

        def advance(_: str) -> None:
            self.done[title] = self.done.get(title, 0) + 1

        yield advance


def stopped(bundle: Path, place: str) -> Found:
    listener = Counted(place)
    texts = ["Once", "x"]
    found = find_settings(bundle, texts, device_map="cpu", cancel=listener.cancel, listener=listener)
    assert not listener.done
    return found


def test_tuning_that_is_stopped_has_the_times_at_least(own_bundle: Path) -> None:
    found = stopped(own_bundle, "recording")
    assert (found.contests, found.tuned.is_tuned) == ({"greedy": [], "sampled": []}, False)
    found.tuned.write(own_bundle)
    with MirrorPipeline.load(own_bundle, device_map="cpu") as pipe:
        assert pipe.engine.known.target_ms == found.tuned.target_ms
        assert "speculation: defaults of cpu" in pipe.placement


def test_tuning_that_is_stopped_keeps_what_an_earlier_run_had_found(own_bundle: Path) -> None:
    former = tuned_for(own_bundle, speculation={"gamma": 3}, sampled_speculation={"gamma": 2}, layout="shared")
    former.write(own_bundle)
    found = stopped(own_bundle, "recording")
    assert (found.contests, found.tuned) == ({"greedy": [], "sampled": []}, former)
    new = replace(former, speculation={"gamma": 4}, sampled_speculation={})
    assert search._with_former(new, former) == replace(new, sampled_speculation={"gamma": 2})
    assert search._with_former(new, replace(former, layout="apart")) == new, "of another layout"
    assert search._with_former(new, None) == new
    sampled = replace(former, speculation={}, sampled_speculation={"gamma": 5}, predicted_step_ms=0.0)
    assert search._with_former(sampled, former) == replace(former, sampled_speculation={"gamma": 5})


@pytest.mark.parametrize("form", [[], ["--json"]])
def test_a_tuning_that_was_stopped_says_so_by_its_status(
    own_bundle: Path, form: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def find(*_: object, cancel: CancelToken, **__: object) -> Found:
        cancel.cancel()
        return Found(parts={}, contests={"greedy": []}, tuned=tuned_for(own_bundle))

    monkeypatch.setattr(search, "find_settings", find)
    assert run(["tune", str(own_bundle), *form]) == 130
    assert ("greedy_contests" if form else "no time to measure any") in capsys.readouterr().out


def test_nothing_is_measured_where_nothing_can_be_kept(
    own_bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("MIRRORSD_CACHE", str(tmp_path / "file"))
    monkeypatch.setattr(search, "find_settings", None)
    assert run(["tune", str(own_bundle.with_name("nowhere"))]) == 3
    assert "is not a folder" in capsys.readouterr().err
    assert run(["tune", str(own_bundle)]) == 2
    assert "MIRRORSD_CACHE names another folder" in capsys.readouterr().err


def test_tuning_that_is_stopped_before_anything_was_measured_ends_at_once(own_bundle: Path) -> None:
    with pytest.raises(Cancelled):
        stopped(own_bundle, "begun")


def test_tuning_that_is_stopped_in_a_layout_has_those_before_it(
    own_bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured = list[Any]()

    def measure(engine: Any, cancel: CancelToken) -> PartTimes:
        if measured:
            cancel.cancel()
        measured.append(engine)
        return measure_parts(engine, cancel)

    monkeypatch.setattr(search, "measure_parts", measure)
    found = find_settings(own_bundle, ["Once"], device_map="cpu")
    assert (len(measured), list(found.parts)) == (2, [found.tuned.layout])


def test_a_device_that_fails_in_the_finals_leaves_what_was_measured(
    own_bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(*_: Any) -> Any:
        raise DeviceError("the draft's device is gone")

    monkeypatch.setattr(search, "contend", failing)
    notes: list[str] = []
    listener = Counted()
    monkeypatch.setattr(listener, "note", notes.append)
    found = find_settings(own_bundle, ["Once"], device_map="cpu", max_new_tokens=4, seconds=0.1, listener=listener)
    assert found.tuned.target_ms and not found.tuned.is_tuned
    assert "the sampled finals ended with an error: the draft's device is gone" in notes


@pytest.mark.slow
def test_tuning_without_time_fights_one_contest(own_bundle: Path) -> None:
    listener = Counted()
    texts = ["Once upon a time", "x", "The fox"]
    found = find_settings(own_bundle, texts, device_map="cpu", max_new_tokens=8, seconds=0.1, listener=listener)
    assert listener.done["recording"] == 2
    assert listener.done["greedy finals"] == len(found.contests["greedy"])
    assert found.tuned.is_tuned
    assert found.tuned.sampled_speculation
    assert {"plain", "lookup"} < found.tuned.tokens_per_second.keys()


def test_what_was_tuned_elsewhere_is_not_used(own_bundle: Path) -> None:
    tuned_for(own_bundle).write(own_bundle)
    assert Tuned.read(own_bundle, CPU) is not None
    assert Tuned.read(own_bundle, load_device_map("npu-emulated")) is None
    tuned_for(own_bundle, fingerprint="another machine").write(own_bundle)
    assert Tuned.read(own_bundle, CPU) is None


def test_explicit_settings_win_over_tuned_ones(own_bundle: Path) -> None:
    tuned_for(own_bundle).write(own_bundle)
    with MirrorPipeline.load(own_bundle, device_map="cpu", speculation={"gamma": 5}) as pipe:
        assert (pipe.speculation.gamma, pipe.speculation.roots) == (5, 2)


def test_the_layout_that_was_fastest_is_used(own_bundle: Path) -> None:
    prompt = "Once upon a time there was a fox"
    with MirrorPipeline.load(own_bundle, device_map="cpu") as pipe:
        assert pipe.layout == "shared"
        assert pipe.device_map.target.threads == len(usable_cores().numbers)
        expected = pipe.generate(prompt, max_new_tokens=24, method="plain")
    sampled = {"sampled_speculation": {"gamma": 2}, "sampled_tokens_per_second": {"plain": 9.0, "serial": 8.0}}
    tuned_for(own_bundle, layout="apart", **sampled).write(own_bundle)
    with MirrorPipeline.load(own_bundle, device_map="cpu") as pipe:
        assert (pipe.layout, pipe.speculation.gamma, pipe.sampled_speculation.gamma) == ("apart", 3, 2)
        assert "layout: apart (the fastest when tuned)" in pipe.placement
        assert pipe.device_map.target.threads == 1
        assert Account(pipe.engine.known.pairs[True]).worth_of_drafting(9.0, is_ready=False) <= 0
        result = pipe.generate(prompt, max_new_tokens=24, method="serial")
        assert (result.token_ids, result.layout) == (expected.token_ids, "apart")
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
    tuned = Tuned.read(own_bundle, CPU)
    assert tuned is not None
    assert (tuned.layout, tuned.speculation["gamma"]) == ("apart", 3)


DAMAGES: dict[str, dict[str, object]] = {
    "tokens_per_second[plain] is 0.0": {"tokens_per_second": {"plain": 0.0}},
    "tokens_per_second is 'magic'": {"tokens_per_second": {"magic": 90.0}},
    "tokens_per_step[serial] is nan": {"tokens_per_step": {"serial": float("nan")}},
    "sampled_tokens_per_second[plain] is -1.0": {"sampled_tokens_per_second": {"plain": -1.0}},
    "root scores 'both:3' have other weights": {"root_scores": {"both:3": [[1.0], [1.0], [1.0]]}},
    "target_ms is nan": {"target_ms": [[1.0, float("nan")]]},
    "gamma is 3.5": {"speculation": {"gamma": 3.5}},
    "speculation is 'colour'": {"speculation": {"colour": 1}},
    "gamma is 99; allowed: 1 to 31": {"sampled_speculation": {"gamma": 99}},
    "layout is 'sideways'": {"layout": "sideways"},
    "unknown name 'colour'": {"colour": "red"},
}


@pytest.mark.parametrize("words", DAMAGES)
def test_a_damaged_file_is_named_and_left_out(own_bundle: Path, words: str, caplog: pytest.LogCaptureFixture) -> None:
    path = tuned_for(own_bundle).write(own_bundle)
    document = json.loads(path.read_text(encoding="utf-8")) | DAMAGES[words]
    path.write_text(json.dumps(document), encoding="utf-8")
    assert Tuned.read(own_bundle, CPU) is None
    assert words in caplog.text
    assert "tuned-cpu.json is damaged" in caplog.text
    assert "Delete the file, or run `mirrorsd tune` again." in caplog.text


@pytest.mark.parametrize("content", ["{", "[]", "null", '{"fingerprint": 3}', "[" * 100_000, "\ud800"])
def test_a_damaged_file_stops_no_text_and_leaves_no_thread(
    own_bundle: Path, content: str, caplog: pytest.LogCaptureFixture
) -> None:
    tuned_for(own_bundle).write(own_bundle).write_bytes(content.encode("utf-8", "surrogatepass"))
    before = threading.active_count()
    assert Tuned.read(own_bundle, CPU) is None
    assert ("is damaged" in caplog.text) == (content != '{"fingerprint": 3}'), "that one is of another machine"
    if content == "{":
        with MirrorPipeline.load(own_bundle, device_map="cpu") as pipe:
            assert "speculation: defaults of cpu" in pipe.placement
            assert len(pipe.generate("Once", max_new_tokens=4, ignore_eos=True).token_ids) == 4
        assert threading.active_count() == before


def test_any_field_with_any_hostile_value_is_usable_or_left_out(own_bundle: Path) -> None:
    scores = {"draft": [[0.1] * 7, [0.1] * 4, [0.1] * 4]}
    sampled = {"sampled_speculation": {"root_source": "proxy", "exits": [2]}, "sampled_tokens_per_step": {"plain": 1.0}}
    whole = tuned_for(own_bundle, root_scores=scores, target_ms=((1.0, 2.0), (8.0, 3.0)), **sampled)
    path = whole.write(own_bundle)
    text = path.read_text(encoding="utf-8")
    hostile = (-5, 0, 1e-320, 10**400, float("nan"), float("inf"), "", [], {}, None, "12", True, [[1, 2, 3]], ["x"])
    read = 0
    for place in places(json.loads(text)):
        for value in hostile:
            document = json.loads(text)
            edit(document, place, value)
            path.write_text(json.dumps(document), encoding="utf-8")
            found = Tuned.read(own_bundle, CPU)
            if found is None:
                continue
            read += 1
            for kind in ("", "sampled_"):
                speeds, steps = (getattr(found, f"{kind}tokens_per_{unit}") for unit in ("second", "step"))
                PairKnowledge().start_from(speeds, steps, found.target_ms)
                resolve_speculation(SpeculationConfig(), getattr(found, f"{kind}speculation"))
    assert read > 20


def test_another_processor_is_another_machine(own_bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With as many cores and the same versions: what `platform` says tells them apart on Windows only."""
    here = fingerprint(own_bundle, CPU)
    monkeypatch.setattr(fingerprint_module, "processor_name", lambda: "AMD EPYC 9B14")
    assert fingerprint(own_bundle, CPU) != here


def test_another_graphics_card_is_another_machine(own_bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    card, found = load_device_map("cuda-cpu"), {}
    for name in ("NVIDIA L4", "NVIDIA A10"):
        details = [DeviceDetail(device="NVIDIA GPU 0", full_name=name, driver="570.1")]
        monkeypatch.setattr(hardware, "cuda_gpu", lambda _, details=details: details[0])
        found[name] = fingerprint(own_bundle, card)
    assert len(set(found.values())) == 2
    cut = replace(CPU, target=replace(CPU.target, cores=(0,), threads=1))
    assert fingerprint(own_bundle, CPU) == fingerprint(own_bundle, cut), "a layout of the same card"
    assert fingerprint(own_bundle, CPU) != fingerprint(own_bundle, load_device_map("paced-laptop"))


def test_what_is_edited_in_a_card_or_given_to_the_process_makes_it_another(
    own_bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was tuned before would override what the card says now."""
    mine = DeviceMap(name="mine")
    seen = {fingerprint(own_bundle, mine)}
    for changes in (
        {"target": TargetPlacement(threads=2)},
        {"draft": DraftPlacement(precision="bf16")},
        {"speculation": SpeculationDefaults(gamma=2)},
    ):
        seen.add(fingerprint(own_bundle, replace(mine, **changes)))  # type: ignore[arg-type]
    monkeypatch.setattr(fingerprint_module, "usable_cores", lambda: Cores((7,), 1))
    seen.add(fingerprint(own_bundle, mine))
    assert len(seen) == 5


def test_a_card_says_whether_windows_are_cut(own_bundle: Path, tmp_path: Path) -> None:
    card = tmp_path / "whole.toml"
    card.write_text('name = "whole"\n[speculation]\nwindow = "full"\n', encoding="utf-8")
    with MirrorPipeline.load(own_bundle, device_map=str(card)) as pipe:
        assert pipe.speculation.window == "full"
