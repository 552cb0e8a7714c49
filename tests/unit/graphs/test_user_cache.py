"""What is kept about bundles: where, for how long, and how to be rid of it."""

import errno
import io
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from mirrorsd.graphs import user_cache
from mirrorsd.graphs.bundle_files import read_bundle
from mirrorsd.graphs.errors import ConfigError
from mirrorsd.graphs.user_cache import COMPILED, cache_folder, clear, folder_of, keeping_nothing, list_kept, make_room


@pytest.fixture(autouse=True)
def empty_cache(own_cache: Path) -> Path:
    return own_cache


def keep(bundle: Path, num_bytes: int = 100, *, age: int = 0) -> Path:
    """Something compiled, something tuned, and a passed check, used `age` seconds after 1970."""
    read_bundle(bundle)
    folder = folder_of(bundle)
    (folder / COMPILED).mkdir(exist_ok=True)
    (folder / COMPILED / "cpu-8x8x256.blob").write_bytes(bytes(num_bytes))
    (folder / "tuned-cpu.json").write_text("{}", encoding="utf-8")
    for check in folder.glob("checked-*.json"):
        os.utime(check, (age, age))
    return folder


def another(bundle: Path, name: str) -> Path:
    return shutil.copytree(bundle, bundle.parent / name)


def test_a_place_that_cannot_be_written_is_said_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "b.mirror").mkdir()
    (tmp_path / "b.mirror" / "manifest.json").write_text("{}")
    monkeypatch.setenv("MIRRORSD_CACHE", str(tmp_path / "file"))
    for _ in range(2):
        user_cache.remember_check(tmp_path / "b.mirror", {})
    (said,) = (record.getMessage() for record in caplog.records)
    assert said.startswith(f"nothing can be kept in {tmp_path / 'file'} (")
    assert said.endswith("compiles drafts anew; MIRRORSD_CACHE names another folder")
    with pytest.raises(ConfigError, match=r"cannot be written into .*MIRRORSD_CACHE names another folder"):
        user_cache.check_writable(tmp_path / "b.mirror")


