"""A bundle's blobs for an NPU, compiled ahead of time (`draft/npu/PLATFORM/`): which of them fit what is at hand.

A blob is used where the device is of its platform, and where the OpenVINO that made it and the draft are those at hand.
"""

import hashlib
import json
import logging
import re
from pathlib import Path
from typing import Any

import numpy as np
import openvino as ov

from mirrorsd.devices.openvino.draft_shapes import OPENVINO_ERRORS
from mirrorsd.graphs import names
from mirrorsd.graphs.bundle_files import read_bundle
from mirrorsd.graphs.errors import BundleError
from mirrorsd.graphs.manifest import Manifest

REPORT_FORMAT = "mirrorsd-npu-blobs-1"
_log = logging.getLogger("mirrorsd")


def draft_digest(manifest: Manifest) -> str:
    """What blobs must have been made of: the draft's graph and weights."""
    parts = (manifest.files[name].sha256 for name in (manifest.draft.file, manifest.draft.weights_file))
    return hashlib.sha256("+".join(parts).encode()).hexdigest()


def read_document(path: Path) -> dict[str, Any]:
    """Return a platform's report as it is kept.

    Raises:
        BundleError: it is not of this format.
    """
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise BundleError(f"{path} cannot be read ({error}). Run mirrorsd compile --npu again.") from error
    if not isinstance(document, dict) or document.get("format") != REPORT_FORMAT:
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
    document = read_document(folder / names.NPU_REPORT_FILE)
    if document["draft"] != draft_digest(read_bundle(bundle)):
        return "the draft has changed"
    made_by = {shape["openvino"] for shape in document["shapes"] if shape["is_kept"]}
    here = ov.get_version()
    return "" if made_by <= {here} else f"they were made with OpenVINO {', '.join(sorted(made_by))}, here is {here}"
