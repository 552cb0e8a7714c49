"""The page keeps one's work: over reloads, beside other tabs, while other conversations are read, and as files."""

import json
import random
from pathlib import Path
from typing import Any

import pytest

from mirrorsd import MirrorPipeline
from mirrorsd.tests.end_to_end.test_page import (
    CHROMIUM,
    Reader,
    browser,  # noqa: F401 - fixtures
    kept_in,
    open_page,  # noqa: F401
    playwright,
    url,  # noqa: F401
)

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no chromium on this machine: apt install chromium")
LONG, MAX = "Tell me of the fox.", 300
ONCE_BEGUN = """(act) => new MutationObserver((_, observer) => {
  if (!document.querySelector(".coming")) return;
  observer.disconnect();
  if (act === "reload") location.reload();
  else document.querySelector(act).click();
}).observe(document.getElementById("messages"), { subtree: true, childList: true, characterData: true })"""
"""What is done as soon as an answer begins: these answers are over within half a second."""
BUSY_DISK = """() => new Promise((begun) => {
  const asked = indexedDB.open("mirrorsd");
  asked.onsuccess = () => {
    const table = asked.result.transaction("conversations", "readwrite").objectStore("conversations");
    const until = performance.now() + 500;
    const again = () => { if (performance.now() < until) table.get("none").onsuccess = again; };
    again();
    begun();
  };
})"""
"""The browser takes half a second to keep what comes next."""


@pytest.fixture(scope="module")
def whole(tiny_bundle: Path) -> str:
    """What the model says to the long question."""
    with MirrorPipeline.load(tiny_bundle, device_map="cpu") as pipe:
        asked = [{"role": "user", "content": LONG}]
        return pipe.generate(messages=asked, method="plain", max_new_tokens=MAX, ignore_eos=False).text


def begin(reader: Reader, act: str = "") -> None:
    """Ask the long question, and do something as soon as its answer has begun."""
    reader.settings(max_tokens=MAX, method="plain")
    reader.page.fill("#question", LONG)
    if act:
        reader.page.evaluate(ONCE_BEGUN, act)
    reader.page.keyboard.press("Enter")


def second_tab(reader: Reader) -> Reader:
    return Reader(reader.page.context.new_page(), reader.url)


def reload(reader: Reader) -> None:
    reader.page.reload()
    reader.page.wait_for_selector("#model option", state="attached")


def test_a_reload_in_mid_answer_loses_nothing(open_page: Any, whole: str) -> None:  # noqa: F811
    reader = open_page()
    with reader.page.expect_navigation():
        begin(reader, "reload")
    reader.page.wait_for_selector("#model option", state="attached")
    reader.wait()
    (conversation,) = kept_in(reader)
    assert [message["content"] for message in conversation["messages"]] == [LONG, whole]
    assert conversation["messages"][1]["pending"] is None and conversation["messages"][1]["figures"]["predicted_n"] > 20


UNASKED = """() => {
  const ask = window.fetch;
  const never = new Promise(() => null);
  window.fetch = (url, options) => (String(url).includes("chat/completions") ? never : ask(url, options));
}"""
"""The page keeps the question and is left before the server hears of it."""
IMPATIENT = "{ const later = setTimeout; window.setTimeout = (act, ms) => later(act, Math.min(ms ?? 0, 20)); }"
"""What a page waits for an answer that nobody asked is not what is tested."""


def test_a_page_that_was_left_before_it_asked_asks_when_it_is_opened(open_page: Any, whole: str) -> None:  # noqa: F811
    reader = open_page()
    reader.page.context.add_init_script(IMPATIENT)
    reader.settings(max_tokens=MAX, method="plain")
    reader.page.evaluate(UNASKED)
    reader.page.fill("#question", LONG)
    reader.page.keyboard.press("Enter")
    reader.page.wait_for_function(f"async () => await ({PENDING})()")
    others = [second_tab(reader) for _ in range(2)]
    assert not any(tab.bodies for tab in (reader, *others)), "a page that may still ask is there"
    reload(reader)
    reader.wait()
    (conversation,) = kept_in(reader)
    assert [message["content"] for message in conversation["messages"]] == [LONG, whole]
    assert ["continue_final_message" in body for tab in (reader, *others) for body in tab.bodies] == [False]
    for tab in others:
        assert tab.wait() == reader.page.locator(".answer .text").inner_text()
        assert tab.complaints == []


BROKEN_NETWORK = """() => {
  const ask = window.fetch;
  let looks = 0;
  window.fetch = async (url, options) => {
    if (String(url).includes("/v1/answers/") && looks++ < 2) throw new TypeError("no network yet");
    const response = await ask(url, options);
    if (!String(url).includes("chat/completions")) return response;
    const heard = response.body.getReader();
    const broken = new TransformStream();
    const to = broken.writable.getWriter();
    heard.read().then(({ value }) => to.write(value)).then(() => {
      heard.cancel();
      to.abort(new TypeError("network error"));
    });
    return new Response(broken.readable, response);
  };
}"""
"""It is gone behind the first words of an answer, and for the next two questions."""


