"""Errors as OpenAI's clients read them: a status, and `{"error": {"message", "type", "param", "code"}}`."""

import re
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel

from mirrorsd.graphs.errors import (
    BundleError,
    Cancelled,
    ConfigError,
    ContextLengthError,
    ContinuationError,
    DeviceError,
    GenerationError,
    MirrorError,
)

_LONGEST = 600
"""Characters of a message: the longest of our own has under 400, and what a client sent may be in it."""
_TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}
_PROMPTS = ("messages", "input", "prompt", "content")
"""What requests call their words."""
_FORMS = ("structured_outputs", "response_format", "text")
_ASKED_BY = {
    "json_schema": ("json_schema", "guided_json", *_FORMS),
    "regex": ("guided_regex", *_FORMS),
    "grammar": ("grammar", "guided_choice", "guided_grammar", *_FORMS, "tools"),
    "template_variables": ("chat_template_kwargs",),
    "token_ids": _PROMPTS,
}
"""Fields of requests by what the pipeline calls them, where that is another name."""


class ApiError(Exception):
    """A request that is answered with an error.

    Attributes:
        status: of HTTP.
        message: what was found, what is expected, what to do.
        param: which field of the request is meant.
        code: a word that programs can compare.
        headers: more headers of the answer.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, _shortened(message), param, code
        self.headers = dict(headers or {})

    @property
    def body(self) -> dict[str, Any]:
        """The answer's body."""
        default = "server_error" if self.status >= 500 else "invalid_request_error"
        kind = _TYPES.get(self.status, default)
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


def not_now(status: str) -> ApiError:
    """The refusal of a server that takes no requests: it is `loading`, `failed` or `closing`."""
    return ApiError(503, f"The server is {status}.", code=status, headers={"Retry-After": "5", "Connection": "close"})


def internal_error() -> ApiError:
    """What a client is told of a fault of ours."""
    return ApiError(500, "The server failed; its log says how.", code="internal_error")


def _shortened(message: str) -> str:
    """A message without its middle, where it is long.

    >>> len(_shortened("x" * 100_000)), _shortened("The queue is full.")
    (600, 'The queue is full.')
    """
    if len(message) <= _LONGEST:
        return message
    half = (_LONGEST - 5) // 2
    return f"{message[: _LONGEST - half - 5]} ... {message[-half:]}"


def prompt_field(model: type[BaseModel]) -> str | None:
    """What requests of this kind call their words."""
    return next((name for name in _PROMPTS if name in model.model_fields), None)


def _named(error: MirrorError, body: BaseModel | None) -> tuple[str, str | None]:
    """What a client is told of a refused setting, by the name that its request has for it, and that name."""
    found = re.match(r"(GenerationConfig\.)?(\w+)", str(error))
    field = found[2] if found else ""
    given = {} if body is None else {name: getattr(body, name) for name in type(body).model_fields}
    param = next((name for name in _ASKED_BY.get(field, (field,)) if given.get(name) not in (None, "")), None)
    return (str(error).replace(found[0], param, 1) if found and found[1] and param else str(error)), param


def api_error(error: MirrorError, body: BaseModel | None = None) -> ApiError:
    """What a client who has sent this `body` is told about an error of the pipeline.

    A failed device is a server's error that a retry would only repeat at once; `x-should-retry` says so to clients.
    """
    if isinstance(error, ContextLengthError):
        words = None if body is None else prompt_field(type(body))
        return ApiError(400, str(error), param=words, code="context_length_exceeded")
    if isinstance(error, ContinuationError):
        return ApiError(409, str(error), param="continue_from", code="continuation_differs")
    if isinstance(error, Cancelled):
        return ApiError(503, str(error), code="cancelled", headers={"x-should-retry": "false"})
    if isinstance(error, ConfigError | GenerationError):
        message, param = _named(error, body)
        kind = "invalid_value" if isinstance(error, ConfigError) else "invalid_request"
        return ApiError(400, message, param=param, code=kind)
    if isinstance(error, BundleError):
        return ApiError(500, "The bundle cannot be loaded; the server's log says why.", code="bundle_unusable")
    code = "device_failed" if isinstance(error, DeviceError) else None
    return ApiError(500, str(error), code=code, headers={"x-should-retry": "false"})
