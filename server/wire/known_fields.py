"""What becomes of a field of a request: one table for those of OpenAI, llama.cpp, vLLM and ollama.

A field that a request's model has is **honoured**, or its bounds say which values are. What stands here is **refused**,
where it would change the answer and has another value than one that changes nothing, or **harmless**. Everything else
is **unknown**: clients add fields daily, so they are told of it and answered all the same.
"""

from collections.abc import Iterator
from typing import NamedTuple

from pydantic import BaseModel

from mirrorsd.server.wire.chat import ChatRequest
from mirrorsd.server.wire.completions import CompletionRequest
from mirrorsd.server.wire.responses import ForeignTool, InputItem, ResponseRequest


class Refusal(NamedTuple):
    """A field that is not honoured: what to do instead, and the values that change nothing, beside none at all."""

    advice: str = "leave it away"
    neutral: tuple[object, ...] = ()


class Refused(NamedTuple):
    """A field of a request that must be refused, and what its sender can do."""

    name: str
    advice: str


_NOTHING: tuple[object, ...] = (False, "", [], {})
_OFF, _ZERO, _ONE = Refusal(neutral=_NOTHING), Refusal(neutral=(0, False)), Refusal(neutral=(1,))
_ONLY_NONE = Refusal()
_OF_OTHERS = Refusal("it belongs to requests of other paths", (*_NOTHING, 0))
_WINDOWS = "use repetition_penalty, which looks at the whole text"

REFUSED = {
    # OpenAI
    **dict.fromkeys(("audio", "moderation"), _OFF),
    "web_search_options": Refusal("there is no search"),
    "functions": Refusal("use tools", _NOTHING),
    "function_call": Refusal("use tool_choice", ("none", "auto", *_NOTHING)),
    "suffix": Refusal("models here only go on with a text", ("",)),
    # vLLM and OpenAI's Responses
    **dict.fromkeys(("max_tool_calls", "context_management", "background"), _OFF),
    "truncation": Refusal("prompts are never cut", ("disabled",)),
    # vLLM
    **dict.fromkeys(("use_beam_search", "include_stop_str_in_output", "echo", "watermarking"), _OFF),
    **dict.fromkeys(("return_token_ids", "return_token_offsets", "return_tokens_as_token_ids"), _OFF),
    **dict.fromkeys(("return_prompt_text", "bad_words", "logits_processors", "repetition_detection"), _OFF),
    **dict.fromkeys(("kv_transfer_params", "ec_transfer_params", "vllm_xargs"), _OFF),
    **dict.fromkeys(("prompt_logprobs", "allowed_token_ids", "logprob_token_ids", "prompt_embeds"), _ONLY_NONE),
    **dict.fromkeys(("truncate_prompt_tokens", "structural_tag", "guided_whitespace_pattern"), _ONLY_NONE),
    "chat_template": Refusal("templates come with the bundle"),
    "best_of": Refusal("use n", (1,)),
    "max_completion_tokens": Refusal("use max_tokens"),
    "length_penalty": Refusal("it belongs to beam search", (1,)),
    "include_reasoning": Refusal("texts are given whole", (True,)),
    "thinking_token_budget": Refusal(neutral=(-1,)),
    "min_tokens": Refusal("use a grammar, or ignore_eos", (0,)),
    "routed_experts_prompt_start": _ZERO,
    # llama.cpp
    **dict.fromkeys(("mirostat", "dry_multiplier", "xtc_probability", "dynatemp_range", "n_indent"), _ZERO),
    **dict.fromkeys(("t_max_predict_ms", "top_n_sigma", "adaptive_target"), Refusal(neutral=(0, -1))),
    **dict.fromkeys(("typical_p", "tfs_z"), _ONE),
    **dict.fromkeys(("lora", "return_tokens", "post_sampling_probs", "response_fields", "reasoning_control"), _OFF),
    **dict.fromkeys(("grammar_lazy", "grammar_triggers", "preserved_tokens", "generation_prompt"), _OFF),
    **dict.fromkeys(("chat_format", "chat_parser", "grammar_type"), _ONLY_NONE),
    "parse_tool_calls": Refusal("calls are always read", (True,)),
    "repeat_penalty": Refusal(_WINDOWS, (1,)),
    "min_keep": Refusal(neutral=(0, 1)),
    "n_cmpl": Refusal("use n", (1,)),
    "n_probs": Refusal("use logprobs", (0,)),
    "samplers": Refusal("the order is bias, penalties, temperature, top_k, top_p, min_p"),
    "reasoning_format": Refusal("texts are given whole", ("none", "auto")),
    "reasoning_budget_tokens": Refusal(neutral=(-1,)),
    # ollama
    "options": Refusal("give its fields beside messages or prompt", _NOTHING),
    "format": Refusal("use response_format", ("",)),
    "think": Refusal("use chat_template_kwargs, where the template has a variable for it"),
    "num_predict": Refusal("use max_tokens", (-1,)),
    "num_ctx": Refusal("the context is the bundle's: `mirrorsd export --context`"),
    "penalize_newline": Refusal(neutral=(True,)),
    **dict.fromkeys(("system", "template", "context", "images", "raw", "_debug_render_only"), _OFF),
    **dict.fromkeys(("width", "height", "steps"), _ZERO),
}
"""Fields that would change the answer, and are not honoured."""

