"""Waits for what must come about, however slow the machine is; nothing here says how fast it must be."""

import threading
import time
from collections.abc import Callable

LOOKS = 60_000
"""A minute and more, which is long for any machine: what has not come about by then never will.

Looks are counted, for a process that is stopped for a while does not look.
"""
LOOK_S = 0.001


def wait_until(holds: Callable[[], object], what: str = "it never came about", looks: int = LOOKS) -> None:
    """Look again and again until it holds; fail with `what` where it does not."""
    for _ in range(looks):
        if holds():
            return
        time.sleep(LOOK_S)
    raise AssertionError(what)


class Entered(threading.Event):
    """An event that tells when somebody waits for it."""

    def __init__(self) -> None:
        super().__init__()
        self.is_awaited = threading.Event()

    def wait(self, timeout: float | None = None) -> bool:
        self.is_awaited.set()
        return super().wait(timeout)
