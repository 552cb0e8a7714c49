"""What an answer looks like: formulas, code in colours, folded reasoning, and a text that grows."""

import json
from pathlib import Path
from typing import Any

import pytest

from mirrorsd.tests.end_to_end.test_page import (
    CHROMIUM,
    browser,  # noqa: F401 - fixtures
    kept_in,
    open_page,  # noqa: F401
    playwright,
    url,  # noqa: F401
    violations,
)

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no chromium on this machine: apt install chromium")
PAGE = Path(__file__).resolve().parents[2] / "server" / "page"
FORMULAS = r"""The area is $\pi r^2$, or \(\tfrac{\tau}{2} r^2\), for $5 and $10.

$$
\int_0^1 x\,dx = \frac{1}{2}
$$

\[ \sum_{k=1}^n k = \frac{n(n+1)}{2} \]

\begin{align} a &= b \\ c &= d \end{align}

Not read: $\nosuch{1}$ and `$code$` and \pmb{x}."""
CODE = '```python\ndef fox(n: int) -> str:\n    return "fox" * n  # a comment\n```\n\n```klingon\nnuqneH "fox"\n```\n'
HOSTILE = r"""$\href{javascript:window.gotcha=1}{x}$ $\includegraphics{https://example.com/a.png}$
$\htmlStyle{color:red}{x}$
$\def\a{\a\a}\a$ $\rule{9999em}{9999em}$ $\pmb{b}\fbox{c}\colorbox{red}{d}$ $<img src=x onerror=alert(1)>$

```html
</code><img src=x onerror="window.gotcha=2"><script>window.gotcha = 3</script>
```
"""


def test_formulas_are_set_and_money_is_not(open_page: Any) -> None:  # noqa: F811
    reader = open_page()
    reader.script(FORMULAS)
    reader.ask("area")
    reader.page.wait_for_selector(".formula .katex")
    shown = reader.page.locator(".answer .formula[data-tex]").evaluate_all("all => all.map((one) => one.dataset.tex)")
    assert shown[:2] == [r"\pi r^2", r"\tfrac{\tau}{2} r^2"]
    assert [tex[:6] for tex in shown[2:]] == [r"\int_0", r"\sum_{", r"\begin"]
    assert reader.page.locator(".answer .formula.block[data-tex]").count() == 3
    said = reader.page.locator(".answer > .text").inner_text()
    assert "for $5 and $10." in said and r"\nosuch{1}" in said and "$code$" in said
    assert reader.page.evaluate("document.fonts.ready.then(() => document.fonts.check('12px KaTeX_Main'))")
    assert "KaTeX" in reader.page.locator(".katex .mord").first.evaluate("one => getComputedStyle(one).fontFamily")


def test_code_is_coloured_in_the_languages_that_are_known(open_page: Any) -> None:  # noqa: F811
    reader = open_page()
    reader.script(CODE)
    reader.ask("code")
    reader.page.wait_for_selector(".hljs-keyword")
    assert reader.page.locator(".hljs-keyword").all_inner_texts() == ["def", "return"]
    assert reader.page.locator(".language-klingon span").count() == 0
    codes = reader.page.locator(".answer code").all_inner_texts()
    assert codes == ['def fox(n: int) -> str:\n    return "fox" * n  # a comment\n', 'nuqneH "fox"\n']


def test_hostile_formulas_and_code_do_nothing(open_page: Any) -> None:  # noqa: F811
    reader = open_page()
    reader.page.on("dialog", lambda dialog: reader.complaints.append(f"a dialog: {dialog.message}"))
    reader.script(HOSTILE)
    reader.ask("attack")
    reader.page.wait_for_selector(".katex")
    reader.page.wait_for_selector(".hljs-tag")
    answer = reader.page.locator(".answer > .text")
    assert reader.page.evaluate("window.gotcha") is None
    assert answer.locator("script, iframe, style, img, form, object, a, [onclick], [onerror]").count() == 0
    assert answer.evaluate("one => one.scrollHeight") < 2000


def test_nothing_is_fetched_for_what_an_answer_does_not_have(open_page: Any) -> None:  # noqa: F811
    reader = open_page()
    fetched: list[str] = []
    reader.page.on("request", lambda request: fetched.append(request.url))
    reader.script("Only words.")
    reader.ask("words")
    assert not [address for address in fetched if "vendor" in address]


def test_words_around_a_formula_and_in_code_keep_their_colours(open_page: Any) -> None:  # noqa: F811
    reader = open_page()
    tokens = [["One $", "window"], ["a + b", "lookup"], ["$ done.\n\n", "plain"], ["```python\n", "correction"]]
    tokens += [["return 1", "lookup"], ["\n```\n", "plain"], ["The end", "window"]]
    reader.script("".join(text for text, _ in tokens), tokens)
    reader.ask("fox")
    reader.page.wait_for_selector(".formula .katex")
    reader.page.wait_for_selector(".hljs-keyword")
    coloured = "name => [...CSS.highlights.get(`source-${name}`)].map(String)"
    playwright.expect(reader.page.locator(".hljs-number")).to_have_text("1")
    found = {name: "|".join(reader.page.evaluate(coloured, name)) for name in ("window", "lookup", "plain")}
    assert found == {"window": "One|The end", "lookup": "return|1", "plain": "done."}


