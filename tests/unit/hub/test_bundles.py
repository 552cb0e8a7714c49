"""Bundle references: fetched whole or not at all, gone on with, checked, pinned; and each failure in words."""

import errno
import hashlib
import io
import json
import tarfile
import zipfile
from pathlib import Path

import pytest
from hub_server import SHA, Faults, serve

from mirrorsd.graphs import names
from mirrorsd.graphs.bundle_files import read_bundle
from mirrorsd.graphs.errors import BundleError, ConfigError
from mirrorsd.graphs.manifest import with_checksum
from mirrorsd.graphs.user_cache import fetched_folder, list_kept
from mirrorsd.hub import asking, bundle_folder, bundles, downloads
from mirrorsd.hub.archives import write_archive
from mirrorsd.hub.bundles import fetched_bundles, forget, is_fetched_by, unfinished

OTHER = "f" * 40
WEIGHTS = "target/weights.bin"


def files_in(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def gets(asked: list[str]) -> list[str]:
    return [line for line in asked if line.startswith("GET") and "/resolve/" in line]


def test_a_repository_is_fetched_once_and_pinned(asked: list[str], bundle: Path, repository: Path) -> None:
    (repository / "README.md").write_text("a card", encoding="utf-8")
    told: list[tuple[str, float]] = []
    folder = bundle_folder("hf:tiny/pair", lambda stage, share: told.append((stage, share)))
    assert files_in(folder) == files_in(bundle), "nothing but what the manifest lists"
    read_bundle(folder)
    assert folder.name == "pair.mirror"
    assert told[0] == (f"fetching tiny/pair, 1 MB, revision {SHA[:8]}", 0.0) and told[-1][1] == 1.0
    asked.clear()
    for again in ("hf:tiny/pair", f"hf:tiny/pair@{SHA}", Path("hf:tiny/pair")):
        assert bundle_folder(again) == folder
    assert asked == [], "what is here needs no network"
    (found,) = fetched_bundles()
    assert (found.reference, found.folder) == (f"hf:tiny/pair@{SHA}", folder)
    assert list_kept() == [] or all(one.folder != fetched_folder() for one in list_kept())


@pytest.mark.parametrize("name", ["cut.zip", "empty.zip", "text.tar.gz", "broken.tgz"])
def test_a_file_that_was_an_archive_is_no_folder_without_one(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.write_bytes(b"PK\x03\x04" + bytes(100) if name == "cut.zip" else b"" if name == "empty.zip" else b"words")
    with pytest.raises(BundleError, match=r"is no whole archive, neither a zip nor a tar: fetch it, or copy it"):
        bundle_folder(path)


def test_names_that_are_none_are_refused() -> None:
    with pytest.raises(ConfigError, match="No bundle is named"):
        bundle_folder("")
    with pytest.raises(BundleError, match="cannot be looked at: "):
        bundle_folder("a" * 5000)


def test_a_newer_revision_is_taken_when_it_is_asked_for(asked: list[str], repository: Path, faults: Faults) -> None:
    first = bundle_folder("hf:tiny/pair")
    faults.sha = OTHER
    assert bundle_folder("hf:tiny/pair") == first
    second = bundle_folder("hf:tiny/pair@main")
    assert second != first and first.is_dir()
    assert bundle_folder("hf:tiny/pair") == second, "the one that was fetched last"
    assert bundle_folder(f"hf:tiny/pair@{SHA}") == first


def test_a_file_that_breaks_off_is_gone_on_with(asked: list[str], bundle: Path, faults: Faults) -> None:
    faults.most_bytes, faults.breaks = 7, 10
    assert files_in(bundle_folder("hf:tiny/pair")) == files_in(bundle)
    assert [line for line in gets(asked) if "bytes=7-" in line]


def test_the_next_run_goes_on_where_the_last_one_stopped(
    asked: list[str], bundle: Path, faults: Faults, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(stage: str, share: float) -> None:
        if share > 0.4:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        bundle_folder("hf:tiny/pair", stop)
    assert fetched_bundles() == []
    done = gets(asked)
    asked.clear()
    assert files_in(bundle_folder("hf:tiny/pair")) == files_in(bundle)
    assert len(gets(asked)) + len(done) <= len(files_in(bundle)) + 1, "no file twice"


def test_a_server_that_gives_no_parts_is_asked_anew(asked: list[str], bundle: Path, faults: Faults) -> None:
    faults.most_bytes, faults.breaks, faults.has_ranges = 7, 2, False
    assert files_in(bundle_folder("hf:tiny/pair")) == files_in(bundle)


def test_one_that_always_breaks_off_is_given_up(asked: list[str], faults: Faults, bundle: Path) -> None:
    faults.most_bytes, faults.breaks, faults.has_ranges = 7, 10**6, False
    with pytest.raises(BundleError, match=r"hf:tiny/pair@.* does not answer .*what was fetched so far is kept"):
        bundle_folder("hf:tiny/pair")
    assert fetched_bundles() == []
    faults.breaks = 0
    assert files_in(bundle_folder("hf:tiny/pair")) == files_in(bundle)


def test_a_wrong_hash_is_told_and_that_file_fetched_anew(asked: list[str], bundle: Path, faults: Faults) -> None:
    faults.spoilt = {"weights.bin"}
    with pytest.raises(BundleError, match=rf"{WEIGHTS} of hf:tiny/pair came with SHA-256 .*fetched anew"):
        bundle_folder("hf:tiny/pair")
    assert fetched_bundles() == []
    faults.spoilt.clear()
    asked.clear()
    assert files_in(bundle_folder("hf:tiny/pair")) == files_in(bundle)
    assert not any("prefix.onnx" in line for line in gets(asked)), "what was right is kept"


def test_a_repository_that_contradicts_its_manifest_is_refused_before_the_weights(
    asked: list[str], repository: Path
) -> None:
    (repository / WEIGHTS).write_bytes(b"x" * len((repository / WEIGHTS).read_bytes()))
    with pytest.raises(BundleError, match=rf"{WEIGHTS} of hf:tiny/pair has .* the repository is damaged"):
        bundle_folder("hf:tiny/pair")
    (repository / WEIGHTS).unlink()
    with pytest.raises(BundleError, match=f"hf:tiny/pair lacks {WEIGHTS}"):
        bundle_folder("hf:tiny/pair")
    assert not any("weights" in line for line in gets(asked))


@pytest.mark.parametrize(
    ("reference", "words"),
    [
        ("hf:tiny/nothing", "tiny/nothing is no folder here, and http.* has no model of that name, or it is private"),
        ("hf:tiny/gated", "tiny/gated is gated: .* agree to terms first"),
        ("hf:tiny/pair@v9", "tiny/pair has no revision 'v9'"),
        ("hf:tiny/model", "hf:tiny/model has no manifest.json, so it is no bundle. .* mirrorsd export tiny/model"),
    ],
)
def test_what_the_hub_does_not_have_is_explained(
    asked: list[str], repository: Path, reference: str, words: str
) -> None:
    for name in ("gated", "model"):
        (repository.parent / name).mkdir()
    (repository.parent / "model" / "config.json").write_text("{}", encoding="utf-8")
    with pytest.raises(BundleError, match=words):
        bundle_folder(reference)
    assert not [path for path in fetched_folder().rglob("*") if path.is_file()]


@pytest.mark.parametrize("text", ["hf:", "hf:pair", "hf:a/b/c", "hf:a/b@", "hf:../pair", "hf:a/b@x y"])
def test_what_is_no_repository_s_name(text: str, own_cache: Path) -> None:
    with pytest.raises(ConfigError, match="expected hf:ORG/NAME or hf:ORG/NAME@REVISION"):
        bundle_folder(text)


def test_a_manifest_that_leaves_its_folder_is_refused(asked: list[str], repository: Path, tmp_path: Path) -> None:
    path = repository / names.MANIFEST_FILE
    from mirrorsd.graphs.manifest import with_checksum

    document = json.loads(path.read_text(encoding="utf-8"))
    document["files"]["../../stolen"] = {"bytes": 1, "sha256": "0" * 64}
    path.write_text(json.dumps(with_checksum(document)), encoding="utf-8")
    with pytest.raises(BundleError, match="leaves the bundle's folder"):
        bundle_folder("hf:tiny/pair")
    assert not list(tmp_path.rglob("stolen"))


def test_without_the_hub_what_was_fetched_serves(
    repository: Path, tmp_path: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serve(tmp_path / "hub") as (address, _):
        monkeypatch.setenv("HF_ENDPOINT", address)
        folder = bundle_folder("hf:tiny/pair")
    assert bundle_folder("hf:tiny/pair") == folder
    with pytest.raises(BundleError, match=r"hf:tiny/other is not on this machine, .* does not answer"):
        bundle_folder("hf:tiny/other")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(BundleError, match=r"hf:tiny/other is not on this machine.*HF_HUB_OFFLINE"):
        bundle_folder("hf:tiny/other")


def test_a_full_disk_is_noticed_before_the_fetching(asked: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asking.shutil, "disk_usage", lambda _: type("", (), {"free": 3})())
    with pytest.raises(BundleError, match=r"hf:tiny/pair takes 1 MB, and 1 MB are free in .*MIRRORSD_CACHE"):
        bundle_folder("hf:tiny/pair")
    assert [line.rpartition("/")[2] for line in gets(asked)] == [names.MANIFEST_FILE]


def test_a_disk_that_fills_up_meanwhile_keeps_what_there_is(
    asked: list[str], bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(downloads, "_go_on", full)
        with pytest.raises(BundleError, match=r"no space is left in .*what was fetched is kept"):
            bundle_folder("hf:tiny/pair")
    assert files_in(bundle_folder("hf:tiny/pair")) == files_in(bundle)


def test_a_bundle_is_known_as_long_as_it_is_there(asked: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the program ends, or the disk is full, in the moment at which it gets its name, or loses it."""

    def cut(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(bundles, "write_whole", cut)
        with pytest.raises(KeyboardInterrupt):
            bundle_folder("hf:tiny/pair")
    assert fetched_bundles() == [] and len(unfinished()) == 1
    folder = bundle_folder("hf:tiny/pair")
    assert [one.folder for one in fetched_bundles()] == [folder] and unfinished() == []
    with monkeypatch.context() as patch:
        patch.setattr(bundles.shutil, "rmtree", cut)
        with pytest.raises(KeyboardInterrupt):
            forget(folder)
    assert fetched_bundles() == [] and len(unfinished()) == 1, "nor is one that is not wholly deleted"
    assert bundle_folder("hf:tiny/pair") == folder


def test_two_at_once_are_told_of_each_other(asked: list[str]) -> None:
    def second(stage: str, share: float) -> None:
        with pytest.raises(ConfigError, match="being written by another fetch of hf:tiny/pair"):
            bundle_folder("hf:tiny/pair")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        bundle_folder("hf:tiny/pair", second)


def test_what_is_forgotten_is_fetched_again(asked: list[str]) -> None:
    folder = bundle_folder("hf:tiny/pair")
    forget(folder)
    assert not folder.exists() and fetched_bundles() == [] and list(fetched_folder().iterdir()) == []
    assert bundle_folder("hf:tiny/pair") == folder


def test_a_folder_and_what_is_none_stay_as_they_are(bundle: Path, tmp_path: Path, own_cache: Path) -> None:
    assert bundle_folder(bundle) == bundle
    assert bundle_folder(str(tmp_path / "nothing")) == tmp_path / "nothing"
    assert bundle_folder(bundle / WEIGHTS) == bundle / WEIGHTS
    assert is_fetched_by("hf:a/b") and is_fetched_by("https://a/b.zip")
    assert not is_fetched_by(str(bundle)) and not is_fetched_by("hf.mirror")


def zipped(folder: Path, inside: str = "tiny.mirror/") -> bytes:
    stream = io.BytesIO()
    write_archive(stream, {f"{inside}{name}": folder / name for name in files_in(folder)})
    return stream.getvalue()


def taped(folder: Path, mode: str) -> bytes:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode=mode) as archive:  # type: ignore[call-overload]
        archive.add(folder, arcname=folder.name)
    return stream.getvalue()


@pytest.fixture
def place(asked: list[str], tmp_path: Path) -> Path:
    """Where the server has files for everybody."""
    folder = tmp_path / "hub" / "files"
    folder.mkdir()
    return folder


@pytest.fixture
def address(place: Path) -> str:
    import os

    return f"{os.environ['HF_ENDPOINT']}/files"


@pytest.mark.parametrize("mode", ["zip", "flat", "w", "w:gz", "w:xz"])
def test_an_archive_at_an_address(place: Path, address: str, bundle: Path, asked: list[str], mode: str) -> None:
    content = taped(bundle, mode) if mode[0] == "w" else zipped(bundle, "" if mode == "flat" else "tiny.mirror/")
    (place / "tiny.v1.archive").write_bytes(content)
    folder = bundle_folder(f"{address}/tiny.v1.archive")
    assert files_in(folder) == files_in(bundle) and folder.name == "tiny.mirror"
    asked.clear()
    assert bundle_folder(f"{address}/tiny.v1.archive") == folder and asked == []
    left = [path.name for path in folder.parent.iterdir()]
    assert sorted(left) == ["origin.json", "tiny.mirror"], "the archive takes no room twice"


def test_an_archive_on_this_machine(bundle: Path, tmp_path: Path, own_cache: Path) -> None:
    path = tmp_path / "pair.zip"
    path.write_bytes(zipped(bundle))
    folder = bundle_folder(path)
    assert files_in(folder) == files_in(bundle)
    assert bundle_folder(str(path)) == folder and path.is_file()


def test_the_hash_in_an_address_is_checked(place: Path, address: str, bundle: Path) -> None:
    content = zipped(bundle)
    (place / "a.zip").write_bytes(content)
    with pytest.raises(BundleError, match=f"{'0' * 64} was expected: it is another archive, or a damaged one"):
        bundle_folder(f"{address}/a.zip#sha256={'0' * 64}")
    assert fetched_bundles() == []
    digest = hashlib.sha256(content).hexdigest()
    assert files_in(bundle_folder(f"{address}/a.zip#sha256={digest.upper()}")) == files_in(bundle)


@pytest.mark.parametrize(("has_heads", "has_ranges"), [(True, True), (False, True), (True, False)])
def test_an_archive_that_breaks_off(
    place: Path, address: str, bundle: Path, faults: Faults, *, has_heads: bool, has_ranges: bool
) -> None:
    (place / "a.zip").write_bytes(zipped(bundle))
    faults.most_bytes, faults.breaks, faults.has_heads, faults.has_ranges = 600, 1, has_heads, has_ranges
    assert files_in(bundle_folder(f"{address}/a.zip")) == files_in(bundle)


def test_an_archive_that_changed_since_is_begun_anew(
    place: Path, address: str, bundle: Path, faults: Faults, asked: list[str]
) -> None:
    (place / "a.zip").write_bytes(b"P" * 5000)
    faults.most_bytes, faults.breaks, faults.has_ranges = 600, 10**6, False
    with pytest.raises(BundleError, match="does not answer"):
        bundle_folder(f"{address}/a.zip")
    faults.breaks, faults.has_ranges = 0, True
    (place / "a.zip").write_bytes(zipped(bundle))
    asked.clear()
    assert files_in(bundle_folder(f"{address}/a.zip")) == files_in(bundle)
    assert not any("bytes=" in line for line in asked)


def test_nothing_of_an_archive_that_was_there_before_is_in_the_bundle(place: Path, address: str, bundle: Path) -> None:
    """One that was damaged behind a file which the next one does not have."""
    inside, note = files_in(bundle), "target/old_note.txt"
    document = json.loads(inside["manifest.json"])
    document["files"][note] = {"bytes": 3, "sha256": hashlib.sha256(b"old").hexdigest()}
    inside["manifest.json"] = json.dumps(with_checksum(document)).encode()
    stream = io.BytesIO()
    write_archive(stream, {note: b"old", **inside, WEIGHTS: b"x"})
    (place / "a.zip").write_bytes(stream.getvalue())
    with pytest.raises(BundleError, match="is not what its manifest says"):
        bundle_folder(f"{address}/a.zip")
    (place / "a.zip").write_bytes(zipped(bundle))
    folder = bundle_folder(f"{address}/a.zip")
    assert files_in(folder) == files_in(bundle)
    read_bundle(folder)


def test_archives_that_hold_no_bundle(place: Path, address: str, bundle: Path) -> None:
    def other(names_and_contents: dict[str, bytes]) -> bytes:
        stream = io.BytesIO()
        with zipfile.ZipFile(stream, "w") as archive:
            for name, content in names_and_contents.items():
                archive.writestr(name, content)
        return stream.getvalue()

    inside = files_in(bundle)
    less = {name: content for name, content in inside.items() if name != WEIGHTS}
    cases = {
        b"<!doctype html>": "is no archive that can be read to its end .*a repository on the hub is hf:ORG/NAME",
        zipped(bundle)[:-30]: "is no archive that can be read to its end",
        taped(bundle, "w:gz")[:-300]: "is no archive that can be read to its end",
        other({"a.txt": b"a"}): "has no manifest.json, so there is no bundle in it",
        other({**less}): f"lacks {WEIGHTS}, which its manifest lists",
        other({**less, WEIGHTS: b"x" * 10**6}): f"{WEIGHTS} in a.zip is not what its manifest says",
        other({**less, WEIGHTS: b"x" * len(inside[WEIGHTS])}): f"{WEIGHTS} in a.zip is not what its manifest says",
        other({"manifest.json": b"\xff{"}): "is not text",
        other({"manifest.json": b"{}"}): "manifest.json in a.zip",
    }
    for content, words in cases.items():
        (place / "a.zip").write_bytes(content)
        with pytest.raises(BundleError, match=words):
            bundle_folder(f"{address}/a.zip")
        assert fetched_bundles() == []
    (place / "a.zip").write_bytes(zipped(bundle))
    assert files_in(bundle_folder(f"{address}/a.zip")) == inside


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("http://example.com/a.zip", "can be changed on its way here: use https, or add the archive's hash"),
        ("https:///a.zip", "names no host"),
        ("https://example.com/a.zip#sha256=12", "allowed: #sha256= and 64 hexadecimal digits"),
        ("https://example.com/a.zip#part", "allowed: #sha256= and 64 hexadecimal digits"),
    ],
)
def test_addresses_that_are_refused_unasked(text: str, words: str, own_cache: Path) -> None:
    with pytest.raises(ConfigError, match=words):
        bundle_folder(text)


def test_an_address_with_nothing_behind_it(address: str) -> None:
    with pytest.raises(BundleError, match=r"does not give http.*/nothing.zip: status 404"):
        bundle_folder(f"{address}/nothing.zip")
