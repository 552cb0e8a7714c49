"""What an answer tells about itself: usage, llama.cpp's `timings`, and `mirror`."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from mirrorsd.runtime import GenerationResult

FINISH = {"eos": "stop", "stop_token": "stop", "stop_string": "stop"}
_FROM_STATS = (
    *("steps", "steps_by_method", "tokens_per_step", "mean_accepted", "reuse_rate", "reuse_by_source", "repeat_rate"),
    *("overlap", "draft_exposed_ms", "step_ms", "time_to_first_token_ms", "near_ties", "warnings"),
)


def finish_reason(result: GenerationResult) -> str:
    """OpenAI's word: `stop` where the text has ended, `length` where a limit or the deadline cut it."""
    return FINISH.get(result.stop_reason, "length")


def usage(results: Sequence[GenerationResult]) -> dict[str, Any]:
    """Tokens of the prompt and of all choices; the prompt counts once, as with OpenAI."""
    num_prompt = results[0].stats.num_prompt_tokens if results else 0
    num_new = sum(result.num_tokens for result in results)
    accepted, looked_up = map(sum, zip(*(_predicted(result) for result in results), strict=True))
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_new,
        "total_tokens": num_prompt + num_new,
        "prompt_tokens_details": {"cached_tokens": results[0].stats.num_reused_tokens},
        "completion_tokens_details": {
            "accepted_prediction_tokens": accepted,
            "rejected_prediction_tokens": looked_up - accepted,
        },
    }


def _predicted(result: GenerationResult) -> tuple[int, int]:
    """Tokens of windows that were looked up in text, the prediction's included: accepted, and all."""
    steps = [step for before, step in pairwise(result.steps) if before.next_source == "text"]
    return sum(step.num_accepted for step in steps), sum(step.num_window for step in steps)


def drafted(results: Sequence[GenerationResult]) -> tuple[int, int]:
    """Tokens that were verified, siblings of windows included, and how many of them were accepted."""
    steps = [step for result in results for step in result.steps if not step.is_replay]
    return sum(step.num_window + step.num_siblings for step in steps), sum(step.num_accepted for step in steps)


def _num_replayed(result: GenerationResult) -> int:
    """Tokens of the text that came with the request (`continue_from`): they were read, as the prompt was."""
    return sum(1 + step.num_accepted for step in result.steps if step.is_replay)


def timings(results: Sequence[GenerationResult]) -> dict[str, Any]:
    """llama.cpp's fields, of all choices together; times in milliseconds."""
    num_cached = sum(result.stats.num_reused_tokens for result in results)
    num_replayed = sum(map(_num_replayed, results))
    num_prompt = sum(result.stats.num_prompt_tokens for result in results) - num_cached + num_replayed
    prompt_ms = sum(result.stats.prefill_ms for result in results)
    num_new = sum(result.num_tokens for result in results) - num_replayed
    new_ms = sum(1e3 * result.stats.seconds for result in results) - prompt_ms
    num_drafted, num_accepted = drafted(results)
    return {
        "cache_n": num_cached,
        "prompt_n": num_prompt,
        "prompt_ms": round(prompt_ms, 3),
        "prompt_per_token_ms": round(prompt_ms / max(num_prompt, 1), 4),
        "prompt_per_second": round(1e3 * num_prompt / max(prompt_ms, 1e-3), 2),
        "predicted_n": num_new,
        "predicted_ms": round(new_ms, 3),
        "predicted_per_token_ms": round(new_ms / max(num_new, 1), 4),
        "predicted_per_second": round(1e3 * num_new / max(new_ms, 1e-3), 2),
        "draft_n": num_drafted,
        "draft_n_accepted": num_accepted,
    }


def mirror(results: Sequence[GenerationResult], plain_tokens_per_second: float | None) -> dict[str, Any]:
    """How the first choice was decoded; `seeds` are those of all, where texts are sampled."""
    first = results[0]
    stats = first.stats.to_dict()
    return {
        "seed": first.seed,
        "seeds": [result.seed for result in results],
        "method": first.method,
        "stop_reason": first.stop_reason,
        "tokens_per_second": stats["tokens_per_second"],
        **{name: stats[name] for name in _FROM_STATS},
        "device_map": first.device_map,
        "layout": first.layout,
        "plain_tokens_per_second": plain_tokens_per_second,
    }
