"""Block drafts: all guesses in one pass over a block of rows (DFlash, arXiv 2602.06036; DSpark, arXiv 2607.05147).

The target's features of every row, projected, give each layer its keys and values. The block behind a tip is the known
token and rows of an unknown one; its rows see the tip's past and each other. A link then tells each guess which token
was chosen before its own: a `gated` residual as streams have (`mirrorsd.families.stream_link`), or the `markov` table
of DSpark, whose logits `W1[token before] W2` add to the head's.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import silu

from mirrorsd.families.heads.attending import FeatureRows, taps_in
from mirrorsd.families.heads.choice import Listener
from mirrorsd.families.heads.config import HeadConfig
from mirrorsd.families.heads.kind import HeadKind, Training, add_kind
from mirrorsd.families.heads.layer import Angles, HeadLayer, Norm, Rotary, layers_in
from mirrorsd.families.heads.network import HeadNetwork


class GatedLink(nn.Module):
    """`state + up silu(down state + last e + earlier e')`; `e`, `e'` embed the two tokens before the guess."""

    def __init__(self, config: HeadConfig) -> None:
        super().__init__()
        width, hidden, rank = config.state_width, config.hidden_size, config.link_rank
        self.down = nn.Linear(width, rank, bias=False)
        self.last = nn.Linear(hidden, rank, bias=False)
        self.earlier = nn.Linear(hidden, rank, bias=False)
        self.norm = Norm(hidden, config.rms_norm_eps)
        self.up = nn.Linear(rank, width, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, state: Tensor, last: Tensor, earlier: Tensor) -> Tensor:
        """Correct `state [..., w]` by two embeddings `[..., H]`."""
        inner = self.down(state) + self.last(self.norm(last)) + self.earlier(self.norm(earlier))
        corrected: Tensor = state + self.up(silu(inner))
        return corrected


def pass_layer(
    rows: FeatureRows, numbered: tuple[int, HeadLayer], blocks: Tensor, angles: Angles, *, is_causal: bool = False
) -> Tensor:
    """Pass the tips' `blocks [B, T, P, H]` through layer `numbered`; they see their tip's past and the block.

    `is_causal`: of its block a row sees only those before it, and itself.
    """
    number, layer = numbered
    num_tips, block = blocks.shape[1:3]
    hidden = blocks.flatten(1, 2)
    normed = layer.input_layernorm(hidden)
    heads = (layer.queries(normed, angles), *layer.keys_and_values(normed, angles))
    queries, keys, values = (part.reshape(*part.shape[:2], num_tips, block, -1) for part in heads)
    attended = rows.attend_at_tips(number, queries, (keys, values), is_causal=is_causal)
    return layer.finish(hidden, attended.flatten(2, 3)).reshape(blocks.shape)


class BlockNetwork(HeadNetwork):
    """Layers over a block of rows, with the features as their past."""

    def __init__(self, config: HeadConfig) -> None:
        super().__init__(config)
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.fc = nn.Linear(len(config.taps) * hidden, hidden, bias=False)
        if config.tap_norm == "each":
            self.fc_norm = nn.ModuleList(Norm(hidden, eps) for _ in config.taps)
        self.hidden_norm = Norm(hidden, eps)
        self.layers = nn.ModuleList(HeadLayer(config) for _ in range(config.num_layers))
        self.norm = Norm(hidden, eps)
        self.rotary = Rotary(config)
        self.num_rows = config.length + (0 if config.samples_anchor else 1)
        if config.mask_token is None:
            self.unknown = nn.Parameter(torch.randn(hidden) * 0.02)
        if config.link == "gated":
            self.link = GatedLink(config)
        elif config.link == "markov":
            self.table = nn.Embedding(config.vocab_size, config.link_rank)

    def read(self, rows: FeatureRows) -> Tensor | None:
        """Leave keys and values of the features in every layer."""
        features = rows.features
        if self.config.tap_norm == "each":
            taps = taps_in(features, len(self.fc_norm))
            features = torch.cat([norm(tap) for norm, tap in zip(self.fc_norm, taps, strict=True)], dim=-1)
        projected, angles = self.hidden_norm(self.fc(features)), self.rotary(rows.positions)
        rows.new.extend(layer.keys_and_values(projected, angles) for layer in layers_in(self.layers))
        return None

    def guess(self, rows: FeatureRows, states: Tensor | None, listener: Listener) -> None:
        """Pass the blocks of all tips, and tell the guesses at once, or one by one along the link."""
        token = rows.tokens.index_select(1, rows.tips)
        bare = self.lm_head.states(self._pass(rows, token))
        if self.config.link == "none":
            listener.all_at_once(bare)
            return
        listener.prepare(bare)
        earlier = token
        for guess in range(self.config.length):
            told = listener.one(guess, self._linked(bare[:, :, guess], token, earlier, is_first=guess == 0))
            token, earlier = told, token

    def _pass(self, rows: FeatureRows, token: Tensor) -> Tensor:
        """Hidden states `[B, T, K, H]` behind the norm."""
        batch, num_tips, block = *token.shape, self.num_rows
        known = self.embed_tokens(token)[:, :, None]
        hidden = torch.cat((known, self._unknown().expand(batch, num_tips, block - 1, -1)), dim=2)
        ahead = torch.arange(1, block + 1, device=token.device)
        angles = self.rotary((rows.places_of_tips[:, None] + ahead).flatten())
        for numbered in enumerate(layers_in(self.layers)):
            hidden = pass_layer(rows, numbered, hidden, angles)
        states: Tensor = self.norm(hidden)
        return states[:, :, block - self.config.length :]

    def _unknown(self) -> Tensor:
        if self.config.mask_token is None:
            return self.unknown
        return self.embed_tokens.weight[self.config.mask_token]

    def _linked(self, state: Tensor, last: Tensor, earlier: Tensor, *, is_first: bool) -> Tensor:
        """What a guess is once it knows the tokens before its own; the first one's block begins with that token."""
        if self.config.link == "markov":
            return torch.cat((state, self.table(last).to(state.dtype)), dim=-1)
        if is_first:
            return state
        embedded = (self.embed_tokens(token).to(state.dtype) for token in (last, earlier))
        linked: Tensor = self.link(state, *embedded)
        return linked


def spread_taps(num_layers: int, num_own: int) -> tuple[int | str, ...]:
    """The paper's taps: five, from the first layer to the third from the end.

    >>> spread_taps(30, 2)
    (1, 8, 14, 20, 27)
    """
    last = max(1, num_layers - 3)
    return tuple(sorted({round(1 + (last - 1) * place / 4) for place in range(5)}))


def _entries(asked: Mapping[str, int]) -> dict[str, Any]:
    rank = asked["link_rank"]
    return {"tap_norm": "each", "link": "gated" if rank else "none", "link_rank": rank}


add_kind(
    "block",
    HeadKind(
        network=BlockNetwork,
        training=Training(
            taps=spread_taps,
            length=7,
            num_layers=2,
            loss={"tv": 0.9, "hard": 0.1},
            matrix_rate=0.024,
            entries=_entries,
        ),
    ),
)
