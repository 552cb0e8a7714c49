"""Compiled drafts on disk: in the user's cache, where they are found again wherever the bundle is moved.

A blob is used only if its record says that the same OpenVINO, device, driver, options and draft made it and its bytes
are those that were written; anything else is said in one line and compiled again. Blobs that another draft or another
OpenVINO made are deleted, and the folder stays within a limit. Where nothing can be written, the draft is compiled at
every load and nothing else changes.
"""

import hashlib
import json
import logging
import shutil
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import openvino as ov

from mirrorsd.device_maps import DraftPlacement
from mirrorsd.devices.openvino.draft_shapes import OPENVINO_ERRORS, cache_type, device_options, host_options
from mirrorsd.graphs import names
from mirrorsd.graphs.bundle_files import describe_file
from mirrorsd.graphs.errors import BundleError
from mirrorsd.graphs.manifest import DraftEntry
from mirrorsd.graphs.manifest_values import read_manifest
from mirrorsd.graphs.user_cache import COMPILED, folder_of, make_room
from mirrorsd.graphs.whole_file import write_whole

_FORMAT = "mirrorsd-compiled-draft-3"
_DEVICE_PROPERTIES = ("FULL_DEVICE_NAME", "DEVICE_ARCHITECTURE", "NPU_DRIVER_VERSION", "NPU_COMPILER_VERSION")
_LONG_REASONS = {"draft": "the draft has changed", "options": "it was made with other options"}
_ROOM_FACTOR = 4
_STALE = ("format", "OpenVINO", "draft")
"""What makes a blob useless for good; another device, or other options, may be another machine's or another card's."""
_LEAST_LIMIT = 64 << 20
_RECORD = {"made_by", "sha256", "bytes", "mtime_ns"}
_log = logging.getLogger("mirrorsd")

MadeBy = dict[str, str]


class CompiledCache:
    """Blobs of one bundle's draft for one placement; `made_by` is what a blob must have been made by.

    Attributes:
        most_bytes: what all blobs of the folder may take; the oldest of other placements make room.
        num_read: blobs that were used.
        num_written: blobs that were written.
        is_writable: whether blobs can be kept; False after the first that could not.
    """

    def __init__(self, folder: Path, stem: str, made_by: MadeBy, most_bytes: int = _LEAST_LIMIT) -> None:
        self.folder, self.made_by, self.most_bytes = folder, made_by, most_bytes
        self.num_read = self.num_written = 0
        self._stem = stem
        self.is_writable = True
        self._said: set[str] = set()

    def read(self, shape: str) -> ov.Tensor | None:
        """The blob of one static shape, mapped from disk; None if there is none that fits."""
        blob_path, record_path = self._paths(shape)
        try:
            if not record_path.is_file() or not blob_path.is_file():
                return None
            if reason := self._reason_against(blob_path, record_path):
                self.reject(reason)
                return None
            blob = np.memmap(blob_path, dtype=np.uint8, mode="c")
        except OSError as error:  # another user's, or deleted by another process meanwhile
            self.reject(f"{blob_path.name} cannot be read ({error.strerror})")
            return None
        self.num_read += 1
        return ov.Tensor(blob, shared_memory=True)

    def has(self, shape: str) -> bool:
        """Whether there is a blob of this static shape that fits."""
        blob_path, record_path = self._paths(shape)
        try:
            return record_path.is_file() and blob_path.is_file() and not self._reason_against(blob_path, record_path)
        except OSError:
            return False

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
            self.folder.mkdir(parents=True, exist_ok=True)
            self._make_room(blob_path, len(blob))
            if shutil.disk_usage(self.folder).free < _ROOM_FACTOR * len(blob):
                raise OSError("too little room on the disk")
            record_path.unlink(missing_ok=True)
            write_whole(blob_path, blob)
            stat = blob_path.stat()
            record: dict[str, object] = {"made_by": self.made_by, "sha256": hashlib.sha256(blob).hexdigest()}
            record |= {"bytes": stat.st_size, "mtime_ns": stat.st_mtime_ns}
            write_whole(record_path, json.dumps(record, indent=1).encode())
            self.num_written += 1
        except OSError as error:
            self.give_up(str(error))

    def give_up(self, reason: str) -> None:
        """Keep no more blobs."""
        self.is_writable = False
        _log.info("Compiled drafts are not kept in %s: %s.", self.folder, reason)

    def delete_stale(self) -> None:
        """Delete blobs of another draft, OpenVINO or format: nobody will use them again."""
        records = list[Path]()
        with suppress(OSError):  # a folder that is closed to this user
            records += self.folder.glob("*.json")
        for record_path in records:
            made_by = _read_record(record_path).get("made_by")
            if isinstance(made_by, Mapping) and any(made_by.get(name) != self.made_by[name] for name in _STALE):
                self.reject(_difference(made_by, self.made_by))
                _delete(record_path, record_path.with_suffix(".blob"))

    def _make_room(self, blob_path: Path, num_bytes: int) -> None:
        """Delete the oldest blobs of other placements until one of `num_bytes` fits.

        Raises:
            OSError: it does not.
        """
        stats = {path: path.stat() for path in self.folder.glob("*.blob") if path != blob_path}
        total = num_bytes + sum(stat.st_size for stat in stats.values())
        for path in sorted(stats, key=lambda path: stats[path].st_mtime_ns):
            if total > self.most_bytes and not path.name.startswith(f"{self._stem}-"):
                _delete(path.with_suffix(".json"), path)
                total -= stats[path].st_size
        if total > self.most_bytes:
            raise OSError(f"they would take more than {self.most_bytes >> 20} MiB")

    def _paths(self, shape: str) -> tuple[Path, Path]:
        return self.folder / f"{self._stem}-{shape}.blob", self.folder / f"{self._stem}-{shape}.json"

    def _reason_against(self, blob_path: Path, record_path: Path) -> str:
        record = _read_record(record_path)
        if not record:
            return f"{record_path.name} is not a record of mirrorsd's"
        stamp = (record["bytes"], record["mtime_ns"])
        reason = _difference(record["made_by"], self.made_by)
        if reason:
            return reason
        stat = blob_path.stat()
        if stamp != (stat.st_size, stat.st_mtime_ns) and describe_file(blob_path).sha256 != record["sha256"]:
            return f"{blob_path.name} is damaged"
        return ""


