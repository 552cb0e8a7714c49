"""Cut a draft out of a target: its first and last layers, with its own embedding, head and tokenizer.

    python samples/cut_draft.py TARGET OUT --first 3 --last 3

Works for every Hugging Face folder that is laid out like Llama. Untrained, such a draft is rarely right; it needs no
second model to try a target with, and `mirrorsd train draft --from-model OUT` goes on from it.
"""

import argparse
import shutil
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

SMALL_FILES = ("tokenizer*", "special_tokens_map.json", "chat_template.jinja", "LICENSE*", "README.md")


def cut(target: Path, out: Path, first: int, last: int) -> None:
    """Write the model of the first `first` and the last `last` layers of `target` into the folder `out`.

    Raises:
        SystemExit: the target has fewer layers.
    """
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    layers, num_layers = model.model.layers, model.config.num_hidden_layers
    if first < 1 or last < 0 or first + last > num_layers:
        raise SystemExit(f"{target} has {num_layers} layers; --first {first} and --last {last} do not fit")
    kept = [*range(first), *range(num_layers - last, num_layers)]
    model.model.layers = torch.nn.ModuleList(layers[number] for number in kept)
    if getattr(model.config, "layer_types", None) is not None:
        model.config.layer_types = [model.config.layer_types[number] for number in kept]
    model.config.num_hidden_layers = len(kept)
    model.save_pretrained(out)
    for path in (path for pattern in SMALL_FILES for path in target.glob(pattern)):
        shutil.copy(path, out)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", type=Path, help="Hugging Face folder")
    parser.add_argument("out", type=Path, help="the folder to write")
    parser.add_argument("--first", type=int, default=3)
    parser.add_argument("--last", type=int, default=3)
    asked = parser.parse_args()
    cut(asked.target, asked.out, asked.first, asked.last)
