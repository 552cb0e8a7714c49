"""Rounding that looks at what the weights are multiplied with: GPTQ, one matrix at a time.

Owns: collecting the inputs of the layers' products on the calibration text, and rounding by them. Does not own: the
packed form (`block_quantisation.py`), which weights are packed (`quantise.py`).

nncf has GPTQ too, with scales from a block's smallest and largest weight. Over nine products of SmolLM2-135M it leaves
1.4 times the error that is left here, in five to ten times the time.
"""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from mirrorsd.export.checkpoints.weightless import WeightlessModel
from mirrorsd.export.passes.quantise import round_to_nearest
from mirrorsd.export.weights.block_formats import BlockFormat
from mirrorsd.export.weights.block_quantisation import pack_levels, quantise_rows
from mirrorsd.export.weights.lazy_weight import Pack, first_name
from mirrorsd.families.narrow_products import multiplies_bfloat16
from mirrorsd.graphs.atomic_folder import check_space

Array = npt.NDArray[Any]

_LARGEST = float(np.finfo(np.float16).max)
_DAMPING = 0.01
"""Of the mean square of the inputs, what is added to each: the paper's."""
_TOP_LEVEL, _MIDDLE_LEVEL = 15, 8
_SHRUNK = tuple(0.8 + 0.02 * step for step in range(14))
"""Shares of the scale that just holds a block's largest weights: smaller scales cut these, and round the rest finer."""
_LEAST_SCALE = 1e-9
_HELD = 1e-6
"""How strongly scales that the inputs say nothing about stay what they were, beside those that they do."""
_REFITTED_NUMBERS = 1 << 25
"""Of the products that scales are fitted by, how many are held at a time: 128 MB."""


@dataclass(frozen=True, slots=True)
class ProductInputs:
    """Files of float16 rows `[n, K]` by the name of the weight that they were multiplied with.

    `head` is the LM head's name where it is among them. `normed` are the names whose rows come straight from a norm.
    `moments` are those of the file that was rounded by last: a matrix is rounded some rows at a time.
    """

    files: dict[str, Path]
    head: str | None = None
    normed: set[str] = field(default_factory=set)
    moments: dict[Path, "_Moments"] = field(default_factory=dict)

    @property
    def groups(self) -> list[tuple[str, ...]]:
        """Names of the layers' weights that have one input, in the order of the layers."""
        names_by_file: dict[Path, list[str]] = {}
        for name, path in self.files.items():
            if name != self.head:
                names_by_file.setdefault(path, []).append(name)
        return [tuple(names) for names in names_by_file.values()]

    def choose_pack(self, key: str, chosen: BlockFormat) -> tuple[str, Pack]:
        """GPTQ for the weights whose inputs are known, rounding to nearest for others and for 8 bits.

        Joined weights ("q below k below v") have one input, so the first one's name is enough.
        """
        name = first_name(key)
        if chosen.bits != 4 or name not in self.files:
            return round_to_nearest(key, chosen)
        return f"gptq {chosen.recipe}", partial(self._pack, path=self.files[name], chosen=chosen)

    def _pack(self, rows: Array, path: Path, chosen: BlockFormat) -> tuple[Array, ...]:
        """Round once what is asked for twice: for the graphs, and for the reference that they are compared with."""
        if not rows.any():
            return quantise_rows(rows, chosen)
        kept = path.with_name(f"{path.stem}-{chosen.recipe}-{hashlib.sha256(rows.tobytes()).hexdigest()}.npz")
        if kept.is_file():
            self.moments.clear()
            with np.load(kept) as known:
                return tuple(known[name] for name in known.files)
        if path not in self.moments:
            self.moments.clear()
            self.moments[path] = _moments(np.load(path), chosen)
        packed = _round_by(rows, self.moments[path], chosen)
        half_written = kept.with_suffix(".part")
        with half_written.open("wb") as stream:
            np.savez(stream, *packed)
        half_written.replace(kept)
        return packed


