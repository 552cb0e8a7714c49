"""Drafts for a processor of sizes that few have: they are written, and say what the floats say."""

from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from mirrorsd.export.bundle.draft_ir import draft_graph
from mirrorsd.export.bundle.draft_onnx import write_draft_for_processors
from mirrorsd.export.checkpoints.checkpoint import open_checkpoint
from mirrorsd.export.checkpoints.loading import draft_shape
from mirrorsd.export.checkpoints.weightless import open_model
from mirrorsd.export.verify.draft import DraftRun, compare_draft

SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2}
VOCABULARY = 160


@pytest.mark.parametrize(
    ("precision", "sizes", "least_agreement", "look_up"),
    [
        ("int8-rows", {"intermediate_size": VOCABULARY // 2}, 0.8, "Gather"),  # gates and ups are a number a token
        ("int8-rows", {"hidden_size": VOCABULARY}, 0.8, "Gather"),  # so is a row
        ("int4-blocks", {"hidden_size": 96, "num_attention_heads": 6}, 0.4, "GatherBlockQuantized"),  # blocks of 32
        ("int4-blocks", {"hidden_size": 80, "num_attention_heads": 5, "num_key_value_heads": 1}, 0.4, "Gather"),
    ],
)
def test_any_sizes(precision: str, sizes: dict[str, Any], least_agreement: float, look_up: str, tmp_path: Path) -> None:
    torch.manual_seed(4)
    config = LlamaConfig(vocab_size=VOCABULARY, num_hidden_layers=1, initializer_range=0.15, **(SIZES | sizes))
    LlamaForCausalLM(config).save_pretrained(tmp_path)  # type: ignore[no-untyped-call]
    checkpoint = open_checkpoint(tmp_path, "draft")
    model = open_model(checkpoint)
    shape = draft_shape(model.network, None, target_vocab_size=VOCABULARY, num_candidates=8)
    graph = draft_graph(checkpoint, shape, None, context=64, num_input_ids=VOCABULARY)
    write_draft_for_processors(graph, shape, tmp_path / "draft.onnx", precision, 32)
    ids = np.random.default_rng(6).integers(0, VOCABULARY, 50).tolist()
    result = compare_draft(DraftRun(tmp_path / "draft.onnx", shape, 64), model, None, ids, "random ids")
    assert result.top1_agreement >= least_agreement
    assert look_up in {node.op_type for node in ir.load(tmp_path / "draft.onnx").graph}
