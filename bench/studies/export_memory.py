"""Time, memory and disk that exporting a large checkpoint takes, and loading the bundle; random weights (Linux).

    python bench/studies/export_memory.py --size 1b --precision int4 --folder scratch
    python bench/studies/export_memory.py --size 1b-mixture --precision int8 --folder scratch

The checkpoint is made shard by shard in bfloat16, as `save_pretrained` writes it, and kept in the folder for the next
precision. Export and loading run in processes of their own; `VmHWM` counts pages of mapped files too, `RssAnon` (read
every 20 ms) only memory of the process itself. The bound is 1.3 x the largest shard + 2 GB. `cpu_seconds` do not count
the time in which the process waits for its turn on a machine that is shared.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from time import perf_counter, process_time
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM

from mirrorsd import MirrorPipeline
from mirrorsd.cli.output.machine import describe_machine, installed_versions
from mirrorsd.export import ExportOptions, export_pair
from mirrorsd.export.estimate import estimate_export
from mirrorsd.families.experts import with_separate_experts

SIZES: dict[str, dict[str, Any]] = {
    "100m": {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 20, "num_attention_heads": 8},
    "1b": {"hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 22, "num_attention_heads": 16},
    "1b-mixture": {
        "model_type": "qwen3_moe",
        "hidden_size": 1024,
        "num_hidden_layers": 10,
        "num_attention_heads": 16,
        "head_dim": 64,
        "num_experts": 64,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 512,
        "norm_topk_prob": True,
    },
    "active": {
        "model_type": "qwen3",
        "hidden_size": 1024,
        "intermediate_size": 4096,
        "num_hidden_layers": 10,
        "num_attention_heads": 16,
        "head_dim": 64,
    },
    "hybrid": {
        "model_type": "qwen3_5_text",
        "hidden_size": 1024,
        "intermediate_size": 3584,
        "num_hidden_layers": 24,
        "num_attention_heads": 8,
        "head_dim": 256,
        "linear_num_value_heads": 16,
    },
    "3b": {"hidden_size": 3072, "intermediate_size": 8192, "num_hidden_layers": 28, "num_attention_heads": 24},
    "8b": {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32},
}
"""`active` is a dense model of the size that a token of `1b-mixture` goes through; `hybrid` has the layers of
Qwen3.5-0.8B."""
SHARD_BYTES = {
    "100m": 100 << 20,
    "1b-mixture": 1 << 30,
    "active": 1 << 30,
    "hybrid": 1 << 30,
    "1b": 1 << 30,
    "3b": 3 << 30,
    "8b": 5_000_000_000,
}
VOCABULARY = dict.fromkeys(SIZES, 32_000) | {"3b": 128_256, "8b": 128_256}
DRAFT = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 4}
LEAD = 205.0
BYTES_PER_NUMBER = {"fp32": 4, "fp16": 2, "bf16": 2}


def main() -> None:
    """Make the checkpoints, export, load, print and write the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="1b")
    parser.add_argument("--precision", default="int4")
    parser.add_argument("--folder", type=Path, required=True, help="scratch; checkpoints stay in it, bundles do not")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--keep", action="store_true", help="leave the bundle in the folder")
    parser.add_argument("--part", choices=("make", "export", "load"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.part:
        print(json.dumps(PARTS[options.part](options)))
        return
    if not (options.folder / options.size / "model.safetensors.index.json").is_file():
        run_part(options, "make")
    report: dict[str, Any] = {"size": options.size, "precision": options.precision}
    report |= {"machine": describe_machine(), "versions": installed_versions()}
    report |= describe_checkpoint(options.folder / options.size)
    report["export"] = run_part(options, "export")
    report["export"]["peak_over_bound"] = round(report["export"]["vm_hwm_bytes"] / report["bound_bytes"], 3)
    report |= describe_bundle(bundle_of(options), report["num_parameters"], options.precision)
    for state in ("cold", "warm"):
        if state == "cold":
            drop_from_page_cache(bundle_of(options))
        report[f"load_{state}"] = run_part(options, "load")
    if not options.keep:
        shutil.rmtree(bundle_of(options))
    print(json.dumps(report, indent=2))
    if options.output:
        options.output.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


def run_part(options: argparse.Namespace, part: str) -> dict[str, Any]:
    """Run one part in a process of its own; return what it printed."""
    given = ["--size", options.size, "--precision", options.precision, "--folder", str(options.folder)]
    output = subprocess.check_output([sys.executable, __file__, *given, "--part", part], text=True)
    found: dict[str, Any] = json.loads(output.splitlines()[-1])
    return found


def bundle_of(options: argparse.Namespace) -> Path:
    """Where the bundle goes."""
    folder: Path = options.folder
    return folder / f"{options.size}-{options.precision}.mirror"


def make_checkpoints(options: argparse.Namespace) -> dict[str, Any]:
    """Write the target in shards, and a small draft with the same vocabulary."""
    sizes = {"num_key_value_heads": SIZES[options.size]["num_attention_heads"] // 4, "tie_word_embeddings": False}
    write_checkpoint(options.folder / options.size, options.size, SIZES[options.size] | sizes)
    write_checkpoint(options.folder / f"{options.size}-draft", options.size, DRAFT | {"tie_word_embeddings": False})
    return {}


def write_checkpoint(folder: Path, size: str, sizes: dict[str, Any]) -> None:
    """Write a random model in bfloat16, a Llama unless told otherwise; only one shard is in memory at a time."""
    folder.mkdir(parents=True, exist_ok=True)
    common = {"vocab_size": VOCABULARY[size], "max_position_embeddings": 4096, "eos_token_id": 0, "bos_token_id": None}
    config = AutoConfig.for_model(**({"model_type": "llama"} | common | sizes), dtype="bfloat16")
    with torch.device("meta"):
        fused: Any = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        network = with_separate_experts(fused)
    generator = torch.Generator().manual_seed(1)
    shard: dict[str, torch.Tensor] = {}
    shards: list[tuple[str, list[str]]] = []
    for name, parameter in network.named_parameters():
        shard[name] = random_weight(name, parameter.shape, generator)
        if sum(tensor.nbytes for tensor in shard.values()) >= SHARD_BYTES[size]:
            shards.append(save_shard(folder, len(shards), shard))
            shard = {}
    shards += [save_shard(folder, len(shards), shard)] if shard else []
    weight_map = {name: file for file, names in shards for name in names}
    config.save_pretrained(folder)
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: number for number, letter in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))


def random_weight(name: str, shape: torch.Size, generator: torch.Generator) -> torch.Tensor:
    """Random numbers, but the head follows the embedding: each token's best successor is itself, by a clear lead.

    Without a lead every rounding of a random model changes its best token, and no precision would pass the check. The
    lead stops growing with the hidden size at 2,048.
    """
    if len(shape) == 1:
        return torch.ones(shape, dtype=torch.bfloat16)
    if len(shape) == 3:  # of a convolution, whose inputs are few
        return torch.empty(shape, dtype=torch.bfloat16).normal_(0, 0.5, generator=generator)
    spreads = {"model.embed_tokens.weight": 1.0, "lm_head.weight": min(0.1, LEAD / shape[1])}
    generator = torch.Generator().manual_seed(2) if name in spreads else generator
    return torch.empty(shape, dtype=torch.bfloat16).normal_(0, spreads.get(name, 0.01), generator=generator)


def save_shard(folder: Path, number: int, shard: dict[str, torch.Tensor]) -> tuple[str, list[str]]:
    """Write one shard; return its name and what is in it."""
    name = f"model-{number + 1:05}.safetensors"
    save_file(shard, folder / name, {"format": "pt"})
    return name, list(shard)


def describe_checkpoint(folder: Path) -> dict[str, Any]:
    """Sizes, and the bound on memory that follows from the largest shard."""
    shards = [path.stat().st_size for path in folder.glob("*.safetensors")]
    return {
        "checkpoint_bytes": sum(shards),
        "num_parameters": sum(shards) // 2,
        "largest_shard_bytes": max(shards),
        "bound_bytes": int(1.3 * max(shards)) + 2_000_000_000,
    }


def export(options: argparse.Namespace) -> dict[str, Any]:
    """Export in this process, watching its memory."""
    stages: list[tuple[float, str]] = []
    by_peak: dict[str, int] = {}
    started = perf_counter()

    def note(stage: str, fraction: float) -> None:
        if not stages or stages[-1][1] != stage:
            stages.append((perf_counter() - started, stage))

    chosen = ExportOptions(precision=options.precision, context=2048, overwrite=True)
    folder = options.folder
    pair = folder / options.size, folder / f"{options.size}-draft"
    promised = estimate_export(*pair, chosen).memory_bytes
    with AnonymousPeak(lambda anonymous: by_peak.update(highest(by_peak, stages, anonymous))) as peak:
        manifest = export_pair(*pair, bundle_of(options), chosen, note)
    ends = [*(begin for begin, _ in stages[1:]), perf_counter() - started]
    by_stage = {stage: round(end - begin, 2) for (begin, stage), end in zip(stages, ends, strict=True)}
    verify = {result.stage: [result.max_abs_error, result.top1_agreement] for result in manifest.verify}
    memory = {"vm_hwm_bytes": status_bytes("VmHWM"), "anonymous_peak_bytes": peak.bytes, "at_rest_bytes": peak.first}
    memory["promised_bytes"] = promised
    seconds = {"seconds": round(perf_counter() - started, 1), "cpu_seconds": round(process_time(), 1)}
    return {**seconds, **memory, "seconds_by_stage": by_stage, "anonymous_by_stage": by_peak, "verify": verify}


def highest(known: dict[str, int], stages: list[tuple[float, str]], num_bytes: int) -> dict[str, int]:
    """The most bytes of the stage that is under way, those of now among them."""
    stage = stages[-1][1] if stages else "start"
    return {stage: max(known.get(stage, 0), num_bytes)}


class AnonymousPeak:
    """Highest RssAnon of this process while the block runs, read every 20 ms; `first` is VmRSS before it."""

    def __init__(self, note: Callable[[int], None]) -> None:
        """Tell `note` of every reading."""
        self._note = note

    def __enter__(self) -> "AnonymousPeak":
        self.bytes, self.first, self._done = 0, status_bytes("VmRSS"), threading.Event()
        self._watcher = threading.Thread(target=self._watch, daemon=True)
        self._watcher.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._watcher.join()

    def _watch(self) -> None:
        while not self._done.wait(0.02):
            found = status_bytes("RssAnon")
            self.bytes = max(self.bytes, found)
            self._note(found)


def status_bytes(name: str) -> int:
    """One entry of /proc/self/status."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))


def describe_bundle(bundle: Path, num_parameters: int, precision: str) -> dict[str, Any]:
    """Sizes on disk, against the checkpoint's numbers at the same precision where it is a float one."""
    files = {path.relative_to(bundle).as_posix(): path.stat().st_size for path in bundle.rglob("*") if path.is_file()}
    target = sum(size for name, size in files.items() if name.startswith("target/"))
    described: dict[str, Any] = {"bundle_bytes": sum(files.values()), "target_bytes": target}
    described["target_bits_per_parameter"] = round(8 * target / num_parameters, 3)
    if precision in BYTES_PER_NUMBER:
        described["target_over_checkpoint"] = round(target / (num_parameters * BYTES_PER_NUMBER[precision]), 4)
    return described


def drop_from_page_cache(bundle: Path) -> None:
    """Let the next reader go to the disk."""
    for path in bundle.rglob("*"):
        if path.is_file():
            handle = os.open(path, os.O_RDONLY)
            os.fsync(handle)
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(handle)


def load(options: argparse.Namespace) -> dict[str, Any]:
    """Load the bundle in this process and generate one token."""
    num_bytes = sum(path.stat().st_size for path in bundle_of(options).rglob("*") if path.is_file())
    started = perf_counter()
    with MirrorPipeline.load(bundle_of(options), device_map="cpu") as pipe:
        loaded = perf_counter() - started
        pipe.generate("x", max_new_tokens=1, ignore_eos=True, temperature=0.0, method="plain")
        first = perf_counter() - started
    sizes = {"bytes": num_bytes, "gb_per_second": round(num_bytes / loaded / 1e9, 2)}
    times = {"load_seconds": round(loaded, 2), "first_token_seconds": round(first, 2)}
    return times | sizes | {"vm_hwm_bytes": status_bytes("VmHWM")}


PARTS = {"make": make_checkpoints, "export": export, "load": load}

if __name__ == "__main__":
    main()
