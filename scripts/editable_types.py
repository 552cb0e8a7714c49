"""The build backend: setuptools, and editable installs that type checkers and editors see.

The package is the clone itself, whatever its folder is called, so setuptools finds an editable install's modules
by a hook, which only a running Python understands. Here the install also gets a path line to `.typing`, where the clone
is linked under its import name.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import io
import os
import shutil
import stat
import subprocess
import sys
import tarfile
import time
import zipfile
from pathlib import Path
from typing import Any

from environment import ROOT, link_package
from setuptools import build_meta  # type: ignore[import-untyped]

PATH_FILE = "mirrorsd_types.pth"
COMMIT_FILE = "commit.txt"
"""What `mirrorsd --version` reads where there is no clone."""

get_requires_for_build_editable = build_meta.get_requires_for_build_editable
get_requires_for_build_sdist = build_meta.get_requires_for_build_sdist
get_requires_for_build_wheel = build_meta.get_requires_for_build_wheel
prepare_metadata_for_build_editable = build_meta.prepare_metadata_for_build_editable
prepare_metadata_for_build_wheel = build_meta.prepare_metadata_for_build_wheel


def build_wheel(
    wheel_directory: str, config_settings: dict[str, Any] | None = None, metadata_directory: str | None = None
) -> str:
    """Build a wheel that says which commit it is of, without what setuptools has kept of earlier trees."""
    shutil.rmtree(ROOT / "build", ignore_errors=True)
    name = str(build_meta.build_wheel(wheel_directory, config_settings, metadata_directory))
    if content := commit_here():
        add_file(Path(wheel_directory, name), f"mirrorsd/{COMMIT_FILE}", content)
    return name


def build_sdist(sdist_directory: str, config_settings: dict[str, Any] | None = None) -> str:
    """Build a source distribution that says which commit it is of, so that wheels made of it do, too."""
    name = str(build_meta.build_sdist(sdist_directory, config_settings))
    content = commit_here()
    if content:
        path = Path(sdist_directory, name)
        whole = path.with_suffix(".whole")
        with (
            tarfile.open(path) as old,
            whole.open("wb") as stream,
            gzip.GzipFile("", "wb", fileobj=stream, mtime=built_at()) as packed,
            tarfile.open(fileobj=packed, mode="w") as new,
        ):
            for member in old:
                member.mtime = built_at()
                new.addfile(member, old.extractfile(member) if member.isfile() else None)
            added = tarfile.TarInfo(f"{name.removesuffix('.tar.gz')}/{COMMIT_FILE}")
            added.size, added.mtime = len(content), built_at()
            new.addfile(added, io.BytesIO(content))
        whole.replace(path)
    return name


def built_at() -> int:
    """Seconds of the epoch that files are said to be of: SOURCE_DATE_EPOCH, the commit's, or now."""
    if given := os.environ.get("SOURCE_DATE_EPOCH"):
        return int(given)
    command = ["git", "-C", str(ROOT), "log", "-1", "--format=%ct"]
    try:
        return int(subprocess.check_output(command, stderr=subprocess.DEVNULL))
    except (OSError, ValueError, subprocess.SubprocessError):
        return int(time.time())


def commit_here() -> bytes:
    """The commit of this clone, or of the source distribution that this is; empty where nobody knows."""
    noted = ROOT / COMMIT_FILE
    if noted.is_file():
        return noted.read_bytes()
    if not (ROOT / ".git").exists():
        return b""
    command = ["git", "-C", str(ROOT), "describe", "--always", "--abbrev=12", "--dirty=+", "--exclude=*"]
    try:
        return subprocess.check_output(command, stderr=subprocess.DEVNULL)
    except (OSError, subprocess.SubprocessError):
        return b""


def build_editable(
    wheel_directory: str, config_settings: dict[str, Any] | None = None, metadata_directory: str | None = None
) -> str:
    """Build an editable wheel, with a path line to the folder in which the clone has its import name."""
    name = str(build_meta.build_editable(wheel_directory, config_settings, metadata_directory))
    try:
        link_package(ROOT)
    except (OSError, subprocess.SubprocessError) as error:
        print(f"type checkers will not see this install: no link in {ROOT / '.typing'} ({error})", file=sys.stderr)
        return name
    add_file(Path(wheel_directory, name), PATH_FILE, f"{ROOT / '.typing'}\n".encode())
    return name


def add_file(wheel: Path, name: str, content: bytes) -> None:
    """Add a file to a wheel and to its list of files; all are of one time, and everybody may read them."""
    with zipfile.ZipFile(wheel) as archive:
        parts = {info.filename: archive.read(info) for info in archive.infolist()}
    digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
    (record,) = (part for part in parts if part.endswith(".dist-info/RECORD"))
    parts[name] = content
    parts[record] = f"{name},sha256={digest},{len(content)}\n".encode() + parts[record]
    date: Any = max(time.gmtime(built_at())[:6], zipfile.ZipInfo().date_time)  # no member is older than its default
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
        for part, stored in parts.items():
            info = zipfile.ZipInfo(part, date)
            info.external_attr, info.compress_type = (stat.S_IFREG | 0o644) << 16, zipfile.ZIP_DEFLATED
            archive.writestr(info, stored)
