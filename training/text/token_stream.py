"""Long rows of tokens, read in rectangles from front to back, again and again.

Owns: the place in a row, so that a resumed training goes on at the next token; which tokens the target wrote itself.
Does not own: what the tokens mean.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from mirrorsd.graphs.errors import ConfigError

__all__ = ["MixedStream", "TokenStream"]


class TokenStream:
    """Read `[sequences, length + 1]` rectangles; neighbours share their border token.

    >>> stream = TokenStream(np.arange(7, dtype=np.uint16))
    >>> stream.take(2, 3).tolist(), stream.place
    ([[0, 1, 2, 3], [3, 4, 5, 6]], 6)
    """

    def __init__(self, tokens: NDArray[np.uint16 | np.uint32], own: NDArray[np.bool_] | bool = True) -> None:
        """Start at the front of `tokens`; `own` says which of them the target wrote: one answer for all, or one each.

        Raises:
            ConfigError: There are not as many marks as tokens.
        """
        if not isinstance(own, bool) and own.shape != tokens.shape:
            raise ConfigError(f"{own.size} marks for {tokens.size} tokens; every token needs one")
        self._tokens, self._own = tokens, own
        self.place = 0

    @classmethod
    def open(cls, path: Path) -> TokenStream:
        """Open a `.npy` file of token ids without reading it into memory."""
        return cls(np.load(path, mmap_mode="r"))

    def __len__(self) -> int:
        return len(self._tokens)

    @property
    def tokens(self) -> NDArray[np.uint16 | np.uint32]:
        """All of them, one behind the other."""
        return self._tokens

    def take(self, sequences: int, length: int) -> torch.Tensor:
        """Return the next `[sequences, length + 1]` token ids (int64).

        Raises:
            ConfigError: The stream is shorter than one such rectangle.
        """
        return self.take_marked(sequences, length)[0]

    def take_marked(self, sequences: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the next `[sequences, length + 1]` token ids (int64), and which of them the target wrote (bool).

        Raises:
            ConfigError: The stream is shorter than one such rectangle.
        """
        needed = sequences * length + 1
        if needed > len(self._tokens):
            raise ConfigError(f"a batch of {sequences} x {length} needs {needed} tokens; there are {len(self._tokens)}")
        if self.place + needed > len(self._tokens):
            self.place = 0
        places = self.place + length * np.arange(sequences)[:, None] + np.arange(length + 1)
        self.place += sequences * length
        own = np.full(places.shape, self._own) if isinstance(self._own, bool) else self._own[places]
        device = torch.get_default_device()
        ids = torch.from_numpy(self._tokens[places].astype(np.int64))
        return ids.to(device), torch.from_numpy(own).to(device)

    def state_dict(self) -> dict[str, int]:
        """Return the place."""
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go on at a saved place."""
        self.place = state["place"]


class MixedStream:
    """Two streams side by side: in every batch, a share of the sequences comes from the second.

    >>> first, second = TokenStream(np.zeros(9, np.uint16)), TokenStream(np.ones(9, np.uint16))
    >>> MixedStream(first, second, share=0.5).take(2, 2).tolist()
    [[0, 0, 0], [1, 1, 1]]
    """

    def __init__(self, first: TokenStream, second: TokenStream, share: float) -> None:
        """Mix `1 - share` of `first` with `share` of `second`, rounded to whole sequences."""
        self._streams = {"first": first, "second": second}
        self._share = share

    @property
    def tokens(self) -> NDArray[np.uint16 | np.uint32]:
        """All of the first stream's, then all of the second's."""
        return np.concatenate([stream.tokens for stream in self._streams.values()])

    def take(self, sequences: int, length: int) -> torch.Tensor:
        """Return the next `[sequences, length + 1]` token ids (int64): the first stream's, then the second's.

        Raises:
            ConfigError: A stream is shorter than its part of the batch.
        """
        return self.take_marked(sequences, length)[0]

    def take_marked(self, sequences: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the next ids as `take` does, and which of them the target wrote (bool, same shape)."""
        of_second = round(self._share * sequences)
        counts = {"first": sequences - of_second, "second": of_second}
        parts = [self._streams[name].take_marked(count, length) for name, count in counts.items() if count]
        return torch.cat([ids for ids, _ in parts]), torch.cat([own for _, own in parts])

    def state_dict(self) -> dict[str, dict[str, int]]:
        """Return the place in both."""
        return {name: stream.state_dict() for name, stream in self._streams.items()}

    def load_state_dict(self, state: dict[str, dict[str, int]]) -> None:
        """Go on at saved places."""
        for name, stream in self._streams.items():
            stream.load_state_dict(state[name])
