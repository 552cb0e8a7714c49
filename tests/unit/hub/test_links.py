"""What happens on an archive's way here."""

import hashlib
import importlib
import io
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub.errors import HTTPError

from mirrorsd.graphs.errors import BundleError
from mirrorsd.hub import asking, bundle_folder
from mirrorsd.hub.archives import write_archive

httpx: Any = importlib.import_module(HTTPError.__module__.partition(".")[0])
"""The one that this version of `huggingface_hub` has."""


def test_an_encrypted_address_that_leads_to_an_open_one_is_refused_without_a_hash(
    bundle: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = {path.relative_to(bundle).as_posix(): path for path in bundle.rglob("*") if path.is_file()}
    stream = io.BytesIO()
    write_archive(stream, {f"tiny.mirror/{name}": path for name, path in files.items()})

    def answer(request: Any) -> Any:
        if request.url.scheme == "https":
            return httpx.Response(302, headers={"Location": "http://open.example/a.zip"})
        return httpx.Response(200, stream=httpx.ByteStream(stream.getvalue()))

    follows = asking.web().get_session().follow_redirects
    client = httpx.Client(transport=httpx.MockTransport(answer), follow_redirects=follows)
    monkeypatch.setattr(asking.web(), "get_session", lambda: client)
    with pytest.raises(BundleError, match=r"cannot be trusted: it leads to http://open\.example/a\.zip.*Add the arch"):
        bundle_folder("https://example.com/a.zip")
    digest = hashlib.sha256(stream.getvalue()).hexdigest()
    folder = bundle_folder(f"https://example.com/a.zip#sha256={digest}")
    assert {name: (folder / name).read_bytes() for name in files} == {name: files[name].read_bytes() for name in files}
