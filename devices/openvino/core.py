"""OpenVINO as this program opens it.

On Linux its plugin for processors gives the thread that loads it a stack for signals, and frees the stack when it is
released (openvinotoolkit/openvino, pull request 11894). Released on another thread, or after one that was loaded later,
it leaves the first thread with a stack that is not there any more, and Python's next signal handler, that of Ctrl-C as
well, ends the process. So the plugin is loaded on threads that end: nobody is left with such a stack.

Owns: making an `ov.Core`, and running what makes one of its own. Nobody else does either.
"""

from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

import openvino as ov

from mirrorsd.devices import endings
from mirrorsd.devices.openvino.draft_shapes import OPENVINO_ERRORS

Made = TypeVar("Made")


def new_core() -> ov.Core:
    """An OpenVINO whose plugin for processors is loaded."""
    core = ov.Core()
    with suppress(*OPENVINO_ERRORS):
        on_a_thread_that_ends(lambda: core.get_versions("CPU"))
    return core


def on_a_thread_that_ends(work: Callable[[], Made]) -> Made:
    """What `work` returns or raises: something that opens OpenVINO by itself."""
    with endings.beside(work) as made:
        return made.result()
