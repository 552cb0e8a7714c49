"""A training loop for a given number of seconds, which can be killed and resumed at any time.

Owns: the loop, the checkpoints, the table of losses.
Does not own: what a step does (a function), the shape of the schedule (`schedule.py`).
"""

from __future__ import annotations

import csv
import json
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from mirrorsd.graphs import names
from mirrorsd.graphs.errors import ConfigError
from mirrorsd.graphs.folder_lock import FolderLock
from mirrorsd.graphs.whole_file import write_whole
from mirrorsd.training.run.checkpoints import load_checkpoint, save_checkpoint
from mirrorsd.training.run.schedule import TrainingClock, WarmStableDecay

__all__ = [
    "CHECKPOINT_FILE",
    "LOSSES_FILE",
    "RunConfig",
    "RunProgress",
    "Stateful",
    "TimedRun",
    "print_progress",
    "use_threads",
]

LOSSES_FILE = "losses.csv"
CHECKPOINT_FILE = "last.pt"
LOCK_FILE = "run.lock"
_SHOW_S = 20.0
"""Somebody who waits hears how far it is this often, however few rows there are."""


class Stateful(Protocol):
    """What a checkpoint can hold: a model, an optimiser, a token stream."""

    def state_dict(self) -> Any:
        """All that is needed to go on."""

    def load_state_dict(self, state: Any, /) -> Any:
        """Go on from what `state_dict` gave."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunConfig:
    """Where and how long to train.

    Attributes:
        out: Folder for checkpoints and the table of losses.
        schedule: Learning rate over the steps of the warm-up and the budget of seconds.
        deadline: Seconds since 1970 at which the run must be over; pauses then shorten it. None: no deadline.
        save_every_s: Training seconds between checkpoints.
        check_every_s: Training seconds between measurements on held-back text.
        report_every: Steps between lines of progress.
        counts_cpu: Count seconds of a core, not seconds of the clock on the wall.
    """

    out: Path
    schedule: WarmStableDecay
    deadline: float | None = None
    save_every_s: float = 100.0
    check_every_s: float = 300.0
    report_every: int = 20
    counts_cpu: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class RunProgress:
    """How far a run is: steps, tokens, seconds of its budget, seconds of the last step, losses by name."""

    step: int
    tokens: int
    elapsed_s: float
    budget_s: float
    step_s: float
    losses: dict[str, float]

    @property
    def left_s(self) -> float:
        """Return the seconds of the budget that are left."""
        return max(0.0, self.budget_s - self.elapsed_s)

    def losses_in_words(self) -> str:
        """Name every loss."""
        return " ".join(f"{name} {loss:.3f}" for name, loss in self.losses.items())

    def __str__(self) -> str:
        """Say it in one line."""
        so_far = f"step {self.step}, {self.tokens / 1e6:.2f} M tokens, {self.elapsed_s:.0f} s"
        return f"{so_far}, {self.left_s:.0f} s left: {self.losses_in_words()} ({self.step_s:.2f} s)"


def use_threads(count: int) -> None:
    """Compute with `count` threads; 0 leaves it to PyTorch."""
    if count:
        torch.set_num_threads(count)


def print_progress(progress: RunProgress) -> None:
    """Print one line."""
    print(progress, flush=True)


class TimedRun:
    """Repeat a step until the budget is spent; `last.pt` and `pre_decay.pt` hold everything needed to go on."""

    def __init__(
        self, config: RunConfig, parts: Mapping[str, Stateful], show: Callable[[RunProgress], None] = print_progress
    ) -> None:
        """Start a run of `parts`, or go on with the one saved in `config.out`; `show` is told now and then.

        Raises:
            ConfigError: Another process trains in that folder, or the checkpoint there is damaged or of other sizes.
        """
        self._config, self._parts, self._show = config, parts, show
        self.step, self.tokens = 0, 0
        self._lock = FolderLock(config.out / LOCK_FILE, "training")
        trained_s = self._resume(load_checkpoint(config.out / CHECKPOINT_FILE))
        self.clock = TrainingClock(trained_s, counts_cpu=config.counts_cpu)
        self._saved_at = self._checked_at = trained_s
        self._shown_at = time.monotonic()

    def _resume(self, state: dict[str, Any] | None) -> float:
        """Put a saved state in place; return the seconds trained so far."""
        if state is None:
            return 0.0
        try:
            for name, part in self._parts.items():
                part.load_state_dict(state[name])
        except (KeyError, ValueError, RuntimeError) as error:
            raise ConfigError(
                f"{self._config.out / CHECKPOINT_FILE} belongs to a training of another kind or size "
                f"({str(error).splitlines()[0]}); give this one a folder of its own"
            ) from error
        self.step, self.tokens = state["step"], state["tokens"]
        _cut_table(self._config.out / LOSSES_FILE, self.step)
        print(f"going on from step {self.step}, {state['trained_s']:.0f} s", file=sys.stderr, flush=True)
        return float(state["trained_s"])

    def elapsed_s(self) -> float:
        """Return how far the schedule is: the seconds trained, or more where the deadline is nearer than that."""
        if self._config.deadline is None:
            return self.clock.trained_s
        left_s = self._config.deadline - time.time()
        return max(self.clock.trained_s, self._config.schedule.budget_s - left_s)

    def done_share(self) -> float:
        """Return the share of the budget that is over."""
        return self.elapsed_s() / self._config.schedule.budget_s if self._config.schedule.budget_s else 1.0

    def is_decaying(self) -> bool:
        """Say whether the learning rate is falling."""
        return self._config.schedule.is_decaying(self.elapsed_s())

    def run(self, train_step: Callable[[float], tuple[int, dict[str, float]]], check: Callable[[], None]) -> None:
        """Train until the budget is spent, then let go of the folder.

        Args:
            train_step: Takes the share of the peak learning rate; returns the tokens seen and the losses by name.
            check: Measures on held-back text and prints.

        Raises:
            ConfigError: The deadline is over, and nothing was trained before.
        """
        try:
            if not self.step and self._config.deadline is not None and time.time() >= self._config.deadline:
                raise ConfigError(
                    "--deadline is over before the first step, so nothing would be trained; give seconds since 1970 "
                    "that are still to come"
                )
            while self.elapsed_s() < self._config.schedule.budget_s:
                self._one_step(train_step)
                self._save_and_check(check)
            self.save(CHECKPOINT_FILE)
            check()
        finally:
            self._lock.release()

    def _one_step(self, train_step: Callable[[float], tuple[int, dict[str, float]]]) -> None:
        if self.is_decaying() and not (self._config.out / "pre_decay.pt").exists():
            self.save("pre_decay.pt")
        tokens, losses = train_step(self._config.schedule.share(self.elapsed_s(), self.step))
        step_s = self.clock.tick()
        self.step += 1
        self.tokens += tokens
        is_row = self.step % self._config.report_every == 0
        if is_row or time.monotonic() - self._shown_at >= _SHOW_S:
            self._report(losses, step_s, is_row=is_row)

    def _save_and_check(self, check: Callable[[], None]) -> None:
        if self.clock.trained_s - self._saved_at > self._config.save_every_s:
            self._saved_at = self.clock.trained_s
            self.save(CHECKPOINT_FILE)
        if self.clock.trained_s - self._checked_at > self._config.check_every_s:
            self._checked_at = self.clock.trained_s
            check()

    def _report(self, losses: dict[str, float], step_s: float, *, is_row: bool) -> None:
        self._shown_at = time.monotonic()
        self._show(
            RunProgress(
                step=self.step,
                tokens=self.tokens,
                elapsed_s=self.elapsed_s(),
                budget_s=self._config.schedule.budget_s,
                step_s=step_s,
                losses=losses,
            )
        )
        if not is_row:
            return
        path = self._config.out / LOSSES_FILE
        is_new = not path.is_file() or not path.stat().st_size
        with path.open("a", newline="", encoding="utf-8") as file:
            writer = csv.writer(file)
            if is_new:
                writer.writerow(["step", "tokens", "seconds", *losses])
            writer.writerow(
                [self.step, self.tokens, round(self.elapsed_s(), 1), *(round(x, 4) for x in losses.values())]
            )

    def write_record(self, folder: Path) -> None:
        """Write into a finished model's folder its seconds (of a core or the clock), steps and tokens."""
        counts = "core" if self._config.counts_cpu else "clock"
        record = {
            "seconds": round(self.clock.trained_s, 1),
            "counts": counts,
            "steps": self.step,
            "tokens": self.tokens,
        }
        (folder / names.TRAINING_FILE).write_text(json.dumps(record) + "\n", encoding="utf-8")

    def save(self, name: str) -> None:
        """Save everything that is needed to go on."""
        state: dict[str, Any] = {key: part.state_dict() for key, part in self._parts.items()}
        state |= {"step": self.step, "tokens": self.tokens, "trained_s": self.clock.trained_s}
        save_checkpoint(self._config.out / name, state)


def _cut_table(path: Path, step: int) -> None:
    """Drop the rows of steps that were lost with the last kill: they will be made again."""
    if not path.is_file() or not path.stat().st_size:  # as a full disk leaves it
        return
    header, *rows = path.read_text(encoding="utf-8").splitlines()
    kept = [row for row in rows if row.split(",")[0].isdigit() and int(row.split(",")[0]) <= step]
    write_whole(path, ("\n".join([header, *kept]) + "\n").encode())
