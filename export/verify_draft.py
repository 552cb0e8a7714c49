"""Parity of the draft: its IR, run by OpenVINO, against a dense PyTorch forward that knows no cache and no tips.

Owns: the dense reference with streams, the passes (chunks, then a tree), the comparison.
Does not own: tolerances (`tolerances.py`), the exported pass (`draft_stage.py`).
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import openvino as ov
import torch
from torch import Tensor

from mirrorsd.families.registry import parts_of
from mirrorsd.families.stream_adapter import adapt_streams
from mirrorsd.graphs import names
from mirrorsd.graphs.contract import MASKED, DraftShape
from mirrorsd.graphs.manifest import VerifyResult

from .loading import Streams
from .weightless import WeightlessModel

Array = npt.NDArray[Any]

CHUNK = 32
CHAIN = -1


class Tree(NamedTuple):
    """Rows of one pass behind a committed text: each row's token and its parent row (-1: the text's end)."""

    ids: tuple[int, ...]
    parents: tuple[int, ...]

    def sees(self) -> Array:
        """Who sees whom, `[N, N]` bool: every row sees itself and its ancestors.

        >>> Tree((5, 6, 7), (-1, 0, 0)).sees().astype(int).tolist()
        [[1, 0, 0], [1, 1, 0], [1, 0, 1]]
        """
        sees = np.eye(len(self.ids), dtype=np.bool_)
        for row, parent in enumerate(self.parents):
            if parent >= 0:
                sees[row] |= sees[parent]
        return sees

    def depths(self) -> Array:
        """Distance of each row from the text's end, `[N]`: the first row behind it has 0."""
        depths: Array = self.sees().sum(axis=1) - 1
        return depths


VERIFY_TREE_PARENTS = (CHAIN, 0, 1, 0, 3, CHAIN, 5, 5)


def dense_logprobs(
    model: WeightlessModel, streams: Streams | None, ids: Array, positions: Array, sees: Array, vocab_size: int
) -> Array:
    """Log-probabilities `[T, 1+s, V]` of every row and its streams, from one forward over all rows.

    Args:
        model: HF's causal LM in float32.
        streams: Stream embeddings, or None.
        ids: `[T]` tokens.
        positions: `[T]`.
        sees: `[T, T]` bool: row sees column.
        vocab_size: Ids from here on are left out.
    """
    model.network.set_attn_implementation("eager")
    parts = parts_of(model.network)
    num_streams = 0 if streams is None else streams.embeddings.shape[0]
    first_stream_layer = len(parts.layers) - (0 if streams is None else streams.num_stream_layers)
    with torch.no_grad(), model.loaded(parts.embed), model.on_demand():
        place, mask = torch.from_numpy(positions), _additive(sees)
        hidden = parts.embed(torch.from_numpy(ids)[None], place[None])
        for number, layer in enumerate(parts.layers):
            if streams is not None and number == first_stream_layer:
                entering = hidden[0, :, None] + streams.embeddings.to(hidden.dtype)
                hidden = torch.cat((hidden, entering.reshape(1, -1, hidden.shape[-1])), dim=1)
                ahead = place[:, None] + torch.arange(1, num_streams + 1)
                place, mask = torch.cat((place, ahead.reshape(-1))), _additive(_with_streams(sees, num_streams))
            hidden = _adapted(hidden, len(ids), streams, number - first_stream_layer)
            angles = parts.angles(hidden, place[None])[number]
            hidden = layer(hidden, attention_mask=mask, position_embeddings=angles, position_ids=place[None])
        hidden = _adapted(hidden, len(ids), streams, len(parts.layers) - first_stream_layer)
        logits = parts.logit_scale(parts.lm_head(parts.norm(hidden)))[0, :, :vocab_size]
        logprobs = torch.log_softmax(logits, dim=-1)
    main, ahead = logprobs[: len(ids), None], logprobs[len(ids) :].reshape(len(ids), num_streams, vocab_size)
    joined: Array = torch.cat((main, ahead), dim=1).numpy()
    return joined


def _adapted(hidden: Tensor, num_rows: int, streams: Streams | None, place: int) -> Tensor:
    """Pass the rows behind the main rows through the streams' adapter of this place."""
    if streams is None or not streams.adapters or place < 0:
        return hidden
    down, up = (half.to(hidden.dtype) for half in streams.adapters[place])
    return torch.cat((hidden[:, :num_rows], adapt_streams(hidden[:, num_rows:], down, up)), dim=1)


def _with_streams(sees: Array, num_streams: int) -> Array:
    """Widen `sees` by every row's streams: stream j sees what its row sees and streams 1..j of that row."""
    num_rows = len(sees)
    own = np.tril(np.ones((num_streams, num_streams), np.bool_))
    upper = np.concatenate((sees, np.zeros((num_rows, num_rows * num_streams), np.bool_)), axis=1)
    lower = np.concatenate(
        (np.repeat(sees, num_streams, axis=0), np.kron(np.eye(num_rows, dtype=np.bool_), own)), axis=1
    )
    return np.concatenate((upper, lower), axis=0)


def _additive(sees: Array) -> Tensor:
    return torch.where(torch.from_numpy(sees), 0.0, float("-inf"))[None, None]


