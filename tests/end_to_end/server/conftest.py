"""A server on the tiny bundle that the tests share, and the official client for it."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mirrorsd.server import Running
from mirrorsd.tests.end_to_end.server.serving_here import LIMITS, chat, served, status_of


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


@pytest.fixture
def as_well_as_before(serving: Running) -> Iterator[None]:
    """After whatever a test has done to the server, a request is answered as ever."""
    yield
    assert status_of(chat(serving)) == 200
    assert serving.service.shelf.loaded["tiny"].num_running == 0
