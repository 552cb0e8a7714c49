"""The streaming draft: a small decoder whose top layers also carry lookahead streams.

Owns: its forward pass for training and measuring (whole sequences, no cache), and its files.
Does not own: the exported graph with masks and tip rows (`mirrorsd.export`).

A stream `j` (1..s) of row `r` enters at layer `N_d - N_s` as `h_r + P_j` at rope position `position(r) + j`, passes
through the top `N_s` layers with the same weights, and attends to rows `0..r` and to streams `1..j` of its own row.
Main rows never see streams. The main row predicts the token at `position + 1`, stream `j` that at `position + 1 + j`.
Before each of these layers and behind the last one, streams may pass an adapter that main rows do not.
(Speculative Streaming, arXiv 2402.11131, section 3.1, with learned stream embeddings and an identity projection.)
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from mirrorsd.families import DecoderParts, parts_of
from mirrorsd.families.stream_adapter import adapt_streams
from mirrorsd.graphs import names
from mirrorsd.graphs.errors import ConfigError, ExportError

from .attention import StreamRows, use_training_attention
from .whole_model import load_whole

__all__ = ["DraftHidden", "StreamShape", "StreamingDraft", "check_stream_layers", "read_stream_shape"]


class DraftHidden(NamedTuple):
    """Hidden states after the final norm: `main [B,S,H]`, `streams [B,T,s,H]` (T tip rows, s streams)."""

    main: Tensor
    streams: Tensor


class StreamShape(NamedTuple):
    """The streams of a draft: how many, through how many top layers, with adapters of which rank (0: none)."""

    num_streams: int
    num_stream_layers: int
    stream_rank: int


def read_stream_shape(folder: Path) -> StreamShape | None:
    """Return the shape of the streams in a draft's folder, None for an ordinary draft; no weights are read.

    Raises:
        ExportError: The streams file is not of this format.
    """
    path = folder / names.STREAMS_FILE
    if not path.is_file():
        return None
    with safe_open(path, framework="pt") as file:
        metadata, kept = file.metadata() or {}, set(file.keys())
        if metadata.get("format") not in (names.STREAMS_FORMAT, names.ADAPTED_STREAMS_FORMAT):
            expected = f"{names.STREAMS_FORMAT!r} or {names.ADAPTED_STREAMS_FORMAT!r}"
            raise ExportError(f"{path} has format {metadata.get('format')!r}; expected {expected}")
        first = names.stream_adapter_down(0)
        rank = int(file.get_slice(first).get_shape()[0]) if first in kept else 0
        num_streams = int(file.get_slice(names.STREAM_EMBEDDINGS).get_shape()[0])
    return StreamShape(num_streams, int(metadata["num_stream_layers"]), rank)


def check_stream_layers(num_streams: int, num_stream_layers: int, num_layers: int) -> None:
    """Check how many streams pass how many of a draft's layers.

    Raises:
        ConfigError: Fewer streams than none, or more stream layers than there are layers.
    """
    if num_streams < 0:
        raise ConfigError(f"num_streams is {num_streams}; allowed are 0 (an ordinary draft) and more")
    if num_streams and not 1 <= num_stream_layers <= num_layers:
        raise ConfigError(f"num_stream_layers is {num_stream_layers}; allowed are 1..{num_layers} (the draft's layers)")


class StreamAdapter(nn.Module):
    """A residual on the rows of streams; it starts as the identity."""

    def __init__(self, hidden: int, rank: int) -> None:
        """Make an adapter of `rank` hidden units."""
        super().__init__()
        self.down = nn.Linear(hidden, rank, bias=False)
        self.up = nn.Linear(rank, hidden, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, rows: Tensor) -> Tensor:
        """Return adapted rows, same shape."""
        return adapt_streams(rows, self.down.weight, self.up.weight)


class StreamingDraft(nn.Module):
    """A causal decoder with `s` streams in its top `num_stream_layers` layers."""

    def __init__(
        self, base: PreTrainedModel, *, num_streams: int, num_stream_layers: int, stream_rank: int = 0
    ) -> None:
        """Put streams onto `base` (an untrained embedding each); without streams it is an ordinary draft.

        Adapters of `stream_rank` are the streams' own; 0: none.

        Raises:
            ConfigError: Fewer streams than none, or more stream layers than the base has layers.
        """
        super().__init__()
        layers, hidden = base.config.num_hidden_layers, base.config.hidden_size
        check_stream_layers(num_streams, num_stream_layers, layers)
        use_training_attention(base)
        base.train(False)  # no dropout: the target's distribution is all the noise there should be
        self.base = base
        self._parts: DecoderParts = parts_of(base)
        self.num_stream_layers = num_stream_layers
        self.stream_embeddings = nn.Parameter(torch.randn(num_streams, hidden) * 0.02)
        places = num_stream_layers + 1 if num_streams and stream_rank else 0
        self.adapters = nn.ModuleList(StreamAdapter(hidden, stream_rank) for _ in range(places))

    @property
    def num_streams(self) -> int:
        """Return the number of streams per tip row."""
        return len(self.stream_embeddings)

    def forward(self, ids: Tensor, tip_rows: Tensor) -> DraftHidden:
        """Run whole sequences with streams at some rows.

        Args:
            ids: `[B,S]` token ids; row `i` is at position `i`.
            tip_rows: `[T]` the rows that carry streams, the same in every sequence; `[0]` for main rows only.
        """
        parts, (batch, size) = self._parts, ids.shape
        positions = torch.arange(size, device=ids.device)[None]
        hidden, rows = parts.embed(ids, positions), None
        angles = parts.angles(hidden, positions)
        first_stream_layer = len(parts.layers) - self.num_stream_layers
        for number, layer in enumerate(parts.layers):
            if number == first_stream_layer and self.num_streams and len(tip_rows):
                ahead = tip_rows[:, None] + torch.arange(1, self.num_streams + 1, device=ids.device)
                positions = torch.cat((positions, ahead.reshape(1, -1)), dim=1)
                streams = (hidden[:, tip_rows, None] + self.stream_embeddings).flatten(1, 2)
                hidden = torch.cat((hidden, streams), dim=1)
                angles = parts.angles(hidden, positions)
                rows = StreamRows(size, tip_rows, self.num_streams)
            hidden = self._adapt(hidden, size, number - first_stream_layer)
            hidden = layer(hidden, position_embeddings=angles[number], position_ids=positions, rows=rows)
        hidden = parts.norm(self._adapt(hidden, size, self.num_stream_layers))
        shape = (batch, len(tip_rows), self.num_streams, hidden.shape[-1])
        return DraftHidden(hidden[:, :size], hidden[:, size:].reshape(shape))

    def _adapt(self, hidden: Tensor, num_rows: int, place: int) -> Tensor:
        """Adapt the rows of streams, which follow `num_rows` main rows once they are in."""
        if hidden.shape[1] == num_rows or not len(self.adapters):
            return hidden
        return torch.cat((hidden[:, :num_rows], self.adapters[place](hidden[:, num_rows:])), dim=1)

    def logits(self, hidden: Tensor) -> Tensor:
        """Apply the shared LM head to hidden states `[..., H]`."""
        return self._parts.logit_scale(self._parts.lm_head(hidden))

    def save(self, folder: Path, *, dtype: torch.dtype = torch.float16) -> None:
        """Write an ordinary Hugging Face folder, and beside the weights what only the streams have."""
        base: Any = copy.deepcopy(self.base)
        base.to(dtype).save_pretrained(folder)
        if not self.num_streams:
            return
        metadata = {
            "format": names.ADAPTED_STREAMS_FORMAT if len(self.adapters) else names.STREAMS_FORMAT,
            "num_streams": str(self.num_streams),
            "num_stream_layers": str(self.num_stream_layers),
        }
        tensors = {names.STREAM_EMBEDDINGS: self.stream_embeddings}
        tensors |= {f"adapters.{name}": weight for name, weight in self.adapters.named_parameters()}
        written = {name: tensor.detach().to(dtype).contiguous() for name, tensor in tensors.items()}
        save_file(written, folder / names.STREAMS_FILE, metadata=metadata)

    @classmethod
    def load(cls, folder: Path) -> StreamingDraft:
        """Read a draft in single precision; without a streams file it is an ordinary one.

        Raises:
            ExportError: The streams file is not of this format, or does not fit the draft.
        """
        shape = read_stream_shape(folder)
        if shape is None:
            return cls(load_whole(folder), num_streams=0, num_stream_layers=0)
        path = folder / names.STREAMS_FILE
        with safe_open(path, framework="pt") as file:
            tensors = {name: file.get_tensor(name).float() for name in file.keys()}  # noqa: SIM118 - not a dict
        embeddings = tensors.pop(names.STREAM_EMBEDDINGS)
        draft = cls(load_whole(folder), **shape._asdict())
        own = {"stream_embeddings": embeddings, **tensors}
        try:
            missing = draft.load_state_dict(own, strict=False).missing_keys
        except RuntimeError as error:
            raise ExportError(f"{path} does not fit the draft beside it; train the draft again ({error})") from error
        lacking = [name for name in missing if not name.startswith("base.")]
        if lacking:
            raise ExportError(f"{path} lacks {', '.join(lacking)}; train the draft again")
        return draft
