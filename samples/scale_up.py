"""Make a checkpoint as expensive as a larger one without changing a single logit ("cost-scaled").

    python samples/scale_up.py TARGET OUT --width 3 --depth 2

`--width F` multiplies hidden size, heads and MLP width: the new hidden dimensions stay zero, new heads and MLP units
compute for real but reach the residual stream through zero weights. `--depth F` follows every layer with `F - 1` layers
whose output projections are zero. Speed measured on such a model is real; its quality is that of the small one.
"""

import argparse
import json
import re
import shutil
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

ZERO_ROWS = ("o_proj.weight", "down_proj.weight", "o_proj.bias", "down_proj.bias", ".up.weight")
INTO_RANK = (".down.weight", ".last.weight", ".earlier.weight")
NORMS = ("input_layernorm.weight", "post_attention_layernorm.weight", "model.norm.weight")
WIDENED = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads")


def widen(name: str, tensor: torch.Tensor, hidden: int, width: int) -> torch.Tensor:
    """One tensor of the wider model: the old values in the corner, zeros where they could change the result."""
    if name.endswith(NORMS):  # the mean square now divides by `width` times as many dimensions
        return torch.cat([tensor * width**-0.5, tensor.new_ones(hidden * (width - 1))])
    if name.endswith(("q_norm.weight", "k_norm.weight")):
        return tensor
    is_vocabulary = name.endswith(("embed_tokens.weight", "lm_head.weight", "stream_embeddings"))
    is_into, is_up = name.endswith(INTO_RANK), name.endswith(".up.weight")
    rows = tensor.shape[0] * (1 if is_vocabulary or is_into else width)
    shape = (rows, *(size * (1 if is_up else width) for size in tensor.shape[1:]))
    wide = torch.randn(shape, generator=torch.Generator().manual_seed(len(name)), dtype=torch.float32) * 0.02
    old_rows, old_columns = tensor.shape[0], tensor.shape[-1]
    if tensor.ndim == 2:
        is_everywhere = is_vocabulary or is_into or name.endswith(ZERO_ROWS)
        wide[: None if is_everywhere else old_rows, old_columns:] = 0
    if name.endswith(ZERO_ROWS):
        wide[old_rows:] = 0
    wide[:old_rows, ..., : old_columns if tensor.ndim == 2 else None] = tensor.float()
    return wide


def deepen(tensors: dict[str, torch.Tensor], depth: int) -> dict[str, torch.Tensor]:
    """Every layer followed by `depth - 1` layers that add nothing to the residual stream."""
    deep = {}
    for name, tensor in tensors.items():
        match = re.match(r"(.*(?:layers|adapters)\.)(\d+)(\..*)", name)
        for copy in range(depth if match else 1):
            new_name = f"{match[1]}{int(match[2]) * depth + copy}{match[3]}" if match else name
            is_silent = copy > 0 and name.endswith(ZERO_ROWS)
            deep[new_name] = torch.zeros_like(tensor) if is_silent else tensor.roll(copy, 0).clone()  # no two equal
    return deep


def scale_up(source: Path, output: Path, width: int, depth: int) -> None:
    """Write the larger checkpoint, its exit adapters and everything else of the folder."""
    shutil.copytree(source, output, ignore=shutil.ignore_patterns("*.safetensors", "exit_coverage.json"))
    config = AutoConfig.from_pretrained(source)
    hidden, layers = config.hidden_size, config.num_hidden_layers
    document = json.loads((source / "config.json").read_text(encoding="utf-8"))
    document |= {name: getattr(config, name) * width for name in WIDENED}
    document |= {"num_hidden_layers": layers * depth, "rms_norm_eps": config.rms_norm_eps / width, "dtype": "float32"}
    document["head_dim"] = getattr(config, "head_dim", None) or hidden // config.num_attention_heads
    document.pop("layer_types", None)
    (output / "config.json").write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    tensors = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).state_dict()
    if document.get("tie_word_embeddings"):
        tensors.pop("lm_head.weight", None)
    wide = {name: widen(name, tensor, hidden, width) for name, tensor in tensors.items()}
    save_file(deepen(wide, depth), output / "model.safetensors", metadata={"format": "pt"})
    adapters = source / "exit_adapters.safetensors"
    if adapters.is_file():
        wide = {name: widen(name, tensor, hidden, width).contiguous() for name, tensor in load_file(adapters).items()}
        moved = {re.sub(r"\d+", lambda m: str(int(m[0]) * depth), name, count=1): t for name, t in wide.items()}
        save_file(moved, output / adapters.name, metadata={"format": "mirrorsd-exit-1"})
    streams = source / "streams.safetensors"
    if streams.is_file():
        with safe_open(streams, framework="pt") as file:
            metadata = file.metadata()
        num_stream_layers = int(metadata["num_stream_layers"]) * depth
        wide = {name: widen(name, tensor, hidden, width) for name, tensor in load_file(streams).items()}
        kept = {n: t for n, t in deepen(wide, depth).items() if int(re.sub(r"\D", "", n) or 0) <= num_stream_layers}
        metadata["num_stream_layers"] = str(num_stream_layers)
        save_file(kept, output / streams.name, metadata=metadata)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("source", type=Path)
    parser.add_argument("output", type=Path)
    parser.add_argument("--width", type=int, default=3)
    parser.add_argument("--depth", type=int, default=1)
    options = parser.parse_args()
    scale_up(options.source, options.output, options.width, options.depth)
