"""What readers, browsers, tabs and servers do to the page: it says what is wrong, and mixes up and loses nothing."""

import json
from pathlib import Path
from typing import Any

import pytest

from mirrorsd.tests.end_to_end.test_page import (
    CHROMIUM,
    KEY,
    Reader,
    browser,  # noqa: F401 - fixtures
    kept_in,
    open_page,  # noqa: F401
    playwright,
    served,
    url,  # noqa: F401
)

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no chromium on this machine: apt install chromium")
DENIED = "throw new DOMException('denied', 'SecurityError')"
FORBIDDEN = {
    "database": f"indexedDB.open = () => {{ {DENIED} }}",
    "storage": f"Object.defineProperty(window, 'localStorage', {{ get() {{ {DENIED} }} }})",
}
CLOSING = f"IDBDatabase.prototype.transaction = () => {{ {DENIED} }}"
SCROLLED = "document.getElementById('messages').scrollTop"
FOCUSED = "document.activeElement.id"


def second_tab(reader: Reader) -> Reader:
    return Reader(reader.page.context.new_page(), reader.url)


def answered_twice(open_page: Any, *questions: str) -> Reader:  # noqa: F811
    """A page with a conversation for each of two questions; both have the same answer."""
    reader: Reader = open_page()
    reader.script("A fox.")
    reader.ask(questions[0])
    reader.page.click("#new")
    reader.ask(questions[1])
    return reader


def hang(reader: Reader) -> None:
    """Ask, and get no answer."""
    reader.page.route("**/v1/chat/completions", lambda route: None)
    reader.page.fill("#question", "hang")
    reader.page.keyboard.press("Enter")
    reader.page.wait_for_selector(".coming", state="attached")


def said(reader: Reader) -> list[list[str]]:
    return sorted([message["content"] for message in one["messages"]] for one in kept_in(reader))


@pytest.mark.parametrize("what", FORBIDDEN)
def test_a_browser_that_forbids_to_keep_anything_is_told_of(open_page: Any, what: str) -> None:  # noqa: F811
    reader = open_page()
    reader.page.add_init_script(FORBIDDEN[what])
    reader.page.evaluate("history.replaceState(null, '', '#key=a-key')")
    reader.page.reload()
    reader.page.wait_for_selector("#state >> text=lets the page keep nothing (denied)")
    assert "key" not in reader.page.url
    reader.forgive("denied")


def test_a_question_that_the_browser_does_not_keep_stays_where_it_was_typed(open_page: Any) -> None:  # noqa: F811
    reader = open_page()
    reader.page.evaluate(f"() => {{ {CLOSING} }}")
    reader.page.fill("#question", "fox")
    reader.page.keyboard.press("Enter")
    reader.page.wait_for_selector("#state >> text=keeps nothing: denied")
    reader.page.wait_for_function("() => document.getElementById('question').value === 'fox'")
    assert reader.page.locator("#send").is_visible()


def test_a_page_whose_data_is_cleared_goes_on(open_page: Any, url: str) -> None:  # noqa: F811
    reader = open_page()
    reader.script("A fox.")
    reader.ask("before")
    session = reader.page.context.new_cdp_session(reader.page)
    session.send("Storage.clearDataForOrigin", {"origin": url, "storageTypes": "indexeddb"})
    reader.page.wait_for_selector(".welcome")
    reader.ask("after")
    assert said(reader) == [["after", "A fox."]]


def test_an_import_without_room_says_so(open_page: Any, tmp_path: Path) -> None:  # noqa: F811
    reader = open_page()
    file = tmp_path / "kept.json"
    file.write_text(json.dumps([{"messages": [{"role": "user", "content": "fox"}]}]), encoding="utf-8")
    reader.page.evaluate(f"() => {{ {CLOSING} }}")
    reader.page.set_input_files("#import", str(file))
    reader.page.wait_for_selector("#state >> text=keeps nothing: denied")


def test_what_other_pages_left_under_the_old_name_is_passed_over(open_page: Any) -> None:  # noqa: F811
    reader = open_page()
    reader.page.evaluate("""() => localStorage.setItem("mirrorsd.conversations", '{"messages": "fox"}')""")
    reader.page.reload()
    reader.page.wait_for_selector("#model option", state="attached")


def test_markdown_with_the_line_ends_of_an_editor_is_read(open_page: Any, tmp_path: Path) -> None:  # noqa: F811
    reader = open_page()
    reader.script("A fox.\n\nOr two.")
    reader.ask("fox?")
    with reader.page.expect_download() as download:
        reader.page.click("#export-text")
    file = tmp_path / "kept.md"
    file.write_bytes(Path(download.value.path()).read_bytes().replace(b"\n", b"\r\n"))
    reader.page.set_input_files("#import", str(file))
    reader.page.wait_for_selector("#state >> text=1 conversation read.")
    assert said(reader) == [["fox?", "A fox.\n\nOr two."]] * 2


