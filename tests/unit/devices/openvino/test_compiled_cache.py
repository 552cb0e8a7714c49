"""Compiled drafts on disk: what is used, what is refused in words, and what happens where nothing can be kept."""

import json
import logging
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from mirrorsd.devices.openvino.compiled_cache import CompiledCache

MADE_BY = {"format": "mirrorsd-compiled-draft-3", "OpenVINO": "2026.4", "driver": "1", "draft": "abc", "options": "{}"}


def cache_in(folder: Path, stem: str = "cpu-f32", most_bytes: int = 1 << 20, **changes: str) -> CompiledCache:
    return CompiledCache(folder / "compiled", stem, MADE_BY | changes, most_bytes)


@pytest.fixture
def filled(tmp_path: Path) -> Path:
    cache_in(tmp_path).write("8x8x256", b"compiled")
    return tmp_path


def test_what_was_written_is_read(filled: Path) -> None:
    cache = cache_in(filled)
    blob = cache.read("8x8x256")
    assert blob is not None
    assert bytes(blob.data) == b"compiled"
    assert cache.has("8x8x256")
    assert cache.read("16x16x256") is None
    assert not cache.has("16x16x256")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"OpenVINO": "2026.5"}, "it was made with OpenVINO 2026.4, here is 2026.5; compiling again"),
        ({"driver": "2"}, "it was made with driver 1, here is 2"),
        ({"NPU_DRIVER_VERSION": "3"}, "it was made with NPU_DRIVER_VERSION unknown, here is 3"),
        ({"draft": "abd"}, "the draft has changed"),
        ({"options": "[]"}, "it was made with other options"),
    ],
)
def test_another_maker_is_announced(
    filled: Path, caplog: pytest.LogCaptureFixture, changes: dict[str, str], words: str
) -> None:
    cache = cache_in(filled, **changes)
    assert cache.read("8x8x256") is None
    assert not cache.has("8x8x256")
    assert words in caplog.text
    cache.write("8x8x256", b"newer")
    assert cache.read("8x8x256") is not None


def test_a_reason_is_said_once(filled: Path, caplog: pytest.LogCaptureFixture) -> None:
    cache_in(filled).write("16x16x256", b"compiled")
    cache = cache_in(filled, driver="2")
    assert cache.read("8x8x256") is cache.read("16x16x256") is None
    assert len(caplog.records) == 1


@pytest.mark.parametrize(
    "content", ["", "{}", "[1]", "\x00", '{"made_by": 1, "sha256": "", "bytes": 1, "mtime_ns": 1}']
)
def test_a_foreign_record_is_announced(filled: Path, caplog: pytest.LogCaptureFixture, content: str) -> None:
    record = filled / "compiled" / "cpu-f32-8x8x256.json"
    record.write_text(content, encoding="utf-8")
    assert cache_in(filled).read("8x8x256") is None
    assert "compiling again" in caplog.text


@pytest.mark.parametrize("content", [b"compileD", b"comp", b""])
def test_damage_is_announced(filled: Path, caplog: pytest.LogCaptureFixture, content: bytes) -> None:
    (filled / "compiled" / "cpu-f32-8x8x256.blob").write_bytes(content)
    assert cache_in(filled).read("8x8x256") is None
    assert "cpu-f32-8x8x256.blob is damaged" in caplog.text


def test_a_copied_cache_still_fits(filled: Path) -> None:
    record = filled / "compiled" / "cpu-f32-8x8x256.json"
    document = json.loads(record.read_text(encoding="utf-8"))
    record.write_text(json.dumps(document | {"mtime_ns": 1}), encoding="utf-8")
    assert cache_in(filled).read("8x8x256") is not None


def test_a_place_that_cannot_be_written(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    (tmp_path / "compiled").write_text("a file is in the way", encoding="utf-8")
    cache = cache_in(tmp_path)
    cache.write("8x8x256", b"compiled")
    assert not cache.is_writable
    assert cache.read("8x8x256") is None
    assert f"are not kept in {tmp_path / 'compiled'}: " in caplog.text


@pytest.mark.parametrize("changes", [{"OpenVINO": "2026.5"}, {"draft": "abd"}, {"format": "mirrorsd-compiled-draft-4"}])
def test_blobs_that_nobody_will_use_again_are_deleted(
    filled: Path, caplog: pytest.LogCaptureFixture, changes: dict[str, str]
) -> None:
    cache_in(filled, **changes).delete_stale()
    assert list((filled / "compiled").iterdir()) == []
    assert len(caplog.records) == 1


@pytest.mark.parametrize("changes", [{}, {"driver": "2"}, {"options": "[]"}])
def test_blobs_of_another_machine_or_card_are_left(filled: Path, changes: dict[str, str]) -> None:
    cache_in(filled, **changes).delete_stale()
    assert cache_in(filled).has("8x8x256")


def test_a_foreign_file_is_left(filled: Path) -> None:
    (filled / "compiled" / "notes.json").write_text("[1]", encoding="utf-8")
    cache_in(filled, draft="abd").delete_stale()
    assert [path.name for path in (filled / "compiled").iterdir()] == ["notes.json"]


def test_other_placements_make_room_oldest_first(tmp_path: Path) -> None:
    for age, stem in enumerate(("npu", "gpu", "cpu-bf16")):
        cache_in(tmp_path, stem, 300).write("8x8x256", bytes(100))
        os.utime(tmp_path / "compiled" / f"{stem}-8x8x256.blob", ns=(age, age))
    cache_in(tmp_path, most_bytes=300).write("8x8x256", bytes(150))
    assert [cache_in(tmp_path, stem).has("8x8x256") for stem in ("npu", "gpu", "cpu-bf16")] == [False, False, True]
    assert cache_in(tmp_path).has("8x8x256")


def test_what_does_not_fit_is_not_kept(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    cache = cache_in(tmp_path, most_bytes=1 << 20)
    cache.write("8x8x256", bytes(700_000))
    cache.write("16x16x256", bytes(700_000))
    assert (cache.has("8x8x256"), cache.has("16x16x256"), cache.is_writable) == (True, False, False)
    assert "would take more than 1 MiB" in caplog.text


def test_a_folder_of_another_user_does_not_end_a_load(
    filled: Path, closed: Callable[[Path], None], caplog: pytest.LogCaptureFixture
) -> None:
    closed(filled)
    cache = cache_in(filled)
    cache.delete_stale()
    assert cache.read("8x8x256") is None and not cache.has("8x8x256")
    assert "cannot be read (Permission denied); compiling again" in caplog.text


def test_a_cache_of_another_user_is_not_read(
    filled: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: object, **__: object) -> object:
        raise PermissionError(13, "Permission denied")

    for owner, name in ((Path, "is_file"), (np, "memmap")):
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, refused)
            assert cache_in(filled).read("8x8x256") is None
            assert "8x8x256.blob cannot be read (Permission denied)" in caplog.messages[-1]
    with monkeypatch.context() as patch:
        patch.setattr(Path, "is_file", refused)
        assert not cache_in(filled).has("8x8x256")