def open_draft_cache(bundle: Path, entry: DraftEntry, placement: DraftPlacement, core: ov.Core) -> CompiledCache | None:
    """The bundle's compiled drafts in the user's cache; None for a folder without a manifest."""
    manifest_path = bundle / names.MANIFEST_FILE
    try:
        manifest = read_manifest(manifest_path.read_text(encoding="utf-8"), origin=str(manifest_path))
    except (OSError, BundleError):
        return None
    weights = Path(entry.file).with_suffix(".bin").as_posix()
    draft = [manifest.files[name].sha256 for name in (entry.file, weights) if name in manifest.files]
    device, options = device_options(placement)
    if placement.device == "CPU":  # a processor takes its blobs back with any number of threads
        options.pop("INFERENCE_NUM_THREADS")
    options |= {"device": device, "host": host_options(placement), "kept_in": str(cache_type(core, entry, placement))}
    made_by = {
        "format": _FORMAT,
        "OpenVINO": ov.get_version(),
        **_describe_device(core, "CPU" if placement.emulated else device),
        "options": json.dumps(options, sort_keys=True),
        "draft": "+".join(draft),
    }
    words = [device, *(["emulated"] if placement.emulated else []), placement.precision]
    words += [f"{placement.threads}t"] if placement.device != "CPU" else []
    words += [f"a{placement.activation_group}"] if placement.activation_group else []
    kept = folder_of(bundle)
    make_room(kept)
    most_bytes = max(_LEAST_LIMIT, sum(file.bytes for file in manifest.files.values()))
    cache = CompiledCache(kept / COMPILED, "-".join(words).lower(), made_by, most_bytes)
    cache.delete_stale()
    return cache


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


def _read_record(path: Path) -> dict[str, Any]:
    """What a record says; empty if it is none."""
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return record if isinstance(record, dict) and record.keys() >= _RECORD else {}


def _delete(*paths: Path) -> None:
    """Delete files; one that somebody holds, or another process has deleted, is left."""
    for path in paths:
        with suppress(OSError):
            path.unlink()
