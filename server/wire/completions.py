"""`/v1/completions`, `/tokenize`, `/detokenize`, `/apply-template`: the requests."""

from typing import Annotated

from pydantic import Field

from mirrorsd.server.wire.chat import Message, Tool
from mirrorsd.server.wire.fields import PenalisedRequest, Wire

TokenId = Annotated[int, Field(ge=0, le=1 << 31)]


class CompletionRequest(PenalisedRequest):
    """A text to go on with, or several."""

    prompt: str | Annotated[list[str] | list[TokenId] | list[list[TokenId]], Field(min_length=1)]
    logprobs: Annotated[int, Field(ge=0, le=5)] | None = None
    # What would be silently wrong: refused where it says something.
    echo: bool | None = None
    best_of: int | None = None
    suffix: str | None = None


class TokenizeRequest(Wire):
    """A text to take apart."""

    content: str
    model: str | None = None
    add_special: bool = False
    parse_special: bool = True
    with_pieces: bool = False


class DetokenizeRequest(Wire):
    """Tokens to put together."""

    tokens: list[TokenId]
    model: str | None = None


class TemplateRequest(Wire):
    """A conversation to write as the model reads it."""

    messages: Annotated[list[Message], Field(min_length=1)]
    model: str | None = None
    tools: list[Tool] | None = None
    chat_template_kwargs: dict[str, str | int | float | bool | None] | None = None
