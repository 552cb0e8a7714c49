"""Heads of every kind learn from a tiny target, go on after a stop, and come back from their folder."""

import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from mirrorsd.cli.application import run
from mirrorsd.families import parts_of
from mirrorsd.families.decoder_parts import LogitScale
from mirrorsd.graphs.errors import ConfigError, ExportError
from mirrorsd.graphs.names import TRAINED_HEADS
from mirrorsd.training.divergence import LossMix
from mirrorsd.training.heads.features import Teacher, teaching
from mirrorsd.training.heads.head_folder import load_head, own_tensors, save_head
from mirrorsd.training.heads.head_report import posterior_noise, report_head
from mirrorsd.training.heads.head_shape import HeadPlan, make_head, num_trained
from mirrorsd.training.heads.head_training import HeadTrainingConfig, draw_spans, head_losses, train_head
from mirrorsd.training.heads.vocabulary_loss import SpanTeacher, vocabulary_loss
from mirrorsd.training.run.device import product_dtype
from mirrorsd.training.run.memory_need import training_bytes
from mirrorsd.training.run.schedule import TrainingClock, WarmStableDecay
from mirrorsd.training.run.timed_run import LOSSES_FILE, RunConfig
from mirrorsd.training.text.answers import continue_sampled
from mirrorsd.training.text.self_text import SelfText, SelfTextConfig, generate_batch
from mirrorsd.training.text.token_stream import TokenStream

PLANS = {
    "medusa": HeadPlan(kind="medusa"),
    "medusa, own vocabularies": HeadPlan(kind="medusa", vocabulary="own", length=2),
    "hydra behind a layer": HeadPlan(kind="hydra", vocabulary="low-rank", head_rank=16, num_layers=1),
    "eagle3": HeadPlan(kind="eagle3", length=3),
    "eagle3, fewer tokens": HeadPlan(kind="eagle3", length=3, vocabulary="reduced", num_logits=20),
    "block": HeadPlan(kind="block", length=3, num_layers=1, link_rank=8),
    "streaming": HeadPlan(kind="streaming", length=3, num_layers=2, adapter_rank=8),
}


@pytest.fixture
def target() -> LlamaForCausalLM:
    """Its next token is mostly a matter of the last one, so that small heads can learn what it does."""
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=40, hidden_size=32, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2, head_dim=8,
        intermediate_size=48, tie_word_embeddings=False, max_position_embeddings=64, initializer_range=0.1,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval().requires_grad_(False)
    model.model.embed_tokens.weight.normal_()
    model.lm_head.weight.normal_(std=0.5)
    return model


