"""A bundle's target on a GPU: does it compute what the processor computes, are all methods equal, how fast is it.

    python bench/studies/gpu.py storyteller.mirror --device-map cuda-cpu --output gpu.json

Prints one table. Parity: logits of the GPU against those of ONNX Runtime on the processor, over a text, a window and a
rollback. Exactness: serial, mirror and auto decoding give plain decoding's ids. Speed: tokens per second by method, and
milliseconds of a target pass over rows, beside the time that reading the weights once takes at the bandwidth measured
here (a copy on the device, counted as a read and a write). A bundle that the device refuses is a row with the reason,
and the status is 1. Where the card's devices are missing it says why and ends with status 4. `scripts/check_gpu.py`
makes everything that this needs.
"""

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np
import onnxruntime as ort

from mirrorsd import MirrorPipeline
from mirrorsd.cli.output.failures import EXIT_FAILED, EXIT_NO_DEVICE
from mirrorsd.cli.output.machine import describe_machine, installed_versions
from mirrorsd.device_maps import DeviceMap, TargetPlacement, load_device_map
from mirrorsd.devices.hardware import hardware_details
from mirrorsd.devices.inventory import check_computes
from mirrorsd.devices.onnxruntime.device import place_of
from mirrorsd.graphs.bundle_files import read_bundle
from mirrorsd.graphs.errors import DeviceError
from mirrorsd.graphs.manifest import Manifest
from mirrorsd.graphs.names import Method
from mirrorsd.machine.doctor.known_versions import find_known_bad
from mirrorsd.runtime import device_inventory, missing_devices
from mirrorsd.runtime.backends.onnxruntime.target import OnnxTarget, OnnxTargetModel
from mirrorsd.runtime.ledger import Ledger

ROWS = (1, 2, 4, 8, 16)
METHODS: tuple[Method, ...] = ("plain", "serial", "mirror", "auto")
PROMPT = "Once upon a time there was a little fox who lived at the edge of a dark forest."
_COPY_BYTES = 1 << 28
_TOLERANCES = {"float32": 1e-3, "float16": 0.1}


def main() -> int:
    """Check every bundle, print the table and write the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundles", type=Path, nargs="+")
    parser.add_argument("--device-map", default="cuda-cpu")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=50)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    card = load_device_map(options.device_map)
    missing = missing_devices(card, device_inventory())
    if missing:
        print(f"{card.name} cannot be tried here: {'; '.join(missing)}", file=sys.stderr)
        return EXIT_NO_DEVICE
    details = hardware_details()
    report: dict[str, Any] = {"device_map": card.name, "machine": describe_machine(), "versions": installed_versions()}
    report["ends"] = "ignored"
    report["hardware"] = [{"name": detail.full_name, "driver": detail.driver} for detail in details]
    report["known_bad"] = [finding.found for finding in find_known_bad(installed_versions(), details)]
    report["gigabytes_per_second"] = round(bandwidth(card.target) / 1e9, 1)
    rate = report["gigabytes_per_second"] * 1e9
    report["bundles"] = [check_or_reason(path, card, rate, options.tokens, options.repeats) for path in options.bundles]
    print_table(report["bundles"])
    if options.output:
        options.output.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    return 0 if all(found["is_fine"] for found in report["bundles"]) else EXIT_FAILED


def check_or_reason(bundle: Path, card: DeviceMap, rate: float, num_tokens: int, repeats: int) -> dict[str, Any]:
    """Everything about one bundle, or why the device refused it."""
    try:
        return check(bundle, card, rate, num_tokens, repeats)
    except DeviceError as error:
        precision = read_bundle(bundle).target.precision
        return {"bundle": bundle.name, "precision": precision, "refused": str(error), "is_fine": False}


def check(bundle: Path, card: DeviceMap, rate: float, num_tokens: int, repeats: int) -> dict[str, Any]:
    """Everything about one bundle.

    Raises:
        DeviceError: the device does not take it, or fails.
    """
    manifest = read_bundle(bundle)
    dtype = manifest.target.shape.dtype
    check_computes(card, dtype)
    found: dict[str, Any] = {"bundle": bundle.name, "precision": manifest.target.precision}
    found["parameters"] = manifest.target.source.num_parameters
    model = OnnxTargetModel(bundle, manifest.target, card.target)
    reference = OnnxTargetModel(bundle, manifest.target, TargetPlacement(threads=4))
    found["placement"] = model.describe()
    found |= parity(model.new_session(), reference.new_session())
    del reference
    found["pass_ms"] = pass_times(model.new_session(), repeats)
    found["floor_ms"] = round(1e3 * weight_bytes(manifest) / rate, 3)
    found["one_row_over_floor"] = round(found["pass_ms"]["1"] / found["floor_ms"], 2)
    if model.device.captures:
        plainly = OnnxTargetModel(bundle, manifest.target, replace(card.target, graphs=False))
        found["pass_ms_without_graphs"] = pass_times(plainly.new_session(), repeats)
    del model
    found |= speeds(bundle, card.name, num_tokens)
    found["is_fine"] = found["identical"] and is_close(found, dtype)
    return found


def is_close(found: dict[str, Any], dtype: str) -> bool:
    """Whether logits are as near to the processor's as this arithmetic allows."""
    return bool(found["largest_error"] <= _TOLERANCES.get(dtype, 0.5) and found["same_top1"] >= 0.98)


