"""`/v1/responses`: the request. Nothing is stored: every request brings its whole conversation along."""

import json
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
    """One item of a conversation: a message, a call of a tool, its result, or what a model thought.

    Calls of tools that a server ran itself are taken, and left out as those tools are.
    """

    type: Annotated[str, Field(pattern=r"^(message|reasoning|mcp_[a-z_]{1,40}|[a-z_]{1,40}_call(_output)?)$")] = (
        "message"
    )
    role: Literal["system", "developer", "user", "assistant"] | None = None
    content: str | list[InputText] | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: str | list[InputText] | None = None

    @model_validator(mode="before")
    @classmethod
    def _as_function(cls, value: Any) -> Any:
        """A call of a custom tool as one of a function with this one argument; of a foreign one no more than its type.

        Raises:
            ValueError: a reference to what a server has stored.
        """
        kind = value.get("type") if isinstance(value, dict) else None
        if kind == "item_reference":
            raise ValueError("nothing is stored here: send the items themselves, which clients do with store: false")
        if kind == "custom_tool_call_output":
            return {**value, "type": "function_call_output"}
        if kind == "custom_tool_call":
            text = value.get("input")
            arguments = json.dumps({"input": text}, ensure_ascii=False) if isinstance(text, str) else None
            return {**value, "type": "function_call", "arguments": arguments}
        return {"type": kind} if isinstance(kind, str) and kind not in _NEEDED else value

    @field_validator("content", "output", mode="before")
    @classmethod
    def _refuse_media(cls, value: Any) -> Any:
        return text_parts(value, _PARTS)

    @model_validator(mode="after")
    def _is_whole(self) -> Self:
        missing = [name for name in _NEEDED.get(self.type, ()) if getattr(self, name) is None]
        if missing:
            raise ValueError(f"an item of the type {self.type} needs {missing[0]}")
        return self

    @property
    def is_foreign(self) -> bool:
        """Whether it is about a tool that the model is not told of."""
        return self.type not in _NEEDED


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
