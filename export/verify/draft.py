"""Parity of the draft: its IR, run by OpenVINO, against a dense PyTorch forward that knows no cache and no tips.

Owns: the dense reference with streams, the passes (chunks, then a tree), the comparison.
Does not own: tolerances (`tolerances.py`), the exported pass (`stages/draft.py`).
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import openvino as ov
import openvino._pyopenvino as openvino_state
import torch
from torch import Tensor
from torch.nn.functional import linear

from mirrorsd.device_maps.card import TargetPlacement
from mirrorsd.devices.onnxruntime.device import OnnxDevice
from mirrorsd.devices.onnxruntime.providers import ONNX_ERRORS
from mirrorsd.devices.onnxruntime.stage import OnnxStage
from mirrorsd.devices.openvino.core import new_core
from mirrorsd.export.checkpoints.loading import Streams
from mirrorsd.export.checkpoints.weightless import WeightlessModel
from mirrorsd.export.verify.comparison import Comparison, divergences
from mirrorsd.families.registry import parts_of
from mirrorsd.families.stream_adapter import adapt_streams
from mirrorsd.families.stream_link import SHORTLIST, LinkWeights, log_mass
from mirrorsd.graphs import names
from mirrorsd.graphs.contract import MASKED, DraftShape
from mirrorsd.graphs.errors import ExportError, errors_of, raised_as
from mirrorsd.graphs.manifest import VerifyResult

Array = npt.NDArray[Any]

OPENVINO_ERRORS = errors_of(openvino_state)
LookUp = Callable[[Sequence[int]], Array]
"""Rows `[N, H]` of a token embedding, by ids `[N]`."""
CHUNK = 32
CHAIN = -1


def look_up_in(model: WeightlessModel, ids: Iterable[int]) -> LookUp:
    """Read the rows of `ids` out of the model's embedding, for looking them up without it."""
    table, known = parts_of(model.network).embed.table, np.unique(np.fromiter(ids, np.int64))
    with model.loaded(table):
        rows: Array = table.weight[torch.from_numpy(known)].float().numpy()
    return lambda asked: rows[np.searchsorted(known, np.asarray(asked, np.int64))]


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


class DenseDraft(NamedTuple):
    """What a draft says at every row `T`, from one forward over all rows.

    Attributes:
        logprobs: `[T, 1+s, V]` of the rows and their streams, no stream knowing what another chose.
        ids: `[T]` the rows' tokens.
        rows: `[T, s, H]` the streams behind the final norm.
        logits: `[T, s, V]` the head's, before `scale`.
        head: `[V', H]`.
        scale: What the model does to its logits.
        link: What tells streams of tokens chosen before; or None.
    """

    logprobs: Array
    ids: Array
    rows: Tensor
    logits: Tensor
    head: Tensor
    scale: Callable[[Tensor], Tensor]
    link: LinkWeights | None

    def along(self, where: Array, found: Array) -> Array:
        """Log-probabilities `[R, 1+s, V]` at rows `where [R]`, given the first of the ids `found [R, 1+s, m]`.

        Where there is a link, what is neither found nor on a stream's shortlist has -1e9.
        """
        expected: Array = self.logprobs[where]
        if self.link is None:
            return expected
        expected, chosen = expected.copy(), torch.from_numpy(found[:, :, 0])
        earlier = torch.from_numpy(self.ids[where]).clamp(max=len(self.head) - 1)
        for stream in range(self.rows.shape[1]):
            last, bare = chosen[:, stream], self.logits[where, stream]
            inner = linear(self.rows[where, stream], self.link.down)
            residual = self.link.residual(inner, self.head[last], self.head[earlier])
            linked = self.scale(bare + residual @ self.head[: bare.shape[1]].T)
            short = bare.topk(min(max(SHORTLIST, found.shape[2]), bare.shape[1])).indices
            kept = (linked.gather(1, short), self.scale(bare).gather(1, short))
            logprobs = linked - log_mass(*kept, self.scale(bare))
            is_asked = torch.zeros_like(bare, dtype=torch.bool)
            is_asked.scatter_(1, torch.cat((short, torch.from_numpy(found[:, 1 + stream])), dim=1), value=True)
            expected[:, 1 + stream] = torch.where(is_asked, logprobs, -1e9).numpy()
            earlier = last
        return expected


