"""What the parts of a step cost: the target's stages over rows, the draft's passes over rows, and whole steps.

    python bench/studies/step_costs.py storyteller.mirror --output step_costs.json

Stages and draft are measured alone, each on its own core of the device map; `steps` are medians from real
generations, with both devices at work. Milliseconds.
"""

import argparse
import json
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np

from mirrorsd import MirrorPipeline
from mirrorsd.cli.output.machine import describe_machine, installed_versions
from mirrorsd.device_maps import DeviceMap, load_device_map
from mirrorsd.graphs.bundle_files import read_bundle
from mirrorsd.graphs.manifest import Manifest
from mirrorsd.runtime.backends.onnxruntime.target import OnnxTargetModel
from mirrorsd.runtime.backends.openvino.draft_compiler import OpenVinoDraftModel
from mirrorsd.runtime.backends.protocol import RowBlock
from mirrorsd.runtime.devices.workers import DeviceWorker
from mirrorsd.runtime.ledger import Ledger

ROWS = (1, 2, 4, 8, 16)
PROMPT = "Once upon a time there was a little fox who lived at the edge of a dark forest."


def main() -> None:
    """Measure, print and write the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--device-map", default="cpu")
    parser.add_argument("--cached", type=int, default=128, help="rows in the caches before each pass")
    parser.add_argument("--repeats", type=int, default=100)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    card, manifest = load_device_map(options.device_map), read_bundle(options.bundle)
    report: dict[str, Any] = {"bundle": options.bundle.name, "device_map": card.name, "cached_rows": options.cached}
    report |= {"ends": "ignored", "machine": describe_machine(), "versions": installed_versions()}
    costs = (options.bundle, manifest, card, options.cached, options.repeats)
    target_worker, draft_worker = DeviceWorker("target", card.target.cores), DeviceWorker("draft", card.draft.cores)
    report["target_ms"] = target_worker.run(partial(target_costs, *costs))
    report["draft_ms"] = draft_worker.run(partial(draft_costs, *costs))
    report["steps"] = step_costs(options.bundle, options.device_map)
    print(json.dumps(report, indent=2))
    if options.output:
        options.output.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


def target_costs(bundle: Path, manifest: Manifest, card: DeviceMap, cached: int, repeats: int) -> dict[str, Any]:
    """Median time of every stage, by rows."""
    target = OnnxTargetModel(bundle, manifest.target, card.target).new_session()
    tokens = np.random.default_rng(0).integers(0, target.vocab_size, cached + max(ROWS))
    target.prefill(tokens[:cached], 0, ledger=Ledger())
    costs = {}
    for num_rows in ROWS:
        times = defaultdict(list)
        for _ in range(repeats):
            ledger = Ledger()
            window = tokens[cached : cached + num_rows]
            target.run(window, cached, with_logits=False, ledger=ledger, on_exit=lambda guesses: None)
            for span in ledger.spans:
                times[span.name].append(1e3 * span.seconds)
        costs[str(num_rows)] = {name: round(median(values), 4) for name, values in times.items()}
    target.close()
    return costs


def draft_costs(bundle: Path, manifest: Manifest, card: DeviceMap, cached: int, repeats: int) -> dict[str, Any]:
    """Median time of a pass of each compiled shape, rows and tips full."""
    draft = OpenVinoDraftModel(bundle, manifest.draft, card.draft).new_session()
    costs = {}
    for bucket in manifest.draft.buckets:
        blocks = [RowBlock([1] * bucket.rows, cached, cached)]
        tips = list(range(bucket.rows - bucket.tips, bucket.rows))
        name = f"{bucket.rows} rows, {bucket.tips} tips"
        costs[name] = round(median_ms(partial(draft.run, blocks, tips), repeats), 4)
    draft.close()
    return costs


def median_ms(work: Callable[[], object], repeats: int) -> float:
    """Median milliseconds of a call, after a few untimed ones."""
    times = []
    for repeat in range(-3, repeats):
        started = perf_counter()
        work()
        if repeat >= 0:
            times.append(1e3 * (perf_counter() - started))
    return median(times)


def step_costs(bundle: Path, device_map: str) -> dict[str, Any]:
    """Speed and step breakdown of real generations, by method."""
    found = {}
    with MirrorPipeline.load(bundle, device_map=device_map) as pipe:
        for method in ("plain", "serial", "mirror"):
            for _ in range(2):
                result = pipe.generate(PROMPT, max_new_tokens=200, ignore_eos=True, temperature=0.0, method=method)
            stats = result.stats.to_dict()
            names = ("tokens_per_second", "tokens_per_step", "mean_accepted", "reuse_rate", "draft_exposed_ms")
            found[method] = {name: stats[name] for name in (*names, "overlap", "step_ms")}
    return found


if __name__ == "__main__":
    main()
