"""The study of trees: ranks are those that a decoding would meet, and a better tree is never worse than the chain."""

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from mirrorsd.bench.studies.trees.tree_gain import accepted_by, best_tree, ranks_of, tokens_per_step
from mirrorsd.families.heads import HeadNetwork
from mirrorsd.training.heads.head_report import report_head
from mirrorsd.training.heads.head_shape import HeadPlan, make_head
from mirrorsd.training.text.self_text import SelfText

VOCAB, LENGTH = 5, 3
"""So few tokens that heads are often right by chance."""


@pytest.fixture(scope="module")
def target() -> LlamaForCausalLM:
    torch.manual_seed(2)
    sizes = {"hidden_size": 16, "num_attention_heads": 2, "head_dim": 8, "intermediate_size": 24}
    config = LlamaConfig(vocab_size=VOCAB, num_hidden_layers=4, tie_word_embeddings=False, **sizes)
    return LlamaForCausalLM(config).eval().requires_grad_(False)


def random_head(target: LlamaForCausalLM, kind: str) -> HeadNetwork:
    network = make_head(HeadPlan(kind=kind, length=LENGTH, adapter_rank=4).config(target), target)
    for weight in network.parameters():
        if weight.requires_grad:
            torch.nn.init.normal_(weight, std=0.5)
    return network


@pytest.mark.parametrize("kind", ["medusa", "eagle3", "streaming"])
def test_a_chain_makes_as_many_tokens_per_step_as_a_decoding(target: LlamaForCausalLM, kind: str) -> None:
    network = random_head(target, kind)
    texts = [SelfText(torch.randint(0, VOCAB, (60,)).tolist(), 4) for _ in range(3)]
    ranks = [ranks_of(target, network, text) for text in texts]
    chain = frozenset((0,) * depth for depth in range(1, LENGTH + 1))
    found = report_head(target, network, {"any": texts}, [])["greedy"]["tokens_per_step"]
    assert tokens_per_step(ranks, chain) == found > 1
    assert {len(row) for row in ranks[0][-LENGTH:]} == {1, 2, 3}, "the text's end leaves less to guess"
    everything = best_tree([row for text in ranks for row in text], VOCAB + VOCAB**2 + VOCAB**3)
    assert all(accepted_by(everything, row) == len(row) for text in ranks for row in text)
