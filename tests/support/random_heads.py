"""Heads of random numbers for the tiny target, of every kind, as folders."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from mirrorsd.families.heads import KINDS, HeadConfig, HeadNetwork, build_head
from mirrorsd.graphs.names import TRAINED_HEADS

SIZES: Any = {
    "length": 3, "hidden_size": 64, "vocab_size": 300, "num_logits": 300, "num_heads": 4, "num_kv_heads": 2,
    "head_dim": 16, "intermediate_size": 96, "max_positions": 512,
}  # fmt: skip
MEDUSA = HeadConfig(head_kind="medusa", taps=("final",), **SIZES)
HYDRA = HeadConfig(head_kind="hydra", taps=("final",), vocabulary="low-rank", head_rank=32, **SIZES)
EAGLE3 = HeadConfig(
    head_kind="eagle3",
    taps=(1, 2, 3),
    num_layers=1,
    vocabulary="reduced",
    **{**SIZES, "length": 2, "num_logits": 200},
)
BLOCK = HeadConfig(head_kind="block", taps=(1, 3), num_layers=1, link="gated", link_rank=8, **SIZES)
STREAMING = HeadConfig(head_kind="streaming", taps=(2, 3), num_layers=2, adapter_rank=8, **SIZES)
HEADS = {"medusa": MEDUSA, "eagle3": EAGLE3, "streaming": STREAMING}
"""One that remembers nothing, one with a cache, and one with the target's own last layers."""
OTHERS = {
    "medusa": replace(MEDUSA, vocabulary="own", depth=2),
    "hydra": replace(HYDRA, num_layers=1),
    "eagle3": replace(
        EAGLE3,
        taps=(1, 2, 4),
        length=3,
        vocabulary="shared",
        num_logits=300,
        tap_norm="each",
        mask_token=7,
        own_embedding=True,
    ),
    "block": BLOCK,
    "streaming": replace(STREAMING, taps=(1, 2, 3), num_layers=3, vocabulary="low-rank", head_rank=16),
}
"""Every kind, with other switches."""


def usual_config(kind: str) -> HeadConfig:
    """What the kind's defaults make of it, for the tiny target of four layers."""
    usual = KINDS[kind].training
    assert usual is not None
    ranks = usual.entries({"link_rank": 8, "adapter_rank": 8})
    num_layers = min(usual.num_layers, 2)
    return HeadConfig(head_kind=kind, taps=usual.taps(4, num_layers), num_layers=num_layers, **SIZES, **ranks)


OTHERS |= {kind: usual_config(kind) for kind in TRAINED_HEADS if kind not in OTHERS}


def random_network(config: HeadConfig) -> HeadNetwork:
    """A head whose guesses are anything."""
    torch.manual_seed(11)
    network = build_head(config)
    for name, weight in network.named_parameters():
        if not name.endswith("norm.weight"):
            torch.nn.init.normal_(weight, std=0.2)
    if network.lm_head.map is not None:
        network.lm_head.map.copy_(torch.arange(config.num_logits) + 50)
    return network


def save_head(config: HeadConfig, folder: Path, network: HeadNetwork | None = None) -> Path:
    """Write a head's folder, without what it borrows."""
    folder.mkdir(parents=True)
    config.write(folder)
    state = (network or random_network(config)).state_dict()
    own = {name: tensor.contiguous() for name, tensor in state.items() if name not in config.borrowed}
    save_file(own, folder / "model.safetensors")
    return folder


def fitted_medusa(target: Path, text: list[int]) -> HeadNetwork:
    """Medusa heads that have learned one text by heart: on it, and nowhere else, they are right."""
    from transformers import LlamaForCausalLM

    network, model = build_head(MEDUSA), LlamaForCausalLM.from_pretrained(target)
    with torch.no_grad():
        features = model(torch.tensor([text]), output_hidden_states=True).hidden_states[-1][0]
    tips = torch.arange(len(text) - 1 - MEDUSA.length)
    wanted = tips[:, None] + 2 + torch.arange(MEDUSA.length)
    labels = torch.tensor(text)[wanted].flatten()
    optimizer = torch.optim.Adam(network.heads.parameters(), lr=0.02)
    for _ in range(150):
        states = torch.stack([head(features[tips]) for head in network.heads], dim=1)
        loss = torch.nn.functional.cross_entropy(model.lm_head(states).flatten(0, 1), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return network
