"""A draft of the feature channel's study reads what is there while the target works, and nothing else."""

import doctest
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from mirrorsd.bench.studies import feature_channel
from mirrorsd.bench.studies.feature_channel import CHAIN, OWN, VARIANTS, Reading, Recorded, branches
from mirrorsd.families.heads import HeadChain, HeadConfig, HeadNetwork, build_head
from mirrorsd.training.divergence import LossMix
from mirrorsd.training.heads.features import Features
from mirrorsd.training.heads.head_shape import HeadPlan, make_head
from mirrorsd.training.heads.head_training import HeadTrainingConfig
from mirrorsd.training.run.schedule import TrainingClock, WarmStableDecay
from mirrorsd.training.run.timed_run import RunConfig
from mirrorsd.training.text.self_text import SelfText
from mirrorsd.training.text.token_stream import TokenStream

HIDDEN, VOCAB, LENGTH, IN_PASS = 16, 40, 14, 3
READING = Reading(taps=(1, 2, 4), exit_layer=2)
LOW = 2 * HIDDEN
"""Where the high tap begins among the features."""


def random_head(num_layers: int) -> HeadNetwork:
    torch.manual_seed(3)
    config = HeadConfig(
        head_kind="eagle3", taps=READING.taps, num_layers=num_layers, tap_norm="each", length=CHAIN, hidden_size=HIDDEN,
        vocab_size=VOCAB, num_logits=VOCAB, num_heads=4, num_kv_heads=2, head_dim=4, intermediate_size=24,
    )  # fmt: skip
    network = build_head(config).eval()
    for weight in network.parameters():
        torch.nn.init.normal_(weight, std=0.5)
    return network


@pytest.fixture
def head() -> HeadNetwork:
    """Two layers, so that a second one would carry on what a first one saw too early."""
    return random_head(2)


@pytest.fixture
def recorded() -> Recorded:
    torch.manual_seed(4)
    features = Features(torch.randn(1, LENGTH - 1, 3 * HIDDEN), torch.randn(1, LENGTH - 1, HIDDEN))
    return Recorded(SelfText(torch.randint(VOCAB, (LENGTH,)).tolist(), prompt_length=5), features, None)


def with_others(recorded: Recorded, rows: slice, taps: slice = slice(None)) -> Recorded:
    """The same text, some of its features exchanged for others."""
    features = recorded.features.taps.clone()
    features[:, rows, taps] = torch.randn_like(features[:, rows, taps]) * 3
    return recorded._replace(features=recorded.features._replace(taps=features))


def states_behind(head: HeadNetwork, name: str, recorded: Recorded, tip: int) -> Tensor:
    """The first guess's state, which shows what an id hides."""
    seen: list[Tensor] = []
    keep = head.norm.register_forward_hook(lambda *call: seen.append(call[2]))  # type: ignore[union-attr,operator]
    branches(head, name, READING, recorded, IN_PASS)
    keep.remove()
    first = IN_PASS if name == OWN else 0
    return seen[first][0, tip - int(recorded.tips[0])]


def differs(head: HeadNetwork, name: str, recorded: Recorded, rows: slice, taps: slice = slice(None)) -> bool:
    """Whether other features at these rows change what is guessed behind row 9."""
    before, after = (states_behind(head, name, text, tip=9) for text in (recorded, with_others(recorded, rows, taps)))
    return not torch.equal(before, after)


@pytest.mark.parametrize("name", [*VARIANTS, OWN])
def test_nothing_of_later_rows_is_read(head: HeadNetwork, recorded: Recorded, name: str) -> None:
    assert not differs(head, name, recorded, slice(10, None))


def test_low_taps_of_rows_in_the_pass_are_read_and_high_ones_are_not(head: HeadNetwork, recorded: Recorded) -> None:
    for row in (7, 8, 9):
        assert not differs(head, "low taps", recorded, slice(row, row + 1), slice(LOW, None))
        assert differs(head, "low taps", recorded, slice(row, row + 1), slice(0, LOW))
    assert differs(head, "low taps", recorded, slice(6, 7), slice(LOW, None))


