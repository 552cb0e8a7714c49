"""One writer at a time; nothing is left behind."""

import subprocess
import sys
from pathlib import Path

import pytest

from mirrorsd.graphs.errors import ConfigError
from mirrorsd.graphs.folder_lock import FolderLock

HOLD = """
import sys
from pathlib import Path
from mirrorsd.graphs.folder_lock import FolderLock
lock = FolderLock(Path(sys.argv[1]), "training")
print("held", flush=True)
sys.stdin.read()
"""


def test_another_process_is_named_and_a_killed_one_holds_nothing(tmp_path: Path) -> None:
    path = tmp_path / "run.lock"
    command = [sys.executable, "-c", HOLD, str(path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "held\n"
        with pytest.raises(ConfigError, match=f"another training .process {other.pid}, which holds run.lock"):
            FolderLock(path, "training")
        other.kill()
        other.wait(30)
    FolderLock(path, "training").release()
    assert list(tmp_path.iterdir()) == []


def test_two_in_one_process_exclude_each_other(tmp_path: Path) -> None:
    first = FolderLock(tmp_path / "run.lock", "export")
    with pytest.raises(ConfigError, match="another export"):
        FolderLock(tmp_path / "run.lock", "export")
    first.release()
    first.release()
    FolderLock(tmp_path / "run.lock", "export").release()