HARMLESS = frozenset(
    (
        # OpenAI: who asks, how it is billed, stored and cached
        *("metadata", "prompt_cache_key", "prompt_cache_options", "prompt_cache_retention"),
        *("safety_identifier", "service_tier", "store", "user", "include"),
        # vLLM: scheduling and caches, and what says something beside a field that is refused
        *("cache_salt", "priority", "request_id", "session_id", "stream_interval", "return_mm_kwargs"),
        *("media_io_kwargs", "mm_processor_kwargs", "guided_decoding_backend", "truncation_side"),
        "spaces_between_special_tokens",
        # llama.cpp: the same
        *("id_slot", "n_cache_reuse", "n_keep", "n_discard", "backend_sampling", "sse_ping_interval", "verbose"),
        *("timings_per_token", "return_progress", "repeat_last_n", "mirostat_tau", "mirostat_eta"),
        *("dry_base", "dry_allowed_length", "dry_penalty_last_n", "dry_sequence_breakers", "xtc_threshold"),
        *("dynatemp_exponent", "adaptive_decay", "reasoning_budget_start_tag", "reasoning_budget_end_tag"),
        *("reasoning_budget_end_tags", "reasoning_budget_message"),
        # ollama: how a model is loaded
        *("keep_alive", "numa", "num_batch", "num_gpu", "main_gpu", "low_vram", "f16_kv", "logits_all", "vocab_only"),
        *("use_mmap", "use_mlock", "embedding_only", "num_thread", "num_keep"),
    )
)
"""Fields that change no answer here."""
HINTS = ("reasoning_effort", "verbosity")
"""Fields that wish for something of a chat template: where none is used, they are named and change nothing."""
_ELSEWHERE = frozenset(
    name for model in (ChatRequest, CompletionRequest, ResponseRequest) for name in model.model_fields
)
"""Fields that some request has: on another path they would be ignored."""
_TEMPLATES_OWN = ("messages", "tools", "input")
"""What else stands in these is for the chat template to read."""
MOST_NAMED, _LONGEST_NAME = 16, 64


def refused_field(body: BaseModel) -> Refused | None:
    """The first field of a request that its model does not have and that must be refused; None without any."""
    for name, value in (body.model_extra or {}).items():
        is_harmless = name in HARMLESS or (name in HINTS and isinstance(value, str))
        refusal = None if is_harmless else REFUSED.get(name, _OF_OTHERS if name in _ELSEWHERE else None)
        if refusal is not None and value is not None and not any(_is_same(value, same) for same in refusal.neutral):
            return Refused(name, refusal.advice)
    return None


def unknown_fields(body: BaseModel) -> list[str]:
    """Names of a request's fields that nobody here knows, those within its own objects too; the first 16, shortened."""
    found: list[str] = []
    for name in (*_unknown(body, ""), *_left_out(body)):
        found.append(name if len(name) <= _LONGEST_NAME else f"{name[:_LONGEST_NAME]}...")
        if len(found) == MOST_NAMED:
            break
    return found


def _unknown(model: BaseModel, place: str) -> Iterator[str]:
    for name in model.model_extra or ():
        if place or name in HINTS or not (name in REFUSED or name in HARMLESS or name in _ELSEWHERE):
            yield f"{place}{name}"
    for name in type(model).model_fields:
        value = getattr(model, name)
        if isinstance(value, BaseModel) and name not in _TEMPLATES_OWN:
            yield from _unknown(value, f"{place}{name}.")


def _left_out(body: BaseModel) -> Iterator[str]:
    """The kinds of tools that the model is not told of, and of their calls."""
    given = getattr(body, "input", None)
    for place, item in enumerate(given if isinstance(given, list) else ()):
        if isinstance(item, InputItem) and item.is_foreign:
            yield f"input.{place}.{item.type}"
    for place, tool in enumerate(getattr(body, "tools", None) or ()):
        if isinstance(tool, ForeignTool):
            yield f"tools.{place}.{tool.type}"


def _is_same(value: object, other: object) -> bool:
    """Whether two values are one in JSON, where `true` is not 1.

    >>> _is_same(1.0, 1), _is_same(True, 1), _is_same([], [])
    (True, False, True)
    """
    return isinstance(value, bool) == isinstance(other, bool) and value == other
