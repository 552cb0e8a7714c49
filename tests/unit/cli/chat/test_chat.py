"""Conversations with somebody who answers from a script."""

import _thread
import io
import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from prompt_toolkit.application import create_app_session
from prompt_toolkit.input import create_pipe_input
from prompt_toolkit.output import DummyOutput
from rich.console import Console

from mirrorsd.cli.chat import lines
from mirrorsd.cli.chat.answers import CANCELLED, Ended, Piece
from mirrorsd.cli.chat.chat import Chat
from mirrorsd.cli.chat.conversation import Conversation
from mirrorsd.cli.chat.listening import hear
from mirrorsd.cli.chat.screen import PipeScreen, TerminalScreen, split_complete
from mirrorsd.cli.chat.slash import converse
from mirrorsd.cli.output.console import as_word
from mirrorsd.graphs.errors import Cancelled, ConfigError, GenerationError
from mirrorsd.runtime import GenerationConfig


class Scripted:
    """Says back what it is told; a word is a token, and every second one was drafted."""

    name, context, advice = "scripted", 40, ""

    def __init__(self, say: Callable[[str, GenerationConfig], str] = lambda text, config: f"you said {text}") -> None:
        self._say = say
        self._is_cancelled = False
        self.write_trace: Callable[[Path], object] | None = lambda path: path.write_text("trace", encoding="utf-8")
        self.asked: list[tuple[Any, GenerationConfig]] = []

    def check_method(self, method: str) -> None:
        if method == "eagle3":
            raise ConfigError("this bundle has no such head")

    def num_tokens(self, messages: Any) -> int:
        return sum(len(message["content"].split()) for message in messages)

    def stream(self, messages: Any, config: GenerationConfig) -> Iterator[Piece]:
        self._is_cancelled = False
        self.asked.append((list(messages), config))
        text = self._say(messages[-1]["content"], config)
        words = text.split(" ")
        said = ""
        for place, word in enumerate(words):
            said += word if place == 0 else f" {word}"
            yield Piece(word if place == 0 else f" {word}", 1, place % 2)
            while word == "wait" and not self._is_cancelled:
                time.sleep(0.01)
            if self._is_cancelled:
                break
        reason = CANCELLED if self._is_cancelled else "eos"
        seed = config.seed if config.temperature else None
        ended = Ended(text=said, method=config.method, seed=seed, stop_reason=reason, num_tokens=len(words))
        yield Piece("", 0, 0, replace(ended, write_trace=self.write_trace))

    def cancel(self) -> None:
        self._is_cancelled = True


def talk(answers: Scripted, *lines: str, is_patient: bool = False, **settings: Any) -> Chat:
    chat = Chat(answers, GenerationConfig(**settings), PipeScreen())
    converse(chat, lines, is_patient=is_patient)
    return chat


def test_answers_go_to_stdout_as_they_are_and_all_else_to_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    chat = talk(Scripted(), "good *morning*", "/stats", "", "and you")
    out, err = capsys.readouterr()
    assert out == "you said good *morning*\nyou said and you\n"
    assert "tokens read" in err
    assert [message["role"] for message in chat.conversation.messages] == ["user", "assistant"] * 2


def test_the_model_reads_the_system_prompt_and_all_that_was_said() -> None:
    answers = Scripted()
    talk(answers, "/system Be brief.", "one", "two", "/system -", "three")
    assert [message["content"] for message in answers.asked[1][0]] == ["Be brief.", "one", "you said one", "two"]
    assert answers.asked[2][0][0]["role"] == "user"


def test_a_full_context_drops_the_oldest_turns_and_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    answers = Scripted()
    chat = talk(answers, "a b c d e f", "g h i j k l", "m n o p q r", "s t u v w x")
    sent = answers.asked[-1][0]
    assert answers.num_tokens(sent) + 10 <= answers.context
    assert (sent[0]["content"], sent[-1]["content"]) == ("m n o p q r", "s t u v w x")
    assert "the oldest turn is left out from here on: the context holds 40 tokens" in capsys.readouterr().err
    assert len(chat.conversation.messages) == 8


def test_retry_asks_again_and_says_where_that_changes_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    answers = Scripted()
    chat = talk(answers, "hi", "/retry")
    assert answers.asked[0][0] == answers.asked[1][0]
    assert len(chat.conversation.messages) == 2
    assert "the same text will come again" in capsys.readouterr().err


