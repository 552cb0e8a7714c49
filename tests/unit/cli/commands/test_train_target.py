"""How much memory a training may use beyond what it needs, and what is said of its text."""

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from mirrorsd.cli.commands.train.target import note_text, spare_memory
from mirrorsd.training.run.memory_need import training_bytes
from mirrorsd.training.text import HELD_BACK_FOLDER


@pytest.mark.parametrize(("left", "expected"), [(6 << 30, 3 << 30), (0, 0), (-(1 << 30), 0), (None, 0)])
def test_half_of_what_a_training_leaves_free_may_be_used(
    monkeypatch: pytest.MonkeyPatch, left: int | None, expected: int
) -> None:
    checkpoint = SimpleNamespace(source=SimpleNamespace(num_parameters=1000), config={"vocab_size": 50})
    needed = training_bytes(fixed=1000, trained=10, tokens=64, vocab_size=50)
    free = None if left is None else needed + left
    monkeypatch.setattr("mirrorsd.machine.doctor.memory.free_memory", lambda _: free)
    assert spare_memory(checkpoint, trained=10, tokens=64) == expected  # type: ignore[arg-type]


def test_a_folder_without_text_to_learn_from_is_told_of(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As `train text --texts 0` leaves it, or a part that no batch fell to."""
    note_text(tmp_path)
    (tmp_path / HELD_BACK_FOLDER).mkdir()
    columns = {"lengths": [3], "prompt_lengths": [1], "temperatures": [0.0]}
    np.savez(tmp_path / HELD_BACK_FOLDER / "batch_00000.npz", tokens=np.array([1, 2, 3], np.uint16), **columns)
    note_text(tmp_path)
    first, second = capsys.readouterr().err.strip().splitlines()
    assert first.endswith("0 texts, 0.00 M tokens written by the target, and 0 texts held back")
    assert second.endswith("and 1 texts held back")
