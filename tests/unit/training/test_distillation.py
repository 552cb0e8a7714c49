"""Forty steps of training bring a tiny draft and tiny adapters nearer to a tiny target."""

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from mirrorsd.graphs.errors import ConfigError
from mirrorsd.training.distill_draft import (
    DistillConfig,
    MarkedText,
    distill_draft,
    distill_losses,
    draw_tip_rows,
    embed_like_target,
)
from mirrorsd.training.exit_adapter import exit_losses, make_adapters, train_adapters
from mirrorsd.training.models.streaming_draft import StreamingDraft
from mirrorsd.training.run import timed_run
from mirrorsd.training.run.device import product_dtype
from mirrorsd.training.run.loss_curve import plot_losses
from mirrorsd.training.run.schedule import TrainingClock, WarmStableDecay
from mirrorsd.training.run.timed_run import LOSSES_FILE, RunConfig, RunProgress
from mirrorsd.training.target_rows import TargetRows
from mirrorsd.training.text.token_stream import TokenStream


def tiny_model(layers: int, hidden: int, seed: int) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=40, hidden_size=hidden, num_hidden_layers=layers, num_attention_heads=2, num_key_value_heads=1,
        head_dim=8, intermediate_size=32, tie_word_embeddings=True, max_position_embeddings=64, initializer_range=0.4,
    )  # fmt: skip
    return LlamaForCausalLM(config)


@pytest.fixture
def target() -> LlamaForCausalLM:
    return tiny_model(4, 32, seed=1)


@pytest.fixture
def text() -> TokenStream:
    return TokenStream(np.random.default_rng(0).integers(0, 40, 4000).astype(np.uint16))


@pytest.fixture(autouse=True)
def one_second_per_step(monkeypatch: pytest.MonkeyPatch) -> None:
    def tick(clock: TrainingClock) -> float:
        clock.trained_s += 1.0
        return 1.0

    monkeypatch.setattr(TrainingClock, "tick", tick)
    monkeypatch.setattr(timed_run, "_SHOW_S", math.inf)  # rows alone are shown, however slow the machine is


def short_run(out: Path) -> RunConfig:
    return RunConfig(out=out, schedule=WarmStableDecay(budget_s=40, warm_steps=2, decay_s=10), report_every=5)


CONFIG = DistillConfig(sequences=4, length=24, is_compiled=False)


def test_distillation_brings_draft_and_streams_nearer(
    target: LlamaForCausalLM, text: TokenStream, tmp_path: Path
) -> None:
    draft = StreamingDraft(tiny_model(2, 16, seed=2), num_streams=2, num_stream_layers=1)
    taken = MarkedText.of(text.take_marked(4, 24))
    tips = draw_tip_rows(CONFIG, 2, seed=5)
    before = distill_losses(target, draft, taken, tips, CONFIG)
    distill_draft(target, draft, (text, text), short_run(tmp_path), CONFIG)
    after = distill_losses(target, draft, taken, tips, CONFIG)
    assert after.main < before.main
    assert (after.streams < before.streams).all()
    plot_losses(tmp_path / LOSSES_FILE, tmp_path / "losses.png")
    assert (tmp_path / "losses.png").stat().st_size > 1000


def test_streams_alone_learn_and_the_main_rows_stay(
    target: LlamaForCausalLM, text: TokenStream, tmp_path: Path
) -> None:
    streams = {"num_streams": 2, "num_stream_layers": 1, "stream_rank": 4, "link_rank": 8}
    draft = StreamingDraft(tiny_model(2, 16, seed=2), **streams)
    config = replace(CONFIG, streams_only=True, stream_weight=0.5)
    assert config.streams_from > 0
    base = {name: weight.clone() for name, weight in draft.base.state_dict().items()}
    taken, tips = MarkedText.of(text.take_marked(4, 24)), draw_tip_rows(CONFIG, 2, seed=5)
    before = distill_losses(target, draft, taken, tips, config)
    distill_draft(target, draft, (text, text), short_run(tmp_path), config)
    after = distill_losses(target, draft, taken, tips, config)
    assert (after.streams < before.streams).all()
    assert draft.link is not None and draft.link.up.weight.any()
    assert all(torch.equal(weight, base[name]) for name, weight in draft.base.state_dict().items())


