"""One view of every family's model: embedding, layers, rotary positions, final norm and LM head.

Owns: where Hugging Face keeps these parts in each family, and the factors between them. The layers stay HF's own.
Does not own: which families are supported (`registry.py`), attention (`attention.py`), the stages.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding

from .gated_delta import GatedDelta
from .short_conv import ShortConv

Angles = tuple[Tensor, Tensor] | None
Mixer = GatedDelta | ShortConv
"""What stands in place of attention in a layer with a state."""


class RowEmbedding(nn.Module):
    """Ids and positions to the first layer's input: token embedding, a factor, learned positions if any."""

    def __init__(
        self,
        tokens: nn.Module,
        *,
        factor: float = 1.0,
        positions: nn.Embedding | None = None,
        position_offset: int = 0,
    ) -> None:
        """Build from HF's modules; row `p` of the text reads row `p + position_offset` of `positions`."""
        super().__init__()
        self.tokens = tokens
        self.factor = factor
        self.positions = positions
        self.position_offset = position_offset

    @property
    def table(self) -> nn.Embedding:
        """The tokens' own embedding."""
        found = self.tokens[0] if isinstance(self.tokens, nn.Sequential) else self.tokens
        assert isinstance(found, nn.Embedding)
        return found

    def forward(self, ids: Tensor, positions: Tensor) -> Tensor:
        """Return `[1, rows, H]` for int64 `ids` and `positions` `[1, rows]`."""
        return self._placed(self.tokens(ids), positions)

    def of_rows(self, rows: Tensor, positions: Tensor) -> Tensor:
        """The same from the tokens' rows of `table` `[1, rows, width]`."""
        scale = getattr(self.table, "embed_scale", None)  # Gemma's, whose embedding scales by itself
        hidden = rows if scale is None else rows * scale.to(rows.dtype)
        behind = list(self.tokens)[1:] if isinstance(self.tokens, nn.Sequential) else []
        for module in behind:
            hidden = module(hidden)
        return self._placed(hidden, positions)

    def _placed(self, hidden: Tensor, positions: Tensor) -> Tensor:
        if self.factor != 1.0:
            hidden = hidden * self.factor
        if self.positions is not None:
            hidden = hidden + embedding(positions + self.position_offset, self.positions.weight)
        return hidden


@dataclass(frozen=True, slots=True, kw_only=True)
class LogitScale:
    """What happens to the LM head's output: `cap * tanh(x / divisor / cap)`; None for no cap."""

    divisor: float = 1.0
    cap: float | None = None

    def __call__(self, logits: Tensor) -> Tensor:
        """Scale and cap `logits` of any shape."""
        if self.divisor != 1.0:
            logits = logits / self.divisor
        return logits if self.cap is None else torch.tanh(logits / self.cap) * self.cap


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderParts:
    """The parts of a causal LM that stages are made of.

    `rotary` is HF's module of rotary positions, None for learned ones. `rotary_types` names each layer's kind of
    rotary position where there are several kinds, else it is None. `mixers` are the layers that have a state in place
    of attention, by layer.
    """

    embed: RowEmbedding
    layers: nn.ModuleList
    norm: nn.Module
    lm_head: nn.Linear
    num_heads: int
    hidden_size: int
    rotary: nn.Module | None = None
    rotary_types: tuple[str, ...] | None = None
    logit_scale: LogitScale = LogitScale()
    mixers: Mapping[int, Mixer] = field(default_factory=dict)

    def logits(self, hidden: Tensor) -> Tensor:
        """Turn the last layer's output `[..., H]` into logits `[..., V]`: final norm, LM head, factors."""
        return self.logit_scale(self.lm_head(self.norm(hidden)))

    def angles(self, example: Tensor, positions: Tensor) -> list[Angles]:
        """Every layer's cos and sin `[1, rows, hd]` at `positions` `[1, rows]`, in the dtype of `example`."""
        if self.rotary is None:
            return [None] * len(self.layers)
        if self.rotary_types is None:
            return [self.rotary(example, positions)] * len(self.layers)
        rotated = {kind for layer, kind in enumerate(self.rotary_types) if layer not in self.mixers}
        by_type = {kind: self.rotary(example, positions, kind) for kind in rotated}
        return [by_type.get(kind) for kind in self.rotary_types]