@pytest.mark.parametrize(
    ("said", "thought", "shown"),
    [
        ("<think>\nA fox or a\n\n**heron**?\n</think>\n\nA fox.", "A fox or a", "A fox."),
        ("It was in the prompt.\n</think>\n\nA fox.", "It was in the prompt.", "A fox."),
        ("A fox writes `</think>` so.", "", "A fox writes </think> so."),
        ("[THINK]Hm.[/THINK]A fox.", "Hm.", "A fox."),
        ("<think>cut before the", "cut before the", ""),
        ("<think>\n\n</think>\n\nA fox.", "", "A fox."),
        ("A fox says <think> of it.", "", "A fox says <think> of it."),
    ],
)
def test_reasoning_is_folded(open_page: Any, said: str, thought: str, shown: str) -> None:  # noqa: F811
    reader = open_page()
    reader.script(said)
    reader.ask("fox")
    box = reader.page.locator(".answer .thought")
    assert box.is_visible() == bool(thought)
    assert reader.page.locator(".answer > .text").inner_text() == shown
    assert kept_in(reader)[0]["messages"][1]["content"] == said
    if thought:
        assert not reader.page.locator(f"text={thought}").is_visible()
        box.locator("summary").click()
        playwright.expect(box.locator(".prose")).to_contain_text(thought)
        assert violations(reader) == []


def test_tags_of_reasoning_in_code_are_code(open_page: Any) -> None:  # noqa: F811
    reader = open_page()
    reader.script("Write it so:\n\n```\n<think>\nHm.\n</think>\n```\n\nThat is all.")
    reader.ask("fox")
    assert not reader.page.locator(".answer .thought").is_visible()
    assert reader.page.locator(".answer code").inner_text() == "<think>\nHm.\n</think>\n"
    assert "Write it so:" in reader.page.locator(".answer > .text").inner_text()


def test_code_that_reasoning_leaves_open_ends_with_it(open_page: Any) -> None:  # noqa: F811
    reader = open_page()
    reader.script("Write:\n\n```\nx = 1\n</think>\n\nIt is\n\n```\nx = 2\n```\n")
    reader.ask("fox")
    assert reader.page.locator(".answer .thought").is_visible()
    assert reader.page.locator(".answer > .text code").inner_text() == "x = 2\n"


def test_reasoning_that_comes_apart_is_folded_kept_and_sent_again(open_page: Any) -> None:  # noqa: F811
    reader = open_page()
    deltas = [{"reasoning_content": "A fox "}, {"reasoning_content": "or a heron?"}, {"content": "A fox."}]
    frames = [{"choices": [{"index": 0, "delta": delta}]} for delta in deltas]
    body = "".join(f"data: {json.dumps(frame)}\n\n" for frame in frames) + "data: [DONE]\n\n"
    reader.page.route(
        "**/v1/chat/completions",
        lambda route: route.fulfill(status=200, content_type="text/event-stream", body=body),
    )
    reader.ask("fox")
    playwright.expect(reader.page.locator(".thought summary")).to_have_text("Thoughts, 5 words")
    assert reader.page.locator(".answer > .text").inner_text() == "A fox."
    reader.page.reload()
    reader.page.locator(".thought summary").click()
    playwright.expect(reader.page.locator(".thought .prose")).to_have_text("A fox or a heron?")
    reader.ask("again")
    assert reader.bodies[-1]["messages"][1]["reasoning_content"] == "A fox or a heron?"


GROWS = """async (text) => {
  const [{ Growing }, { rendered }] = [await import("/page/growing.js"), await import("/page/markdown.js")];
  const [grown, whole] = [document.createElement("div"), document.createElement("div")];
  const growing = new Growing(grown);
  let first = null;
  for (let end = 1; end <= text.length; end += 3) {
    growing.update(text.slice(0, end));
    if (grown.childElementCount > 1) first ??= grown.firstElementChild;
  }
  growing.update(text);
  whole.append(rendered(text));
  const isKept = first === null || first === grown.firstElementChild;
  return [grown.textContent, whole.textContent, isKept, grown.childElementCount];
}"""
TEXTS = {
    "paragraphs": "One.\n\nTwo **bold**\nand on.\n\n# Three\n\nFour",
    "lists": "- a\n- b\n\n  still b\n\n1. one\n2. two\n\n   still two\n3. three\n\nend\n\n- c\n",
    "code": "Look:\n\n```python\na = 1\n\nb = 2\n```\n\nand\n\n    indented\n\n    still\n\nend",
    "tables": "| a | b |\n|---|---|\n| 1 | 2 |\n\nTitle\n===\n\n> said\n> so\n\nend",
    "formulas": "x$$ and\n$$ money\nFirst $a$.\n\n$$\na + b\n$$\n\n\\[\nc\n\\]\n\nend $d",
    "carriage returns": "One.\r\n\r\nTwo.\r\n\r\nThree.",
}


@pytest.mark.parametrize("name", TEXTS)
def test_a_text_that_grows_is_what_it_is_at_once(open_page: Any, name: str) -> None:  # noqa: F811
    reader = open_page()
    grown, whole, is_kept, count = reader.page.evaluate(GROWS, TEXTS[name])
    assert grown.split() == whole.split()
    assert is_kept, "a complete block is not rendered again"
    assert count > 2 or name == "carriage returns"


@pytest.mark.parametrize(("width", "theme"), [("wide", "light"), ("middle", "dark"), ("phone", "light")])
def test_axe_finds_nothing_in_formulas_code_and_thoughts(open_page: Any, width: str, theme: str) -> None:  # noqa: F811
    reader = open_page(width, color_scheme=theme)
    reader.script("<think>Hm, $a$.</think>" + FORMULAS + "\n\n" + CODE)
    reader.ask("fox")
    reader.page.wait_for_selector(".hljs-comment")
    reader.page.wait_for_selector(".formula .katex")
    reader.page.locator(".thought summary").click()
    assert violations(reader) == []
    assert reader.page.evaluate("document.documentElement.scrollWidth") <= reader.page.viewport_size["width"]
