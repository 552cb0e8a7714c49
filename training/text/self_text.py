"""Let the target write the text that draft and exits are trained on.

Owns: batched generation with a cache.
Does not own: the prompts (`self_prompts.py`), the folder of finished texts (`text_folder.py`).

Prompts of nearly equal length share a batch; while a longer prompt lasts, its own tokens are fed instead of the
target's choices, so nothing is padded and every position is the true one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from mirrorsd.families import parts_of
from mirrorsd.graphs.errors import ConfigError
from mirrorsd.training.models.attention import CachedRows, training_attention_in

__all__ = [
    "SelfText",
    "SelfTextConfig",
    "cut_before_loop",
    "generate_batch",
]

_FORGOTTEN_SHARE = 1 / 8
"""Texts that have ended are carried on until they are this share of a batch: to forget some copies the cache."""


@dataclass(frozen=True, slots=True)
class SelfText:
    """One text of the target: its tokens, how many of them were the prompt, and the temperature of the rest."""

    tokens: list[int]
    prompt_length: int
    temperature: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SelfTextConfig:
    """How the target writes.

    Attributes:
        ends: Tokens after any of which a text is finished.
        max_new_tokens: Longest continuation.
        batch: Texts written at once.
        temperatures: One is drawn per prompt; 0 is greedy. Repeat one to have it more often.
        seed: Of the draws.
    """

    ends: tuple[int, ...]
    max_new_tokens: int = 256
    batch: int = 64
    temperatures: tuple[float, ...] = (0.0, 0.0, 0.0, 0.5, 0.8, 1.0)
    seed: int = 20

    def __post_init__(self) -> None:
        if not self.temperatures or min(self.temperatures) < 0:
            raise ConfigError(f"temperatures is {self.temperatures}; give at least one, none below 0 (0 is greedy)")


class BatchedDecoder:
    """A target with training attention and a cache for `B` texts that are all at the same position.

    A target with recurrent layers decodes with Hugging Face's cache, which holds their states too.
    """

    def __init__(self, target: PreTrainedModel, capacity: int) -> None:
        """Reserve the cache; `capacity` is the longest text in tokens."""
        self._target = target
        self._parts = parts_of(target)
        self._cache = CachedRows(capacity)
        self._states = DynamicCache(config=target.config) if self._parts.mixers else None

    @property
    def position(self) -> int:
        """Return how many tokens of every text were fed."""
        return self._cache.position

    def feed(self, ids: Tensor) -> Tensor:
        """Feed `ids [B,S]` (S > 1 only into an empty cache) and return the last row's logits `[B,V]`."""
        logits = self._by_layers(ids) if self._states is None else self._with_states(ids)
        self._cache.position += ids.shape[1]
        return logits.float()

    def _by_layers(self, ids: Tensor) -> Tensor:
        parts, cache = self._parts, self._cache
        positions = torch.arange(cache.position, cache.position + ids.shape[1])[None]
        hidden = parts.embed(ids, positions)
        angles = parts.angles(hidden, positions)
        for layer, angle in zip(parts.layers, angles, strict=True):
            hidden = layer(hidden, position_embeddings=angle, position_ids=positions, rows=cache)
        return parts.logits(hidden[:, -1])

    def _with_states(self, ids: Tensor) -> Tensor:
        model: Any = self._target
        logits: Tensor = model(ids, past_key_values=self._states, use_cache=True, logits_to_keep=1).logits
        return logits[:, -1]

    def keep(self, rows: Tensor) -> None:
        """Forget all texts but `rows`."""
        if self._states is None:
            self._cache.keep(rows)
        else:
            self._states.reorder_cache(rows)  # which takes any rows, and selects states too


