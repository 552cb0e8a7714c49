"""What `auto` loses: by turns with plain decoding, in time and in waiting for the draft, with the texts compared."""

import argparse
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from mirrorsd import GenerationConfig
from mirrorsd.bench.claims.worst_case import measure, prompts_of, waited_seconds
from mirrorsd.runtime.ledger import Span

PROMPTS = Path(__file__).resolve().parents[3] / "samples" / "storyteller" / "prompts.jsonl"


def result(seconds: float, waited: float, method: str, token: int = 5) -> Any:
    """A text of four tokens in two steps."""
    stats = SimpleNamespace(tokens_per_step=2.0, steps=2, tokens_per_second=4 / seconds, seconds=seconds + 1.0)
    stats.steps_by_method = {method: 2}
    spans = [Span("host", "exposed", 1.0, 1.0 + waited), Span("target", "prefix", 0.0, 9.0)]
    return SimpleNamespace(token_ids=[1, token], stats=stats, spans=spans)


class Session:
    """Plain decoding takes a second; `auto` half of one more, a quarter of which it waits."""

    def __init__(self, token: int) -> None:
        self.asked: list[str] = []
        self._token = token

    def generate(self, *, config: GenerationConfig | None = None, **settings: Any) -> Any:
        method = str(config.method) if config else settings["method"]
        self.asked.append(method)
        return result(1.0, 0.0, "plain") if method == "plain" else result(1.5, 0.25, "serial", self._token)

    def close(self) -> None:
        pass


def measured(token: int, repeats: int) -> tuple[dict[str, Any], list[str]]:
    session = Session(token)
    pipe: Any = SimpleNamespace(
        session=lambda: session, engine=SimpleNamespace(known=SimpleNamespace(pairs={False: "known"}))
    )
    row = measure(pipe, "ordinary", [{"prompt": "a"}], GenerationConfig(temperature=0.0), repeats)
    return row, session.asked


def test_losses_are_over_plain_decoding_s_time_and_waiting_apart() -> None:
    row, asked = measured(token=5, repeats=2)
    assert (row["prompts"], row["first"], row["later"]) == ("ordinary, T=0", 0.5, 0.5)
    assert row["first_whole"] == 0.25, "the prompt's second counts, too"
    assert row["first_waited"] == 0.25
    assert row["texts_that_differ"] == 0
    assert row["steps"] == {"plain": 0, "serial": 8, "mirror": 0}
    turns = [method for method in asked if method in ("plain", "auto")]
    assert turns == ["plain", "auto", "plain", "auto", "auto", "plain", "auto", "plain"]


def test_texts_that_differ_are_counted() -> None:
    assert measured(token=6, repeats=3)[0]["texts_that_differ"] == 6


def test_only_the_time_that_the_target_waits_for_the_draft_is_waiting() -> None:
    assert waited_seconds(result(1.0, 0.5, "serial")) == 0.5


def test_hostile_prompts_and_ordinary_questions() -> None:
    hostile = argparse.Namespace(ordinary=False, count=2, prompts=PROMPTS)
    found = prompts_of(hostile, vocab_size=50)
    assert {name: len(prompts) for name, prompts in found.items()} == {"random": 2, "foreign": 2}
    assert all(3 <= token < 50 for prompt in found["random"] for token in prompt["token_ids"])
    assert found == prompts_of(hostile, vocab_size=50), "the same in every run"
    (ordinary,) = prompts_of(argparse.Namespace(ordinary=True, count=3, prompts=PROMPTS), vocab_size=50).values()
    assert [message["role"] for prompt in ordinary for message in prompt["messages"]] == ["user"] * 3
