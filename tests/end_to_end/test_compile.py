"""`mirrorsd compile` over a real bundle, through the NPU plugin's wrapper on the CPU."""

import json
from pathlib import Path

import numpy as np
import pytest

from mirrorsd.cli.application import run
from mirrorsd.devices.draft_memory import TipGuesses
from mirrorsd.devices.slot_draft import SlotDraft
from mirrorsd.graphs.bundle_files import read_bundle
from mirrorsd.machine.doctor import draft_check


def test_every_shape_passes_through_the_npu_wrapper(tiny_bundle: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["compile", str(tiny_bundle), "--device-map", "npu-emulated", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    entry = read_bundle(tiny_bundle).draft
    found = [(shape["bucket"]["rows"], shape["capacity"]) for shape in document["shapes"]]
    assert found == [(bucket.rows, capacity) for capacity in entry.capacities for bucket in entry.buckets]
    for shape in document["shapes"]:
        assert shape["conformance"]["problems"] == []
        assert shape["top1_agreement"] >= 0.99
        assert shape["num_predictions"] >= 256
        assert shape["ignores_dead_slots"]
    assert run(["compile", str(tiny_bundle), "--device-map", "npu-emulated", "--json"]) == 0
    assert all(shape["is_from_disk"] for shape in json.loads(capsys.readouterr().out)["shapes"])


def test_a_processor_keeps_what_an_npu_could_not_take(tiny_bundle: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["compile", str(tiny_bundle), "--device-map", "openvino-cpu", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["is_fine"]


def test_a_draft_that_says_something_else_is_refused(
    tiny_bundle: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "140")
    counter = iter(range(1000))
    monkeypatch.setattr(draft_check, "best_tokens", lambda *_: np.full((100, 1), next(counter) % 2))
    monkeypatch.setattr(SlotDraft, "keep_rows", lambda *_: None)
    assert run(["compile", str(tiny_bundle), "--device-map", "cpu"]) == 1
    assert "0.0% of 100" in capsys.readouterr().out


def test_hidden_slots_that_show_are_found(tiny_bundle: Path) -> None:
    class Leaky:
        capacity = 64
        num_kept = 0

        def keep_rows(self, rows: object, slots: object) -> None:
            self.num_kept += 1

        def run(self, blocks: object, tips: object) -> TipGuesses:
            ids = np.full((1, 1, 1), self.num_kept)
            return TipGuesses(ids, np.zeros((1, 1, 1), np.float32))

    bucket = read_bundle(tiny_bundle).draft.buckets[0]
    assert not draft_check.ignores_dead_slots(Leaky(), bucket, [1] * 8)  # type: ignore[arg-type]


def test_a_card_whose_device_is_missing(tiny_bundle: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["compile", str(tiny_bundle), "--device-map", "cuda-npu"]) == 4
    assert "does not fit this machine" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "needed"),
    [
        (["--draft-group", "64"], "--weights"),
        (["--draft-data-aware"], "--weights"),
        (["--allow-draft-loss"], "--weights"),
        (["--npu-compiler", "compiler"], "--npu"),
        (["--npu", "4000", "--text", "README.md"], "--weights"),
    ],
)
def test_options_that_would_do_nothing_are_refused(
    tiny_bundle: Path, words: list[str], needed: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["compile", str(tiny_bundle), *words]) == 2
    assert f"does nothing without {needed} here" in capsys.readouterr().err


@pytest.mark.parametrize("words", [["--weights", "int8"], ["--npu", "4000"]])
def test_what_was_unpacked_for_an_archive_stays_as_it_is(
    tiny_bundle: Path, tmp_path: Path, own_cache: Path, words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["pack", str(tiny_bundle), "-o", str(tmp_path / "packed.zip")]) == 0
    assert run(["compile", str(tmp_path / "packed.zip"), *words]) == 2
    assert "is kept in the cache as it was fetched" in " ".join(capsys.readouterr().err.split())


def test_a_text_without_words_is_not_the_built_in_one(
    tiny_bundle: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty").write_bytes(b"")
    assert run(["compile", str(tiny_bundle), "--text", str(tmp_path / "empty")]) == 2
    assert "holds no text" in capsys.readouterr().err
