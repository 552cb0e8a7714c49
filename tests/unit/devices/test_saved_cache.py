"""Files of caches: written whole, checked whole, and taken only where they were made."""

import hashlib
import json
from pathlib import Path
from unittest import mock

import numpy as np
import onnxruntime
import pytest

from mirrorsd.devices import saved_cache
from mirrorsd.devices.saved_cache import SavedCache, origin_of, read_cache, write_cache
from mirrorsd.graphs.errors import BundleError
from mirrorsd.graphs.manifest import Manifest

ORIGIN = {"bundle": "a" * 64, "target": "fake"}
LIKE = SavedCache(
    [], [np.zeros((1, 2, 0, 4), np.float32), np.zeros((1, 2, 0, 4), np.float16)], [np.zeros((1, 3, 5), np.float32)]
)


def saved() -> SavedCache:
    random = np.random.default_rng(1)
    rows = [random.normal(size=(1, 2, 3, 4)).astype(one.dtype) for one in LIKE.rows]
    return SavedCache([3, 1, 4], rows, [random.normal(size=(1, 3, 5)).astype(np.float32)])


def with_header(path: Path, header: bytes, rows: bytes = b"") -> Path:
    """A file whose checksum fits, whatever it holds."""
    body = len(header).to_bytes(8, "little") + header + rows
    path.write_bytes(b"mirrorsd-cache-1\n" + hashlib.sha256(body).digest() + body)
    return path


def test_what_was_written_is_read_bit_by_bit(tmp_path: Path) -> None:
    write_cache(tmp_path / "a", saved(), ORIGIN)
    write_cache(tmp_path / "a", saved(), ORIGIN)
    found = read_cache(tmp_path / "a", ORIGIN, LIKE)
    assert found.token_ids == [3, 1, 4]
    for one, other in zip((*found.rows, *found.states), (*saved().rows, *saved().states), strict=True):
        assert (one.dtype, one.tobytes()) == (other.dtype, other.tobytes())
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_every_changed_byte_is_found(tmp_path: Path) -> None:
    write_cache(tmp_path / "a", saved(), ORIGIN)
    content = (tmp_path / "a").read_bytes()
    for place in range(0, len(content), 7):
        changed = bytearray(content)
        changed[place] ^= 16
        (tmp_path / "b").write_bytes(changed)
        with pytest.raises(BundleError, match=r"is damaged|is no saved cache"):
            read_cache(tmp_path / "b", ORIGIN, LIKE)
    for size in (0, 5, 17, 40, len(content) - 1):
        (tmp_path / "b").write_bytes(content[:size])
        with pytest.raises(BundleError, match=r"is damaged|is no saved cache"):
            read_cache(tmp_path / "b", ORIGIN, LIKE)


def test_a_body_without_a_length_is_a_damaged_file(tmp_path: Path) -> None:
    for body in (b"", b"abc"):
        (tmp_path / "a").write_bytes(b"mirrorsd-cache-1\n" + hashlib.sha256(body).digest() + body)
        with pytest.raises(BundleError, match="has a header that no saved cache has"):
            read_cache(tmp_path / "a", ORIGIN, LIKE)


def test_a_cache_of_another_processor_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its kernels may be others, so that a text might go on otherwise than one that is read anew."""
    manifest = mock.create_autospec(Manifest, instance=True)
    manifest.to_json.return_value = "{}"
    origins = []
    for name in ("with VNNI", "without"):
        monkeypatch.setattr(saved_cache, "processor_name", lambda name=name: name)
        origins.append(origin_of(manifest, "cpu"))
    write_cache(tmp_path / "a", saved(), origins[0])
    with pytest.raises(BundleError, match=r"another processor \(with VNNI; here it is without\)"):
        read_cache(tmp_path / "a", origins[1], LIKE)


def test_a_cache_of_another_onnx_runtime_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever package it was installed as: the program itself is asked."""
    manifest = mock.create_autospec(Manifest, instance=True)
    manifest.to_json.return_value = "{}"
    write_cache(tmp_path / "a", saved(), origin_of(manifest, "cpu"))
    monkeypatch.setattr(onnxruntime, "__version__", "1.23.0")
    with pytest.raises(BundleError, match=r"another ONNX Runtime \(.*; here it is 1\.23\.0\)"):
        read_cache(tmp_path / "a", origin_of(manifest, "cpu"), LIKE)


def test_what_is_no_file_is_not_read(tmp_path: Path) -> None:
    """A device may have no end."""
    with pytest.raises(BundleError, match="cannot be read"):
        read_cache(tmp_path / "a\0b", ORIGIN, LIKE)
    for path in (tmp_path, Path("/dev/full")):
        if path.exists():
            with pytest.raises(BundleError, match="it is no file"):
                read_cache(path, ORIGIN, LIKE)


@pytest.mark.parametrize("other", [{"bundle": "b" * 64}, {"target": "other"}, {"openvino": "1"}])
def test_a_cache_of_another_origin_is_refused(tmp_path: Path, other: dict[str, str]) -> None:
    write_cache(tmp_path / "a", saved(), ORIGIN)
    with pytest.raises(BundleError, match=f"was made with another {next(iter(other))} "):
        read_cache(tmp_path / "a", ORIGIN | other, LIKE)


@pytest.mark.parametrize(
    "header",
    [b"{", b"[]", b"{}", b'{"token_ids": 5, "origin": {}}', b'{"token_ids": ["a"], "origin": {}}', b"[" * 100_000],
)
def test_a_header_of_another_kind_is_refused(tmp_path: Path, header: bytes) -> None:
    with pytest.raises(BundleError, match="has a header that no saved cache has"):
        read_cache(with_header(tmp_path / "a", header), ORIGIN, LIKE)


def test_rows_that_do_not_belong_to_the_tokens_are_refused(tmp_path: Path) -> None:
    header = json.dumps({"token_ids": [1, 2], "origin": ORIGIN}).encode()
    with pytest.raises(BundleError, match="holds 7 bytes of rows, expected 156"):
        read_cache(with_header(tmp_path / "a", header, b"1234567"), ORIGIN, LIKE)


def test_a_write_that_fails_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_cache(tmp_path / "a", saved(), ORIGIN)
    before = (tmp_path / "a").read_bytes()

    def fail(*_: object) -> None:
        raise OSError("no room")

    monkeypatch.setattr(Path, "replace", fail)
    with pytest.raises(OSError, match="no room"):
        write_cache(tmp_path / "a", SavedCache([1], [rows[:, :, :1] for rows in saved().rows]), ORIGIN)
    assert (tmp_path / "a").read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["a"]
