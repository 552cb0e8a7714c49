"""`/v1/responses`: the request. Nothing is stored: every request brings its whole conversation along."""

from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from mirrorsd.server.wire.chat import GrammarFormat, ObjectFormat, RegexFormat, TextFormat
from mirrorsd.server.wire.fields import JsonObject, TextRequest, Wire


class InputText(Wire):
    """A piece of a turn; others than text are refused."""

    type: Literal["input_text", "output_text", "text"]
    text: str


class InputMessage(Wire):
    """One turn."""

    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[InputText]

    @field_validator("content", mode="before")
    @classmethod
    def _refuse_media(cls, value: Any) -> Any:
        for part in value if isinstance(value, list) else ():
            kind = part.get("type") if isinstance(part, dict) else None
            if isinstance(kind, str) and kind not in ("input_text", "output_text", "text"):
                raise ValueError("bundles read text only: no images, sounds or files, and no URL is ever opened")
        return value


class SchemaTextFormat(Wire):
    """JSON by a schema; here the schema stands beside the type."""

    type: Literal["json_schema"]
    name: str = "answer"
    description: str | None = None
    schema_: Annotated[JsonObject, Field(alias="schema")]
    strict: bool | None = None


ResponseFormat = Annotated[
    TextFormat | ObjectFormat | SchemaTextFormat | RegexFormat | GrammarFormat, Field(discriminator="type")
]


class TextOptions(Wire):
    """What form the text has."""

    format: ResponseFormat | None = None


class ResponseRequest(TextRequest):
    """A conversation to answer, in the newer form."""

    input: str | Annotated[list[InputMessage], Field(min_length=1)]
    instructions: str | None = None
    max_output_tokens: Annotated[int, Field(ge=1)] | None = None
    text: TextOptions | None = None
    metadata: dict[str, str] | None = None
    # What would be silently wrong: refused where it says something.
    tools: list[Any] | None = None
    previous_response_id: str | None = None
    conversation: Any = None
    background: bool | None = None
    prompt: Any = None
