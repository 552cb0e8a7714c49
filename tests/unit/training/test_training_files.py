"""Adapters, coverage, checkpoints, schedule: small round trips."""

from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from mirrorsd.graphs.errors import ConfigError, ExportError
from mirrorsd.graphs.names import EXIT_ADAPTERS_FILE
from mirrorsd.training.exit_adapter import load_adapters, make_adapters, save_adapters
from mirrorsd.training.reports.exit_coverage import measure_coverage
from mirrorsd.training.run.checkpoints import load_checkpoint, save_checkpoint
from mirrorsd.training.run.schedule import TrainingClock, WarmStableDecay
from mirrorsd.training.text.self_text import SelfText


def tiny_target() -> LlamaForCausalLM:
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=50, hidden_size=32, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2, head_dim=8,
        intermediate_size=48, tie_word_embeddings=True, max_position_embeddings=64, initializer_range=0.3,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


def test_adapters_come_back(tmp_path: Path) -> None:
    adapters = make_adapters(32, [2, 3], rank=4)
    torch.nn.init.normal_(adapters[3].up.weight)
    save_adapters(tmp_path, adapters, dtype=torch.float32)
    again = load_adapters(tmp_path)
    hidden = torch.randn(5, 32)
    assert sorted(again) == [2, 3]
    torch.testing.assert_close(again[3](hidden), adapters[3](hidden))


def test_an_untrained_adapter_changes_nothing() -> None:
    hidden = torch.randn(5, 32)
    torch.testing.assert_close(make_adapters(32, [2], rank=4)[2](hidden), hidden)


def test_adapter_files_of_another_kind_are_refused(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    save_file({"weight": torch.zeros(1)}, tmp_path / EXIT_ADAPTERS_FILE, metadata={"format": "something"})
    with pytest.raises(ExportError, match="'something'; expected 'mirrorsd-exit-1'"):
        load_adapters(tmp_path)
    (tmp_path / EXIT_ADAPTERS_FILE).write_bytes((tmp_path / EXIT_ADAPTERS_FILE).read_bytes()[:-2])
    with pytest.raises(ExportError, match=r"exit_adapters\.safetensors cannot be read"):
        load_adapters(tmp_path)


def test_missing_adapters_say_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(ExportError, match="train adapters first"):
        load_adapters(tmp_path)


def test_rank_has_a_range() -> None:
    with pytest.raises(ConfigError, match=r"rank is 40; allowed are 1\.\.32"):
        make_adapters(32, [2], rank=40)


def test_coverage_of_the_last_layer_is_complete() -> None:
    # An exit after all layers is the target itself (normed twice here, which moves no argmax: its weights are 1).
    target = tiny_target()
    texts = [SelfText(torch.randint(0, 50, (20,)).tolist(), prompt_length=4)]
    found = measure_coverage(target, make_adapters(32, [2, 4], rank=4), texts)
    assert found["positions"] == 16
    assert found["layers"]["4"]["untrained"] == {"1": 1.0, "4": 1.0, "8": 1.0, "16": 1.0}
    assert found["layers"]["2"]["untrained"]["1"] <= found["layers"]["2"]["untrained"]["16"] < 1.0


def test_a_checkpoint_appears_complete_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "run" / "last.pt"
    assert load_checkpoint(path) is None
    save_checkpoint(path, {"weight": torch.ones(2), "step": 3})
    state = load_checkpoint(path)
    assert state is not None and state["step"] == 3
    assert [file.name for file in path.parent.iterdir()] == ["last.pt"]


def test_schedule_warms_holds_and_decays() -> None:
    schedule = WarmStableDecay(budget_s=100, warm_steps=10, decay_s=40)
    after = [schedule.share(second, step) for second, step in ((0, 0), (1, 4), (2, 9), (30, 90), (80, 300), (100, 400))]
    assert after == [0.1, 0.5, 1, 1, 0.5, 0]
    assert not schedule.is_decaying(59) and schedule.is_decaying(60)


def test_slow_steps_are_warm_after_a_tenth_of_the_budget() -> None:
    schedule = WarmStableDecay(budget_s=1000, warm_steps=50, decay_s=0)
    assert [schedule.share(60.0 * step, step) for step in range(3)] == [0.02, 0.6, 1.0]


def test_schedule_longer_than_the_budget_is_refused() -> None:
    with pytest.raises(ConfigError, match="give a longer budget"):
        WarmStableDecay(budget_s=30, decay_s=40)


def test_a_pause_counts_as_one_usual_step() -> None:
    clock = TrainingClock()
    for step_s in (60.0, 1.0, 1.0, 600.0, 1.0):  # compilation, two steps, a pause, a step
        clock.count(step_s)
    assert clock.trained_s == pytest.approx(4.0)


def test_a_machine_that_stays_slow_is_no_pause() -> None:
    """The second long step in a row counts as it is, and all that follow; the one before it was taken for a pause."""
    clock = TrainingClock()
    for step_s in (60.0, 1.0, 1.0, 5.0, 5.0, 5.0, 5.0, 6.0):
        clock.count(step_s)
    assert clock.trained_s == pytest.approx(2 + 1 + 5 + 5 + 5 + 6)
    clock.count(600.0)
    assert clock.trained_s < 24 + 6, "a pause is one still"


def test_pauses_now_and_then_change_no_speed() -> None:
    clock = TrainingClock()
    for step_s in (60.0, *(1.0, 600.0) * 3):
        clock.count(step_s)
    assert clock.trained_s == pytest.approx(6)
