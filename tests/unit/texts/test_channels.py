"""Texts in channels are shown with the marks that other models write, wherever their tokens are cut."""

from collections.abc import Sequence
from typing import Any

import pytest
from byte_tokenizer import byte_tokenizer

from mirrorsd.texts.channels import MARKS
from mirrorsd.texts.config import GenerationConfig
from mirrorsd.texts.shown_text import StopWatch
from mirrorsd.texts.tokenizer import BundleTokenizer

RETURN = "<|return|>"
PROMPT = "<|start|>user<|message|>Hi<|end|><|start|>assistant"
TEMPLATE = (
    "{% for m in messages %}{% if m.thinking is defined %}<|channel|>analysis<|message|>{{ m.thinking }}<|end|>"
    "{% endif %}{{ m.role }}:{{ m.content }};{% endfor %}"
)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> BundleTokenizer:
    """A tokenizer of single bytes and the marks."""
    return byte_tokenizer(tmp_path_factory.mktemp("bundle"), [*MARKS, RETURN], TEMPLATE)


def shown(tokenizer: BundleTokenizer, text: str, prompt: str = PROMPT) -> str:
    return watched(tokenizer, tokenizer.encode(text), tokenizer.encode(prompt))[0]


def watched(
    tokenizer: BundleTokenizer, ids: Sequence[int], prompt: Sequence[int], *stops: str
) -> tuple[str, str | None]:
    """What is shown of a text, and why it ends before the limit, if it does."""
    watch = StopWatch(GenerationConfig(stop_strings=stops), (), tokenizer.decoder(prompt))
    found = ""
    for token in ids:
        piece = watch.push(token)
        found += piece.text
        if piece.stop_reason:
            return found, piece.stop_reason
    return found + watch.finish("length").text, None


THOUGHT = "<|channel|>analysis<|message|>Greet, é.<|end|><|start|>assistant"
FINAL = "<|channel|>final<|message|>"
CALLED = '<tool_call>\n{"name": "look", "arguments": {"at": "x"}}\n</tool_call>'


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (THOUGHT + FINAL + "Hello!", "<think>\nGreet, é.\n</think>\n\nHello!"),
        (FINAL + "Hello!", "Hello!"),
        (THOUGHT + THOUGHT + FINAL + "Hello!", "<think>\nGreet, é.\nGreet, é.\n</think>\n\nHello!"),
        (THOUGHT.partition("<|end|>")[0], "<think>\nGreet, é."),
        (
            "<|channel|>commentary to=functions.look <|constrain|>json<|message|>" + '{"at": "x"}',
            CALLED,
        ),
        (' to=functions.look<|channel|>commentary json<|message|>{"at": "x"}<|call|>', CALLED),
        (
            THOUGHT + '<|channel|>commentary to=functions.look <|constrain|>json<|message|>{"at": "x"}',
            "<think>\nGreet, é.\n</think>\n\n" + CALLED,
        ),
        (
            "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant"
            ' to=functions.look<|channel|>commentary json<|message|>{"at',
            'I look.<tool_call>\n{"name": "look", "arguments": {"at',
        ),
        ('{"a": 1}', '{"a": 1}'),
        ("no header", "no header"),
        ("Well, <|channel|>final<|message|>so.", "Well, so."),
    ],
)
def test_channels_are_told_in_usual_marks(tokenizer: BundleTokenizer, text: str, expected: str) -> None:
    assert shown(tokenizer, text) == expected


def test_a_text_that_goes_on_within_an_answer_has_no_header(tokenizer: BundleTokenizer) -> None:
    assert shown(tokenizer, " world", PROMPT + FINAL + "Hello") == " world"
    assert shown(tokenizer, "final<|message|>Hello", PROMPT + "<|channel|>") == "Hello"
    assert shown(tokenizer, "a text", "a prompt") == "a text"


@pytest.mark.parametrize(
    ("first", "rest", "whole"),
    [
        (
            THOUGHT.removesuffix("<|end|><|start|>assistant"),
            "<|end|><|start|>assistant" + FINAL + "Yes.",
            "<think>\nGreet, é.\n</think>\n\nYes.",
        ),
        ('<|channel|>commentary to=functions.look <|constrain|>json<|message|>{"at": "x"}', "", CALLED),
    ],
)
def test_a_text_may_go_on_from_anywhere_in_a_message(
    tokenizer: BundleTokenizer, first: str, rest: str, whole: str
) -> None:
    """Also within a header, and within thoughts."""
    ids, prompt = tokenizer.encode(first), tokenizer.encode(PROMPT)
    for count in range(len(ids)):
        decoder = tokenizer.decoder(prompt)
        seen = "".join(decoder.push(token) + decoder.mark for token in ids[:count])
        behind = [*ids[count:], *(tokenizer.encode(rest) if rest else ())]
        assert seen + watched(tokenizer, behind, [*prompt, *ids[:count]])[0] == whole, count


def test_stop_strings_are_the_models_own_words(tokenizer: BundleTokenizer) -> None:
    ids, prompt = tokenizer.encode(THOUGHT + FINAL + "One.\n\nTwo."), tokenizer.encode(PROMPT)
    expected = "<think>\nGreet, é.\n</think>\n\nOne."
    assert watched(tokenizer, ids, prompt, "\n\n") == (expected, "stop_string")
    assert watched(tokenizer, ids, prompt, "think") == (expected + "\n\nTwo.", None)
    assert watched(tokenizer, ids, prompt, "Greet") == ("<think>\n", "stop_string")


def test_a_call_that_is_nested_too_deep_is_text(tokenizer: BundleTokenizer) -> None:
    deep = "<|channel|>commentary to=functions.f<|message|>" + "[" * 60_000
    assert shown(tokenizer, deep).endswith("[[")


def test_tokens_are_shown_as_they_are_where_special_ones_are_asked_for(tokenizer: BundleTokenizer) -> None:
    decoder = tokenizer.decoder(tokenizer.encode(PROMPT), skip_special_tokens=False)
    text = THOUGHT + FINAL + "Hello!"
    assert "".join([*map(decoder.push, tokenizer.encode(text)), decoder.finish()]) == text


def test_thoughts_go_back_to_where_the_template_wants_them(tokenizer: BundleTokenizer) -> None:
    said: list[dict[str, Any]] = [
        {"role": "user", "content": "<think>x</think>"},
        {"role": "assistant", "content": "<think>\nHm.\n</think>\n\nYes."},
    ]
    expected = "user:<think>x</think>;<|channel|>analysis<|message|>Hm.<|end|>assistant:Yes.;"
    assert tokenizer.render_chat(said, add_generation_prompt=False) == expected
    said[1]["content"] = [{"type": "text", "text": said[1]["content"]}]
    assert tokenizer.render_chat(said, add_generation_prompt=False) == expected


def test_thoughts_that_were_cut_go_on_in_their_channel(tokenizer: BundleTokenizer) -> None:
    said = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "<think>\nHm"}]
    found = tokenizer.render_chat(said, continue_final_message=True)
    assert found == "user:a;<|channel|>analysis<|message|>Hm"
