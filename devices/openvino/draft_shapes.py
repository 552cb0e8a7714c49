"""The draft's static shapes on OpenVINO, and how it is compiled on each device.

Owns, besides, what OpenVINO raises (`OPENVINO_ERRORS`), and what to do about it.
"""

import errno
import os
from pathlib import Path
from typing import Any

import numpy as np
import openvino as ov
import openvino._pyopenvino as openvino_state
from numpy.typing import NDArray
from openvino.preprocess import PrePostProcessor

from mirrorsd.device_maps import DraftPlacement
from mirrorsd.graphs import names
from mirrorsd.graphs.errors import errors_of
from mirrorsd.graphs.manifest import DraftEntry

_PRECISIONS = ("f32", "bf16", "f16")
MOST_STATIC_BYTES = 384 << 20
"""Weights times shapes above which a processor runs one model for all shapes."""
_SMALL_BYTES = 4096
"""What is smaller than any weight worth sharing: indices, scales of norms, numbers of a shape."""
_MOST_ROWS_ON_TWO_TILES = 24
_IN_THE_FILE = "WeightlessCacheAttribute"
OPENVINO_ERRORS = errors_of(openvino_state)
"""Everything that OpenVINO raises; the classes of its own derive from `Exception` alone."""
_NO_MEMORY = ("alloc", os.strerror(errno.EAGAIN))
"""How its messages say that memory, or a thread for want of it, was refused: there is no class for that."""


def said_of(path: Path, error: Exception, advice: str) -> str:
    """What OpenVINO says of a bundle's file, in a line, and what to do: `advice`, unless something else is wrong."""
    words = " ".join(str(error).split()).rstrip(".")
    if not path.is_file():
        advice = (
            f"{path} is not there: leave a bundle where it is while it is loaded, or copy or export the bundle again."
        )
    elif any(reason in words for reason in _NO_MEMORY):
        advice = (
            "There is too little memory: close other programs, or export with a smaller --context (`mirrorsd doctor "
            "BUNDLE` counts)."
        )
    return f"{words}. {advice}".rstrip()


def static_shapes(entry: DraftEntry, rows: int, tips: int, capacity: int) -> dict[str, list[int]]:
    """Shape of every input once `N`, `R` and `C` are numbers."""
    shapes: dict[str, list[int]] = {
        names.DRAFT_IDS: [1, rows],
        names.DRAFT_POSITIONS: [1, rows],
        names.DRAFT_MASK: [1, 1, rows, capacity + rows],
        names.DRAFT_TIP_ROWS: [tips],
    }
    if entry.shape.row_width:
        shapes[names.DRAFT_TOKEN_ROWS] = [1, rows, entry.shape.row_width]
    if entry.shape.num_noise_rows:
        shapes[names.DRAFT_NOISE] = [entry.shape.num_noise_rows, entry.shape.vocab_size]
        shapes[names.DRAFT_NOISE_ROWS] = [tips, 1 + entry.shape.num_streams]
    for layer in range(entry.shape.num_layers):
        for name in (names.past_key(layer), names.past_value(layer)):
            shapes[name] = [1, entry.shape.num_kv_heads, capacity, entry.shape.head_dim]
    return shapes


def cache_type(core: ov.Core, entry: DraftEntry, placement: DraftPlacement) -> ov.Type:
    """What keys and values are kept in: bf16 where a processor computes in it, f16 where an NPU does.

    The processor would convert the whole cache at every pass; what comes out of a pass was rounded to bf16 already, so
    that keeping it so loses nothing.
    """
    own = ov.Type(np.dtype(entry.shape.dtype))
    if placement.device == "NPU" and placement.precision in ("auto", "f16"):
        return ov.Type.f16
    if placement.device != "CPU" or placement.emulated or placement.precision not in ("auto", "bf16"):
        return own
    if placement.precision == "auto":
        is_bf16 = core.get_property("CPU", "INFERENCE_PRECISION_HINT") == ov.Type.bf16
    else:
        is_bf16 = "BF16" in core.get_property("CPU", "OPTIMIZATION_CAPABILITIES")
    return ov.Type.bf16 if is_bf16 else own


