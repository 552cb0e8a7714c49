"""How much memory a training may use beyond what it needs."""

from types import SimpleNamespace

import pytest

from mirrorsd.cli.commands.train.target import spare_memory
from mirrorsd.training.run.memory_need import training_bytes


@pytest.mark.parametrize(("left", "expected"), [(6 << 30, 3 << 30), (0, 0), (-(1 << 30), 0), (None, 0)])
def test_half_of_what_a_training_leaves_free_may_be_used(
    monkeypatch: pytest.MonkeyPatch, left: int | None, expected: int
) -> None:
    checkpoint = SimpleNamespace(source=SimpleNamespace(num_parameters=1000), config={"vocab_size": 50})
    needed = training_bytes(fixed=1000, trained=10, tokens=64, vocab_size=50)
    free = None if left is None else needed + left
    monkeypatch.setattr("mirrorsd.machine.doctor.memory.free_memory", lambda _: free)
    assert spare_memory(checkpoint, trained=10, tokens=64) == expected  # type: ignore[arg-type]