def general_parts(model: Any) -> DecoderParts:
    """Parts of a model that is laid out like Llama."""
    decoder = model.model
    return DecoderParts(
        embed=RowEmbedding(decoder.embed_tokens),
        layers=decoder.layers,
        norm=decoder.norm,
        lm_head=model.lm_head,
        num_heads=model.config.num_attention_heads,
        hidden_size=model.config.hidden_size,
        rotary=decoder.rotary_emb,
    )


def qwen3_5_parts(model: Any) -> DecoderParts:
    """Qwen3.5 has Gated DeltaNet in most layers, attention in the others."""
    layers = enumerate(model.model.layers)
    mixers = {number: GatedDelta(layer.linear_attn) for number, layer in layers if hasattr(layer, "linear_attn")}
    return replace(general_parts(model), mixers=mixers)


def lfm2_parts(model: Any) -> DecoderParts:
    """LFM2 has short convolutions in most layers, and another name for its final norm; LFM3 has two kinds of rope."""
    decoder, config = model.model, model.config
    has_kinds = hasattr(decoder.rotary_emb, "layer_types")
    return DecoderParts(
        embed=RowEmbedding(decoder.embed_tokens),
        layers=decoder.layers,
        norm=decoder.embedding_norm,
        lm_head=model.lm_head,
        num_heads=config.num_attention_heads,
        hidden_size=config.hidden_size,
        rotary=decoder.rotary_emb,
        rotary_types=tuple(config.layer_types) if has_kinds else None,
        mixers={n: ShortConv(layer.conv) for n, layer in enumerate(decoder.layers) if not layer.is_attention_layer},
    )


def granite_parts(model: Any) -> DecoderParts:
    """Granite multiplies the embedding and divides the logits; the other multipliers are inside its layers."""
    return replace(
        general_parts(model),
        embed=RowEmbedding(model.model.embed_tokens, factor=model.config.embedding_multiplier),
        logit_scale=LogitScale(divisor=model.config.logits_scaling),
    )


def gemma2_parts(model: Any) -> DecoderParts:
    """Gemma caps the logits; its embedding module scales by itself."""
    return replace(general_parts(model), logit_scale=LogitScale(cap=model.config.final_logit_softcapping))


def gemma3_parts(model: Any) -> DecoderParts:
    """Gemma 3 has one kind of rotary position for layers with a window and another for those without."""
    return replace(gemma2_parts(model), rotary_types=tuple(model.config.layer_types))


def gpt2_parts(model: Any) -> DecoderParts:
    """GPT-2 has learned positions and names of its own."""
    decoder = model.transformer
    return DecoderParts(
        embed=RowEmbedding(decoder.wte, positions=decoder.wpe),
        layers=decoder.h,
        norm=decoder.ln_f,
        lm_head=model.lm_head,
        num_heads=model.config.num_attention_heads,
        hidden_size=model.config.hidden_size,
    )


def opt_parts(model: Any) -> DecoderParts:
    """OPT has learned positions from row 2 on, and in some sizes projections around the layers or no final norm."""
    decoder = model.model.decoder
    tokens = _chain(decoder.embed_tokens, decoder.project_in)
    places = decoder.embed_positions
    return DecoderParts(
        embed=RowEmbedding(tokens, positions=places, position_offset=places.offset),
        layers=decoder.layers,
        norm=_chain(decoder.final_layer_norm, decoder.project_out),
        lm_head=model.lm_head,
        num_heads=model.config.num_attention_heads,
        hidden_size=model.config.hidden_size,
    )


def _chain(*modules: nn.Module | None) -> nn.Sequential:
    return nn.Sequential(*(module for module in modules if module is not None))