def parity(found: OnnxTarget, expected: OnnxTarget) -> dict[str, Any]:
    """Largest logit difference and share of equal best tokens over a prefill, windows of 8 and a rollback."""
    tokens = np.random.default_rng(0).integers(3, found.vocab_size, 160)
    errors, equal = [], []
    for session in (found, expected):
        session.prefill(tokens[:64], 0, ledger=Ledger())
    for start in (64, 72, 76, 84, 92, 100, 108, 116):
        logits = []
        for session in (found, expected):
            output = session.run(tokens[start : start + 8], start, with_logits=True, ledger=Ledger())
            assert output.logits is not None
            logits.append(output.logits.astype(np.float32).copy())
        errors.append(float(np.abs(logits[0] - logits[1]).max()))
        equal += (logits[0].argmax(-1) == logits[1].argmax(-1)).tolist()
    return {"largest_error": max(errors), "same_top1": round(float(np.mean(equal)), 4), "positions": len(equal)}


def pass_times(session: OnnxTarget, repeats: int) -> dict[str, float]:
    """Median milliseconds of a whole pass, exits included, by rows, 128 rows cached."""
    tokens = np.random.default_rng(0).integers(3, session.vocab_size, 192)
    session.prefill(tokens[:128], 0, ledger=Ledger())
    found = {}
    for rows in ROWS:

        def run(rows: int = rows) -> None:
            window = tokens[128 : 128 + rows]
            session.run(window, 128, with_logits=False, ledger=Ledger(), on_exit=lambda _: None)

        found[str(rows)] = round(median(timed(run) for _ in range(3 + repeats)), 3)
    session.close()
    return found


def timed(work: Callable[[], object]) -> float:
    """Milliseconds of one call."""
    started = perf_counter()
    work()
    return 1e3 * (perf_counter() - started)


def speeds(bundle: Path, card: str, num_tokens: int) -> dict[str, Any]:
    """Tokens per second by method, and whether all gave the same ids, with equal rows on both sides."""
    found: dict[str, Any] = {"ends": "ignored", "tokens_per_second": {}}
    texts = []
    with MirrorPipeline.load(bundle, device_map=card, speculation={"pad_rows_to": 8, "gamma": 7}) as pipe:
        for method in METHODS:
            results = [
                pipe.generate(PROMPT, max_new_tokens=num_tokens, ignore_eos=True, temperature=0.0, method=method)
                for _ in range(2)
            ]
            texts += [result.token_ids for result in results]
            found["tokens_per_second"][method] = round(results[-1].stats.tokens_per_second, 1)
        found["mean_accepted"] = round(results[-1].stats.mean_accepted, 3)
    return found | {"identical": all(text == texts[0] for text in texts)}


def weight_bytes(manifest: Manifest) -> int:
    """What a pass of one row must read at least: all weights once."""
    return manifest.files[manifest.target.weights_file].bytes


def bandwidth(placement: TargetPlacement) -> float:
    """Bytes per second that the device reads and writes, from copies between two of its own tensors."""
    place = place_of(placement)
    values = [place.tensor((_COPY_BYTES // 4,), "float32").value for _ in range(2)]
    return 2 * _COPY_BYTES / (min(timed(lambda: ort_copy(*values)) for _ in range(10)) / 1e3)


def ort_copy(source: ort.OrtValue, destination: ort.OrtValue) -> None:
    """Copy on the device."""
    destination.update_inplace(source)


def print_table(rows: list[dict[str, Any]]) -> None:
    """One row per bundle."""
    head = ["bundle", "precision", "params M", "largest error", "same top-1", "identical", "1 row ms", "8 rows ms"]
    head += ["floor ms", "plain t/s", "serial t/s", "mirror t/s", "fine"]
    lines = [head]
    checked = [row for row in rows if "refused" not in row]
    for row in checked:
        speed, times = row["tokens_per_second"], row["pass_ms"]
        cells = [row["bundle"], row["precision"], f"{row['parameters'] / 1e6:.0f}", f"{row['largest_error']:.1e}"]
        cells += [f"{row['same_top1']:.1%}", str(row["identical"]), f"{times['1']:.2f}", f"{times['8']:.2f}"]
        cells += [f"{row['floor_ms']:.2f}", *(f"{speed[method]:.0f}" for method in METHODS[:3]), str(row["is_fine"])]
        lines.append(cells)
    widths = [max(len(line[column]) for line in lines) for column in range(len(head))]
    for line in lines:
        print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)))
    for row in rows:
        print(f"{row['bundle']}: {row['placement'] if row in checked else 'refused: ' + row['refused']}")


if __name__ == "__main__":
    sys.exit(main())
