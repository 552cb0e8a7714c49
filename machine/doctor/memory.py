"""How much memory a bundle will take on each device of a card, before it is loaded, and how much is free there.

An estimate from the manifest alone: weights, caches, workspace, and what the runtimes themselves take. The constants
were measured on Linux (ONNX Runtime 1.31, OpenVINO 2026.4) as resident memory; `test_memory_estimate` compares.
"""

from dataclasses import dataclass

import numpy as np

from mirrorsd.device_maps import DeviceMap
from mirrorsd.devices.cache_bytes import draft_cache_bytes, head_cache_bytes, target_cache_bytes
from mirrorsd.devices.containers import available_memory
from mirrorsd.devices.draft_passes import pass_buckets
from mirrorsd.devices.hardware import cuda_memory
from mirrorsd.devices.openvino.draft_shapes import is_shared
from mirrorsd.graphs.manifest import DraftEntry, Manifest, TargetEntry

SYSTEM = "system memory"
_MB = 1 << 20
# Python with numpy, ONNX Runtime and OpenVINO imported.
_LIBRARIES = 88 * _MB
# OpenVINO's plugin and its threads, at the first compilation.
_PLUGIN = 37 * _MB
# Nodes and kernels of one compiled draft shape, per byte of the graph's text (.xml): within 15 % of what four drafts
# took, of 2 and 3 layers, with and without streams and link, fp32 and int8.
_PER_GRAPH_BYTE = 48
# Copies of the logits of a pass: before and after noise, and sorted.
_LIVE_LOGITS = 3
# Kernels of a further shape where one model serves all.
_PER_SHARED_SHAPE = 2 * _MB
# ONNX Runtime's sessions beyond their weights.
_SESSIONS = 16 * _MB
_PREFILL_ROWS = 128
# Bits of a weight, its share of a scale included.
_INTEGER_BITS = {"int8": 8.25, "int4": 4.6}
# Rows of activations that a stage holds at once, per hidden element: normed input, Q, K, V, attention, MLP.
_LIVE_ROWS = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryNeed:
    """What one part needs where; bytes. `copies` are weights held again in a device's own layout or on disk maps."""

    part: str
    device: str
    weights: int
    copies: int
    caches: int
    workspace: int

    @property
    def total(self) -> int:
        """All of it."""
        return self.weights + self.copies + self.caches + self.workspace


def memory_needs(manifest: Manifest, card: DeviceMap) -> list[MemoryNeed]:
    """One entry for the runtimes, one for the target, one for the draft, at the full context."""
    libraries = MemoryNeed(
        part="runtimes", device=SYSTEM, weights=0, copies=0, caches=0, workspace=_LIBRARIES + _PLUGIN + _SESSIONS
    )
    return [libraries, _target_need(manifest, card), _draft_need(manifest, card)]


def free_memory(device: str) -> int | None:
    """Free bytes of system memory or of a GPU's own; None where nobody says."""
    if device == SYSTEM:
        return available_memory()
    if device.startswith("NVIDIA"):
        return cuda_memory(int(device.rsplit(" ", 1)[1]))
    return None


def _target_need(manifest: Manifest, card: DeviceMap) -> MemoryNeed:
    entry, placement = manifest.target, card.target
    weights = manifest.files[entry.weights_file].bytes
    device = SYSTEM
    if placement.provider == "CUDAExecutionProvider":
        device = f"NVIDIA GPU {placement.device_id}"
    elif not placement.is_on_cpu:
        device = placement.device if placement.runtime == "openvino" else placement.provider
    # OpenVINO keeps the mapped file beside the weights that it has laid out for the device.
    copies = weights if placement.runtime == "openvino" else 0
    if placement.runtime == "onnxruntime" and not placement.is_on_cpu:
        copies = len(entry.exits) * _head(entry)
    return MemoryNeed(
        part="target",
        device=device,
        weights=weights,
        copies=copies,
        caches=target_cache_bytes(entry) + head_cache_bytes(manifest),
        workspace=_work(entry),
    )


def _head(entry: TargetEntry) -> int:
    """Bytes of the LM head, which every exit uploads to a GPU again: ONNX Runtime's sessions share none of its memory.

    A tied embedding is uploaded once more than this counts: the manifest does not say which are.
    """
    storage, shape = entry.storage, entry.shape
    kind = None if storage is None else storage.head
    bits = _INTEGER_BITS.get(kind or "", 8.0 * shape.bytes_per_number)
    return round(shape.vocab_size * shape.hidden_size * bits / 8)


def _draft_need(manifest: Manifest, card: DeviceMap) -> MemoryNeed:
    entry = manifest.draft
    weights = manifest.files[entry.weights_file].bytes
    shares = entry.is_for_processors or is_shared(entry, card.draft, weights)
    buckets = pass_buckets(entry, card.draft, is_shared=shares)
    num_shapes = len(buckets) * len(entry.capacities)
    num_models = 1 if shares else num_shapes
    tips = sum(bucket.tips for bucket in buckets) * len(entry.capacities)
    kernels = manifest.files[entry.file].bytes * _PER_GRAPH_BYTE * num_models
    if shares:
        tips, kernels = max(bucket.tips for bucket in buckets), kernels + num_shapes * _PER_SHARED_SHAPE
    # Every model that OpenVINO compiles lays the weights out for itself, and computes on its mapped file.
    return MemoryNeed(
        part="draft",
        device=SYSTEM if card.draft.is_on_cpu else card.draft.device,
        weights=round(weights * _laid_out(entry, card)) * num_models,
        copies=0 if entry.is_for_processors else weights * num_models,
        caches=draft_cache_bytes(entry),
        workspace=kernels + tips * _logits(entry) * _LIVE_LOGITS,
    )


def _laid_out(entry: DraftEntry, card: DeviceMap) -> float:
    """Size of the weights as laid out over their size on disk: half where a device computes fp32 weights in 16 bits.

    `auto` counts as 16 bits; on a processor that has none of these the estimate is too low by as much again.
    """
    return 0.5 if entry.precision == "fp32" and card.draft.precision != "f32" else 1.0


def _logits(entry: DraftEntry) -> int:
    """Bytes of a tip's logits and of its streams'."""
    return (1 + entry.shape.num_streams) * entry.shape.vocab_size * np.dtype(np.float32).itemsize


def _work(entry: TargetEntry) -> int:
    return _PREFILL_ROWS * _LIVE_ROWS * entry.shape.hidden_size * entry.shape.bytes_per_number