@pytest.mark.parametrize("name", ["passed rows", OWN])
def test_without_a_channel_rows_in_the_pass_are_not_read(head: HeadNetwork, recorded: Recorded, name: str) -> None:
    assert not differs(head, name, recorded, slice(7, None))
    assert differs(head, name, recorded, slice(6, 7))


def test_ids_read_no_features_and_serial_decoding_reads_all(head: HeadNetwork, recorded: Recorded) -> None:
    assert not differs(head, "ids", recorded, slice(None))
    assert differs(head, "all taps", recorded, slice(9, 10), slice(LOW, None))


@pytest.mark.parametrize("name", ["low taps", "passed rows"])
def test_a_branch_is_what_a_runtime_with_caches_would_draft(recorded: Recorded, name: str) -> None:
    """Passed rows fill the caches as they are; those in the pass are read behind them, as far as they are there."""
    head, tip, first = random_head(1), 9, 10 - IN_PASS
    chain = HeadChain(head)
    tokens, noise = torch.tensor([recorded.text.tokens[1:]]), torch.zeros(CHAIN, VOCAB)
    empty = [torch.zeros(1, 2, 20, 4) for _ in range(2)]
    with torch.no_grad():
        passed = chain.fill(recorded.features.taps[:, :first], tokens[:, :first], torch.zeros(1).long(), *empty)
        for cache, new in zip(empty, passed, strict=True):
            cache[:, :, :first] = new
        window = READING.kept(recorded.features.taps[:, first : tip + 1], VARIANTS[name].window)
        start, last = torch.tensor([first]), torch.tensor([IN_PASS - 1])
        ids = chain(window, tokens[:, first : tip + 1], start, last, noise, *empty)[0]
    found = branches(head, name, READING, recorded, IN_PASS)[tip - int(recorded.tips[0])]
    assert ids[:, 0].tolist() == found.tolist()


def test_windows_have_one_to_eight_rows_and_hold_every_row_once() -> None:
    begins = feature_channel.draw_windows(400, seed=1)
    sizes = np.bincount(begins.numpy())
    assert sizes.sum() == 400
    assert set(sizes[sizes > 0].tolist()) == set(range(1, 9))
    assert (begins[1:] >= begins[:-1]).all()
    assert (begins <= torch.arange(400)).all()


def test_gains_have_intervals_over_texts() -> None:
    theirs = np.array([[2.0, 2.0], [1.0, 2.0], [6.0, 4.0]])
    found = feature_channel.interval(theirs * [1.5, 1.0], theirs)
    assert found == {"mean": 1.5, "from": 1.5, "to": 1.5}
    assert feature_channel.interval(theirs)["from"] < 9 / 8 < feature_channel.interval(theirs)["to"]


def test_all_variants_learn_in_the_same_steps_and_go_on_after_a_stop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def one_second(clock: TrainingClock) -> float:
        clock.trained_s += 1.0
        return 1.0

    monkeypatch.setattr(TrainingClock, "tick", one_second)
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=HIDDEN, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2,
        head_dim=4, intermediate_size=24, max_position_embeddings=64,
    )  # fmt: skip
    target = LlamaForCausalLM(config).eval()
    text = TokenStream(np.random.default_rng(2).integers(VOCAB, size=4000).astype(np.uint16))
    heads = {
        name: make_head(HeadPlan(kind="eagle3", taps=READING.taps, length=variant.length).config(target), target)
        for name, variant in VARIANTS.items()
    }

    def weights_after(steps: int) -> dict[str, Tensor]:
        run = RunConfig(out=tmp_path, schedule=WarmStableDecay(budget_s=steps, decay_s=0))
        plan = HeadTrainingConfig(mix=LossMix(kl=1.0), sequences=2, length=48, span=8)
        assert feature_channel.train(target, heads, READING, text, (run, plan)).step == steps
        return {name: head.state_dict()["layers.0.mlp.up_proj.weight"].clone() for name, head in heads.items()}

    untrained = {name: head.state_dict()["layers.0.mlp.up_proj.weight"].clone() for name, head in heads.items()}
    first, second = weights_after(2), weights_after(4)
    for name in VARIANTS:
        assert not torch.equal(untrained[name], first[name])
        assert not torch.equal(first[name], second[name])


def test_its_examples_are_right() -> None:
    assert doctest.testmod(feature_channel).failed == 0