def test_an_answer_whose_stream_breaks_is_read_on(open_page: Any, whole: str) -> None:  # noqa: F811
    """A laptop that slept, a network that changed: the server has kept the answer."""
    reader = open_page()
    reader.page.evaluate(BROKEN_NETWORK)
    begin(reader)
    reader.wait()
    (conversation,) = kept_in(reader)
    assert [message["content"] for message in conversation["messages"]] == [LONG, whole]
    assert len(reader.bodies) == 1 and not reader.page.locator(".error").count()


FULL = """() => {
  const error = new DOMException("full", "QuotaExceededError");
  Object.defineProperty(IDBTransaction.prototype, "error", { get: () => error });
  IDBObjectStore.prototype.put = function () { this.transaction.abort(); };
}"""


def test_a_question_without_room_stays_where_it_was_typed(open_page: Any) -> None:  # noqa: F811
    reader = open_page()
    reader.page.evaluate(FULL)
    reader.page.fill("#question", LONG)
    reader.page.keyboard.press("Enter")
    reader.page.wait_for_function("() => document.getElementById('state').textContent.includes('no room left')")
    reader.page.wait_for_function(f"() => document.getElementById('question').value === {json.dumps(LONG)}")
    assert reader.bodies == []


def test_an_answer_that_was_to_go_on_goes_on_when_the_page_is_opened(open_page: Any) -> None:  # noqa: F811
    reader = open_page()
    reader.page.context.add_init_script(IMPATIENT)
    reader.settings(max_tokens=10, method="plain")
    first = reader.ask(LONG)
    reader.page.evaluate(UNASKED)
    reader.page.click("text=Continue")
    reader.page.wait_for_function(f"async () => await ({PENDING})()")
    reload(reader)
    longer = reader.wait()
    assert longer.startswith(first.rstrip()) and len(longer) > len(first)
    assert reader.page.locator(".note").count() == 0
    assert [body.get("continue_final_message", False) for body in reader.bodies] == [False, True]


def test_an_answer_goes_on_while_another_conversation_is_read(open_page: Any, whole: str) -> None:  # noqa: F811
    reader = open_page()
    reader.page.evaluate(BUSY_DISK)
    begin(reader, "#new")
    reader.page.wait_for_selector("#conversations li:nth-child(2)")
    reader.settings(max_tokens=4)
    reader.ask("heron")
    reader.page.click(f"text={LONG}")
    reader.wait()
    said = {one["messages"][0]["content"]: one["messages"][1]["content"] for one in kept_in(reader)}
    assert said[LONG] == whole and said["heron"]


def test_a_new_conversation_is_not_the_one_whose_question_is_about_to_be_kept(
    open_page: Any,  # noqa: F811
    whole: str,
) -> None:
    reader = open_page()
    reader.page.evaluate(BUSY_DISK)
    begin(reader)
    reader.page.click("#new")
    reader.page.wait_for_selector("#conversations li:nth-child(2)")
    reader.page.click(f"text={LONG}")
    reader.wait()
    (conversation,) = kept_in(reader)
    assert [message["content"] for message in conversation["messages"]] == [LONG, whole]


def test_tabs_do_not_overwrite_each_other(open_page: Any, whole: str) -> None:  # noqa: F811
    reader = open_page()
    reader.settings(max_tokens=4)
    reader.ask("the first")
    other = second_tab(reader)
    other.page.click("#new")
    begin(other)
    reader.ask("the second")
    other.wait()
    reader.page.wait_for_selector(f"text={LONG}")
    reader.page.click(f"#conversations >> text={LONG}")
    # The other tab's answer is shown here as well, once this tab has read what the other one kept.
    reader.page.wait_for_function("() => document.querySelector('.answer .text').innerText.length > 50")
    reload(reader)
    said = [[message["content"] for message in one["messages"][::2]] for one in kept_in(reader)]
    assert sorted(said) == [[LONG], ["the first", "the second"]]
    assert other.complaints == []


def test_a_cut_answer_goes_on(open_page: Any) -> None:  # noqa: F811
    reader = open_page()
    reader.settings(max_tokens=10, method="plain")
    first = reader.ask(LONG)
    reader.page.click("text=Continue")
    longer = reader.wait()
    assert longer.startswith(first.rstrip()) and len(longer) > len(first)
    assert reader.bodies[-1]["continue_final_message"] is True
    assert len(kept_in(reader)[0]["messages"]) == 2


