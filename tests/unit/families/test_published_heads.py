"""Heads that others publish guess as their own libraries' code does, and what cannot be held is refused.

`published_heads.json` is what `speculators` (commit c05b95b303f7), SpecForge (a6b6b023) and DFlash's own code (44947fb)
said with the weights that `wave` gives: the config as it is written, names and shapes of the weights, the best token's
number per guess, the true tokens being told.
"""

import json
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from mirrorsd.families.heads import build_head
from mirrorsd.families.heads.attending import FeatureRows
from mirrorsd.families.heads.config import EMBEDDING
from mirrorsd.families.heads.published import convert_head
from mirrorsd.graphs.errors import ExportError

CASES: dict[str, Any] = json.loads((Path(__file__).parent / "published_heads.json").read_text(encoding="utf-8"))
VOCAB, ROWS, TARGET_LAYERS = 40, 128, 8


def wave(name: str, shape: list[int]) -> Tensor:
    """Numbers that any machine makes alike, other ones for each name."""
    count = torch.Size(shape).numel()
    steps = torch.arange(count, dtype=torch.float64) * (1.1 + zlib.crc32(name.encode()) % 97 / 50)
    return (0.4 * torch.sin(steps)).float().reshape(shape)


def tensors_of(case: dict[str, Any]) -> dict[str, Tensor]:
    tensors = {name: wave(name, shape) for name, shape in case["tensors"].items()}
    if case["has_d2t"]:  # number n is token 2 n
        tensors |= {"d2t": torch.arange(20), "t2d": torch.arange(VOCAB) % 2 == 0}
    return tensors


class Told:
    """Keeps the states of all guesses, and tells the true tokens between them."""

    def __init__(self, truth: Tensor) -> None:
        self.truth = truth
        self.states: list[Tensor] = []

    def all_at_once(self, states: Tensor) -> None:
        self.states = list(states.unbind(2))

    def prepare(self, states: Tensor) -> None:
        pass

    def one(self, guess: int, state: Tensor) -> Tensor:
        self.states.append(state)
        return self.truth[:, :, guess]


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
@torch.no_grad()
def test_a_published_head_guesses_as_its_own_library_does(case: dict[str, Any]) -> None:
    head = convert_head(case["config"], tensors_of(case), TARGET_LAYERS, lambda: wave("lm_head.weight", [VOCAB, 16]))
    network = build_head(head.config)
    of_target = {EMBEDDING: wave(EMBEDDING, [VOCAB, 16]), "lm_head.weight": wave("lm_head.weight", [VOCAB, 16])}
    network.load_state_dict({**{name: of_target[name] for name in head.config.borrowed}, **head.tensors})
    tokens = torch.tensor([[(row * 7 + 3) % VOCAB for row in range(ROWS)]])
    features = wave("features", [1, ROWS, len(head.config.taps) * 16])
    tips = torch.tensor(case["tips"])
    told = Told(tokens[:, tips[:, None] + 1 + torch.arange(head.config.length)])
    network.unroll(FeatureRows(features, tokens, tips, torch.tensor([0])), told)
    logits = torch.stack([network.lm_head.logits(state[0], guess) for guess, state in enumerate(told.states)], dim=1)
    assert logits.argmax(-1).tolist() == case["guesses"]
    if case["logits"]:
        torch.testing.assert_close(logits[0, -1], torch.tensor(case["logits"]), rtol=0, atol=2e-4)
    if case["has_d2t"]:
        assert network.lm_head.tokens(torch.tensor([0, 3, 19])).tolist() == [0, 6, 38]


def changed(name: str, **entries: Any) -> dict[str, Any]:
    return {**CASES[name]["config"], **entries}


