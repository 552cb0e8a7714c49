"""What the NPU compiler made of a bundle's draft ahead of time: `draft/npu/PLATFORM/` with blobs and a report.

The manifest lists these files as all others, so that a bundle with them is whole or refused. A blob is used where the
device is of its platform and the OpenVINO that made it, and the draft it was made of, are those at hand.
"""

import hashlib
import json
import logging
import re
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import openvino as ov

from mirrorsd.graphs import names
from mirrorsd.graphs.bundle_files import describe_file, read_bundle
from mirrorsd.graphs.errors import BundleError
from mirrorsd.graphs.manifest import DraftBucket, Manifest
from mirrorsd.runtime.backends.openvino.errors import OPENVINO_ERRORS
from mirrorsd.runtime.backends.openvino.npu.compiler import NodeCost, ShapeReport

MOST_WEIGHTS = 3
"""Blobs of a platform may take so many times the draft's weights: each holds them again."""
_FORMAT = "mirrorsd-npu-blobs-1"
_log = logging.getLogger("mirrorsd")


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
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for old in folder.iterdir():
            old.unlink()
        for report in reports:
            if report.is_kept:
                (folder / f"{report.shape}.blob").write_bytes((blobs / f"{report.shape}.blob").read_bytes())
        (folder / names.NPU_REPORT_FILE).write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
        files |= {f"{inside}/{path.name}": describe_file(path) for path in sorted(folder.iterdir())}
        written = replace(manifest, files=files)
        partial = bundle / f".{names.MANIFEST_FILE}"
        partial.write_text(written.to_json(), encoding="utf-8")
        partial.replace(bundle / names.MANIFEST_FILE)
    except OSError as error:
        raise BundleError(f"{folder} cannot be written ({error.strerror}).") from error
    return written


def report_document(platform: str, reports: Sequence[ShapeReport], draft: str) -> dict[str, Any]:
    """A platform's report as it is kept; `draft` is the digest of what was compiled."""
    shapes = [asdict(report) for report in reports]
    return {"format": _FORMAT, "platform": platform, "note": names.ESTIMATED, "draft": draft, "shapes": shapes}


def draft_digest(manifest: Manifest) -> str:
    """What blobs must have been made of: the draft's graph and weights."""
    parts = (manifest.files[name].sha256 for name in (manifest.draft.file, manifest.draft.weights_file))
    return hashlib.sha256("+".join(parts).encode()).hexdigest()


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
    document = _read(path)
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


def _read(path: Path) -> dict[str, Any]:
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise BundleError(f"{path} cannot be read ({error}). Run mirrorsd compile --npu again.") from error
    if not isinstance(document, dict) or document.get("format") != _FORMAT:
        raise BundleError(f"{path} is not a report of this mirrorsd. Run mirrorsd compile --npu again.")
    return document


class BundleBlobs:
    """The blobs of a bundle for the NPU at hand; whatever does not fit is said once and compiled again."""

    def __init__(self, bundle: Path, core: ov.Core) -> None:
        self._folder: Path | None = None
        platform = _platform_here(core)
        folder = bundle / names.NPU_FOLDER / platform
        if not platform or not (folder / names.NPU_REPORT_FILE).is_file():
            return
        reason = _reason_against(bundle, folder)
        if reason:
            _log.warning("Drafts compiled ahead for NPU %s are not used: %s; compiling again.", platform, reason)
        else:
            self._folder = folder

    def read(self, shape: str) -> ov.Tensor | None:
        """The blob of one static shape, mapped from disk; None if there is none that fits."""
        if self._folder is None or not (path := self._folder / f"{shape}.blob").is_file():
            return None
        return ov.Tensor(np.memmap(path, dtype=np.uint8, mode="c"), shared_memory=True)

    def reject(self, reason: str) -> None:
        """Use none of them any more, and say why."""
        self._folder = None
        _log.warning("Drafts compiled ahead are not used: %s; compiling again.", reason)


def _platform_here(core: ov.Core) -> str:
    try:
        found = re.search(r"\d{4}", str(core.get_property("NPU", "DEVICE_ARCHITECTURE")))
    except OPENVINO_ERRORS:
        return ""
    return found[0] if found else ""


def _reason_against(bundle: Path, folder: Path) -> str:
    document = _read(folder / names.NPU_REPORT_FILE)
    if document["draft"] != draft_digest(read_bundle(bundle)):
        return "the draft has changed"
    made_by = {shape["openvino"] for shape in document["shapes"] if shape["is_kept"]}
    here = ov.get_version()
    return "" if made_by <= {here} else f"they were made with OpenVINO {', '.join(sorted(made_by))}, here is {here}"
