"""What happens on an archive's way here."""

import hashlib
import importlib
import io
import os
from pathlib import Path
from typing import Any

import pytest
from hub_server import Faults
from huggingface_hub.errors import HTTPError

from mirrorsd.graphs.errors import BundleError
from mirrorsd.hub import asking, bundle_folder
from mirrorsd.hub.archives import write_archive
from mirrorsd.hub.bundles import forget

httpx: Any = importlib.import_module(HTTPError.__module__.partition(".")[0])
"""The one that this version of `huggingface_hub` has."""


def zipped(folder: Path) -> bytes:
    files = {path.relative_to(folder).as_posix(): path for path in sorted(folder.rglob("*")) if path.is_file()}
    stream = io.BytesIO()
    write_archive(stream, {f"tiny.mirror/{name}": path for name, path in files.items()})
    return stream.getvalue()


def test_an_encrypted_address_that_leads_to_an_open_one_is_refused_without_a_hash(
    bundle: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = zipped(bundle)

    def answer(request: Any) -> Any:
        if request.url.scheme == "https":
            return httpx.Response(302, headers={"Location": "http://open.example/a.zip"})
        return httpx.Response(200, stream=httpx.ByteStream(content))

    follows = asking.web().get_session().follow_redirects
    client = httpx.Client(transport=httpx.MockTransport(answer), follow_redirects=follows)
    monkeypatch.setattr(asking.web(), "get_session", lambda: client)
    with pytest.raises(BundleError, match=r"cannot be trusted: it leads to http://open\.example/a\.zip.*Add the arch"):
        bundle_folder("https://example.com/a.zip")
    folder = bundle_folder(f"https://example.com/a.zip#sha256={hashlib.sha256(content).hexdigest()}")
    assert zipped(folder) == content


@pytest.mark.parametrize("more", [b"", b"more"])
def test_an_archive_that_was_left_whole_is_fetched_again(
    asked: list[str], tmp_path: Path, bundle: Path, faults: Faults, *, more: bytes
) -> None:
    """By a program that ended before it was unpacked; the server does not say how long it is."""
    content, faults.has_heads = zipped(bundle), False
    (tmp_path / "hub" / "a.zip").write_bytes(content)
    reference = f"{os.environ['HF_ENDPOINT']}/a.zip#sha256={hashlib.sha256(content).hexdigest()}"
    folder = bundle_folder(reference)
    forget(folder)
    folder.parent.mkdir()
    (folder.parent / "archive").write_bytes(content + more)
    assert zipped(bundle_folder(reference)) == content
