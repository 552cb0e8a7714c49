"""A head of low rank over the whole vocabulary, for drafts: final norm, then `H -> rank -> V` (SlimSpec, 2605.10453).

A small draft's head over 50,000 tokens costs more than its layers. One of low rank keeps every token, needs no map, and
takes `rank / H` of the weights. What is behind the norm, and what a link looks up, is `rank` wide then.

Owns: the module, and fitting it to a model whose config says `head_rank`. Does not own: training, files.
"""

from typing import Any

from torch import Tensor, nn

HEAD_RANK = "head_rank"
"""Entry of config.json: the width behind the final norm; a model without it has its family's own head."""
SHARES_EMBEDDING = "shares_embedding"
"""Entry of config.json: the token embedding is the target's and lies beside the target's weights alone."""

EMBEDDING = "model.embed_tokens.weight"
"""Its name in a model laid out like Llama."""


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


def head_width(config: Any) -> int:
    """How wide a row is behind the final norm."""
    return int(getattr(config, HEAD_RANK, None) or config.hidden_size)