def test_imported_conversations_stand_in_the_order_of_their_file(open_page: Any, tmp_path: Path) -> None:  # noqa: F811
    reader = open_page()
    said = [{"role": "user", "content": "fox"}]
    titles = [f"title {number}" for number in range(9)]
    file = tmp_path / "kept.json"
    file.write_text(json.dumps([{"title": title, "messages": said} for title in titles]), encoding="utf-8")
    reader.page.set_input_files("#import", str(file))
    reader.page.wait_for_selector("#state >> text=9 conversations read.")
    shown = reader.page.locator("#conversations li button:first-child")
    assert shown.all_inner_texts()[:9] == titles
    reader.page.reload()
    playwright.expect(shown.first).to_have_text("title 0")
    assert shown.all_inner_texts()[:9] == titles


def test_files_without_a_conversation_are_told_of(open_page: Any, tmp_path: Path) -> None:  # noqa: F811
    reader = open_page()
    for name in ("none.MD", "none.JSON"):
        (tmp_path / name).write_text("{}", encoding="utf-8")
    reader.page.set_input_files("#import", [str(path) for path in sorted(tmp_path.iterdir())])
    reader.page.wait_for_selector("#state >> text=Not read")
    told = reader.page.locator("#state").inner_text()
    assert "none.JSON: it holds no list of conversations; none.MD: it holds no heading" in told


def test_other_conversations_are_read_and_copied_while_one_is_answered(open_page: Any) -> None:  # noqa: F811
    reader = answered_twice(open_page, "heron", "fox")
    reader.page.unroute("**/v1/chat/completions")
    hang(reader)
    reader.page.locator("[aria-label='Copy this answer']").first.click()
    playwright.expect(reader.page.locator("[aria-label='Copy this answer']").first).to_have_text("Copied")
    reader.page.click("#conversations >> text=heron")
    playwright.expect(reader.page.locator(".question .said")).to_have_text("heron")


def test_a_reader_stays_where_he_reads(open_page: Any) -> None:  # noqa: F811
    reader = open_page()
    reader.script("fox\n\n" * 150)
    reader.ask("foxes")
    hang(reader)
    reader.page.evaluate(f"{SCROLLED} = 300")
    reader.page.keyboard.press("Escape")
    reader.page.wait_for_selector(".note >> text=Stopped.")
    reader.page.uncheck("#colours")
    assert reader.page.evaluate(SCROLLED) == 300
    reader.page.locator("text=Edit").first.click()
    reader.page.click("text=Leave it")
    assert reader.page.evaluate(SCROLLED) < 300
    reader.page.unroute("**/v1/chat/completions")
    reader.script("A heron.")
    reader.ask("heron")
    assert reader.page.evaluate(SCROLLED) > 3000, "what was asked is shown"


def test_the_focus_is_not_lost_with_what_had_it(open_page: Any) -> None:  # noqa: F811
    reader = open_page()
    reader.script("A fox.")
    reader.page.fill("#question", "fox")
    reader.page.focus("#send")
    reader.page.keyboard.press("Enter")
    reader.wait()
    assert reader.page.evaluate(FOCUSED) == "messages"
    reader.page.focus("text=Retry")
    reader.page.keyboard.press("Enter")
    reader.page.wait_for_function(f"() => {FOCUSED} === 'messages'")
    reader.wait()
    reader.page.on("dialog", lambda dialog: dialog.accept("a fox"))
    reader.page.focus("[aria-label='Rename fox']")
    reader.page.keyboard.press("Enter")
    reader.page.wait_for_selector("[aria-label='Rename a fox']:focus")
    reader.page.focus("#export-text")
    reader.page.keyboard.press("Tab")
    style = "getComputedStyle(document.querySelector('.file-button')).outlineStyle"
    assert (reader.page.evaluate(FOCUSED), reader.page.evaluate(style)) == ("import", "solid")


def test_comparing_asks_with_the_settings_that_the_answer_had(open_page: Any) -> None:  # noqa: F811
    reader = open_page()
    reader.settings(system="Be brief.", temperature=0.9, max_tokens=30)
    reader.ask("Once upon a time")
    reader.settings(system="Be long.", temperature=0.3, max_tokens=12)
    reader.page.click("text=Compare with plain")
    reader.page.wait_for_selector(".comparison.same")
    first, again = reader.bodies[-2:]
    assert [first[name] for name in ("messages", "temperature", "max_tokens")] == [
        again[name] for name in ("messages", "temperature", "max_tokens")
    ]


