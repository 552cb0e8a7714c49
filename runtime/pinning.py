"""Keeping a thread on its cores, so that two devices on one processor do not wait for each other."""

import os
from collections.abc import Sequence


def pin_current_thread(cores: Sequence[int]) -> None:
    """Keep the calling thread, and the threads it starts, on these cores (Linux; elsewhere the system decides).

    Cores that this process may not use are left out; if none is left the thread stays where it is.
    """
    if cores and hasattr(os, "sched_setaffinity"):
        usable = set(cores) & os.sched_getaffinity(0)
        if usable:
            os.sched_setaffinity(0, usable)
