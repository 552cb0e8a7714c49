"""Distil the storyteller's draft.

    python train_draft.py TARGET TEXT TEXT_HELD_BACK PACKED WORK OUT --seconds 1300

`WORK` holds checkpoints and the losses (`losses.csv`, `losses.png`); `OUT` becomes the draft's folder.
"""

from __future__ import annotations

from pathlib import Path

import torch
import typer
from save_target import copy_tokenizer
from storyteller_model import make_config
from transformers import AutoModelForCausalLM, LlamaForCausalLM

from mirrorsd.training.distill_draft import DistillConfig, distill_draft, embed_like_target
from mirrorsd.training.loss_curve import plot_losses
from mirrorsd.training.schedule import WarmStableDecay
from mirrorsd.training.self_text import cut_before_loop, join_texts, load_texts
from mirrorsd.training.streaming_draft import StreamingDraft
from mirrorsd.training.timed_run import LOSSES_FILE, RunConfig
from mirrorsd.training.token_stream import TokenStream

LOOP_TOKENS = 24


def make_draft(target: LlamaForCausalLM) -> StreamingDraft:
    """Return the untrained draft: three layers, three streams in the top two."""
    torch.manual_seed(21)
    base = LlamaForCausalLM(make_config(hidden=256, layers=3, heads=4, intermediate=640))
    draft = StreamingDraft(base, num_streams=3, num_stream_layers=2)
    embed_like_target(draft, target)
    return draft


def open_text(folder: Path) -> TokenStream:
    """Read what the target wrote, with the greater part of its loops left out (they teach nothing new)."""
    texts = [cut_before_loop(text, keep=LOOP_TOKENS) for text in load_texts(folder)]
    tokens = join_texts(texts)
    print(f"{folder.name}: {len(texts)} texts, {len(tokens) / 1e6:.2f} M tokens", flush=True)
    return TokenStream(tokens)


def main(
    target: Path,
    text: Path,
    held_back: Path,
    packed: Path,
    work: Path,
    out: Path,
    seconds: float = 1300.0,
    decay_seconds: float = 450.0,
    deadline: float | None = None,
    threads: int = 2,
) -> None:
    """Distil and save."""
    torch.set_num_threads(threads)
    teacher = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval()
    draft = make_draft(teacher)
    streams = (open_text(text), open_text(held_back))
    schedule = WarmStableDecay(budget_s=seconds, warm_s=30.0, decay_s=decay_seconds)
    distill_draft(teacher, draft, streams, RunConfig(out=work, schedule=schedule, deadline=deadline), DistillConfig())
    plot_losses(work / LOSSES_FILE, work / "losses.png")
    draft.save(out)
    copy_tokenizer(packed, out)


if __name__ == "__main__":
    typer.run(main)
