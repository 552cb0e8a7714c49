"""Write a checkpoint of the target as an ordinary model folder in half precision.

    python save_target.py CHECKPOINT PACKED OUT

Prints the held-back loss before and after rounding, so that harm done by half precision would be seen.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import torch
import typer
from storyteller_model import make_config
from train_target import check
from transformers import AutoModelForCausalLM, LlamaForCausalLM

from mirrorsd.training.run.checkpoints import load_checkpoint


def copy_tokenizer(packed: Path, out: Path) -> None:
    """Put the tokenizer's files and the generation settings into a model folder."""
    for file in (packed / "tokenizer").iterdir():
        shutil.copyfile(file, out / file.name)
    config = make_config()
    settings = {
        "bos_token_id": config.bos_token_id,
        "eos_token_id": config.eos_token_id,
        "pad_token_id": config.pad_token_id,
    }
    (out / "generation_config.json").write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")


def main(checkpoint: Path, packed: Path, out: Path) -> None:
    """Write the folder and compare it with the checkpoint."""
    state = load_checkpoint(checkpoint)
    if state is None:
        raise typer.BadParameter(f"{checkpoint} does not exist; train the target first")
    model = LlamaForCausalLM(make_config())
    model.load_state_dict(state["model"])
    held_back = dict(np.load(packed / "held_back.npz"))
    print(f"step {state['step']}, {state['tokens'] / 1e6:.2f} M tokens, {state['trained_s']:.0f} s of training")
    print("single precision:", check(model, held_back, sequences=24))
    model.to(torch.float16).save_pretrained(out)
    copy_tokenizer(packed, out)
    rounded = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    print("half precision:  ", check(rounded, held_back, sequences=24))


if __name__ == "__main__":
    typer.run(main)
