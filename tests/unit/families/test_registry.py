"""What config.json says about a family, completed with Hugging Face's defaults."""

import json
import re
from pathlib import Path

import pytest
from transformers import CONFIG_MAPPING, AutoConfig

from mirrorsd.families.positions import most_positions, smallest_window
from mirrorsd.families.registry import FAMILIES, completed, find_obstacle, text_part

LONG_ROPE = {
    "model_type": "phi3",
    "max_position_embeddings": 1024,
    "original_max_position_embeddings": 256,
    "hidden_size": 64,
    "num_attention_heads": 2,
    "rope_scaling": {"type": "longrope", "short_factor": [1.0] * 16, "long_factor": [2.0] * 16},
}


@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_is_one_that_transformers_knows(name: str) -> None:
    assert name in CONFIG_MAPPING


def test_sizes_get_their_usual_names_and_defaults() -> None:
    config = completed({"model_type": "gpt2", "n_layer": 3, "n_positions": 512, "eos_token_id": 7})
    assert (config["num_hidden_layers"], config["max_position_embeddings"], config["num_attention_heads"]) == (
        3,
        512,
        12,
    )
    assert config["eos_token_id"] == 7
    assert "bos_token_id" not in config  # token ids are what the file says, or nothing


def test_long_rope_ends_where_its_tables_change() -> None:
    """Beyond 256 positions this model wants other tables, from the first position on."""
    assert most_positions(completed(LONG_ROPE)) == 256
    assert most_positions(completed(LONG_ROPE | {"rope_scaling": None})) == 1024


def test_yarn_reaches_beyond_the_length_that_was_trained() -> None:
    """Published pages say: add these entries, and leave the length as it is."""
    rope = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    config = {"model_type": "qwen3", "max_position_embeddings": 40960, "rope_scaling": rope}
    assert most_positions(completed(config)) == 131072
    assert most_positions(completed(config | {"rope_scaling": None})) == 40960
    assert most_positions(completed(config | {"max_position_embeddings": 262144})) == 262144


def test_yarn_without_a_factor_reaches_as_far_as_the_config_says() -> None:
    """Transformers takes the ratio of both lengths then; what is no number it refuses itself."""
    rope = {"rope_type": "yarn", "original_max_position_embeddings": 256}
    config = {"model_type": "llama", "max_position_embeddings": 1024, "num_attention_heads": 4, "hidden_size": 64}
    for factor in (None, "4.0", float("nan")):
        assert most_positions(completed(config | {"rope_parameters": {**rope, "factor": factor}})) == 1024


def test_long_rope_of_one_kind_of_layer_is_a_bound_too() -> None:
    factors = {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8, "factor": 4.0}
    long = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 256, **factors}
    ropes = {"full_attention": long, "sliding_attention": {"rope_type": "default", "rope_theta": 1e4}}
    config = {"model_type": "gemma3_text", "max_position_embeddings": 1024, "head_dim": 16, "rope_parameters": ropes}
    assert most_positions(completed(config)) == 256


def test_a_mistral_that_tells_its_layers_apart_is_what_transformers_makes_of_it(tmp_path: Path) -> None:
    """Every layer of a Mistral has the window; of a Ministral, those that are named."""
    config = {"model_type": "mistral", "num_hidden_layers": 2, "sliding_window": 100, "head_dim": 128}
    for more in ({}, {"layer_types": ["full_attention", "sliding_attention"]}, {"layer_types": None}):
        (tmp_path / "config.json").write_text(json.dumps(config | more))
        assert text_part(config | more)["model_type"] == AutoConfig.from_pretrained(tmp_path).model_type
    assert smallest_window(completed(text_part(config | {"layer_types": ["full_attention"] * 2}))) is None


@pytest.mark.parametrize(
    ("family", "entry"),
    [("llama", {"sliding_window": 100}), ("granite", {"sliding_window": 100}), ("olmo2", {"sliding_window": 100})]
    + [(family, {name: 1}) for family in ("gpt2", "opt") for name in ("num_key_value_heads", "head_dim")],
)
def test_an_entry_of_other_families_says_nothing(family: str, entry: dict[str, int]) -> None:
    """Its layers are those that transformers builds without it."""
    config = completed(text_part({"model_type": family, "num_attention_heads": 4, "hidden_size": 64, **entry}))
    assert smallest_window(config) is None
    assert not entry.keys() & text_part({"model_type": family, **entry}).keys()


@pytest.mark.parametrize(
    ("config", "window"),
    [
        ({"model_type": "llama"}, None),
        ({"model_type": "mistral", "sliding_window": 100}, 100),
        ({"model_type": "mistral", "sliding_window": None}, None),
        ({"model_type": "qwen2", "sliding_window": 100, "use_sliding_window": False}, None),
        ({"model_type": "qwen2", "sliding_window": 100, "use_sliding_window": True, "max_window_layers": 2}, 100),
        ({"model_type": "gemma2", "sliding_window": 100}, 100),
        ({"model_type": "gemma2", "sliding_window": 100, "layer_types": ["full_attention"] * 26}, None),
    ],
)
def test_the_smallest_window_is_found(config: dict[str, object], window: int | None) -> None:
    assert smallest_window(completed(config)) == window


def test_a_text_part_takes_the_special_tokens_of_the_whole_where_it_has_none() -> None:
    whole = {"model_type": "qwen3_5", "eos_token_id": 7, "bos_token_id": 5, "pad_token_id": 3}
    part = {"hidden_size": 64, "eos_token_id": None, "bos_token_id": 6}
    found = text_part(whole | {"text_config": part})
    assert [found[name] for name in ("eos_token_id", "bos_token_id", "pad_token_id")] == [7, 6, 3]


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"layer_types": ["mamba", "attention"], "num_local_experts": 0}, "state-space layers of another kind"),
        ({"num_local_experts": 0}, "state-space layers of another kind"),
        ({"layer_types": ["attention"] * 4, "num_local_experts": 8}, "mixtures of experts are of another form"),
        (
            {"layer_types": ["attention"] * 4, "num_local_experts": 0},
            r"feed-forward parts \(shared_mlp\) are of another",
        ),
    ],
)
def test_a_model_of_granite_4_is_refused_for_what_it_has(config: dict[str, object], words: str) -> None:
    obstacle = find_obstacle({"model_type": "granitemoehybrid", **config})
    assert obstacle is not None
    assert re.search(rf"not supported: it.* {words}", obstacle)


@pytest.mark.parametrize(
    ("rope", "words"),
    [
        ({"type": "su"}, "rope type 'su'; write longrope there"),
        ({"type": None, "factor": 1.0}, "rope type 'None'; set the whole entry to null"),
        ({"type": "mrope"}, "rope type 'mrope'; supported are default, linear"),
    ],
)
def test_a_kind_of_rope_that_transformers_does_not_read_says_what_to_write(rope: dict[str, object], words: str) -> None:
    """Both end in errors of transformers 5.23, which cannot load such a folder either."""
    config = LONG_ROPE | {"rope_scaling": {**rope, "short_factor": [1.0] * 16, "long_factor": [2.0] * 16}}
    assert words in str(find_obstacle(config))
