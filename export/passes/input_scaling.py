"""How the inputs of integer products are scaled before they are rounded: measured on a text, one product at a time.

A few channels of a model's hidden states are far larger than all others, and one scale for a row would leave the others
few levels. Dividing each channel by a factor that the weights are multiplied with moves some of that into the weights
(SmoothQuant, arXiv 2211.10438). Which share of it is best differs by product, so each share is tried. Where the large
channels are others in every row, rotating them into their neighbours helps instead (`rotation.py`), and takes nodes.

Owns: the factors, and whether one range may stand for all rows. Does not own: where they are divided out
(`integer_products.py`), collecting the inputs (`aware_quantisation.py`).
"""

from collections.abc import Collection

import numpy as np
import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from mirrorsd.export.checkpoints.weightless import WeightlessModel
from mirrorsd.export.passes.aware_quantisation import ProductInputs
from mirrorsd.export.weights.block_formats import InputScaling
from mirrorsd.export.weights.block_quantisation import TOP_LEVEL
from mirrorsd.export.weights.rotation import has_parts, rotate

_SHARES = (0.0, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8)
_MOST_ROWS, _MOST_OUTPUTS = 256, 512
"""What an error is measured on: more changes no choice, and takes longer."""
_LEAST_SPREAD = 1e-5
"""Of the largest channel, what a channel counts as at least: one that is never used must not get all levels."""
_DEARER = 1.25
"""The error of one range for all rows over that of a range a row, up to which the two nodes that it takes are taken."""
_MOST_ERROR = 5e-4
"""Of a product's mean square, the error beyond which its weights keep blocks: SmolLM2-135M's best tokens are then the
float model's at 95.9 % of chats instead of 95.2 %, nearly all that its down projections lose by row."""
_WORTH_A_NODE = 0.8
"""The error with factors over that without, from which on a node is spent on them where no norm takes them in."""


def scale_inputs(
    model: WeightlessModel, inputs: ProductInputs, in_blocks: Collection[str] = (), *, may_rotate: bool = False
) -> tuple[dict[str, InputScaling], bool]:
    """Choose the scaling of every product whose inputs are known, by the name of its weight.

    Weights of one input get one and the same scaling. Those that would lose too much by row are left out, and those
    that are `in_blocks` in any case. A layer's inputs are rotated where `may_rotate` and that is needed and enough: one
    product left in blocks of more than 64 would have all rows computed in pairs. The LM head is not left out: whether
    it loses too much is told beside them.
    """
    groups = [names for names in inputs.groups if names[0] not in in_blocks]
    groups += [(inputs.head,)] if inputs.head is not None else []
    modules = _modules_by_name(model)
    scalings: dict[str, InputScaling] = {}
    is_head_coarse = False
    for names in groups:
        rows = torch.from_numpy(np.load(inputs.files[names[0]])).float()
        weights = [_by_output(model, modules[name]) for name in names]
        weight = weights[0] if len(weights) == 1 else torch.cat(weights)
        is_head = names == (inputs.head,)
        chosen, error = scaling_of(rows, weight, is_normed=inputs.normed.issuperset(names), is_head=is_head)
        if error > _MOST_ERROR and may_rotate and not is_head and has_parts(rows.shape[1]):
            chosen, error = scaling_of(rows, weight, is_normed=False, is_rotated=True)
        is_head_coarse |= is_head and error > _MOST_ERROR
        if is_head or error <= _MOST_ERROR:
            scalings |= dict.fromkeys(names, chosen)
    return scalings, is_head_coarse


def scaling_of(
    rows: Tensor, weight: Tensor, *, is_normed: bool, is_head: bool = False, is_rotated: bool = False
) -> tuple[InputScaling, float]:
    """The scaling of inputs `rows` `[n, K]` of a `weight` `[N, K]` that leaves the least error, and that.

    What is chosen is what the ranges of every second row do to the others. The error is that of the product's mean
    square. Behind a norm factors need no node, and one range may stand for all rows: what a norm gives has one size.
    Where they are `is_rotated`, rows and weight are rotated behind the factors.
    """
    half, spread, columns = _spread(rows[::2]), _spread(rows), _spread(weight)
    some = rows[1 :: max(2, len(rows) // _MOST_ROWS)]
    few = weight[:: max(1, len(weight) // _MOST_OUTPUTS)]
    exact = some @ few.T

    def size(products: Tensor) -> float:
        apart = products - products.mean(1, keepdim=True) if is_head else products
        return float((apart**2).mean())

    def error(factors: Tensor, largest: float | None = None) -> float:
        given, scaled = some / factors, few * factors
        if is_rotated:
            given, scaled = (torch.from_numpy(rotate(one.numpy())) for one in (given, scaled))
        return size(_products(given, scaled, largest) - exact) / max(size(exact), 1e-30)

    found = [_factors(half, columns, share) for share in _SHARES]
    errors = [error(factors) for factors in found]
    best = min(range(len(found)), key=errors.__getitem__)
    if not is_normed and errors[best] > _WORTH_A_NODE * errors[0]:
        best = 0
    is_alike = is_normed and error(found[best], float((half / found[best]).max())) <= _DEARER * errors[best]
    factors = _factors(spread, columns, _SHARES[best])
    largest = float((spread / factors).max()) if is_alike else None
    return InputScaling(factors.numpy() if best else None, largest, is_rotated), errors[best]


def _factors(spread: Tensor, columns: Tensor, share: float) -> Tensor:
    if not share:
        return torch.ones_like(spread)
    factors = spread**share / columns ** (1 - share)
    scaled: Tensor = factors / factors.log().mean().exp()
    return scaled


def _spread(matrix: Tensor) -> Tensor:
    sizes = _largest(matrix, 0)
    return sizes.clamp(min=max(float(sizes.max()) * _LEAST_SPREAD, 1e-30))


def _products(rows: Tensor, weight: Tensor, largest: float | None) -> Tensor:
    of_rows = _largest(rows, 1)[:, None].clamp(min=1e-30) if largest is None else torch.tensor(largest)
    of_weight = _largest(weight, 1)[:, None].clamp(min=1e-30)
    return _rounded(rows, of_rows) @ _rounded(weight, of_weight).T


def _largest(matrix: Tensor, dim: int) -> Tensor:
    """The largest magnitude along `dim`, in a fifth of the time of `matrix.abs().amax(dim)`."""
    return torch.maximum(matrix.amax(dim), -matrix.amin(dim))


def _rounded(matrix: Tensor, size: Tensor) -> Tensor:
    unit = size / TOP_LEVEL
    return (matrix / unit).round_().clamp_(-TOP_LEVEL - 1, TOP_LEVEL).mul_(unit)


def _modules_by_name(model: WeightlessModel) -> dict[str, nn.Module]:
    products = (module for module in model.network.modules() if isinstance(module, nn.Linear | Conv1D))
    return {model.stored[id(module.weight)].name: module for module in products}


def _by_output(model: WeightlessModel, module: nn.Module) -> Tensor:
    weight = model.stored[id(module.weight)].read(torch.float32)
    return weight.T if isinstance(module, Conv1D) else weight