@pytest.fixture
def text(target: LlamaForCausalLM) -> TokenStream:
    """What the target writes at temperature 1."""
    prompts = [[a, b] for a in range(0, 40, 2) for b in range(0, 40, 4)]
    config = SelfTextConfig(ends=(99,), max_new_tokens=20)
    written = generate_batch(target, prompts, torch.ones(len(prompts)), config)
    return TokenStream(np.concatenate([np.array(tokens, np.uint16) for tokens in written]))


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Products this small only wait for a second thread."""
    usual = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(usual)


@pytest.fixture(autouse=True)
def one_second_per_step(monkeypatch: pytest.MonkeyPatch) -> None:
    def tick(clock: TrainingClock) -> float:
        clock.trained_s += 1.0
        return 1.0

    monkeypatch.setattr(TrainingClock, "tick", tick)


def a_run(out: Path, steps: int = 60) -> RunConfig:
    schedule = WarmStableDecay(budget_s=steps, warm_steps=2, decay_s=10)
    return RunConfig(out=out, schedule=schedule, report_every=5, save_every_s=9.5)


def a_training(kind: str, **changes: Any) -> HeadTrainingConfig:
    sizes: Any = {"sequences": 8, "length": 24, "span": 6, "row_share": 0.5, "is_compiled": False}
    return HeadTrainingConfig(mix=LossMix(**HeadPlan(kind=kind).usual.loss), **{**sizes, **changes})


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_a_head_learns_and_comes_back_from_its_folder(
    plan: HeadPlan, target: LlamaForCausalLM, text: TokenStream, tmp_path: Path
) -> None:
    network = make_head(plan.config(target), target, text.tokens)
    config = a_training(plan.kind)
    taken = text.take_marked(8, 24)
    spans, teacher = draw_spans(config, network.config.length, 3), Teacher(target, target.lm_head.weight)
    with torch.no_grad():
        before = head_losses(teacher, network, taken, spans, config)
    train_head(target, network, (text, text), a_run(tmp_path / "work"), config)
    with torch.no_grad():
        after = head_losses(teacher, network, taken, spans, config)
    assert after.total < before.total
    assert after.agreement[0] > 5 / 40
    save_head(network, tmp_path)
    again = load_head(tmp_path, target)
    with torch.no_grad():
        same = head_losses(teacher, again, taken, spans, config)
    torch.testing.assert_close(same.total, after.total, rtol=0.01, atol=0.01)
    assert not set(own_tensors(network)) & set(network.config.borrowed)


@pytest.mark.parametrize(
    ("family", "stored_less_one", "like_llama"),
    [("llama", 0, True), ("qwen3", 0, True), ("qwen3_5_text", 1, True), ("gemma2", 1, False), ("olmo2", 0, False)],
)
def test_norms_begin_as_what_the_targets_multiply_by(family: str, stored_less_one: int, like_llama: bool) -> None:
    """Some families store a norm's weight less one; some have a norm behind attention by the name of that before it."""
    sizes: Any = {
        "vocab_size": 40, "hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4, "head_dim": 8,
        "num_key_value_heads": 2, "intermediate_size": 48, "max_position_embeddings": 64,
    }  # fmt: skip
    other = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **sizes)).eval().requires_grad_(False)
    for name, weight in other.named_parameters():
        if name.endswith("norm.weight"):
            weight.uniform_(0.2, 0.9)
    own = make_head(replace(PLANS["eagle3"], taps=(0, 1, 3)).config(other), other).state_dict()
    layer = other.model.layers[-1]
    assert torch.equal(own["norm.weight"], other.model.norm.weight + stored_less_one)
    wanted = layer.post_attention_layernorm.weight + stored_less_one if like_llama else torch.ones(32)
    assert torch.equal(own["layers.0.post_attention_layernorm.weight"], wanted)
    has_input_norm = hasattr(layer, "input_layernorm")
    assert torch.equal(
        own["fc_norm.2.weight"], layer.input_layernorm.weight + stored_less_one if has_input_norm else torch.ones(32)
    )


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_what_is_trained_is_known_before_there_is_a_head(plan: HeadPlan, target: LlamaForCausalLM) -> None:
    network = make_head(plan.config(target), target, np.arange(40))
    assert num_trained(network.config) == sum(
        weight.numel() for name, weight in own_tensors(network).items() if name != "lm_head.map"
    )


def test_a_head_counts_in_the_memory_that_a_training_needs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = {"vocab_size": 40, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "head_dim": 16}
    ends = {"bos_token_id": 1, "eos_token_id": 2, "max_position_embeddings": 1024}
    target = LlamaForCausalLM(LlamaConfig(**sizes, **ends, intermediate_size=48))
    target.save_pretrained(tmp_path / "target")
    without = training_bytes(fixed=target.num_parameters(), trained=0, tokens=4 * 512, vocab_size=40)
    monkeypatch.setattr("mirrorsd.machine.doctor.memory.free_memory", lambda _: without)
    command = ["train", "head", str(tmp_path / "target"), "-o", str(tmp_path / "head"), "--kind", "medusa"]
    assert run([*command, "--work", str(tmp_path / "work")]) == 2
    assert "GB of memory" in capsys.readouterr().err


def test_the_targets_weights_are_as_they_were_after_a_training(
    target: LlamaForCausalLM, text: TokenStream, tmp_path: Path
) -> None:
    before = {name: weight.clone() for name, weight in target.state_dict().items()}
    network = make_head(PLANS["eagle3"].config(target), target)
    train_head(target, network, (text, text), a_run(tmp_path, 12), a_training("eagle3"))
    assert all(torch.equal(weight, before[name]) for name, weight in target.state_dict().items())
    with teaching(target):
        assert parts_of(target).layers[0].mlp.up_proj.weight.dtype == product_dtype()


