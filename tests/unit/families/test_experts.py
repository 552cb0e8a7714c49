"""Experts as modules of their own: the same numbers, the same answers, and published sizes on paper."""

from typing import Any

import pytest
import torch
from family_cases import CASES, Case
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM

from mirrorsd.export.estimate import estimate_sizes
from mirrorsd.export.options import ExportOptions
from mirrorsd.families.experts import Mixture, separate_experts, watched_routers, with_separate_experts
from mirrorsd.families.registry import FAMILIES, find_obstacle

TINY = {
    "vocab_size": 40,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "num_experts": 6,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
}
MIXTURES = [case for case in CASES if any("experts" in name for name in case.sizes)]
QWEN3_30B_A3B = {"num_hidden_layers": 48, "head_dim": 128, "norm_topk_prob": True}
"""What its config.json says beyond transformers' defaults."""


def network(device: str = "cpu", **entries: Any) -> Any:
    with torch.device(device):
        config = CONFIG_MAPPING["qwen3_moe"](**entries)
        return AutoModelForCausalLM.from_config(config).eval()  # type: ignore[no-untyped-call]


def test_separate_experts_answer_as_the_fused_ones_and_hold_their_numbers() -> None:
    torch.manual_seed(1)
    model, ids = network(**TINY), torch.arange(20)[None]
    with torch.no_grad():
        wanted = model(ids).logits
        fused = model.model.layers[1].mlp.experts.gate_up_proj
        with separate_experts(model):
            names = dict(model.named_parameters())
            found = model(ids).logits
            last = names["model.layers.1.mlp.experts.5.up_proj.weight"]
        assert torch.equal(model(ids).logits, wanted)
    assert last.shape == (24, 16)
    assert last.data_ptr() == fused[5, 24:].data_ptr()
    assert float((found - wanted).abs().max()) <= 1e-5 * float(wanted.std())
    mixture = Mixture()
    assert (len(mixture.experts_of(names)), len(mixture.routers_of(names))) == (2 * 6 * 3, 2)


@pytest.mark.parametrize("case", MIXTURES, ids=[case.family for case in MIXTURES])
def test_a_mixture_runs_with_products_in_bfloat16(case: Case) -> None:
    """So does an export of integers read what products take, on a processor that has them; sums stay in float32."""
    sizes = {"vocab_size": 40, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64, "pad_token_id": 0}
    torch.manual_seed(4)
    config = AutoConfig.for_model(case.family, **(sizes | heads | case.sizes))
    model = with_separate_experts(AutoModelForCausalLM.from_config(config).eval())
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        logits = model(torch.arange(20)[None], use_cache=False).logits
    assert logits.isfinite().all()


def test_rows_between_two_experts_are_noted() -> None:
    """Experts 0 and 1 are equally likely for all rows, and the third of three rows has them at the border."""
    torch.manual_seed(2)
    model = with_separate_experts(network(**TINY))
    router = model.model.layers[1].mlp.gate
    with torch.no_grad():
        router.weight[1] = router.weight[0]
        ids = torch.arange(12)[None]
        with watched_routers(model.model.layers, 1e-4) as found:
            model(ids)
        noted: list[torch.Tensor] = []
        router.register_forward_hook(lambda module, given, answer: noted.append(answer[0]))
        model(ids)
    order = noted[0].argsort(dim=-1, descending=True, stable=True)
    expected = [set(row[2:4].tolist()) == {0, 1} for row in order]
    assert found[1].tolist() == expected
    assert any(expected)
    assert not found[0].any()


@pytest.mark.parametrize("count", [1, 3])
def test_rows_that_get_all_experts_are_between_none(count: int) -> None:
    """As alike as the last two may be: no arithmetic can choose another expert."""
    model = with_separate_experts(network(**(TINY | {"num_experts": count, "num_experts_per_tok": count})))
    with torch.no_grad(), watched_routers(model.model.layers, 1e3) as found:
        model(torch.arange(12)[None])
    assert not found


def test_the_published_size_on_paper() -> None:
    """Qwen3-30B-A3B: 30.5 billion parameters, 3.3 of them for a token; what its export needs in int8."""
    model = with_separate_experts(network("meta", **(QWEN3_30B_A3B | {"num_hidden_layers": 2})))
    sizes = {name: parameter.numel() for name, parameter in model.named_parameters()}
    experts = sum(sizes[name] for name in Mixture().experts_of(sizes)) // 2
    layer = sum(size for name, size in sizes.items() if ".layers.0." in name)
    ends = sum(sizes.values()) - 2 * layer
    assert (48 * layer + ends) / 1e9 == pytest.approx(30.5, abs=0.05)
    assert (48 * (layer - experts + experts * 8 // 128) + ends) / 1e9 == pytest.approx(3.35, abs=0.05)
    # what is promised: the disk, and 1.25 times the target's bytes
    estimate = estimate_sizes(48 * layer + ends, 100_000_000, ExportOptions(precision="int8"))
    assert estimate.bundle_bytes / 1e9 == pytest.approx(32.6, abs=0.3)
    assert estimate.memory_bytes / 1e9 == pytest.approx(41.4, abs=0.3)


def test_families_that_are_mixtures_can_be_targets_alone() -> None:
    mixtures = [name for name, family in FAMILIES.items() if family.mixture is not None]
    assert "qwen3_moe" in mixtures
    for name in mixtures:
        assert find_obstacle({"model_type": name}) is None
        assert "can be a target" in (find_obstacle({"model_type": name}, is_draft=True) or "")
