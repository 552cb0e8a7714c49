"""The comparison with other runtimes, without them: what it makes of folders, turns and answers."""

import importlib
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

FOLDER = Path(__file__).resolve().parents[3] / "bench" / "peers"


@pytest.fixture
def compare(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(FOLDER))
    return importlib.import_module("compare")


@pytest.fixture
def prepare(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(FOLDER))
    return importlib.import_module("prepare")


class FakeContestant:
    """Answers with the next of given times, always the same text."""

    def __init__(self, name: str, ids: list[int], seconds: list[float]) -> None:
        self.name, self.ids, self._seconds = name, ids, iter(seconds)
        self.answers: dict[str, list[dict[str, Any]]] = {}

    def decode(self, ids: list[int], count: int) -> dict[str, Any]:
        return {"ids": self.ids[:count], "seconds": next(self._seconds), "passes": count // 2}


def test_a_row_is_the_mean_over_prompts_of_medians_and_tells_where_texts_part(compare: ModuleType) -> None:
    first, second = FakeContestant("a", [1, 2, 3, 4], []), FakeContestant("b", [1, 2, 9, 9], [])
    for contestant, times in ((first, [1.0, 1.0]), (second, [0.5, 4.0])):
        for name in ("p", "q"):
            found = [{"ids": contestant.ids, "seconds": seconds, "passes": 2} for seconds in times]
            contestant.answers[name] = found
    row = compare.row(second, first, 4, {"p": [0.5], "q": [2.0]})
    assert row["tokens_per_second"] == (8.0 + 2.0) / 2
    assert (row["tokens_per_pass"], row["same_text"], row["first_difference_at"]) == (2.0, 0, [2, 2])


def test_a_disturbed_answer_is_measured_again(compare: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    busy = iter([0.0, 1e6, 2e6, 2e6])
    monkeypatch.setattr(compare, "busy_seconds", lambda: next(busy))
    monkeypatch.setattr(compare, "cpu_of_children", lambda contestants: 0.0)
    monkeypatch.setattr(compare, "sleep", lambda seconds: None)
    contestant = FakeContestant("a", [1], [9.0, 1.0])
    answer, share = compare.undisturbed([contestant], contestant, [0], 1)
    assert (answer["seconds"], share) == (1.0, 0.0)


def test_the_draft_is_put_beside_the_target_without_copying_weights(prepare: ModuleType, tmp_path: Path) -> None:
    for name, layers in (("big-int8", 6), ("small-int8", 3)):
        folder = tmp_path / "onnxruntime" / name
        folder.mkdir(parents=True)
        config = {"model": {"decoder": {"filename": "model.onnx", "num_hidden_layers": layers}}}
        (folder / "genai_config.json").write_text(json.dumps(config), encoding="utf-8")
        (folder / "model.onnx.data").write_bytes(name.encode())
    prepare.compose_onnxruntime(tmp_path, Path("big"), Path("small"), "int8")
    made = tmp_path / "onnxruntime" / "big-int8+small"
    model = json.loads((made / "genai_config.json").read_text(encoding="utf-8"))["model"]
    assert model["decoder"] == {"filename": "target/model.onnx", "num_hidden_layers": 6}
    assert model["draft"] == {"filename": "draft/model.onnx", "num_hidden_layers": 3}
    assert (made / "draft" / "model.onnx.data").samefile(tmp_path / "onnxruntime" / "small-int8" / "model.onnx.data")
