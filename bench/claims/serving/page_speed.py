"""The page in a browser: its first paint, and what a streamed answer costs its main thread and its database.

    python bench/claims/serving/page_speed.py storyteller.mirror --text docs/how-it-works.md --output page_speed.json

First paint is what the browser itself notes (Paint Timing), from the request to the first text on the screen, with an
empty cache. The answer is `--text`, cut to `--tokens` pieces of four letters, which come at `--pace` a second: in an
empty conversation, and in one of `--turns` questions and answers, whose answers are pieces of the text, too. Costs are
the browser's counters (`Performance.getMetrics`), its long tasks, those of 50 ms and more, and how often and how long
the page writes its database: `write_ms` is the longest time from asking for it until it is done, `handing_ms` the
longest that the main thread spends on handing it over. Exit status 1 where the first paint takes a second or more, or a
task of a streamed answer 50 ms.
"""

import argparse
import shutil
import sys
from pathlib import Path
from statistics import median
from typing import Any

from mirrorsd.bench import runs
from mirrorsd.server import ServerSettings
from mirrorsd.server.running import Running

WIDTHS = {"wide": (1360, 860), "middle": (900, 800), "phone": (390, 800)}
_MOST_MS = 1000.0
_LETTERS = 4
_TURN_LETTERS = 1200
_KEEP = """(turns) => new Promise((resolve, reject) => {
  const asked = indexedDB.open("mirrorsd");
  asked.onerror = () => reject(asked.error);
  asked.onsuccess = () => {
    const messages = [];
    for (const [place, content] of turns.entries()) {
      const runs = [];
      for (let at = 0; at < content.length; at += 10) {
        runs.push([Math.min(10, content.length - at), at % 20 ? "plain" : "window", 2]);
      }
      const figures = { predicted_n: runs.length * 2, tokens_per_second: 100, stop_reason: "eos", seed: 1, draft_n: 0 };
      messages.push({ id: `q${place}`, role: "user", content: `Question ${place}: say more.` });
      messages.push({ id: `a${place}`, role: "assistant", content, runs, figures, model: "page", pending: null });
    }
    const done = asked.result.transaction("conversations", "readwrite");
    done.objectStore("conversations").put({ id: "long", title: "", settings: {}, messages, touched: Date.now() });
    done.oncomplete = resolve;
  };
})"""
_STREAM = """([pieces, pace]) => {
  const ask = window.fetch;
  window.long = [];
  window.writes = [];
  new PerformanceObserver((list) => window.long.push(...list.getEntries().map((one) => one.duration)))
    .observe({ entryTypes: ["longtask"] });
  const put = IDBObjectStore.prototype.put;
  IDBObjectStore.prototype.put = function (...given) {
    const started = performance.now();
    const asked = put.apply(this, given);
    const write = { handing_ms: performance.now() - started, ms: 0 };
    window.writes.push(write);
    this.transaction.addEventListener("complete", () => (write.ms = performance.now() - started));
    return asked;
  };
  window.fetch = (url, options) => {
    if (!String(url).includes("chat/completions")) return ask(url, options);
    const started = performance.now();
    let sent = 0;
    const body = new ReadableStream({
      async pull(out) {
        const due = Math.min(pieces.length, Math.ceil(((performance.now() - started) / 1000) * pace));
        if (due <= sent) await new Promise((resolve) => setTimeout(resolve, 1000 / pace));
        for (; sent < due; sent++) {
          const [text, at] = [pieces[sent], sent * 10];
          const spans = [["target", "verify", at, at + 8], ["draft", "draft", at, at + 6]];
          const tokens = [[text, sent % 2 ? "plain" : "window"]];
          const chunk = { choices: [{ delta: { content: text } }], mirror_tokens: tokens, mirror_timeline: spans };
          out.enqueue(new TextEncoder().encode(`data: ${JSON.stringify(chunk)}\\n\\n`));
        }
        if (sent < pieces.length) return;
        out.enqueue(new TextEncoder().encode("data: [DONE]\\n\\n"));
        out.close();
      },
    });
    return Promise.resolve(new Response(body, { headers: { "Content-Type": "text/event-stream" } }));
  };
}"""