MODELS = """const ask = window.fetch;
window.fetch = async (url, options) => {
  if (!String(url).includes("props")) return ask(url, options);
  const model = new URL(url, location.href).searchParams.get("model") ?? "tiny";
  const props = await (await ask("/props", options)).json();
  if (model === "slow") await new Promise((resolve) => setTimeout(resolve, 500));
  return new Response(JSON.stringify({ ...props, model, models: ["tiny", "slow", "other"] }));
};"""


def test_the_model_that_was_chosen_last_is_asked(open_page: Any) -> None:  # noqa: F811
    """Also while the server still loads it; the properties of one that was chosen before may come later."""
    reader = open_page()
    reader.page.add_init_script(MODELS)
    reader.page.reload()
    reader.page.wait_for_selector("#model option:nth-child(3)", state="attached")
    reader.script("A fox.")
    reader.page.select_option("#model", "slow")
    reader.ask("fox")
    assert reader.bodies[-1]["model"] == "slow"
    reader.page.select_option("#model", "slow")
    reader.page.select_option("#model", "other")
    reader.page.wait_for_timeout(700)
    assert reader.page.input_value("#model") == "other"


def test_an_answer_that_broke_off_can_be_copied_and_goes_on(open_page: Any) -> None:  # noqa: F811
    reader = open_page()
    chunk = json.dumps({"choices": [{"index": 0, "delta": {"content": "The fox ran"}}]})
    reader.page.route(
        "**/v1/chat/completions",
        lambda route: route.fulfill(status=200, content_type="text/event-stream", body=f"data: {chunk}\n\n"),
    )
    reader.ask("fox")
    assert reader.page.locator("[role=alert]").inner_text() == "The answer broke off: the server hung up."
    assert reader.page.locator(".answer button").all_inner_texts() == ["Copy", "Continue", "Retry"]


def test_asking_again_in_vain_takes_no_answer_away(open_page: Any) -> None:  # noqa: F811
    reader = open_page()
    reader.script("A fox.")
    reader.ask("fox")
    reader.page.unroute("**/v1/chat/completions")
    refusal = {"error": {"message": "The queue is full.", "code": "busy"}}
    reader.page.route("**/v1/chat/completions", lambda route: route.fulfill(status=429, json=refusal))
    reader.page.click("text=Retry")
    reader.page.wait_for_selector(".note >> text=Asked again in vain: The queue is full.")
    assert said(reader) == [["fox", "A fox."]]
    reader.forgive("429")
    reader.page.unroute("**/v1/chat/completions")
    reader.script("")
    reader.page.click("text=Retry")
    reader.page.wait_for_selector(".note >> text=Asked again in vain: the answer has no words.")
    reader.page.unroute("**/v1/chat/completions")
    reader.script("A heron.")
    reader.page.click("text=Retry")
    reader.wait()
    assert said(reader) == [["fox", "A heron."]]
    assert reader.page.locator(".note").count() == 0 and "instead" not in kept_in(reader)[0]["messages"][1]


def test_an_answer_that_another_tab_stops_is_no_error(open_page: Any) -> None:  # noqa: F811
    reader = open_page()
    error = {"error": {"message": "The answer was ended by its id.", "code": "cancelled"}}
    reader.page.route(
        "**/v1/chat/completions",
        lambda route: route.fulfill(
            status=200, content_type="text/event-stream", body=f"data: {json.dumps(error)}\n\ndata: [DONE]\n\n"
        ),
    )
    reader.ask("fox")
    assert reader.page.locator(".note").inner_text() == "Stopped."
    assert reader.page.locator(".error").count() == 0


def test_a_question_of_a_deleted_conversation_is_asked_in_no_other(open_page: Any) -> None:  # noqa: F811
    reader = answered_twice(open_page, "one", "two")
    other = second_tab(reader)
    reader.page.locator("text=Edit").first.click()
    other.page.on("dialog", lambda dialog: dialog.accept())
    other.page.click("[aria-label='Delete two']")
    playwright.expect(reader.page.locator(".edit")).to_have_count(0)
    playwright.expect(reader.page.locator(".question .said")).to_have_text("one")
    assert said(reader) == [["one", "A fox."]]


BEHIND = "/behind/a/prefix"


def test_a_page_behind_a_prefix_asks_behind_it(open_page: Any, url: str) -> None:  # noqa: F811
    reader = open_page()
    asked = []

    def passed_on(route: Any) -> None:
        asked.append(route.request.url.removeprefix(url))
        route.fulfill(response=route.fetch(url=route.request.url.replace(BEHIND, "")))

    reader.page.route("**/*", passed_on)
    reader.page.goto(f"{url}{BEHIND}/")
    reader.page.wait_for_selector("#model option", state="attached")
    reader.settings(max_tokens=4)
    assert reader.ask("fox")
    assert [path for path in asked if not path.startswith(BEHIND)] == []


