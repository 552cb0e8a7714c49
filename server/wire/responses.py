"""`/v1/responses`: the request. Nothing is stored: every request brings its whole conversation along."""

from typing import Annotated, Any, Literal, Self

from pydantic import Discriminator, Field, Tag, field_validator, model_validator

from mirrorsd.server.wire.chat import (
    FunctionDefinition,
    GrammarFormat,
    ObjectFormat,
    RegexFormat,
    TextFormat,
    text_parts,
)
from mirrorsd.server.wire.fields import JsonObject, MostTokens, Reasoning, TextRequest, Verbosity, Wire

_PARTS = ("input_text", "output_text", "reasoning_text", "summary_text", "text")
_NEEDED = {
    "message": ("role", "content"),
    "function_call": ("call_id", "name", "arguments"),
    "function_call_output": ("call_id", "output"),
    "reasoning": (),
}


class InputText(Wire):
    """A piece of a turn; others than text are refused."""

    type: Literal["input_text", "output_text", "reasoning_text", "summary_text", "text"]
    text: str


class InputItem(Wire):
    """One item of a conversation: a message, a call of a tool, its result, or what a model thought."""

    type: Literal["message", "function_call", "function_call_output", "reasoning"] = "message"
    role: Literal["system", "developer", "user", "assistant"] | None = None
    content: str | list[InputText] | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: str | list[InputText] | None = None

    @model_validator(mode="before")
    @classmethod
    def _refuse_references(cls, value: Any) -> Any:
        if isinstance(value, dict) and value.get("type") == "item_reference":
            raise ValueError("nothing is stored here: send the items themselves, which clients do with store: false")
        return value

    @field_validator("content", "output", mode="before")
    @classmethod
    def _refuse_media(cls, value: Any) -> Any:
        return text_parts(value, _PARTS)

    @model_validator(mode="after")
    def _is_whole(self) -> Self:
        missing = [name for name in _NEEDED[self.type] if getattr(self, name) is None]
        if missing:
            raise ValueError(f"an item of the type {self.type} needs {missing[0]}")
        return self


class FunctionTool(FunctionDefinition):
    """A function that the model may call; here its fields stand beside the type."""

    type: Literal["function"]


class ForeignTool(Wire):
    """A tool that a server would run itself, or of another kind: the model is not told of it, and the client is."""

    type: str


def _kind_of_tool(tool: object) -> str:
    return "function" if isinstance(tool, dict) and tool.get("type") == "function" else "foreign"


AnyTool = Annotated[
    Annotated[FunctionTool, Tag("function")] | Annotated[ForeignTool, Tag("foreign")], Discriminator(_kind_of_tool)
]


class ToolName(Wire):
    """The function that must be called."""

    type: Literal["function"]
    name: str


class AllowedNames(Wire):
    """Some of the functions, of which one may or must be called."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[list[ToolName], Field(min_length=1)]


Chosen = Annotated[ToolName | AllowedNames, Field(discriminator="type")]


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
    verbosity: Verbosity | None = None


class ResponseRequest(TextRequest):
    """A conversation to answer, in the newer form."""

    model: str  # this interface has no model of its own choice
    input: str | Annotated[list[InputItem], Field(min_length=1)]
    instructions: str | None = None
    max_output_tokens: MostTokens | None = None
    text: TextOptions | None = None
    reasoning: Reasoning | None = None
    include: list[str] | None = None
    metadata: dict[str, str] | None = None
    tools: list[AnyTool] | None = None
    tool_choice: Literal["none", "auto", "required"] | Chosen | None = None
    parallel_tool_calls: bool | None = None
    # What would be silently wrong: refused where it says something.
    previous_response_id: str | None = None
    conversation: Any = None
    background: bool | None = None
    prompt: Any = None
