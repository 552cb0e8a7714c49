"""A checkpoint's weights as the exported stages hold them: rounded to their stored form, as floats again.

Owns: which module's weights have which form, and undoing it. A model that is lent these differs from the stages by
arithmetic alone, at every precision. Does not own: the forms (`block_formats.py`), rounding (`block_quantisation.py`).
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from mirrorsd.export.checkpoints.weightless import WeightlessModel
from mirrorsd.export.passes.quantise import ChoosePack, pack_as, round_to_nearest, scaled_columns
from mirrorsd.export.stages.target import rescored
from mirrorsd.export.weights.block_formats import BlockChoice, BlockFormat, WeightFormats
from mirrorsd.export.weights.block_quantisation import restore_rows
from mirrorsd.export.weights.lazy_weight import Pack, stored_weight
from mirrorsd.export.weights.rotation import rotate
from mirrorsd.export.weights.stored_tensors import StoredTensor
from mirrorsd.families.registry import parts_of

Array = npt.NDArray[Any]


def as_stored(
    model: WeightlessModel, formats: WeightFormats, dtype: torch.dtype, choose_pack: ChoosePack = round_to_nearest
) -> WeightlessModel:
    """Return `model`, opened in float32, with all weights and rotary angles lent in the numbers of the stages.

    Args:
        model: Used up: its rotary positions are rounded from now on.
        formats: Of the layers' products, the head and the embedding. Where they have a scan, the head rescores.
        dtype: Of everything else.
        choose_pack: Rounds the layers' weights, as it did for the stages.
    """
    rotary = parts_of(model.network).rotary
    if rotary is not None and dtype != torch.float32:
        rotary.register_forward_hook(lambda module, given, angles: tuple(_rounded(table, dtype) for table in angles))
    network = model.network
    reading = _Reading(network=network, formats=formats, dtype=dtype, choose_pack=choose_pack)
    if formats.scan is not None:
        embedding, head = network.get_input_embeddings(), network.get_output_embeddings()
        stored = model.stored[id(head.weight)]

        def rescore(module: nn.Module, given: tuple[Tensor, ...], logits: Tensor) -> Tensor:
            return rescored(logits, given[0], reading(embedding, stored, logits.dtype), formats.num_rescored)

        head.register_forward_hook(rescore)
    return replace(model, read=reading)


def stored_matrix(matrix: Tensor, chosen: BlockChoice | None, dtype: torch.dtype) -> Tensor:
    """A matrix `[N, K]` that is multiplied with rows of `K`, in the numbers of the stages."""
    if chosen is None:
        return _rounded(matrix, dtype)
    rows = _rounded(matrix, dtype).numpy()
    form = chosen.for_width(rows.shape[1])
    _, pack = round_to_nearest("", form)
    return torch.from_numpy(_restored([rows], rows.shape, form, pack, dtype))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Reading:
    """Reads a module's tensor in its stored form."""

    network: Any
    formats: WeightFormats
    dtype: torch.dtype
    choose_pack: ChoosePack

    def __call__(self, module: nn.Module, stored: StoredTensor, dtype: torch.dtype) -> Tensor:
        """Read `stored`, a parameter of `module`, as `dtype`."""
        chosen = self._choice(module, stored.name) if len(stored.shape) == 2 else None
        carried = self.formats.carried
        if chosen is None or (carried is not None and carried.form(stored.name) is not None):
            return stored.read(self.dtype).to(dtype)
        source = stored_weight(stored, self.dtype)
        by_output = source.transposed() if isinstance(module, Conv1D) else source
        shape = tuple(int(size) for size in by_output.shape.numpy())
        form = chosen.for_width(shape[1])
        _, pack = self.choose_pack(stored.name, form)
        scaling = self.formats.inputs.get(stored.name) if form.is_by_row else None
        if scaling is not None:
            by_output = scaled_columns(by_output, scaling)
        restored = _restored(by_output.chunks(), shape, form, pack, self.dtype)
        rows = torch.from_numpy(rotate(restored) if scaling is not None and scaling.is_rotated else restored)
        if scaling is not None and scaling.factors is not None:
            rows /= torch.from_numpy(scaling.factors)
        return (rows.T.contiguous() if isinstance(module, Conv1D) else rows).to(dtype)

    def _choice(self, module: nn.Module, name: str) -> BlockChoice | None:
        if module is self.network.get_input_embeddings():
            return self.formats.embedding
        if module is self.network.get_output_embeddings():
            return self.formats.of_head
        return self.formats.of_layer(name) if isinstance(module, nn.Linear | Conv1D) else None


def _restored(
    chunks: Iterable[Array], shape: tuple[int, ...], form: BlockFormat, pack: Pack, dtype: torch.dtype
) -> Array:
    compute = np.dtype(np.float16 if dtype == torch.float16 else np.float32)
    whole, start = np.empty(shape, np.float32), 0
    for rows in chunks:
        levels, scales, *zero_points = pack_as(pack, compute, rows)
        kept = torch.from_numpy(scales.astype(np.float32)).to(dtype).float().numpy()  # as the graph has them
        restored = restore_rows((levels, kept, *zero_points), shape[1], form.bits)
        whole[start : start + len(restored)] = restored
        start += len(restored)
    return whole


def _rounded(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return tensor.to(dtype).float()
