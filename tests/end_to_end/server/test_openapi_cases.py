"""Cases made from the server's own OpenAPI document: no case may be the server's fault."""

import pytest

from mirrorsd.server import Running


@pytest.mark.long
def test_no_case_of_our_own_document_is_a_server_error(serving: Running) -> None:
    pytest.importorskip("schemathesis")
    from mirrorsd.scripts.openapi_cases import run_cases

    report = run_cases(serving.url, 120)
    assert report.num_cases >= 120
    assert report.failures == []
    assert report.statuses[200] > 10
    assert report.statuses[400] > 10
