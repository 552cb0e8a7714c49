"""A checkpoint's own head: its layer and its joints are what transformers' layer of that family computes."""

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import CONFIG_MAPPING
from transformers.models.qwen3_5.modeling_qwen3_5 import (
    Qwen3_5DecoderLayer,
    Qwen3_5RMSNorm,
    Qwen3_5TextRotaryEmbedding,
)

from mirrorsd.families.heads import build_head
from mirrorsd.families.heads.attending import FeatureRows
from mirrorsd.families.heads.kinds.eagle3 import Eagle3Network
from mirrorsd.families.heads.kinds.mtp import LENGTH, is_offset, mtp_config, mtp_names

HIDDEN, VOCAB, ROWS = 48, 60, 9
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": HIDDEN, "intermediate_size": 80, "num_hidden_layers": 1, "head_dim": 32,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
    "layer_types": ["full_attention"],
}  # fmt: skip


def normed(weight: Tensor, rows: Tensor) -> Tensor:
    norm = Qwen3_5RMSNorm(HIDDEN)
    norm.weight.data = weight
    found: Tensor = norm(rows)
    return found


@pytest.fixture
def stored() -> dict[str, Tensor]:
    """Random tensors by the names of a checkpoint."""
    torch.manual_seed(4)
    config: Any = CONFIG_MAPPING["qwen3_5_text"](**SIZES)
    layer = {f"mtp.layers.0.{name}": tensor for name, tensor in Qwen3_5DecoderLayer(config, 0).state_dict().items()}
    joints = {f"mtp.{name}.weight": torch.zeros(HIDDEN) for name in ("pre_fc_norm_embedding", "pre_fc_norm_hidden")}
    own = layer | joints | {"mtp.norm.weight": torch.zeros(HIDDEN), "mtp.fc.weight": torch.zeros(HIDDEN, 2 * HIDDEN)}
    return {name: torch.randn_like(tensor) * 0.2 for name, tensor in own.items()}


YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 16}


@torch.no_grad()
@pytest.mark.parametrize("rope", [{}, {"rope_parameters": {**YARN, "mrope_section": [2, 1, 1]}}], ids=["usual", "yarn"])
def test_a_pass_is_that_of_the_family(stored: dict[str, Tensor], rope: dict[str, Any]) -> None:
    config: Any = CONFIG_MAPPING["qwen3_5_text"](**SIZES, **rope)
    config._attn_implementation = "eager"
    network = build_head(mtp_config(config.to_dict()))
    assert isinstance(network, Eagle3Network)
    own = {name: stored[of] + 1 if is_offset(name) else stored[of] for of, name in mtp_names(stored).items()}
    missing, unexpected = network.load_state_dict(own, strict=False)
    assert (sorted(missing), unexpected) == (sorted(network.config.borrowed), [])
    assert network.config.length == LENGTH

    features, tokens = torch.randn(1, ROWS, HIDDEN), torch.randint(0, VOCAB, (1, ROWS))
    rows = FeatureRows(features, tokens, torch.tensor([ROWS - 1]), torch.tensor([3]))
    states = network.read(rows)
    assert states is not None

    sides = (
        (network.embed_tokens(tokens), stored["mtp.pre_fc_norm_embedding.weight"]),
        (
            features,
            stored["mtp.pre_fc_norm_hidden.weight"],
        ),
    )
    joined = torch.cat([normed(weight, side) for side, weight in sides], dim=-1)
    layer, prefix = Qwen3_5DecoderLayer(config, 0).eval(), "mtp.layers.0."
    layer.load_state_dict({name.removeprefix(prefix): stored[name] for name in stored if name.startswith(prefix)})
    hidden = joined @ stored["mtp.fc.weight"].T
    angles = Qwen3_5TextRotaryEmbedding(config)(hidden, 3 + torch.arange(ROWS)[None])
    mask = torch.full((ROWS, ROWS), -1e9).triu(1)[None, None]
    expected = layer(hidden, position_embeddings=angles, attention_mask=mask)
    torch.testing.assert_close(states, expected, atol=1e-5, rtol=1e-5)
    wanted = normed(stored["mtp.norm.weight"], expected)
    torch.testing.assert_close(network.norm(states), wanted, atol=1e-5, rtol=1e-5)