def with_cache_of(model: ov.Model, entry: DraftEntry, kind: ov.Type) -> ov.Model:
    """The draft's graph with past and new keys and values of another type; `model` is used up."""
    ports = PrePostProcessor(model)
    for layer in range(entry.shape.num_layers):
        for past, new in ((names.past_key, names.new_key), (names.past_value, names.new_value)):
            ports.input(past(layer)).tensor().set_element_type(kind)
            ports.output(new(layer)).tensor().set_element_type(kind)
    return ports.build()


def is_shared(entry: DraftEntry, placement: DraftPlacement, weight_bytes: int) -> bool:
    """Whether one compiled model serves all shapes."""
    num_shapes = len(entry.buckets) * len(entry.capacities)
    return placement.device == "CPU" and weight_bytes * num_shapes > MOST_STATIC_BYTES


def device_options(placement: DraftPlacement) -> tuple[str, dict[str, Any]]:
    """Device name and properties for `compile_model` and `import_model`."""
    if placement.emulated:
        interconnect = "NO" if placement.precision == "f32" else "YES"
        # One part: cut into several, drafts with int4 or mixed weights come out wrong (OpenVINO 2026.4).
        parts = {"NPUW_ONLINE_PIPELINE": "NONE", "NPUW_F16IC": interconnect}
        return "NPU", {"NPU_USE_NPUW": "YES", "NPUW_DEVICES": "CPU", **parts}
    options: dict[str, Any] = {"PERFORMANCE_HINT": "LATENCY", "NUM_STREAMS": 1}
    if placement.precision in _PRECISIONS:
        options["INFERENCE_PRECISION_HINT"] = placement.precision
    if placement.device == "CPU":
        options["INFERENCE_NUM_THREADS"] = placement.threads
        options["ENABLE_CPU_PINNING"] = False
        options["DYNAMIC_QUANTIZATION_GROUP_SIZE"] = placement.activation_group
    return placement.device, options


def tile_options(model: ov.Model) -> dict[str, str]:
    """How many tiles of an NPU a static graph is spread over: few rows are sooner computed than handed to all tiles.

    With 8 rows the compiler's estimate for platform 4000 is 386 us on two tiles and 541 on its four, with 24 rows 600
    and 677, with 32 rows 1278 and 1037 (the storyteller's draft).
    """
    new_rows = [port.get_shape()[2] for port in model.outputs if names.is_new(str(port.get_any_name()))]
    return {"NPU_TILES": "2"} if max(new_rows, default=1) <= _MOST_ROWS_ON_TWO_TILES else {}


def weightless_options(placement: DraftPlacement, weights: Path) -> dict[str, Any]:
    """Properties with which a processor's blobs name the bundle's `weights` instead of repeating them.

    Such a blob of fp32 weights is a thirtieth of the whole one, and what several shapes read is in memory once.
    """
    if placement.device != "CPU":
        return {}
    return {"CACHE_MODE": "OPTIMIZE_SIZE", "WEIGHTS_PATH": str(weights)}


def keep_small_constants(model: ov.Model) -> None:
    """Have small constants written into blobs that have no weights.

    Numbers of a shape, once folded, are still taken for those of the file: read back, they are wrong (OpenVINO 2026.4).
    """
    for node in model.get_ops():
        if node.get_type_name() == "Constant" and node.get_byte_size() < _SMALL_BYTES:
            attributes = node.get_rt_info()
            for name in [name for name in attributes.keys() if name.startswith(_IN_THE_FILE)]:  # noqa: SIM118
                del attributes[name]


def host_options(placement: DraftPlacement) -> dict[str, Any]:
    """Properties of the CPU device under an emulated NPU: without them it computes in bf16 wherever it can."""
    if not placement.emulated:
        return {}
    precision = "bf16" if placement.precision == "bf16" else "f32"
    options: dict[str, Any] = {"INFERENCE_PRECISION_HINT": precision, "INFERENCE_NUM_THREADS": placement.threads}
    # As on the CPU itself: activations are not rounded to eight bits under int8 weights.
    return options | {"DYNAMIC_QUANTIZATION_GROUP_SIZE": 0}


def numpy_type(kind: ov.Type) -> np.dtype[Any]:
    """What numbers of `kind` are kept in: numpy has no bf16."""
    return np.dtype(np.float16 if kind == ov.Type.bf16 else kind.to_dtype())


def tensor_on(array: NDArray[Any], kind: ov.Type) -> ov.Tensor:
    """A tensor on the array's own memory."""
    return ov.Tensor(array, ov.Shape(array.shape), kind)