@dataclass(slots=True)
class DraftRun:
    """The exported draft in OpenVINO on the CPU in float32, its caches on the host."""

    source: Path | ov.Model
    shape: DraftShape
    capacity: int
    request: ov.InferRequest = field(init=False)
    caches: dict[str, Array] = field(init=False)

    def __post_init__(self) -> None:
        exact = {"INFERENCE_PRECISION_HINT": "f32", "DYNAMIC_QUANTIZATION_GROUP_SIZE": "0"}
        self.request = ov.Core().compile_model(self.source, "CPU", exact).create_infer_request()
        size = (1, self.shape.num_kv_heads, self.capacity, self.shape.head_dim)
        layers = range(self.shape.num_layers)
        self.caches = {
            name(layer): np.zeros(size, np.float32) for layer in layers for name in (names.past_key, names.past_value)
        }

    def forward(self, tree: Tree, num_cached: int, tips: Array) -> tuple[Array, Array]:
        """Run one pass behind `num_cached` cached rows; return ids and log-probs `[R, 1+s, m]` at `tips`."""
        self.request.infer(self.feeds(tree, num_cached, tips))
        found = [self.request.get_tensor(name).data.copy() for name in (names.DRAFT_TIP_IDS, names.DRAFT_TIP_LOGPROBS)]
        return found[0], found[1]

    def feeds(self, tree: Tree, num_cached: int, tips: Array) -> dict[str, Array]:
        """All inputs of that pass, the caches among them."""
        num_rows = len(tree.ids)
        mask = np.full((1, 1, num_rows, self.capacity + num_rows), MASKED, np.float32)
        mask[..., :num_cached] = 0.0
        mask[0, 0, :, self.capacity :][tree.sees()] = 0.0
        feeds: dict[str, Array] = {
            names.DRAFT_IDS: np.array([tree.ids], np.int64),
            names.DRAFT_POSITIONS: (num_cached + tree.depths())[None].astype(np.int64),
            names.DRAFT_MASK: mask,
            names.DRAFT_TIP_ROWS: tips.astype(np.int64),
        }
        if self.shape.num_noise_rows:
            feeds[names.DRAFT_NOISE] = np.zeros((self.shape.num_noise_rows, self.shape.vocab_size), np.float32)
            feeds[names.DRAFT_NOISE_ROWS] = np.zeros((len(tips), 1 + self.shape.num_streams), np.int64)
        return {**feeds, **self.caches}

    def keep(self, num_rows: int, num_cached: int) -> None:
        """Write the first `num_rows` new keys and values behind `num_cached` rows."""
        for layer in range(self.shape.num_layers):
            for past, new in ((names.past_key, names.new_key), (names.past_value, names.new_value)):
                rows = self.request.get_tensor(new(layer)).data[:, :, :num_rows]
                self.caches[past(layer)][:, :, num_cached : num_cached + num_rows] = rows


def compare_draft(
    run: DraftRun, model: WeightlessModel, streams: Streams | None, ids: list[int], text: str
) -> VerifyResult:
    """Compare chunks over all of `ids` and one tree behind them with the dense reference.

    The largest error is over the log-probabilities that the pass returns.
    """
    tree = Tree(tuple(ids[: len(VERIFY_TREE_PARENTS)]), VERIFY_TREE_PARENTS)
    sees, all_ids = _joined_sees(len(ids), tree), np.array([*ids, *tree.ids])
    positions = np.concatenate((np.arange(len(ids)), len(ids) + tree.depths()))
    expected = dense_logprobs(model, streams, all_ids, positions, sees, run.shape.vocab_size)
    error, num_equal = 0.0, 0
    for start in range(0, len(ids), CHUNK):
        chunk = tuple(ids[start : start + CHUNK])
        chain = Tree(chunk, tuple(range(-1, len(chunk) - 1)))
        found = run.forward(chain, start, np.arange(len(chunk)))
        run.keep(len(chunk), start)
        chunk_error, chunk_equal = _differences(found, expected[start : start + len(chunk)])
        error, num_equal = max(error, chunk_error), num_equal + chunk_equal
    tips = np.array([len(tree.ids) - 1, 2, 4])
    tree_error, tree_equal = _differences(run.forward(tree, len(ids), tips), expected[len(ids) + tips])
    positions_compared = len(ids) + len(tips)
    return VerifyResult(
        stage="draft",
        max_abs_error=max(error, tree_error),
        top1_agreement=(num_equal + tree_equal) / (positions_compared * expected.shape[1]),
        positions=positions_compared,
        text=text,
    )


def _joined_sees(num_ids: int, tree: Tree) -> Array:
    """Causal text of `num_ids` rows, and the tree's rows that all see it."""
    num_rows = len(tree.ids)
    sees = np.tril(np.ones((num_ids + num_rows, num_ids + num_rows), np.bool_))
    sees[num_ids:, num_ids:] = tree.sees()
    return sees


def _differences(found: tuple[Array, Array], expected: Array) -> tuple[float, int]:
    ids, logprobs = found
    error = np.abs(logprobs - np.take_along_axis(expected, ids, -1)).max()
    return float(error), int((ids[..., 0] == expected.argmax(-1)).sum())
