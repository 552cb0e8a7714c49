"""What a notebook shows of a result: every token's text once, drafted ones marked, and a timeline of bounded size."""

import re
from html import unescape

import pytest

from mirrorsd.runtime.decoding.protocol import GeneratedToken
from mirrorsd.runtime.ledger import Span
from mirrorsd.runtime.reporting.results import GenerationResult

TOKENS = (
    GeneratedToken(1, "window", "Once "),
    GeneratedToken(2, "window", "<upon>"),
    GeneratedToken(3, "correction", " a"),
    GeneratedToken(4, "window", " time"),
)


def result(tokens: tuple[GeneratedToken, ...] = TOKENS, spans: tuple[Span, ...] = ()) -> GenerationResult:
    figures = {"device_map": "cpu", "layout": "apart", "seed": None, "stats": None, "steps": ()}
    return GenerationResult(
        text="".join(token.text for token in tokens),
        prompt_ids=[1],
        token_ids=[token.id for token in tokens],
        stop_reason="eos",
        method="mirror",
        spans=spans,
        tokens=tokens,
        **figures,  # type: ignore[arg-type]
    )


def test_the_text_is_there_once_and_escaped() -> None:
    page = result()._repr_html_()
    assert "Once &lt;upon&gt;" in page
    marked = re.search(r'pre-wrap">(.*?)</p>', page)
    assert marked is not None
    assert unescape(re.sub("<[^>]*>", "", marked[1])) == result().text


def test_drafted_tokens_are_marked_and_counted() -> None:
    page = result()._repr_html_()
    assert "3 of 4 tokens" in page
    assert re.findall(r'<span title="([^"]*)"( style="[^"]*")?>([^<]*)', page) == [
        ("drafted, then found right by the target", ' style="background:rgba(63,154,107,.25)"', "Once &lt;upon&gt;"),
        ("the target&#x27;s own", "", " a"),
        ("drafted, then found right by the target", ' style="background:rgba(63,154,107,.25)"', " time"),
    ]


def test_the_timeline_has_a_lane_per_device_and_a_bounded_size() -> None:
    spans = tuple(
        Span(device, "pass", start / 1000, start / 1000 + 0.0004)
        for start in range(20_000)
        for device in ("target", "draft")
    )
    page = result(spans=spans)._repr_html_()
    assert ">target</text>" in page
    assert ">draft</text>" in page
    assert "20.00 s" in page
    assert len(page) < 200_000


@pytest.mark.parametrize("spans", [(), (Span("target", "prefix", 1.0, 1.0),)])
def test_a_text_of_no_time_is_shown_too(spans: tuple[Span, ...]) -> None:
    assert "Once" in result(spans=spans)._repr_html_()