def test_a_linked_stream_is_told_the_true_tokens_before_its_own(target: LlamaForCausalLM, text: TokenStream) -> None:
    draft = StreamingDraft(tiny_model(2, 16, seed=2), num_streams=2, num_stream_layers=1, link_rank=4)
    assert draft.link is not None
    draft.link.up.weight.data.normal_()
    taken, tips = MarkedText.of(text.take_marked(1, 12)), torch.tensor([3])
    losses = distill_losses(target, draft, taken, tips, CONFIG)
    by_target = target(taken.ids).logits.log_softmax(-1)
    streams = draft.linked(draft(taken.ids, tips).streams, taken.ids[:, [[4, 5]]], taken.ids[:, [[3, 4]]])
    by_streams = draft.logits(streams).log_softmax(-1)
    expected = (by_target[0, 5].exp() * (by_target[0, 5] - by_streams[0, 0, 1])).sum()
    assert losses.streams[1].item() == pytest.approx(expected.item(), rel=1e-4)


def test_streams_learn_from_the_row_that_far_ahead(target: LlamaForCausalLM, text: TokenStream) -> None:
    # A draft that is the target has no loss at its main rows; stream j is compared with the target at row r + j.
    draft = StreamingDraft(target, num_streams=2, num_stream_layers=1)
    taken, tips = MarkedText.of(text.take_marked(1, 12)), torch.tensor([3])
    losses = distill_losses(target, draft, taken, tips, CONFIG)
    assert losses.main.item() == pytest.approx(0, abs=1e-5)
    assert losses.agreement.item() == 1.0
    by_target = target(taken.ids).logits.log_softmax(-1)
    by_streams = draft.logits(draft(taken.ids, tips).streams).log_softmax(-1)
    expected = (by_target[0, 5].exp() * (by_target[0, 5] - by_streams[0, 0, 1])).sum()
    assert losses.streams[1].item() == pytest.approx(expected.item(), rel=1e-4)


def test_streams_join_late_and_learn_from_then_on(target: LlamaForCausalLM, text: TokenStream, tmp_path: Path) -> None:
    draft = StreamingDraft(tiny_model(2, 16, seed=2), num_streams=2, num_stream_layers=1)
    untrained, seen = draft.stream_embeddings.detach().clone(), []

    def show(progress: RunProgress) -> None:
        moved = bool((draft.stream_embeddings != untrained).any())
        seen.append((math.isnan(progress.losses["stream_1"]), moved))

    config = replace(CONFIG, streams_from=0.5)
    distill_draft(target, draft, (text, text), short_run(tmp_path), config, show)
    half = len(seen) // 2
    assert seen[:half] == [(True, False)] * half
    assert seen[half:] == [(False, True)] * (len(seen) - half)


def test_what_the_target_says_of_a_text_is_computed_once_and_teaches_the_same(
    target: LlamaForCausalLM, text: TokenStream, tmp_path: Path
) -> None:
    short, drafts, read = TokenStream(text.tokens[:200]), [], []
    target.model.register_forward_hook(lambda _module, given, _output: read.append(len(given[0])))
    for name, remembered in (("never", 0), ("always", 1 << 20)):
        draft = StreamingDraft(tiny_model(2, 16, seed=2), num_streams=2, num_stream_layers=1)
        config = replace(CONFIG, remembered_bytes=remembered)
        distill_draft(target, draft, (short, text), short_run(tmp_path / name), config)
        drafts.append(draft)
        assert (sum(read) > 4 * len(short) / 24) == (not remembered), "two rectangles, and the held-back text's four"
        read.clear()
    never, always = (draft.state_dict() for draft in drafts)
    assert all(torch.equal(weight, always[name]) for name, weight in never.items())


