"""Answers over HTTP are the in-process plain text, whatever the method, the cache and the other users are at."""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from mirrorsd import MirrorPipeline
from mirrorsd.server import Running
from mirrorsd.tests.end_to_end.server.serving_here import TINY, post, raw, served, status_of

PROMPTS = ("Every morning the fox", "The old heron said", "Who lived in the forest?", "Once upon a time")
SCHEMA = {
    "type": "object",
    "properties": {"place": {"enum": ["river", "forest", "world"]}, "count": {"type": "integer", "maximum": 9999}},
    "required": ["place", "count"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_flexible": False},
}
METHODS = ("plain", "serial", "mirror", "auto")
WAYS: dict[str, dict[str, Any]] = {
    "greedy": {"ignore_eos": True, "temperature": 0.0},
    "seeded": {"ignore_eos": True, "temperature": 0.9, "top_p": 0.9, "seed": 11},
    "constrained": {"json_schema": SCHEMA, "temperature": 0.0},
    "logprobs": {"ignore_eos": True, "temperature": 1.0, "seed": 3, "logprobs": True, "top_logprobs": 2},
}
Answer = tuple[str, list[float]]


def on_the_wire(settings: dict[str, Any]) -> dict[str, Any]:
    found = dict(settings)
    schema = found.pop("json_schema", None)
    if schema is not None:
        found["response_format"] = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    return found


@pytest.fixture(scope="module")
def four_seats(tiny_bundle: Path) -> Iterator[Running]:
    with served({"tiny": tiny_bundle}, seats=4) as running:
        yield running


@pytest.fixture(scope="module")
def expected(tiny_bundle: Path) -> dict[tuple[str, str], Answer]:
    """Plain texts of a pipeline of their own, nothing cached."""
    found = {}
    with MirrorPipeline.load(tiny_bundle, device_map="cpu", speculation=TINY["speculation"]) as pipe:
        for way, prompt in product(WAYS, PROMPTS):
            messages = [{"role": "user", "content": prompt}]
            with pipe.session() as session:
                result = session.generate(messages=messages, max_new_tokens=32, method="plain", **WAYS[way])
            found[way, prompt] = result.text, [entry.value for entry in result.logprobs]
    return found


def ask(running: Running, way: str, prompt: str, method: str, *, is_cached: bool) -> Answer:
    body = {
        "model": "tiny",
        "messages": [{"role": "user", "content": prompt}],
        "max_tokens": 32,
        "method": method,
        "cache_prompt": is_cached,
        **on_the_wire(WAYS[way]),
    }
    answer = raw(running, post(running, "/v1/chat/completions", json.dumps(body).encode()))
    assert status_of(answer) == 200, answer
    choice = json.loads(answer.split(b"\r\n\r\n", 1)[1])["choices"][0]
    logprobs = choice["logprobs"]["content"] if choice["logprobs"] else []
    return choice["message"]["content"], [entry["logprob"] for entry in logprobs]


def wrong_answers(
    running: Running, expected: dict[tuple[str, str], Answer], requests: list[tuple[str, str, str, bool]], users: int
) -> list[tuple[str, str, str, bool]]:
    def is_wrong(request: tuple[str, str, str, bool]) -> bool:
        way, prompt, method, is_cached = request
        text, logprobs = ask(running, way, prompt, method, is_cached=is_cached)
        known_text, known_logprobs = expected[way, prompt]
        return text != known_text or logprobs != known_logprobs[: len(logprobs)]

    with ThreadPoolExecutor(users) as pool:
        return [request for request, wrong in zip(requests, pool.map(is_wrong, requests), strict=True) if wrong]


def test_a_few_of_everything(four_seats: Running, expected: dict[tuple[str, str], Answer]) -> None:
    requests = [
        (way, PROMPTS[number % 4], METHODS[(number + turn) % 4], bool(number % 2))
        for number, way in enumerate(WAYS)
        for turn in range(4)
    ]
    assert wrong_answers(four_seats, expected, requests, users=4) == []


def test_another_conversation_finds_the_system_message_of_the_first_in_the_cache(four_seats: Running) -> None:
    system = "You are the old heron of the dark river, and say what you have seen."

    def asked(prompt: str, *, is_cached: bool) -> tuple[str, int]:
        messages = [{"role": "system", "content": system}, {"role": "user", "content": prompt}]
        body = {"model": "tiny", "messages": messages, "max_tokens": 8, "cache_prompt": is_cached}
        answer = raw(four_seats, post(four_seats, "/v1/chat/completions", json.dumps(body).encode()))
        found = json.loads(answer.split(b"\r\n\r\n", 1)[1])
        return found["choices"][0]["message"]["content"], found["usage"]["prompt_tokens_details"]["cached_tokens"]

    asked("Who came by?", is_cached=True)
    shared, fresh = (asked("What does the fox do in the evening?", is_cached=known) for known in (True, False))
    assert shared[0] == fresh[0]
    assert (shared[1] > len(system.split()), fresh[1]) == (True, 0)


@pytest.mark.long
def test_three_hundred_answers_and_more(four_seats: Running, expected: dict[tuple[str, str], Answer]) -> None:
    requests = list(product(WAYS, PROMPTS, METHODS, (True, False)))
    wrong = {users: wrong_answers(four_seats, expected, requests, users) for users in (1, 2, 4)}
    assert wrong == {1: [], 2: [], 4: []}
    assert 3 * len(requests) >= 300
