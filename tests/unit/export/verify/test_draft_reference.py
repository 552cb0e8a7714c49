"""What a draft is held against, where it is no numbers."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

from mirrorsd.export.checkpoints.checkpoint import open_checkpoint
from mirrorsd.export.checkpoints.weightless import open_model
from mirrorsd.export.verify.draft import compare_draft
from mirrorsd.graphs.errors import ExportError

SIZES: dict[str, Any] = {"vocab_size": 40, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1}
HEADS: dict[str, Any] = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "eos_token_id": 0}


def test_weights_that_are_no_numbers_are_no_wrong_graph(tmp_path: Path) -> None:
    LlamaForCausalLM(LlamaConfig(**SIZES, **HEADS)).save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.layers.0.mlp.up_proj.weight"][3, 5] = torch.nan
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    model = open_model(open_checkpoint(tmp_path, "draft"))
    run: Any = SimpleNamespace(shape=SimpleNamespace(vocab_size=40))
    with pytest.raises(ExportError, match="the draft gives log-probabilities that are no numbers in PyTorch too"):
        compare_draft(run, model, None, list(range(1, 12)), "")