LAYER = CASES["dflash"]["config"]["transformer_layer_config"]
GATED = {"mask_token_id": 7, "markov_rank": 6, "markov_head_type": "gated"}
REFUSED = {
    "another kind": (changed("eagle3", speculators_model_type="pard2"), "speculators_model_type 'pard2'; those"),
    "another family": (changed("dflash", transformer_layer_config={**LAYER, "model_type": "gpt_oss"}), "'gpt_oss'"),
    "a wider target": (changed("eagle3", target_hidden_size=64), "16 wide and its target 64"),
    "no mask beside an unknown state": (changed("peagle", mask_token_id=None), "no mask_token_id"),
    "output without a norm": (changed("eagle3 of SpecForge", norm_output=False), "norm_output to false"),
    "a second DFlash": (
        changed("dflash of its authors", architectures=["DFlash2DraftModel"]), "a DFlash2DraftModel: the second DFlash"
    ),
    "a causal block": (changed("dflash of its authors", is_causal=True), "has is_causal true"),
    "another projector": (
        changed("dflash of its authors", dflash_config={"mask_token_id": 7, "projector_type": "domino"}),
        "projector_type 'domino'",
    ),
    "a scaled embedding": (
        changed("dflash of its authors", dflash_config={"mask_token_id": 7, "input_embedding_scale": 8.0}),
        "input_embedding_scale 8.0; only 1.0",
    ),
    "a link with gates": (
        changed("dspark of SpecForge", dflash_config=GATED),
        "markov_head_type is 'gated'",
    ),
    "another link": (changed("dspark", markov_head_type="rnn"), "markov_head_type is 'rnn'"),
    "no mask": (changed("dflash", mask_token_id=None), "no mask_token_id"),
    "no length": (changed("eagle3", speculators_config={}), "how many tokens it guesses"),
    "a window": (
        changed(
            "dflash",
            transformer_layer_config={
                **LAYER, "use_sliding_window": True, "sliding_window": 16, "layer_types": ["sliding_attention"] * 2,
            },
        ),
        "a sliding window of 16",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("config", "words"), REFUSED.values(), ids=REFUSED)
def test_what_heads_here_do_not_have_is_refused(config: dict[str, Any], words: str) -> None:
    kind = config.get("speculators_model_type")
    name = kind if kind in CASES else "eagle3"
    with pytest.raises(ExportError, match=words):
        convert_head(config, tensors_of(CASES[name]), TARGET_LAYERS)


def test_a_published_head_without_its_map_is_refused() -> None:
    case = CASES["eagle3 with one norm for all taps"]
    tensors = {name: tensor for name, tensor in tensors_of(case).items() if name != "d2t"}
    with pytest.raises(ExportError, match="names 20 of 40 tokens, and has no d2t"):
        convert_head(case["config"], tensors, TARGET_LAYERS)


def test_an_embedding_that_was_trained_further_is_kept() -> None:
    trained = {"eagle3": changed("eagle3", embed_requires_grad=True), "peagle": CASES["peagle"]["config"]}
    for name, config in trained.items():
        head = convert_head(config, tensors_of(CASES[name]), TARGET_LAYERS)
        assert head.config.own_embedding
        assert torch.equal(head.tensors[EMBEDDING], wave(EMBEDDING, [VOCAB, 16]))
        assert EMBEDDING not in head.config.borrowed


def test_layers_that_other_libraries_count_from_none_are_numbers_of_layers_passed() -> None:
    """SpecForge and DFlash name the layer whose output is read, heads here how many layers it has behind it."""
    config = changed("eagle3 of SpecForge", eagle_config={})
    assert convert_head(config, tensors_of(CASES["eagle3 of SpecForge"]), 30).config.taps == (2, 15, 27)
    named = changed("eagle3 of SpecForge", eagle_config={"eagle_aux_hidden_state_layer_ids": [1, 14, 26]})
    assert convert_head(named, tensors_of(CASES["eagle3 of SpecForge"]), 30).config.taps == (2, 15, 27)
    spread = changed("dflash of its authors", dflash_config={"mask_token_id": 7}, num_target_layers=36)
    assert convert_head(spread, tensors_of(CASES["dflash of its authors"]), 36).config.taps == (2, 34)


def test_taps_that_are_not_said_are_those_of_the_library() -> None:
    config = changed("eagle3", eagle_aux_hidden_state_layer_ids=None)
    assert convert_head(config, tensors_of(CASES["eagle3"]), 30).config.taps == (2, 15, 27)
