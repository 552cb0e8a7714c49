"""Time per draft round over rows and context, against what the machine could do at best.

    python bench/studies/draft_rounds.py storyteller.mirror --output draft_rounds.json

The floor of a round is the larger of two times: the bytes it must read (weights in the precision computed in, and the
cache's keys and values) over the bandwidth of one thread, and its multiply-adds over the rate of the draft's threads,
both measured here: bandwidth by summing an array far larger than any cache, the rate by one large product in the same
precision. Of a draft that ONNX Runtime runs only the bytes count: its file's. `host_ms` is the part of a round that is
ours: filling inputs and reading results.
"""

import argparse
import json
import math
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np
import openvino as ov

from mirrorsd.cli.output.machine import describe_machine, installed_versions
from mirrorsd.device_maps import DraftPlacement, load_device_map
from mirrorsd.devices.draft_memory import RowBlock, SlotDraftModel
from mirrorsd.devices.layouts import choose_layout, thread_cores
from mirrorsd.devices.openvino.core import new_core
from mirrorsd.devices.slot_draft import SlotDraft
from mirrorsd.graphs.bundle_files import read_bundle
from mirrorsd.graphs.manifest import DraftBucket, DraftEntry
from mirrorsd.runtime.backends.openvino.draft import OpenVinoDraftModel
from mirrorsd.runtime.devices.workers import DeviceWorker
from mirrorsd.runtime.loading import open_draft

_WIDTH = {"f32": 4, "bf16": 2, "f16": 2}
_STORED = {"int8": 1.0, "int4": 0.5 + 2 / 128}
_STREAM_BYTES = 256 << 20
_PRODUCT = 3072


class Work(NamedTuple):
    """What a round cannot do without: bytes of weights, bytes of cache, floating-point operations."""

    weight_bytes: float
    cache_bytes: float
    operations: float


class Rates(NamedTuple):
    """What the machine does at best: bytes and floating-point operations per second."""

    bytes_per_second: float
    operations_per_second: float


def main() -> None:
    """Measure, print and write the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--device-map", default="cpu")
    parser.add_argument("--layout", help="one that the device map permits; its first by default")
    parser.add_argument("--rows", type=int, nargs="*", help="only buckets of these rows")
    parser.add_argument("--repeats", type=int, default=40)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    layout = choose_layout(load_device_map(options.device_map), options.layout)
    card, entry = layout.device_map, read_bundle(options.bundle).draft
    worker = DeviceWorker("draft", thread_cores(card.draft, in_onnxruntime=entry.is_for_processors))
    report: dict[str, Any] = {"bundle": options.bundle.name, "device_map": card.name, "layout": layout.name}
    report |= {"draft": card.draft.precision, "threads": card.draft.threads}
    report |= {"weights": entry.precision, "parameters": entry.source.num_parameters}
    report |= {"machine": describe_machine(), "versions": installed_versions()}
    buckets = [bucket for bucket in entry.buckets if not options.rows or bucket.rows in options.rows]
    report |= worker.run(lambda: measure(options.bundle, entry, card.draft, buckets, options.repeats))
    print(json.dumps(report, indent=2))
    if options.output:
        options.output.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


def measure(
    bundle: Path, entry: DraftEntry, placement: DraftPlacement, buckets: list[DraftBucket], repeats: int
) -> dict[str, Any]:
    """The machine's rates, and a row per bucket and capacity."""
    model = open_draft(bundle, entry, placement)
    precision, one_model = entry.precision, "not compiled"
    if isinstance(model, OpenVinoDraftModel):
        model.shapes.cache = None
        precision = compute_precision(model, buckets[0], min(entry.capacities))
        one_model = "one model for all shapes" if model.shapes.is_shared else "one model per shape"
    rates = Rates(bandwidth(), product_rate(placement, precision) if precision in _WIDTH else math.inf)
    session, table = model.new_session(), []
    assert isinstance(session, SlotDraft)  # as those of both runtimes are
    for capacity in sorted(entry.capacities):
        session.prepare(capacity)
        for bucket in buckets:
            work = work_of(model, bundle, bucket, capacity, precision)
            table.append(row(session, bucket, capacity, work, rates, repeats))
    found = {"gigabytes_per_second": rates.bytes_per_second / 1e9, "gigaflops": rates.operations_per_second / 1e9}
    found = {name: value for name, value in found.items() if math.isfinite(value)}
    found = {name: round(value, 2) for name, value in found.items()}
    return {"compute_precision": precision, "compiled": one_model, "machine_rates": found, "rounds": table}


