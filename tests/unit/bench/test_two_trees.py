"""Two states of the package are compared by turns: each in a process of its own, pair by pair."""

import argparse
import doctest
import json
from pathlib import Path
from typing import Any

import pytest

from mirrorsd.bench.claims import two_trees
from mirrorsd.bench.claims.two_trees import Case, one_turn, rows_of

PACKAGE = """
import time
from types import SimpleNamespace

class MirrorPipeline:
    @classmethod
    def load(cls, bundle, **settings):
        print("loading", bundle, settings)
        return cls()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def generate(self, **text):
        time.sleep(SECONDS * text["seed"])
        return SimpleNamespace(token_ids=[text["seed"], TOKEN])
"""
WANTED = {"load": {"device_map": "cpu"}, "texts": [{"seed": 3}, {"seed": 0}]}


def tree(folder: Path, seconds: float, token: int = 7) -> Path:
    """A checkout whose texts take so long, times their seed."""
    folder.mkdir()
    (folder / "__init__.py").write_text(f"SECONDS, TOKEN = {seconds}, {token}\n{PACKAGE}", encoding="utf-8")
    return folder


def text(speed: float, token: int = 7) -> dict[str, Any]:
    return {"seconds": 1 / speed, "token_ids": [token]}


def test_each_tree_is_imported_as_the_package(tmp_path: Path) -> None:
    """Wherever its folder is and whatever its name."""
    for name, seconds in (("before", 0.05), ("a tree", 0.1)):
        found = one_turn(tree(tmp_path / name, seconds), tmp_path / "x.mirror", WANTED, 60.0)
        assert found[0]["seconds"] >= 3 * seconds
        assert found[1]["seconds"] < found[0]["seconds"]
        assert [one["token_ids"] for one in found] == [[3, 7], [0, 7]]


def test_a_folder_that_is_no_checkout_is_refused(tmp_path: Path) -> None:
    assert two_trees.checkout(str(tree(tmp_path / "before", 1.0))) == tmp_path / "before"
    with pytest.raises(argparse.ArgumentTypeError, match="no checkout"):
        two_trees.checkout(str(tmp_path))


def test_a_tree_that_fails_ends_the_comparison(tmp_path: Path) -> None:
    (tree(tmp_path / "broken", 1.0) / "__init__.py").write_text("raise ValueError", encoding="utf-8")
    with pytest.raises(SystemExit, match="broken did not decode"):
        one_turn(tmp_path / "broken", tmp_path / "x.mirror", WANTED, 60.0)


def test_a_ratio_is_over_pairs_and_leaves_the_untimed_texts_out() -> None:
    """Two turns of two texts; the machine is half as fast in the second, which no ratio sees."""
    untimed = [text(1.0), text(1.0)]
    turns = [
        [[*untimed, text(100.0), text(200.0)], [text(900.0), text(900.0), text(110.0), text(220.0)]],
        [[*untimed, text(50.0), text(100.0)], [text(900.0), text(900.0), text(55.0), text(110.0, token=8)]],
    ]
    (row,) = rows_of([Case("serial", 0.0)], 2, 1, turns)
    assert row["case"] == "serial, T=0"
    assert (row["old"], row["new"]) == (88.89, 97.78)  # four tokens in 45 ms
    assert (row["ratio"], row["interval"], row["ratios"]) == (1.1, [1.1, 1.1], [1.1] * 4)
    assert row["same"] == "3 of 4"


def test_fewer_prompts_than_were_asked_for_are_refused_before_anything_is_decoded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = tmp_path / "two.jsonl"
    lines = [json.dumps({"question_id": number, "category": "a", "turns": ["Once"]}) for number in (1, 2)]
    prompts.write_text("\n".join(lines), encoding="utf-8")
    trees = [str(tree(tmp_path / name, 0.0)) for name in ("before", "after")]
    monkeypatch.setattr(two_trees, "one_turn", None)
    for count in (3, 4):
        words = [*trees, "x.mirror", "--prompts", str(prompts), "--count", str(count)]
        monkeypatch.setattr("sys.argv", ["two_trees.py", *words])
        with pytest.raises(SystemExit, match=rf"two\.jsonl has 2 prompts, {count} were asked for: give --count 2"):
            two_trees.main()


def test_an_interval_holds_the_median_and_not_all_values() -> None:
    low, high = two_trees.interval_of_median([0.5, *[1.0 + i / 100 for i in range(20)], 2.0])
    assert 1.0 <= low < 1.095 < high <= 1.2


def test_worked_examples() -> None:
    assert doctest.testmod(two_trees).failed == 0
