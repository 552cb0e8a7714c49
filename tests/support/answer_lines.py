"""Answer lines of `mirrorsd bench` with times made by hand."""

from typing import Any


def line(question_id: int | str, new_tokens: int, seconds: float, **values: Any) -> dict[str, Any]:
    """An answer of one turn whose prompt took half of the time, a token a step."""
    choice = {
        "turns": ["x"],
        "new_tokens": [new_tokens],
        "wall_time": [seconds],
        "prefill_s": [seconds / 2],
        "accept_lengths": [1] * new_tokens,
        "tokens": [list(range(new_tokens))],
        "step_ends_s": [[seconds / 2 * (1 + (number + 1) / new_tokens) for number in range(new_tokens)]],
        "window_lengths": [[0] * new_tokens],
        "ttft_s": [seconds / 4],
        "sources": [{}],
    }
    category = values.pop("category", "rag")
    return {"question_id": question_id, "category": category, "choices": [choice | values]}