def test_no_more_is_remembered_than_there_is_memory_for(target: LlamaForCausalLM, text: TokenStream) -> None:
    first, second = text.take(2, 24)[:, :-1], text.take(2, 24)[:, :-1]
    rows_of = TargetRows(target, most_bytes=2 * 24 * (32 * product_dtype().itemsize + 8))
    with torch.no_grad():
        expected = target.model(torch.cat((first, second))).last_hidden_state
    for _ in range(2):
        found = torch.cat((rows_of(first), rows_of(second)))
        torch.testing.assert_close(found.float(), expected, atol=0.05, rtol=0.05)
    assert rows_of.num_computed == 6, "the second two are read again each time"


def test_padding_of_a_vocabulary_is_left_out(target: LlamaForCausalLM, text: TokenStream) -> None:
    draft = StreamingDraft(tiny_model(2, 16, seed=2), num_streams=1, num_stream_layers=1)
    taken, tips = MarkedText.of(text.take_marked(1, 12)), torch.tensor([3])
    expected = distill_losses(target, draft, taken, tips, CONFIG)
    target.resize_token_embeddings(44, mean_resizing=False)
    padded = distill_losses(target, draft, taken, tips, CONFIG)
    torch.testing.assert_close(padded.total, expected.total)


def test_prompts_count_as_much_as_they_should(target: LlamaForCausalLM, text: TokenStream) -> None:
    # Rows whose next token the target did not write; two rows' streams, of which one looks at written tokens only.
    draft = StreamingDraft(tiny_model(2, 16, seed=2), num_streams=1, num_stream_layers=1)
    ids, tips = text.take(1, 12)[:, :-1], torch.tensor([2, 7])
    own = torch.arange(12)[None] >= 6
    written = [distill_losses(target, draft, MarkedText(ids, mark), tips, CONFIG) for mark in (own, ~own)]
    config = replace(CONFIG, prompt_weight=0.0)
    alone = [distill_losses(target, draft, MarkedText(ids, mark), tips, config) for mark in (own, ~own)]
    assert written[0].total.item() == pytest.approx(written[1].total.item()), "with a weight of 1 it does not matter"
    assert (alone[0].total + alone[1].total).item() == pytest.approx(2 * written[0].total.item(), rel=1e-4)
    assert alone[0].total.item() != pytest.approx(alone[1].total.item(), rel=1e-3)
    assert alone[0].main.item() == pytest.approx(written[0].main.item()), "what is shown counts every row"


def test_tip_rows_leave_room_for_the_streams() -> None:
    tips = draw_tip_rows(CONFIG, 3, seed=0)
    assert len(tips) == 4
    assert tips.tolist() == sorted(set(tips.tolist()))
    assert int(tips.max()) + 3 < CONFIG.length


def test_embeddings_keep_the_targets_neighbourhoods(target: LlamaForCausalLM) -> None:
    # As many directions as the target has: inner products of the centred rows survive up to one factor.
    draft = StreamingDraft(tiny_model(2, 32, seed=2), num_streams=2, num_stream_layers=1)
    embed_like_target(draft, target)
    theirs = target.get_input_embeddings().weight.detach()
    ours = draft.base.get_input_embeddings().weight.detach()
    theirs = theirs - theirs.mean(0)
    torch.testing.assert_close(
        torch.nn.functional.normalize(ours @ ours.T),
        torch.nn.functional.normalize(theirs @ theirs.T),
        atol=1e-3,
        rtol=0,
    )


def test_adapters_bring_exits_nearer(target: LlamaForCausalLM, text: TokenStream, tmp_path: Path) -> None:
    adapters = make_adapters(32, [1, 2], rank=8)
    ids = text.take(4, 24)[:, :-1]
    modules = torch.nn.ModuleDict({str(layer): adapter for layer, adapter in adapters.items()})
    before = exit_losses(target, modules, ids)
    train_adapters(target, adapters, text, short_run(tmp_path), batch=(4, 24))
    after = exit_losses(target, modules, ids)
    assert all(after[layer] < before[layer] for layer in ("1", "2"))


def test_shares_have_a_range() -> None:
    with pytest.raises(ConfigError, match=r"tip_share is 1.5; allowed is 0\.\.1"):
        DistillConfig(tip_share=1.5)
