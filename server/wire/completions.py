"""`/v1/completions`, `/tokenize`, `/detokenize`, `/apply-template`: the requests."""

from typing import Annotated

from pydantic import Discriminator, Field, Tag

from mirrorsd.server.wire.chat import FormedRequest, Message, Tool
from mirrorsd.server.wire.fields import JsonObject, TokenId, Wire

_MOST_PROMPTS = Field(min_length=1, max_length=128)


def _kind(prompt: object) -> str:
    """Which of its forms a prompt has, by its first piece: trying all of them on a long one takes seconds."""
    first = prompt[0] if isinstance(prompt, list) and prompt else prompt
    if isinstance(first, list):
        return "prompts_of_ids"
    if isinstance(first, str):
        return "text" if first is prompt else "texts"
    return "ids"


Prompt = Annotated[
    Annotated[str, Tag("text")]
    | Annotated[list[str], Tag("texts"), _MOST_PROMPTS]
    | Annotated[list[TokenId], Tag("ids"), Field(min_length=1)]
    | Annotated[list[list[TokenId]], Tag("prompts_of_ids"), _MOST_PROMPTS],
    Discriminator(_kind),
]


class CompletionRequest(FormedRequest):
    """A text to go on with, or several."""

    prompt: Prompt
    logprobs: Annotated[int, Field(ge=0, le=5)] | None = None
    echo: bool | None = None
    best_of: int | None = None
    add_special_tokens: bool = True


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

    messages: Annotated[list[Message], Field(min_length=1, max_length=2048)]
    model: str | None = None
    tools: list[Tool] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    chat_template_kwargs: JsonObject | None = None
