"""Compiled drafts on disk: a folder beside the bundle, never inside it, so that the bundle's hashes stay true.

A blob is used only if its record says that the same OpenVINO, device, driver, options and draft made it and its bytes
are those that were written; anything else is said in one line and compiled again. Where nothing can be written, the
draft is compiled at every load and nothing else changes.
"""

import hashlib
import json
import logging
import os
import shutil
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import openvino as ov

from mirrorsd.device_maps import DraftPlacement
from mirrorsd.graphs import names
from mirrorsd.graphs.errors import BundleError
from mirrorsd.graphs.manifest import DraftEntry, Manifest
from mirrorsd.runtime.draft_shapes import cache_type, device_options, host_options
from mirrorsd.runtime.openvino_errors import OPENVINO_ERRORS

_FORMAT = "mirrorsd-compiled-draft-2"
_DEVICE_PROPERTIES = ("FULL_DEVICE_NAME", "DEVICE_ARCHITECTURE", "NPU_DRIVER_VERSION", "NPU_COMPILER_VERSION")
_LONG_REASONS = {"draft": "the draft has changed", "options": "it was made with other options"}
_ROOM_FACTOR = 4
_log = logging.getLogger("mirrorsd")

MadeBy = dict[str, str]


class DraftCache:
    """Blobs of one bundle's draft for one placement; `made_by` is what a blob must have been made by.

    Attributes:
        num_read: blobs that were used.
        num_written: blobs that were written.
        is_writable: whether blobs can be kept; False after the first that could not.
    """

    def __init__(self, folder: Path, stem: str, made_by: MadeBy) -> None:
        self.folder, self.made_by = folder, made_by
        self.num_read = self.num_written = 0
        self._stem = stem
        self.is_writable = True
        self._said: set[str] = set()

    def read(self, shape: str) -> ov.Tensor | None:
        """The blob of one static shape, mapped from disk; None if there is none that fits."""
        blob_path, record_path = self._paths(shape)
        if not record_path.is_file() or not blob_path.is_file():
            return None
        reason = self._reason_against(blob_path, record_path)
        if reason:
            self.reject(reason)
            return None
        self.num_read += 1
        return ov.Tensor(np.memmap(blob_path, dtype=np.uint8, mode="c"), shared_memory=True)

    def has(self, shape: str) -> bool:
        """Whether there is a blob of this static shape that fits."""
        blob_path, record_path = self._paths(shape)
        return record_path.is_file() and blob_path.is_file() and not self._reason_against(blob_path, record_path)

    def reject(self, reason: str) -> None:
        """Say once why cached shapes are not used."""
        if reason not in self._said:
            self._said.add(reason)
            _log.warning("Compiled draft cache: %s; compiling again.", reason)

    def write(self, shape: str, blob: bytes) -> None:
        """Keep a blob; where that is not possible, say so once and go on without."""
        if not self.is_writable:
            return
        blob_path, record_path = self._paths(shape)
        try:
            self.folder.mkdir(exist_ok=True)
            if shutil.disk_usage(self.folder).free < _ROOM_FACTOR * len(blob):
                raise OSError("too little room on the disk")
            record_path.unlink(missing_ok=True)
            _write_whole(blob_path, blob)
            stat = blob_path.stat()
            record: dict[str, object] = {"made_by": self.made_by, "sha256": hashlib.sha256(blob).hexdigest()}
            record |= {"bytes": stat.st_size, "mtime_ns": stat.st_mtime_ns}
            _write_whole(record_path, json.dumps(record, indent=1).encode())
            self.num_written += 1
        except OSError as error:
            self.give_up(str(error))

    def give_up(self, reason: str) -> None:
        """Keep no more blobs."""
        self.is_writable = False
        _log.info("Compiled drafts are not kept in %s: %s.", self.folder.name, reason)

    def _paths(self, shape: str) -> tuple[Path, Path]:
        return self.folder / f"{self._stem}-{shape}.blob", self.folder / f"{self._stem}-{shape}.json"

    def _reason_against(self, blob_path: Path, record_path: Path) -> str:
        try:
            record = json.loads(record_path.read_text(encoding="utf-8"))
            made_by, digest = record["made_by"], record["sha256"]
            stamp = (record["bytes"], record["mtime_ns"])
        except (OSError, ValueError, KeyError, TypeError):
            return f"{record_path.name} is not a record of mirrorsd's"
        reason = _difference(made_by, self.made_by)
        if reason:
            return reason
        try:
            stat = blob_path.stat()
            if stamp != (stat.st_size, stat.st_mtime_ns) and _sha256(blob_path) != digest:
                return f"{blob_path.name} is damaged"
        except OSError as error:
            return f"{blob_path.name} cannot be read ({error.strerror})"
        return ""


def open_draft_cache(bundle: Path, entry: DraftEntry, placement: DraftPlacement, core: ov.Core) -> DraftCache | None:
    """The cache `.NAME.mirror.cache` beside the bundle; None for a folder without a manifest."""
    manifest_path = bundle / names.MANIFEST_FILE
    try:
        manifest = Manifest.from_json(manifest_path.read_text(encoding="utf-8"), origin=str(manifest_path))
    except (OSError, BundleError):
        return None
    weights = Path(entry.file).with_suffix(".bin").as_posix()
    draft = [manifest.files[name].sha256 for name in (entry.file, weights) if name in manifest.files]
    device, options = device_options(placement)
    options |= {"device": device, "host": host_options(placement), "kept_in": str(cache_type(core, entry, placement))}
    made_by = {
        "format": _FORMAT,
        "OpenVINO": ov.get_version(),
        **_describe_device(core, "CPU" if placement.emulated else device),
        "options": json.dumps(options, sort_keys=True),
        "draft": "+".join(draft),
    }
    words = (device, *(["emulated"] if placement.emulated else []), placement.precision, f"{placement.threads}t")
    group = [f"a{placement.activation_group}"] if placement.activation_group else []
    stem = "-".join((*words, *group)).lower()
    root = bundle.resolve()
    return DraftCache(root.parent / f".{root.name}.cache", stem, made_by)


def _describe_device(core: ov.Core, device: str) -> MadeBy:
    described = {}
    for name in _DEVICE_PROPERTIES:
        try:
            described[name] = str(core.get_property(device, name))
        except OPENVINO_ERRORS:
            continue
    return described


def _difference(found: object, expected: MadeBy) -> str:
    """What a blob was made by, where that is not what is here; empty if all is equal."""
    if not isinstance(found, Mapping) or found.get("format") != _FORMAT:
        return "its records are of another format"
    for name, value in expected.items():
        if found.get(name) != value:
            if name in _LONG_REASONS:
                return _LONG_REASONS[name]
            return f"it was made with {name} {found.get(name, 'unknown')}, here is {value}"
    return ""


def _sha256(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _write_whole(path: Path, content: bytes) -> None:
    """Write beside and rename, so that nobody ever reads half a file."""
    partial = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        partial.write_bytes(content)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
