"""The expected memory of a bundle against the peak of a process that uses it to the end of its context."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).resolve().parents[2] / "bench" / "studies" / "memory_estimate.py"


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").is_file(), reason="peaks are read from /proc")
def test_expected_memory_is_within_15_percent_of_the_peak(tiny_bundle: Path) -> None:
    report = json.loads(subprocess.check_output([sys.executable, str(BENCH), str(tiny_bundle)], text=True))
    assert 0.85 <= report["expected_over_later"] <= 1.15
