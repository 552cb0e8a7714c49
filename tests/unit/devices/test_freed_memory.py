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


SHAPES = """
import ctypes
import numpy as np, onnxruntime as ort
from mirrorsd.device_maps import TargetPlacement
from mirrorsd.devices.onnxruntime.onnx_bytes import ONNX_TYPES, model, node
from mirrorsd.devices.onnxruntime.providers import session_options

class Heap(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in "arena free fast maps mapped top fastest used unused last".split()]

mallinfo = ctypes.CDLL(None).mallinfo2
mallinfo.restype = Heap
nodes = [node("Add", [f"x{place}", f"x{place}"], [f"x{place + 1}"]) for place in range(100)]
graph = model(nodes, [("x0", ONNX_TYPES["float32"], 2)], [("x100", ONNX_TYPES["float32"], 2)])
session = ort.InferenceSession(graph, session_options(TargetPlacement()), providers=["CPUExecutionProvider"])

def run(sizes):
    for size in sizes:
        session.run(None, {"x0": np.zeros((1, size), np.float32)})

run(range(1_000, 1_020))
before = mallinfo().used
run(range(1_020, 1_220))
print(mallinfo().used - before)
"""


on_glibc = pytest.mark.skipif(sys.platform != "linux" or not hasattr(os, "confstr"), reason="glibc has arenas")


@on_glibc
def test_sizes_that_a_session_has_met_leave_nothing_behind() -> None:
    done = subprocess.run([sys.executable, "-c", SHAPES], capture_output=True, text=True, timeout=120, check=True)
    assert int(done.stdout) < 200 * 100, "bytes, of 200 shapes: less than one for each node"


@on_glibc
def test_many_threads_share_few_arenas() -> None:
    done = subprocess.run([sys.executable, "-c", THREADS], capture_output=True, text=True, timeout=120, check=True)
    arenas = re.findall(r"<heap nr=", done.stdout)
    assert 1 <= len(arenas) <= max(2, os.cpu_count() or 1), done.stdout
