"""Sizes of recurrent layers, by transformers' own configs."""

from typing import Any

import pytest
from transformers import CONFIG_MAPPING

from mirrorsd.families.registry import find_obstacle, recurrent_shape, text_part
from mirrorsd.graphs.contract import TargetShape


def shape_of(**entries: Any) -> TargetShape:
    config: Any = CONFIG_MAPPING["qwen3_5_text"](**entries)
    return TargetShape(
        num_layers=config.num_hidden_layers,
        hidden_size=config.hidden_size,
        vocab_size=config.vocab_size,
        num_kv_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        recurrent=recurrent_shape(config),
    )


@pytest.mark.parametrize(
    ("entries", "num_recurrent", "megabytes"),
    [
        ({}, 24, 52.7),  # transformers' defaults: Qwen3.5-9B
        ({"num_hidden_layers": 24, "hidden_size": 1024, "linear_num_value_heads": 16}, 18, 20.2),
        ({"num_hidden_layers": 64, "hidden_size": 5120, "linear_num_value_heads": 48}, 48, 156.9),
    ],
)
def test_sizes_of_published_models(entries: dict[str, Any], num_recurrent: int, megabytes: float) -> None:
    shape = shape_of(**entries)
    assert len(shape.recurrent_layers) == num_recurrent
    assert len(shape.attention_layers) == shape.num_layers - num_recurrent
    assert shape.attention_layers[0] == 3
    assert shape.state_bytes / 1e6 == pytest.approx(megabytes, abs=0.05)


def test_a_model_without_recurrent_layers_has_no_state() -> None:
    shape = shape_of(num_hidden_layers=2, layer_types=["full_attention"] * 2)
    assert (shape.recurrent, shape.state_bytes, shape.attention_layers) == (None, 0, (0, 1))


def test_what_stands_beside_the_text_part_is_not_overlooked() -> None:
    whole = {"model_type": "qwen3_5", "text_config": {"hidden_size": 64}, "quantization_config": {"bits": 4}}
    assert "already quantised" in (find_obstacle(text_part(whole)) or "")
    assert find_obstacle(text_part({"model_type": "qwen3_5_moe", "text_config": {"hidden_size": 64}})) is None
    assert find_obstacle(text_part({"model_type": "qwen3_5", "text_config": {"hidden_size": 64}})) is None
    draft = find_obstacle({"model_type": "qwen3_5_text"}, is_draft=True)
    assert draft is not None
    assert "a draft follows several at once" in draft
