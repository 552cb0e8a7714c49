"""What texts teach is kept per machine and bundle, used by the next load, and never changes a text."""

import json
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mirrorsd import MirrorPipeline
from mirrorsd.cli.application import run
from mirrorsd.device_maps import load_device_map
from mirrorsd.devices.fingerprint import fingerprint
from mirrorsd.runtime import loading
from mirrorsd.runtime.policy.knowledge import Knowledge
from mirrorsd.runtime.tuned import Keeper, Tuned

CPU = load_device_map("cpu")
PROMPTS = ("Once upon a time there was a fox", "the fox the fox the fox the", "x")
CURVE = ((1.0, 2.0), (7.0, 3.0), (32.0, 8.0))


@pytest.fixture
def own_bundle(tiny_bundle: Path, tmp_path: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A bundle of which nothing is kept yet, on a target whose passes are known."""
    monkeypatch.setattr(loading, "measure_passes", lambda *_: CURVE)
    shutil.copytree(tiny_bundle, tmp_path / "own.mirror")
    return tmp_path / "own.mirror"


def texts(pipe: MirrorPipeline, method: str = "auto") -> list[list[int]]:
    sampled: dict[str, Any] = {"temperature": 0.8, "seed": 3}
    return [
        pipe.generate(prompt, max_new_tokens=24, ignore_eos=True, method=method, **sampling).token_ids
        for prompt in PROMPTS
        for sampling in ({}, sampled)
    ]


def kept_file(bundle: Path, cache: Path) -> Path:
    return next(cache.glob(f"{bundle.name}-*/tuned-cpu.json"))


def leaves(value: Any) -> Iterator[object]:
    if isinstance(value, dict | list):
        for item in value.values() if isinstance(value, dict) else value:
            yield from leaves(item)
    else:
        yield value


def test_the_next_load_knows_what_texts_have_taught(own_bundle: Path, own_cache: Path) -> None:
    with MirrorPipeline.load(own_bundle, device_map="cpu") as pipe:
        assert not pipe.engine.known.pairs[False].is_plain_known
        first = texts(pipe)
        pipe.engine.known.pairs[False].start_plain(CURVE[0][1] / 1e3)  # no clock of this machine says it
        pipe.engine.known.lengths[False].repeats.observe(9, is_right=True)
        repeats = pipe.engine.known.lengths[False].repeats.reach(9, 3)
    with MirrorPipeline.load(own_bundle, device_map="cpu") as pipe:
        known = pipe.engine.known
        assert known.pairs[False].is_plain_known
        assert known.lengths[False].repeats.reach(9, 3) == pytest.approx(repeats, rel=1e-4)
        assert "speeds and chances: learned from earlier texts on this machine" in pipe.placement
        assert texts(pipe) == first == texts(pipe, "plain")
    with MirrorPipeline.load(own_bundle, device_map="cpu", use_tuned=False) as pipe:
        assert not pipe.engine.known.pairs[False].is_plain_known
        before = kept_file(own_bundle, own_cache).read_bytes()
        assert texts(pipe) == first
    assert kept_file(own_bundle, own_cache).read_bytes() == before, "what must not be used is not written either"


def test_of_texts_nothing_is_kept_but_numbers_of_known_names(own_bundle: Path, own_cache: Path) -> None:
    with MirrorPipeline.load(own_bundle, device_map="cpu") as pipe:
        texts(pipe)
    sizes = set()
    for prompts in (1, 8):
        with MirrorPipeline.load(own_bundle, device_map="cpu") as pipe:
            for number in range(prompts):
                pipe.generate(f"secret {number}", max_new_tokens=8, ignore_eos=True)
        document = json.loads(kept_file(own_bundle, own_cache).read_text(encoding="utf-8"))
        sizes.add(sum(1 for _ in leaves(document)))
        words = {leaf for leaf in leaves(document) if isinstance(leaf, str)}
        assert words == {"cpu", "shared", fingerprint(own_bundle, CPU)}
        assert "secret" not in kept_file(own_bundle, own_cache).read_text(encoding="utf-8")
    assert max(sizes) - min(sizes) <= 100, (
        "more texts are no more numbers, but for names that were not learned of before"
    )


@pytest.mark.parametrize(
    "content", ["{", '{"fingerprint": "another machine"}', '{"learned": {"greedy.plain": [0, 0]}}']
)
def test_wrong_old_and_damaged_files_make_way(own_bundle: Path, own_cache: Path, content: str) -> None:
    with MirrorPipeline.load(own_bundle, device_map="cpu") as pipe:
        first = texts(pipe)
    document = {"card": "cpu", "fingerprint": fingerprint(own_bundle, CPU)}
    damaged = json.dumps(document | json.loads(content)) if content != "{" else content
    kept_file(own_bundle, own_cache).write_text(damaged, encoding="utf-8")
    with MirrorPipeline.load(own_bundle, device_map="cpu") as pipe:
        assert texts(pipe) == first
    assert Tuned.read(own_bundle, CPU) is not None


def test_what_tune_found_stays_and_learns(own_bundle: Path) -> None:
    tuned = Tuned(card="cpu", fingerprint=fingerprint(own_bundle, CPU), layout="shared", speculation={"gamma": 3})
    tuned.write(own_bundle)
    with MirrorPipeline.load(own_bundle, device_map="cpu") as pipe:
        assert (pipe.speculation.gamma, "speculation: tuned on this machine" in pipe.placement) == (3, True)
        texts(pipe)
    found = Tuned.read(own_bundle, CPU)
    assert found is not None
    assert (found.speculation, bool(found.learned)) == ({"gamma": 3}, True)
    with MirrorPipeline.load(own_bundle, device_map="cpu", layout="apart") as pipe:
        texts(pipe)
    assert Tuned.read(own_bundle, CPU) == found, "another layout teaches nothing about this one"


def test_a_cache_that_cannot_be_written_costs_nothing_else(
    own_bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("", encoding="utf-8")
    monkeypatch.setenv("MIRRORSD_CACHE", str(tmp_path / "file"))
    with MirrorPipeline.load(own_bundle, device_map="cpu") as pipe:
        assert len(texts(pipe)) == 2 * len(PROMPTS)


def test_several_that_keep_at_once_leave_a_whole_file(own_bundle: Path) -> None:
    def keep(number: int) -> None:
        known = Knowledge(target_ms=CURVE)
        keeper = Keeper(own_bundle, CPU, "shared", known)
        for turn in range(20):
            known.pairs[False].start_plain((2.0 + number / 10 + turn / 1000) / 1e3)
            keeper.keep()

    threads = [threading.Thread(target=keep, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        found = Tuned.read(own_bundle, CPU)
        assert found is None or 1.0 <= found.learned["greedy.plain"][0] < 1.2
    assert Tuned.read(own_bundle, CPU) is not None


def test_it_can_be_seen_and_deleted(own_bundle: Path, own_cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with MirrorPipeline.load(own_bundle, device_map="cpu") as pipe:
        texts(pipe)
    assert run(["cache", "list", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["bundles"][0]["tuned"] == ["cpu"]
    assert run(["cache", "clear", "--tuned"]) == 0
    assert not list(own_cache.glob("*/tuned-cpu.json"))


def test_passes_that_were_disturbed_at_load_keep_windows_away_from_one_text(
    own_bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured = [((1.0, 2.0), (7.0, 200.0), (32.0, 800.0))]
    monkeypatch.setattr(loading, "measure_passes", lambda *_: measured.pop() if measured else CURVE)
    found = []
    with MirrorPipeline.load(own_bundle, device_map="cpu") as pipe:
        pipe.generate(PROMPTS[0], max_new_tokens=2, ignore_eos=True, method="serial")  # no room for a window
        for _ in range(2):
            result = pipe.generate(PROMPTS[0], max_new_tokens=24, ignore_eos=True, method="serial")
            found.append((result.token_ids, result.stats.num_drafted > 0))
            pipe.engine.target_worker.run(lambda: None)  # behind what is measured
        assert [has_windows for _, has_windows in found] == [False, True]
        assert found[0][0] == found[1][0]
        assert pipe.engine.target_worker.company is None, "what was measured is no other conversation"
