"""Parity of heads: the exported stage in ONNX Runtime, in float32, against the head in PyTorch with explicit caches.

Owns: the schedule of runs (a prompt in one run, single rows, windows with rollback), the comparison. Does not own:
tolerances (`tolerances.py`), the hidden states of the target (`target.py`).
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import onnxruntime as ort
import torch
from torch import Tensor, nn

from mirrorsd.export.checkpoints.checkpoint import Checkpoint
from mirrorsd.export.checkpoints.head import HeadCheckpoint
from mirrorsd.export.checkpoints.weightless import WeightlessModel, open_model
from mirrorsd.export.verify.comparison import Comparison
from mirrorsd.export.verify.rounded_weights import as_stored, stored_matrix
from mirrorsd.export.verify.target import ONNX_ERRORS, TargetReference, TargetRun
from mirrorsd.export.verify.text_passes import Pass, plan_passes
from mirrorsd.export.weights.block_formats import BlockChoice, WeightFormats
from mirrorsd.families.heads import HeadChain, HeadNetwork
from mirrorsd.families.heads.config import LM_HEAD
from mirrorsd.families.heads.lending import lenders
from mirrorsd.families.heads.vocabulary import Vocabulary
from mirrorsd.families.stream_link import SHORTLIST
from mirrorsd.graphs import names
from mirrorsd.graphs.errors import ExportError, raised_as
from mirrorsd.graphs.manifest import VerifyResult

Array = npt.NDArray[Any]
_NOISE_SEED = 5


def compare_heads(
    run: TargetRun, target: Checkpoint, reference: TargetReference, text: str
) -> tuple[VerifyResult, ...]:
    """Run every head of the plan over the reference's hidden states, and compare each guess with PyTorch's."""
    plan = run.plan
    if not plan.heads:
        return ()
    dtype: torch.dtype = getattr(torch, plan.shape.dtype)
    model = as_stored(open_model(target), replace(plan.formats, scan=None), dtype, plan.choose_pack)
    results = []
    for head in plan.heads:
        rows = _looked_up(head, model, plan.formats, dtype)
        with model.loaded(lenders(model.network, head.config)):
            network = head.network(model.network, torch.float32)
            network.lm_head.table = partial(_itself, rows)  # type: ignore[method-assign]
            round_as_stored(network, plan.formats, dtype)
            steps = tuple(plan_passes(reference.ids, len(reference.ids)))  # a head guesses once a pass
            results.append(_compare(HeadRun(run, head), HeadTwin(head, network), reference, steps).result(text))
    return tuple(results)


def round_as_stored(network: HeadNetwork, formats: WeightFormats, dtype: torch.dtype) -> None:
    """Round what a head owns as its stage holds it: products like the LM head, tables like the embedding.

    Where the LM head's rows are scaled, that holds for heads of its height alone; others keep blocks. A head that a
    Markov link adds to is cut for its product, which is one of floats.
    """
    borrowed = set(network.config.borrowed)
    vocab_size = network.config.vocab_size
    for name, parameter in network.named_parameters():
        if name in borrowed:
            continue
        owner = network.get_submodule(name.rpartition(".")[0])
        is_table = isinstance(owner, nn.Embedding) and parameter.shape[0] == vocab_size
        is_product = isinstance(owner, nn.Linear | nn.Embedding | Vocabulary)
        is_head = isinstance(owner, Vocabulary)
        as_head = formats if is_head and parameter.shape[-2] == vocab_size else formats.in_blocks
        is_cut = is_head and network.config.link == "markov"
        chosen = as_head.head if is_product and not is_cut else None
        if is_table:
            chosen = _of_table(parameter, formats)
        parameter.data = _stored(parameter.data, chosen, dtype)


def _itself(rows: Tensor) -> Tensor:
    return rows


def _looked_up(head: HeadCheckpoint, model: WeightlessModel, formats: WeightFormats, dtype: torch.dtype) -> Tensor:
    """The rows of a head over the vocabulary, its own or the target's, as a link's stage looks them up."""
    if head.config.link == "none":
        return torch.empty(0)  # nobody does
    own = head.tensors.get(LM_HEAD)
    if own is None:
        network = model.network
        stored = model.stored[id(network.get_output_embeddings().weight)]
        return model.read(network.get_input_embeddings(), stored, torch.float32)
    is_whole = own.shape[0] == head.config.vocab_size
    return _stored(own.float(), _of_table(own, formats) if is_whole else None, dtype)


def _of_table(table: Tensor, formats: WeightFormats) -> BlockChoice | None:
    """The form of a table `[V, w]`: the embedding's, where its rows are whole blocks."""
    chosen = formats.embedding
    return chosen if chosen is not None and chosen.has_whole_blocks(table.shape[1]) else None


def _stored(weight: Tensor, chosen: BlockChoice | None, dtype: torch.dtype) -> Tensor:
    if weight.ndim == 3:
        return torch.stack([_stored(part, chosen, dtype) for part in weight])
    return stored_matrix(weight, chosen if weight.ndim == 2 else None, dtype)


