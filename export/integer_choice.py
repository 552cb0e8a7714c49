"""Whether a target's 8-bit products are of integers by row or of blocks: what is faster on this processor.

Owns: measuring a layer's products in both forms, and the formats that follow. Does not own: the nodes of either form
(`passes/`), the scaling of inputs (`passes/input_scaling.py`).
"""

import shutil
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from math import inf, prod
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
from numpy.typing import NDArray

from mirrorsd.devices.onnxruntime.providers import ask_for_exact_integers
from mirrorsd.export.checkpoints.weightless import open_model
from mirrorsd.export.pair_job import PairJob
from mirrorsd.export.passes.aware_quantisation import collect_inputs
from mirrorsd.export.passes.graph_edits import add_tensor
from mirrorsd.export.passes.input_scaling import scale_inputs
from mirrorsd.export.passes.quantise import QuantiseWeights
from mirrorsd.export.verify.quality import range_windows
from mirrorsd.export.weights.block_formats import BlockChoice, InputScaling, WeightFormats
from mirrorsd.export.weights.lazy_weight import LazyWeight
from mirrorsd.export.weights.rotation import has_parts

Times = NDArray[np.float64]
Chosen = Callable[[str, Callable[[], bool]], bool]
_TURNS, _LAYERS = 7, 2
_LARGE_LAYER = 1 << 24
"""Weights from which on a layer is timed alone: no processor's cache keeps it from one run to the next, and to make
another one takes longer than all runs (`mirrorsd export` of Qwen2.5-Coder-1.5B: it checks for 8 s instead of 13)."""
_ROWS = (1, 8, 64)
"""A plain step, a window of the usual length, and a part of a prompt; each counts alike."""
_LEAST_GAIN = 1.2
"""Of the speed of a layer's products, for which rows are rotated, as blocks keep more of the best tokens
(`bench/studies/weights/rotated_rows.py`, and `mirrorsd export` tells best tokens). On a Xeon with AMX, products of
Qwen2.5-Coder-1.5B gain 1.28, and those of SmolLM2-135M 1.17 to 1.21. On a processor with AVX2 alone 96.1 % of the
former's best tokens stay for 96.6 %, and 95.3 % of the latter's for 96.0 %."""


def with_integer_products(job: PairJob, folder: Path, chosen: Chosen) -> PairJob:
    """The same job, its target's layers and head in integers by row, scaled by what a text gives its products.

    Args:
        job: A pair whose products may have this form (`ExportOptions.may_have_integer_products`).
        folder: Where the products' inputs are kept meanwhile.
        chosen: Asks for a choice by the clock, by its name, where no earlier run has made it.
    """
    model = open_model(job.target)
    windows = range_windows(job.target, job.options.calibration_text, job.context)
    folder.mkdir(exist_ok=True)
    try:
        collected = collect_inputs(model, windows, folder, with_head=True)
        may_rotate = chosen("rotated rows", partial(_rotation_pays, job.target.config, job.formats))
        inputs, is_head_coarse = scale_inputs(model, collected, job.formats.finer, may_rotate=may_rotate)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    network = model.network
    head, embedding = network.get_output_embeddings(), network.get_input_embeddings()
    is_tied = head.weight is embedding.weight
    is_scan = is_head_coarse and is_tied and head.bias is None and job.options.head_precision == "auto"
    formats = by_row(job.formats, inputs, is_tied=is_tied, is_scan=is_scan)
    assert job.formats.layers is not None  # `may_have_integer_products`
    left = {name: job.formats.layers for name in collected.files if name not in inputs}
    return replace(job, formats=replace(formats, finer={**left, **job.formats.finer}))


def by_row(formats: WeightFormats, inputs: Mapping[str, Any], *, is_tied: bool, is_scan: bool = False) -> WeightFormats:
    """8-bit `formats` by row; an embedding that is the head's matrix has the head's numbers.

    Where the head `is_scan`, the embedding keeps its blocks, and a row's best logits are computed again with them.
    """
    embedding, head = formats.embedding, _by_row(formats.head)
    is_scan = is_scan and head is not None and head.is_by_row and embedding is not None and embedding.bits == 8
    if is_tied and not is_scan and formats.head is not None and formats.head.bits == 8:
        embedding = _by_row(embedding)
    scan = head if is_scan else None
    return replace(formats, layers=_by_row(formats.layers), head=head, embedding=embedding, scan=scan, inputs=inputs)


def _by_row(choice: BlockChoice | None) -> BlockChoice | None:
    return replace(choice, is_by_row=True) if choice is not None and choice.bits == 8 else choice


