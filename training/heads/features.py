"""What a head reads of its target: hidden states between the layers, for whole texts.

Owns: running a frozen target's layers and keeping the taps. Does not own: heads, losses.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from mirrorsd.families import DecoderParts, parts_of
from mirrorsd.families.heads.config import FINAL
from mirrorsd.graphs.errors import ConfigError
from mirrorsd.training.models.attention import training_attention_in

__all__ = ["Features", "check_taps", "read_features"]


class Features(NamedTuple):
    """`taps [B, S, n * H]` in the order they were asked for, and `final [B, S, H]`: behind the final norm."""

    taps: Tensor
    final: Tensor


def check_taps(taps: tuple[int | str, ...], num_layers: int) -> None:
    """Check taps against a target's layers.

    Raises:
        ConfigError: A number beyond them.
    """
    beyond = [tap for tap in taps if isinstance(tap, int) and tap > num_layers]
    if beyond:
        raise ConfigError(f"tap {beyond[0]} asked of a target with {num_layers} layers; give 0 to {num_layers}")


@torch.no_grad()
def read_features(target: PreTrainedModel, ids: Tensor, taps: tuple[int | str, ...]) -> Features:
    """Run the layers of `target` over `ids [B, S]`, the LM head left out.

    Tap `t` is the hidden state that `t` layers have made: 0 is what the first one reads, the number of layers what the
    final norm reads.
    """
    parts: DecoderParts = parts_of(target)
    positions = torch.arange(ids.shape[1], device=ids.device)[None]
    hidden = parts.embed(ids, positions)
    states: dict[int | str, Tensor] = {0: hidden}
    angles = parts.angles(hidden, positions)
    with training_attention_in(target):
        for number, layer in enumerate(parts.layers):
            hidden = layer(hidden, position_embeddings=angles[number], position_ids=positions)
            if number + 1 in taps:
                states[number + 1] = hidden
    states[FINAL] = parts.norm(hidden)
    return Features(torch.cat([states[tap] for tap in taps], dim=-1), states[FINAL])
