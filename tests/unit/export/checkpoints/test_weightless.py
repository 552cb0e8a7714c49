import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from mirrorsd.export.checkpoints.checkpoint import open_checkpoint
from mirrorsd.export.checkpoints.weightless import open_model
from mirrorsd.graphs.errors import ExportError

SIZES = {"vocab_size": 40, "hidden_size": 32, "num_attention_heads": 2, "num_hidden_layers": 2, "eos_token_id": 0}
IDS = torch.tensor([[3, 7, 1, 9]])


def _save(folder: Path, family: str, **sizes: object) -> torch.Tensor:
    torch.manual_seed(3)
    config = AutoConfig.for_model(family, **SIZES, bos_token_id=0, **sizes)
    network = AutoModelForCausalLM.from_config(config).eval()
    network.save_pretrained(folder)
    with torch.no_grad():
        return network(IDS).logits


@pytest.fixture
def llama(tmp_path: Path) -> tuple[Path, torch.Tensor]:
    logits = _save(tmp_path, "llama", intermediate_size=48, tie_word_embeddings=False)
    return tmp_path, logits


def test_weights_are_there_while_a_module_runs_and_at_no_other_time(llama: tuple[Path, torch.Tensor]) -> None:
    folder, expected = llama
    model = open_model(open_checkpoint(folder, "target"))
    with torch.no_grad():
        assert model.network(IDS).logits.isnan().all(), "a model without its weights computes NaN, nothing plausible"
        with model.on_demand():
            torch.testing.assert_close(model.network(IDS).logits, expected)
        with model.loaded(model.network):
            torch.testing.assert_close(model.network(IDS).logits, expected)
        with pytest.raises(IndexError), model.on_demand():
            model.network(IDS + 1000)
        assert model.network(IDS).logits.isnan().all()
    assert all(parameter.stride() == (0,) * parameter.ndim for parameter in model.network.parameters())


def test_tied_weights_are_one_and_names_without_the_base_prefix_are_found(tmp_path: Path) -> None:
    """GPT-2's published checkpoints say `wte.weight`, the model says `transformer.wte.weight` and `lm_head.weight`."""
    expected = _save(tmp_path, "gpt2", tie_word_embeddings=True)
    path = tmp_path / "model.safetensors"
    save_file({name.removeprefix("transformer."): tensor for name, tensor in load_file(path).items()}, path)
    model = open_model(open_checkpoint(tmp_path, "target"))
    assert model.network.lm_head.weight is model.network.transformer.wte.weight
    keys = {weight.key for weight in model.lazy_weights(model.network).values()}
    assert keys == set(load_file(path))
    with torch.no_grad(), model.on_demand():
        torch.testing.assert_close(model.network(IDS).logits, expected)


def test_a_config_that_does_not_fit_is_refused(llama: tuple[Path, torch.Tensor]) -> None:
    folder, _ = llama
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"intermediate_size": 64}))
    with pytest.raises(ExportError, match=r"proj.weight' has shape \(.*\), its config.json asks for \(.*64"):
        open_model(open_checkpoint(folder, "target"))
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 3}))
    with pytest.raises(ExportError, match=r"lacks 9 weights, for example 'model\.layers\.2"):
        open_model(open_checkpoint(folder, "target"))
