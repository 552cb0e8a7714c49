"""The expected memory of a bundle against the peak of a process that uses it to the end of its context."""

import subprocess
import sys
from pathlib import Path

import pytest

from mirrorsd.device_maps import load_device_map
from mirrorsd.graphs.bundle_files import read_bundle
from mirrorsd.machine.doctor.memory import SYSTEM, memory_needs

USE = """
import sys
from pathlib import Path
from mirrorsd import MirrorPipeline

with MirrorPipeline.load(sys.argv[1], device_map="cpu") as pipe:
    room = pipe.manifest.target.context
    pipe.generate("Once upon a time", max_new_tokens=room, ignore_eos=True, temperature=0.0, method="mirror")
status = dict(line.split(":") for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines())
print(*(int(status[name].split()[0]) * 1024 for name in ("VmHWM", "RssFile")))
"""
MOST_OF_FILES = 106 << 20
"""More of a library is mapped at once where its file lies in the page cache in large pieces: 106 MiB where pip has
installed it, 134 where uv has."""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").is_file(), reason="peaks are read from /proc")
def test_expected_memory_is_within_15_percent_of_the_peak(tiny_bundle: Path) -> None:
    """Of the second of two processes: the first may have to compile the draft. Peaks are resident memory."""
    needs = memory_needs(read_bundle(tiny_bundle), load_device_map("cpu"))
    expected = sum(need.total for need in needs if need.device == SYSTEM)
    command = [sys.executable, "-c", USE, str(tiny_bundle)]
    _, (peak, files) = (map(int, subprocess.check_output(command, text=True, timeout=300).split()) for _ in range(2))
    assert 0.85 <= expected / (peak - max(files - MOST_OF_FILES, 0)) <= 1.15
