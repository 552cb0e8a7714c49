"""The streaming draft: a small decoder whose top layers also carry lookahead streams.

Owns: its forward pass for training and measuring (whole sequences, no cache), and its files.
Does not own: the exported graph with masks and tip rows (`mirrorsd.export`).

A stream `j` (1..s) of row `r` enters at layer `N_d - N_s` as `h_r + P_j` at rope position `position(r) + j`, passes
through the top `N_s` layers with the same weights, and attends to rows `0..r` and to streams `1..j` of its own row.
Main rows never see streams. The main row predicts the token at `position + 1`, stream `j` that at `position + 1 + j`.
(Speculative Streaming, arXiv 2402.11131, section 3.1, with learned stream embeddings and an identity projection.)
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from mirrorsd.graphs.errors import ConfigError, ExportError

from .decoder_rows import Rotary, Rows, finish_layer, project_rows

__all__ = ["STREAMS_FILE", "DraftHidden", "StreamingDraft"]

STREAMS_FILE = "streams.safetensors"
STREAMS_FORMAT = "mirrorsd-streams-1"


class DraftHidden(NamedTuple):
    """Hidden states after the final norm: `main [B,S,H]`, `streams [B,T,s,H]` (T tip rows, s streams)."""

    main: Tensor
    streams: Tensor


class StreamingDraft(nn.Module):
    """A causal decoder with `s` streams in its top `num_stream_layers` layers."""

    def __init__(self, base: PreTrainedModel, *, num_streams: int, num_stream_layers: int) -> None:
        """Put streams onto `base` (an untrained embedding each); without streams it is an ordinary draft.

        Raises:
            ConfigError: Fewer streams than none, or more stream layers than the base has layers.
        """
        super().__init__()
        layers, hidden = base.config.num_hidden_layers, base.config.hidden_size
        if num_streams < 0:
            raise ConfigError(f"num_streams is {num_streams}; allowed are 0 (an ordinary draft) and more")
        if num_streams and not 1 <= num_stream_layers <= layers:
            raise ConfigError(f"num_stream_layers is {num_stream_layers}; allowed are 1..{layers} (the draft's layers)")
        self.base = base
        self.num_stream_layers = num_stream_layers
        self.stream_embeddings = nn.Parameter(torch.randn(num_streams, hidden) * 0.02)

    @property
    def num_streams(self) -> int:
        """Return the number of streams per tip row."""
        return len(self.stream_embeddings)

    def forward(self, ids: Tensor, tip_rows: Tensor) -> DraftHidden:
        """Run whole sequences with streams at some rows.

        Args:
            ids: `[B,S]` token ids; row `i` is at position `i`.
            tip_rows: `[T]` the rows that carry streams, the same in every sequence.
        """
        decoder, streams_count = self.base.model, self.num_streams
        hidden = decoder.embed_tokens(ids)
        rows = torch.arange(ids.shape[1], device=ids.device)
        main_rotary = decoder.rotary_emb(hidden, rows[None])
        positions = tip_rows[:, None] + torch.arange(1, streams_count + 1, device=ids.device)
        stream_rotary = decoder.rotary_emb(hidden, positions.reshape(1, -1))
        hidden_below = rows[None, :] > tip_rows.repeat_interleave(streams_count)[:, None]
        streams: Tensor | None = None
        first_stream_layer = len(decoder.layers) - self.num_stream_layers
        for number, layer in enumerate(decoder.layers):
            main = project_rows(layer, hidden, main_rotary)
            if number == first_stream_layer and streams_count:
                streams = (hidden[:, tip_rows, None] + self.stream_embeddings).flatten(1, 2)
            if streams is not None:
                streams = _stream_layer(layer, streams, stream_rotary, main, hidden_below, streams_count)
            attended = F.scaled_dot_product_attention(*main, is_causal=True, enable_gqa=True)
            hidden = finish_layer(layer, hidden, attended)
        normed = decoder.norm(hidden)
        if streams is None:
            return DraftHidden(normed, normed.new_empty(len(ids), len(tip_rows), 0, normed.shape[-1]))
        return DraftHidden(normed, decoder.norm(streams).view(len(ids), len(tip_rows), streams_count, -1))

    def logits(self, hidden: Tensor) -> Tensor:
        """Apply the shared LM head to hidden states `[..., H]`."""
        logits: Tensor = self.base.lm_head(hidden)
        return logits

    def save(self, folder: Path, *, dtype: torch.dtype = torch.float16) -> None:
        """Write an ordinary Hugging Face folder, and the stream embeddings beside the weights."""
        base: Any = copy.deepcopy(self.base)
        base.to(dtype).save_pretrained(folder)
        metadata = {
            "format": STREAMS_FORMAT,
            "num_streams": str(self.num_streams),
            "num_stream_layers": str(self.num_stream_layers),
        }
        embeddings = self.stream_embeddings.detach().to(dtype).contiguous()
        save_file({"stream_embeddings": embeddings}, folder / STREAMS_FILE, metadata=metadata)

    @classmethod
    def load(cls, folder: Path) -> StreamingDraft:
        """Read a draft in single precision.

        Raises:
            ExportError: The streams file is missing or not of this format.
        """
        path = folder / STREAMS_FILE
        if not path.is_file():
            raise ExportError(f"{path} does not exist; a streaming draft keeps its stream embeddings there")
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            if metadata.get("format") != STREAMS_FORMAT:
                raise ExportError(f"{path} has format {metadata.get('format')!r}; expected {STREAMS_FORMAT!r}")
            embeddings = file.get_tensor("stream_embeddings").float()
        base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        stream_layers = int(metadata["num_stream_layers"])
        draft = cls(base, num_streams=len(embeddings), num_stream_layers=stream_layers)
        draft.stream_embeddings.data.copy_(embeddings)
        return draft


def _stream_layer(
    layer: Any, streams: Tensor, rotary: Rotary, main: Rows, hidden_below: Tensor, streams_count: int
) -> Tensor:
    """Run one layer over `streams [B,T*s,H]`; `hidden_below [T*s,S]` marks the main rows that a stream may not see."""
    own = project_rows(layer, streams, rotary)
    batch, kv_heads, _, width = main.keys.shape
    queries = own.queries.reshape(batch, kv_heads, -1, own.queries.shape[2], width) * width**-0.5
    to_main = queries @ main.keys.unsqueeze(2).transpose(-1, -2)
    to_main = to_main.masked_fill(hidden_below, float("-inf"))
    blocked = (batch, kv_heads, 1, -1, streams_count, width)
    own_keys, own_values = own.keys.view(blocked), own.values.view(blocked)
    to_own = _by_row(queries, streams_count) @ own_keys.transpose(-1, -2)
    later = torch.ones(streams_count, streams_count, dtype=torch.bool, device=streams.device).triu(1)
    to_own = to_own.masked_fill(later, float("-inf")).flatten(3, 4)
    weights = torch.cat((to_main, to_own), dim=-1).softmax(-1).to(main.values.dtype)
    of_main, of_own = weights[..., :-streams_count], weights[..., -streams_count:]
    attended = of_main @ main.values.unsqueeze(2)
    attended = attended + (_by_row(of_own, streams_count) @ own_values).flatten(3, 4)
    return finish_layer(layer, streams, attended.flatten(1, 2))


def _by_row(streams: Tensor, streams_count: int) -> Tensor:
    """View `[B,kvh,g,T*s,...]` as `[B,kvh,g,T,s,...]`."""
    return streams.view(*streams.shape[:3], -1, streams_count, streams.shape[-1])