def collect_inputs(model: WeightlessModel, windows: Array, folder: Path, *, with_head: bool = False) -> ProductInputs:
    """Run the float32 `model` over `windows` `[W, L]` and write what each of its layers' products is given.

    Several products of one input (queries, keys, values) share one file under `folder`. `with_head` adds the LM head.
    Sizes are wanted, not bits: products are made in bfloat16 where this processor has them.
    """
    network = model.network
    head = network.get_output_embeddings()
    inputs = ProductInputs({}, model.stored[id(head.weight)].name if with_head else None)
    latest: list[tuple[Tensor, Path]] = []
    from_norm: list[Tensor] = []

    def note_last(module: nn.Module, given: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        if inputs.head is not None:
            note(module, given, inputs.head)
        return (given[0][:, -1:],)  # nobody wants the logits

    def note(module: nn.Module, given: tuple[Tensor, ...], name: str) -> None:
        source = given[0]
        if not latest or latest[0][0] is not source:
            path = folder / f"{len(inputs.files)}.npy"
            rows = source.flatten(0, -2).clamp(-_LARGEST, _LARGEST).half().numpy()
            check_space(folder.parent, rows.nbytes)  # numpy does not say why an array was written in part
            np.save(path, rows)
            latest[:] = [(source, path)]
        inputs.files[name] = latest[0][1]
        if any(source is normed for normed in from_norm):
            inputs.normed.add(name)

    def note_norm(module: nn.Module, given: Any, found: Tensor) -> None:
        from_norm[:] = [found]

    network.set_attn_implementation("eager")
    products = [module for module in network.modules() if isinstance(module, nn.Linear | Conv1D)]
    products.remove(head)
    names_by_module = {module: model.stored[id(module.weight)].name for module in products}
    hooks = [module.register_forward_pre_hook(partial(note, name=name)) for module, name in names_by_module.items()]
    norms = [module for module in network.modules() if type(module).__name__.endswith("Norm")]
    hooks += [module.register_forward_hook(note_norm) for module in norms]
    hooks.append(head.register_forward_pre_hook(note_last))
    try:
        is_narrow = multiplies_bfloat16()
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=is_narrow), model.on_demand():
            network(torch.from_numpy(windows), use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    return inputs


class _Grid(NamedTuple):
    """What the levels 0..15 of each block `[n, 1]` stand for: `(level - zero point) * scale`."""

    scales: Tensor
    zero_points: Tensor

    def levels(self, weights: Tensor) -> Tensor:
        """The nearest levels of `weights` `[n, k]`."""
        return (weights / self.scales + self.zero_points).round().clamp(0, _TOP_LEVEL)

    def restored(self, levels: Tensor) -> Tensor:
        """What `levels` stand for."""
        return (levels - self.zero_points) * self.scales


def gptq_rows(rows: Array, inputs: Array, chosen: BlockFormat) -> tuple[Array, ...]:
    """Round `rows` `[n, K]` to 4 bits so that their products with `inputs` `[m, K]` change least.

    GPTQ (arXiv 2210.17323) rounds column after column and lets the later ones make up for the error so far. Each
    block's scale and zero point are searched for, with the squares of the inputs as weights. Once the levels are known,
    the scales are fitted to them by least squares, all of a row together.

    Returns:
        As `quantise_rows`.
    """
    return _round_by(rows, _moments(inputs, chosen), chosen)


class _Moments(NamedTuple):
    """Of inputs `[m, K]`: their products with each other, and the inverse's upper Cholesky factor, `[K, K]` both."""

    squares: Tensor
    inverse: Tensor


def _moments(inputs: Array, chosen: BlockFormat) -> _Moments:
    given = _padded(inputs, chosen)
    squares = given.T @ given
    mean = squares.diagonal().mean()
    squares.diagonal().add_(_DAMPING * mean if mean > 0 else 1.0)
    factor = torch.linalg.cholesky(torch.cholesky_inverse(torch.linalg.cholesky(squares)), upper=True)
    return _Moments(squares, factor)


def _round_by(rows: Array, moments: _Moments, chosen: BlockFormat) -> tuple[Array, ...]:
    weights = _padded(rows, chosen)
    levels, grids = _round_columns(weights, moments.inverse, chosen)
    scales, zero_points = (torch.cat(parts, dim=1) for parts in zip(*grids, strict=True))
    fitted = _fit_scales(weights, moments.squares, levels - zero_points[..., None], scales)
    zeros = None if chosen.is_symmetric else zero_points.numpy()
    return pack_levels(levels.numpy(), fitted.numpy(), zeros, chosen.bits)


def _padded(matrix: Array, chosen: BlockFormat) -> Tensor:
    """A matrix `[n, K]` in float32, its rows filled up to whole blocks."""
    return torch.from_numpy(np.pad(matrix, ((0, 0), (0, -matrix.shape[1] % chosen.block_size))).astype(np.float32))


def _round_columns(weights: Tensor, inverse: Tensor, chosen: BlockFormat) -> tuple[Tensor, list[_Grid]]:
    """Levels `[n, B, block_size]` and the grids of the blocks, in order."""
    size, left = chosen.block_size, weights.clone()
    levels, grids = torch.empty_like(weights), []
    for start in range(0, weights.shape[1], size):
        block, here = left[:, start : start + size], inverse[start : start + size, start : start + size]
        grid = _search_grid(block, here.diagonal() ** -2, is_symmetric=chosen.is_symmetric)
        errors = torch.empty_like(block)
        for column in range(size):
            weight = block[:, column : column + 1]
            level = grid.levels(weight)
            errors[:, column : column + 1] = (weight - grid.restored(level)) / here[column, column]
            block[:, column + 1 :] -= errors[:, column : column + 1] * here[column, column + 1 :]
            levels[:, start + column] = level[:, 0]
        left[:, start + size :] -= errors @ inverse[start : start + size, start + size :]
        grids.append(grid)
    return levels.reshape(len(weights), -1, size), grids


def _search_grid(block: Tensor, importance: Tensor, *, is_symmetric: bool) -> _Grid:
    """The grid of `block` `[n, k]` that has the least square error, weighted by `importance` `[k]`."""
    best, least = None, None
    for grid in _symmetric_grids(block) if is_symmetric else _shifted_grids(block):
        error = ((grid.restored(grid.levels(block)) - block) ** 2 * importance).sum(1, keepdim=True)
        if best is None or least is None:
            best, least = grid, error
            continue
        is_better = error < least
        least = torch.where(is_better, error, least)
        best = _Grid(*(torch.where(is_better, new, old) for new, old in zip(grid, best, strict=True)))
    assert best is not None  # there is more than one share
    return best


def _shifted_grids(block: Tensor) -> Iterator[_Grid]:
    low, high = block.amin(1, keepdim=True).clamp(max=0), block.amax(1, keepdim=True).clamp(min=0)
    whole = ((high - low) / _TOP_LEVEL).clamp(min=_LEAST_SCALE)
    zero_point = (-low / whole).round()
    for share in _SHRUNK:
        for shift in (-1, 0, 1):
            yield _Grid(whole * share, (zero_point + shift).clamp(0, _TOP_LEVEL))


def _symmetric_grids(block: Tensor) -> Iterator[_Grid]:
    """There is a level more below the middle one, so a negative scale may be better."""
    whole = (block.abs().amax(1, keepdim=True) / _MIDDLE_LEVEL).clamp(min=_LEAST_SCALE)
    for share in _SHRUNK:
        for sign in (1, -1):
            yield _Grid(whole * share * sign, torch.full_like(whole, _MIDDLE_LEVEL))


def _fit_scales(weights: Tensor, squares: Tensor, steps: Tensor, scales: Tensor) -> Tensor:
    """Scales `[n, B]` with which `steps` `[n, B, k]` change the products with the inputs least; about `scales`.

    Of a row they solve `G s = r`: G holds the products of what each block's steps make of the inputs, r those with what
    the row's weights make of them.
    """
    num_blocks, size = steps.shape[1:]
    by_block = squares.reshape(num_blocks, size, -1)
    fitted = torch.empty_like(scales)
    some = max(1, _REFITTED_NUMBERS // (num_blocks * len(squares)))
    for start in range(0, len(weights), some):
        rows = slice(start, start + some)
        made = torch.einsum("nbi,bij->nbj", steps[rows], by_block)
        products = (made.reshape(*made.shape[:2], num_blocks, size) * steps[rows, None]).sum(-1)
        wanted = (made * weights[rows, None]).sum(-1)
        held = _HELD * products.diagonal(dim1=1, dim2=2).mean(1) + _LEAST_SCALE
        products.diagonal(dim1=1, dim2=2).add_(held[:, None])
        fitted[rows] = torch.linalg.solve(products, wanted + held[:, None] * scales[rows])
    return fitted
