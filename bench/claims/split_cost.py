"""What cutting the target costs: a chain of segments, its exits not run, against the whole target as one graph.

    python bench/claims/split_cost.py samples/storyteller/target --output split_cost.json
    python bench/claims/split_cost.py samples/storyteller/target --borders 1,2,3 --output border_cost.json

All forms are exported by the same code and run by the same session class, on one thread, in turn within one run; what
running one exit would cost is given beside it. Times in milliseconds per pass.
"""

import argparse
import json
import tempfile
from pathlib import Path
from statistics import median
from time import perf_counter

import numpy as np

from mirrorsd.cli.output.machine import describe_machine, installed_versions
from mirrorsd.device_maps import TargetPlacement
from mirrorsd.export.bundle.journal import Journal
from mirrorsd.export.bundle.target_graphs import TargetPlan, write_target
from mirrorsd.export.checkpoints.checkpoint import open_checkpoint
from mirrorsd.export.checkpoints.loading import target_shape
from mirrorsd.export.checkpoints.weightless import open_model
from mirrorsd.runtime.backends.onnxruntime.target import OnnxTarget, OnnxTargetModel
from mirrorsd.runtime.devices.workers import pin_current_thread
from mirrorsd.runtime.ledger import Ledger

BLOCK = 20


def main() -> None:
    """Export both forms to a scratch folder, measure, print and write the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", type=Path)
    parser.add_argument("--rows", default="1,8", help="rows per pass, separated by commas")
    parser.add_argument("--borders", default="1", help="evenly spread borders, separated by commas")
    parser.add_argument("--cached", type=int, default=256, help="rows in the cache before the pass")
    parser.add_argument("--repeats", type=int, default=400)
    parser.add_argument("--core", type=int, default=0)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    pin_current_thread([options.core])
    with tempfile.TemporaryDirectory() as folder:
        borders = [int(number) for number in options.borders.split(",")]
        whole, *cut = export_forms(options.target, Path(folder), [0, *borders], context=options.cached + 64)
        rows = [
            {"borders": number} | measure(whole, split, int(num_rows), options.cached, options.repeats)
            for num_rows in options.rows.split(",")
            for number, split in zip(borders, cut, strict=True)
        ]
    report = {
        "target": str(options.target),
        "cached_rows": options.cached,
        "repeats": options.repeats,
        "threads": 1,
        "precision": "fp32",
        "machine": describe_machine(),
        "versions": installed_versions(),
        "rows": rows,
    }
    print(json.dumps(report, indent=2))
    if options.output:
        options.output.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


def export_forms(checkpoint: Path, folder: Path, borders: list[int], *, context: int) -> list[OnnxTarget]:
    """Export the target with each number of evenly spread borders; return a session of each."""
    opened = open_checkpoint(checkpoint, "target")
    num_layers = int(opened.config["num_hidden_layers"])
    sessions = []
    for number in borders:
        exit_layers = [num_layers * border // (number + 1) for border in range(1, number + 1)]
        model = open_model(opened)
        shape = target_shape(model.network, "fp32")
        plan = TargetPlan(shape=shape, context=context, num_candidates=16, adapters=dict.fromkeys(exit_layers))
        bundle = folder / str(number)
        bundle.mkdir()
        write_target(model, plan, bundle, lambda stage, share: None, Journal(bundle, ""))
        entry = plan.entry(opened.source, "fp32")
        sessions.append(OnnxTargetModel(bundle, entry, TargetPlacement(threads=1)).new_session())
    return sessions


def measure(whole: OnnxTarget, split: OnnxTarget, num_rows: int, cached: int, repeats: int) -> dict[str, float]:
    """Time both in turn, in blocks of passes as decoding makes them; the first pass of a block is not counted.

    Pass by pass in turn, each would find the other's weights in the processor's cache instead of its own.
    """
    tokens = np.random.default_rng(0).integers(0, whole.vocab_size, cached + num_rows)
    times: dict[str, list[float]] = {"whole": [], "split": []}
    sessions = {"whole": whole, "split": split}
    for session in sessions.values():
        session.prefill(tokens[:cached], 0, ledger=Ledger())
    for block in range(-1, repeats // BLOCK):
        for name in ("whole", "split") if block % 2 else ("split", "whole"):
            for repeat in range(BLOCK + 1):
                ledger = Ledger()
                started = perf_counter()
                sessions[name].run(tokens[cached:], cached, with_logits=False, ledger=ledger)
                if block >= 0 and repeat > 0:
                    times[name].append(1e3 * (perf_counter() - started))
    exit_ledger = Ledger()
    for _ in range(BLOCK):
        split.run(tokens[cached:], cached, with_logits=False, ledger=exit_ledger, on_exit=lambda _: None)
    exit_ms = [1e3 * span.seconds for span in exit_ledger.spans if span.name == "exit"]
    ratios = [split_ms / whole_ms for whole_ms, split_ms in zip(times["whole"], times["split"], strict=True)]
    return {
        "num_rows": num_rows,
        "whole_ms": round(median(times["whole"]), 4),
        "split_ms": round(median(times["split"]), 4),
        "exit_ms": round(median(exit_ms), 4),
        "cost": round(median(times["split"]) / median(times["whole"]) - 1, 4),
        "cost_of_pairs": round(median(ratios) - 1, 4),
        "cost_undisturbed": round(tenth(times["split"]) / tenth(times["whole"]) - 1, 4),
    }


def tenth(times_ms: list[float]) -> float:
    """The time that one pass in ten stays below: what a pass takes when nothing else disturbs it."""
    return sorted(times_ms)[len(times_ms) // 10]


if __name__ == "__main__":
    main()
