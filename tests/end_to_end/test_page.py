"""The page in a real browser, with a real server behind it; a scripted answer only where a model would not give it."""

import itertools
import json
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from mirrorsd import MirrorPipeline

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no chromium on this machine: apt install chromium")
playwright = pytest.importorskip("playwright.sync_api", reason="playwright drives the browser")
pytest.importorskip("starlette", reason="the server needs starlette")

AXE = Path(__file__).parent / "axe" / "axe.min.js"
FLAGS = (
    *("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking"),
    *("--disable-component-update", "--disable-sync"),
)
KEY = "a-key-for-the-tests-only"
WIDTHS = {"wide": (1360, 860), "middle": (900, 800), "phone": (390, 800)}
HOSTILE = """# Title <img src=x onerror=alert(1)>

<script>window.gotcha = 1</script><iframe src="https://example.com"></iframe><style>body{display:none}</style>

[click](javascript:window.gotcha=2) [data](data:text/html,x) ![pixel](https://example.com/pixel.png) [fine](https://example.com)

<a href="jav&#x09;ascript:alert(1)" style="position:fixed" onclick="window.gotcha=3">x</a>
<form action="/x"><input name="key"></form>

```html
<script>window.gotcha = 4</script>
```

- [x] done

"""
HUGE = "| " + " | ".join(f"column {n}" for n in range(80)) + " |\n|" + "---|" * 80 + "\n" + ("| x " * 80 + "|\n") * 200


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    playwright.expect.set_options(timeout=20_000)
    with playwright.sync_playwright() as tool:
        found = tool.chromium.launch(executable_path=CHROMIUM, headless=True, args=list(FLAGS))
        yield found
        found.close()


@contextmanager
def served(bundle: Path, *keys: str) -> Iterator[str]:
    """The address of a server, which wants one of these keys."""
    from mirrorsd.server import ServerSettings
    from mirrorsd.server.running import Running

    with Running({"tiny": bundle}, ServerSettings(port=0, device_map="cpu", keys=keys)) as running:
        yield running.url


@pytest.fixture(scope="module")
def url(tiny_bundle: Path) -> Iterator[str]:
    with served(tiny_bundle) as found:
        yield found


class Reader:
    """Somebody at the page: does what readers do, and notes what the browser complains of."""

    def __init__(self, page: Any, url: str) -> None:
        self.page, self.url = page, url
        self.complaints: list[str] = []
        self.bodies: list[dict[str, Any]] = []
        page.on("console", lambda m: self.complaints.append(m.text) if m.type in ("error", "warning") else None)
        page.on("pageerror", lambda error: self.complaints.append(str(error)))
        page.on("request", self._note)
        page.goto(url)
        page.wait_for_selector("#model option", state="attached")

    def _note(self, request: Any) -> None:
        if request.url.endswith("/v1/chat/completions"):
            self.bodies.append(json.loads(request.post_data))
        assert request.url.startswith(self.url.split("#")[0].rstrip("/")), request.url

    def ask(self, text: str) -> str:
        self.page.fill("#question", text)
        self.page.keyboard.press("Enter")
        return self.wait()

    def wait(self) -> str:
        self.page.wait_for_selector("body:not(.is-answering) #send:visible", timeout=60_000)
        return str(self.page.locator(".answer .text").last.inner_text())

    def settings(self, **values: object) -> None:
        self.page.click("#open-settings")
        for name, value in values.items():
            field = self.page.locator(f"#settings [name={name}]")
            field.select_option(str(value)) if name == "method" else field.fill(str(value))
        self.page.click("#settings button[type=submit]")

    def forgive(self, status: str) -> None:
        """The browser itself notes every refused request: those are no complaints."""
        assert all(status in text for text in self.complaints), self.complaints
        self.complaints.clear()

    def script(self, text: str, tokens: list[list[str]] | None = None, **finish: Any) -> None:
        """Let the next answers be this text."""
        chunk = {"choices": [{"index": 0, "delta": {"content": text}}], "mirror_tokens": tokens or [[text, "plain"]]}
        timings = {"predicted_n": 3, "predicted_per_second": 10.0, "draft_n": 4, "draft_n_accepted": 3}
        mirror = {
            "seed": 5,
            "method": "mirror",
            "stop_reason": "eos",
            "steps": 1,
            "tokens_per_step": 3.0,
            "overlap": 1.0,
        }
        last = {"choices": [{"index": 0, "delta": {}}], "mirror": {**mirror, **finish}, "timings": timings}
        frames = "".join(f"data: {json.dumps(frame)}\n\n" for frame in (chunk, last)) + "data: [DONE]\n\n"
        self.page.route(
            "**/v1/chat/completions",
            lambda route: route.fulfill(status=200, content_type="text/event-stream", body=frames),
        )


