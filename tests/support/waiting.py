"""Waits for what must come about, however slow the machine is; nothing here says how fast it must be."""

import threading
import time
from collections.abc import Callable

LIMIT_S = 60.0
"""A minute is long for any machine: what has not come about by then never will."""


def wait_until(holds: Callable[[], object], what: str = "it never came about", limit_s: float = LIMIT_S) -> None:
    """Look again and again until it holds; fail with `what` where it does not."""
    until = time.monotonic() + limit_s
    while not holds():
        assert time.monotonic() < until, what
        time.sleep(0.001)


class Entered(threading.Event):
    """An event that tells when somebody waits for it."""

    def __init__(self) -> None:
        super().__init__()
        self.is_awaited = threading.Event()

    def wait(self, timeout: float | None = None) -> bool:
        self.is_awaited.set()
        return super().wait(timeout)
