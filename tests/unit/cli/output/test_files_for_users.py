"""What a command writes for its user is there whole, or what was there before is: a disk may be full."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from mirrorsd.cli.chat.conversation import Conversation
from mirrorsd.cli.commands.trace import trace
from mirrorsd.graphs.errors import ConfigError
from mirrorsd.runtime.decoding.request import StepRecord
from mirrorsd.runtime.ledger import Span
from mirrorsd.runtime.reporting.trace import write_trace

limits = pytest.importorskip("resource", reason="there are no limits of files here")


def record(path: Path) -> None:
    spans = [Span("target", "prefix", 10.0, 10.01), Span("target", "suffix", 10.01, 10.02)]
    write_trace(path, spans, [StepRecord(10.0, 10.026, 4, 3, "late", "mirror", 0.026)], title="mirrorsd")


def draw(path: Path) -> None:
    trace(path.with_suffix(".trace"), path, None, None)


def save(path: Path) -> None:
    Conversation(messages=[{"role": "user", "content": "hello"}]).save(path)


@pytest.mark.parametrize("write", [record, draw, save])
def test_a_full_disk_leaves_what_was_there(write: Callable[[Path], None], tmp_path: Path) -> None:
    path = tmp_path / "written.svg"
    record(path.with_suffix(".trace"))
    write(path)
    before = path.read_bytes()
    with room_for(len(before) // 2), pytest.raises((OSError, ConfigError)):
        write(path)
    assert path.read_bytes() == before
    assert len([*tmp_path.iterdir()]) == 2


@contextmanager
def room_for(num_bytes: int) -> Iterator[None]:
    """No file of this process may be longer."""
    usual = limits.getrlimit(limits.RLIMIT_FSIZE)
    limits.setrlimit(limits.RLIMIT_FSIZE, (num_bytes, usual[1]))
    try:
        yield
    finally:
        limits.setrlimit(limits.RLIMIT_FSIZE, usual)