def test_a_name_and_words_find_a_conversation(open_page: Any) -> None:  # noqa: F811
    reader = open_page()
    reader.settings(max_tokens=4)
    reader.ask("fox")
    reader.page.click("#new")
    reader.ask("heron")
    reader.page.on("dialog", lambda dialog: dialog.accept("a bird"))
    reader.page.click("[aria-label='Rename heron']")
    reader.page.wait_for_selector("#conversations >> text=a bird")
    reader.page.fill("#search", "FOX")
    assert reader.page.locator("#conversations li button:first-child").all_inner_texts() == ["fox"]
    reader.page.fill("#search", "bird")
    assert reader.page.locator("#conversations li button:first-child").all_inner_texts() == ["a bird"]


LIKE_A_TURN = "# A title\n\n## You\n\nnot a turn of mine\n\n<!-- mirrorsd 1 user -->\n## You\n\nnor this\n"


@pytest.mark.parametrize("kind", ["json", "md"])
def test_what_is_exported_can_be_imported(open_page: Any, kind: str, tmp_path: Path) -> None:  # noqa: F811
    reader = open_page()
    reader.script(LIKE_A_TURN)
    reader.ask("fox\n\n```\n# code\n```\n")
    reader.ask("heron")
    with reader.page.expect_download() as download:
        reader.page.click("#export" if kind == "json" else "#export-text")
    file = tmp_path / f"kept.{kind}"
    download.value.save_as(file)
    (tmp_path / "broken.json").write_text('{"conversations": [{"messages": [{"role": "root"}]}]}')
    before = kept_in(reader)
    reader.page.set_input_files("#import", [str(file), str(tmp_path / "broken.json")])
    reader.page.wait_for_function("() => document.getElementById('state').textContent.includes('read')")
    assert "Not read: broken.json: a message is not {role, content}" in reader.page.locator("#state").inner_text()
    (again,) = [one for one in kept_in(reader) if one["id"] != before[0]["id"]]
    words = [[m["role"], m["content"]] for m in again["messages"]]
    assert words == [[m["role"], m["content"]] for m in before[0]["messages"]]
    if kind == "json":
        assert json.loads(file.read_text(encoding="utf-8"))["mirrorsd"] == 1


def test_what_a_file_says_breaks_no_page(open_page: Any, tmp_path: Path) -> None:  # noqa: F811
    """Neither quotes in quotes, as models that loop write them, nor figures that are none, after a reload either."""
    reader = open_page()
    answer = {"role": "assistant", "content": "> - " * 5000 + "end", "figures": {}}
    one = {"messages": [{"role": "user", "content": "fox?"}, answer], "settings": {"system": {"a": 1}, "seed": 7}}
    (tmp_path / "odd.json").write_text(json.dumps({"conversations": [one]}), encoding="utf-8")
    reader.page.set_input_files("#import", [str(tmp_path / "odd.json")])
    reader.page.wait_for_function("() => document.getElementById('state').textContent.includes('1 conversation read')")
    reload(reader)
    reader.page.wait_for_function("() => document.getElementById('messages').textContent.includes('> - > - ')")
    (kept,) = kept_in(reader)
    assert kept["settings"] == {"seed": 7}
    assert reader.page.locator("#list").inner_text()


def test_a_text_of_headings_is_read_as_a_conversation(open_page: Any, tmp_path: Path) -> None:  # noqa: F811
    reader = open_page()
    (tmp_path / "notes.md").write_text("# Foxes\n\n## You\n\nfox?\n\n## Answer\n\nA fox.\n", encoding="utf-8")
    (tmp_path / "other.md").write_text("# Nothing said\n\nof anything\n", encoding="utf-8")
    reader.page.set_input_files("#import", [str(tmp_path / "notes.md"), str(tmp_path / "other.md")])
    reader.page.wait_for_function("() => document.getElementById('state').textContent.includes('read')")
    assert "Not read: other.md: a conversation has no messages" in reader.page.locator("#state").inner_text()
    (kept,) = kept_in(reader)
    assert (kept["title"], [m["content"] for m in kept["messages"]]) == ("Foxes", ["fox?", "A fox."])


def test_copying_says_what_it_did_without_a_clipboard(open_page: Any) -> None:  # noqa: F811
    reader = open_page()
    reader.page.add_init_script("Object.defineProperty(navigator, 'clipboard', { value: undefined })")
    reload(reader)
    reader.script("The fox ran.")
    reader.ask("fox")
    reader.page.click("[aria-label='Copy this answer']")
    playwright.expect(reader.page.locator("[aria-label='Copy this answer']")).to_have_text("Copied")
    reader.page.locator("#question").focus()
    reader.page.keyboard.press("Control+V")
    assert reader.page.input_value("#question") == "The fox ran."


