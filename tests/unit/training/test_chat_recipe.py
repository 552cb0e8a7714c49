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
    assert len(made) == 4
    assert sum(PASSAGE.strip() in request for request in made) == 2, "one to sum up, one to ask about"
    assert sum("Solar Energy" in request for request in made) == 1
    assert not any("Review" in request for request in made)


def test_the_model_s_own_questions_are_what_it_says_where_a_user_would(
    recipe: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Characters:
        def __call__(self, text: str) -> dict[str, list[int]]:
            return {"input_ids": [ord(character) for character in text]}

        def apply_chat_template(self, messages: list[dict[str, str]], *, tokenize: bool) -> str:
            return f"<user>{messages[0]['content']}<end>"

        def decode(self, ids: list[int]) -> str:
            return "".join(map(chr, ids))

    def write_on(_target: Any, prompts: list[list[int]], temperatures: torch.Tensor, config: Any) -> list[list[int]]:
        assert Characters().decode(prompts[0]) == "<user>"
        assert temperatures.tolist() == [1.0] * len(prompts)
        said = [*map(ord, " Why is it so? "), config.end]
        return [prompts[0] + said, prompts[1] + said[:-1]]

    weights = SimpleNamespace(parameters=list)
    for name, found in (
        ("open_checkpoint", SimpleNamespace(folder=Path(), path=Path(), eos_ids=(2,))),
        ("load_tokenizer", Characters()),
        ("load_whole", weights),
    ):
        monkeypatch.setattr(recipe, name, lambda *_, found=found: found)
    monkeypatch.setattr(recipe, "to_device", lambda model: model)
    monkeypatch.setattr(recipe, "generate_batch", write_on)
    found = list(recipe.own_questions(Path("model.gguf"), 1))
    assert found == ["Why is it so?"], "the second came to no end"
