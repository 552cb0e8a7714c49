"""Which status a client is given for which error."""

import pytest

from mirrorsd.graphs.errors import (
    BundleError,
    Cancelled,
    ConfigError,
    ContextLengthError,
    DeviceError,
    GenerationError,
    MirrorError,
)
from mirrorsd.server.errors import ApiError, api_error
from mirrorsd.server.wire.completions import CompletionRequest
from mirrorsd.server.wire.responses import ResponseRequest

STATUSES = [
    (ConfigError("x"), 400, "invalid_value"),
    (ContextLengthError("x"), 400, "context_length_exceeded"),
    (GenerationError("x"), 400, "invalid_request"),
    (Cancelled("x"), 503, "cancelled"),
    (DeviceError("x"), 500, "device_failed"),
    (BundleError("/a/path"), 500, "bundle_unusable"),
]


@pytest.mark.parametrize("error, status, code", STATUSES, ids=lambda value: type(value).__name__)
def test_statuses(error: MirrorError, status: int, code: str) -> None:
    found = api_error(error)
    assert (found.status, found.code) == (status, code)
    assert set(found.body["error"]) == {"message", "type", "param", "code"}


def test_what_a_retry_would_only_repeat_says_so() -> None:
    assert api_error(DeviceError("x")).headers["x-should-retry"] == "false"


def test_paths_of_the_server_stay_there() -> None:
    assert "/a/path" not in api_error(BundleError("/a/path")).message


def test_types_are_those_that_clients_know() -> None:
    kinds = {status: ApiError(status, "x").body["error"]["type"] for status in (400, 401, 404, 429, 500)}
    assert list(kinds.values()) == [
        *("invalid_request_error", "authentication_error", "not_found_error", "rate_limit_error", "server_error"),
    ]


def test_a_refusal_names_the_field_that_the_request_has() -> None:
    """The pipeline's own names are others: nobody has sent a `GenerationConfig`, nor a completion's `messages`."""
    body = CompletionRequest.model_validate({"prompt": "x", "guided_json": {}, "logit_bias": {"5": 1}})
    refused = api_error(ConfigError("GenerationConfig.json_schema cannot be taken: x"), body)
    assert (refused.param, refused.message) == ("guided_json", "guided_json cannot be taken: x")
    assert api_error(ConfigError("GenerationConfig.logit_bias names the id 7"), body).param == "logit_bias"
    assert api_error(GenerationError("token_ids[0] is 7"), body).param == "prompt"
    assert api_error(GenerationError("The prompt is empty"), body).param is None
    longs = [api_error(ContextLengthError("x"), CompletionRequest.model_validate({"prompt": "x"}))]
    longs += [api_error(ContextLengthError("x"), ResponseRequest.model_validate({"model": "x", "input": "x"}))]
    assert [error.param for error in longs] == ["prompt", "input"]
