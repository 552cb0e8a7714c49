"""EAGLE-3 (arXiv 2503.01840) and the multi-token layer of MTP models: a decoder layer that feeds on its own output.

A row joins the state of a position (at first: the target's features there, projected) and the embedding of the token
that follows. The layer's output is the next state; behind its norm the head over the vocabulary guesses a token, and
both are the next row. In training (training-time test) the states are the layer's own as well, the tokens are true.

P-EAGLE (arXiv 2602.01469) does not wait for its own output: behind a tip stand rows of an unknown token and a trained
unknown state, and each of them guesses, in one pass.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from mirrorsd.families.heads.attending import FeatureRows, taps_in
from mirrorsd.families.heads.choice import Listener
from mirrorsd.families.heads.config import HeadConfig
from mirrorsd.families.heads.kind import HeadKind, Training, add_kind
from mirrorsd.families.heads.layer import Angles, HeadLayer, KeyValue, Norm, Rotary, layers_in
from mirrorsd.families.heads.network import HeadNetwork


class Eagle3Network(HeadNetwork):
    """One decoder layer or several; the first one's attention reads token and state side by side."""

    def __init__(self, config: HeadConfig) -> None:
        super().__init__(config)
        hidden, eps, taps = config.hidden_size, config.rms_norm_eps, len(config.taps)
        self.is_projected = config.joins == "projection"
        if taps > 1 or not self.is_projected:
            self.fc = nn.Linear(taps * hidden, hidden, bias=False)
        if config.tap_norm == "each":
            self.fc_norm = nn.ModuleList(Norm(hidden, eps) for _ in range(taps))
        elif config.tap_norm == "joined":
            self.input_norm = Norm(taps * hidden, eps)
        if self.is_projected:
            self.input_proj = nn.Linear(2 * hidden, hidden, bias=False)
            self.token_norm = Norm(hidden, eps)
        self.hidden_norm = Norm(hidden, eps)
        self.layers = nn.ModuleList(
            HeadLayer(config, num_inputs=2 if number == 0 and not self.is_projected else 1)
            for number in range(config.num_layers)
        )
        self.norm = Norm(hidden, eps)
        self.rotary = Rotary(config)
        if config.mask_token is not None:
            self.mask_hidden = nn.Parameter(torch.randn(1, 1, taps * hidden) * 0.02)

    def read(self, rows: FeatureRows) -> Tensor | None:
        """Pass all rows; return their next states."""
        angles = self.rotary(rows.positions)
        hidden, joined = self._join(self._project(rows.features), rows.tokens)
        for number, layer in enumerate(layers_in(self.layers)):
            inputs = layer.input_layernorm(hidden) if joined is None else joined
            joined = None
            rows.new.append(layer.keys_and_values(inputs, angles))
            hidden = layer.finish(hidden, rows.attend(number, layer.queries(inputs, angles)), inputs)
        return hidden

    def guess(self, rows: FeatureRows, states: Tensor | None, listener: Listener) -> None:
        """Guess token by token; each but the last becomes a row that only its own tip's later rows see."""
        assert states is not None
        hidden = states.index_select(1, rows.tips)
        if self.config.mask_token is not None:
            listener.all_at_once(self.lm_head.states(self.norm(self._in_one_pass(rows, hidden))))
            return
        chains: list[list[KeyValue]] = [[] for _ in self.layers]
        for guess in range(self.config.length):
            normed = self.norm(hidden)
            token = listener.one(guess, self.lm_head.states(normed))
            if guess + 1 < self.config.length:
                fed = normed if self.config.feeds_norm else hidden
                angles = self.rotary(rows.places_of_tips + guess + 1)
                hidden = self._one_more(rows, (fed, token), chains, angles)

    def _in_one_pass(self, rows: FeatureRows, tips: Tensor) -> Tensor:
        """The states `[B, T, K, H]` of all guesses: those of `tips` `[B, T, H]`, and of unknown rows behind them."""
        batch, num_tips, num_unknown = *tips.shape[:2], self.config.length - 1
        token = self.config.mask_token
        assert token is not None  # `guess` has looked
        if not num_unknown:
            return tips[:, :, None]
        unknown = self._project(self.mask_hidden).expand(batch, num_tips * num_unknown, -1)
        tokens = torch.full(unknown.shape[:2], token, device=tips.device)
        ahead = torch.arange(1, num_unknown + 1, device=tips.device)
        angles = self.rotary((rows.places_of_tips[:, None] + ahead).flatten())
        hidden, joined = self._join(unknown, tokens)
        for number, layer in enumerate(layers_in(self.layers)):
            inputs = layer.input_layernorm(hidden) if joined is None else joined
            joined = None
            heads = (layer.queries(inputs, angles), *layer.keys_and_values(inputs, angles))
            queries, keys, values = (part.reshape(*part.shape[:2], num_tips, num_unknown, -1) for part in heads)
            attended = rows.attend_at_tips(number, queries, (keys, values), is_causal=True)
            hidden = layer.finish(hidden, attended.flatten(2, 3), inputs)
        return torch.cat((tips[:, :, None], hidden.reshape(batch, num_tips, num_unknown, -1)), dim=2)

    def _one_more(
        self, rows: FeatureRows, row: tuple[Tensor, Tensor], chains: list[list[KeyValue]], angles: Angles
    ) -> Tensor:
        hidden, joined = self._join(*row)
        for number, layer in enumerate(layers_in(self.layers)):
            inputs = layer.input_layernorm(hidden) if joined is None else joined
            joined = None
            chains[number].append(layer.keys_and_values(inputs, angles))
            keys, values = (torch.stack(parts, dim=3) for parts in zip(*chains[number], strict=True))
            queries = layer.queries(inputs, angles)[:, :, :, None]
            attended = rows.attend_at_tips(number, queries, (keys, values))
            hidden = layer.finish(hidden, attended[:, :, :, 0], inputs)
        return hidden

    def _project(self, features: Tensor) -> Tensor:
        """Turn features `[B, S, F]` into states `[B, S, H]`."""
        if self.config.tap_norm == "each":
            taps = taps_in(features, len(self.fc_norm))
            features = torch.cat([norm(tap) for norm, tap in zip(self.fc_norm, taps, strict=True)], dim=-1)
        elif self.config.tap_norm == "joined":
            features = self.input_norm(features)
        projected: Tensor = self.fc(features) if hasattr(self, "fc") else features
        return projected

    def _join(self, states: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return the residual, and what the first layer's attention reads if that is something else than its norm."""
        embedded = self.embed_tokens(tokens).to(states.dtype)
        if self.is_projected:
            both = torch.cat((self.token_norm(embedded), self.hidden_norm(states)), dim=-1)
            return self.input_proj(both), None
        normed = self.hidden_norm(states)
        joined = torch.cat((layers_in(self.layers)[0].input_layernorm(embedded), normed), dim=-1)
        return (normed if self.config.norm_before_residual else states), joined


def usual_taps(num_layers: int, num_own: int) -> tuple[int | str, ...]:
    """The paper's taps: low, middle and high.

    >>> usual_taps(30, 1)
    (2, 15, 27)
    """
    last = max(1, num_layers - 3)
    return tuple(sorted({min(2, last), num_layers // 2, last}))


add_kind(
    "eagle3",
    HeadKind(
        network=Eagle3Network,
        training=Training(
            taps=usual_taps,
            length=5,
            num_layers=1,
            loss={"kl": 1.0},
            matrix_rate=0.024,
            entries=lambda asked: {"tap_norm": "each"},
        ),
    ),
)