def test_keys_of_any_kind_reach_the_server(open_page: Any, tiny_bundle: Path) -> None:  # noqa: F811
    """Also an odd one in the dialog, and one that is put into the address of a page that is open."""
    key = f"{KEY}+and/more=="
    with served(tiny_bundle, key) as address:
        reader = open_page(at=f"{address}/#key={key}")
        reader.page.evaluate("sessionStorage.clear()")
        reader.page.reload()
        reader.page.fill("#key-dialog input", "schlüssel–€")
        reader.page.keyboard.press("Enter")
        reader.page.wait_for_selector("#state >> text=not one of this server's")
        assert reader.page.locator("#key-dialog").is_visible()
        reader.page.keyboard.press("Escape")
        reader.page.goto(f"{address}/#key={key}")
        reader.page.wait_for_selector("#model option", state="attached")
        assert reader.page.url == f"{address}/"
        reader.forgive("401")


def test_an_answer_is_read_on_once_the_page_has_its_key(open_page: Any, tiny_bundle: Path) -> None:  # noqa: F811
    """The page was closed in mid-answer, and is opened in another tab, where the key is not."""
    with served(tiny_bundle, KEY) as address:
        reader = open_page(at=f"{address}/#key={KEY}")
        reader.settings(max_tokens=300, method="plain")
        reader.page.fill("#question", "Tell me of the fox.")
        reader.page.keyboard.press("Enter")
        reader.page.wait_for_selector(".coming", state="attached")
        reader.page.evaluate("sessionStorage.clear(); location.reload()")
        reader.page.fill("#key-dialog input", KEY)
        reader.page.keyboard.press("Enter")
        reader.page.wait_for_selector("#model option", state="attached")
        assert reader.wait()
        (answer,) = (message for message in kept_in(reader)[0]["messages"] if message["role"] == "assistant")
        assert not answer.get("error") and answer["figures"]["predicted_n"] > 20
        reader.forgive("401")


def test_a_tab_without_the_key_leaves_answers_of_others_alone(open_page: Any, tiny_bundle: Path) -> None:  # noqa: F811
    with served(tiny_bundle, KEY) as address:
        reader = open_page(at=f"{address}/#key={KEY}")
        other = reader.page.context.new_page()
        other.goto(address)
        other.wait_for_selector("#key-dialog[open]")
        hang(reader)
        other.wait_for_selector("#conversations >> text=hang")
        other.evaluate("fetch('props').then(() => null)")  # what the tab asked before is answered
        (answer,) = (message for message in kept_in(reader)[0]["messages"] if message["role"] == "assistant")
        assert answer["pending"] and not answer.get("error")


def test_what_the_page_says_is_read_on_a_phone(open_page: Any) -> None:  # noqa: F811
    reader = open_page("phone")
    words = "This browser has no room left: delete a conversation. " * 2
    reader.page.evaluate("words => { document.getElementById('state').textContent = words; }", words)
    hidden = "one => one.scrollWidth > one.clientWidth || one.scrollHeight > one.clientHeight"
    assert not reader.page.locator("#state").evaluate(hidden)
    assert reader.page.evaluate("document.documentElement.scrollWidth") <= reader.page.viewport_size["width"]


def test_markup_keeps_its_lines_and_cells_of_tables_break_theirs(open_page: Any) -> None:  # noqa: F811
    reader = open_page()
    cell = "a sentence in a cell, " * 12
    reader.script(f"<answer>\n  one\n  two\n</answer>\n\nthree\n\n| a | b |\n|---|---|\n| {cell} | b |\n")
    reader.ask("fox")
    shown = reader.page.locator(".answer > .text").inner_text()
    assert shown.startswith("<answer>\n  one\n  two\n</answer>\n\nthree")
    assert reader.page.locator(".answer td").first.bounding_box()["width"] < 500


LEFT = """one => {
  const range = new Range();
  range.selectNodeContents(one);
  return range.getBoundingClientRect().left - one.getBoundingClientRect().left;
}"""


def test_what_is_written_from_right_to_left_stands_so(open_page: Any) -> None:  # noqa: F811
    reader = open_page()
    reader.script("שלום עולם.\n\nA fox.\n\n| שלום עולם |\n|---|\n| שלום |\n")
    reader.ask("שלום")
    lefts = reader.page.locator(".answer > .text p").evaluate_all(f"all => all.map({LEFT})")
    assert lefts[0] > 400 and lefts[1] == 0
    assert reader.page.locator(".answer td").evaluate(LEFT) > 30
    reader.page.fill("#question", "שלום")
    assert reader.page.locator("#question").evaluate("one => one.matches(':dir(rtl)')")
