"""Servers as processes: each has a port of its own, and none is taken for another one."""

from types import SimpleNamespace
from typing import Any

import pytest

from mirrorsd.bench.claims.serving import commands
from mirrorsd.bench.claims.serving.commands import Command


def test_no_port_is_given_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """The system may name one again before its first owner listens there."""
    ports = iter([41_001, 41_001, 41_001, 41_002])

    class Free:
        def __enter__(self) -> Any:
            return SimpleNamespace(getsockname=lambda: ("127.0.0.1", next(ports)))

        def __exit__(self, *_: object) -> None: ...

    monkeypatch.setattr(commands, "socket", SimpleNamespace(create_server=lambda _: Free()))
    monkeypatch.setattr(Command, "start", lambda _: None)
    assert [Command("serve").port for _ in range(2)] == [41_001, 41_002]


def test_one_that_has_ended_is_not_ready_though_another_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Command, "is_ready", True)
    with Command("no such command") as command:
        command.process.wait(60)
        with pytest.raises(SystemExit, match="does not start: status 2"):
            command.wait()
