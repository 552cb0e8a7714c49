"""Single-model Speculative Streaming (arXiv 2402.11131, its lossless form): streams through the target's last layers.

The streams of a tip are rows that begin as its hidden state where the last layers begin. Through these layers, which
are the target's own, stream `j` (from 1) stands `j` positions behind the tip. It sees what the tip sees, the streams
before it and itself, and guesses the token after its position. No stream knows which token another guesses. Trained are
an embedding for each stream, and adapters before each layer and behind the last, which read it.

The paper's streams ride in the pass that verifies, behind every row that may be the last accepted one. These ones
follow that pass, behind the one row that was; what rows and streams read of each other is the same. What the main rows
leave in these layers is made of the states that entered them (one tap for each layer), so no layer passes them again.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, silu

from mirrorsd.families.heads.attending import FeatureRows, taps_in
from mirrorsd.families.heads.choice import Listener
from mirrorsd.families.heads.config import HeadConfig
from mirrorsd.families.heads.kind import HeadKind, Training, add_kind
from mirrorsd.families.heads.layer import HeadLayer, Norm, Rotary, layers_in
from mirrorsd.families.heads.network import HeadNetwork

from .block import pass_layer


class StreamAdapter(nn.Module):
    """A residual of low rank that begins as nothing; it reads normed streams and who each of them is."""

    def __init__(self, config: HeadConfig) -> None:
        super().__init__()
        self.norm = Norm(config.hidden_size, config.rms_norm_eps)
        self.down = nn.Linear(config.hidden_size, config.adapter_rank, bias=False)
        self.up = nn.Linear(config.adapter_rank, config.hidden_size, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, streams: Tensor, embeddings: Tensor) -> Tensor:
        """Adapt `[B, T, K, H]` by the embeddings `[K, H]`."""
        return streams + linear(silu(linear(self.norm(streams) + embeddings, self.down.weight)), self.up.weight)


class StreamingNetwork(HeadNetwork):
    """`K` streams through layers that are the target's."""

    def __init__(self, config: HeadConfig) -> None:
        super().__init__(config)
        hidden = config.hidden_size
        self.stream_embeddings = nn.Parameter(torch.randn(config.length, hidden))
        self.adapters = nn.ModuleList(StreamAdapter(config) for _ in range(config.num_layers + 1))
        self.layers = nn.ModuleList(HeadLayer(config) for _ in range(config.num_layers))
        self.norm = Norm(hidden, config.rms_norm_eps)
        self.rotary = Rotary(config)

    def read(self, rows: FeatureRows) -> Tensor | None:
        """Leave the target's own keys and values of its last layers; return what entered the first of them."""
        angles = self.rotary(rows.positions)
        entering = taps_in(rows.features, self.config.num_layers)
        for layer, hidden in zip(layers_in(self.layers), entering, strict=True):
            rows.new.append(layer.keys_and_values(layer.input_layernorm(hidden), angles))
        return entering[0]

    def guess(self, rows: FeatureRows, states: Tensor | None, listener: Listener) -> None:
        """Pass the streams of all tips; none is told anything, so all guess at once."""
        assert states is not None
        who = self.stream_embeddings
        hidden = states.index_select(1, rows.tips)[:, :, None].expand(-1, -1, len(who), -1)
        ahead = torch.arange(1, self.config.length + 1, device=hidden.device)
        angles = self.rotary((rows.places_of_tips[:, None] + ahead).flatten())
        for number, layer in enumerate(layers_in(self.layers)):
            hidden = pass_layer(rows, (number, layer), self.adapters[number](hidden, who), angles, is_causal=True)
        listener.all_at_once(self.lm_head.states(self.norm(self.adapters[-1](hidden, who))))


def entering_states(num_layers: int, num_own: int) -> tuple[int | str, ...]:
    """What enters each of the layers that streams pass, the target's last `num_own`.

    >>> entering_states(30, 4)
    (26, 27, 28, 29)
    """
    return tuple(range(max(1, num_layers - num_own), num_layers))


add_kind(
    "streaming",
    HeadKind(
        network=StreamingNetwork,
        training=Training(
            taps=entering_states,
            length=4,
            num_layers=4,
            loss={"kl": 1.0},
            matrix_rate=0.06,
            entries=lambda asked: {"adapter_rank": asked["adapter_rank"]},
        ),
        reads_tokens=False,
        borrows_layers=True,
    ),
)
