"""Which tensors and files a checkpoint really uses: those that transformers loads from the folder."""

import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from mirrorsd.export.checkpoints.checkpoint import open_checkpoint
from mirrorsd.export.checkpoints.weightless import open_model
from mirrorsd.graphs.errors import ExportError

Tensors = dict[str, torch.Tensor]
SIZES: dict[str, Any] = {"vocab_size": 40, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
HEADS: dict[str, Any] = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "eos_token_id": 0}
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A Llama whose head is not its embedding."""
    torch.manual_seed(3)
    LlamaForCausalLM(LlamaConfig(**SIZES, **HEADS, tie_word_embeddings=False)).save_pretrained(tmp_path)
    return tmp_path


def change_tensors(folder: Path, change: Callable[[Tensors], Tensors]) -> None:
    path = folder / "model.safetensors"
    save_file(change(load_file(path)), path, metadata={"format": "pt"})


def configure(folder: Path, **values: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def check_is_what_transformers_loads(folder: Path, *, is_tied: bool) -> None:
    """Every parameter of ours holds the numbers of the one that transformers loads."""
    model = open_model(open_checkpoint(folder, "target"))
    original: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert (model.network.lm_head.weight is model.network.get_input_embeddings().weight) == is_tied
    theirs = dict(original.named_parameters(remove_duplicate=False))
    ours = dict(model.network.named_parameters(remove_duplicate=False))
    assert ours.keys() == theirs.keys()
    for name, parameter in ours.items():
        assert torch.equal(model.stored[id(parameter)].read(torch.float32), theirs[name]), name


def doubled_head(tensors: Tensors) -> Tensors:
    return tensors | {HEAD: tensors[EMBEDDING].clone()}


def one_row_differs(tensors: Tensors) -> Tensors:
    head = tensors[EMBEDDING].clone()
    head[-1, -1] += 1
    return tensors | {HEAD: head}


@pytest.mark.parametrize(
    ("change", "is_tied"),
    [
        (lambda tensors: tensors, False),
        (doubled_head, True),
        (one_row_differs, False),
        (lambda tensors: {name: tensor for name, tensor in tensors.items() if name != HEAD}, True),
        (lambda tensors: {name: tensor for name, tensor in tensors.items() if name != EMBEDDING}, True),
        (lambda tensors: doubled_head(tensors) | {HEAD: tensors[EMBEDDING].double()}, True),
        (lambda tensors: doubled_head(tensors) | {HEAD: tensors[EMBEDDING].half()}, False),
        (lambda tensors: {name.removeprefix("model."): tensor for name, tensor in tensors.items()}, False),
    ],
    ids=["other", "equal", "one row", "no head", "no embedding", "equal in F64", "rounded", "without prefix"],
)
def test_a_head_is_tied_where_its_numbers_are_those_of_the_embedding(
    folder: Path, change: Callable[[Tensors], Tensors], is_tied: bool
) -> None:
    change_tensors(folder, change)
    configure(folder, tie_word_embeddings=True)
    check_is_what_transformers_loads(folder, is_tied=is_tied)


def test_a_family_that_ties_by_default_is_untied_too(tmp_path: Path) -> None:
    """config.json says nothing of a tie; GPT-2's weights have another name for the embedding."""
    torch.manual_seed(3)
    config = GPT2Config(vocab_size=40, n_embd=32, n_layer=2, n_head=2, n_positions=16, tie_word_embeddings=False)
    GPT2LMHeadModel(config).save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    document = json.loads(path.read_text())
    del document["tie_word_embeddings"]
    path.write_text(json.dumps(document))
    check_is_what_transformers_loads(tmp_path, is_tied=False)


def test_an_equal_head_of_a_config_without_a_tie_stays_its_own(folder: Path) -> None:
    change_tensors(folder, doubled_head)
    check_is_what_transformers_loads(folder, is_tied=False)


@pytest.mark.parametrize("double", ["lm_head.weight", "model.norm.weight", "model.layers.1.mlp.up_proj.weight"])
def test_of_two_names_for_one_parameter_the_one_counts_that_counts_for_transformers(folder: Path, double: str) -> None:
    """With the prefix, or with one prefix too many, beside the right name."""
    other = f"model.{double}" if double.startswith("lm_head") else double.removeprefix("model.")
    change_tensors(
        folder, lambda tensors: tensors | {other: tensors[double] + 1, f"model.{double}": tensors[double] + 2}
    )
    check_is_what_transformers_loads(folder, is_tied=False)


