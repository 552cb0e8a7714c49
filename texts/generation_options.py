"""The fields of `GenerationConfig` as keyword arguments: an editor completes them, a type checker checks them.

A test holds the two against each other: a field that is missing here, or has another type, fails it.
"""

from collections.abc import Mapping, Sequence
from typing import Any, TypedDict

from mirrorsd.graphs.names import Method
from mirrorsd.texts.config import CancelToken


class GenerationOptions(TypedDict, total=False):
    """The options of one text; `GenerationConfig` says what each of them does."""

    max_new_tokens: int
    do_sample: bool | None
    temperature: float | None
    top_k: int | None
    top_p: float | None
    min_p: float | None
    repetition_penalty: float | None
    seed: int | None
    stop_strings: Sequence[str]
    stop_token_ids: Sequence[int]
    presence_penalty: float
    frequency_penalty: float
    logit_bias: Mapping[int, float] | Sequence[tuple[int, float]]
    logprobs: bool
    top_logprobs: int
    skip_special_tokens: bool
    json_schema: Mapping[str, Any] | bool | str | None
    regex: str | None
    grammar: str | None
    tools: Sequence[Mapping[str, Any]]
    template_variables: Mapping[str, Any] | None
    prediction: Sequence[int]
    continue_from: Sequence[int]
    deadline_s: float | None
    cancel: CancelToken | None
    ignore_eos: bool
    use_defaults: bool
    method: Method
