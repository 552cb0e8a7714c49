"""The channel by which a draft reads its target: one hidden state, made into a part of a row's embedding.

Owns: the formula, for training and export alike. Does not own: which rows have a hidden state, training, files.

A row's hidden state is the one that the target's lower layers have made of the token before: what was to choose the
row's own token. It is scaled to a mean square of one before it comes here (`normalised`), so that no number of it is
too large for half precision. A row without one brings zeros, and zeros add nothing.
"""

from typing import NamedTuple

from torch import Tensor
from torch.nn.functional import linear, silu

_EPSILON = 1e-5


class ChannelWeights(NamedTuple):
    """`down [rank, F]` and `up [H, rank]`: from a target's hidden size to a draft's."""

    down: Tensor
    up: Tensor

    def added(self, features: Tensor) -> Tensor:
        """Return what is added to embeddings `[..., H]`, given normalised hidden states `features [..., F]`."""
        return linear(silu(linear(features, self.down)), self.up)


def normalised(hidden: Tensor) -> Tensor:
    """Scale hidden states `[..., F]` to a mean square of one each; what is zero stays zero."""
    wide = hidden.float()
    return wide * (wide.pow(2).mean(-1, keepdim=True) + _EPSILON).rsqrt()
