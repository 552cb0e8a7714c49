"""A file is there whole, or what was there before is."""

import os
import sys
import threading
from pathlib import Path

import pytest

from mirrorsd.graphs.whole_file import try_place, whole_file, write_whole


def test_the_file_has_its_name_only_at_the_end(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    write_whole(path, b"old")
    with whole_file(path, survives_power_cuts=True) as stream:
        stream.write(b"new")
        assert path.read_bytes() == b"old"
    assert path.read_bytes() == b"new"
    assert [found.name for found in tmp_path.iterdir()] == ["a.json"]


def test_a_place_is_tried_without_a_trace(tmp_path: Path) -> None:
    (tmp_path / "b.json").write_text("old", encoding="utf-8")
    for name in ("a.json", "b.json"):
        try_place(tmp_path / name)
    assert [(found.name, found.read_text(encoding="utf-8")) for found in tmp_path.iterdir()] == [("b.json", "old")]
    with pytest.raises(OSError, match="No such file"):
        try_place(tmp_path / "none" / "a.json")
    try_place(Path(os.devnull))


def test_two_who_write_one_name_at_once_leave_one_of_both(tmp_path: Path) -> None:
    path, inner = tmp_path / "a.json", b"second"
    with whole_file(path) as stream:
        stream.write(b"first, ")
        write_whole(path, inner)
        assert path.read_bytes() == inner
        stream.write(b"and whole")
    assert path.read_bytes() == b"first, and whole"
    assert [found.name for found in tmp_path.iterdir()] == ["a.json"]


def test_an_error_leaves_what_was_there_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    write_whole(path, b"old")
    with pytest.raises(KeyboardInterrupt), whole_file(path) as stream:
        stream.write(b"half")
        raise KeyboardInterrupt
    assert path.read_bytes() == b"old"
    assert [found.name for found in tmp_path.iterdir()] == ["a.json"]


@pytest.mark.skipif(sys.platform == "win32", reason="links need a right of their own there")
def test_a_link_stays_one(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    real, link = tmp_path / "folder" / "real", tmp_path / "link"
    link.symlink_to(real)
    for content in (b"new", b"newer"):  # it need not be there
        write_whole(link, content)
        assert (link.is_symlink(), real.read_bytes()) == (True, content)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="there are no pipes with names here")
def test_a_pipe_is_written_and_stays_one(tmp_path: Path) -> None:
    path, found = tmp_path / "pipe", list[bytes]()
    os.mkfifo(path)
    reader = threading.Thread(target=lambda: found.append(path.read_bytes()))
    reader.start()
    write_whole(path, b"whole")
    reader.join(60)
    assert found == [b"whole"]
    assert path.is_fifo()


def test_errors_name_the_file_that_was_asked_for(tmp_path: Path) -> None:
    """Also where the unfinished file's name is too long to be deleted, as is one on a disk that is only read."""
    folder, elsewhere, long = tmp_path / "folder", tmp_path / "nowhere" / "file", tmp_path / ("a" * 250)
    folder.mkdir()
    for path in (folder, elsewhere, long):
        with pytest.raises(OSError) as raised:
            write_whole(path, b"")
        assert raised.value.filename == str(path)
    for path in (elsewhere, long):
        with pytest.raises(OSError) as raised:
            try_place(path)
        assert raised.value.filename == str(path)
    assert sorted(tmp_path.rglob("*")) == [folder]
