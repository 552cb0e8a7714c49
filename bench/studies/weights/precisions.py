"""What each precision of a target costs: size, perplexity, best tokens, and plain tokens per second, in one run.

    python bench/studies/weights/precisions.py TARGET --output bench/results/precisions_NAME.json

The target is exported as one graph per variant (traced once) and run by ONNX Runtime on the CPU. Speed is that of
greedy decoding with this graph alone, row by row, variants taking turns; the median of the turns is kept.

`--measured FILE` measures quality on all of another text than the calibration's last 1,024 tokens. The share of best
tokens kept is said for each window, so that variants can be compared window by window.
"""

import argparse
import json
import os
import shutil
import tempfile
import time
from dataclasses import asdict, replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import numpy.typing as npt

import mirrorsd.export.bundle.target_graphs as target_graphs
from mirrorsd.export import ExportOptions
from mirrorsd.export.bundle.journal import Journal
from mirrorsd.export.bundle.target_graphs import TargetPlan, write_target
from mirrorsd.export.checkpoints.checkpoint import Checkpoint, open_checkpoint
from mirrorsd.export.checkpoints.loading import DTYPE_BY_PRECISION, target_shape
from mirrorsd.export.checkpoints.weightless import WeightlessModel, open_model
from mirrorsd.export.verify.quality import (
    CalibrationText,
    Choices,
    calibration_text,
    measure_quality,
    reference_choices,
    text_windows,
)
from mirrorsd.export.verify.sensitive_layers import fitted_plan
from mirrorsd.export.verify.target import TargetRun
from mirrorsd.export.verify.text_passes import Pass
from mirrorsd.graphs import names
from mirrorsd.graphs.manifest import QualityEntry

CONTEXT, PROMPT_ROWS = 512, 32
WINDOWS_AT_ONCE = 8
VARIANTS: dict[str, dict[str, Any]] = {
    "fp32": {"precision": "fp32"},
    "fp16": {"precision": "fp16"},
    "int8": {"precision": "int8"},
    "int8, blocks of 32": {"precision": "int8", "block_size": 32},
    "int4": {"precision": "int4"},
    "int4, blocks of 32": {"precision": "int4", "block_size": 32},
    "int4, blocks of 32, asymmetric": {"precision": "int4", "block_size": 32, "is_symmetric": False},
    "int4, head and embedding int4": {"precision": "int4", "head_precision": "int4", "embedding_precision": "int4"},
    "int4, gptq": {"precision": "int4", "rounding": "gptq"},
    "int4, blocks of 32, gptq": {"precision": "int4", "block_size": 32, "rounding": "gptq"},
}


def remember_traces() -> None:
    """Trace a stage once per compute type; variants differ in what comes after."""
    trace = vars(target_graphs)["export_stage"]
    traces: dict[tuple[str, str], Any] = {}

    def remembered(module: Any, contract: Any, weights: Any) -> Any:
        key = (contract.name, str(next(module.parameters()).dtype))
        if key not in traces:
            traces[key] = trace(module, contract, weights)
        return traces[key].clone()

    vars(target_graphs)["export_stage"] = remembered


def write_variant(
    checkpoint: Checkpoint, model: WeightlessModel, folder: Path, options: ExportOptions, text: CalibrationText
) -> tuple[TargetRun, float]:
    """Export one variant as one graph; returns it running, and the seconds that writing took."""
    shape = target_shape(model.network, options.precision)
    plan = TargetPlan(
        shape=shape, context=CONTEXT, num_candidates=8, adapters={}, formats=options.formats(shape.hidden_size)
    )
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as inputs:
        if options.rounding == "gptq":
            plan = fitted_plan(
                checkpoint,
                plan,
                model,
                text.fitted,
                Path(inputs),
                may_scan=options.head_precision == "auto",
                report=lambda stage, share: None,
            )
        folder.mkdir(parents=True)
        typed = open_model(checkpoint, DTYPE_BY_PRECISION[options.precision])
        write_target(typed, plan, folder, lambda stage, share: None, Journal(folder, ""))
    return TargetRun(folder, plan), time.perf_counter() - start


def references_of(model: WeightlessModel, windows: npt.NDArray[np.int64]) -> list[Choices]:
    """What the reference chooses in each of the windows `[W, L]`; a few at a time, for their logits are large."""
    found: list[Choices] = []
    for place in range(0, len(windows), WINDOWS_AT_ONCE):
        some = reference_choices(model, windows[place : place + WINDOWS_AT_ONCE])
        found += [Choices(*(part[number : number + 1] for part in some)) for number in range(len(some.windows))]
    return found


