"""Let the target write the text that draft and exits are trained on.

Owns: batched generation with a cache, and the folder of finished batches (a kill loses at most the batch in work).
Does not own: the prompts (`self_prompts.py`).

Prompts of nearly equal length share a batch; while a longer prompt lasts, its own tokens are fed instead of the
target's choices, so nothing is padded and every position is the true one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel

from mirrorsd.graphs.errors import ConfigError

from .decoder_rows import finish_layer, project_rows

__all__ = [
    "SelfText",
    "SelfTextConfig",
    "cut_before_loop",
    "generate_batch",
    "join_texts",
    "load_texts",
    "write_self_text",
]


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
        end: Token after which a text is finished.
        max_new_tokens: Longest continuation.
        batch: Texts written at once.
        temperatures: One is drawn per prompt; 0 is greedy. Repeat one to have it more often.
        seed: Of the draws.
    """

    end: int
    max_new_tokens: int = 256
    batch: int = 64
    temperatures: tuple[float, ...] = (0.0, 0.0, 0.0, 0.5, 0.8, 1.0)
    seed: int = 20

    def __post_init__(self) -> None:
        if not self.temperatures or min(self.temperatures) < 0:
            raise ConfigError(f"temperatures is {self.temperatures}; give at least one, none below 0 (0 is greedy)")


class BatchedDecoder:
    """The target with a cache of its own for `B` texts that are all at the same position."""

    def __init__(self, target: PreTrainedModel, batch: int, capacity: int) -> None:
        """Reserve the cache; `capacity` is the longest text in tokens."""
        self._decoder, self._head = target.model, target.lm_head
        config, weight = target.config, target.lm_head.weight
        shape = (batch, config.num_key_value_heads, capacity, config.head_dim)
        layers = range(config.num_hidden_layers)
        self._keys = [torch.empty(shape, dtype=weight.dtype) for _ in layers]
        self._values = [torch.empty(shape, dtype=weight.dtype) for _ in layers]
        self.position = 0

    def feed(self, ids: Tensor) -> Tensor:
        """Feed `ids [B,S]` (S > 1 only into an empty cache) and return the last row's logits `[B,V]`."""
        hidden = self._decoder.embed_tokens(ids)
        end = self.position + ids.shape[1]
        rotary = self._decoder.rotary_emb(hidden, torch.arange(self.position, end)[None])
        for number, layer in enumerate(self._decoder.layers):
            rows = project_rows(layer, hidden, rotary)
            keys, values = self._keys[number], self._values[number]
            keys[:, :, self.position : end] = rows.keys
            values[:, :, self.position : end] = rows.values
            if ids.shape[1] > 1:
                attended = F.scaled_dot_product_attention(*rows, is_causal=True, enable_gqa=True)
            else:  # the heads of one group stand where the rows would
                queries = rows.queries.view(len(ids), keys.shape[1], -1, keys.shape[3])
                attended = F.scaled_dot_product_attention(queries, keys[:, :, :end], values[:, :, :end])
                attended = attended.reshape(rows.queries.shape)
            hidden = finish_layer(layer, hidden, attended)
        self.position = end
        logits: Tensor = self._head(self._decoder.norm(hidden[:, -1]))
        return logits.float()

    def keep(self, rows: Tensor) -> None:
        """Forget all texts but `rows`."""
        self._keys = [keys[rows] for keys in self._keys]
        self._values = [values[rows] for values in self._values]


