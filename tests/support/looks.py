"""Limits of tests in looks: a process that is stopped for a while, by whoever measures beside it, does not look.

Owns: when a test is over its limit. Does not own: the limit, and what is then said (pytest-timeout).
"""

import signal
import threading
from typing import Any

import pytest

LOOKS = 24
"""In the limit of a test. However long the process is stopped, that counts as one of them."""


@pytest.hookimpl(optionalhook=True)
def pytest_timeout_set_timer(item: Any, settings: Any) -> bool | None:
    """Look again and again; the last look ends the test. None: as pytest-timeout does it, where there are no alarms."""
    if settings.method != "signal" or threading.current_thread() is not threading.main_thread():
        return None
    plugin, looks = item.config.pluginmanager.getplugin("timeout"), list[int]()

    def look(*_: object) -> None:
        __tracebackhide__ = True
        looks.append(len(looks))
        if len(looks) == LOOKS:
            plugin.timeout_sigalrm(item, settings)

    def cancel() -> None:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)

    item.cancel_timeout = cancel
    signal.signal(signal.SIGALRM, look)
    signal.setitimer(signal.ITIMER_REAL, settings.timeout / LOOKS, settings.timeout / LOOKS)
    return True
