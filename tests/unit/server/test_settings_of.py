"""What a request's sampling means: greedy, sampled, and seeds of any sign."""

from typing import Any

import pytest

from mirrorsd.server.answers.settings_of import check_schema, depth_of, text_settings
from mirrorsd.server.errors import ApiError
from mirrorsd.server.settings import Limits
from mirrorsd.server.wire.fields import TextRequest

CASES: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "nothing said": ({}, {}, {}),
    "greedy": ({"temperature": 0.0}, {}, {"temperature": 0.0}),
    "a seed beside greedy": ({"temperature": 0.0, "seed": 5, "top_p": 0.5}, {}, {"temperature": 0.0}),
    "a seed alone samples": ({"seed": 5}, {}, {"temperature": 1.0, "seed": 5}),
    "a checkpoint that samples": ({"seed": 5}, {"do_sample": True, "temperature": 0.6}, {"seed": 5}),
    "a negative seed": ({"seed": -1, "temperature": 1.0}, {}, {"temperature": 1.0, "seed": 2**64 - 1}),
}


@pytest.mark.parametrize("given, defaults, expected", CASES.values(), ids=list(CASES))
def test_sampling(given: dict[str, Any], defaults: dict[str, Any], expected: dict[str, Any]) -> None:
    found = text_settings(TextRequest(**given), defaults)
    assert found == {"method": "auto", "ignore_eos": False, **expected}


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
