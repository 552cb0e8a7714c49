"""The target as a head's teacher: hidden states between the layers, and what it says of each row.

Owns: running a frozen target's layers over whole texts, its matrices kept in the type that products are computed in.
Does not own: heads, losses.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from mirrorsd.families import DecoderParts, parts_of
from mirrorsd.families.decoder_parts import LogitScale
from mirrorsd.families.heads.config import FINAL
from mirrorsd.graphs.errors import ConfigError
from mirrorsd.training.models.attention import training_attention_in
from mirrorsd.training.run.device import matrices, narrowed, product_dtype

__all__ = ["Features", "Teacher", "check_taps", "teaching"]


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
        raise ConfigError(
            f"HeadPlan.taps: tap {beyond[0]} asked of a target with {num_layers} layers; give 0 to {num_layers}"
        )


class Teacher:
    """A frozen target."""

    def __init__(self, target: PreTrainedModel, head: Tensor) -> None:
        """Teach as `target` does, with its LM head's matrix `[V, H]` as `head`."""
        self._target = target
        self._parts: DecoderParts = parts_of(target)
        self.head = head

    @property
    def logit_scale(self) -> LogitScale:
        """What the target does to its logits."""
        return self._parts.logit_scale

    @torch.no_grad()
    def read(self, ids: Tensor, taps: tuple[int | str, ...]) -> Features:
        """Run the layers over `ids [B, S]`, the LM head left out.

        Tap `t` is the hidden state that `t` layers have made: 0 is what the first one reads, the number of layers what
        the final norm reads.
        """
        parts = self._parts
        positions = torch.arange(ids.shape[1], device=ids.device)[None]
        hidden = parts.embed(ids, positions)
        states: dict[int | str, Tensor] = {0: hidden}
        angles = parts.angles(hidden, positions)
        with training_attention_in(self._target):
            for number, layer in enumerate(parts.layers):
                hidden = layer(hidden, position_embeddings=angles[number], position_ids=positions)
                if number + 1 in taps:
                    states[number + 1] = hidden
        states[FINAL] = parts.norm(hidden)
        return Features(torch.cat([states[tap] for tap in taps], dim=-1), states[FINAL])

    def logits(self, final: Tensor) -> Tensor:
        """Logits `[..., V]` in single precision of `final [..., H]`."""
        return self.logit_scale((final.to(self.head.dtype) @ self.head.T).float())


@contextmanager
def teaching(target: PreTrainedModel) -> Iterator[Teacher]:
    """Give a teacher whose layers' matrices are in the type of products; undone at the end."""
    parts: Any = parts_of(target)
    head = parts.lm_head.weight.detach()
    with narrowed(matrices(parts.layers)):
        yield Teacher(target, head.to(product_dtype()))
