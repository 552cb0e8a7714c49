"""Errors as OpenAI's clients read them: a status, and `{"error": {"message", "type", "param", "code"}}`."""

from collections.abc import Mapping
from typing import Any

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


def api_error(error: MirrorError) -> ApiError:
    """What a client is told about an error of the pipeline.

    A failed device is a server's error that a retry would only repeat at once; `x-should-retry` says so to clients.
    """
    if isinstance(error, ContextLengthError):
        return ApiError(400, str(error), param="messages", code="context_length_exceeded")
    if isinstance(error, ContinuationError):
        return ApiError(409, str(error), param="continue_from", code="continuation_differs")
    if isinstance(error, Cancelled):
        return ApiError(503, str(error), code="cancelled", headers={"x-should-retry": "false"})
    if isinstance(error, ConfigError):
        return ApiError(400, str(error), code="invalid_value")
    if isinstance(error, GenerationError):
        return ApiError(400, str(error), code="invalid_request")
    if isinstance(error, BundleError):
        return ApiError(500, "The bundle cannot be loaded; the server's log says why.", code="bundle_unusable")
    code = "device_failed" if isinstance(error, DeviceError) else None
    return ApiError(500, str(error), code=code, headers={"x-should-retry": "false"})
