"""`/v1/chat/completions`: the request."""

from collections.abc import Sequence
from typing import Annotated, Any, Literal, Self

from pydantic import ConfigDict, Field, field_validator, model_validator

from mirrorsd.server.wire.fields import JsonObject, MostTokens, PenalisedRequest, Reasoning, Verbosity, Wire
from mirrorsd.texts.messages import joined_text

Choices = Annotated[list[str], Field(min_length=1, max_length=4096)]
Role = Literal["system", "developer", "user", "assistant", "tool", "function"]


class TextPart(Wire):
    """A piece of a message's content; others than text are refused, and no address is ever opened."""

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)

    type: Literal["text"]
    text: str

    @model_validator(mode="before")
    @classmethod
    def _from_responses(cls, value: Any) -> Any:
        is_other = isinstance(value, dict) and value.get("type") in ("input_text", "output_text")
        return {"type": "text", "text": value.get("text")} if is_other else value


def text_parts(content: Any, kinds: Sequence[str]) -> Any:
    """Content whose refusals are text too: another model's history has them.

    Raises:
        ValueError: a part that is no text.
    """
    if not isinstance(content, list):
        return content
    found = [_said(part) for part in content]
    for part in found:
        kind = part.get("type") if isinstance(part, dict) else None
        if isinstance(kind, str) and kind not in kinds:
            raise ValueError(
                f"bundles read text only: send parts of type '{kinds[0]}'. Images, sounds and files are not taken, and "
                "no URL is ever opened"
            )
    return found


def _said(part: Any) -> Any:
    is_refusal = isinstance(part, dict) and part.get("type") == "refusal"
    return {"type": "text", "text": part.get("refusal")} if is_refusal else part


class FunctionCall(Wire):
    """Which function an assistant called; `arguments` is JSON text, or what it says."""

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)

    name: str
    arguments: str | JsonObject


class ToolCall(Wire):
    """An assistant's call of a tool."""

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)

    id: str | None = None
    type: Literal["function"] = "function"
    function: FunctionCall


class Message(Wire):
    """One turn of a conversation; what else it says is the template's to read."""

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)

    role: Role
    content: str | list[TextPart] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None

    @field_validator("content", mode="before")
    @classmethod
    def _refuse_media(cls, value: Any) -> Any:
        return text_parts(value, ("text", "input_text", "output_text"))


class FunctionDefinition(Wire):
    """A function that the model may call; `parameters` is a JSON schema."""

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.:/-]{1,128}$")]
    description: str | None = None
    parameters: JsonObject | None = None
    strict: bool | None = None


class Tool(Wire):
    """A tool; functions are the only kind."""

    type: Literal["function"]
    function: FunctionDefinition


class FunctionName(Wire):
    """The name in a choice."""

    name: str


class NamedChoice(Wire):
    """The tool that must be called."""

    type: Literal["function"]
    function: FunctionName


class AllowedTools(Wire):
    """Some of the tools, of which one may or must be called."""

    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedChoice], Field(min_length=1)]


class AllowedChoice(Wire):
    """OpenAI's frame around it."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


Chosen = Annotated[NamedChoice | AllowedChoice, Field(discriminator="type")]


class JsonSchema(Wire):
    """OpenAI's frame around a schema."""

    name: str = "answer"
    description: str | None = None
    schema_: Annotated[JsonObject, Field(alias="schema")]
    strict: bool | None = None


class TextFormat(Wire):
    """Free text."""

    type: Literal["text"]


class ObjectFormat(Wire):
    """Any JSON object; with llama.cpp's `schema`, one of that."""

    type: Literal["json_object"]
    schema_: Annotated[JsonObject | None, Field(alias="schema")] = None


class SchemaFormat(Wire):
    """JSON by a schema."""

    type: Literal["json_schema"]
    json_schema: JsonSchema | None = None
    schema_: Annotated[JsonObject | None, Field(alias="schema")] = None

    @model_validator(mode="after")
    def _has_one(self) -> Self:
        if (self.json_schema is None) == (self.schema_ is None):
            raise ValueError("give the schema as json_schema.schema, or in llama.cpp's way as schema")
        return self


class RegexFormat(Wire):
    """Text that a regular expression matches (an extension)."""

    type: Literal["regex"]
    regex: str


class GrammarFormat(Wire):
    """Text of a grammar in Lark's notation (an extension)."""

    type: Literal["grammar"]
    grammar: str


Format = Annotated[TextFormat | ObjectFormat | SchemaFormat | RegexFormat | GrammarFormat, Field(discriminator="type")]


class Prediction(Wire):
    """Text that the answer will probably contain: it is tried as windows, and costs nothing where it is wrong."""

    type: Literal["content"]
    content: str | list[TextPart]


class StructuredOutputs(Wire):
    """vLLM's frame around the form of a text."""

    json_: Annotated[JsonObject | str | None, Field(alias="json")] = None
    regex: str | None = None
    choice: Choices | None = None
    grammar: str | None = None
    json_object: bool | None = None
    disable_any_whitespace: Literal[False] = False
    disable_additional_properties: bool = False
    whitespace_pattern: None = None
    structural_tag: None = None


class FormedRequest(PenalisedRequest):
    """A request that may say what form its text has: in OpenAI's way, llama.cpp's or vLLM's, but in one only."""

    response_format: Format | None = None
    json_schema: JsonObject | None = None
    grammar: str | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: JsonObject | str | None = None
    guided_regex: str | None = None
    guided_choice: Choices | None = None
    guided_grammar: str | None = None


class ChatRequest(FormedRequest):
    """A conversation to answer."""

    messages: Annotated[list[Message], Field(min_length=1, max_length=2048)]
    max_completion_tokens: MostTokens | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    tools: list[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | Chosen | None = None
    parallel_tool_calls: bool | None = None
    prediction: Prediction | None = None
    chat_template_kwargs: JsonObject | None = None
    documents: list[JsonObject] | None = None
    reasoning_effort: str | None = None
    reasoning: Reasoning | None = None
    verbosity: Verbosity | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    add_special_tokens: Literal[False] = False
    modalities: list[str] | None = None
    mirror_keep: Annotated[str, Field(pattern=r"^[A-Za-z0-9-]{16,64}$")] | None = None

    @field_validator("reasoning", "verbosity", mode="before")
    @classmethod
    def _leave_out_what_says_nothing(cls, value: Any) -> Any:
        return value or None


def text_of(content: str | list[TextPart]) -> str:
    """Content in parts as one text."""
    return content if isinstance(content, str) else joined_text([part.model_dump() for part in content])