@torch.inference_mode()
def generate_batch(
    target: PreTrainedModel, prompts: list[list[int]], temperatures: Tensor, config: SelfTextConfig
) -> list[list[int]]:
    """Continue every prompt until `config.end` or `max_new_tokens`; return prompts and continuations together.

    Args:
        target: The model; its own dtype is used.
        prompts: Token ids, beginning with the begin-of-text token.
        temperatures: `[B]`, 0 for greedy.
        config: Limits and seed.
    """
    lengths = torch.tensor([len(prompt) for prompt in prompts])
    capacity = min(int(lengths.max()) + config.max_new_tokens, target.config.max_position_embeddings)
    texts = torch.zeros(len(prompts), capacity, dtype=torch.long)
    for row, prompt in enumerate(prompts):
        texts[row, : len(prompt)] = torch.tensor(prompt)
    ends = torch.clamp(lengths + config.max_new_tokens, max=capacity)
    active = torch.arange(len(prompts))
    decoder = BatchedDecoder(target, len(prompts), capacity)
    generator = torch.Generator().manual_seed(config.seed)
    fed = texts[:, : int(lengths.min())]
    while len(active) and decoder.position < capacity - 1:
        logits = decoder.feed(fed)
        place = decoder.position
        if place == capacity:
            break
        chosen = _choose(logits, temperatures[active], generator)
        is_prompt = place < lengths[active]
        chosen = torch.where(is_prompt, texts[active, place], chosen)
        texts[active, place] = chosen
        is_finished = ~is_prompt & ((chosen == config.end) | (place + 1 >= ends[active]))
        ends[active[is_finished]] = place + 1
        if is_finished.any():
            rows = (~is_finished).nonzero().flatten()
            active, chosen = active[rows], chosen[rows]
            decoder.keep(rows)
        fed = chosen[:, None]
    return [text[:end].tolist() for text, end in zip(texts, ends.tolist(), strict=True)]


def _choose(logits: Tensor, temperatures: Tensor, generator: torch.Generator) -> Tensor:
    """Return argmax where the temperature is 0, a sample elsewhere (Gumbel noise scaled by the temperature)."""
    if not temperatures.any():
        return logits.argmax(-1)
    noise = -torch.empty_like(logits).exponential_(generator=generator).log()
    return (logits + temperatures[:, None] * noise).argmax(-1)


def write_self_text(
    target: PreTrainedModel,
    prompts: list[list[int]],
    folder: Path,
    config: SelfTextConfig,
    part: tuple[int, int] = (0, 1),
) -> None:
    """Write one file per batch into `folder`; batches that are there already are skipped.

    Args:
        target: The model.
        prompts: All prompts (the same list in every part).
        folder: Where the batches go.
        config: Limits, temperatures, seed.
        part: `(k, n)`: this process writes the batches `k, k + n, ...`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(config.seed)
    drawn = torch.tensor(rng.choice(config.temperatures, size=len(prompts)), dtype=torch.float32)
    by_length = sorted(range(len(prompts)), key=lambda number: len(prompts[number]))
    batches = [by_length[start : start + config.batch] for start in range(0, len(prompts), config.batch)]
    order = rng.permutation(len(batches)).tolist()
    for place, batch_number in enumerate(order):
        path = folder / f"batch_{batch_number:05d}.npz"
        if place % part[1] != part[0] or path.exists():
            continue
        numbers = batches[batch_number]
        texts = generate_batch(target, [prompts[number] for number in numbers], drawn[numbers], config)
        _save_batch(path, texts, [len(prompts[number]) for number in numbers], drawn[numbers].numpy())
        print(f"batch {place + 1} of {len(batches)}: {sum(map(len, texts))} tokens", flush=True)


def _save_batch(
    path: Path, texts: list[list[int]], prompt_lengths: list[int], temperatures: NDArray[np.float32]
) -> None:
    beside = path.with_suffix(".partial.npz")
    np.savez(
        beside,
        tokens=np.concatenate([np.array(text, np.uint16) for text in texts]),
        lengths=np.array([len(text) for text in texts]),
        prompt_lengths=np.array(prompt_lengths),
        temperatures=temperatures,
    )
    beside.replace(path)


def load_texts(folder: Path) -> list[SelfText]:
    """Read all texts written so far.

    Raises:
        ConfigError: There are none.
    """
    texts: list[SelfText] = []
    for path in sorted(folder.glob("batch_?????.npz")):
        with np.load(path) as batch:
            parts = np.split(batch["tokens"], np.cumsum(batch["lengths"])[:-1])
            columns = zip(parts, batch["prompt_lengths"].tolist(), batch["temperatures"].tolist(), strict=True)
            texts += [SelfText(part.tolist(), length, temperature) for part, length, temperature in columns]
    if not texts:
        raise ConfigError(f"{folder} holds no text; let the target write some first")
    return texts


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


def join_texts(texts: Sequence[SelfText], seed: int = 0) -> NDArray[np.uint16]:
    """Return the texts as one stream of tokens, in random order."""
    order = np.random.default_rng(seed).permutation(len(texts))
    return np.concatenate([np.array(texts[number].tokens, np.uint16) for number in order])
