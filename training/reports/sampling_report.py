"""Sampling at temperature 1: what shared noise accepts, beside exact rejection sampling and sample-and-match.

Owns: the three expectations, by the same draft at the same positions. Does not own: the runtime's noise.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import PreTrainedModel

from mirrorsd.families.low_rank_head import head_tokens
from mirrorsd.training.models.attention import training_attention_in
from mirrorsd.training.models.streaming_draft import StreamingDraft
from mirrorsd.training.text.self_text import BatchedDecoder, SelfText

__all__ = ["SamplingTrial", "measure_sampling"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingTrial:
    """How much is drawn: window length, draws of noise per place, tokens between places, seed."""

    gamma: int = 6
    draws: int = 16
    stride: int = 8
    seed: int = 20


@torch.inference_mode()
def measure_sampling(
    target: PreTrainedModel, draft: StreamingDraft, texts: Sequence[SelfText], trial: SamplingTrial
) -> dict[str, Any]:
    """Return the mean accepted tokens per window of `gamma` (draft: one token per pass) by three rules.

    * `shared_noise`: target and draft take the argmax of log-probability plus the same Gumbel noise; tokens are
      accepted while the two agree.
    * `rejection`: the draft samples `w_i ~ q_i`, accepted with probability `min(1, p_i(w_i) / q_i(w_i))`.
    * `sample_and_match`: the draft samples, the target samples independently; accepted while equal.

    For the last two the acceptance probabilities along the drafted window are multiplied, not drawn.
    """
    generator = torch.Generator(torch.get_default_device()).manual_seed(trial.seed)
    sums = torch.zeros(3, dtype=torch.float64)
    per_position = torch.zeros(3, dtype=torch.float64)
    places = 0
    for text in texts:
        for place in range(text.prompt_length, len(text.tokens), trial.stride):
            context = torch.tensor(text.tokens[:place])
            if place + trial.gamma > int(target.config.max_position_embeddings):
                break
            with training_attention_in(target):
                accepted = _accept(target, draft, context, trial, generator)
            sums += torch.stack([rates.cumprod(-1).sum(-1).mean() for rates in accepted]).double()
            per_position += torch.stack([rates[:, 0].mean() for rates in accepted]).double()
            places += 1
    names = ("shared_noise", "rejection", "sample_and_match")
    windows = {name: round(total / max(places, 1), 4) for name, total in zip(names, sums.tolist(), strict=True)}
    first = {name: round(total / max(places, 1), 4) for name, total in zip(names, per_position.tolist(), strict=True)}
    share = round(windows["shared_noise"] / windows["rejection"], 4) if windows["rejection"] else None
    return {
        "places": places,
        "draws": trial.draws,
        "gamma": trial.gamma,
        "accepted_per_window": windows,
        "accepted_first": first,
        "shared_noise_of_rejection": share,
    }


def _accept(
    target: PreTrainedModel, draft: StreamingDraft, context: Tensor, trial: SamplingTrial, generator: torch.Generator
) -> tuple[Tensor, Tensor, Tensor]:
    """Return, per rule, the probability (0 or 1 for shared noise) that each window token is accepted `[draws, gamma]`.

    The first half of the batch is drafted with the noise that the target uses too, the second with its own.
    """
    half, vocab_size = trial.draws, min(target.config.vocab_size, draft.base.config.vocab_size)
    noise = -torch.empty(trial.gamma, 2 * half, vocab_size).exponential_(generator=generator).log()
    log_q, window = _continue(draft.base, context, noise, lambda step, logs: (logs + noise[step]).argmax(-1))
    log_p, _ = _continue(target, context, noise, lambda step, logs: window[step])
    agrees = (log_p[:, :half] + noise[:, :half]).argmax(-1) == window[:, :half]
    chosen = window[:, half:, None]
    of_target, of_draft = (logs[:, half:].gather(-1, chosen)[..., 0] for logs in (log_p, log_q))
    by_rule = (agrees.float(), (of_target - of_draft).exp().clamp(max=1.0), of_target.exp())
    return by_rule[0].T, by_rule[1].T, by_rule[2].T


def _continue(
    model: PreTrainedModel, context: Tensor, noise: Tensor, choose: Callable[[int, Tensor], Tensor]
) -> tuple[Tensor, Tensor]:
    """Read `context` once and go on in as many copies as `noise [gamma, B, V]` has.

    Tokens that the model's head does not name are never picked: their log-probability is -inf.

    Returns:
        Log-probabilities before each token `[gamma, B, V]`, and the tokens that `choose` picked `[gamma, B]`.
    """
    gamma, copies, vocab_size = noise.shape
    decoder = BatchedDecoder(model, len(context) + gamma)
    logits = decoder.feed(context[None]).expand(copies, -1)
    decoder.keep(torch.zeros(copies, dtype=torch.long))
    logs: list[Tensor] = []
    tokens: list[Tensor] = []
    for step in range(gamma):
        if step:
            logits = decoder.feed(tokens[-1][:, None])
        named = logits[:, : min(vocab_size, head_tokens(model.config))]
        logs.append(pad(named, (0, vocab_size - named.shape[1]), value=-torch.inf).log_softmax(-1))
        tokens.append(choose(step, logs[-1]))
    return torch.stack(logs), torch.stack(tokens)