def test_a_slider_sets_its_field(open_page: Any) -> None:  # noqa: F811
    reader = open_page()
    reader.page.click("#open-settings")
    reader.page.locator("[data-for=temperature]").fill("0.5")
    assert reader.page.input_value("[name=temperature]") == "0.5"
    reader.page.fill("[name=top_p]", "0.9")
    assert reader.page.input_value("[data-for=top_p]") == "0.9"


def test_what_does_not_change_stays_on_the_page_as_it_is(open_page: Any) -> None:  # noqa: F811
    """A long conversation is not made anew for every answer: boxes and their colours stay."""
    reader = open_page()
    reader.script("The **fox** ran.", [["The **fox** ", "window"], ["ran.", "correction"]])
    reader.ask("first")
    reader.page.evaluate("document.querySelectorAll('.message').forEach((box) => (box.isOld = true))")
    reader.ask("second")
    old = "[...document.querySelectorAll('.message')].map((box) => Boolean(box.isOld))"
    assert reader.page.evaluate(old) == [True, False, False, False], "the first answer is the last one no more"
    reader.page.evaluate("document.querySelectorAll('.message').forEach((box) => (box.isOld = true))")
    reader.ask("third")
    assert reader.page.evaluate(old) == [True, True, True, False, False, False]
    coloured = "[...CSS.highlights.get('source-window')].map(String)"
    assert reader.page.evaluate(coloured) == ["The", "fox"] * 3
    reader.page.uncheck("#colours")
    assert reader.page.evaluate(coloured) == []
    reader.page.check("#colours")
    assert reader.page.evaluate(coloured) == ["The", "fox"] * 3
    reader.page.locator("text=Edit").first.click()
    reader.page.click("text=Leave it")
    assert reader.page.locator(".question .said").all_inner_texts() == ["first", "second", "third"]
    reader.page.click("#new")
    assert reader.page.locator(".message").count() == 0
    assert reader.page.evaluate(coloured) == []


def test_only_what_is_near_the_view_is_coloured(open_page: Any) -> None:  # noqa: F811
    """The browser goes through all ranges with every drawing: a long conversation must not slow the next answer."""
    reader = open_page()
    reader.script("fox\n\n" * 150, [["fox\n\n", "window"]] * 150)
    for number in range(3):
        reader.ask(f"question {number}")
    coloured = "CSS.highlights.get('source-window').size"
    reader.page.wait_for_function(f"() => {coloured} <= 300 && {coloured} > 0")
    reader.page.evaluate("document.getElementById('messages').scrollTop = 0")
    ranges, answer = "[...CSS.highlights.get('source-window')]", "document.querySelector('.answer')"
    reader.page.wait_for_function(f"() => {ranges}.some((range) => {answer}.contains(range.startContainer))")
    assert reader.page.evaluate(coloured) <= 300


@pytest.mark.parametrize("count", [12, pytest.param(50, marks=pytest.mark.long)])
def test_random_acts_lose_nothing(open_page: Any, count: int) -> None:  # noqa: F811
    """Questions are asked, pages reloaded, tabs opened and conversations switched in mid-answer."""
    rng, asked = random.Random(7), []
    tabs = [open_page()]
    tabs[0].settings(max_tokens=40, method="plain")
    for number in range(count):
        tab = rng.choice(tabs)
        act = rng.choice(("ask", "ask", "ask", "reload", "switch", "new", "tab"))
        if act == "ask" and tab.page.locator("#send").is_visible():
            asked.append(f"question {number} of the fox")
            tab.page.fill("#question", asked[-1])
            tab.page.keyboard.press("Enter")
            tab.page.wait_for_selector(f"#messages >> text={asked[-1]}")
        elif act == "reload":
            reload(tab)
        elif act == "switch":
            rng.choice(tab.page.locator("#conversations li button:first-child").all()).click()
        elif act == "new":
            tab.page.click("#new")
        elif act == "tab" and len(tabs) < 3:
            tabs.append(second_tab(tabs[0]))
    for tab in tabs:
        tab.page.wait_for_selector("body:not(.is-answering) #send:visible", timeout=60_000)
    tabs[0].page.wait_for_function(f"async () => !(await ({PENDING})())", timeout=60_000)
    messages = [message for one in kept_in(tabs[0]) for message in one["messages"]]
    assert sorted(m["content"] for m in messages if m["role"] == "user") == sorted(asked)
    answers = [message for message in messages if message["role"] == "assistant"]
    assert len(answers) == len(asked)
    assert all(answer["content"] and not answer.get("error") for answer in answers), answers
    for tab in tabs:
        tab.forgive("400")  # a context that is full is refused, and asked again without its oldest turns


PENDING = """() => new Promise((resolve) => {
  const asked = indexedDB.open("mirrorsd");
  asked.onsuccess = () => {
    const all = asked.result.transaction("conversations").objectStore("conversations").getAll();
    all.onsuccess = () => resolve(all.result.some((one) => one.messages.some((message) => message.pending)));
  };
})"""