@torch.inference_mode()
def generate_batch(
    target: PreTrainedModel,
    prompts: list[list[int]],
    temperatures: Tensor,
    config: SelfTextConfig,
    show: Callable[[float], None] = lambda share: None,
) -> list[list[int]]:
    """Continue every prompt until one of `config.ends` or `max_new_tokens`; return prompts and continuations together.

    Args:
        target: The model; its own dtype is used.
        prompts: Token ids, beginning with the begin-of-text token.
        temperatures: `[B]`, 0 for greedy.
        config: Limits and seed.
        show: Told the share of the longest text that is there, token by token.
    """
    with training_attention_in(target):
        return _generate(target, prompts, temperatures, config, show)


def _generate(
    target: PreTrainedModel,
    prompts: list[list[int]],
    temperatures: Tensor,
    config: SelfTextConfig,
    show: Callable[[float], None],
) -> list[list[int]]:
    lengths = torch.tensor([len(prompt) for prompt in prompts])
    capacity = min(int(lengths.max()) + config.max_new_tokens, target.config.max_position_embeddings)
    texts = torch.zeros(len(prompts), capacity, dtype=torch.long)
    for row, prompt in enumerate(prompts):
        texts[row, : len(prompt)] = torch.tensor(prompt)
    ends = torch.clamp(lengths + config.max_new_tokens, max=capacity)
    active = torch.arange(len(prompts))
    is_done = torch.zeros(len(prompts), dtype=torch.bool)
    decoder = BatchedDecoder(target, capacity)
    end_ids = torch.tensor(config.ends, dtype=torch.long)
    generator = torch.Generator(texts.device).manual_seed(config.seed)
    fed = texts[:, : int(lengths.min())]
    while len(active) and decoder.position < capacity - 1:
        logits = decoder.feed(fed)
        place = decoder.position
        show(place / capacity)
        if place == capacity:
            break
        chosen = _choose(logits, temperatures[active], generator)
        is_prompt = place < lengths[active]
        chosen = torch.where(is_prompt, texts[active, place], chosen)
        texts[active, place] = chosen
        is_end = ~is_done & ~is_prompt & (torch.isin(chosen, end_ids) | (place + 1 >= ends[active]))
        ends[active[is_end]] = place + 1
        is_done |= is_end
        if is_done.sum() >= _FORGOTTEN_SHARE * len(active):
            rows = (~is_done).nonzero().flatten()
            active, chosen, is_done = active[rows], chosen[rows], is_done[rows]
            decoder.keep(rows)
        fed = chosen[:, None]
    return [text[:end].tolist() for text, end in zip(texts, ends.tolist(), strict=True)]


def _choose(logits: Tensor, temperatures: Tensor, generator: torch.Generator) -> Tensor:
    """Return argmax where the temperature is 0, a sample elsewhere: one draw a text, not one a word."""
    chosen = logits.argmax(-1)
    sampled = temperatures.nonzero().flatten()
    if len(sampled):
        reach = (logits[sampled] / temperatures[sampled, None]).softmax(-1).cumsum(-1)
        draws = torch.rand(len(sampled), 1, generator=generator, device=generator.device) * reach[:, -1:]
        chosen[sampled] = torch.searchsorted(reach, draws, right=True)[:, 0].clamp(max=logits.shape[-1] - 1)
    return chosen


def cut_before_loop(text: SelfText, *, length: int = 6, keep: int = 0) -> SelfText:
    """Cut a text where the target begins to repeat itself: before the first run of `length` tokens it wrote already.

    A small model that decodes greedily ends in a loop, and a loop is easy to draft; what comes before tells more.
    `keep` tokens of the loop stay.

    >>> cut_before_loop(SelfText([9, 1, 2, 3, 1, 2, 3], prompt_length=1), length=2).tokens
    [9, 1, 2, 3]
    """
    seen: set[tuple[int, ...]] = set()
    for start in range(text.prompt_length, len(text.tokens) - length + 1):
        run = tuple(text.tokens[start : start + length])
        if run in seen:
            return SelfText(text.tokens[: start + keep], text.prompt_length, text.temperature)
        seen.add(run)
    return text
