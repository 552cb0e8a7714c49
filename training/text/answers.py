"""Let the target answer questions: greedily turn by turn, or sampled at temperature 1.

Owns: how a question becomes a prompt. Does not own: generation (`self_text.py`), question files.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers import PreTrainedModel

from mirrorsd.training.text.self_prompts import chat_prompt
from mirrorsd.training.text.self_text import SelfText, SelfTextConfig, generate_batch

__all__ = ["answer", "continue_sampled", "sample"]


def answer(
    target: PreTrainedModel,
    tokenizer: Any,
    questions: Sequence[Sequence[str]],
    ends: tuple[int, ...],
    max_new_tokens: int,
) -> list[SelfText]:
    """Answer every turn of every question greedily; each answer becomes part of its conversation.

    Args:
        target: The model.
        tokenizer: Of `transformers`; without a chat template, the turns are plain text.
        questions: The user's turns of each question.
        ends: Tokens that end an answer.
        max_new_tokens: Longest answer.

    Returns:
        One text per turn; turns that do not fit into the context are left out.
    """
    config = SelfTextConfig(ends=ends, max_new_tokens=max_new_tokens, temperatures=(0.0,))
    texts: list[SelfText] = []
    told: list[list[dict[str, str]]] = [[] for _ in questions]
    for turn in range(max(map(len, questions), default=0)):
        asked = [number for number, turns in enumerate(questions) if turn < len(turns)]
        for number in asked:
            told[number].append({"role": "user", "content": questions[number][turn]})
        prompts = {number: _prompt(tokenizer, told[number]) for number in asked}
        prompts = {number: ids for number, ids in prompts.items() if _fits(target, ids)}
        if not prompts:
            break
        written = generate_batch(target, list(prompts.values()), torch.zeros(len(prompts)), config)
        for number, text in zip(prompts, written, strict=True):
            texts.append(SelfText(text, len(prompts[number])))
            reply = tokenizer.decode(text[len(prompts[number]) :], skip_special_tokens=True)
            told[number].append({"role": "assistant", "content": reply})
    return texts


def sample(
    target: PreTrainedModel, tokenizer: Any, questions: Sequence[str], ends: tuple[int, ...], max_new_tokens: int
) -> list[SelfText]:
    """Answer single questions at temperature 1."""
    return continue_sampled(
        target,
        [_prompt(tokenizer, [{"role": "user", "content": question}]) for question in questions],
        ends,
        max_new_tokens,
    )


def continue_sampled(
    target: PreTrainedModel, prompts: Sequence[list[int]], ends: tuple[int, ...], max_new_tokens: int
) -> list[SelfText]:
    """Continue prompts, given as token ids, at temperature 1; those that do not fit into the context are left out."""
    config = SelfTextConfig(ends=ends, max_new_tokens=max_new_tokens, temperatures=(1.0,))
    fitting = [prompt for prompt in prompts if _fits(target, prompt)]
    written = generate_batch(target, fitting, torch.ones(len(fitting)), config) if fitting else []
    return [SelfText(text, len(prompt), 1.0) for text, prompt in zip(written, fitting, strict=True)]


def _prompt(tokenizer: Any, messages: list[dict[str, str]]) -> list[int]:
    if tokenizer.chat_template:
        return chat_prompt(tokenizer, messages)
    return list(tokenizer("\n\n".join(message["content"] for message in messages))["input_ids"])


def _fits(target: PreTrainedModel, prompt: list[int]) -> bool:
    return 0 < len(prompt) < int(target.config.max_position_embeddings)
