"""A training that is killed with SIGKILL goes on from its last checkpoint with the losses of an undisturbed one."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

TRAINING = """
import sys, time
import numpy as np, torch
from pathlib import Path
from torch import nn
from mirrorsd.training.run.schedule import WarmStableDecay
from mirrorsd.training.run.timed_run import RunConfig, TimedRun
from mirrorsd.training.text.token_stream import TokenStream

def train(out, steps, stays_at=None):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(10, 4), nn.Linear(4, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    stream = TokenStream(np.random.default_rng(0).integers(0, 10, 200).astype(np.uint16))
    schedule = WarmStableDecay(budget_s=steps, warm_steps=0, decay_s=0)
    config = RunConfig(out=out, schedule=schedule, save_every_s=2.5, check_every_s=1000, report_every=1)
    run = TimedRun(config, {"model": model, "optimizer": optimizer, "stream": stream}, lambda progress: None)
    def tick():
        run.clock.trained_s += 1.0
        return 1.0
    run.clock.tick = tick
    shares = []
    def step(share):
        if len(shares) == stays_at:
            time.sleep(600)
        shares.append(share)
        ids = stream.take(2, 4)
        loss = nn.functional.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
        optimizer.zero_grad(); loss.backward(); optimizer.step()
        return 8, {"loss": loss.item()}
    run.run(step, lambda: None)
"""


def losses(folder: Path) -> dict[str, float]:
    rows = (folder / "losses.csv").read_text(encoding="utf-8").splitlines()[1:]
    return {row.split(",")[0]: float(row.split(",")[3]) for row in rows}


@pytest.mark.skipif(sys.platform == "win32", reason="SIGKILL")
def test_a_killed_training_goes_on_with_the_same_losses(tmp_path: Path) -> None:
    namespace: dict[str, object] = {}
    exec(TRAINING, namespace)  # the text is above
    train = namespace["train"]
    train(tmp_path / "undisturbed", 12)  # type: ignore[operator]
    killed = tmp_path / "killed"
    code = f"{TRAINING}\ntrain(Path({str(killed)!r}), 12, 6)"
    process = subprocess.Popen([sys.executable, "-c", code])
    try:
        deadline = time.monotonic() + 200
        while not (killed / "losses.csv").is_file() or len(losses(killed)) < 5:
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.02)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert len(losses(killed)) < 12
    train(killed, 12)  # type: ignore[operator]
    assert losses(killed) == pytest.approx(losses(tmp_path / "undisturbed"), abs=1e-3)
    assert len(losses(killed)) == 12
