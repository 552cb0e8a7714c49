"""Let the target write the text for draft and exits.

    python write_text.py TARGET PACKED OUT --count 9000 --part 0 --parts 2 &
    python write_text.py TARGET PACKED OUT --count 9000 --part 1 --parts 2
    python write_text.py TARGET PACKED OUT_HELD_BACK --held-back --count 400

Prompts are cut from the training mix, or with `--held-back` from documents that no training saw; those are continued
greedily. One process per core is faster than one process with several threads. Finished batches survive a kill.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
import typer
from story_tokenizer import ASSISTANT, BOS, END, SPECIAL_TOKENS
from transformers import AutoModelForCausalLM

from mirrorsd.training.self_prompts import PromptRules, cut_prompts
from mirrorsd.training.self_text import SelfTextConfig, write_self_text

#: Kinds that would otherwise fill the held-back prompts with one-line answers.
SHORT_KINDS = ("short_qa", "sums")


def read_stream(packed: Path, held_back: bool) -> np.ndarray:
    """Return the token stream that prompts are cut from."""
    if not held_back:
        return np.load(packed / "train.npy")
    with np.load(packed / "held_back.npz") as kinds:
        return np.concatenate([kinds[kind][: 1500 if kind in SHORT_KINDS else None] for kind in kinds])


def main(
    target: Path,
    packed: Path,
    out: Path,
    count: int = 9000,
    held_back: bool = False,
    part: int = 0,
    parts: int = 1,
    threads: int = 1,
) -> None:
    """Write the text."""
    torch.set_num_threads(threads)
    rules = PromptRules(bos=SPECIAL_TOKENS.index(BOS), assistant=SPECIAL_TOKENS.index(ASSISTANT))
    prompts = cut_prompts(read_stream(packed, held_back), rules, count, seed=20)
    end = SPECIAL_TOKENS.index(END)
    if held_back:  # single precision, as it will be measured
        model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
        config = SelfTextConfig(end=end, max_new_tokens=128, temperatures=(0.0,))
    else:
        model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.bfloat16)
        config = SelfTextConfig(end=end, batch=128)
    write_self_text(model, prompts, out, config, (part, parts))


if __name__ == "__main__":
    typer.run(main)
