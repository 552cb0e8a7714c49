"""What tests lean on themselves."""

import signal
from types import SimpleNamespace
from typing import Any

import pytest

from mirrorsd.tests.support.looks import LOOKS, pytest_timeout_set_timer


@pytest.mark.skipif(not hasattr(signal, "SIGALRM"), reason="no alarms here")
def test_a_test_is_over_its_limit_by_looks_and_not_by_the_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    handlers: list[Any] = []
    timers: list[tuple[float, ...]] = []
    ended: list[object] = []
    plugin = SimpleNamespace(timeout_sigalrm=lambda item, settings: ended.append((item, settings)))
    item = SimpleNamespace(config=SimpleNamespace(pluginmanager=SimpleNamespace(getplugin={"timeout": plugin}.get)))
    settings = SimpleNamespace(method="signal", timeout=240.0)
    with monkeypatch.context() as patch:
        patch.setattr(signal, "signal", lambda _, handler: handlers.append(handler))
        patch.setattr(signal, "setitimer", lambda _, *seconds: timers.append(seconds))
        assert pytest_timeout_set_timer(item, settings)
        for _ in range(LOOKS - 1):
            handlers[0]()
        assert not ended, "whatever time has passed"
        handlers[0]()
        handlers[0]()
        assert ended == [(item, settings)], "once"
        item.cancel_timeout()
    assert timers == [(240.0 / LOOKS, 240.0 / LOOKS), (0,)], "a stopped process gets one alarm, then it looks on"
    assert handlers[1:] == [signal.SIG_DFL]
    assert pytest_timeout_set_timer(item, SimpleNamespace(method="thread", timeout=1.0)) is None