def main() -> int:
    """Measure both, print and write the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--text", type=Path, required=True, help="what the answer says, as markdown")
    parser.add_argument("--tokens", type=int, default=4000)
    parser.add_argument("--pace", type=float, default=200.0, help="tokens a second")
    parser.add_argument("--turns", type=int, default=200, help="of the long conversation")
    parser.add_argument("--repeats", type=int, default=5, help="first paints at each width; the median counts")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    from playwright.sync_api import sync_playwright

    program = shutil.which("chromium") or shutil.which("google-chrome")
    with Running({"page": options.bundle}, ServerSettings(port=0)) as running, sync_playwright() as tool:
        browser = tool.chromium.launch(executable_path=program, args=["--no-sandbox", "--disable-gpu"])
        rows = [first_paint(browser, running.url, width, options.repeats) for width in WIDTHS]
        for turns in (0, options.turns):
            given = pieces_of(options.text, options.tokens)
            rows.append(streaming(browser, running.url, given, options.pace, turns_of(options.text, turns)))
        browser.close()
    for row in rows:
        print("  ".join(f"{name} {value}" for name, value in row.items()))
    report = runs.header(options.bundle, text=options.text.name, browser="Chromium, headless")
    runs.finish(report | {"ends": "honoured", "rows": rows}, options.output)
    is_slow = any(row.get("first_paint_ms", 0) >= _MOST_MS or row.get("long_tasks", 0) for row in rows)
    return int(is_slow)


def first_paint(browser: Any, url: str, width: str, repeats: int) -> dict[str, Any]:
    """Milliseconds to the first paint of a text, and to the model's name."""
    paints, ready = [], []
    for _ in range(repeats):
        page = new_page(browser, width)
        page.goto(url)
        page.wait_for_selector("#model option", state="attached")
        ready.append(page.evaluate("performance.now()"))
        found = "() => performance.getEntriesByName('first-contentful-paint')[0]?.startTime"
        page.wait_for_function(found)
        paints.append(page.evaluate(found))
        page.context.close()
    return {"width": width, "first_paint_ms": round(median(paints)), "ready_ms": round(median(ready))}


def streaming(browser: Any, url: str, pieces: list[str], pace: float, turns: list[str]) -> dict[str, Any]:
    """What an answer of these pieces costs the page's main thread, from its question on until it has ended."""
    page = new_page(browser, "wide")
    page.goto(url)
    page.wait_for_selector("#model option", state="attached")
    if turns:
        page.evaluate(_KEEP, turns)
        page.reload()
        page.wait_for_selector("#model option", state="attached")
        page.click("#conversations li:has-text('Question 0') button")
        page.wait_for_selector(f".answer:nth-of-type({2 * len(turns)})", state="attached")
        page.wait_for_timeout(1000)
    page.evaluate(_STREAM, [pieces, pace])
    counters = page.context.new_cdp_session(page)
    counters.send("Performance.enable")
    before = metrics(counters)
    page.fill("#question", "Say it.")
    page.keyboard.press("Enter")
    page.wait_for_selector("#stop:visible")
    page.wait_for_selector("#send:visible", timeout=600_000)
    after = metrics(counters)
    took = {name: after[name] - before[name] for name in after}
    page.wait_for_timeout(500)
    long, writes = page.evaluate("[window.long, window.writes]")
    page.context.close()
    return {
        "turns": len(turns),
        "tokens": len(pieces),
        "pace": pace,
        "seconds": round(took["Timestamp"], 1),
        "busy_s": round(took["TaskDuration"], 2),
        "script_s": round(took["ScriptDuration"], 2),
        "layout_s": round(took["LayoutDuration"] + took["RecalcStyleDuration"], 2),
        "busy_ms_per_token": round(1000 * took["TaskDuration"] / len(pieces), 3),
        "long_tasks": len(long),
        "longest_ms": round(max(long, default=0)),
        "writes": len(writes),
        "write_ms": round(max((write["ms"] for write in writes), default=0.0), 1),
        "handing_ms": round(max((write["handing_ms"] for write in writes), default=0.0), 1),
    }


def metrics(counters: Any) -> dict[str, float]:
    """The browser's counters, seconds."""
    found = {one["name"]: one["value"] for one in counters.send("Performance.getMetrics")["metrics"]}
    names = ("Timestamp", "TaskDuration", "ScriptDuration", "LayoutDuration", "RecalcStyleDuration")
    return {name: found[name] for name in names}


def new_page(browser: Any, width: str) -> Any:
    """A page of somebody who has never been there."""
    size = dict(zip(("width", "height"), WIDTHS[width], strict=True))
    return browser.new_context(viewport=size).new_page()


def turns_of(path: Path, count: int) -> list[str]:
    """Answers of a long conversation: pieces of a text, again from its start where it is too short."""
    words = "".join(pieces_of(path, count * _TURN_LETTERS // _LETTERS))
    return [words[_TURN_LETTERS * place : _TURN_LETTERS * (place + 1)] for place in range(count)]


def pieces_of(path: Path, count: int) -> list[str]:
    """A text in pieces of four letters, again from its start where it is too short.

    Raises:
        SystemExit: the file is empty.
    """
    text = path.read_text(encoding="utf-8")
    if not text.strip():
        raise SystemExit(f"{path} is empty; give a text")
    whole = (text + "\n\n") * (count * _LETTERS // len(text) + 1)
    return [whole[_LETTERS * place : _LETTERS * (place + 1)] for place in range(count)]


if __name__ == "__main__":
    sys.exit(main())
