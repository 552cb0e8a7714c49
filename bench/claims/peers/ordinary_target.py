"""A GGUF file as an ordinary checkpoint: its weights as floats, its tokenizer, its config.

    python bench/claims/peers/ordinary_target.py MODEL.gguf OUTPUT

The peers' exporters read folders. Weights are what the file's blocks say, so that every peer begins with the same ones.
"""

import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer


def main() -> None:
    """Write the folder."""
    file, output = (Path(word) for word in sys.argv[1:3])
    place: dict[str, Any] = {"pretrained_model_name_or_path": file.parent, "gguf_file": file.name}
    model = AutoModelForCausalLM.from_pretrained(**place, dtype=torch.float32)
    output.mkdir(parents=True)
    del model.config.quantization_config  # with it, transformers takes the floats for the file's blocks
    model.config.architectures = [type(model).__name__]  # by it llama.cpp's script knows the family
    model.config.save_pretrained(output)
    model.generation_config.save_pretrained(output)
    tied = {"lm_head.weight"} if model.config.tie_word_embeddings else set()
    weights = {name: weight.contiguous() for name, weight in model.state_dict().items() if name not in tied}
    save_file(weights, output / "model.safetensors", metadata={"format": "pt"})
    AutoTokenizer.from_pretrained(**place).save_pretrained(output)


if __name__ == "__main__":
    main()
