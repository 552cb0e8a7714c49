"""What benchmarks share: which prompts, how texts end, and what a speed is."""

import argparse
import doctest
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from mirrorsd.bench import runs
from mirrorsd.bench.claims import tasks, worst_case
from mirrorsd.bench.claims.serving import two_sessions
from mirrorsd.cli.input import prompt_file
from mirrorsd.cli.input.prompt_file import Question, spread

BENCH = Path(__file__).resolve().parents[3] / "bench"


def text(prompt: int, num_tokens: int, seconds: float, **figures: Any) -> Any:
    """A finished text: its speed is over `seconds`."""
    stats = {"steps": 2, "reuse_by_source": {}, "step_ms": {}, "prefill_ms": 5.0, "time_to_first_token_ms": 9.0}
    stats |= dict.fromkeys(runs.FIGURES, 1.0) | {"tokens_per_second": num_tokens / seconds} | figures
    ids = list(range(num_tokens))
    return SimpleNamespace(prompt_ids=[prompt], token_ids=ids, num_tokens=num_tokens, stats=SimpleNamespace(**stats))


def options_of(*words: str, **settings: Any) -> argparse.Namespace:
    return runs.parser(None, **settings).parse_args(words)


def test_a_short_text_weighs_as_much_as_its_tokens() -> None:
    assert runs.speed([text(0, 90, 1.0), text(1, 10, 1.0)]) == 50.0


def test_a_text_that_was_decoded_often_counts_once_with_its_median() -> None:
    disturbed = [text(0, 90, seconds) for seconds in (1.0, 70.0, 1.0)]
    assert runs.speed([*disturbed, text(1, 10, 1.0)]) == 50.0
    row = runs.sum_up([*disturbed, text(1, 10, 1.0, prefill_ms=7.0)])
    assert (row["tokens_per_second"], row["prefill_ms"], row["time_to_first_token_ms"]) == (50.0, 5.0, 9.0)


def test_texts_end_at_their_own_end_unless_that_is_asked_for() -> None:
    honoured, ignored = options_of(), options_of("--ignore-eos")
    assert (runs.ends(honoured), runs.text_config(honoured).ignore_eos) == ("honoured", False)
    assert (runs.ends(ignored), runs.text_config(ignored).ignore_eos) == ("ignored", True)


def test_costs_of_steps_ignore_the_end_and_say_so(capsys: pytest.CaptureFixture[str]) -> None:
    options = options_of(measures_steps=True)
    assert (runs.ends(options), runs.text_config(options).ignore_eos) == ("ignored", True)
    runs.finish({"ends": runs.ends(options)}, None)
    assert "END OF TEXT IGNORED" in capsys.readouterr().out
    runs.finish({"ends": runs.ends(options_of())}, None)
    assert capsys.readouterr().out == ""


def test_a_number_is_another_one_for_a_while_in_each_module_that_has_it() -> None:
    first, second = ModuleType("first"), ModuleType("second")
    first.__dict__["_SHARE"] = 0.5
    number = runs.changed("_SHARE=0.75")
    with runs.with_changed(number, [first, second]):
        assert (vars(first)["_SHARE"], "_SHARE" in vars(second), str(number)) == (0.75, False, "_SHARE=0.75")
    with runs.with_changed(None, [first]):
        assert vars(first)["_SHARE"] == 0.5
    with (
        pytest.raises(SystemExit, match="--with _OTHER=2: there is no such number"),
        runs.with_changed(runs.changed("_OTHER=2"), [first]),
    ):
        raise AssertionError


def test_only_sampled_texts_have_a_seed() -> None:
    greedy, sampled = runs.text_config(options_of()), runs.text_config(options_of(), 1.0)
    assert (greedy.is_sampling, runs.seeded(greedy, 3).seed) == (False, None)
    assert (sampled.is_sampling, runs.seeded(sampled, 3).seed) == (True, 3)


@pytest.mark.parametrize("name", [str(path.relative_to(BENCH)) for path in sorted(BENCH.rglob("*.py"))])
def test_every_report_of_texts_says_how_they_end(name: str) -> None:
    source = (BENCH / name).read_text(encoding="utf-8")
    is_report = "output" in source and "tokens_per_second" in source
    makes_texts = any(call in source for call in (".generate(", "decode_all(", "record_texts("))
    assert name == "runs.py" or not (is_report and makes_texts) or "ends" in source


def test_prompts_are_spread_over_the_file_and_others_are_others() -> None:
    path = BENCH.parent / "samples" / "storyteller" / "prompts.jsonl"
    categories = {question.turns[0]: question.category for question in prompt_file.read_questions(path)}
    chosen = [messages[0]["content"] for messages in runs.spread_prompts(path, 12)]
    others = [messages[0]["content"] for messages in runs.spread_prompts(path, 12, first=3)]
    for found in (chosen, others):
        named = [categories[prompt] for prompt in found]
        assert {name: named.count(name) for name in named} == dict.fromkeys(dict.fromkeys(categories.values()), 2)
    assert not set(chosen) & set(others)


def test_questions_are_spread_over_every_task() -> None:
    questions = [Question(question_id=str(i), category="ab"[i % 2], turns=("x",)) for i in range(12)]
    chosen = tasks.spread_over_tasks(questions, 3)
    assert [question.question_id for question in chosen] == ["0", "4", "8", "1", "5", "9"]
    assert len(tasks.spread_over_tasks(questions, 99)) == 12


def test_a_spread_of_none_is_empty() -> None:
    assert spread((), 3) == []


def test_two_sessions_share_one_queue() -> None:
    class Session:
        def generate(self, *, messages: Any, config: Any) -> Any:
            return SimpleNamespace(num_tokens=int(messages[0]["content"]))

    prompts = [[{"role": "user", "content": str(size)}] for size in range(1, 21)]
    texts, tokens_of_each = two_sessions.side_by_side([Session(), Session()], prompts, None)
    assert [result.num_tokens for result in texts] == list(range(1, 21))
    assert sum(tokens_of_each) == 210


def test_worked_examples() -> None:
    for module in (prompt_file, worst_case):
        assert doctest.testmod(module).failed == 0
