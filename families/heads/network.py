"""What all heads have in common: their embedding, their head over the vocabulary, and how they are driven.

Owns: the interface.
Does not own: the kinds (`kinds/`).
"""

from __future__ import annotations

from torch import Tensor, nn

from .attending import FeatureRows
from .choice import Listener
from .config import HeadConfig
from .vocabulary import Vocabulary


class HeadNetwork(nn.Module):
    """A head whose guess `k` (from 0) behind a row at position `p` is the token at `p + 2 + k`."""

    def __init__(self, config: HeadConfig) -> None:
        super().__init__()
        self.config = config
        self.lm_head = Vocabulary(config)
        if config.reads_tokens:
            self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)

    @property
    def feature_width(self) -> int:
        """Width `F` of the features."""
        return len(self.config.taps) * self.config.hidden_size

    def read(self, rows: FeatureRows) -> Tensor | None:
        """Pass all rows, which leave their keys and values in `rows.new`; return their states `[B, S, H]` if any."""
        raise NotImplementedError

    def guess(self, rows: FeatureRows, states: Tensor | None, listener: Listener) -> None:
        """Guess `K` tokens behind every tip and tell `listener`; `states` are what `read` returned."""
        raise NotImplementedError

    def unroll(self, rows: FeatureRows, listener: Listener) -> None:
        """Read the rows and guess behind the tips."""
        self.guess(rows, self.read(rows), listener)