def test_compare_asks_plainly_with_the_same_seed() -> None:
    answers = Scripted()
    talk(answers, "hi", "/compare", method="mirror", temperature=1.0, seed=7)
    assert [(config.method, config.seed) for _, config in answers.asked] == [("mirror", 7), ("plain", 7)]
    assert answers.asked[0][0] == answers.asked[1][0]


def test_a_comparison_that_finds_a_difference_fails() -> None:
    with pytest.raises(GenerationError, match=r"identical: no\. By auto: 'auto', plainly: 'plain'"):
        talk(Scripted(lambda text, config: config.method), "hi", "/compare")


def test_method_and_seed_hold_for_what_follows() -> None:
    answers = Scripted()
    talk(answers, "/method serial", "/seed 3", "hi", "/seed random", "ho", temperature=1.0)
    assert [(config.method, config.seed) for _, config in answers.asked] == [("serial", 3), ("serial", None)]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("/sing", "There is no /sing; /help lists the commands"),
        ("/method fast", "Unknown method 'fast'"),
        ("/method", "/method needs NAME"),
        ("/method eagle3", "this bundle has no such head"),
        ("/seed x", "allowed: a whole number, or random"),
        ("caf\udce9", "The line is not text"),
        ("/system caf\udce9", "The line is not text"),
        ("/new now", "/new takes nothing; found 'now'"),
        ("/load nowhere.json", "nowhere.json"),
        ("/load ~nobody-of-this-name/a", "knows no home of that user"),
        ("/save ~nobody-of-this-name/a", "knows no home of that user"),
        ("/save no/such/folder/file", "cannot be written"),
        ("/stats", "There is no answer yet"),
        ("/retry", "There is no question to ask again"),
        ("/trace t.json", "There is no answer yet"),
    ],
)
def test_a_command_that_cannot_be_obeyed_says_why(line: str, message: str) -> None:
    with pytest.raises((ConfigError, GenerationError), match=message):
        talk(Scripted(), line)


def test_on_a_terminal_an_error_ends_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    answers = Scripted()
    talk(answers, "/sing", "hi", "/quit", "never", is_patient=True)
    assert [messages[-1]["content"] for messages, _ in answers.asked] == ["hi"]
    assert "error: There is no /sing" in capsys.readouterr().err


def test_errors_name_what_was_typed(capsys: pytest.CaptureFixture[str]) -> None:
    chat = talk(Scripted(), "/seed -5", is_patient=True)
    assert "error: --seed is -5;" in capsys.readouterr().err
    assert chat.config.seed is None


def test_a_trace_is_that_of_generate_and_its_file_is_named_as_a_shell_wants_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "tt r.json"
    talk(Scripted(), "hi", f"/trace {path}")
    assert path.read_text(encoding="utf-8") == "trace"
    assert f"`mirrorsd trace {as_word(path)} -o trace.html`" in capsys.readouterr().err


def test_who_knows_no_steps_writes_no_trace(tmp_path: Path) -> None:
    answers = Scripted()
    answers.write_trace = None
    with pytest.raises(GenerationError, match=r"A server tells no steps: `mirrorsd chat BUNDLE`"):
        talk(answers, "hi", f"/trace {tmp_path / 't.json'}")
    assert not any(tmp_path.iterdir())


def test_a_conversation_is_saved_and_goes_on_from_its_file(tmp_path: Path) -> None:
    path = tmp_path / "talk.json"
    answers = Scripted()
    talk(answers, "/system Be brief.", "one", f"/save {path}", "/new", f"/load {path}", "two")
    assert [message["content"] for message in answers.asked[-1][0]] == ["Be brief.", "one", "you said one", "two"]
    assert json.loads(path.read_text(encoding="utf-8"))[0] == {"role": "system", "content": "Be brief."}


def test_a_question_that_fails_is_taken_back() -> None:
    def refuse(text: str, config: GenerationConfig) -> str:
        raise GenerationError("no")

    chat = talk(Scripted(refuse), "hi", is_patient=True)
    assert chat.conversation.messages == []


def test_a_question_that_fails_costs_neither_the_last_answer_nor_its_comparison() -> None:
    left = ["one", None, None, "one"]

    def say(text: str, config: GenerationConfig) -> str:
        found = left.pop(0)
        if found is None:
            raise GenerationError("no")
        return found

    answers = Scripted(say)
    chat = talk(answers, "hi", "/retry", "ho", "/compare", is_patient=True)
    assert [message["content"] for message in chat.conversation.messages] == ["hi", "one"]
    assert [messages[-1]["content"] for messages, _ in answers.asked] == ["hi", "hi", "ho", "hi"]


