"""Texts in channels are shown with the marks that other models write, wherever their tokens are cut."""

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from mirrorsd.graphs import names
from mirrorsd.texts.channels import MARKS
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
    folder = tmp_path_factory.mktemp("bundle") / names.TOKENIZER_FOLDER
    folder.mkdir()
    letters = {letter: place for place, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    found = Tokenizer(models.BPE(letters, []))
    found.pre_tokenizer, found.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    found.add_special_tokens([*MARKS, RETURN])
    found.save(str(folder / "tokenizer.json"))
    (folder / names.CHAT_TEMPLATE_FILE).write_text(TEMPLATE)
    return BundleTokenizer(folder.parent)


def shown(tokenizer: BundleTokenizer, text: str, prompt: str = PROMPT) -> str:
    decoder = tokenizer.decoder(tokenizer.encode(prompt))
    pieces = [decoder.push(token) for token in tokenizer.encode(text)]
    return "".join([*pieces, decoder.finish()])


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


def test_tokens_are_shown_as_they_are_where_special_ones_are_asked_for(tokenizer: BundleTokenizer) -> None:
    decoder = tokenizer.decoder(tokenizer.encode(PROMPT), skip_special_tokens=False)
    text = THOUGHT + FINAL + "Hello!"
    assert "".join([*map(decoder.push, tokenizer.encode(text)), decoder.finish()]) == text


def test_thoughts_go_back_to_where_the_template_wants_them(tokenizer: BundleTokenizer) -> None:
    said = [
        {"role": "user", "content": "<think>x</think>"},
        {"role": "assistant", "content": "<think>\nHm.\n</think>\n\nYes."},
    ]
    expected = "user:<think>x</think>;<|channel|>analysis<|message|>Hm.<|end|>assistant:Yes.;"
    assert tokenizer.render_chat(said, add_generation_prompt=False) == expected
