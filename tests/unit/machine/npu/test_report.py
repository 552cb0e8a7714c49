"""Which blobs a bundle keeps."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from mirrorsd.graphs import names
from mirrorsd.graphs.bundle_files import read_bundle
from mirrorsd.graphs.errors import BundleError
from mirrorsd.graphs.manifest import DraftBucket
from mirrorsd.machine.npu.compiler import ShapeReport
from mirrorsd.machine.npu.report import by_use, kept_within, reports_in, write_platform

SIZES = ((4, 1), (4, 4), (8, 8), (32, 32), (128, 1))
BUCKETS = [DraftBucket(rows=rows, tips=tips) for rows, tips in SIZES]


def report(shape: str, num_bytes: int, error: str = "") -> ShapeReport:
    return ShapeReport(shape=shape, platform="4000", weight_bytes=10, blob_bytes=num_bytes, error=error)


def test_a_round_the_widest_and_the_prompt_come_first_at_the_smallest_capacity() -> None:
    shapes = by_use(BUCKETS, [512, 256])
    assert shapes[:6] == [(8, 8, 256), (32, 32, 256), (128, 1, 256), (8, 8, 512), (32, 32, 512), (128, 1, 512)]
    assert sorted(shapes) == sorted((rows, tips, size) for rows, tips in SIZES for size in (256, 512))


def test_an_ordinary_drafts_buckets_of_one_tip_are_in_order_too() -> None:
    only = [DraftBucket(rows=1, tips=1), DraftBucket(rows=64, tips=1)]
    assert by_use(only, [256]) == [(1, 1, 256), (64, 1, 256)]


def test_blobs_are_kept_as_far_as_three_times_the_weights_go() -> None:
    found = kept_within([report("a", 10), report("b", 0, "refused"), report("c", 15), report("d", 5)], weight_bytes=10)
    assert [(one.shape, one.is_kept) for one in found] == [("a", True), ("b", False), ("c", True), ("d", True)]
    found = kept_within([report("a", 20), report("b", 11), report("c", 10)], weight_bytes=10)
    assert [one.is_kept for one in found] == [True, False, True]


@pytest.mark.parametrize("text", ["{", "[]", '{"format": "another"}'])
def test_what_is_no_report_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "report.json"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(BundleError, match=r"Run mirrorsd compile --npu again"):
        reports_in(path)


def blobs_in(folder: Path, content: bytes) -> Path:
    folder.mkdir()
    for shape in ("a", "b"):
        (folder / f"{shape}.blob").write_bytes(content)
    return folder


def test_a_disk_that_fills_up_leaves_the_bundle_as_it_was(
    bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blobs that no manifest lists, or those that are listed and not there, would make the bundle unusable."""
    kept = [replace(report(shape, 3), is_kept=True) for shape in ("a", "b")]
    copyfile, rename = shutil.copyfile, Path.replace

    def full(source: Path, target: Path) -> None:
        if target.name == "b.blob":
            raise OSError(28, "No space left on device")
        copyfile(source, target)

    def no_manifest(path: Path, target: Path) -> Path:
        if target.name == "manifest.json":
            raise OSError(30, "Read-only file system")
        return rename(path, target)

    for number, content in enumerate((b"one", b"two")):  # the first time, and where there are earlier ones
        before = read_bundle(bundle)
        for owner, name, fails in ((shutil, "copyfile", full), (Path, "replace", no_manifest)):
            with monkeypatch.context() as patch:
                patch.setattr(owner, name, fails)
                with pytest.raises(BundleError, match="cannot be written"):
                    write_platform(bundle, "4000", kept, blobs_in(tmp_path / f"{number}{name}", content))
            assert read_bundle(bundle) == before
            assert not [path for path in bundle.iterdir() if path.name.startswith(".")]
        write_platform(bundle, "4000", kept, blobs_in(tmp_path / f"{number}", content))
        assert (bundle / names.NPU_FOLDER / "4000" / "b.blob").read_bytes() == content
    assert set(read_bundle(bundle).files) - set(before.files) == set()