def interrupt(_: str, __: GenerationConfig) -> str:
    _thread.interrupt_main()  # what a Ctrl-C does to Python, without the system's part in it
    return "some wait more"


def test_ctrl_c_stops_the_answer_only(capsys: pytest.CaptureFixture[str]) -> None:
    chat = talk(Scripted(interrupt), "hi", "/compare", "/system none", is_patient=True)
    assert chat.last is not None
    assert chat.last.stop_reason == CANCELLED
    assert chat.conversation.messages[-1]["content"] == chat.last.text == "some wait"[: len(chat.last.text)]
    assert "/retry, and let it end" in capsys.readouterr().err
    assert chat.conversation.system == "none"


def test_ctrl_c_in_a_pipe_ends_the_program() -> None:
    with pytest.raises(Cancelled):
        talk(Scripted(interrupt), "hi", "ho")


def test_a_terminal_shows_markdown_and_the_figures_and_no_control_characters() -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=60, height=20)
    hostile = "# Title\n\nsome **bold** \x1b]0;gotcha\x07 text\n\n```python\nprint(1)\n```\nend"
    chat = Chat(Scripted(lambda text, config: hostile), GenerationConfig(), TerminalScreen(console))
    converse(chat, ["hi"], is_patient=True)
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    assert "**" not in shown
    assert "\x1b]0;" not in shown
    assert "bold" in shown
    assert chat.conversation.messages[-1]["content"] == hostile


def test_names_and_errors_steer_no_terminal() -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=60, height=20)
    screen = TerminalScreen(console)
    screen.say("model\x1b]0;gotcha\x07")
    screen.say_error("template\x1b[2J")
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    assert "\x1b]0;" not in shown and "\x1b[2J" not in shown


def test_who_stops_reading_stops_the_answer() -> None:
    """As `| head -1` does: nobody waits for what the server would still say."""
    stopped = threading.Event()

    class Endless(Scripted):
        def stream(self, messages: Any, config: GenerationConfig) -> Iterator[Piece]:
            while not stopped.is_set():
                yield Piece("word ", 1, 0, None)

        def cancel(self) -> None:
            stopped.set()

    with closing(hear(Endless(), [], GenerationConfig())) as pieces:
        next(pieces)
    assert stopped.is_set()
    assert not any(thread.name == "answer" for thread in threading.enumerate())


def test_paragraphs_are_complete_at_a_blank_line_outside_fences() -> None:
    assert split_complete("a\n\n```\nb\n\nc\n```\n\nd") == ("a\n\n```\nb\n\nc\n```\n\n", "d")
    assert split_complete("a\n\n~~~\n```\n\nb") == ("a\n\n", "~~~\n```\n\nb")
    assert split_complete("no end") == ("", "no end")


def test_taking_back_a_turn_keeps_those_before_it() -> None:
    talked = Conversation()
    for number in range(3):
        talked.ask(f"q{number}")
        talked.answer(f"a{number}")
    assert talked.take_back() == "q2"
    assert [message["content"] for message in talked.messages] == ["q0", "a0", "q1", "a1"]


def test_a_history_that_cannot_be_kept_keeps_nobody_from_chatting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setattr(lines.typer, "get_app_dir", lambda _: str(tmp_path / "file" / "mirrorsd"))
    with create_pipe_input() as keys, create_app_session(input=keys, output=DummyOutput()):
        keys.send_text("hello\r")
        assert next(lines.edited_lines(["/help"], lambda: "")) == "hello"
    assert "what is typed cannot be kept there" in capsys.readouterr().err


def test_a_user_without_a_home_gets_no_folder_of_that_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lines.typer, "get_app_dir", lambda _: "~/.config/mirrorsd")
    with pytest.raises(ConfigError, match="no folder for what is typed, which is not kept: set XDG_CONFIG_HOME"):
        lines.history_file()


def test_a_history_that_takes_no_more_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lines.typer, "get_app_dir", lambda _: str(tmp_path))
    with create_pipe_input() as keys, create_app_session(input=keys, output=DummyOutput()):
        history = lines._editor(["/help"], lambda: "").history
        (tmp_path / "chat_history").unlink()
        (tmp_path / "chat_history").mkdir()
        history.append_string("hello")
        assert history.get_strings() == ["hello"]
