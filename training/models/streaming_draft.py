"""The streaming draft: a small decoder whose top layers also carry lookahead streams.

Owns: its forward pass for training and measuring (whole sequences, no cache), and its files.
Does not own: the exported graph with masks and tip rows (`mirrorsd.export`).

A stream `j` (1..s) of row `r` enters at layer `N_d - N_s` as `h_r + P_j` at rope position `position(r) + j`, passes
through the top `N_s` layers with the same weights, and attends to rows `0..r` and to streams `1..j` of its own row.
Main rows never see streams. The main row predicts the token at `position + 1`, stream `j` that at `position + 1 + j`.
Before each of these layers and behind the last one, streams may pass an adapter that main rows do not, and behind the
final norm a link that tells each stream which tokens were chosen before its own (`mirrorsd.families.stream_link`).
(Speculative Streaming, arXiv 2402.11131, section 3.1, with learned stream embeddings and an identity projection.)
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn.functional import linear
from transformers import PreTrainedModel

from mirrorsd.families import DecoderParts, parts_of
from mirrorsd.families.low_rank_head import EMBEDDING, LM_HEAD, SHARES_EMBEDDING, head_tokens
from mirrorsd.families.stream_adapter import adapt_streams
from mirrorsd.families.stream_link import Guesses, LinkWeights, follow_links
from mirrorsd.graphs import names
from mirrorsd.graphs.errors import ConfigError, ExportError
from mirrorsd.training.divergence import HeadRows
from mirrorsd.training.models.attention import StreamRows, use_training_attention
from mirrorsd.training.models.whole_model import load_whole

__all__ = ["DraftHidden", "StreamShape", "StreamingDraft", "check_stream_layers", "read_stream_shape"]


class DraftHidden(NamedTuple):
    """Hidden states after the final norm: `main [B,S,H]`, `streams [B,T,s,H]` (T tip rows, s streams)."""

    main: Tensor
    streams: Tensor


class StreamShape(NamedTuple):
    """The streams of a draft: how many, through how many top layers, with adapters and link of which rank (0: none)."""

    num_streams: int
    num_stream_layers: int
    stream_rank: int
    link_rank: int = 0


def read_stream_shape(folder: Path) -> StreamShape | None:
    """Return the shape of the streams in a draft's folder, None for an ordinary draft; no weights are read.

    Raises:
        ExportError: The streams file is not whole, or not of this format.
    """
    path = folder / names.STREAMS_FILE
    if not path.is_file():
        return None
    try:
        with safe_open(path, framework="pt") as file:
            metadata, kept = file.metadata() or {}, set(file.keys())
            if metadata.get("format") not in names.STREAMS_FORMATS:
                expected = " or ".join(map(repr, names.STREAMS_FORMATS))
                raise ExportError(f"{path} has format {metadata.get('format')!r}; expected {expected}")
            firsts = (names.stream_adapter_down(0), names.STREAM_LINK[0])
            ranks = [int(file.get_slice(first).get_shape()[0]) if first in kept else 0 for first in firsts]
            num_streams = int(file.get_slice(names.STREAM_EMBEDDINGS).get_shape()[0])
    except SafetensorError as error:
        raise ExportError(f"{path} cannot be read: {error}") from error
    return StreamShape(num_streams, int(metadata["num_stream_layers"]), *ranks)


def check_stream_layers(num_streams: int, num_stream_layers: int, num_layers: int) -> None:
    """Check how many streams pass how many of a draft's layers.

    Raises:
        ConfigError: Fewer streams than none, or more stream layers than there are layers.
    """
    if num_streams < 0:
        raise ConfigError(f"StreamShape.num_streams is {num_streams}; allowed are 0 (an ordinary draft) and more")
    if num_streams and not 1 <= num_stream_layers <= num_layers:
        raise ConfigError(
            f"StreamShape.num_stream_layers is {num_stream_layers}; allowed are 1..{num_layers} (the draft's layers)"
        )


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


class StreamLink(nn.Module):
    """The trained part of a link; it starts without effect.

    Rows of a head are small numbers: they are scaled to ones while training, so that its matrices learn like others.
    """

    def __init__(self, head: Tensor, rank: int) -> None:
        """Make a link of `rank` hidden units for a head `[V, H]`."""
        super().__init__()
        hidden = head.shape[1]
        self.scale = 1.0 / float(head.detach().std())
        self.down, self.last, self.earlier = (nn.Linear(hidden, rank, bias=False) for _ in range(3))
        self.up = nn.Linear(rank, hidden, bias=False)
        nn.init.zeros_(self.up.weight)

    def weights(self) -> LinkWeights:
        """Return the matrices as files and graphs have them: for rows of the head as they are."""
        of_tokens = (self.last.weight * self.scale, self.earlier.weight * self.scale)
        return LinkWeights(self.down.weight, *of_tokens, self.up.weight)

    @torch.no_grad()
    def take(self, weights: LinkWeights) -> None:
        """Take over what `weights` has returned.

        Raises:
            ValueError: They have other shapes.
        """
        scaled = (weights.down, weights.last / self.scale, weights.earlier / self.scale, weights.up)
        for own, given in zip((self.down, self.last, self.earlier, self.up), scaled, strict=True):
            if own.weight.shape != given.shape:
                raise ValueError(f"a matrix {tuple(given.shape)} where {tuple(own.weight.shape)} is expected")
            own.weight.copy_(given)


class StreamingDraft(nn.Module):
    """A causal decoder with `s` streams in its top `num_stream_layers` layers."""

    def __init__(
        self,
        base: PreTrainedModel,
        *,
        num_streams: int,
        num_stream_layers: int,
        stream_rank: int = 0,
        link_rank: int = 0,
    ) -> None:
        """Put streams onto `base` (an untrained embedding each); without streams it is an ordinary draft.

        Adapters of `stream_rank` and a link of `link_rank` are the streams' own; 0: none.

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
        self.link: StreamLink | None = None
        self.add_link(link_rank)

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
        """Apply the LM head to hidden states `[..., H]`, for the tokens that it names."""
        return self._parts.logit_scale(self._raw_logits(hidden))

    def _raw_logits(self, hidden: Tensor) -> Tensor:
        logits: Tensor = self._parts.lm_head(hidden)
        return logits[..., : head_tokens(self.base.config)]

    def head_rows(self, hidden: Tensor) -> HeadRows:
        """Hidden states `[..., H]` with the head that reads them, for comparing them with the target's."""
        head = self._parts.lm_head.weight[: head_tokens(self.base.config)]
        return HeadRows(hidden, head, self._parts.logit_scale)

    @property
    def shares_embedding(self) -> bool:
        """Whether the token embedding is the target's and is not written with the draft."""
        return bool(getattr(self.base.config, SHARES_EMBEDDING, False))

    def settle_embedding(self, *, is_trained: bool) -> None:
        """Leave a shared embedding as it is, or make it the draft's own, to be trained."""
        if is_trained:
            setattr(self.base.config, SHARES_EMBEDDING, False)
        self.base.get_input_embeddings().requires_grad_(is_trained)

    def add_link(self, rank: int) -> None:
        """Give streams that have none an untrained link of `rank`; 0: leave them without."""
        if self.num_streams and rank:
            self.link = StreamLink(self._parts.lm_head.weight, rank)

    def linked(self, streams: Tensor, last: Tensor, earlier: Tensor) -> Tensor:
        """Return what streams `[..., s, H]` are once they know the two tokens before their own, `[..., s]` ids each."""
        if self.link is None:
            return streams
        head, weights = self._parts.lm_head.weight, self.link.weights()
        return streams + weights.residual(linear(streams, weights.down), head[last], head[earlier])

    def follow(self, main: Tensor, streams: Tensor, own: int) -> list[int]:
        """Return the tokens that a row `[H]` and its streams `[s, H]` choose, as the exported graph does.

        Both are behind the final norm; `own` is the row's token.
        """
        rows = torch.cat((main[None], streams))
        if self.link is None:
            return [int(token) for token in self.logits(rows).argmax(-1)]
        guesses = Guesses(self._raw_logits(rows)[None], None, self._parts.logit_scale)
        head = self._parts.lm_head.weight
        ranked = follow_links(self.link.weights(), streams[None], guesses, head, head[None, own])
        best = ranked.ids.gather(2, ranked.scores.argmax(-1, keepdim=True))
        return [int(token) for token in best.flatten()]

    def save(self, folder: Path, *, dtype: torch.dtype = torch.float16) -> None:
        """Write an ordinary Hugging Face folder, and beside the weights what only the streams have."""
        base: Any = copy.deepcopy(self.base)
        base.to(dtype)
        kept = base.state_dict()
        if self.shares_embedding:
            del kept[EMBEDDING]
            if base.config.tie_word_embeddings:
                del kept[LM_HEAD]
        base.save_pretrained(folder, state_dict=kept)
        if not self.num_streams:
            return
        metadata = {
            "format": self._file_format,
            "num_streams": str(self.num_streams),
            "num_stream_layers": str(self.num_stream_layers),
        }
        tensors: dict[str, Tensor] = {names.STREAM_EMBEDDINGS: self.stream_embeddings}
        tensors |= {f"adapters.{name}": weight for name, weight in self.adapters.named_parameters()}
        if self.link is not None:
            tensors |= dict(zip(names.STREAM_LINK, self.link.weights(), strict=True))
        written = {name: tensor.detach().to(dtype).contiguous() for name, tensor in tensors.items()}
        save_file(written, folder / names.STREAMS_FILE, metadata=metadata)

    @property
    def _file_format(self) -> str:
        if self.link is not None:
            return names.LINKED_STREAMS_FORMAT
        return names.ADAPTED_STREAMS_FORMAT if len(self.adapters) else names.STREAMS_FORMAT

    @classmethod
    def load(cls, folder: Path, embedding: Tensor | None = None) -> StreamingDraft:
        """Read a draft in single precision; without a streams file it is an ordinary one.

        One that shares its target's token embedding gets it as `embedding` `[V, H]`.

        Raises:
            ExportError: The streams file is not of this format, or does not fit the draft.
        """
        shape = read_stream_shape(folder)
        if shape is None:
            return cls(load_whole(folder, embedding), num_streams=0, num_stream_layers=0)
        path = folder / names.STREAMS_FILE
        with safe_open(path, framework="pt") as file:
            tensors = {name: file.get_tensor(name).float() for name in file.keys()}  # noqa: SIM118 - not a dict
        embeddings = tensors.pop(names.STREAM_EMBEDDINGS)
        draft = cls(load_whole(folder, embedding), **shape._asdict())
        link = [tensors.pop(name, torch.empty(0)) for name in names.STREAM_LINK]
        own = {"stream_embeddings": embeddings, **tensors}
        try:
            missing = draft.load_state_dict(own, strict=False).missing_keys
            if draft.link is not None:
                draft.link.take(LinkWeights(*link))
        except (RuntimeError, ValueError) as error:
            raise ExportError(f"{path} does not fit the draft beside it; train the draft again ({error})") from error
        lacking = [name for name in missing if not name.startswith(("base.", "link."))]
        if lacking:
            raise ExportError(f"{path} lacks {', '.join(lacking)}; train the draft again")
        return draft
