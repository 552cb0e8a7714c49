"""Make a plain Hugging Face folder of a Llama-like model that was published as a GGUF file.

    python samples/from_gguf.py FOLDER/MODEL.gguf OUT

Needs `pip install gguf accelerate` beside the export's packages. Quantised weights are written as the floats they stand
for, so the folder is the model of the file, not the one that it was made of.
"""

import argparse
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer


def convert(file: Path, out: Path) -> None:
    """Write weights in float32, tokenizer, chat template and generation defaults into the folder `out`."""
    given = {"pretrained_model_name_or_path": file.parent, "gguf_file": file.name}
    read = AutoModelForCausalLM.from_pretrained(**given, dtype=torch.float32)
    del read.config.quantization_config  # it forbids saving
    plain = type(read)(read.config)
    plain.load_state_dict(read.state_dict())
    plain.generation_config = read.generation_config
    plain.save_pretrained(out)
    AutoTokenizer.from_pretrained(**given).save_pretrained(out)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path, help="the GGUF file")
    parser.add_argument("out", type=Path, help="the folder to write")
    asked = parser.parse_args()
    convert(asked.file, asked.out)