def row(
    session: SlotDraft, bucket: DraftBucket, capacity: int, work: Work, rates: Rates, repeats: int
) -> dict[str, Any]:
    """Median time of full rounds behind a cache that is nearly full."""
    cached = capacity - bucket.rows
    block, tips = RowBlock([1] * bucket.rows, cached, cached), list(range(bucket.rows - bucket.tips, bucket.rows))
    times, inside = [], []
    for repeat in range(-2, repeats):
        started = perf_counter()
        session.run([block], tips)
        if repeat >= 0:
            times.append(1e3 * (perf_counter() - started))
            inside.append(1e3 * session.last_pass_seconds)
    reading = 1e3 * (work.weight_bytes + work.cache_bytes) / rates.bytes_per_second
    computing = 1e3 * work.operations / rates.operations_per_second
    found = {"ms": median(times), "host_ms": median(times) - median(inside)}
    found |= {
        "read_floor_ms": reading,
        "compute_floor_ms": computing,
        "over_floor": median(times) / max(reading, computing),
    }
    sizes = {"weight_mb": work.weight_bytes / 1e6, "cache_mb": work.cache_bytes / 1e6, "gflop": work.operations / 1e9}
    shape = {"rows": bucket.rows, "tips": bucket.tips, "capacity": capacity}
    return shape | {name: round(value, 3) for name, value in (found | sizes).items()}


def compute_precision(model: OpenVinoDraftModel, bucket: DraftBucket, capacity: int) -> str:
    """What the device really computes in."""
    compiled = model.shapes.compiled(bucket.rows, bucket.tips, capacity)
    name = str(compiled.get_property("INFERENCE_PRECISION_HINT").get_type_name())
    return {"float": "f32", "float32": "f32", "bfloat16": "bf16", "float16": "f16"}.get(name, name)


def work_of(model: SlotDraftModel, bundle: Path, bucket: DraftBucket, capacity: int, precision: str) -> Work:
    """Count the products of the static graph; weights that several products share are read once each."""
    shape = model.entry.shape
    cache = 2 * shape.num_layers * shape.num_kv_heads * capacity * shape.head_dim * np.dtype(shape.dtype).itemsize
    if not isinstance(model, OpenVinoDraftModel):
        return Work((bundle / model.entry.weights_file).stat().st_size, cache, 0)
    graph = model.shapes.graph.static_model(bucket.rows, bucket.tips, capacity)
    weights, operations = 0, 0
    for node in graph.get_ops():
        if node.get_type_name() != "MatMul":
            continue
        inner = node.input(0).get_shape()[-2 if node.get_attributes()["transpose_a"] else -1]
        operations += 2 * inner * int(np.prod(node.output(0).get_shape()))
        if _comes_from_constant(node.input_value(1).get_node()):
            weights += int(np.prod(node.input(1).get_shape()))
    return Work(weights * _STORED.get(model.entry.precision, float(_WIDTH[precision])), cache, operations)


def _comes_from_constant(node: ov.Node) -> bool:
    """Whether a product's operand is a weight: a constant, perhaps compressed, turned or cut."""
    if node.get_type_name() == "Constant":
        return True
    is_on_the_way = node.get_type_name() in ("Convert", "Multiply", "Subtract", "Reshape", "Transpose", "Slice")
    return is_on_the_way and all(_comes_from_constant(value.get_node()) for value in node.input_values())


def bandwidth() -> float:
    """Bytes per second that one thread reads from memory."""
    array = np.ones(_STREAM_BYTES // 8)
    return _STREAM_BYTES / min(_timed(lambda: array.sum()) for _ in range(5))


def product_rate(placement: DraftPlacement, precision: str) -> float:
    """Operations per second of one large product in `precision`, on the draft's threads."""
    rows = ov.opset13.parameter([512, _PRODUCT], ov.Type.f32)
    weights = ov.opset13.constant(np.full((_PRODUCT, _PRODUCT), 0.01, np.float32))
    graph = ov.Model([ov.opset13.matmul(rows, weights, False, True)], [rows])
    settings = {"INFERENCE_PRECISION_HINT": precision, "INFERENCE_NUM_THREADS": placement.threads, "NUM_STREAMS": 1}
    request = new_core().compile_model(graph, "CPU", settings | {"ENABLE_CPU_PINNING": False}).create_infer_request()
    request.get_input_tensor().data[:] = 0.5
    return 2 * 512 * _PRODUCT**2 / min(_timed(request.infer) for _ in range(8))


def _timed(work: Any) -> float:
    started = perf_counter()
    work()
    return perf_counter() - started


if __name__ == "__main__":
    main()