@pytest.fixture
def open_page(browser: Any, url: str) -> Iterator[Callable[..., Reader]]:
    """Opens the page for somebody who has never been there; at the end, the browser has nothing to complain of."""
    readers = []

    def open_it(width: str = "wide", at: str = "", **options: Any) -> Reader:
        size = dict(zip(("width", "height"), WIDTHS[width], strict=True))
        context = browser.new_context(viewport=size, **options)
        context.set_default_timeout(20_000)
        readers.append(Reader(context.new_page(), at or url))
        return readers[-1]

    yield open_it
    for reader in readers:
        assert reader.complaints == []
        reader.page.context.close()


def test_an_answer_streams_and_is_what_the_library_says(open_page: Any, tiny_bundle: Path) -> None:
    reader = open_page()
    reader.settings(max_tokens=40, method="mirror")
    reader.ask("Tell me of the fox.")
    kept = kept_in(reader)[0]["messages"][1]
    with MirrorPipeline.load(tiny_bundle, device_map="cpu") as pipe:
        messages = [{"role": "user", "content": "Tell me of the fox."}]
        expected = pipe.generate(messages=messages, method="plain", max_new_tokens=40)
    assert kept["content"] == expected.text
    assert sum(run[0] for run in kept["runs"]) == len(expected.text)
    assert re.search(r"\d+ tokens · .* tokens/s · .*greedy", reader.page.locator(".figures").inner_text())
    assert float(reader.page.locator("#speed").inner_text()) > 0
    label = reader.page.locator("#timeline").get_attribute("aria-label")
    assert re.match(r"\d+ steps of the large model, \d+ tokens", label)
    assert reader.page.evaluate(PAINTED) > 100


KEPT = """() => new Promise((resolve) => {
  const asked = indexedDB.open("mirrorsd");
  asked.onsuccess = () => {
    const table = asked.result.transaction("conversations").objectStore("conversations");
    const all = table.getAll();
    all.onsuccess = () => resolve(all.result);
  };
})"""


def kept_in(reader: Reader) -> list[dict[str, Any]]:
    """The conversations of the browser's database, as they are kept."""
    return list(reader.page.evaluate(KEPT))


PAINTED = """() => {
  const canvas = document.getElementById("timeline");
  const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
  const colours = new Set();
  for (let place = 0; place < data.length; place += 4) colours.add(data.slice(place, place + 3).join());
  return colours.has("47,111,159") ? data.length : 0;
}"""


def test_settings_are_sent_and_the_seed_is_shown(open_page: Any) -> None:
    reader = open_page()
    reader.settings(system="Be brief.", temperature=0.9, top_p=0.8, top_k=20, max_tokens=12)
    reader.ask("fox")
    body = reader.bodies[-1]
    assert body["messages"][0] == {"role": "system", "content": "Be brief."}
    assert (body["temperature"], body["top_p"], body["top_k"], body["max_tokens"]) == (0.9, 0.8, 20, 12)
    assert "seed" not in body
    seed = int(re.search(r"seed (\d+)", reader.page.locator(".figures").inner_text())[1])
    reader.settings(seed=seed)
    first = reader.page.locator(".answer .text").inner_text()
    reader.page.click("text=Retry")
    assert reader.wait() == first
    assert reader.bodies[-1]["seed"] == seed


def test_comparing_marks_identical_texts(open_page: Any) -> None:
    reader = open_page()
    reader.settings(temperature=0.9, max_tokens=40, method="mirror")
    reader.ask("Once upon a time")
    reader.page.click("text=Compare with plain")
    reader.page.wait_for_selector(".comparison.same")
    assert (reader.bodies[-1]["method"], reader.bodies[-2]["method"]) == ("plain", "mirror")
    assert reader.bodies[-1]["messages"] == reader.bodies[-2]["messages"]
    assert isinstance(reader.bodies[-1]["seed"], int)
    assert "✓ Identical: all" in reader.page.locator(".verdict").inner_text()
    if "times as fast as plain" in reader.page.locator(".verdict").inner_text():
        assert re.fullmatch(r"\d+\.\d\d×", reader.page.locator("#against-plain").inner_text())
        assert "× plain" in reader.page.locator(".figures").inner_text()


