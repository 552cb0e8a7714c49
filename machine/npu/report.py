"""What the NPU compiler made of a bundle's draft ahead of time: which blobs are kept, and the report beside them.

The manifest lists these files as all others, so that a bundle with them is whole or refused. Reading them again is
`npu_blobs`.
"""

import json
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from mirrorsd.devices.openvino.npu_blobs import REPORT_FORMAT, draft_digest, read_document
from mirrorsd.graphs import names
from mirrorsd.graphs.bundle_files import describe_file, read_bundle
from mirrorsd.graphs.errors import BundleError
from mirrorsd.graphs.manifest import DraftBucket, Manifest
from mirrorsd.machine.npu.compiler import NodeCost, ShapeReport

MOST_WEIGHTS = 3
"""Blobs of a platform may take so many times the draft's weights: each holds them again."""


def by_use(buckets: Sequence[DraftBucket], capacities: Sequence[int]) -> list[tuple[int, int, int]]:
    """All shapes, those first that no text can do without: of each capacity a round, the widest round, the prompt.

    >>> by_use([DraftBucket(rows=4, tips=4), DraftBucket(rows=8, tips=8), DraftBucket(rows=64, tips=1)], [256])
    [(8, 8, 256), (64, 1, 256), (4, 4, 256)]
    """
    rounds = sorted((bucket for bucket in buckets if bucket.tips > 1), key=lambda bucket: bucket.rows)
    usual = next((bucket for bucket in rounds if bucket.rows >= _USUAL_ROWS), rounds[-1] if rounds else buckets[0])
    longest = max(buckets, key=lambda bucket: bucket.rows)
    first = list(dict.fromkeys([usual, *rounds[-1:], longest]))
    rest = [bucket for bucket in buckets if bucket not in first]
    ordered = sorted(capacities)
    return [(b.rows, b.tips, size) for group in (first, rest) for size in ordered for b in group]


_USUAL_ROWS = 8


def kept_within(reports: Sequence[ShapeReport], weight_bytes: int) -> list[ShapeReport]:
    """Mark the reports, best first, whose blobs may be kept beside weights of `weight_bytes`."""
    left = MOST_WEIGHTS * weight_bytes
    marked = []
    for report in reports:
        is_kept = report.is_compiled and report.blob_bytes <= left
        left -= report.blob_bytes if is_kept else 0
        marked.append(replace(report, is_kept=is_kept))
    return marked


def write_platform(bundle: Path, platform: str, reports: Sequence[ShapeReport], blobs: Path) -> Manifest:
    """Put a platform's kept blobs (`SHAPE.blob` in `blobs`) and its report into the bundle, in place of earlier ones.

    Raises:
        BundleError: the bundle is damaged, or nothing can be written into it.
    """
    manifest = read_bundle(bundle)
    inside = f"{names.NPU_FOLDER}/{platform}"
    folder = bundle / inside
    document = report_document(platform, reports, draft_digest(manifest))
    files = {name: entry for name, entry in manifest.files.items() if not name.startswith(f"{inside}/")}
    made = bundle / f".npu-{platform}"
    partial = bundle / f".{names.MANIFEST_FILE}"
    try:
        shutil.rmtree(made, ignore_errors=True)  # left by a process that was killed
        made.mkdir()
        for report in reports:
            if report.is_kept:
                shutil.copyfile(blobs / f"{report.shape}.blob", made / f"{report.shape}.blob")
        (made / names.NPU_REPORT_FILE).write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
        files |= {f"{inside}/{path.name}": describe_file(path) for path in sorted(made.iterdir())}
        written = replace(manifest, files=files)
        partial.write_text(written.to_json(), encoding="utf-8")
        with _in_place(made, folder):
            partial.replace(bundle / names.MANIFEST_FILE)
    except OSError as error:
        raise BundleError(f"{folder} cannot be written ({error.strerror}).") from error
    finally:
        shutil.rmtree(made, ignore_errors=True)
        partial.unlink(missing_ok=True)
    return written


@contextmanager
def _in_place(made: Path, folder: Path) -> Iterator[None]:
    """The folder that was `made` in place of another one, for good if the block ends without an error."""
    former = made.with_name(f"{made.name}-former")
    shutil.rmtree(former, ignore_errors=True)
    folder.parent.mkdir(exist_ok=True)
    if folder.exists():
        folder.rename(former)
    try:
        made.rename(folder)
        yield
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        if former.exists():
            former.rename(folder)
        raise
    shutil.rmtree(former, ignore_errors=True)


def report_document(platform: str, reports: Sequence[ShapeReport], draft: str) -> dict[str, Any]:
    """A platform's report as it is kept; `draft` is the digest of what was compiled."""
    shapes = [asdict(report) for report in reports]
    return {"format": REPORT_FORMAT, "platform": platform, "note": names.ESTIMATED, "draft": draft, "shapes": shapes}


def read_reports(bundle: Path) -> dict[str, list[ShapeReport]]:
    """The compiler's reports by platform.

    Raises:
        BundleError: one of them is not of this format.
    """
    paths = sorted((bundle / names.NPU_FOLDER).glob(f"*/{names.NPU_REPORT_FILE}"))
    return {path.parent.name: reports_in(path) for path in paths}


def reports_in(path: Path) -> list[ShapeReport]:
    """The reports of one file.

    Raises:
        BundleError: it is not of this format.
    """
    document = read_document(path)
    return [
        ShapeReport(
            **shape
            | {
                "costliest": tuple(NodeCost(**cost) for cost in shape["costliest"]),
                "not_costed": tuple(shape["not_costed"]),
            }
        )
        for shape in document["shapes"]
    ]
