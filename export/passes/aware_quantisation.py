"""Rounding that looks at what the weights are multiplied with: GPTQ by nncf, one matrix at a time.

Owns: collecting the inputs of the layers' products on the calibration text, and nncf's calls. Does not own: the packed
form (`block_quantisation.py`), which weights are packed (`quantise_pass.py`).
"""

import contextlib
import hashlib
import importlib
import importlib.util
import io
import logging
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import openvino as ov
import torch
from openvino import opset13
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from mirrorsd.export.checkpoints.weightless import WeightlessModel
from mirrorsd.export.passes.quantise import round_to_nearest
from mirrorsd.export.weights.block_formats import BlockFormat
from mirrorsd.export.weights.block_quantisation import pack_levels, quantise_rows
from mirrorsd.export.weights.lazy_weight import Pack, first_name
from mirrorsd.graphs.errors import ConfigError

Array = npt.NDArray[Any]

_ROWS_PER_SAMPLE = 32


@dataclass(frozen=True, slots=True)
class ProductInputs:
    """Files of float16 rows `[n, K]` by the name of the weight that they were multiplied with."""

    files: dict[str, Path]

    def choose_pack(self, key: str, chosen: BlockFormat) -> tuple[str, Pack]:
        """GPTQ for the weights whose inputs are known, rounding to nearest for others and for 8 bits.

        Joined weights ("q below k below v") have one input, so the first one's name is enough.
        """
        name = first_name(key)
        if chosen.bits != 4 or name not in self.files:
            return round_to_nearest(key, chosen)
        return f"gptq {chosen.recipe}", partial(_pack_from_file, path=self.files[name], chosen=chosen)


def collect_inputs(model: WeightlessModel, windows: Array, folder: Path) -> ProductInputs:
    """Run the float32 `model` over `windows` `[W, L]` and write what each of its layers' products is given.

    Several products of one input (queries, keys, values) share one file under `folder`.
    """
    inputs = ProductInputs({})
    latest: list[tuple[Tensor, Path]] = []

    def note(module: nn.Module, given: tuple[Tensor, ...], name: str) -> None:
        source = given[0]
        if not latest or latest[0][0] is not source:
            path = folder / f"{len(inputs.files)}.npy"
            np.save(path, source.flatten(0, -2).numpy().astype(np.float16))
            latest[:] = [(source, path)]
        inputs.files[name] = latest[0][1]

    network = model.network
    network.set_attn_implementation("eager")
    products = [module for module in network.modules() if isinstance(module, nn.Linear | Conv1D)]
    products.remove(network.get_output_embeddings())
    names_by_module = {module: model.stored[id(module.weight)].name for module in products}
    hooks = [module.register_forward_pre_hook(partial(note, name=name)) for module, name in names_by_module.items()]
    try:
        with torch.no_grad(), model.on_demand():
            network(torch.from_numpy(windows), use_cache=False, logits_to_keep=1)
    finally:
        for hook in hooks:
            hook.remove()
    return inputs


def check_available() -> None:
    """Refuse GPTQ before any work where nncf is missing.

    Raises:
        ConfigError: nncf is not installed.
    """
    if importlib.util.find_spec("nncf") is None:
        raise ConfigError("rounding 'gptq' needs nncf: pip install 'mirrorsd[compress]', or choose 'nearest'")


def _pack_from_file(rows: Array, path: Path, chosen: BlockFormat) -> tuple[Array, ...]:
    """Round once what is asked for twice: for the graphs, and for the reference that they are compared with."""
    if not rows.any():
        return quantise_rows(rows, chosen)
    kept = path.with_name(f"{path.stem}-{chosen.recipe}-{hashlib.sha256(rows.tobytes()).hexdigest()}.npz")
    if kept.is_file():
        with np.load(kept) as known:
            return tuple(known[name] for name in known.files)
    packed = gptq_rows(rows, np.load(path).astype(np.float32), chosen)
    half_written = kept.with_suffix(".part")
    with half_written.open("wb") as stream:
        np.savez(stream, *packed)
    half_written.replace(kept)
    return packed


def gptq_rows(rows: Array, inputs: Array, chosen: BlockFormat) -> tuple[Array, ...]:
    """Round `rows` `[n, K]` to 4 bits so that their products with `inputs` `[m, K]` change least.

    GPTQ (arXiv 2210.17323) rounds column after column and lets the later ones make up for the error so far.

    Returns:
        As `quantise_rows`.
    """
    padding = ((0, 0), (0, -rows.shape[1] % chosen.block_size))
    rows, inputs = np.pad(rows, padding), np.pad(inputs, padding)
    given = opset13.parameter([1, -1, rows.shape[1]], np.float32)
    product = opset13.matmul(given, opset13.constant(np.ascontiguousarray(rows, np.float32)), False, True)
    samples = [inputs[None, start : start + _ROWS_PER_SAMPLE] for start in range(0, len(inputs), _ROWS_PER_SAMPLE)]
    return _read_constants(_compress(ov.Model([product], [given]), samples, chosen), len(rows), chosen)


def _compress(model: ov.Model, samples: list[Array], chosen: BlockFormat) -> ov.Model:
    """Let nncf do it; its tables and bars are kept off the terminal."""
    nncf = importlib.import_module("nncf")
    mode = nncf.CompressWeightsMode.INT4_SYM if chosen.is_symmetric else nncf.CompressWeightsMode.INT4_ASYM
    logger = logging.getLogger("nncf")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            return nncf.compress_weights(
                model,
                mode=mode,
                ratio=1.0,
                group_size=chosen.block_size,
                all_layers=True,
                dataset=nncf.Dataset(samples),
                subset_size=len(samples),
                gptq=True,
            )
    finally:
        logger.setLevel(level)


def _read_constants(model: ov.Model, num_rows: int, chosen: BlockFormat) -> tuple[Array, ...]:
    """Levels, scales and zero points from the constants that nncf left; signed levels -8..7 become 0..15."""
    found: dict[str, Array] = {}
    for node in model.get_ordered_ops():
        if node.get_type_name() != "Constant":
            continue
        kind, shape = node.get_element_type(), tuple(node.shape)
        if kind in (ov.Type.i4, ov.Type.u4):
            packed = node.data.view(np.uint8).reshape(-1)
            numbers = np.stack((packed & 15, packed >> 4), axis=-1).reshape(-1)[: int(np.prod(shape))]
            levels = numbers.reshape(num_rows, -1, shape[-1])
            found["zero points" if shape[-1] == 1 else "levels"] = levels ^ 8 if kind == ov.Type.i4 else levels
        elif kind in (ov.Type.f16, ov.Type.f32):
            found["scales"] = node.data.astype(np.float32)
    zero_points = None if chosen.is_symmetric else found["zero points"].reshape(num_rows, -1)
    return pack_levels(found["levels"], found["scales"].reshape(num_rows, -1), zero_points, chosen.bits)