def test_comparing_marks_a_difference(open_page: Any) -> None:
    reader = open_page()
    reader.script("The fox ran.")
    reader.ask("fox")
    reader.page.unroute("**/v1/chat/completions")
    reader.script("The fox sat.")
    reader.page.click("text=Compare with plain")
    reader.page.wait_for_selector(".comparison.other")
    assert "differ from character 8" in reader.page.locator(".verdict").inner_text()


def test_editing_a_question_asks_again_from_there(open_page: Any) -> None:
    reader = open_page()
    reader.settings(max_tokens=8)
    reader.ask("fox")
    reader.ask("heron")
    reader.page.locator("text=Edit").first.click()
    reader.page.fill(".edit textarea", "river")
    reader.page.keyboard.press("Enter")
    reader.wait()
    assert [message["content"] for message in reader.bodies[-1]["messages"]] == ["river"]
    assert reader.page.locator(".question").count() == 1


def test_conversations_stay_over_a_reload_and_can_be_deleted(open_page: Any) -> None:
    reader = open_page()
    reader.settings(max_tokens=8)
    first = reader.ask("the first fox")
    reader.page.click("#new")
    reader.ask("the second fox")
    reader.page.reload()
    reader.page.wait_for_selector("#model option", state="attached")
    titles = reader.page.locator("#conversations li button:first-child").all_inner_texts()
    assert titles == ["the second fox", "the first fox"]
    reader.page.click("text=the first fox")
    assert reader.page.locator(".answer .text").inner_text() == first
    reader.page.on("dialog", lambda dialog: dialog.accept())
    reader.page.click("[aria-label='Delete the first fox']")
    reader.page.wait_for_function("() => document.querySelectorAll('#conversations li').length === 1")


def test_a_full_context_leaves_the_oldest_turns_out_and_says_so(open_page: Any) -> None:
    reader = open_page()
    reader.settings(max_tokens=60)
    for _ in range(3):
        reader.ask("fox and heron " * 24)
    assert "left out: the context holds 512 tokens" in reader.page.locator(".note").last.inner_text()
    assert len(reader.bodies[-1]["messages"]) < 5
    reader.forgive("400")


def test_a_hostile_answer_does_nothing(open_page: Any) -> None:
    reader = open_page("phone")
    reader.page.on("dialog", lambda dialog: reader.complaints.append(f"a dialog: {dialog.message}"))
    reader.script(HOSTILE + HUGE)
    reader.ask("attack")
    answer = reader.page.locator(".answer .text")
    assert reader.page.evaluate("window.gotcha") is None
    assert answer.locator("script, iframe, style, img, form, svg, object, [onclick], [onerror], [style]").count() == 0
    links = answer.locator("a").evaluate_all("found => found.map((link) => [link.getAttribute('href'), link.rel])")
    assert [link for link in links if link[0]] == [["https://example.com", "noopener noreferrer nofollow"]]
    assert "<script>window.gotcha = 1</script>" in answer.inner_text()
    assert answer.locator("td").count() == 80 * 200
    assert reader.page.evaluate("document.documentElement.scrollWidth") <= WIDTHS["phone"][0]


def test_words_are_coloured_by_their_source(open_page: Any) -> None:
    reader = open_page()
    tokens = [["**The", "window"], [" fox** ", "window"], ["ran", "correction"], [" on", "lookup"], [".", "plain"]]
    reader.script("**The fox** ran on.", tokens)
    reader.ask("fox")
    coloured = "name => [...CSS.highlights.get(`source-${name}`)].map(String).join('|')"
    found = {name: reader.page.evaluate(coloured, name) for name in ("window", "correction", "lookup", "plain")}
    assert found == {"window": "The fox", "correction": "ran", "lookup": "on", "plain": "."}
    assert reader.page.locator("#legend dt").all_inner_texts() == ["drafted", "looked up", "corrected", "plain"]
    reader.page.uncheck("#colours")
    assert reader.page.evaluate(coloured, "window") == ""


