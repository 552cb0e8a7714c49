import errno
import subprocess
import sys
from pathlib import Path

import pytest

from mirrorsd.export.atomic_folder import atomic_folder
from mirrorsd.graphs.errors import ExportError

KILLED = """
import os, signal, sys
from pathlib import Path
from mirrorsd.export.atomic_folder import atomic_folder
with atomic_folder(Path(sys.argv[1]), overwrite=False) as folder:
    (folder / "half").write_text("written")
    if sys.argv[2] == "kill":
        os.kill(os.getpid(), signal.SIGKILL if os.name != "nt" else signal.SIGTERM)
"""


def test_the_folder_appears_when_the_block_ends(tmp_path: Path) -> None:
    final = tmp_path / "deep" / "out.mirror"
    with atomic_folder(final, overwrite=False) as folder:
        (folder / "file").write_text("x")
        assert not final.exists()
    assert [path.name for path in tmp_path.rglob("*")] == ["deep", "out.mirror", "file"]


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_an_error_leaves_nothing(tmp_path: Path, error: type[BaseException]) -> None:
    with pytest.raises(error), atomic_folder(tmp_path / "out.mirror", overwrite=False) as folder:
        (folder / "file").write_text("x")
        raise error
    assert list(tmp_path.iterdir()) == []


def test_a_killed_export_leaves_no_bundle_and_the_next_one_cleans_up(tmp_path: Path) -> None:
    final = tmp_path / "out.mirror"
    killed = subprocess.run([sys.executable, "-c", KILLED, str(final), "kill"], check=False)
    assert killed.returncode != 0
    assert not final.exists()
    subprocess.run([sys.executable, "-c", KILLED, str(final), "finish"], check=True)
    assert [path.name for path in tmp_path.iterdir()] == ["out.mirror"]


def test_an_existing_folder_is_not_replaced_unasked(tmp_path: Path) -> None:
    final = tmp_path / "out.mirror"
    final.mkdir()
    with pytest.raises(ExportError, match=r"out\.mirror exists already"), atomic_folder(final, overwrite=False):
        pass
    with pytest.raises(ExportError, match="exists and is not a bundle"), atomic_folder(final, overwrite=True):
        pass


def test_overwriting_replaces_a_bundle_only_at_the_end(tmp_path: Path) -> None:
    final = tmp_path / "out.mirror"
    final.mkdir()
    (final / "manifest.json").write_text("old")
    with pytest.raises(RuntimeError), atomic_folder(final, overwrite=True):
        raise RuntimeError
    assert (final / "manifest.json").read_text() == "old"
    with atomic_folder(final, overwrite=True) as folder:
        (folder / "manifest.json").write_text("new")
    assert (final / "manifest.json").read_text() == "new"
    assert [path.name for path in tmp_path.iterdir()] == ["out.mirror"]


def test_a_full_disk_is_an_export_error(tmp_path: Path) -> None:
    with (
        pytest.raises(ExportError, match="no space left beside"),
        atomic_folder(tmp_path / "out.mirror", overwrite=False),
    ):
        raise OSError(errno.ENOSPC, "No space left on device")
    assert list(tmp_path.iterdir()) == []


def test_a_parent_that_is_a_file_is_an_export_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with (
        pytest.raises(ExportError, match="cannot write into"),
        atomic_folder(tmp_path / "file" / "out.mirror", overwrite=False),
    ):
        pass
