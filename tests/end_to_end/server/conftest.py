"""A server on the tiny bundle that the tests share, and the official client for it."""

import sys
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from mirrorsd.runtime.session import MirrorSession
from mirrorsd.server import Running
from mirrorsd.server.bundles.reading import BrokenOff
from mirrorsd.tests.end_to_end.server.serving_here import LIMITS, chat, served, status_of


@pytest.fixture(scope="session", autouse=True)
def readings_end_anywhere() -> Iterator[None]:
    """Reading that takes too long is broken off between two instructions, now and then in a destructor.

    Python says so and goes on, and the reading is broken off once more.
    """
    told = sys.unraisablehook
    sys.unraisablehook = lambda found: None if found.exc_type is BrokenOff else told(found)
    yield
    sys.unraisablehook = told


@pytest.fixture(scope="session")
def serving(tiny_bundle: Path) -> Iterator[Running]:
    with served({"tiny": tiny_bundle}, limits=LIMITS, queue=64) as running:
        yield running


@pytest.fixture
def client(serving: Running) -> Iterator[Any]:
    """The official client, which checks every answer against its types."""
    openai = pytest.importorskip("openai")
    with openai.OpenAI(
        base_url=f"{serving.url}/v1", api_key="none", max_retries=0, _strict_response_validation=True
    ) as found:
        yield found


HELD_BEHIND = 8
"""Chunks: a client has read some of the text by then, and most of it is still to come."""


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Texts stop behind their first chunks until the event is set, or they are cancelled: none is over too soon."""
    goes_on, stream = threading.Event(), MirrorSession._stream

    def stopping(self: MirrorSession, request: Any) -> Iterator[Any]:
        with closing(stream(self, request)) as chunks:
            for number, chunk in enumerate(chunks):
                while number == HELD_BEHIND and not request.is_cancelled() and not goes_on.wait(0.002):
                    pass
                yield chunk

    monkeypatch.setattr(MirrorSession, "_stream", stopping)
    yield goes_on
    goes_on.set()


@pytest.fixture
def as_well_as_before(serving: Running) -> Iterator[None]:
    """After whatever a test has done to the server, a request is answered as ever."""
    yield
    assert status_of(chat(serving)) == 200
    assert serving.service.shelf.loaded["tiny"].num_running == 0