@pytest.mark.parametrize(
    ("name", "is_told"),
    [
        ("model.layers.7.mlp.up_proj.weight", True),
        ("layers.2.mlp.up_proj.weight", True),
        ("model.layers.0.self_attn.q_proj.bias", True),
        ("model.norm.bias", True),
        ("ids", False),
        ("visual.layers.9.weight", False),
        ("model.rotary_emb.inv_freq", False),
        ("model.layers.0.self_attn.rotary_emb.inv_freq", False),
    ],
)
def test_tensors_that_no_parameter_uses_are_left_and_told_of(folder: Path, name: str, is_told: bool) -> None:
    """Those of other parts are left without a word."""
    change_tensors(folder, lambda tensors: tensors | {name: torch.ones(2)})
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        open_model(open_checkpoint(folder, "target"))
    words = [str(one.message) for one in told if "no place for" in str(one.message)]
    assert len(words) == is_told and all(name in message for message in words)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        check_is_what_transformers_loads(folder, is_tied=False)


def write_shards(folder: Path, tensors: Tensors, **index: object) -> None:
    names = sorted(tensors)
    shards = {f"model-{half + 1}.safetensors": names[half::2] for half in range(2)}
    for file, of_it in shards.items():
        save_file({name: tensors[name] for name in of_it}, folder / file, metadata={"format": "pt"})
    weight_map = {name: file for file, of_it in shards.items() for name in of_it}
    document = {"metadata": {}, "weight_map": weight_map} | index
    (folder / "model.safetensors.index.json").write_text(json.dumps(document))


def other_numbers(folder: Path) -> Tensors:
    return {name: tensor + 1 for name, tensor in load_file(folder / "model.safetensors").items()}


def test_a_whole_file_goes_before_the_shards_beside_it(folder: Path) -> None:
    write_shards(folder, other_numbers(folder))
    check_is_what_transformers_loads(folder, is_tied=False)


def test_shards_are_read_without_a_whole_file(folder: Path) -> None:
    write_shards(folder, other_numbers(folder))
    (folder / "model.safetensors").unlink()
    check_is_what_transformers_loads(folder, is_tied=False)


@pytest.mark.parametrize("named", ["model.safetensors.index.json", "model-whole.safetensors"])
def test_the_file_that_the_config_names_goes_before_all(folder: Path, named: str) -> None:
    write_shards(folder, other_numbers(folder))
    others = {name: tensor + 2 for name, tensor in load_file(folder / "model.safetensors").items()}
    save_file(others, folder / "model-whole.safetensors", metadata={"format": "pt"})
    configure(folder, transformers_weights=named)
    check_is_what_transformers_loads(folder, is_tied=False)


def test_torch_s_own_files_beside_safetensors_do_not_matter(folder: Path) -> None:
    (folder / "pytorch_model.bin").write_bytes(b"no pickle")
    check_is_what_transformers_loads(folder, is_tied=False)


def test_a_quantization_config_of_null_is_none(folder: Path) -> None:
    configure(folder, quantization_config=None)
    check_is_what_transformers_loads(folder, is_tied=False)


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ([], "holds no JSON object"),
        ({"metadata": {}}, "has nothing as 'weight_map'; expected a table"),
        ({"metadata": {}, "weight_map": None}, "has None as 'weight_map'"),
        ({"metadata": {}, "weight_map": ["model.safetensors"]}, "as 'weight_map'; expected a table"),
        ({"metadata": {}, "weight_map": {}}, "has an empty 'weight_map'"),
        ({"metadata": {}, "weight_map": {"a": 3}}, r"has 3 as 'weight_map\.a'; expected a \*\.safetensors file"),
        ({"metadata": {}, "weight_map": {"a": ["x.safetensors"]}}, r"as 'weight_map\.a'"),
        ({"metadata": {}, "weight_map": {"a": "x.bin"}}, r"has 'x\.bin' as 'weight_map\.a'"),
        ({"metadata": {}, "weight_map": {"a": "../x.safetensors"}}, r"names '\.\./x\.safetensors', a file outside"),
        ({"metadata": {}, "weight_map": {"a": "/x.safetensors"}}, r"names '/x\.safetensors', a file outside"),
        ({"metadata": {}, "weight_map": {"a": "C:\\x.safetensors"}}, "a file outside"),
        ({"metadata": {}, "weight_map": {"a": "gone.safetensors"}}, r"lacks gone\.safetensors, which its index names"),
        ({"metadata": {}, "weight_map": {"a": "x" * 5000 + ".safetensors"}}, "which its index names"),
        ({"metadata": {}, "weight_map": {"a": "\0.safetensors"}}, "which its index names"),
        ({"weight_map": {"a": "model-1.safetensors"}}, "has nothing as 'metadata'; expected a table"),
    ],
)
def test_a_damaged_index_is_refused_with_its_place(folder: Path, index: object, message: str) -> None:
    write_shards(folder, load_file(folder / "model.safetensors"))
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ExportError, match=message) as caught:
        open_checkpoint(folder, "target")
    assert "index" in str(caught.value)