def test_a_stopped_training_goes_on_as_if_it_had_not_been(
    target: LlamaForCausalLM, text: TokenStream, tmp_path: Path
) -> None:
    def train(out: Path, steps: int) -> Any:
        text.place = 0
        network = make_head(PLANS["medusa"].config(target), target)
        schedule = WarmStableDecay(budget_s=steps, warm_steps=2, decay_s=0)
        run = RunConfig(out=out, schedule=schedule, report_every=1, save_every_s=4.5, check_every_s=1000)
        timed = train_head(target, network, (text, TokenStream(text.tokens)), run, a_training("medusa"))
        timed.write_record(out)
        return network

    whole = train(tmp_path / "whole", 12)
    train(tmp_path / "stopped", 5)
    resumed = train(tmp_path / "stopped", 12)
    records = [json.loads((tmp_path / out / "training.json").read_text()) for out in ("whole", "stopped")]
    assert records[0] == records[1], "both parts of a stopped training count"
    assert (records[0]["counts"], records[0]["steps"]) == ("clock", 12)
    for name, weight in own_tensors(whole).items():
        torch.testing.assert_close(resumed.state_dict()[name], weight)
    tables = [(tmp_path / name / LOSSES_FILE).read_text() for name in ("whole", "stopped")]
    assert tables[0] == tables[1]


def test_the_losses_gradient_is_autograds(target: LlamaForCausalLM) -> None:
    generator = torch.Generator().manual_seed(5)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    states, weight = draw(2, 5, 3, 8).requires_grad_(), draw(40, 8).requires_grad_()
    hidden, head, counts = draw(2, 7, 6), draw(40, 6), draw(2, 5, 3).abs()
    scale = LogitScale(divisor=2.0, cap=3.0)
    for mix in (LossMix(kl=1), LossMix(tv=1), LossMix(lk=1), LossMix(hard=1), LossMix(kl=0.3, tv=0.5, hard=0.2)):
        found = vocabulary_loss(states, weight, SpanTeacher(hidden, head, LogitScale()), counts, mix, scale=scale)
        expected = torch.zeros(())
        for guess in range(3):
            wanted = (hidden[:, guess : guess + 5] @ head.T).softmax(-1)
            logs = scale(states[:, :, guess] @ weight.T).log_softmax(-1)
            shared = torch.minimum(wanted, logs.exp()).sum(-1)
            soft = mix.kl * (wanted * (wanted.log() - logs)).sum(-1) + mix.tv * (1 - shared) - mix.lk * shared.log()
            hard = -logs.gather(-1, wanted.argmax(-1, keepdim=True))[..., 0]
            expected = expected + ((soft + mix.hard * hard) * counts[:, :, guess]).sum()
        torch.testing.assert_close(found.total, expected)
        ours, theirs = (torch.autograd.grad(total, (states, weight)) for total in (found.total, expected))
        torch.testing.assert_close(ours, theirs)


def test_the_report_counts_what_a_chain_would_accept(target: LlamaForCausalLM) -> None:
    """27 tokens behind a prompt of 3: the first is known, so 26 are walked in 4 + 1 at a time, the last step cut."""
    prompts = [[1, 2, 3], [9, 8, 7, 6]]
    config = SelfTextConfig(ends=(99,), max_new_tokens=20)
    written = generate_batch(target, prompts, torch.zeros(2), config)
    greedy = [SelfText(tokens, len(prompt)) for tokens, prompt in zip(written, prompts, strict=True)]
    network = make_head(PLANS["medusa"].config(target), target)
    found = report_head(target, network, {"a": greedy}, continue_sampled(target, prompts, 99, 20))
    assert found["greedy"]["texts"] == found["sampled"]["texts"] == 2
    assert 1 <= found["greedy"]["tokens_per_step"] <= 5
    assert found["agreement"][0] == found["greedy"]["reaches"][0]
    constant = [SelfText([5] * 30, 3)]
    with torch.no_grad():
        for head in network.heads:
            head[0].linear.bias.copy_(1e4 * target.lm_head.weight[5])  # type: ignore[index, union-attr, operator]
    sure = report_head(target, network, {"a": constant, "b": []}, [])
    assert sure["agreement"] == [1.0] * 4
    assert sure["greedy"]["tokens_per_step"] == sure["greedy"]["by_task"]["a"] == 4.5