def test_an_error_of_the_server_is_shown_and_can_be_retried(open_page: Any) -> None:
    reader = open_page()
    refusal = {
        "error": {"message": "The queue is full: try again.", "type": "rate_limit", "param": None, "code": "busy"}
    }
    reader.page.route("**/v1/chat/completions", lambda route: route.fulfill(status=429, json=refusal))
    reader.ask("fox")
    assert reader.page.locator("[role=alert]").inner_text() == "The queue is full: try again."
    reader.forgive("429")
    reader.page.unroute("**/v1/chat/completions")
    reader.settings(max_tokens=8)
    reader.page.click("text=Retry")
    assert reader.wait()
    assert reader.page.locator("[role=alert]").count() == 0


def test_a_key_comes_in_the_fragment_or_is_asked_for(open_page: Any, tiny_bundle: Path) -> None:
    from mirrorsd.server import ServerSettings
    from mirrorsd.server.running import Running

    with Running({"tiny": tiny_bundle}, ServerSettings(port=0, device_map="cpu", keys=(KEY,))) as running:
        reader = open_page(at=f"{running.url}/#key={KEY}")
        assert reader.page.url == f"{running.url}/"
        reader.settings(max_tokens=4)
        reader.ask("fox")
        reader.page.evaluate("sessionStorage.clear()")
        reader.page.reload()
        reader.page.fill("#key-dialog input", KEY)
        reader.page.keyboard.press("Enter")
        reader.page.wait_for_selector("#model option", state="attached")
        reader.forgive("401")


def test_the_theme_follows_the_system_until_one_is_chosen(open_page: Any) -> None:
    reader = open_page(color_scheme="dark")
    colour = "getComputedStyle(document.body).backgroundColor"
    dark = reader.page.evaluate(colour)
    reader.page.click("#theme")
    light = reader.page.evaluate(colour)
    assert (dark, light) == ("rgb(20, 23, 22)", "rgb(247, 247, 245)")
    reader.page.reload()
    assert reader.page.evaluate(colour) == light


def test_drawers_open_and_close_by_keyboard_on_a_phone(open_page: Any) -> None:
    reader = open_page("phone")
    for opener, drawer in (("#open-list", "#list"), ("#open-panel", "#panel")):
        reader.page.focus(opener)
        reader.page.keyboard.press("Enter")
        playwright.expect(reader.page.locator(drawer)).to_be_in_viewport()
        assert reader.page.get_attribute(opener, "aria-expanded") == "true"
        reader.page.keyboard.press("Escape")
        playwright.expect(reader.page.locator(drawer)).not_to_be_visible()
        assert reader.page.evaluate("document.activeElement.id") == opener[1:]


ALWAYS = (("wide", "dark"), ("middle", "light"), ("phone", "dark"))
"""With the three of `test_page_reads.py` every width is seen in both themes; the others are `long`."""


@pytest.mark.parametrize(
    ("width", "theme"),
    [
        pytest.param(*one, marks=() if one in ALWAYS else pytest.mark.long)
        for one in itertools.product(WIDTHS, ("light", "dark"))
    ],
)
def test_axe_finds_nothing(open_page: Any, width: str, theme: str) -> None:
    reader = open_page(width, color_scheme=theme)
    reader.script(
        "# A title\n\nSome `code`, a [link](https://example.com)\n\n```python\nprint(1)\n```\n\n- [x] done\n\n"
        + HUGE[:3000]
    )
    reader.ask("fox")
    reader.page.click("text=Compare with plain")
    reader.page.wait_for_selector(".comparison.same")
    assert violations(reader) == []
    if width != "wide":
        reader.page.click("#open-panel")
        reader.page.wait_for_timeout(300)
        assert violations(reader) == []
        reader.page.keyboard.press("Escape")
    reader.page.click("#open-settings")
    assert violations(reader) == []


def violations(reader: Reader) -> list[str]:
    reader.page.evaluate(AXE.read_text(encoding="utf-8"))
    found = reader.page.evaluate(
        "axe.run(document, {runOnly: ['wcag2a', 'wcag2aa', 'wcag21aa', 'wcag22aa', 'best-practice']})"
    )
    return [f"{one['id']}: {[node['html'][:120] for node in one['nodes']]}" for one in found["violations"]]
