"""A run that was killed and resumed ends where an undisturbed one ends."""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from mirrorsd.graphs.errors import ConfigError
from mirrorsd.training.run.schedule import WarmStableDecay
from mirrorsd.training.run.timed_run import RunConfig, TimedRun
from mirrorsd.training.text.token_stream import TokenStream


class KilledError(Exception):
    pass


def train(
    out: Path, steps: int, kill_at: int | None = None, *, seconds: float = 1.0, warm_steps: int = 0
) -> list[float]:
    """Predict the next token with one linear layer; every step takes `seconds` of the budget, which is `steps`."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(10, 4), nn.Linear(4, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    stream = TokenStream(np.random.default_rng(0).integers(0, 10, 200).astype(np.uint16))
    schedule = WarmStableDecay(budget_s=steps, warm_steps=warm_steps, decay_s=2)
    config = RunConfig(out=out, schedule=schedule, save_every_s=0.5, check_every_s=1000)
    run = TimedRun(config, {"model": model, "optimizer": optimizer, "stream": stream})
    losses: list[float] = []

    def tick() -> float:
        run.clock.trained_s += seconds
        return seconds

    run.clock.tick = tick  # type: ignore[method-assign]

    def step(share: float) -> tuple[int, dict[str, float]]:
        if run.step == kill_at:
            raise KilledError
        ids = stream.take(2, 4)
        loss = nn.functional.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        return 8, {"loss": loss.item()}

    run.run(step, lambda: None)
    return losses


def test_a_resumed_run_repeats_the_undisturbed_one(tmp_path: Path) -> None:
    undisturbed = train(tmp_path / "one", steps=8)
    with pytest.raises(KilledError):
        train(tmp_path / "two", steps=8, kill_at=5)
    assert train(tmp_path / "two", steps=8) == undisturbed[5:]


def test_a_run_killed_in_its_warm_up_repeats_the_undisturbed_one(tmp_path: Path) -> None:
    """The machine is twice as fast after the kill: the warm-up follows the steps, not the seconds."""
    undisturbed = train(tmp_path / "one", steps=100, warm_steps=20)
    with pytest.raises(KilledError):
        train(tmp_path / "two", steps=100, kill_at=5, warm_steps=20)
    assert train(tmp_path / "two", steps=100, seconds=0.5, warm_steps=20)[:15] == undisturbed[5:20]


def test_the_state_before_the_decay_is_kept(tmp_path: Path) -> None:
    train(tmp_path, steps=8)
    assert torch.load(tmp_path / "pre_decay.pt", weights_only=True)["step"] == 6
    assert torch.load(tmp_path / "last.pt", weights_only=True)["step"] == 8


def test_a_stream_begins_again_at_its_end() -> None:
    stream = TokenStream(np.arange(9, dtype=np.uint16))
    assert stream.take(2, 3).tolist() == [[0, 1, 2, 3], [3, 4, 5, 6]]
    assert stream.take(2, 3).tolist() == [[0, 1, 2, 3], [3, 4, 5, 6]]


def test_a_stream_shorter_than_a_batch_is_refused() -> None:
    with pytest.raises(ConfigError, match="needs 13 tokens; there are 9"):
        TokenStream(np.arange(9, dtype=np.uint16)).take(3, 4)
