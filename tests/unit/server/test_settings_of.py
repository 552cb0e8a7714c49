"""What a request's sampling means: greedy, sampled, and seeds of any sign."""

from typing import Any

import pytest

from mirrorsd.server.answers.settings_of import check_schema, depth_of, penalised_settings, sampled, text_settings
from mirrorsd.server.errors import ApiError
from mirrorsd.server.settings import Limits
from mirrorsd.server.wire.fields import PenalisedRequest, TextRequest

CASES: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "nothing said": ({}, {}, {}),
    "greedy": ({"temperature": 0.0}, {}, {"temperature": 0.0}),
    "a seed beside greedy": ({"temperature": 0.0, "seed": 5, "top_p": 0.5}, {}, {"temperature": 0.0}),
    "too cold to be sampled": ({"temperature": 1e-8, "seed": 5}, {}, {"temperature": 0.0}),
    "a seed alone samples": ({"seed": 5}, {}, {"temperature": 1.0, "seed": 5}),
    "a checkpoint that samples": ({"seed": 5}, {"do_sample": True, "temperature": 0.6}, {"seed": 5}),
    "a negative seed": ({"seed": -2, "temperature": 1.0}, {}, {"temperature": 1.0, "seed": 2**64 - 2}),
    "no mass beside the best token": ({"top_p": 0, "seed": 5}, {}, {"temperature": 1.0, "seed": 5, "top_p": 2.0**-31}),
    "a seed that is drawn, and all tokens": (
        {"seed": -1, "top_k": -1, "temperature": 1.0},
        {},
        {"temperature": 1.0, "top_k": 0},
    ),
}


@pytest.mark.parametrize("given, defaults, expected", CASES.values(), ids=list(CASES))
def test_sampling(given: dict[str, Any], defaults: dict[str, Any], expected: dict[str, Any]) -> None:
    found = text_settings(TextRequest(**given), defaults)
    assert found == {"method": "auto", "ignore_eos": False, **expected}


def test_a_chat_is_sampled_where_the_request_says_nothing() -> None:
    chat = {"do_sample": True, "temperature": 0.8, "min_p": 0.05}
    found = {name: sampled(text_settings(TextRequest(**given), chat), chat) for name, (given, _, _) in CASES.items()}
    assert found["greedy"] == {"method": "auto", "ignore_eos": False, "temperature": 0.0}
    assert found["nothing said"] == {"method": "auto", "ignore_eos": False, **chat}
    assert found["a seed alone samples"] == {"method": "auto", "ignore_eos": False, **chat, "seed": 5}
    assert found["a negative seed"]["temperature"] == 1.0


def test_schemas_are_bounded_without_recursion() -> None:
    deep: Any = 1
    for _ in range(100_000):
        deep = [deep]
    assert depth_of(deep) == 100_000
    with pytest.raises(ApiError, match="nested deeper"):
        check_schema(deep, Limits(), "schema")
    with pytest.raises(ApiError, match="more than"):
        check_schema({"enum": ["x" * 70_000]}, Limits(), "schema")
    while isinstance(deep, list):  # or freeing it would recurse
        deep = deep[0]


def test_what_request_and_config_call_alike_is_handed_on() -> None:
    given = {
        **{"temperature": 0.5, "top_p": 0.5, "top_k": 3, "min_p": 0.1, "repetition_penalty": 1.1, "seed": 5},
        **{"presence_penalty": 0.5, "frequency_penalty": 0.25, "logit_bias": {"5": 1.0}, "stop_token_ids": [7]},
        **{"method": "plain", "ignore_eos": True, "skip_special_tokens": False},
    }
    assert penalised_settings(PenalisedRequest(**given), {}, Limits()) == given


@pytest.mark.parametrize(
    ("stop", "left"), [("", None), ([""], None), (["", "a", ""], ("a",)), (["a"] * 16 + [""], ("a",) * 16)]
)
def test_a_stop_of_no_letters_stops_nothing(stop: Any, left: Any) -> None:
    assert penalised_settings(PenalisedRequest(stop=stop), {}, Limits()).get("stop_strings") == left
