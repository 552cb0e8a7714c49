"""Train the exit adapters of the storyteller's target and measure the coverage of its exits.

    python train_exits.py TARGET TEXT TEXT_HELD_BACK WORK --seconds 240

Writes `exit_adapters.safetensors` and `exit_coverage.json` beside the target's weights.
"""

from __future__ import annotations

from pathlib import Path

import torch
import typer
from transformers import AutoModelForCausalLM

from mirrorsd.training.exit_adapter import load_adapters, make_adapters, save_adapters, train_adapters
from mirrorsd.training.exit_coverage import measure_coverage, write_coverage
from mirrorsd.training.schedule import WarmStableDecay
from mirrorsd.training.self_text import cut_before_loop, join_texts, load_texts
from mirrorsd.training.timed_run import RunConfig
from mirrorsd.training.token_stream import TokenStream


def main(
    target: Path,
    text: Path,
    held_back: Path,
    work: Path,
    layers: str = "3,4,5",
    rank: int = 64,
    seconds: float = 240.0,
    deadline: float | None = None,
    threads: int = 2,
) -> None:
    """Train, save, measure."""
    torch.set_num_threads(threads)
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval()
    adapters = make_adapters(model.config.hidden_size, map(int, layers.split(",")), rank)
    schedule = WarmStableDecay(budget_s=seconds, warm_s=5.0, decay_s=seconds / 2)
    stream = TokenStream(join_texts(load_texts(text), seed=1))
    train_adapters(
        model, adapters, stream, RunConfig(out=work, schedule=schedule, deadline=deadline, save_every_s=60.0)
    )
    save_adapters(target, adapters)
    texts = [cut_before_loop(text) for text in load_texts(held_back)]
    coverage = measure_coverage(model, load_adapters(target), texts)
    write_coverage(
        target, coverage, f"{len(texts)} held-back prompts, continued greedily by the target, before loops begin"
    )
    for layer, kinds in coverage["layers"].items():
        print(f"exit after layer {layer}: {kinds}")


if __name__ == "__main__":
    typer.run(main)
