"""Texts that go on from ids of an earlier run: all that there is of them is what it was without an interruption."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mirrorsd import ConfigError, GenerationResult, MirrorPipeline
from mirrorsd.graphs.errors import ContextLengthError, ContinuationError, GenerationError

SCHEMA = {
    "type": "object",
    "properties": {"place": {"enum": ["river", "forest", "world"]}, "count": {"type": "integer", "maximum": 9999}},
    "required": ["place", "count"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_flexible": False},
}
WAYS: dict[str, dict[str, Any]] = {
    "greedy": {"ignore_eos": True, "temperature": 0.0},
    "seeded": {"ignore_eos": True, "temperature": 1.0, "seed": 11},
    "filtered": {"ignore_eos": True, "temperature": 0.9, "top_p": 0.9, "top_k": 40, "seed": 2**63 + 5},
    "penalised": {
        **{"ignore_eos": True, "temperature": 1.0, "seed": 5, "repetition_penalty": 1.3, "presence_penalty": 0.5},
        **{"frequency_penalty": 0.3, "logit_bias": {40: 2.0}},
    },
    "formed": {"json_schema": SCHEMA, "temperature": 1.0, "seed": 8},
    "told": {"ignore_eos": True, "temperature": 1.0, "seed": 3, "logprobs": True, "top_logprobs": 3},
    "formed and told": {"json_schema": SCHEMA, "temperature": 0.0, "logprobs": True, "top_logprobs": 1},
}
METHODS = ("plain", "serial", "mirror", "auto", "lookup", "medusa")
PROMPT = "Every morning the fox"
LENGTH = 40


@pytest.fixture(scope="module")
def pipe(headed_bundle: tuple[Path, list[int]]) -> Iterator[MirrorPipeline]:
    with MirrorPipeline.load(headed_bundle[0], device_map="cpu") as pipe:
        yield pipe


def told(result: GenerationResult) -> tuple[Any, ...]:
    """All that a text says of itself, however it was made."""
    texts = [token.text for token in result.tokens]
    return result.text, result.token_ids, result.stop_reason, result.logprobs, result.seed, texts


def rest_of(pipe: MirrorPipeline, ids: list[int], **settings: Any) -> tuple[str, GenerationResult]:
    """What a stream says behind the ids that it goes on from, and its result."""
    num_seen, rest = 0, ""
    for chunk in pipe.stream(PROMPT, continue_from=ids, **settings):
        num_seen += len(chunk.tokens)
        if num_seen > len(ids) or not chunk.tokens:
            rest += chunk.text
            assert num_seen - len(chunk.tokens) >= len(ids), "no step says both old and new"
        if chunk.result is not None:
            result = chunk.result
    return rest, result


@pytest.mark.parametrize("way", WAYS)
def test_a_text_goes_on_from_any_of_its_tokens(pipe: MirrorPipeline, way: str) -> None:
    settings = {"max_new_tokens": LENGTH, **WAYS[way]}
    whole = pipe.generate(PROMPT, method="plain", **settings)
    for cut in range(len(whole.token_ids) + 1):
        method = METHODS[cut % len(METHODS)]
        rest, result = rest_of(pipe, whole.token_ids[:cut], method=method, **settings)
        assert told(result) == told(whole), (cut, method)
        assert rest == "".join(token.text for token in whole.tokens[cut:]), (cut, method)
        assert result.method == method
        assert result.stats.steps == sum(not step.is_replay for step in result.steps)


@pytest.mark.parametrize("padding", (0, 8))
def test_it_goes_on_in_another_pipeline_that_has_read_nothing(tiny_bundle: Path, padding: int) -> None:
    settings: dict[str, Any] = {"max_new_tokens": 100, "temperature": 1.0, "seed": 4, "ignore_eos": True}
    options = {"device_map": "cpu", "speculation": {"pad_rows_to": padding}}
    with MirrorPipeline.load(tiny_bundle, **options) as first:
        whole = first.generate(PROMPT, method="mirror", **settings)
    with MirrorPipeline.load(tiny_bundle, **options) as second:
        twice = second.generate(PROMPT, method="serial", continue_from=whole.token_ids[:70], **settings)
        assert told(twice) == told(whole)
        assert told(second.generate(PROMPT, method="auto", continue_from=twice.token_ids[:71], **settings)) == told(
            whole
        )
        replays = [step for step in twice.steps if step.is_replay]
        assert len(replays) == (10 if padding else 3)


@pytest.mark.parametrize("ending", ("stop_strings", "stop_token_ids", "length", "context"))
def test_it_ends_where_it_would_have(pipe: MirrorPipeline, ending: str) -> None:
    settings: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True, "max_new_tokens": 60}
    free = pipe.generate(PROMPT, **settings)
    if ending == "stop_strings":
        settings["stop_strings"] = [free.text[len(free.text) // 2 :][:6]]
    elif ending == "stop_token_ids":
        settings["stop_token_ids"] = [free.token_ids[30]]
    elif ending == "context":
        settings["max_new_tokens"] = 512
    whole = pipe.generate(PROMPT, method="plain", **settings)
    assert whole.stop_reason == {"stop_strings": "stop_string", "stop_token_ids": "stop_token"}.get(ending, ending)
    count = len(whole.token_ids)
    for cut in {0, 1, *range(max(0, count - 8), count + 1)}:
        rest, result = rest_of(pipe, whole.token_ids[:cut], method=METHODS[cut % 4], **settings)
        assert told(result) == told(whole), cut
        assert rest == "".join(token.text for token in whole.tokens[cut:])


def test_other_sessions_in_between_change_nothing(pipe: MirrorPipeline) -> None:
    settings: dict[str, Any] = {"max_new_tokens": 90, "temperature": 1.0, "seed": 4, "ignore_eos": True}
    whole = pipe.generate(PROMPT, **settings)
    stream = pipe.stream(PROMPT, continue_from=whole.token_ids[:80], **settings)
    next(stream)
    pipe.generate("The old heron", max_new_tokens=5)
    result = [chunk.result for chunk in stream][-1]
    assert result is not None
    assert told(result) == told(whole)


@pytest.mark.parametrize("place", (0, 1, 5, 38, 39))
def test_ids_that_are_not_the_texts_own_are_an_error(pipe: MirrorPipeline, place: int) -> None:
    settings: dict[str, Any] = {"max_new_tokens": LENGTH, "temperature": 1.0, "seed": 4, "ignore_eos": True}
    whole = pipe.generate(PROMPT, **settings)
    wrong = list(whole.token_ids)
    wrong[place] = (wrong[place] + 1) % 300
    with pytest.raises(
        ContinuationError, match=f"token {place}, {wrong[place]} was given, {whole.token_ids[place]} is"
    ):
        pipe.generate(PROMPT, continue_from=wrong, **settings)
    assert told(pipe.generate(PROMPT, **settings)) == told(whole), "the session is as good as before"


def test_ids_behind_the_end_are_an_error(pipe: MirrorPipeline) -> None:
    settings: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True, "max_new_tokens": 60}
    free = pipe.generate(PROMPT, **settings)
    settings["stop_token_ids"] = [free.token_ids[10]]
    end = free.token_ids.index(free.token_ids[10]) + 1
    with pytest.raises(ContinuationError, match=rf"token {end}, {free.token_ids[end]} was given, it is over"):
        pipe.generate(PROMPT, continue_from=free.token_ids[:40], **settings)


def test_what_cannot_be_is_refused_before_anything_runs(pipe: MirrorPipeline) -> None:
    with pytest.raises(ConfigError, match="continue_from has 9 ids; allowed: at most 8, as max_new_tokens says"):
        pipe.generate(PROMPT, continue_from=[1] * 9, max_new_tokens=8)
    with pytest.raises(GenerationError, match=r"continue_from\[1\] is 300"):
        pipe.generate(PROMPT, continue_from=[1, 300])
    with pytest.raises(ConfigError, match="an id, or several"):
        pipe.generate(PROMPT, continue_from=[1.5])
    with pytest.raises(ContextLengthError, match="continue_from 512"):
        pipe.generate(PROMPT, continue_from=[1] * 512, max_new_tokens=512)
    with pytest.raises(ConfigError, match="use generate"):
        pipe.session().generate_several(2, PROMPT, continue_from=[1])
