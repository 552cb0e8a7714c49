"""Train the storyteller's target for a given number of seconds.

    python train_target.py PACKED OUT --seconds 4500
    python train_target.py PACKED TWIN --seconds 1500 --decay-seconds 400 --exit-weight 0

`PACKED` is what `build_corpus.py` wrote. A run that was killed goes on where it was (at most two minutes are lost).
`OUT/pre_decay.pt` keeps model, optimisers and place in the data from just before the learning rate falls: copied to
`OUT/last.pt` of a new folder, it lets a longer training start there. `--exit-weight 0` makes a twin that was never
trained for an early exit.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
import typer
from storyteller_model import EXIT_WEIGHT, make_config, next_token_losses
from transformers import LlamaForCausalLM

from mirrorsd.training.run.optimizers import descend, make_optimizers, set_rate
from mirrorsd.training.run.schedule import WarmStableDecay
from mirrorsd.training.run.timed_run import RunConfig, TimedRun
from mirrorsd.training.text.token_stream import TokenStream

BATCH = (8, 512)
DECAY_BATCH = (4, 1024)  # the last part learns to use the whole context


def train(packed: Path, config: RunConfig, exit_weight: float = EXIT_WEIGHT) -> None:
    """Train, and print the held-back loss of every kind of text now and then."""
    torch.manual_seed(20)
    model = LlamaForCausalLM(make_config())
    optimizers = make_optimizers(model)
    text = TokenStream.open(packed / "train.npy")
    held_back = dict(np.load(packed / "held_back.npz"))
    timed = TimedRun(config, {"model": model, "text": text, **optimizers})
    losses_of = {is_decaying: torch.compile(next_token_losses, dynamic=False) for is_decaying in (False, True)}

    def step(share: float) -> tuple[int, dict[str, float]]:
        set_rate(optimizers.values(), share)
        is_decaying = timed.is_decaying()
        ids = text.take(*(DECAY_BATCH if is_decaying else BATCH))
        with torch.autocast("cpu", torch.bfloat16):
            loss, exit_loss = losses_of[is_decaying](model, ids, exit_weight > 0)
        descend(loss + exit_weight * exit_loss, model.parameters(), optimizers.values())
        return ids[:, 1:].numel(), {"loss": loss.item(), "exit_loss": exit_loss.item()}

    timed.run(step, lambda: print("held back:", check(model, held_back), flush=True))


@torch.no_grad()
def check(model: LlamaForCausalLM, held_back: dict[str, np.ndarray], sequences: int = 4) -> str:
    """Return the held-back loss per kind of text, at the last layer and at the exit layer."""
    found = []
    for kind, tokens in held_back.items():
        text = TokenStream(tokens)
        ids = text.take(min(sequences, (len(text) - 1) // BATCH[1]) or 1, min(BATCH[1], len(text) - 1))
        with torch.autocast("cpu", torch.bfloat16):
            loss, exit_loss = next_token_losses(model, ids)
        found.append(f"{kind} {loss.item():.3f}/{exit_loss.item():.3f}")
    return ", ".join(found)


def main(
    packed: Path,
    out: Path,
    seconds: float = 4500.0,
    decay_seconds: float = 1000.0,
    deadline: float | None = None,
    threads: int = 2,
    exit_weight: float = EXIT_WEIGHT,
) -> None:
    """Train; `deadline` (seconds since 1970) shortens the run where pauses have made it late."""
    torch.set_num_threads(threads)
    schedule = WarmStableDecay(budget_s=seconds, decay_s=decay_seconds)
    train(packed, RunConfig(out=out, schedule=schedule, deadline=deadline, check_every_s=600.0), exit_weight)


if __name__ == "__main__":
    typer.run(main)
