"""Mutated checkpoints: each is loaded as transformers loads it, or refused by an ExportError that says where.

    python tests/support/mutated_checkpoints.py --number 2000 --seed 1 --output mutated.json

Small random checkpoints of three families, as one file and as shards, get one fault each: in a value of `config.json`,
of the index or of a safetensors header, in its text, or in its bytes. What is accepted is compared with
`AutoModelForCausalLM.from_pretrained`: every parameter, and logits. What is refused must name the file, and is counted
by whether transformers loads it.
"""

import argparse
import json
import logging
import random
import shutil
import struct
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

from mirrorsd.export.checkpoints.checkpoint import open_checkpoint
from mirrorsd.export.checkpoints.weightless import WeightlessModel, open_model
from mirrorsd.families.experts import separate_experts
from mirrorsd.graphs.errors import ExportError

IDS = np.array([[3, 7, 1, 9]])
CONFIG, WEIGHTS, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
SIZES: dict[str, Any] = {"vocab_size": 40, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"intermediate_size": 48, "num_key_value_heads": 1, "head_dim": 16, "tie_word_embeddings": False},
    "qwen2": {"intermediate_size": 48, "num_key_value_heads": 2, "tie_word_embeddings": True},
    "gpt2": {"n_positions": 64, "tie_word_embeddings": False},
    "qwen3_moe": {
        "intermediate_size": 48,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "num_experts": 5,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "mlp_only_layers": [1],
    },
}
VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, 1, 2, 3, -1, 16, 2**31, 10**20, 0.5, -0.0, float("nan"), float("inf"), "", "linear", "8"),
    *("../model.safetensors", "\0", [], [1], [None], {}, {"a": 1}, {"rope_type": "linear"}, {"rope_type": 7}, [[]]),
    *({"rope_type": "linear", "factor": 2.0}, {"rope_type": "yarn", "factor": "4"}, ["full_attention"], "float16"),
)
MORE_ENTRIES = (
    *("rope_scaling", "rope_parameters", "rope_theta", "quantization_config", "sliding_window", "layer_types"),
    *("text_config", "transformers_weights", "torch_dtype", "attention_bias", "mlp_bias", "return_dict", "use_cache"),
    *("tie_word_embeddings", "configuration_files", "auto_map", "num_labels", "id2label", "partial_rotary_factor"),
    *("attn_implementation", "is_decoder", "pruned_heads", "add_cross_attention", "scale_attn_weights"),
)
LARGE = 10**6


class Mutation(NamedTuple):
    """What was changed: the file, in words where and how, and whether a huge number makes loading dangerous."""

    file: str
    what: str
    is_large: bool = False


class Verdict(NamedTuple):
    """`kind` is "same", "refused by both", "refused by us", or what must not be: all others."""

    kind: str
    message: str


ALLOWED = ("same", "refused by both", "refused by us", "refused, not tried")


def write_bases(folder: Path) -> list[Path]:
    """The checkpoints that are mutated: each family as one file and as two shards."""
    bases = []
    for family, own in FAMILIES.items():
        torch.manual_seed(1)
        whole, sharded = folder / family, folder / f"{family}-shards"
        config = AutoConfig.for_model(family, **(SIZES | own), bos_token_id=0, eos_token_id=1)
        AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(whole)  # type: ignore[no-untyped-call]
        shutil.copytree(whole, sharded)
        tensors = load_file(sharded / WEIGHTS)
        (sharded / WEIGHTS).unlink()
        where = {name: f"model-{number % 2}.safetensors" for number, name in enumerate(sorted(tensors))}
        for file in set(where.values()):
            of_it = {name: tensors[name] for name in where if where[name] == file}
            save_file(of_it, sharded / file, metadata={"format": "pt"})
        (sharded / INDEX).write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": where}))
        bases += [whole, sharded]
    return bases


def mutate(folder: Path, dice: random.Random) -> Mutation:
    """Put one fault into a checkpoint."""
    has_index = (folder / INDEX).is_file()
    kind = dice.choice(["value", "value", "value", "text", "header", "header", "bytes"])
    if kind == "value":
        file = dice.choice([CONFIG, CONFIG, INDEX]) if has_index else CONFIG
        return Mutation(file, *_change_document(folder / file, dice))
    if kind == "text":
        file = dice.choice([CONFIG, INDEX]) if has_index else CONFIG
        return Mutation(file, _change_bytes(folder / file, dice))
    weights = dice.choice(sorted(folder.glob("*.safetensors")))
    if kind == "header":
        return Mutation(weights.name, _change_header(weights, dice))
    return Mutation(weights.name, _change_bytes(weights, dice))


def _change_document(path: Path, dice: random.Random) -> tuple[str, bool]:
    document = json.loads(path.read_text())
    table = document
    if path.name == INDEX and dice.random() < 0.6:
        table = document["weight_map"]
    entry = dice.choice(sorted(table)) if path.name == INDEX or dice.random() < 0.7 else dice.choice(MORE_ENTRIES)
    if dice.random() < 0.15:
        table.pop(entry, None)
        what, value = f"without {entry}", None
    elif path.name == CONFIG and dice.random() < 0.2 and type(table.get(entry)) is int:
        value = table[entry] = table[entry] + dice.choice([-1, 1])
        what = f"{entry} = {value}"
    else:
        value = table[entry] = dice.choice(VALUES)
        what = f"{entry} = {value!r}"
    path.write_text(json.dumps(document))
    return what, isinstance(value, int | float) and abs(value) > LARGE


