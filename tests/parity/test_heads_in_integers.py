"""Heads are compared in the numbers that their stages hold, where links look tokens up in tables of another form."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from random_heads import save_head
from transformers import LlamaConfig, LlamaForCausalLM

from mirrorsd.export.bundle.journal import Journal
from mirrorsd.export.bundle.target_graphs import TargetPlan, write_target
from mirrorsd.export.checkpoints.checkpoint import open_checkpoint
from mirrorsd.export.checkpoints.head import open_head
from mirrorsd.export.checkpoints.loading import target_shape
from mirrorsd.export.checkpoints.weightless import open_model
from mirrorsd.export.verify.head import compare_heads
from mirrorsd.export.verify.target import TargetRun, stored_reference
from mirrorsd.export.weights.block_formats import choose_formats
from mirrorsd.families.heads import HeadConfig

VOCABULARY = 200
SIZES = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "intermediate_size": 96}


@pytest.mark.parametrize(
    ("hidden", "entries"),
    [
        (64, {"link": "gated", "vocabulary": "reduced", "num_logits": 150}),
        (64, {"link": "gated", "vocabulary": "low-rank", "head_rank": 24}),
        (64, {"link": "markov", "vocabulary": "own"}),
        (64, {"taps": (2,), "tap_norm": "each"}),
        (64, {"taps": (1,), "head_kind": "streaming", "adapter_rank": 8}),
        (40, {"link": "gated"}),  # the embedding is of floats, as its rows are no whole blocks
    ],
    ids=["fewer tokens", "low rank", "a table beside the head", "one tap", "one layer", "the target's"],
)
def test_a_head_is_compared_with_what_its_stage_holds(hidden: int, entries: dict[str, Any], tmp_path: Path) -> None:
    torch.manual_seed(5)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=hidden, num_hidden_layers=2, initializer_range=0.15, **SIZES
    )
    LlamaForCausalLM(config).save_pretrained(tmp_path / "target")  # type: ignore[no-untyped-call]
    sizes = {"num_heads": 2, "num_kv_heads": 1, "head_dim": 16, "intermediate_size": 96, "num_layers": 1}
    usual = {"head_kind": "block", "taps": (1, 2), "num_logits": VOCABULARY, "length": 2}
    given: Any = {**usual, "link_rank": 8 if "link" in entries else 0, **sizes, **entries}
    head_config = HeadConfig(hidden_size=hidden, vocab_size=VOCABULARY, **given)
    target = open_checkpoint(tmp_path / "target", "target")
    head = open_head(save_head(head_config, tmp_path / "head"), target)
    formats = choose_formats(
        "int8", head="auto", embedding="auto", block_size=None, is_symmetric=None, embedding_width=hidden
    )
    shape = target_shape(open_model(target).network, "int8")
    plan = TargetPlan(shape=shape, context=64, num_candidates=4, adapters={}, formats=formats, heads=(head,))
    write_target(open_model(target), plan, tmp_path, lambda stage, share: None, Journal(tmp_path, ""))
    ids = np.random.default_rng(1).integers(0, VOCABULARY, 50).tolist()
    run = TargetRun(tmp_path, plan, in_float32=True)
    (result,) = compare_heads(run, target, stored_reference(target, plan, ids), "random ids")
    assert result.max_relative_error < 1e-4