def mean_of(windows: list[QualityEntry]) -> QualityEntry:
    """The quality over windows of equal length."""

    def mean(name: str) -> float:
        return float(np.mean([getattr(window, name) for window in windows]))

    def geometric(name: str) -> float:
        return float(np.exp(np.mean(np.log([getattr(window, name) for window in windows]))))

    return replace(
        windows[0],
        positions=sum(window.positions for window in windows),
        top1_agreement=mean("top1_agreement"),
        mean_divergence=mean("mean_divergence"),
        perplexity=geometric("perplexity"),
        reference_perplexity=geometric("reference_perplexity"),
    )


def decode(run: TargetRun, prompt: tuple[int, ...], num_tokens: int) -> float:
    """Greedy tokens per second behind a prompt, one row at a time."""
    _, logits = run.forward(Pass(0, prompt, len(prompt)))
    token, length = int(logits[-1].argmax()), len(prompt)
    start = time.perf_counter()
    for _ in range(num_tokens):
        _, logits = run.forward(Pass(length, (token,), 1))
        token, length = int(logits[-1].argmax()), length + 1
    return num_tokens / (time.perf_counter() - start)


def bits_in_checkpoint(options: ExportOptions) -> float:
    """Bits per weight of a checkpoint in the same precision, without scales."""
    return {"fp32": 32, "fp16": 16, "int8": 8, "int4": 4}[options.precision]


def main() -> None:
    """Export, measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("target", type=Path)
    parser.add_argument("--calibration", type=Path)
    parser.add_argument("--measured", type=Path)
    parser.add_argument("--turns", type=int, default=5, help="0 measures no speed")
    parser.add_argument("--tokens", type=int, default=60)
    parser.add_argument("--variants", default=",".join(str(number) for number in range(len(VARIANTS))))
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    remember_traces()
    checkpoint = open_checkpoint(arguments.target, "target")
    given = arguments.calibration.read_text(encoding="utf-8") if arguments.calibration else None
    text = calibration_text(checkpoint, given, CONTEXT)
    model = open_model(checkpoint)
    if arguments.measured:
        read = arguments.measured.read_text(encoding="utf-8")
        text = text._replace(measured=text_windows(checkpoint, read), name=arguments.measured.name)
    references = references_of(model, text.measured)
    chosen = [list(VARIANTS)[int(number)] for number in arguments.variants.split(",")]
    rows: list[dict[str, Any]] = []
    runs: dict[str, TargetRun] = {}
    folder = Path(tempfile.mkdtemp())
    try:
        for number, name in enumerate(chosen):
            options = ExportOptions(**VARIANTS[name])
            runs[name], seconds = write_variant(checkpoint, model, folder / str(number), options, text)
            by_window = [measure_quality(runs[name], reference, text.name) for reference in references]
            num_bytes = (folder / str(number) / names.WEIGHTS_FILE).stat().st_size
            ideal = checkpoint.source.num_parameters * bits_in_checkpoint(options) / 8
            rows.append({"variant": name, "write_seconds": round(seconds, 1), "bytes": num_bytes})
            rows[-1] |= {
                "bytes_to_parameters_at_precision": round(num_bytes / ideal, 3),
                "quality": asdict(mean_of(by_window)),
            }
            rows[-1]["best_tokens_kept_by_window"] = [quality.top1_agreement for quality in by_window]
            print(json.dumps(rows[-1]), flush=True)
        prompt = tuple(int(token) for token in text.measured[0][:PROMPT_ROWS])
        speeds: dict[str, list[float]] = {name: [] for name in chosen}
        for _ in range(arguments.turns):
            for name in chosen:
                speeds[name].append(decode(runs[name], prompt, arguments.tokens))
        for row in rows if arguments.turns else ():
            row["plain_tokens_per_second"] = round(median(speeds[row["variant"]]), 1)
            row["turns"] = [round(speed, 1) for speed in speeds[row["variant"]]]
    finally:
        shutil.rmtree(folder)
    document = {
        "target": checkpoint.source.name,
        "parameters": checkpoint.source.num_parameters,
        "threads": os.cpu_count(),
        "context": CONTEXT,
        "positions": text.measured.size,
        "rows": rows,
    }
    for row in rows:
        print(f"{row['variant']:36s} {row.get('plain_tokens_per_second', '')} tokens/s")
    if arguments.output:
        arguments.output.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
