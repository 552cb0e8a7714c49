"""Loading a bundle: every way in which a folder is not what its manifest says."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mirrorsd.graphs import bundle_files, names
from mirrorsd.graphs.bundle_files import describe_file, read_bundle
from mirrorsd.graphs.errors import BundleError
from mirrorsd.graphs.manifest import with_checksum
from mirrorsd.graphs.user_cache import folder_of


def edit_manifest(folder: Path, edit: Callable[[dict[str, Any]], object]) -> None:
    """Edit it and put the right checksum on it, so that only the other checks can notice."""
    path = folder / names.MANIFEST_FILE
    document = json.loads(path.read_text(encoding="utf-8"))
    edit(document)
    path.write_text(json.dumps(with_checksum(document)), encoding="utf-8")


def test_reads_back_what_was_written(bundle: Path) -> None:
    manifest = read_bundle(bundle)
    assert manifest.target.segments[1].end_layer == 2
    assert manifest.draft.buckets[0].rows == 8
    assert (bundle / names.MANIFEST_FILE).read_text(encoding="utf-8") == manifest.to_json()


def test_describe_file_of_known_content(tmp_path: Path) -> None:
    path = tmp_path / "abc"
    path.write_bytes(b"abc")
    entry = describe_file(path)
    assert entry.bytes == 3
    assert entry.sha256 == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"


def test_no_folder(tmp_path: Path) -> None:
    with pytest.raises(BundleError, match=r"is not a folder.*mirrorsd export"):
        read_bundle(tmp_path / "nothing.mirror")


def test_no_manifest(tmp_path: Path) -> None:
    with pytest.raises(BundleError, match=r"has no manifest.json, so it is not a bundle"):
        read_bundle(tmp_path)


def test_truncated_manifest(bundle: Path) -> None:
    path = bundle / names.MANIFEST_FILE
    path.write_text(path.read_text(encoding="utf-8")[:200], encoding="utf-8")
    with pytest.raises(BundleError, match=r"is not valid JSON .* Export the bundle again"):
        read_bundle(bundle)


def test_binary_manifest(bundle: Path) -> None:
    (bundle / names.MANIFEST_FILE).write_bytes(b"\xff\xfe\x00")
    with pytest.raises(BundleError, match="is not UTF-8"):
        read_bundle(bundle)


@pytest.mark.parametrize("document", ["[]", "3", "null", '{"target": {}}', '{"schema": "1"}'])
def test_json_that_is_no_manifest(bundle: Path, document: str) -> None:
    (bundle / names.MANIFEST_FILE).write_text(document, encoding="utf-8")
    with pytest.raises(BundleError, match="not a mirrorsd manifest"):
        read_bundle(bundle)


@pytest.mark.parametrize(("schema", "advice"), [(99, "Upgrade mirrorsd"), (0, "Export the bundle again")])
def test_other_schema(bundle: Path, schema: int, advice: str) -> None:
    edit_manifest(bundle, lambda document: document.update(schema=schema))
    with pytest.raises(BundleError, match=f"has schema {schema}; .*{advice}"):
        read_bundle(bundle)


def test_missing_field_is_named(bundle: Path) -> None:
    edit_manifest(bundle, lambda document: document["target"].pop("precision"))
    with pytest.raises(BundleError, match=r"target is incomplete .*'precision'"):
        read_bundle(bundle)


def test_missing_top_level_field_is_named(bundle: Path) -> None:
    edit_manifest(bundle, lambda document: document.pop("verify"))
    with pytest.raises(BundleError, match=r"the manifest is incomplete .*'verify'"):
        read_bundle(bundle)


def test_unknown_field_is_named(bundle: Path) -> None:
    edit_manifest(bundle, lambda document: document["draft"].update(colour="red"))
    with pytest.raises(BundleError, match="unknown field 'colour' in draft"):
        read_bundle(bundle)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("target", "context"), "64"),
        (("target", "context"), True),
        (("target", "segments"), {}),
        (("target", "segments", 0, "first_layer"), None),
        (("verify", 0, "max_abs_error"), "small"),
        (("files", "target/weights.bin", "bytes"), 1.5),
    ],
)
def test_wrong_type_is_named(bundle: Path, path: tuple[str | int, ...], value: object) -> None:
    def edit(document: Any) -> None:
        for part in path[:-1]:
            document = document[part]
        document[path[-1]] = value

    edit_manifest(bundle, edit)
    with pytest.raises(BundleError, match=f"'.*{path[-1]}' has the wrong type"):
        read_bundle(bundle)


@pytest.mark.parametrize("path", ["/etc/passwd", "../secret", "target/../../secret", "C:/secret", "a\\b", "", "a\0b"])
def test_path_that_leaves_the_folder(bundle: Path, path: str) -> None:
    entry = {"bytes": 1, "sha256": "0"}
    edit_manifest(bundle, lambda document: document["files"].update({path: entry}))
    with pytest.raises(BundleError, match=r"leaves the bundle's folder.*do not use this bundle"):
        read_bundle(bundle)


def test_stage_path_that_leaves_the_folder(bundle: Path) -> None:
    edit_manifest(bundle, lambda document: document["draft"].update(file="../draft.xml"))
    with pytest.raises(BundleError, match="leaves the bundle's folder"):
        read_bundle(bundle)


def test_stage_file_that_is_not_listed(bundle: Path) -> None:
    edit_manifest(bundle, lambda document: document["draft"].update(file="draft/other.xml"))
    with pytest.raises(BundleError, match=r"uses 'draft/other.xml' but lists no such file"):
        read_bundle(bundle)


@pytest.mark.parametrize("file", ["draft/draft.bin", "tokenizer/tokenizer.json"])
def test_every_file_that_is_loaded_must_be_listed(bundle: Path, file: str) -> None:
    edit_manifest(bundle, lambda document: document["files"].pop(file))
    with pytest.raises(BundleError, match=f"uses '{file}' but lists no such file"):
        read_bundle(bundle)


@pytest.mark.parametrize("file", ["tokenizer/chat_template.jinja", "draft/other/draft.bin", "target/middle.onnx"])
def test_a_file_that_was_put_there_later_is_refused(bundle: Path, file: str) -> None:
    (bundle / file).parent.mkdir(exist_ok=True)
    (bundle / file).write_text("{{ messages }}", encoding="utf-8")
    with pytest.raises(BundleError, match=r"is not listed in manifest.json: it was put there after the export"):
        read_bundle(bundle)


def test_what_is_never_loaded_may_lie_in_a_bundle(bundle: Path) -> None:
    read_bundle(bundle)
    for name in ("notes.txt", "tokenizer/.DS_Store", ".cache/blob"):
        (bundle / name).parent.mkdir(exist_ok=True)
        (bundle / name).write_text("mine", encoding="utf-8")
    read_bundle(bundle)


@pytest.mark.skipif(os.name == "nt", reason="symbolic links need a privilege on Windows")
def test_a_link_that_nobody_listed_is_refused(bundle: Path, tmp_path: Path) -> None:
    (tmp_path / "template").write_text("{{ messages }}", encoding="utf-8")
    (bundle / "tokenizer" / "chat_template.jinja").symlink_to(tmp_path / "template")
    with pytest.raises(BundleError, match=r"chat_template.jinja is not listed in manifest.json"):
        read_bundle(bundle)


def test_missing_file(bundle: Path) -> None:
    (bundle / "target/weights.bin").unlink()
    with pytest.raises(BundleError, match=r"weights.bin is missing. Copy the whole bundle"):
        read_bundle(bundle)


def test_truncated_file(bundle: Path) -> None:
    path = bundle / "target/weights.bin"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(BundleError, match=r"has 28 bytes, the manifest says 29: truncated or replaced"):
        read_bundle(bundle)


def test_damaged_file(bundle: Path) -> None:
    path = bundle / "target/weights.bin"
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    with pytest.raises(BundleError, match="is damaged: SHA-256 "):
        read_bundle(bundle)


def test_damage_after_a_passed_check_is_noticed(bundle: Path) -> None:
    read_bundle(bundle)
    path = bundle / "target/weights.bin"
    stat = path.stat()
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns + 1_000_000_000))
    with pytest.raises(BundleError, match="is damaged"):
        read_bundle(bundle)


def test_second_load_does_not_hash_again(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read_bundle(bundle)

    def refuse(path: Path) -> None:
        raise AssertionError(f"{path} was hashed again")

    monkeypatch.setattr(bundle_files, "describe_file", refuse)
    read_bundle(bundle)


def test_rubbish_in_the_remembered_check_is_ignored(bundle: Path, own_cache: Path) -> None:
    read_bundle(bundle)
    (seal,) = folder_of(bundle).glob("checked-*.json")
    seal.write_bytes(b"\xff not json")
    read_bundle(bundle)


@pytest.mark.skipif(os.name == "nt", reason="symbolic links need a privilege on Windows")
def test_link_that_leaves_the_folder(bundle: Path, tmp_path: Path) -> None:
    inside, outside = bundle / "target/weights.bin", tmp_path / "outside.bin"
    outside.write_bytes(inside.read_bytes())
    inside.unlink()
    inside.symlink_to(outside)
    with pytest.raises(BundleError, match="is a link that leaves the bundle's folder"):
        read_bundle(bundle)
