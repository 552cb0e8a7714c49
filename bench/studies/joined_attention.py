"""One product over cache and rows together, against one over each: time of a draft's pass on the processor.

    python bench/studies/joined_attention.py pair.mirror --layout shared --output joined_attention.json

Both are compiled for every shape and run in turn: `cold` with the processor's caches filled with something else before
each pass, as the target's weights do; `hot` five passes at once. Milliseconds, medians. Capacities beyond the bundle's
own work, too: nothing but the time is looked at.
"""

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np
import openvino as ov

from mirrorsd.cli.output.machine import describe_machine, installed_versions
from mirrorsd.device_maps import load_device_map
from mirrorsd.devices.layouts import choose_layout
from mirrorsd.devices.openvino.draft_compiler import DraftCompiler
from mirrorsd.devices.openvino.draft_shapes import cache_type, device_options, with_cache_of
from mirrorsd.devices.openvino.joined_attention import join_attention
from mirrorsd.graphs.bundle_files import read_bundle
from mirrorsd.graphs.manifest import DraftEntry

_OTHER_BYTES = 32 << 20
_AT_ONCE = 5


class Placed(NamedTuple):
    """A draft, what its cache is kept in, and device and properties to compile it with."""

    entry: DraftEntry
    kind: ov.Type
    device: tuple[str, dict[str, Any]]


def main() -> None:
    """Measure, print and write the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--device-map", default="cpu")
    parser.add_argument("--layout")
    parser.add_argument("--rows", type=int, nargs="*", default=[4, 16, 32])
    parser.add_argument("--capacities", type=int, nargs="*", default=[256, 1024, 4096, 8192, 16384])
    parser.add_argument("--repeats", type=int, default=40)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    entry = read_bundle(options.bundle).draft
    placement = choose_layout(load_device_map(options.device_map), options.layout, None).device_map.draft
    shapes = DraftCompiler(options.bundle, entry, placement)
    placed = Placed(entry, cache_type(shapes.graph.core, entry, placement), device_options(placement))
    report: dict[str, Any] = {"bundle": options.bundle.name, "device_map": options.device_map}
    report |= {"threads": placement.threads, "passes": []}
    report |= {"machine": describe_machine(), "versions": installed_versions()}
    for capacity in options.capacities:
        cache_bytes = 2 * capacity * entry.shape.num_kv_heads * entry.shape.head_dim * placed.kind.size
        for rows in options.rows:
            shape = (rows, rows, capacity)
            passes = {name: _pass(shapes, placed, shape, joins=name == "joined") for name in ("two", "joined")}
            found = {"capacity": capacity, "cache_kib_a_layer": cache_bytes >> 10, "rows": rows}
            found |= measure(passes, options.repeats)
            print(found, flush=True)
            report["passes"].append(found)
    if options.output:
        options.output.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


def _pass(shapes: DraftCompiler, options: Placed, shape: tuple[int, int, int], *, joins: bool) -> Callable[[], object]:
    model = shapes.graph.static_model(*shape)
    if joins:
        join_attention(model)
    compiled = shapes.graph.core.compile_model(with_cache_of(model, options.entry, options.kind), *options.device)
    request = compiled.create_infer_request()
    for port in compiled.inputs:
        request.set_tensor(port, ov.Tensor(port.element_type, port.shape))
        request.get_tensor(port).data.fill(0)
    return lambda: request.infer()


def measure(passes: dict[str, Callable[[], object]], repeats: int) -> dict[str, dict[str, float]]:
    """Medians of both, in turn."""
    other = np.zeros(_OTHER_BYTES // 8)
    times: dict[str, dict[str, list[float]]] = {"cold": {}, "hot": {}}
    for kind, runs in times.items():
        for _ in range(repeats):
            for name, run in passes.items():
                if kind == "cold":
                    other += 1.0
                else:
                    run()
                count = 1 if kind == "cold" else _AT_ONCE
                started = perf_counter()
                for _ in range(count):
                    run()
                runs.setdefault(name, []).append(1e3 * (perf_counter() - started) / count)
    return {kind: {name: round(median(taken), 3) for name, taken in runs.items()} for kind, runs in times.items()}


if __name__ == "__main__":
    main()