def test_a_user_without_a_home_is_told_what_to_set(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> Path:
        raise RuntimeError("could not determine the home directory")

    monkeypatch.delenv("MIRRORSD_CACHE")
    monkeypatch.setattr(user_cache.platformdirs, "user_cache_path", refuse)
    with pytest.raises(ConfigError, match=r"no folder .*home directory\): set MIRRORSD_CACHE to one"):
        cache_folder()
    monkeypatch.setattr(user_cache.platformdirs, "user_cache_path", lambda *_, **__: Path("~/.cache/mirrorsd"))
    with pytest.raises(ConfigError, match=r"the user has no home\): set MIRRORSD_CACHE to one"):
        cache_folder()


def test_a_full_disk_is_said_before_the_work(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Full(io.BytesIO):
        def write(self, _: object) -> int:
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(user_cache, "TemporaryFile", lambda **_: Full())
    with pytest.raises(ConfigError, match=r"cannot be written into .*No space left on device"):
        user_cache.check_writable(bundle)


@pytest.mark.skipif(sys.platform != "linux", reason="names are bytes there")
def test_a_name_that_is_no_text_is_a_name(bundle: Path) -> None:
    odd = bundle.parent / os.fsdecode(b"caf\xe9.mirror")
    shutil.copytree(bundle, odd)
    assert keep(odd) == folder_of(odd)
    assert list(folder_of(odd).glob("checked-*.json"))


def test_a_variable_names_another_place(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("MIRRORSD_CACHE", str(tmp_path / "mine"))
    assert cache_folder() == tmp_path / "mine"
    monkeypatch.delenv("MIRRORSD_CACHE")
    assert cache_folder().name.lower() == "mirrorsd" or cache_folder().parent.name.lower() == "mirrorsd"


def test_a_place_within_the_home_is_no_folder_of_that_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("USERPROFILE", str(tmp_path))
    monkeypatch.setenv("MIRRORSD_CACHE", "~/cache")
    assert cache_folder() == tmp_path / "cache"
    monkeypatch.setenv("MIRRORSD_CACHE", "~nobody-here/cache")
    with pytest.raises(ConfigError, match=r"There is no folder for what is kept .*: set MIRRORSD_CACHE to one"):
        cache_folder()


def test_nothing_is_left_beside_the_bundle(bundle: Path) -> None:
    before = sorted(bundle.parent.iterdir())
    read_bundle(bundle)
    assert sorted(path for path in bundle.parent.iterdir() if path != cache_folder()) == before
    assert len(list(folder_of(bundle).iterdir())) == 1


def test_what_is_kept_is_listed_last_used_first(bundle: Path) -> None:
    other = another(bundle, "other.mirror")
    keep(bundle, age=5)
    keep(other, age=9)
    first, second = list_kept()
    assert (first.bundles, second.bundles) == ((other,), (bundle,))
    assert (first.tuned, first.last_used, first.is_orphan) == (("cpu",), 9.0, False)
    assert first.num_bytes > 100
    shutil.rmtree(other)
    assert [kept.is_orphan for kept in list_kept()] == [True, False]


def test_what_is_not_ours_is_neither_listed_nor_deleted(bundle: Path) -> None:
    """The variable may name a place where other things lie."""
    kept = keep(bundle, age=5)
    for name in ("photos", "photos-2024", "mail-0123456789ab-old"):
        (cache_folder() / name / COMPILED).mkdir(parents=True)
        (cache_folder() / name / COMPILED / "a.jpg").write_bytes(b"mine")
    assert [one.folder for one in list_kept()] == [kept]
    make_room(kept, most_bytes=0)
    assert len(list(cache_folder().glob("*/compiled/a.jpg"))) == 3


def test_reading_a_bundle_counts_as_use(bundle: Path) -> None:
    keep(bundle, age=5)
    read_bundle(bundle)
    assert list_kept()[0].last_used > 5


def test_a_bundle_that_takes_the_place_of_another_takes_its_leavings_along(bundle: Path) -> None:
    former = keep(bundle)
    (bundle / "manifest.json").write_bytes((bundle / "manifest.json").read_bytes() + b"\n")
    read_bundle(bundle)
    assert not former.exists()
    assert [kept.bundles for kept in list_kept()] == [(bundle,)]


def test_a_copy_keeps_what_the_replaced_one_had(bundle: Path) -> None:
    elsewhere = shutil.copytree(bundle, bundle.parent / "elsewhere" / bundle.name)
    former = keep(bundle)
    assert keep(elsewhere) == former
    (bundle / "manifest.json").write_bytes((bundle / "manifest.json").read_bytes() + b"\n")
    read_bundle(bundle)
    assert (former / "tuned-cpu.json").is_file()


def test_clearing_leaves_what_was_tuned_unless_asked(bundle: Path) -> None:
    folder = keep(bundle)
    assert clear(list_kept()[0], with_tuned=False) > 100
    checked, tuned = sorted(path.name for path in folder.iterdir())
    assert (checked.partition("-")[0], tuned) == ("checked", "tuned-cpu.json")
    clear(list_kept()[0], with_tuned=True)
    assert not folder.exists()


def test_what_was_cleared_is_checked_anew_and_still_known_by_its_place(
    bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keep(bundle, age=5)
    clear(list_kept()[0], with_tuned=False)
    (one,) = list_kept()
    assert (one.bundles, one.last_used) == ((bundle,), 5.0)
    seals = []
    monkeypatch.setattr("mirrorsd.graphs.bundle_files.remember_check", lambda root, seal: seals.append(seal))
    read_bundle(bundle)
    assert seals, "its files were not looked at"


def test_a_bundle_that_cannot_be_read_is_not_gone(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keep(bundle)

    def refuse(path: Path) -> bytes:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    (one,) = list_kept()
    with monkeypatch.context() as closed:
        closed.setattr(Path, "read_bytes", refuse)
        assert not one.is_orphan
    assert not one.is_orphan
    shutil.rmtree(bundle)
    assert one.is_orphan


def test_the_longest_unused_makes_room_but_not_the_bundle_at_work(bundle: Path) -> None:
    folders = [keep(another(bundle, f"{age}.mirror"), 100, age=age) for age in (1, 2, 3)]
    make_room(folders[0], most_bytes=250)
    assert [(folder / COMPILED).exists() for folder in folders] == [True, False, True]
    assert (folders[1] / "tuned-cpu.json").is_file()
    make_room(folders[0], most_bytes=50)
    assert [(folder / COMPILED).exists() for folder in folders] == [True, False, False]


def test_folders_of_another_user_do_not_end_a_load(bundle: Path, closed: Callable[[Path], None]) -> None:
    """In a cache that several share, or of somebody who was root once."""
    others, own = keep(another(bundle, "others.mirror")), keep(bundle)
    closed(others)
    make_room(own, 50)
    assert (own / COMPILED / "cpu-8x8x256.blob").is_file()


def test_within_the_block_nothing_is_kept(bundle: Path) -> None:
    with keeping_nothing():
        inside = keep(bundle)
        assert inside.exists()
    assert not inside.exists()
    assert list_kept() == []
    assert not cache_folder().exists()


def test_a_place_that_cannot_be_written_only_costs_time(bundle: Path, empty_cache: Path) -> None:
    empty_cache.write_text("a file is in the way", encoding="utf-8")
    read_bundle(bundle)
    assert list_kept() == []
    assert user_cache.passed_check(bundle, {}) is False
