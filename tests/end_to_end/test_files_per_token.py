"""One token's way through the runtime stays short: few pages have to be known to follow it."""

import json
import subprocess
import sys
from pathlib import Path

STUDY = Path(__file__).resolve().parents[2] / "bench" / "studies" / "files_per_token.py"
MOST = {"plain": 11, "serial": 14, "mirror": 16, "auto": 17}
"""Of a greedy text, whose tokens the target's graph chooses."""
MORE = {"greedy": 0, "sampled": 2, "filtered, penalised": 4}


def test_a_token_passes_few_files_by_any_method(tiny_bundle: Path, tmp_path: Path) -> None:
    """Greedy, sampled, and with a filter and a penalty; the steps of which something is compiled pass a few more."""
    report = tmp_path / "files.json"
    command = [sys.executable, str(STUDY), str(tiny_bundle), "--tokens", "24", "--ignore-eos", "--output", str(report)]
    subprocess.run(command, check=True, timeout=120, capture_output=True)
    rows = json.loads(report.read_text(encoding="utf-8"))["rows"]
    assert len(rows) == 3 * len(MOST)
    most = [MOST[row["method"]] + MORE[row["text"]] for row in rows]
    long_ones = [row for row, allowed in zip(rows, most, strict=True) if row["median"] > allowed]
    assert [(row["text"], row["method"], row["median"]) for row in long_ones] == []
    assert all(row["median"] > 8 for row in rows), "nothing was counted"