def dense_draft(
    model: WeightlessModel, streams: Streams | None, ids: Array, positions: Array, sees: Array, vocab_size: int
) -> DenseDraft:
    """Run every row and its streams in one forward.

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
        hidden = parts.norm(_adapted(hidden, len(ids), streams, len(parts.layers) - first_stream_layer))[0]
        logits = parts.lm_head(hidden)[:, :vocab_size]
        head = torch.empty(0)
        if streams is not None and streams.link is not None:
            with model.loaded(parts.lm_head):
                head = parts.lm_head.weight.clone()
    logprobs = torch.log_softmax(parts.logit_scale(logits), dim=-1)
    main, ahead = logprobs[: len(ids), None], logprobs[len(ids) :].reshape(len(ids), num_streams, vocab_size)
    link = None if streams is None or streams.link is None else LinkWeights(*(m.to(head.dtype) for m in streams.link))
    return DenseDraft(
        logprobs=torch.cat((main, ahead), dim=1).numpy(),
        ids=ids,
        rows=hidden[len(ids) :].reshape(len(ids), num_streams, hidden.shape[-1]),
        logits=logits[len(ids) :].reshape(len(ids), num_streams, vocab_size),
        head=head,
        scale=parts.logit_scale,
        link=link,
    )


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
    """The exported draft on the CPU, its caches on the host: an IR in OpenVINO in float32, an ONNX file as it is run.

    `look_up` gives the rows of its target's embedding, where it has none of its own. The draft is compiled when it is
    first asked for: until then it takes no memory.
    """

    source: Path | ov.Model
    shape: DraftShape
    capacity: int
    look_up: LookUp | None = None
    caches: dict[str, Array] = field(init=False)
    _request: ov.InferRequest | None = field(default=None, init=False)
    _stage: OnnxStage | None = field(default=None, init=False)
    _found: dict[str, Array] = field(default_factory=dict, init=False)

    def infer(self, feeds: dict[str, Array]) -> dict[str, Array]:
        """Run a pass with all of its inputs; return its outputs by name, which the next pass may write over.

        Raises:
            ExportError, DeviceError: the runtime does not take the draft, or failed.
        """
        if isinstance(self.source, Path) and self.source.suffix == ".onnx":
            return self._in_onnxruntime(self.source, feeds)
        with raised_as(ExportError, "OpenVINO cannot run the draft, just exported", OPENVINO_ERRORS):
            if self._request is None:
                exact = {"INFERENCE_PRECISION_HINT": "f32", "DYNAMIC_QUANTIZATION_GROUP_SIZE": "0"}
                exact["INFERENCE_NUM_THREADS"] = str(torch.get_num_threads())
                self._request = new_core().compile_model(self.source, "CPU", exact).create_infer_request()
            self._request.infer(feeds)
        request = self._request
        self._found = {port.any_name: request.get_tensor(port.any_name).data for port in request.model_outputs}
        return self._found

    def _in_onnxruntime(self, file: Path, feeds: dict[str, Array]) -> dict[str, Array]:
        if self._stage is None:
            self._stage = OnnxDevice(TargetPlacement(threads=torch.get_num_threads())).open(file, "float32")
        session = self._stage.session
        with raised_as(ExportError, "ONNX Runtime failed while running the draft, just exported", ONNX_ERRORS):
            found = session.run(None, feeds)
        self._found = {port.name: array for port, array in zip(session.get_outputs(), found, strict=True)}
        return self._found

    def __post_init__(self) -> None:
        size = (1, self.shape.num_kv_heads, self.capacity, self.shape.head_dim)
        layers = range(self.shape.num_layers)
        self.caches = {
            name(layer): np.zeros(size, np.float32) for layer in layers for name in (names.past_key, names.past_value)
        }

    def forward(self, tree: Tree, num_cached: int, tips: Array) -> tuple[Array, Array]:
        """Run one pass behind `num_cached` cached rows; return ids and log-probs `[R, 1+s, m]` at `tips`."""
        found = self.infer(self.feeds(tree, num_cached, tips))
        return found[names.DRAFT_TIP_IDS].copy(), found[names.DRAFT_TIP_LOGPROBS].copy()

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
        if self.look_up is not None:
            feeds[names.DRAFT_TOKEN_ROWS] = self.look_up(tree.ids)[None]
        if self.shape.num_noise_rows:
            feeds[names.DRAFT_NOISE] = np.zeros((self.shape.num_noise_rows, self.shape.vocab_size), np.float32)
            feeds[names.DRAFT_NOISE_ROWS] = np.zeros((len(tips), 1 + self.shape.num_streams), np.int64)
        return {**feeds, **self.caches}

    def keep(self, num_rows: int, num_cached: int) -> None:
        """Write the first `num_rows` new keys and values behind `num_cached` rows."""
        for layer in range(self.shape.num_layers):
            for past, new in ((names.past_key, names.new_key), (names.past_value, names.new_value)):
                rows = self._found[new(layer)][:, :, :num_rows]
                self.caches[past(layer)][:, :, num_cached : num_cached + num_rows] = rows


def compare_draft(
    run: DraftRun, model: WeightlessModel, streams: Streams | None, ids: list[int], text: str
) -> VerifyResult:
    """Compare chunks over all of `ids` and one tree behind them with the dense reference.

    Errors are over the log-probabilities that the pass returns; they are held against the spread of the main row's.

    Raises:
        ExportError: the reference gives log-probabilities that are no numbers.
    """
    tree = Tree(tuple(ids[: len(VERIFY_TREE_PARENTS)]), VERIFY_TREE_PARENTS)
    sees, all_ids = _joined_sees(len(ids), tree), np.array([*ids, *tree.ids])
    positions = np.concatenate((np.arange(len(ids)), len(ids) + tree.depths()))
    dense = dense_draft(model, streams, all_ids, positions, sees, run.shape.vocab_size)
    if not np.isfinite(dense.logprobs).all():
        raise ExportError(
            "the draft gives log-probabilities that are no numbers in PyTorch too: download its weights again"
        )
    comparison = Comparison("draft")
    for start in range(0, len(ids), CHUNK):
        chunk = tuple(ids[start : start + CHUNK])
        chain = Tree(chunk, tuple(range(-1, len(chunk) - 1)))
        found = run.forward(chain, start, np.arange(len(chunk)))
        run.keep(len(chunk), start)
        _compare(comparison, found, dense, np.arange(start, start + len(chunk)))
    tips = np.array([len(tree.ids) - 1, 2, 4])
    _compare(comparison, run.forward(tree, len(ids), tips), dense, len(ids) + tips)
    return replace(comparison.result(text), positions=len(ids) + len(tips))


def _compare(comparison: Comparison, found: tuple[Array, Array], dense: DenseDraft, where: Array) -> None:
    """Compare what a pass returned, ids and log-probabilities `[R, 1+s, m]`, with the rows `where [R]`."""
    ids, logprobs = found
    all_expected = dense.along(where, ids)
    expected = np.take_along_axis(all_expected, ids, -1)
    spread = dense.logprobs[where, 0].std(axis=-1)
    comparison.add(logprobs, expected, spread[:, None])
    comparison.add_choices(ids[..., 0] == all_expected.argmax(-1), divergences(logprobs, expected))


def _joined_sees(num_ids: int, tree: Tree) -> Array:
    """Causal text of `num_ids` rows, and the tree's rows that all see it."""
    num_rows = len(tree.ids)
    sees = np.tril(np.ones((num_ids + num_rows, num_ids + num_rows), np.bool_))
    sees[num_ids:, num_ids:] = tree.sees()
    return sees
