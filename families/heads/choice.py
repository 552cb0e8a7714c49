"""How guesses are chosen: the best logit plus noise, in a block first a shortlist, then in the order of its link.

Owns: candidates and their log-probabilities, for graphs and measurements. Training listens instead (`Listener`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from mirrorsd.families.stream_link import SHORTLIST, log_mass

from .vocabulary import Vocabulary

Shortlist = Callable[[Tensor, int], tuple[Tensor, Tensor]]


class Listener(Protocol):
    """What a network tells its states to, `[B, T, w]` for one guess, `[B, T, K, w]` for all."""

    def all_at_once(self, states: Tensor) -> None:
        """Take the states of all guesses: none depends on another."""

    def prepare(self, states: Tensor) -> None:
        """Take what the guesses are before their link; `one` follows for each."""

    def one(self, guess: int, state: Tensor) -> Tensor:
        """Take the state of a guess, and return the tokens `[B, T]` that the next one follows."""


class Choice:
    """Choose every guess by its best logit; what was chosen is in `ids` and `logprobs`."""

    def __init__(
        self,
        vocabulary: Vocabulary,
        noise: Tensor | None,
        *,
        num_candidates: int = 1,
        shortlist: Shortlist = torch.topk,
    ) -> None:
        """Choose with `noise [K, V_d]`, or `[K, B * T, V_d]`; without it the likeliest."""
        self._vocabulary, self._noise = vocabulary, noise
        self._count, self._shortlist = num_candidates, shortlist
        self._prepared: list[tuple[Tensor, Tensor, Tensor]] = []
        self._ids: list[Tensor] = []
        self._logprobs: list[Tensor] = []

    @property
    def ids(self) -> Tensor:
        """The target's tokens `[B * T, K, m]`, best first."""
        return torch.stack(self._ids, dim=1)

    @property
    def logprobs(self) -> Tensor:
        """Their log-probabilities `[B * T, K, m]`, the noise left out."""
        return torch.stack(self._logprobs, dim=1)

    def all_at_once(self, states: Tensor) -> None:
        """Choose all guesses of `states [B, T, K, w]`."""
        for guess, logits in enumerate(self._logits(states)):
            self._choose(guess, logits)

    def prepare(self, states: Tensor) -> None:
        """Make the shortlists that a link may put in another order."""
        for guess, logits in enumerate(self._logits(states)):
            count = min(max(SHORTLIST, self._count), logits.shape[-1])
            _, ids = self._shortlist(self._competing(guess, logits, None), count)
            self._prepared.append((ids, logits.gather(-1, ids), torch.logsumexp(logits, -1, keepdim=True)))

    def one(self, guess: int, state: Tensor) -> Tensor:
        """Choose one guess of `state [B, T, w]`; return the tokens `[B, T]`."""
        flat = state.flatten(0, 1)
        if self._prepared:
            ids, kept, whole = self._prepared[guess]
            linked = self._vocabulary.logits_of(ids, flat)
            logprobs = linked - log_mass(linked, kept, whole)
            _, places = torch.topk(self._competing(guess, logprobs, ids), min(self._count, ids.shape[-1]))
            self._keep(ids.gather(-1, places), logprobs.gather(-1, places))
        else:
            self._choose(guess, self._vocabulary.logits(flat, guess))
        return self._ids[-1][:, 0].reshape(state.shape[:2])

    def _logits(self, states: Tensor) -> list[Tensor]:
        """Logits `[n, V_d]` of every guess; one product where all guesses share the weight."""
        flat = states.flatten(0, 1)
        if self._vocabulary.weight.ndim == 3:
            return [self._vocabulary.logits(flat[:, guess], guess) for guess in range(flat.shape[1])]
        return list(self._vocabulary.logits(flat, 0).unbind(1))

    def _choose(self, guess: int, logits: Tensor) -> None:
        _, ids = self._shortlist(self._competing(guess, logits, None), self._count)
        self._keep(ids, logits.gather(-1, ids) - torch.logsumexp(logits, -1, keepdim=True))

    def _competing(self, guess: int, scores: Tensor, ids: Tensor | None) -> Tensor:
        if self._noise is None:
            return scores
        noise = self._noise[guess].expand(scores.shape[0], -1)
        return scores + (noise if ids is None else noise.gather(-1, ids))

    def _keep(self, ids: Tensor, logprobs: Tensor) -> None:
        self._ids.append(self._vocabulary.tokens(ids))
        self._logprobs.append(logprobs)