class HeadTwin:
    """A head in PyTorch, with caches that are put together here.

    It names all its tokens; one with a link, all of the shortlist that the link looks at.
    """

    def __init__(self, head: HeadCheckpoint, network: HeadNetwork) -> None:
        config = head.config
        count = config.num_logits if config.link == "none" else min(SHORTLIST, config.num_logits)
        self._chain = HeadChain(network, num_candidates=count)
        layers, heads, width = head.config.cache_shape
        self._caches = [torch.zeros(1, heads, 1, width) for _ in range(2 * layers)]
        self._map = network.lm_head.map

    def logprobs(self, features: Array, tokens: Array, start: int, noise: Array) -> tuple[Array, Array]:
        """Run rows `[R, F]` and their tokens `[R]`; its guesses `[K, n]`, best first."""
        given = torch.from_numpy(noise)
        given = given if self._map is None else given.index_select(1, self._map)
        with torch.no_grad():
            ids, logprobs, *new = self._chain(
                torch.from_numpy(features)[None],
                torch.from_numpy(tokens)[None],
                torch.tensor([start]),
                torch.tensor([len(tokens) - 1]),
                given,
                *self._caches,
            )
        pairs = zip(self._caches, new, strict=True)
        self._caches = [torch.cat((cache[:, :, :start], rows), dim=2) for cache, rows in pairs]
        return ids.numpy(), logprobs.numpy()


@dataclass(slots=True)
class HeadRun:
    """The exported head in ONNX Runtime on the CPU, with share-buffer caches."""

    run: TargetRun
    head: HeadCheckpoint
    _session: ort.InferenceSession = field(init=False)
    _caches: dict[str, ort.OrtValue] = field(init=False)

    def __post_init__(self) -> None:
        shape = self.head.shape
        self._session = self.run.open(names.stage_file(self.head.name))
        size = (1, shape.num_kv_heads, self.run.plan.capacity, shape.head_dim)
        kind = next((spec.type for spec in self._session.get_inputs() if spec.name.startswith("past_")), "")
        dtype = np.float16 if "float16" in kind else np.float32
        self._caches = {
            name(layer): ort.OrtValue.ortvalue_from_numpy(np.zeros(size, dtype))
            for layer in range(shape.num_layers)
            for name in (names.past_key, names.past_value)
        }

    def guess(self, taps: dict[int, Array], tokens: Array, start: int, noise: Array) -> tuple[Array, Array]:
        """Run rows `[S, H]` by tap, the first `R` of which have `tokens [R]`; ids and log-probabilities `[K, m]`."""
        binding = self._session.io_binding()
        given = {
            names.HEAD_TOKENS: tokens[None],
            names.HEAD_START: np.array([start], np.int64),
            names.HEAD_NOISE: noise,
            **{names.tap(layer): rows[None] for layer, rows in taps.items()},
        }
        for spec in self._session.get_inputs():
            if spec.name in given:
                rows = given[spec.name]
                binding.bind_cpu_input(spec.name, rows.astype(np.float16) if "float16" in spec.type else rows)
        for name in (names.HEAD_IDS, names.HEAD_LOGPROBS):
            binding.bind_output(name)
        for layer in range(self.head.shape.num_layers):
            for past, present in ((names.past_key, names.present_key), (names.past_value, names.present_value)):
                binding.bind_ortvalue_input(past(layer), self._caches[past(layer)])
                binding.bind_ortvalue_output(present(layer), self._caches[past(layer)])
        with raised_as(ExportError, f"ONNX Runtime failed while running {self.head.name}, just exported", ONNX_ERRORS):
            self._session.run_with_iobinding(binding)
            ids, logprobs = (value.numpy() for value in binding.get_outputs()[:2])
        return ids, logprobs


def _compare(run: HeadRun, twin: HeadTwin, reference: TargetReference, steps: tuple[Pass, ...]) -> Comparison:
    """Compare guess by guess; of a chain, nothing behind its first different guess, which those behind it follow."""
    comparison = Comparison(run.head.name)
    random = np.random.default_rng(_NOISE_SEED)
    size = (run.head.shape.length, run.run.plan.shape.vocab_size)
    for number, (step, tokens) in enumerate(_with_following(reference.ids, steps)):
        noise = random.gumbel(size=size).astype(np.float32) if number % 2 else np.zeros(size, np.float32)
        rows = slice(step.start, step.start + len(tokens))
        padded = {layer: _padded(reference.taps[layer][rows], len(step.ids)) for layer in run.head.shape.taps}
        features = np.concatenate([reference.taps[layer][rows] for layer in run.head.shape.taps], axis=-1)
        found = run.guess(padded, tokens, step.start, noise)
        expected = twin.logprobs(features, tokens, step.start, noise)
        _compare_chain(comparison, found, expected)
    return comparison


def _compare_chain(comparison: Comparison, found: tuple[Array, Array], expected: tuple[Array, Array]) -> None:
    for ids, logprobs, all_ids, all_logprobs in zip(*found, *expected, strict=True):
        wanted = dict(zip(all_ids.tolist(), all_logprobs.tolist(), strict=True))
        named = [place for place, token in enumerate(ids.tolist()) if token in wanted]  # a shortlist's end is rounding
        if named:
            true = np.array([[wanted[ids[place]] for place in named]])
            comparison.add(logprobs[None, named], true, np.array([all_logprobs.std()]))
        is_equal = bool(ids[0] == all_ids[0])
        comparison.add_choices(np.array([is_equal]), np.zeros(1))
        if not is_equal:
            return


def _with_following(ids: tuple[int, ...], steps: tuple[Pass, ...]) -> Iterator[tuple[Pass, Array]]:
    """Each pass with the tokens that follow its kept rows; the text's last row has none."""
    for step in steps:
        following = ids[step.start + 1 : step.start + step.num_kept + 1]
        if following:
            yield step, np.array(following, np.int64)


def _padded(rows: Array, num_rows: int) -> Array:
    """Hidden states of a pass that had more rows than were kept."""
    return np.concatenate((rows, np.ones((max(num_rows - len(rows), 0), rows.shape[1]), rows.dtype)))
