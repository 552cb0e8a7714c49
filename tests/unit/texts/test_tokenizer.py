"""What is asked is checked before it reaches the tokenizer: texts, conversations, ids."""

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from mirrorsd.graphs import names
from mirrorsd.graphs.errors import BundleError, ConfigError, GenerationError
from mirrorsd.texts.tokenizer import BundleTokenizer, read_ids


@pytest.fixture
def tokenizer(tmp_path: Path) -> BundleTokenizer:
    bytes_only = Tokenizer(models.BPE({symbol: i for i, symbol in enumerate(pre_tokenizers.ByteLevel.alphabet())}, []))
    bytes_only.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bytes_only.decoder = decoders.ByteLevel()
    folder = tmp_path / names.TOKENIZER_FOLDER
    folder.mkdir()
    bytes_only.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text("{{ messages[0]['content'] }}")
    return BundleTokenizer(tmp_path)


def test_half_a_surrogate_pair_is_refused(tokenizer: BundleTokenizer) -> None:
    with pytest.raises(GenerationError, match="half a surrogate pair at character 3"):
        tokenizer.encode("fox\ud83e")


def test_half_a_surrogate_pair_in_a_chat_is_refused(tokenizer: BundleTokenizer) -> None:
    with pytest.raises(GenerationError, match="half a surrogate pair at character 0"):
        tokenizer.encode_chat([{"role": "user", "content": "\udd8a"}])
    assert len(tokenizer.encode_chat([{"role": "user", "content": "ok"}])) == 2


@pytest.mark.parametrize("prompt", [5, ["a"], b"a"])
def test_a_prompt_that_is_no_text_is_refused(tokenizer: BundleTokenizer, prompt: Any) -> None:
    with pytest.raises(GenerationError, match=r"prompt is .*; allowed: a text. Give ids as token_ids"):
        tokenizer.encode(prompt)


def test_content_in_parts_is_one_text(tokenizer: BundleTokenizer) -> None:
    parts = [{"type": "text", "text": "ab"}, {"type": "text", "text": "c"}]
    ids = tokenizer.encode_chat([{"role": "user", "content": parts}])
    assert tokenizer.decode(ids) == "ab\nc"


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ("hello", "messages is 'hello'; expected a list like"),
        (["hello"], r"messages\[0\] is 'hello'; expected"),
        ([{"content": "a"}], r"messages\[0\] has the role None"),
        ([{"role": "user"}], r"messages\[0\] has no content"),
        ([{"role": "user", "content": "a"}, {"role": "assistant", "content": None}], r"messages\[1\] has no content"),
        (
            [{"role": "user", "content": 5}],
            r"messages\[0\] has the content 5; allowed: a text, or a list of text parts",
        ),
        ([{"role": "user", "content": [{"type": "image_url"}]}], r"part 0, is .*image_url.*Bundles read text only"),
        ([{"role": "user", "content": ["a"]}], r"part 0, is 'a'; allowed"),
    ],
)
def test_messages_of_another_form_are_refused(tokenizer: BundleTokenizer, messages: Any, message: str) -> None:
    with pytest.raises(GenerationError, match=message):
        tokenizer.encode_chat(messages)


def with_template(tokenizer: BundleTokenizer, tmp_path: Path, template: str) -> BundleTokenizer:
    (tmp_path / names.TOKENIZER_FOLDER / "chat_template.jinja").write_text(template)
    return BundleTokenizer(tmp_path)


def test_an_assistant_that_calls_tools_needs_no_content(tokenizer: BundleTokenizer, tmp_path: Path) -> None:
    made = with_template(tokenizer, tmp_path, "{{ messages[0].tool_calls[0] }}")
    for lack in ({}, {"content": None}):
        ids = made.encode_chat([{"role": "assistant", "tool_calls": ["call"], **lack}])
        assert made.decode(ids) == "call"


@pytest.mark.parametrize(
    "template",
    ["{{ 'a' + 5 }}", "{{ 1 / 0 }}", "{{ [].pop() }}", "{{ messages[0].x.y }}", "{{ raise_exception('no') }}"],
)
def test_whatever_a_template_raises_is_a_refusal(tokenizer: BundleTokenizer, tmp_path: Path, template: str) -> None:
    made = with_template(tokenizer, tmp_path, template)
    with pytest.raises(GenerationError, match="The chat template refused the messages: "):
        made.encode_chat([{"role": "user", "content": "a"}])


def test_a_file_that_is_no_template_is_a_damaged_bundle(tokenizer: BundleTokenizer, tmp_path: Path) -> None:
    with pytest.raises(BundleError, match=r"chat_template.jinja cannot be read"):
        with_template(tokenizer, tmp_path, "{% if %}")


