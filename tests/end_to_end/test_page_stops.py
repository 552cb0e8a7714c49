"""An answer is stopped: before its question is asked, and in mid-stream; what was said stays."""

from typing import Any

import pytest

from mirrorsd.tests.end_to_end.test_page import (
    CHROMIUM,
    browser,  # noqa: F401 - fixtures
    open_page,  # noqa: F401
    playwright,  # noqa: F401
    url,  # noqa: F401
)

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no chromium on this machine: apt install chromium")


def test_stop_keeps_what_was_said_and_the_next_answer_is_whole(open_page: Any) -> None:  # noqa: F811
    reader = open_page()
    reader.page.route("**/v1/chat/completions", lambda route: None)  # never answered
    reader.page.fill("#question", "fox")
    reader.page.keyboard.press("Enter")
    reader.page.wait_for_selector("#stop:visible")
    reader.page.keyboard.press("Escape")
    reader.wait()
    assert reader.page.locator(".note").inner_text() == "Stopped."
    reader.page.unroute("**/v1/chat/completions")
    reader.settings(max_tokens=8)
    reader.page.click("text=Retry")
    assert reader.wait()
    assert reader.page.locator(".note").count() == 0


HALTED = """() => {
  const ask = window.fetch;
  window.fetch = async (url, options) => {
    const response = await ask(url, options);
    if (!String(url).includes("chat/completions")) return response;
    let size = 0;
    const transform = async (chunk, out) => {
      out.enqueue(chunk);
      size += chunk.length;
      const isStopped = (_, fail) => options.signal.addEventListener("abort", () => fail(options.signal.reason));
      if (size > 3000) await new Promise(isStopped);
    };
    return new Response(response.body.pipeThrough(new TransformStream({ transform })), response);
  };
}"""
"""The page gets the beginning of an answer, and no more until it is stopped."""


def test_stopping_in_mid_stream_keeps_the_text(open_page: Any) -> None:  # noqa: F811
    reader = open_page()
    reader.settings(max_tokens=480, method="plain")
    reader.page.evaluate(HALTED)
    reader.page.fill("#question", "Tell me of the fox.")
    reader.page.keyboard.press("Enter")
    reader.page.wait_for_function("() => document.querySelector('.coming .text')?.textContent.length > 5")
    reader.page.click("#stop")
    reader.page.wait_for_selector(".note")
    assert len(reader.wait()) > 5
    reader.forgive("ERR_INCOMPLETE_CHUNKED_ENCODING")
