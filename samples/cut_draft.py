"""Cut a draft out of a target: its first and last layers, with its own embedding, head and tokenizer.

    python samples/cut_draft.py TARGET OUT --first 3 --last 3

TARGET is a Hugging Face folder or a GGUF file of a model that is laid out like Llama. Untrained, such a draft is rarely
right; it needs no second model to try a target with, and `mirrorsd train draft --from-model OUT` goes on from it.
"""

import argparse
import shutil
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

SMALL_FILES = ("tokenizer*", "special_tokens_map.json", "chat_template.jinja", "LICENSE*", "README.md")


def cut(target: Path, out: Path, first: int, last: int) -> None:
    """Write the model of the first `first` and the last `last` layers of `target` into the folder `out`.

    Raises:
        SystemExit: there is no such target, it is `out` itself, laid out otherwise, or has fewer layers.
    """
    if out.resolve() == target.resolve():
        raise SystemExit(f"{out} is the target itself, which would be lost; give another folder as OUT")
    if not target.exists():
        raise SystemExit(f"{target} does not exist; give a Hugging Face folder or a GGUF file")
    is_file = target.is_file()
    place: dict[str, Any] = {"gguf_file": target.name} if is_file else {}
    folder = target.parent if is_file else target
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **place)
    if is_file:  # transformers marks it as quantised, and would not save it
        whole = type(model)(model.config)
        whole.load_state_dict(model.state_dict())
        del whole.config.quantization_config
        model = whole
    if not isinstance(getattr(getattr(model, "model", None), "layers", None), torch.nn.ModuleList):
        raise SystemExit(f"{target} is a {model.config.model_type}, which is not laid out like Llama")
    num_layers = model.config.num_hidden_layers
    if first < 1 or last < 0 or first + last > num_layers:
        raise SystemExit(f"{target} has {num_layers} layers; --first {first} and --last {last} do not fit")
    kept = [*range(first), *range(num_layers - last, num_layers)]
    model.model.layers = torch.nn.ModuleList(model.model.layers[number] for number in kept)
    for entry in ("layer_types", "no_rope_layers"):  # the second is SmolLM3's
        if getattr(model.config, entry, None) is not None:
            setattr(model.config, entry, [getattr(model.config, entry)[number] for number in kept])
    model.config.num_hidden_layers = len(kept)
    model.save_pretrained(out)
    if is_file:
        AutoTokenizer.from_pretrained(folder, **place).save_pretrained(out)
        return
    for path in (path for pattern in SMALL_FILES for path in target.glob(pattern)):
        shutil.copy(path, out)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", type=Path, help="Hugging Face folder, or GGUF file")
    parser.add_argument("out", type=Path, help="the folder to write")
    parser.add_argument("--first", type=int, default=3)
    parser.add_argument("--last", type=int, default=3)
    asked = parser.parse_args()
    cut(asked.target, asked.out, asked.first, asked.last)
