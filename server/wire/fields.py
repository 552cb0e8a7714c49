"""The base of all requests, and what requests for a text have in common."""

from functools import cache
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Discriminator,
    Field,
    GetCoreSchemaHandler,
    Tag,
    model_validator,
)
from pydantic_core import CoreSchema

from mirrorsd.graphs.names import Method

TokenId = Annotated[int, Field(ge=0, le=1 << 31)]
Bias = Annotated[float, Field(ge=-100, le=100)]
BiasedToken = Annotated[str, Field(pattern=r"^[0-9]{1,9}$")]
ALL = 1 << 31
AS_EVER = -1
"""What other servers take for a number that they choose by themselves: a seed that is drawn, all tokens, no end."""


def _count(value: int) -> int:
    if value == 0:
        raise ValueError("at least one token is produced; -1 is as many as fit")
    return ALL if value == AS_EVER else value


MostTokens = Annotated[int, Field(ge=AS_EVER), AfterValidator(_count)]
"""Most tokens of an answer."""
JsonObject = dict[str, Any]


def _kind_of_ids(ids: object) -> str:
    """Of one choice or of several, by the first piece."""
    return "ids_of_choices" if isinstance(ids, list) and ids and isinstance(ids[0], list) else "ids"


Continued = Annotated[
    Annotated[list[TokenId], Tag("ids")] | Annotated[list[list[TokenId]], Tag("ids_of_choices"), Field(max_length=128)],
    Discriminator(_kind_of_ids),
]
"""Ids that a text goes on from, or those of several choices."""


class Wire(BaseModel):
    """Strict types, no NaN or infinity; whole numbers may have a point, and a null may stand for a default.

    What becomes of fields that a model does not have is said in `known_fields`.
    """

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _plainly(cls, given: Any) -> Any:
        """The values as other JSON writers mean them: a null that stands for a default, a whole number with a point."""
        if not isinstance(given, dict):
            return given
        found = given
        for name, is_whole, has_default in _plain_fields(cls):
            value = given.get(name, ...)
            if value is None and has_default:
                found = {key: kept for key, kept in found.items() if key != name}
            elif is_whole and isinstance(value, float) and value.is_integer():
                found = {**found, name: int(value)}
        return found

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        """Check lists and objects up to their first error: a million errors take a minute to be written down."""
        schema = handler(source)
        open_ones: list[Any] = [schema]
        while open_ones:
            part = open_ones.pop()
            if isinstance(part, dict):
                if part.get("type") in ("list", "dict"):
                    part["fail_fast"] = True
                open_ones += part.values()
            elif isinstance(part, list | tuple):
                open_ones += part
        return schema


@cache
def _plain_fields(model: type[BaseModel]) -> tuple[tuple[str, bool, bool], ...]:
    """Fields by their names in JSON that take whole numbers, or have a default that is said; and which of both."""
    found = [
        (field.alias or name, _takes_whole(field.annotation), not field.is_required() and field.default is not None)
        for name, field in model.model_fields.items()
    ]
    return tuple((name, is_whole, has_default) for name, is_whole, has_default in found if is_whole or has_default)


def _takes_whole(kind: Any) -> bool:
    """Whether a field's type is a whole number or has one as a form; lists of them are read as they are."""
    is_frame = get_origin(kind) in (Union, UnionType, Annotated)
    return kind is int or (is_frame and any(map(_takes_whole, get_args(kind))))


class StreamOptions(Wire):
    """OpenAI's."""

    include_usage: bool = False
    include_obfuscation: bool = False  # of padding that hides lengths: there is none here


class Reasoning(Wire):
    """How much a model thinks, where its template reads that; thoughts are no items of their own, nor summed up."""

    effort: str | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None


Verbosity = Literal["low", "medium", "high"]
"""A hint that no template here reads."""


class TextRequest(Wire):
    """What a request for a text may say about it, whichever way it is asked for.

    `top_k` and what stands behind it are extensions: see docs/server.md.
    """

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    temperature: Annotated[float, Field(ge=0, le=100)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=AS_EVER, le=1 << 31)] | None = None
    min_p: Annotated[float, Field(ge=0, lt=1)] | None = None
    repetition_penalty: Annotated[float, Field(ge=0.01, le=100)] | None = None
    seed: int | None = None
    method: Method = "auto"
    ignore_eos: bool = False
    cache_prompt: bool = True
    continue_from: Continued | None = None
    mirror_tokens: bool = False
    mirror_timeline: bool = False


class PenalisedRequest(TextRequest):
    """The same with what chat and completions, but not responses, have."""

    n: Annotated[int, Field(ge=1)] | None = None
    stop: str | list[str] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    logit_bias: Annotated[dict[BiasedToken, Bias], Field(max_length=1024)] | None = None
    max_tokens: MostTokens | None = None
    n_predict: MostTokens | None = None
    stop_token_ids: Annotated[list[TokenId], Field(max_length=1024)] | None = None
    skip_special_tokens: bool = True

    @property
    def most_tokens(self) -> int | None:
        """How many are wanted at most."""
        return self.max_tokens or self.n_predict

    @property
    def wants_usage(self) -> bool:
        """Whether a stream ends with the numbers of tokens."""
        return self.stream_options is not None and self.stream_options.include_usage