@pytest.mark.parametrize("ids", [[1, 2], (1, 2), np.array([1, 2]), [np.int32(1), 2]])
def test_ids_are_whole_numbers_in_a_row(ids: Any) -> None:
    assert read_ids(ids, 3) == [1, 2]


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ("abc", "token_ids is 'abc'; allowed: a list of whole numbers"),
        (5, "token_ids is 5"),
        ([1.7], r"token_ids\[0\] is 1.7; token_ids must lie in 0 .. 9"),
        ([1, True], r"token_ids\[1\] is True"),
        ([1, 10], r"token_ids\[1\] is 10"),
        ([-1], r"token_ids\[0\] is -1"),
        ([10**5000], r"token_ids\[0\] is a int of too many digits"),
        (np.zeros((2, 2), int), "token_ids is array"),
        (np.zeros(2), r"token_ids\[0\] is np.float64"),
    ],
)
def test_other_ids_are_refused(ids: Any, message: str) -> None:
    with pytest.raises(GenerationError, match=message):
        read_ids(ids, 10)


@pytest.fixture
def telling(tokenizer: BundleTokenizer, tmp_path: Path) -> BundleTokenizer:
    """Its template writes all that it is told."""
    template = (
        "{{ tools is none }}|{{ tools | tojson }}|{{ enable_thinking }}|"
        "{% for m in messages %}{{ m.role }}:{{ m.content }}{{ m.tool_calls | tojson if m.tool_calls }};{% endfor %}"
    )
    (tmp_path / names.TOKENIZER_FOLDER / "chat_template.jinja").write_text(template)
    return BundleTokenizer(tmp_path)


def test_the_template_is_told_of_tools_variables_and_calls(telling: BundleTokenizer) -> None:
    call = {"type": "function", "function": {"name": "look", "arguments": {"at": "sky"}}}
    messages = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "blue"},
    ]
    told = telling.decode(telling.encode_chat(messages, [{"name": "look"}], {"enable_thinking": False}))
    assert told.startswith('False|[{"name": "look"}]|False|user:Hi;assistant:[{')
    assert '"arguments": {"at": "sky"}' in told
    assert told.endswith("tool:blue;")
    bare = telling.decode(telling.encode_chat(messages[:1]))
    assert bare.startswith("True|null||")


@pytest.mark.parametrize("name", ["messages", "tools", "add_generation_prompt"])
def test_variables_that_are_set_already_are_refused(telling: BundleTokenizer, name: str) -> None:
    with pytest.raises(ConfigError, match=f"template_variables names '{name}'; allowed: any but add_generation_prompt"):
        telling.encode_chat([{"role": "user", "content": "Hi"}], variables={name: 1})


def with_a_token_too_many(tmp_path: Path) -> BundleTokenizer:
    """Its tokenizer has 256 letters and a [PAD], its model 256 ids."""
    path = tmp_path / names.TOKENIZER_FOLDER / "tokenizer.json"
    words = Tokenizer.from_file(str(path))
    words.add_special_tokens(["[PAD]"])
    words.save(str(path))
    return BundleTokenizer(tmp_path, 256)


@pytest.mark.usefixtures("tokenizer")
def test_a_token_that_the_model_does_not_have_is_refused(tmp_path: Path) -> None:
    made = with_a_token_too_many(tmp_path)
    refusal = (
        r"The text holds '\[PAD\]', which the tokenizer knows as id 256 and the model does not: its ids are 0 to 255"
    )
    with pytest.raises(GenerationError, match=refusal):
        made.encode("a[PAD]b")
    for content in ("[PAD]", [{"type": "text", "text": "[PAD]"}]):
        with pytest.raises(GenerationError, match=refusal):
            made.encode_chat([{"role": "user", "content": content}])
    assert len(made.encode("a[PAD b")) == 7


@pytest.mark.usefixtures("tokenizer")
def test_special_tokens_are_split_where_the_settings_say_so(tmp_path: Path) -> None:
    with_a_token_too_many(tmp_path)
    (tmp_path / names.TOKENIZER_FOLDER / "tokenizer_config.json").write_text('{"split_special_tokens": true}')
    made = BundleTokenizer(tmp_path, 256)
    assert len(made.encode("[PAD]")) == 5
    assert made.decode(made.encode("[PAD]")) == "[PAD]"


def test_another_process_is_given_the_same_tokenizer(tokenizer: BundleTokenizer) -> None:
    again = pickle.loads(pickle.dumps(tokenizer))
    assert again.encode("ab") == tokenizer.encode("ab")


@pytest.mark.parametrize("ids", [[-1], [1 << 32], [1.5], "ab"])
def test_what_are_no_ids_are_not_decoded(tokenizer: BundleTokenizer, ids: Any) -> None:
    with pytest.raises(GenerationError, match="ids"):
        tokenizer.decode(ids)
