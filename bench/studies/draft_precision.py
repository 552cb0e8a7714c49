"""What fewer bits buy and cost a draft on a processor: time per round, and accepted length of real generations.

    python bench/studies/draft_precision.py fp32.mirror int8.mirror --prompts samples/storyteller/prompts.jsonl

Every bundle is the same pair with other draft weights. Each is run as the device map says, with the precisions and
activation groups below; the first bundle in f32 is what the others are held against. Times are medians of rounds that
take turns between the variants (milliseconds, rows and tips full); accepted lengths come from greedy serial decoding.
`--part` measures one half only; the other is kept from the `--output` that is there.
"""

import argparse
import json
import tempfile
from dataclasses import replace
from pathlib import Path
from statistics import mean, median
from time import perf_counter
from typing import Any, NamedTuple

from mirrorsd import MirrorPipeline
from mirrorsd.cli.input.prompt_file import read_questions
from mirrorsd.cli.output.machine import describe_machine, installed_versions
from mirrorsd.device_maps import load_device_map
from mirrorsd.devices.draft_memory import RowBlock
from mirrorsd.graphs.bundle_files import read_bundle
from mirrorsd.runtime.backends.openvino.draft import OpenVinoDraftModel
from mirrorsd.runtime.backends.protocol import DraftSession
from mirrorsd.runtime.devices.workers import DeviceWorker

CACHED = 128


class Variant(NamedTuple):
    """A bundle's draft, what the device computes in, and how many activations share a scale."""

    bundle: Path
    precision: str
    activation_group: int

    @property
    def name(self) -> str:
        """Weights, precision and group in one line."""
        weights = read_bundle(self.bundle).draft.precision
        group = f", activations in groups of {self.activation_group}" if self.activation_group else ""
        return f"{weights} weights, {self.precision}{group}"


def main() -> None:
    """Measure, print and write the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundles", type=Path, nargs="+")
    parser.add_argument("--device-map", default="cpu")
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--num-prompts", type=int, default=24)
    parser.add_argument("--repeats", type=int, default=60)
    parser.add_argument("--part", choices=("times", "acceptance"))
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    variants = [variant for bundle in options.bundles for variant in variants_of(bundle)]
    report: dict[str, Any] = {}
    if options.output and options.output.is_file():
        report = json.loads(options.output.read_text(encoding="utf-8"))
    report |= {"device_map": options.device_map, "machine": describe_machine(), "versions": installed_versions()}
    if options.part != "acceptance":
        worker = DeviceWorker("draft", load_device_map(options.device_map).draft.cores)
        report["round_ms"] = worker.run(lambda: round_times(variants, options.device_map, options.repeats))
    if options.part != "times":
        prompts = [question.turns[0] for question in read_questions(options.prompts)][: options.num_prompts]
        report["acceptance"] = accepted_lengths(variants, options.device_map, prompts)
    print(json.dumps(report, indent=2))
    if options.output:
        options.output.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


def variants_of(bundle: Path) -> list[Variant]:
    """What makes sense for a draft's weights: activations are rounded only under compressed ones."""
    is_compressed = read_bundle(bundle).draft.precision in ("int8", "int4")
    plain = [Variant(bundle, precision, 0) for precision in ("f32", "bf16")]
    return plain + ([Variant(bundle, precision, 128) for precision in ("f32", "bf16")] if is_compressed else [])


def round_times(variants: list[Variant], device_map: str, repeats: int) -> dict[str, Any]:
    """Median milliseconds per round by variant and bucket, and over the first variant."""
    card = load_device_map(device_map)
    sessions: dict[str, DraftSession] = {}
    for variant in variants:
        placement = replace(card.draft, precision=variant.precision, activation_group=variant.activation_group)
        model = OpenVinoDraftModel(variant.bundle, read_bundle(variant.bundle).draft, placement)
        model.shapes.cache = None
        sessions[variant.name] = model.new_session()
    found: dict[str, dict[str, float]] = {name: {} for name in sessions}
    for bucket in read_bundle(variants[0].bundle).draft.buckets:
        block, tips = RowBlock([1] * bucket.rows, CACHED, CACHED), list(range(bucket.rows - bucket.tips, bucket.rows))
        times: dict[str, list[float]] = {name: [] for name in sessions}
        for repeat in range(-2, repeats):
            for name, session in sessions.items():
                started = perf_counter()
                session.run([block], tips)
                if repeat >= 0:
                    times[name].append(1e3 * (perf_counter() - started))
        for name, values in times.items():
            found[name][f"{bucket.rows} rows, {bucket.tips} tips"] = round(median(values), 3)
    first = next(iter(found.values()))
    shares = {name: round(mean(row[key] / first[key] for key in row), 3) for name, row in found.items()}
    return {"cached_rows": CACHED, "by_variant": found, "mean_share_of_first": shares}


def accepted_lengths(variants: list[Variant], device_map: str, prompts: list[str]) -> dict[str, Any]:
    """Mean accepted tokens per step by variant, and over the first variant."""
    found = {}
    for variant in variants:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "variant.toml"
            path.write_text(card_text(variant), encoding="utf-8")
            with MirrorPipeline.load(variant.bundle, device_map=str(path), use_tuned=False) as pipe:
                chats = [[{"role": "user", "content": prompt}] for prompt in prompts]
                results = [
                    pipe.generate(messages=chat, max_new_tokens=96, ignore_eos=True, temperature=0.0, method="serial")
                    for chat in chats
                ]
        steps = sum(result.stats.steps for result in results)
        found[variant.name] = sum(result.stats.mean_accepted * result.stats.steps for result in results) / steps
    first = next(iter(found.values()))
    return {
        "prompts": len(prompts),
        "method": "serial",
        "ends": "ignored",
        "mean_accepted": {name: round(value, 4) for name, value in found.items()},
        "share_of_first": {name: round(value / first, 4) for name, value in found.items()},
    }


def card_text(variant: Variant) -> str:
    """A card like `cpu` with this variant's draft."""
    draft = f'cores = [1]\nprecision = "{variant.precision}"\nactivation_group = {variant.activation_group}\n'
    return f"[target]\ncores = [0]\n[draft]\n{draft}"


if __name__ == "__main__":
    main()
