"""What stands beside a checkpoint's weights (adapters, streams), and the sizes that the contracts need.

Owns: reading those small files into PyTorch. Does not own: the model and its weights (`weightless.py`), checks on the
folders (`checkpoint.py`).
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from mirrorsd.export.weights.block_formats import COMPUTE_BY_PRECISION
from mirrorsd.families.low_rank_head import SHARES_EMBEDDING, head_tokens
from mirrorsd.families.registry import FAMILIES, recurrent_shape
from mirrorsd.families.stream_link import LinkWeights
from mirrorsd.graphs import names
from mirrorsd.graphs.contract import DraftShape, TargetShape
from mirrorsd.graphs.errors import ExportError

# Beyond this the noise is read for too many ids: 32 lists of 150,000 would be 19 MB in every pass.
_MOST_NOISE_IDS = 32_768
# One per position, used in turn. Enough for windows of up to 29 tokens and their branches, 2 (gamma + 1) + s positions;
# where longer ones meet in a row, candidates are ranked with another position's noise, which costs speed only.
_NOISE_ROWS = 64
_DTYPE_BY_COMPUTE = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
DTYPE_BY_PRECISION = {precision: _DTYPE_BY_COMPUTE[kind] for precision, kind in COMPUTE_BY_PRECISION.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Streams:
    """What a streaming draft has beside an ordinary one's weights.

    Attributes:
        embeddings: `[s, Hd]`.
        num_stream_layers: How many top layers the streams pass.
        adapters: (down `[rank, Hd]`, up `[Hd, rank]`) before each of these layers and behind the last; or none.
        link: What tells streams which tokens were chosen before their own; or None.
    """

    embeddings: Tensor
    num_stream_layers: int
    adapters: tuple[tuple[Tensor, Tensor], ...] = ()
    link: LinkWeights | None = None

    def rounded(self, dtype: torch.dtype) -> "Streams":
        """These streams in the numbers of a draft that is stored in `dtype`."""

        def kept(part: Tensor) -> Tensor:
            return part.to(dtype).to(part.dtype)

        return Streams(
            embeddings=kept(self.embeddings),
            num_stream_layers=self.num_stream_layers,
            adapters=tuple((kept(down), kept(up)) for down, up in self.adapters),
            link=None if self.link is None else LinkWeights(*map(kept, self.link)),
        )


def target_shape(model: Any, precision: str) -> TargetShape:
    """Sizes of the target for its contracts."""
    config = model.config
    mixture = FAMILIES[config.model_type].mixture
    return TargetShape(
        num_layers=config.num_hidden_layers,
        hidden_size=config.hidden_size,
        vocab_size=config.vocab_size,
        num_kv_heads=_num_kv_heads(config),
        head_dim=_head_dim(config),
        dtype=str(DTYPE_BY_PRECISION[precision]).removeprefix("torch."),
        recurrent=recurrent_shape(config),
        num_experts=0 if mixture is None else int(getattr(config, mixture.num_experts)),
        num_active=0 if mixture is None else int(getattr(config, mixture.num_active)),
    )


def draft_shape(
    model: Any, streams: Streams | None, *, target_vocab_size: int, num_candidates: int, has_noise: bool | None = None
) -> DraftShape:
    """Sizes of the draft for its contract; ids that its head does not name, or the target lacks, are cut off.

    Noise in the graph (`has_noise`) costs a row of the vocabulary per tip and stream: None takes it up to
    `_MOST_NOISE_IDS` ids.
    """
    config = model.config
    vocab_size = min(head_tokens(config), target_vocab_size)
    is_shared = bool(getattr(config, SHARES_EMBEDDING, False))
    if has_noise is None:
        has_noise = vocab_size <= _MOST_NOISE_IDS
    return DraftShape(
        num_layers=config.num_hidden_layers,
        vocab_size=vocab_size,
        num_kv_heads=_num_kv_heads(config),
        head_dim=_head_dim(config),
        num_streams=0 if streams is None else streams.embeddings.shape[0],
        num_candidates=num_candidates,
        num_noise_rows=_NOISE_ROWS if has_noise else 0,
        row_width=config.hidden_size if is_shared else 0,
    )


def _num_kv_heads(config: Any) -> int:
    grouped = getattr(config, "num_key_value_heads", None)
    return int(grouped or config.num_attention_heads)


def _head_dim(config: Any) -> int:
    explicit = getattr(config, "head_dim", None)
    return int(explicit or config.hidden_size // config.num_attention_heads)


def load_streams(folder: Path, hidden_size: int, num_layers: int, head_width: int | None = None) -> Streams | None:
    """Read `streams.safetensors` beside a draft's weights; None where the draft has none.

    `head_width` is how wide a row is behind the final norm, where a link works, if not `hidden_size`.

    Raises:
        ExportError: unreadable, of another format, or not made for this draft.
    """
    path = folder / names.STREAMS_FILE
    if not path.is_file():
        return None
    metadata, tensors = _read_tensors(path, *names.STREAMS_FORMATS)
    embeddings = tensors.get(names.STREAM_EMBEDDINGS)
    written = metadata.get("num_stream_layers", "0")
    num_stream_layers = int(written) if written.isdecimal() else 0
    if embeddings is None or embeddings.ndim != 2 or embeddings.shape[1] != hidden_size:
        raise ExportError(
            f"{path} needs {names.STREAM_EMBEDDINGS!r} of shape [s, {hidden_size}]; train the draft again"
        )
    if not 1 <= num_stream_layers <= num_layers:
        raise ExportError(f"{path} says num_stream_layers = {written}; this draft allows 1..{num_layers}")
    adapters: tuple[tuple[Tensor, Tensor], ...] = ()
    kind = metadata["format"]
    is_linked = kind == names.LINKED_STREAMS_FORMAT
    if kind == names.ADAPTED_STREAMS_FORMAT or (is_linked and names.stream_adapter_down(0) in tensors):
        places = range(num_stream_layers + 1)
        pairs = [(names.stream_adapter_down(place), names.stream_adapter_up(place)) for place in places]
        adapters = tuple(_adapter(path, tensors, pair, hidden_size) for pair in pairs)
    link = _link(path, tensors, head_width or hidden_size) if is_linked else None
    return Streams(embeddings=embeddings, num_stream_layers=num_stream_layers, adapters=adapters, link=link)


def _link(path: Path, tensors: dict[str, Tensor], hidden_size: int) -> LinkWeights:
    """Take the link out of a file's tensors."""
    down, last, earlier, up = names.STREAM_LINK
    into = [_adapter(path, tensors, (name, up), hidden_size)[0] for name in (down, last, earlier)]
    return LinkWeights(into[0], into[1], into[2], tensors[up])


