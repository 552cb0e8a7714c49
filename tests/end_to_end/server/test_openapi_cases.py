"""Cases made from the server's own OpenAPI document: no case may be the server's fault."""

import pytest

from mirrorsd.server import Running

pytest.importorskip("schemathesis")


@pytest.mark.parametrize("count", [20, pytest.param(220, marks=pytest.mark.slow)])
def test_no_case_of_our_own_document_is_a_server_error(serving: Running, count: int) -> None:
    from mirrorsd.scripts.openapi_cases import run_cases

    report = run_cases(serving.url, count)
    assert report.num_cases >= count
    assert report.failures == []
