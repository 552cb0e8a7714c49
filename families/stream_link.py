"""What a stream learns of the tokens chosen before its own: a residual behind the final norm.

The streams of a row guess in one pass, so none knows what the one before it chose. A link tells it: the row's choice
first, then stream by stream, each corrects what it says of its likeliest tokens by the two tokens before its own
(sequentially dependent heads: Hydra, arXiv 2402.05109). The head runs once for all streams; in sequence there is only
a small product per stream and the scores of a shortlist.

Owns: the formula and the order of choosing, for training, export and checks alike. Does not own: which rows are
streams, training, files.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import linear, silu

SHORTLIST = 16
"""Tokens of a stream that a link may put in another order; the likeliest without it."""


class LinkWeights(NamedTuple):
    """`down`, `last`, `earlier` are `[rank, H]`, `up` is `[H, rank]`."""

    down: Tensor
    last: Tensor
    earlier: Tensor
    up: Tensor

    def residual(self, inner: Tensor, last: Tensor, earlier: Tensor) -> Tensor:
        """What the token before (`last`) and the one before that (`earlier`) add to streams, `[..., H]`.

        Tokens come as their rows of the head `[..., H]`, streams as `inner [..., rank]`: what `down` makes of them.
        """
        return linear(silu(inner + linear(last, self.last) + linear(earlier, self.earlier)), self.up)


class Guesses(NamedTuple):
    """What a tip's row and its streams say `[R, 1+s, V]`.

    `logits` are the head's, before `scale`; `noise`, where there is some, competes with the scaled ones.
    """

    logits: Tensor
    noise: Tensor | None
    scale: Callable[[Tensor], Tensor]


class Ranked(NamedTuple):
    """Shortlists `[R, 1+s, K]`: ids, log-probabilities given the tokens chosen before, and those with noise."""

    ids: Tensor
    logprobs: Tensor
    scores: Tensor


def follow_links(
    weights: LinkWeights,
    streams: Tensor,
    guesses: Guesses,
    head: Tensor,
    own: Tensor,
    *,
    count: int = SHORTLIST,
    shortlist: Callable[[Tensor, int], tuple[Tensor, Tensor]] = torch.topk,
) -> Ranked:
    """Let the rows of `R` tips choose, and then their streams one after the other.

    Args:
        weights: The link's.
        streams: `[R, s, H]` behind the final norm.
        guesses: What rows and streams say by themselves.
        head: `[V', H]`, a row per token; `V' >= V`.
        own: `[R, H]`, such rows of the tips' tokens.
        count: Length of the shortlists, `K`; all of a small vocabulary.
        shortlist: Gives the best `K` values and their ids of rows `[n, V]`.
    """
    num_tips, num_rows, vocab_size = guesses.logits.shape
    count = min(count, vocab_size)
    bare = guesses.scale(guesses.logits)
    competing = bare if guesses.noise is None else bare + guesses.noise
    ids = shortlist(competing.flatten(0, 1), count)[1].reshape(num_tips, num_rows, count)
    kept = guesses.logits.gather(2, ids)
    noise = None if guesses.noise is None else guesses.noise.gather(2, ids)
    of_ids = head.index_select(0, ids[:, 1:].flatten()).reshape(num_tips, num_rows - 1, count, head.shape[1])
    inner = linear(streams, weights.down)
    linked, earlier = [guesses.scale(kept[:, 0])], own
    for stream in range(num_rows - 1):
        scores = linked[-1] if noise is None else linked[-1] + noise[:, stream]
        last = head.index_select(0, ids[:, stream].gather(1, scores.argmax(-1, keepdim=True))[:, 0])
        residual = weights.residual(inner[:, stream], last, earlier)
        added = (of_ids[:, stream] * residual[:, None, :]).sum(-1)
        linked.append(guesses.scale(kept[:, 1 + stream] + added))
        earlier = last
    logits = torch.stack(linked, dim=1)
    logprobs = logits - log_mass(logits, guesses.scale(kept), bare)
    return Ranked(ids, logprobs, logprobs if noise is None else logprobs + noise)


def log_mass(linked: Tensor, kept: Tensor, bare: Tensor) -> Tensor:
    """What to take off `linked [..., K]` logits for log-probabilities, `[..., 1]`.

    What the shortlist leaves out counts as it did without the link: `kept [..., K]` of all `bare [..., V]`.
    """
    whole = torch.logsumexp(bare, dim=-1, keepdim=True)
    share = torch.exp(torch.logsumexp(kept, dim=-1, keepdim=True) - whole)
    left_out = whole + torch.log((1 - share).clamp(min=1e-9))
    return torch.logsumexp(torch.cat((linked, left_out), dim=-1), dim=-1, keepdim=True)
