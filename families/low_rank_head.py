"""Smaller heads for drafts, whose head over 50,000 tokens costs more than their layers.

One of low rank keeps every token: final norm, then `H -> rank -> V` (SlimSpec, 2605.10453). It takes `rank / H` of the
weights; what is behind the norm, and what a link looks up, is `rank` wide then. A head of fewer tokens names the first
ids alone. It needs no map: byte pair encoding numbers tokens as it merges them, the most frequent ones first.

Owns: what a config says of its head, and fitting a model to it. Does not own: training, files.
"""

from typing import Any

from torch import Tensor, nn

HEAD_RANK = "head_rank"
"""Entry of config.json: the width behind the final norm; a model without it has its family's own head."""
HEAD_TOKENS = "head_tokens"
"""Entry of config.json: the head names the ids below this one; a model without it names them all."""
SHARES_EMBEDDING = "shares_embedding"
"""Entry of config.json: the token embedding is the target's and lies beside the target's weights alone."""

EMBEDDING, LM_HEAD = "model.embed_tokens.weight", "lm_head.weight"
"""Their names in a model laid out like Llama."""


class ReducedNorm(nn.Module):
    """The final norm, and the first half of the head."""

    def __init__(self, norm: nn.Module, hidden: int, rank: int) -> None:
        super().__init__()
        self.norm = norm
        self.down = nn.Linear(hidden, rank, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        """Turn `[..., H]` into `[..., rank]`."""
        reduced: Tensor = self.down(self.norm(hidden))
        return reduced


def fit_head(network: Any) -> Any:
    """Give `network`, laid out like Llama, the head that its config asks for; without `head_rank` it stays as it is."""
    rank = getattr(network.config, HEAD_RANK, None)
    if rank and not isinstance(network.model.norm, ReducedNorm):
        network.model.norm = ReducedNorm(network.model.norm, network.config.hidden_size, rank)
        network.lm_head = nn.Linear(rank, network.config.vocab_size, bias=False)
    return network


def head_tokens(config: Any) -> int:
    """How many ids the head names: the first ones."""
    return min(int(config.vocab_size), int(getattr(config, HEAD_TOKENS, None) or config.vocab_size))


def head_width(config: Any) -> int:
    """How wide a row is behind the final norm."""
    return int(getattr(config, HEAD_RANK, None) or config.hidden_size)
