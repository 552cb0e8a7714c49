"""Cut a draft out of a target: its first and last layers, with its own embedding, head and tokenizer.

    python samples/cut_draft.py TARGET OUT --first 3 --last 3

TARGET is a Hugging Face folder or a GGUF file of a model that is laid out like Llama. Untrained, such a draft is rarely
right; it needs no second model to try a target with, and `mirrorsd train draft --from-model OUT` goes on from it.
"""

import argparse
import shutil
import sys
from pathlib import Path
from typing import Any

import torch

from mirrorsd.export.checkpoints.checkpoint import open_checkpoint
from mirrorsd.graphs.errors import MirrorError
from mirrorsd.training.models.whole_model import load_whole

SMALL_FILES = ("tokenizer*", "special_tokens_map.json", "chat_template.jinja", "LICENSE*", "README.md")


def cut(target: Path, out: Path, first: int, last: int) -> None:
    """Write the model of the first `first` and the last `last` layers of `target` into the folder `out`.

    Raises:
        MirrorError: the target is no model that can be read.
        SystemExit: it has fewer layers, or is laid out otherwise.
    """
    checkpoint = open_checkpoint(target, "target")
    num_layers = int(checkpoint.config["num_hidden_layers"])
    if first < 1 or last < 0 or first + last > num_layers:
        raise SystemExit(f"{target} has {num_layers} layers; --first {first} and --last {last} do not fit")
    model: Any = load_whole(target)
    if not isinstance(getattr(getattr(model, "model", None), "layers", None), torch.nn.ModuleList):
        raise SystemExit(f"{target} is of the family {checkpoint.source.family}, which is not laid out like Llama")
    kept = [*range(first), *range(num_layers - last, num_layers)]
    model.model.layers = torch.nn.ModuleList(model.model.layers[number] for number in kept)
    if getattr(model.config, "layer_types", None) is not None:
        model.config.layer_types = [model.config.layer_types[number] for number in kept]
    model.config.num_hidden_layers = len(kept)
    model.save_pretrained(out)
    for path in (path for pattern in SMALL_FILES for path in checkpoint.folder.glob(pattern)):
        shutil.copy(path, out)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", type=Path, help="Hugging Face folder, or GGUF file")
    parser.add_argument("out", type=Path, help="the folder to write")
    parser.add_argument("--first", type=int, default=3)
    parser.add_argument("--last", type=int, default=3)
    asked = parser.parse_args()
    try:
        cut(asked.target, asked.out, asked.first, asked.last)
    except MirrorError as error:
        sys.exit(f"error: {error}")
