"""The guide "adding a head", done on a toy: one file's worth of code, and it is made, trained, kept and unrolled."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from mirrorsd.families.heads import KINDS, HeadChain, HeadConfig, HeadKind, HeadNetwork
from mirrorsd.families.heads.attending import FeatureRows
from mirrorsd.families.heads.choice import Listener
from mirrorsd.families.heads.config import FINAL
from mirrorsd.families.heads.kind import Training, add_kind
from mirrorsd.graphs.errors import ConfigError
from mirrorsd.training.divergence import LossMix
from mirrorsd.training.heads.head_folder import load_head, save_head
from mirrorsd.training.heads.head_shape import HeadPlan, make_head
from mirrorsd.training.heads.head_training import HeadTrainingConfig, train_head
from mirrorsd.training.run.schedule import WarmStableDecay
from mirrorsd.training.run.timed_run import RunConfig
from mirrorsd.training.text.token_stream import TokenStream


class Echo(HeadNetwork):
    """Each guess reads the last state and the token guessed before it, through one product."""

    def __init__(self, config: HeadConfig) -> None:
        super().__init__(config)
        self.join = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=False)

    def read(self, rows: FeatureRows) -> Tensor:
        return rows.features

    def guess(self, rows: FeatureRows, states: Tensor | None, listener: Listener) -> None:
        assert states is not None
        hidden, token = states.index_select(1, rows.tips), rows.tokens.index_select(1, rows.tips)
        for guess in range(self.config.length):
            hidden = self.join(torch.cat((hidden, self.embed_tokens(token)), dim=-1))
            token = listener.one(guess, self.lm_head.states(hidden))


@pytest.fixture
def echo() -> Iterator[str]:
    usual = Training(taps=lambda *_: (FINAL,), length=3, num_layers=0, loss={"kl": 1.0}, matrix_rate=0.02)
    add_kind("echo", HeadKind(network=Echo, training=usual, reads_one_tap=True, layers=(0, 0)))
    yield "echo"
    del KINDS["echo"]


@pytest.fixture(scope="module")
def target() -> LlamaForCausalLM:
    torch.manual_seed(0)
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "intermediate_size": 48}
    return LlamaForCausalLM(LlamaConfig(vocab_size=40, hidden_size=32, num_hidden_layers=2, **heads)).eval()


def test_a_kind_of_ones_own_is_made_trained_kept_and_unrolled(
    echo: str, target: LlamaForCausalLM, tmp_path: Path
) -> None:
    plan = HeadPlan(kind=echo)
    network = make_head(plan.config(target), target)
    before = network.join.weight.clone()
    text = TokenStream(np.random.default_rng(1).integers(0, 40, 4000).astype(np.uint16))
    sizes = {"sequences": 2, "length": 16, "span": 4, "is_compiled": False}
    how = HeadTrainingConfig(mix=LossMix(**plan.usual.loss), **sizes)
    run = RunConfig(out=tmp_path / "run", schedule=WarmStableDecay(budget_s=0.2, warm_steps=1, decay_s=0.1))
    train_head(target, network, (text, text), run, how, lambda _: None)
    assert not torch.equal(before, network.join.weight)
    (tmp_path / "head").mkdir()
    save_head(network, tmp_path / "head", dtype=torch.float32)
    again = load_head(tmp_path / "head", target)
    assert again.config.borrowed == ("embed_tokens.weight", "lm_head.weight")
    features, tokens, noise = torch.randn(1, 4, 32), torch.arange(4)[None], torch.zeros(3, 40)
    ids, logprobs = HeadChain(again, num_candidates=2)(features, tokens, torch.tensor([0]), torch.tensor([3]), noise)
    assert ids.shape == logprobs.shape == (3, 2)


def test_its_rules_are_those_that_it_has_given(echo: str, target: LlamaForCausalLM) -> None:
    with pytest.raises(ConfigError, match="a echo head reads one, usually final"):
        HeadPlan(kind=echo, taps=(1, 2)).config(target)
    with pytest.raises(ConfigError, match="a echo head has 0"):
        HeadPlan(kind=echo, num_layers=1).config(target)
