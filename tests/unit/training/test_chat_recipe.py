"""The recipe of a chat model's draft: requests made of a corpus, and those that the model thinks of."""

import json
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

RECIPE = Path(__file__).parents[3] / "samples" / "smollm2" / "recipe"
PASSAGE = "The king had three sons and a mill. " * 10


@pytest.fixture
def recipe(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.syspath_prepend(str(RECIPE))
    import build_prompts

    yield build_prompts
    sys.modules.pop("build_prompts", None)


def write(folder: Path, name: str, *records: dict[str, Any]) -> None:
    (folder / f"{name}.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")


def test_tasks_are_made_of_what_the_sets_hold_and_missing_sets_of_nothing(recipe: Any, tmp_path: Path) -> None:
    write(tmp_path, "textbooks", {"text": f"## Solar Energy\n\n## Chapter 3 Review\n\n{PASSAGE}\n\nshort"})
    write(tmp_path, "instructions", {"instruction": "Name a colour.", "input": "", "output": "Red."})
    write(tmp_path, "fairy_tale_qa", {"context": PASSAGE, "question": "How many sons?", "answer": "three"})
    made = list(recipe.tasks(tmp_path, random.Random(0)))
    assert "Name a colour." in made
    assert len(made) == 5
    assert sum(PASSAGE.strip() in request for request in made) == 3, "one to sum up, one to correct, one to ask about"
    assert sum("Solar Energy" in request for request in made) == 1
    assert not any("Review" in request for request in made)


class Characters:
    """A tokenizer of single characters, whose template shows who speaks."""

    def __call__(self, text: str) -> dict[str, list[int]]:
        return {"input_ids": [ord(character) for character in text]}

    def apply_chat_template(self, messages: list[dict[str, str]], **how: bool) -> Any:
        shown = f"<user>{messages[0]['content']}<end>"
        return self(f"{shown}<model>") if how.get("add_generation_prompt") else shown

    def decode(self, ids: list[int]) -> str:
        return "".join(map(chr, ids))


@pytest.fixture
def asked(recipe: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A model that says " Why so? " to everything; what it says to every second prompt comes to no end."""

    def write_on(_target: Any, prompts: list[list[int]], temperatures: torch.Tensor, config: Any) -> list[list[int]]:
        assert len(temperatures) == len(prompts)
        said = [*map(ord, " Why so? "), config.ends[0]]
        return [prompt + (said[:-1] if place % 2 else said) for place, prompt in enumerate(prompts)]

    for name, found in (
        ("open_checkpoint", SimpleNamespace(folder=Path(), path=Path(), eos_ids=(2,))),
        ("load_tokenizer", Characters()),
        ("load_whole", SimpleNamespace(parameters=list)),
    ):
        monkeypatch.setattr(recipe, name, lambda *_, found=found: found)
    monkeypatch.setattr(recipe, "to_device", lambda model: model)
    monkeypatch.setattr(recipe, "generate_batch", write_on)
    return recipe.Asked(Path("model.gguf"))


def test_the_model_s_own_questions_are_what_it_says_where_a_user_would(
    recipe: Any, asked: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    openings: list[str] = []
    written = recipe.generate_batch

    def write_on(target: Any, prompts: list[list[int]], *rest: Any) -> list[list[int]]:
        openings.extend(map(Characters().decode, prompts))
        return list(written(target, prompts, *rest))

    monkeypatch.setattr(recipe, "generate_batch", write_on)
    assert list(asked.questions(2)) == ["Why so?"], "the second came to no end"
    assert openings == ["<user>", "<user>"]


def test_sentences_are_translated_there_and_what_came_to_an_end_back(recipe: Any, asked: Any, tmp_path: Path) -> None:
    first, second = "The mill stands by the river of the valley.", "The king had three sons and a mill."
    write(tmp_path, "textbooks", {"text": f"# Mills\n\n{first} {second} Short."})
    rng = random.Random(0)
    found = recipe.sentences(tmp_path, 5, rng)
    assert sorted(found) == [second, first]
    there, back, not_back = asked.translations(found, rng)
    assert there.startswith("Translate English to ")
    assert there.endswith(found[0])
    assert back.endswith(" to English: Why so?")
    assert not_back.endswith(found[1])


def test_conversations_to_round_by_are_questions_in_the_template_with_their_answers(
    asked: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    import build_calibration

    monkeypatch.setattr(build_calibration, "Asked", lambda model: asked)
    monkeypatch.setattr(sys, "argv", ["build_calibration.py", "model.gguf", str(tmp_path / "calibration.txt")])
    build_calibration.main()
    sys.modules.pop("build_calibration")
    written = (tmp_path / "calibration.txt").read_text(encoding="utf-8")
    assert written == "<user>Why so?<end><model> Why so? \x02\n"