def test_replayed_noise_chooses_the_text_and_is_gumbel_noise() -> None:
    generator = torch.Generator().manual_seed(7)
    logits = torch.randn(1, 30, generator=generator).expand(20000, -1)
    drawn = torch.distributions.Gumbel(0.0, 1.0).sample(logits.shape)
    chosen = (logits + drawn).argmax(-1)
    noise = posterior_noise(logits, chosen, generator)
    assert torch.equal((logits + noise).argmax(-1), chosen)
    assert abs(float(noise.mean()) - 0.5772) < 0.01
    assert abs(float(noise.var()) - 1.6449) < 0.03


@pytest.mark.parametrize(
    ("plan", "words"),
    [
        ({"taps": (2, 9, 1)}, "tap 9 asked of a target with 4 layers"),
        ({"kind": "serpent"}, f"kind is 'serpent'; allowed: {', '.join(sorted(TRAINED_HEADS))}"),
        ({"vocabulary": "large"}, "vocabulary is 'large'"),
    ],
)
def test_a_plan_that_does_not_fit_is_refused(plan: dict[str, Any], words: str, target: LlamaForCausalLM) -> None:
    with pytest.raises(ConfigError, match=words):
        replace(PLANS["eagle3"], **plan).config(target)


def test_a_head_of_another_target_or_a_damaged_one_is_refused(target: LlamaForCausalLM, tmp_path: Path) -> None:
    save_head(make_head(PLANS["medusa"].config(target), target), tmp_path)
    other = LlamaForCausalLM(LlamaConfig(**{**target.config.to_dict(), "vocab_size": 50}))
    with pytest.raises(ConfigError, match="it was made for another target"):
        load_head(tmp_path, other)
    replace(PLANS["medusa"].config(target), depth=2).write(tmp_path)
    with pytest.raises(ExportError, match="do not belong to its config"):
        load_head(tmp_path, target)
    shutil.copy(tmp_path / "config.json", tmp_path / "model.safetensors")
    with pytest.raises(ExportError, match="do not belong to its config"):
        load_head(tmp_path, target)


def test_texts_too_short_to_guess_are_refused() -> None:
    with pytest.raises(ConfigError, match="no row with 5 more behind it"):
        a_training("eagle3", length=4).spans(5)
    with pytest.raises(ConfigError, match="one must be above 0"):
        LossMix()


def test_a_published_head_is_read_as_one_of_ours(target: LlamaForCausalLM, tmp_path: Path) -> None:
    layer = {"model_type": "qwen3", "num_hidden_layers": 1, "intermediate_size": 48, "max_position_embeddings": 64}
    layer |= {"hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 40}
    methods = [{"proposal_type": "greedy", "speculative_tokens": 3}]
    config = {"speculators_model_type": "eagle3", "eagle_aux_hidden_state_layer_ids": [1, 2, 3]}
    config |= {"transformer_layer_config": layer, "speculators_config": {"proposal_methods": methods}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    network = make_head(replace(PLANS["eagle3"].config(target), qk_norm=True, tap_norm="none", taps=(1, 2, 3)), target)
    tensors = {name: torch.randn_like(weight) for name, weight in network.state_dict().items()}
    tensors["layers.0.hidden_norm.weight"] = tensors.pop("hidden_norm.weight")
    save_file(tensors, tmp_path / "model.safetensors")
    read = load_head(tmp_path, target)
    assert torch.equal(read.fc.weight, tensors["fc.weight"])
    assert torch.equal(read.hidden_norm.weight, tensors["layers.0.hidden_norm.weight"])
    assert read.embed_tokens.weight.data_ptr() == target.model.embed_tokens.weight.data_ptr()
    del tensors["fc.weight"]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ExportError, match="missing"):
        load_head(tmp_path, target)