def adapter_layers(folder: Path, num_layers: int) -> frozenset[int]:
    """Layers that `exit_adapters.safetensors` beside a target of `num_layers` layers has an adapter for.

    Raises:
        ExportError: the file is unreadable or of another format.
    """
    path = folder / names.EXIT_ADAPTERS_FILE
    if not path.is_file():
        return frozenset()
    tensors = _read_tensors(path, names.EXIT_ADAPTERS_FORMAT)[1]
    return frozenset(layer for layer in range(num_layers) if names.adapter_down(layer) in tensors)


def load_adapter(folder: Path, layer: int, hidden_size: int) -> tuple[Tensor, Tensor] | None:
    """Read the exit adapter after `layer` layers: (down `[rank, H]`, up `[H, rank]`), None where there is none.

    Raises:
        ExportError: unreadable, of another format, or not made for this target.
    """
    path = folder / names.EXIT_ADAPTERS_FILE
    if not path.is_file():
        return None
    tensors = _read_tensors(path, names.EXIT_ADAPTERS_FORMAT)[1]
    pair = (names.adapter_down(layer), names.adapter_up(layer))
    return None if tensors.keys().isdisjoint(pair) else _adapter(path, tensors, pair, hidden_size)


def _adapter(path: Path, tensors: dict[str, Tensor], pair: tuple[str, str], hidden_size: int) -> tuple[Tensor, Tensor]:
    """Take two matrices `[rank, hidden_size]` and `[hidden_size, rank]` out of a file's tensors."""
    down, up = (tensors.get(name, torch.empty(0)) for name in pair)
    if down.ndim != 2 or down.shape[1] != hidden_size or up.shape != (hidden_size, down.shape[0]):
        raise ExportError(
            f"{path}: {pair[0]!r} and {pair[1]!r} have shapes {tuple(down.shape)} and {tuple(up.shape)}; "
            f"expected (rank, {hidden_size}) and ({hidden_size}, rank)"
        )
    return down, up


def _read_tensors(path: Path, *formats: str) -> tuple[dict[str, str], dict[str, Tensor]]:
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name).float() for name in file.keys()}  # noqa: SIM118 - not a dict
    except SafetensorError as error:
        raise ExportError(f"{path} cannot be read: {error}") from error
    if metadata.get("format") not in formats:
        readable = " and ".join(map(repr, formats))
        raise ExportError(f"{path} has format {metadata.get('format')!r}; this mirrorsd reads {readable}")
    return metadata, tensors
