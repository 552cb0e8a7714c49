"""A process of our own has few arenas: each keeps what is free in it."""

import os
import re
import subprocess
import sys

import pytest

THREADS = """
import ctypes, threading
from mirrorsd.devices.freed_memory import few_arenas, give_back

few_arenas()
barrier = threading.Barrier(65)

def work():
    held = [bytearray(100_000) for _ in range(4)]
    barrier.wait(60)
    barrier.wait(60)

for _ in range(64):
    threading.Thread(target=work, daemon=True).start()
barrier.wait(60)
give_back()
libc = ctypes.CDLL(None)
libc.fdopen.restype = ctypes.c_void_p
out = ctypes.c_void_p(libc.fdopen(1, b"w"))
libc.malloc_info(0, out)
libc.fflush(out)
barrier.wait(60)
"""


@pytest.mark.skipif(sys.platform != "linux" or not hasattr(os, "confstr"), reason="glibc has arenas")
def test_many_threads_share_few_arenas() -> None:
    done = subprocess.run([sys.executable, "-c", THREADS], capture_output=True, text=True, timeout=120, check=True)
    arenas = re.findall(r"<heap nr=", done.stdout)
    assert 1 <= len(arenas) <= max(2, os.cpu_count() or 1), done.stdout
