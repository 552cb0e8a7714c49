"""Medusa (arXiv 2401.10774): `K` heads on one hidden state, none knows what another guessed.

Head `k` is one residual block or several, `x + silu(W x + b)`, and a head over the vocabulary. `W` starts at zero, so
that every head starts as the target's own.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import silu

from mirrorsd.families.heads.attending import FeatureRows
from mirrorsd.families.heads.choice import Listener
from mirrorsd.families.heads.config import FINAL, HeadConfig
from mirrorsd.families.heads.kind import HeadKind, Training, add_kind
from mirrorsd.families.heads.network import HeadNetwork


def last_state(num_layers: int, num_own: int) -> tuple[int | str, ...]:
    """The paper's tap: what the target's LM head reads."""
    return (FINAL,)


class ResidualBlock(nn.Module):
    """`x + silu(W inputs + b)`, where the inputs begin with `x`, or are `x`."""

    def __init__(self, inputs: int, hidden: int) -> None:
        super().__init__()
        self.linear = nn.Linear(inputs, hidden)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, inputs: Tensor) -> Tensor:
        """Turn `[..., inputs]` into `[..., H]`."""
        added: Tensor = silu(self.linear(inputs))
        return inputs[..., : added.shape[-1]] + added


class MedusaNetwork(HeadNetwork):
    """`K` heads; only the tip's own features are read."""

    def __init__(self, config: HeadConfig) -> None:
        super().__init__(config)
        hidden = config.hidden_size
        self.heads = nn.ModuleList(
            nn.Sequential(*(ResidualBlock(hidden, hidden) for _ in range(config.depth))) for _ in range(config.length)
        )

    def read(self, rows: FeatureRows) -> Tensor | None:
        """Return the features themselves."""
        return rows.features

    def guess(self, rows: FeatureRows, states: Tensor | None, listener: Listener) -> None:
        """Guess all tokens at once."""
        assert states is not None
        hidden = states.index_select(1, rows.tips)
        listener.all_at_once(self.lm_head.states(torch.stack([head(hidden) for head in self.heads], dim=2)))


add_kind(
    "medusa",
    HeadKind(
        network=MedusaNetwork,
        # Medusa's cross-entropy is with the target's own best token.
        training=Training(taps=last_state, length=4, num_layers=0, loss={"hard": 1.0}, matrix_rate=0.06),
        reads_tokens=False,
        reads_one_tap=True,
        has_vocabularies=True,
        layers=(0, 0),
    ),
)
