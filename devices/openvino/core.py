"""OpenVINO as this program opens it.

Owns: making an `ov.Core`. Nobody else makes one.
"""

from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import openvino as ov

from mirrorsd.devices.openvino.draft_shapes import OPENVINO_ERRORS


def new_core() -> ov.Core:
    """An OpenVINO whose plugin for processors was loaded on a thread that has ended.

    On Linux that plugin gives the thread that loads it a stack for signals, and frees the stack when it is released
    (openvinotoolkit/openvino, pull request 11894). Released on another thread, it leaves the first one with a stack
    that is not there any more, and Python's next signal handler, that of Ctrl-C as well, ends the process. Here that
    stack is the ended thread's, so nobody is left with it.
    """
    core = ov.Core()
    with ThreadPoolExecutor(1, "openvino-loads") as thread, suppress(*OPENVINO_ERRORS):
        thread.submit(core.get_versions, "CPU").result()
    return core
