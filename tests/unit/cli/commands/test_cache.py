"""`mirrorsd cache`: what is kept is shown with its size, and cleared as asked."""

import json
import shutil
from pathlib import Path

import pytest

from mirrorsd.cli.application import run
from mirrorsd.graphs.bundle_files import read_bundle
from mirrorsd.graphs.user_cache import COMPILED, folder_of
from mirrorsd.hub.archives import write_archive
from mirrorsd.hub.bundles import bundle_folder


@pytest.fixture
def kept(bundle: Path, own_cache: Path) -> Path:
    read_bundle(bundle)
    folder = folder_of(bundle)
    (folder / COMPILED).mkdir()
    (folder / COMPILED / "cpu.blob").write_bytes(bytes(3 << 20))
    (folder / "tuned-cpu.json").write_text("{}", encoding="utf-8")
    return folder


def test_an_empty_cache_is_said_to_be_empty(own_cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["cache", "list"]) == 0
    assert f"0 B in {own_cache}" in capsys.readouterr().out.replace("\n", " ")


def test_a_file_is_no_cache(own_cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    own_cache.parent.mkdir(parents=True, exist_ok=True)
    own_cache.write_text("", encoding="utf-8")
    assert run(["cache", "list"]) == 2
    assert "is a file, so nothing can be kept there" in capsys.readouterr().err


def test_the_list_names_bundle_size_and_cards(kept: Path, bundle: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["cache", "list", "--json"]) == 0
    (one,) = json.loads(capsys.readouterr().out)["bundles"]
    assert (one["bundles"], one["tuned"], one["is_orphan"]) == ([str(bundle.resolve())], ["cpu"], False)
    assert one["bytes"] > 3 << 20
    assert run(["cache", "list"]) == 0
    assert "3.0 MB" in capsys.readouterr().out.replace("MiB", "MB")


def test_clear_spares_what_was_tuned(kept: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["cache", "clear"]) == 0
    assert "of 1 bundle(s)" in capsys.readouterr().out
    assert [path.name for path in kept.iterdir() if not path.match("checked-*.json")] == ["tuned-cpu.json"]
    assert run(["cache", "clear"]) == 0
    assert (kept / "tuned-cpu.json").exists()
    assert run(["cache", "clear", "--tuned"]) == 0
    assert not kept.exists()


def test_a_bundle_that_was_cleared_can_be_cleared_again(kept: Path, bundle: Path) -> None:
    assert run(["cache", "clear", str(bundle)]) == 0
    assert run(["cache", "clear", str(bundle), "--tuned"]) == 0
    assert not kept.exists()


def test_a_bundle_is_known_by_its_manifest_where_nobody_kept_its_place(kept: Path, bundle: Path) -> None:
    for check in kept.glob("checked-*.json"):
        check.unlink()
    assert run(["cache", "clear", str(bundle), "--tuned"]) == 0
    assert not kept.exists()


def test_a_bundle_that_is_there_is_no_orphan(kept: Path, bundle: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["cache", "clear", str(bundle), "--orphans"]) == 2
    assert f"{bundle} is not gone: leave --orphans out" in capsys.readouterr().err
    shutil.rmtree(bundle)
    assert run(["cache", "clear", str(bundle), "--orphans"]) == 0
    assert not kept.exists()


def test_unfinished_fetches_of_others_stay_where_a_bundle_is_named(kept: Path, bundle: Path, own_cache: Path) -> None:
    partial = own_cache / "bundles" / "a--b--0123456789ab" / ".partial"
    partial.mkdir(parents=True)
    assert run(["cache", "clear", str(bundle), "--fetched"]) == 0
    assert partial.is_dir()
    assert run(["cache", "clear", "--fetched"]) == 0
    assert not partial.exists()


def test_an_archive_is_found_by_the_name_that_was_typed(
    bundle: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    archive = bundle.parent / "tiny.zip"
    with archive.open("wb") as stream:
        write_archive(stream, {p.relative_to(bundle).as_posix(): p for p in bundle.rglob("*") if p.is_file()})
    monkeypatch.chdir(archive.parent)
    folder = bundle_folder("tiny.zip")
    assert run(["cache", "clear", "tiny.zip"]) == 0
    assert "of 1 bundle(s)" in capsys.readouterr().out and not folder.exists()


def test_only_what_was_named_is_cleared(
    kept: Path, bundle: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["cache", "clear", str(tmp_path / "another.mirror")]) == 2
    assert "Nothing is kept about" in capsys.readouterr().err
    assert run(["cache", "clear", "--orphans"]) == 0
    assert (kept / COMPILED).exists()
    shutil.rmtree(bundle)
    assert run(["cache", "clear", "--orphans"]) == 0
    assert not kept.exists()