def _change_header(path: Path, dice: random.Random) -> str:
    raw = path.read_bytes()
    end = 8 + struct.unpack("<Q", raw[:8])[0]
    header = json.loads(raw[8:end])
    name, other = dice.sample(sorted(header), 2)
    field = dice.choice(["dtype", "shape", "data_offsets", "entry", "name", "__metadata__"])
    if field == "name":
        header[other + dice.choice(["", ".x"])] = header.pop(name)
        what = f"{name} renamed after {other}"
    elif field in ("entry", "__metadata__"):
        name = field if field == "__metadata__" else name
        header[name] = dice.choice(VALUES)
        what = f"{name} = {header[name]!r}"
    elif name == "__metadata__":
        header.pop(name)
        what = "without __metadata__"
    else:
        given = header[name][field]
        if isinstance(given, list) and given and dice.random() < 0.6:
            place = dice.randrange(len(given))
            given[place] = dice.choice([*VALUES, given[place] + 4, given[place] - 1])
        else:
            header[name][field] = dice.choice([*VALUES, "F16", "BF16", "I32", "F64", "F8_E4M3"])
        what = f"{name}.{field} = {header[name][field]!r}"
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + raw[end:])
    return what


def _change_bytes(path: Path, dice: random.Random) -> str:
    raw = bytearray(path.read_bytes())
    reach = min(len(raw), 400)
    place = dice.randrange(reach)
    how = dice.choice(["flip", "cut", "insert", "remove", "append", "empty", "twice"])
    if how == "flip":
        raw[place] ^= 1 << dice.randrange(8)
    elif how == "cut":
        del raw[dice.randrange(len(raw)) :]
    elif how == "insert":
        raw[place:place] = dice.choice([b"\xff", b"{", b"}", b'"', b",", b"0", b" ", b"\0"])
    elif how == "remove":
        del raw[place : place + dice.randrange(1, 9)]
    elif how == "append":
        raw += dice.choice([b"x", b"\n", b"}", bytes(16)])
    elif how == "empty":
        raw.clear()
    else:
        raw *= 2
    path.write_bytes(raw)
    return f"{how} at byte {place}"


def judge(folder: Path, mutation: Mutation) -> Verdict:
    """Load a checkpoint with our code and with transformers."""
    try:
        model = open_model(open_checkpoint(folder, "target"))
        logits = model.logits(IDS)
    except ExportError as error:
        return _judge_refusal(folder, mutation, str(error))
    except Exception as error:
        return Verdict("traceback", f"{type(error).__name__}: {error}")
    try:
        network = load_by_transformers(folder)
    except Exception as error:
        return Verdict("accepted alone", f"{type(error).__name__}: {error}")
    wrong = _difference(model, network, logits)
    return Verdict("different", wrong) if wrong else Verdict("same", "")


def _judge_refusal(folder: Path, mutation: Mutation, message: str) -> Verdict:
    if not any(name in message for name in (CONFIG, INDEX, ".safetensors", str(folder))):
        return Verdict("refused without a place", message)
    if mutation.is_large:
        return Verdict("refused, not tried", message)
    try:
        load_by_transformers(folder)
    except Exception:
        return Verdict("refused by both", message)
    return Verdict("refused by us", message)


def load_by_transformers(folder: Path) -> Any:
    """What transformers makes of a folder.

    Raises:
        Exception: whatever it raises; weights that it would fill with random numbers count as an error.
    """
    loader: Any = AutoModelForCausalLM
    network, report = loader.from_pretrained(
        folder, dtype=torch.float32, use_safetensors=True, output_loading_info=True, attn_implementation="eager"
    )
    if report["missing_keys"]:
        raise ValueError(f"missing {sorted(report['missing_keys'])}")
    with torch.no_grad():
        network(torch.from_numpy(IDS), use_cache=False).logits.numpy()
    return network.eval()


def _difference(model: WeightlessModel, network: Any, logits: Any) -> str:
    ours = dict(model.network.named_parameters(remove_duplicate=False))
    with separate_experts(network):
        theirs_by_name = dict(network.named_parameters(remove_duplicate=False))
    for name, parameter in theirs_by_name.items():
        if name not in ours or not torch.equal(model.stored[id(ours[name])].read(torch.float32), parameter):
            return f"other numbers for {name}"
    with torch.no_grad():
        theirs = network(torch.from_numpy(IDS), use_cache=False).logits.numpy()
    return "" if np.allclose(logits, theirs, rtol=1e-4, atol=1e-5, equal_nan=True) else "other logits"


def run(number: int, seed: int, tell: Callable[[int, Mutation, Verdict], None]) -> list[tuple[Mutation, Verdict]]:
    """Mutate and judge `number` checkpoints."""
    dice, found = random.Random(seed), []
    transformers_logging.set_verbosity(logging.CRITICAL)
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    with tempfile.TemporaryDirectory() as work:
        bases = write_bases(Path(work))
        for count in range(number):
            folder = Path(work) / "case"
            shutil.rmtree(folder, ignore_errors=True)
            shutil.copytree(dice.choice(bases), folder)
            mutation = mutate(folder, dice)
            found.append((mutation, judge(folder, mutation)))
            tell(count, *found[-1])
    return found


def main() -> None:
    """Judge, print and write the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--number", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()

    def tell(count: int, mutation: Mutation, verdict: Verdict) -> None:
        if verdict.kind not in ALLOWED:
            print(f"{count}: {mutation.file}: {mutation.what}: {verdict.kind}: {verdict.message[:300]}", flush=True)

    found = run(options.number, options.seed, tell)
    kinds = Counter(verdict.kind for _, verdict in found)
    print(dict(kinds))
    if options.output is not None:
        ours = [[m.file, m.what, v.message] for m, v in found if v.kind == "refused by us"]
        report = {"number": options.number, "seed": options.seed, "kinds": dict(kinds), "refused by us": ours}
        options.output.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    if not all(kind in ALLOWED for kind in kinds):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