@pytest.mark.parametrize("role", ["target", "draft"])
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_labels": 10**20}, "has num_labels 100000000000000000000.*a language model has no labels"),
        ({"num_attention_heads": 0}, "has num_attention_heads 0; expected a whole number of 1 or more"),
        ({"num_attention_heads": True}, "has num_attention_heads True"),
        ({"num_attention_heads": "2"}, "has num_attention_heads '2'"),
        ({"num_attention_heads": 2.0}, r"has num_attention_heads 2\.0"),
        ({"num_attention_heads": None}, "num_attention_heads"),
        ({"num_attention_heads": -2}, "has num_attention_heads -2"),
        ({"num_key_value_heads": 0}, "has num_key_value_heads 0"),
        ({"num_attention_heads": 4, "num_key_value_heads": 3}, "num_attention_heads 4 and num_key_value_heads 3"),
        ({"head_dim": 0}, "has head_dim 0"),
        ({"hidden_size": 0}, "has hidden_size 0"),
        ({"hidden_size": 10**12}, "has shape"),
        ({"vocab_size": 41}, "has shape"),
        ({"vocab_size": 10**30}, "vocab_size"),
        ({"num_hidden_layers": 3}, "lacks 9 weights"),
        ({"num_hidden_layers": 10**20}, "has num_hidden_layers 1000.*holds 21 tensors"),
        ({"max_position_embeddings": -1}, "has max_position_embeddings -1"),
        ({"model_type": "mistral", "sliding_window": 0}, "has sliding_window 0; expected .* null where no layer has"),
        ({"intermediate_size": -1}, "has intermediate_size -1"),
        ({"rope_scaling": "linear"}, "has rope_scaling 'linear' in config.json; expected a table such as"),
        ({"rope_parameters": ["linear"]}, r"has rope_parameters \['linear'\] in config.json"),
        ({"rope_parameters": {"rope_type": "linear", "factor": "2"}}, "rope_parameters"),
        ({"rope_parameters": {"rope_type": "linear"}}, "factor"),
        ({"hidden_act": "new"}, "hidden_act is 'new'"),
        ({"rms_norm_eps": "small"}, "rms_norm_eps"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings"),
        ({"pad_token_id": 10**6}, "pad_token_id is 1000000"),
        ({"id2label": 3}, "id2label is 3"),
        ({"transformers_weights": 7}, "has transformers_weights 7"),
        ({"transformers_weights": "gone.safetensors"}, r"no gone\.safetensors"),
        ({"transformers_weights": "../model.safetensors"}, "a file outside"),
        ({"configuration_files": ["config.4.0.0.json"]}, "has configuration_files"),
    ],
)
def test_a_wrong_entry_of_the_config_is_refused_by_its_name(
    folder: Path, role: Any, changes: dict[str, object], message: str
) -> None:
    configure(folder, **changes)
    with pytest.raises(ExportError, match=message):
        open_model(open_checkpoint(folder, role))


@pytest.mark.parametrize("wrong", ["2", [2], True, 2.5])
@pytest.mark.parametrize("name", ["bos_token_id", "pad_token_id"])
def test_a_special_token_that_is_no_id_is_refused(folder: Path, name: str, wrong: object) -> None:
    (folder / "generation_config.json").write_text(json.dumps({name: wrong}))
    found = open_checkpoint(folder, "target")
    with pytest.raises(ExportError, match=rf"generation_config\.json says {name} .*; expected a token id"):
        found.token_id(name)


@pytest.mark.parametrize("kind", [torch.int32, torch.bool, torch.float8_e4m3fn])
def test_a_weight_that_is_no_float_is_refused(folder: Path, kind: torch.dtype) -> None:
    change_tensors(folder, lambda tensors: tensors | {"model.norm.weight": tensors["model.norm.weight"].to(kind)})
    with pytest.raises(ExportError, match=r"model\.safetensors: 'model\.norm\.weight' has dtype"):
        open_model(open_checkpoint(folder, "target"))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("adapter_config.json", "an adapter, which transformers adds to a model's weights"),
        ("shard-00001-model-00001-of-00002.safetensors", "a shard of distributed training"),
    ],
)
def test_files_that_would_change_the_weights_are_refused(folder: Path, name: str, message: str) -> None:
    (folder / name).write_bytes(b"{}")
    with pytest.raises(ExportError, match=message):
        open_checkpoint(folder, "target")
    (folder / "config.json").unlink()  # as peft saves an adapter
    with pytest.raises(ExportError, match=message):
        open_checkpoint(folder, "target")
