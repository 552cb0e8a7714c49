"""Hydra (arXiv 2402.05109): Medusa's heads in sequence, each told the tokens guessed before its own.

Head `k` reads the tip's state and the embeddings of the known token and of the `k` guesses before its own:
`x + silu(W [x, e_0, ..., e_k] + b)`, then more blocks if `depth` asks for them. With a layer (`num_layers`, the prefix
layer of Hydra++) `x` comes out of a decoder layer over the features of all rows.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from mirrorsd.families.heads.attending import FeatureRows
from mirrorsd.families.heads.choice import Listener
from mirrorsd.families.heads.config import HeadConfig
from mirrorsd.families.heads.kind import HeadKind, Training, add_kind
from mirrorsd.families.heads.layer import HeadLayer, Norm, Rotary, layers_in
from mirrorsd.families.heads.network import HeadNetwork

from .medusa import ResidualBlock, last_state


class HydraNetwork(HeadNetwork):
    """`K` heads in sequence, behind a layer if the config has one."""

    def __init__(self, config: HeadConfig) -> None:
        super().__init__(config)
        hidden = config.hidden_size
        self.heads = nn.ModuleList(
            nn.Sequential(
                ResidualBlock((2 + guess) * hidden, hidden),
                *(ResidualBlock(hidden, hidden) for _ in range(config.depth - 1)),
            )
            for guess in range(config.length)
        )
        self.layers = nn.ModuleList(HeadLayer(config) for _ in range(config.num_layers))
        if self.layers:
            self.rotary = Rotary(config)
            self.norm = Norm(hidden, config.rms_norm_eps)

    def read(self, rows: FeatureRows) -> Tensor | None:
        """Pass the features through the layer, if there is one."""
        hidden = rows.features
        if not self.layers:
            return hidden
        angles = self.rotary(rows.positions)
        for number, layer in enumerate(layers_in(self.layers)):
            normed = layer.input_layernorm(hidden)
            rows.new.append(layer.keys_and_values(normed, angles))
            hidden = layer.finish(hidden, rows.attend(number, layer.queries(normed, angles)))
        states: Tensor = self.norm(hidden)
        return states

    def guess(self, rows: FeatureRows, states: Tensor | None, listener: Listener) -> None:
        """Guess token by token."""
        assert states is not None
        known = [states.index_select(1, rows.tips)]
        token = rows.tokens.index_select(1, rows.tips)
        for guess, head in enumerate(self.heads):
            known.append(self.embed_tokens(token).to(known[0].dtype))
            token = listener.one(guess, self.lm_head.states(head(torch.cat(known, dim=-1))))


add_kind(
    "hydra",
    HeadKind(
        network=HydraNetwork,
        training=Training(taps=last_state, length=4, num_layers=0, loss={"kl": 1.0}, matrix_rate=0.06),
        reads_one_tap=True,
        has_vocabularies=True,
        layers=(0, float("inf")),
    ),
)