def integers_are_faster(config: Mapping[str, Any], formats: WeightFormats) -> bool:
    """Time a layer's products in both forms."""
    assert formats.layers is not None
    shapes, integers = _shapes(config), replace(formats.layers, is_by_row=True)
    of_blocks, of_integers = _seconds(_products(shapes, formats.layers), _products(shapes, integers))
    return _gain(of_blocks, of_integers) > 1


def _rotation_pays(config: Mapping[str, Any], formats: WeightFormats) -> bool:
    return gain_of_rotation(config, formats) >= _LEAST_GAIN


def gain_of_rotation(config: Mapping[str, Any], formats: WeightFormats) -> float:
    """How much faster a layer's products are where the last one's rows are rotated than where it is of blocks.

    0 where its width has no two parts to rotate.
    """
    assert formats.layers is not None
    (*others, last), integers = _shapes(config), replace(formats.layers, is_by_row=True)
    if not has_parts(last[0]):
        return 0.0
    sessions = [_products(others, integers), _products([last], formats.layers)]
    of_others, of_blocks, rotated = _seconds(*sessions, _products([last], integers, is_rotated=True))
    return _gain(of_others + of_blocks, of_others + rotated)


def _gain(before: Times, after: Times) -> float:
    return float(np.exp(np.log(before / after).mean()))


def _seconds(*sessions: ort.InferenceSession) -> list[Times]:
    """Run each with `_ROWS` on one core of this processor, by turns; an array for each, `[len(_ROWS)]`.

    What else runs here must not choose: what counts is the least of the time for which this thread itself has computed,
    but on Windows, where that is told too coarsely.
    """
    seconds_now = time.perf_counter if sys.platform == "win32" else time.thread_time  # which ticks in 16 ms there
    least = [dict.fromkeys(_ROWS, inf) for _ in sessions]
    for _ in range(_TURNS):
        for session, found in zip(sessions, least, strict=True):
            for rows in _ROWS:
                given = {i.name: np.ones((1, rows, int(i.shape[2])), np.float32) for i in session.get_inputs()}
                started = seconds_now()
                session.run(None, given)
                found[rows] = min(found[rows], seconds_now() - started)
    return [np.array([*found.values()]) for found in least]


def _products(
    shapes: Sequence[tuple[int, int]], choice: BlockChoice, *, is_rotated: bool = False
) -> ort.InferenceSession:
    """The products of some layers with random weights, each behind an input of its own."""
    graph = ir.Graph([], [], nodes=[], opset_imports={"": 21}, name="products")
    rng, inputs = np.random.default_rng(0), dict[str, InputScaling]()
    for layer in range(_LAYERS if sum(map(prod, shapes)) < _LARGE_LAYER else 1):
        for number, (width, num_rows) in enumerate(shapes):
            name = f"{layer}.{number}"
            rows = ir.Value(name=f"rows.{name}", shape=ir.Shape((1, "S", width)), type=ir.TensorType(ir.DataType.FLOAT))
            numbers = rng.standard_normal((width, num_rows), np.float32)
            weight = LazyWeight(f"weight.{name}", ir.DataType.FLOAT, numbers.shape, partial(iter, (numbers,)))
            inputs[weight.key] = InputScaling(None, is_rotated=is_rotated)
            product = ir.Node("", "MatMul", [rows, add_tensor(graph, weight.key, weight)], name=f"product.{name}")
            product.outputs[0].name, product.outputs[0].type = f"found.{name}", rows.type
            product.outputs[0].shape = ir.Shape((1, "S", num_rows))
            graph.inputs.append(rows)
            graph.append(product)
            graph.outputs.append(product.outputs[0])
    model = ir.Model(graph, ir_version=10)
    QuantiseWeights(WeightFormats(layers=choice, inputs=inputs), 0)(model)
    settings = ort.SessionOptions()
    settings.log_severity_level = 3
    settings.intra_op_num_threads = 1
    ask_for_exact_integers(settings)
    return ort.InferenceSession(ir.serde.serialize_model(model).SerializeToString(), settings, ["CPUExecutionProvider"])


def _shapes(config: Mapping[str, Any]) -> tuple[tuple[int, int], ...]:
    """Inputs and outputs of a layer's products, as far as a config says."""
    hidden = int(config["hidden_size"])
    heads = int(config["num_attention_heads"])
    size = int(config.get("head_dim") or hidden // heads)
    both = size * (heads + 2 * int(config.get("num_key_value_heads") or heads))
    wide = int(config.get("intermediate_size") or config.get("ffn_dim") or 4 * hidden)
    return ((hidden, both), (size * heads, hidden), (hidden, 2 * wide), (wide, hidden))
