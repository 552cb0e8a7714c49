"""Prompts from the command line and from stdin, conversations from files."""

import io
from pathlib import Path

import pytest

from mirrorsd.cli.input.prompt_file import read_questions
from mirrorsd.cli.input.requests import read_messages, read_request
from mirrorsd.graphs.errors import ConfigError


def test_prompt_stays_as_it_is() -> None:
    request = read_request("Once", None, is_chat=False)
    assert (request.prompt, request.messages) == ("Once", None)


def test_chat_makes_a_message() -> None:
    request = read_request("Hello", None, is_chat=True)
    assert (request.prompt, request.messages) == (None, [{"role": "user", "content": "Hello"}])


def test_stdin_is_read_where_there_is_no_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("from a pipe\n"))
    assert read_request(None, None, is_chat=False).prompt == "from a pipe"


def test_a_byte_order_mark_is_no_text(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("\ufefffrom PowerShell\n"))
    assert read_request(None, None, is_chat=False).prompt == "from PowerShell"
    path = tmp_path / "messages.json"
    path.write_text('[{"role": "user", "content": "Hi"}]', encoding="utf-8-sig")
    assert read_messages(path) == [{"role": "user", "content": "Hi"}]
    questions = tmp_path / "questions.jsonl"
    questions.write_text('{"question_id": 1, "category": "a", "turns": ["b"]}\n', encoding="utf-8-sig")
    assert read_questions(questions)[0].turns == ("b",)


def test_a_terminal_without_prompt_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = io.StringIO()
    monkeypatch.setattr(terminal, "isatty", lambda: True)
    monkeypatch.setattr("sys.stdin", terminal)
    with pytest.raises(ConfigError, match=r"No prompt[.] Give PROMPT, --messages FILE, or pipe"):
        read_request(None, None, is_chat=False)


def test_prompt_and_messages_exclude_each_other(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="give one of them"):
        read_request("a", tmp_path / "m.json", is_chat=False)


def test_reads_a_conversation(tmp_path: Path) -> None:
    path = tmp_path / "messages.json"
    path.write_text('[{"role": "user", "content": "Hi"}]', encoding="utf-8")
    assert read_request(None, path, is_chat=False).messages == [{"role": "user", "content": "Hi"}]


def test_a_conversation_may_hold_parts_tools_and_other_keys(tmp_path: Path) -> None:
    path = tmp_path / "messages.json"
    path.write_text(
        '[{"role": "user", "content": [{"type": "text", "text": "Hi"}]},'
        ' {"role": "assistant", "content": null, "tool_calls": [1]}, {"role": "tool", "content": "7", "name": "sum"}]',
        encoding="utf-8",
    )
    assert read_messages(path) == [
        {"role": "user", "content": [{"type": "text", "text": "Hi"}]},
        {"role": "assistant", "content": None, "tool_calls": [1]},
        {"role": "tool", "content": "7", "name": "sum"},
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is not valid JSON"),
        ("{}", "holds no messages"),
        ("[]", "holds no messages"),
        ('[{"role": "user"}]', r"messages.json: messages\[0\] has no content"),
        ('["a"]', r"messages.json: messages\[0\] is 'a'; expected a list like"),
        ('[{"role": "user", "content": 1}]', r"messages\[0\] has the content 1; allowed: a text"),
    ],
)
def test_bad_conversation(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "messages.json"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match=message):
        read_messages(path)


def test_missing_and_binary_conversation(tmp_path: Path) -> None:
    path = tmp_path / "messages.json"
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        read_messages(path)
    path.write_bytes(b"\xff")
    with pytest.raises(ConfigError, match="is not UTF-8"):
        read_messages(path)


def test_bytes_that_are_not_text() -> None:
    with pytest.raises(ConfigError, match=r"is not text .* at character 3"):
        read_request("abc\udcff", None, is_chat=False)
