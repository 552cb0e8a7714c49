"""Where questions and commands come from: a line editor on a terminal, plain lines in a pipe."""

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from mirrorsd.cli.chat.listening import unseen_keys
from mirrorsd.cli.input.requests import without_line_end
from mirrorsd.cli.output.console import note
from mirrorsd.graphs.errors import ConfigError

if TYPE_CHECKING:
    from prompt_toolkit import PromptSession


def piped_lines() -> Iterator[str]:
    """Every line of stdin.

    Raises:
        ConfigError: bytes that are no text.
    """
    try:
        for line in sys.stdin:
            yield without_line_end(line)
    except UnicodeDecodeError as error:
        raise ConfigError(f"stdin is not text ({error.reason} at byte {error.start}).") from error


def edited_lines(words: Sequence[str], toolbar: Callable[[], str]) -> Iterator[str]:
    """Lines from an editor with history and completion; Ctrl-C empties the line, Ctrl-D ends.

    Args:
        words: what is completed at the beginning of a line.
        toolbar: says what stands under the line.

    Raises:
        ConfigError: prompt_toolkit is not installed.
    """
    session = _editor(words, toolbar)
    with unseen_keys():
        while True:
            try:
                line = session.prompt("> ")
            except KeyboardInterrupt:
                continue
            except EOFError:
                return
            yield line


def _editor(words: Sequence[str], toolbar: Callable[[], str]) -> "PromptSession[str]":
    try:
        from prompt_toolkit import PromptSession
        from prompt_toolkit.auto_suggest import AutoSuggestFromHistory
        from prompt_toolkit.completion import WordCompleter
        from prompt_toolkit.history import FileHistory, InMemoryHistory
        from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
    except ImportError as error:
        raise ConfigError(
            "A conversation on a terminal needs prompt_toolkit: pip install prompt_toolkit. In a pipe it does not."
        ) from error

    keys = KeyBindings()

    @keys.add("escape", "enter")
    def _(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    class Kept(FileHistory):
        def store_string(self, string: str) -> None:
            """Write it behind the others; on a disk that is full it stays known until the end."""
            with suppress(OSError):
                super().store_string(string)

    try:
        history: FileHistory | InMemoryHistory = Kept(str(history_file()))
    except ConfigError as error:
        note(f"warning: {error}", "yellow")
        history = InMemoryHistory()
    return PromptSession(
        history=history,
        auto_suggest=AutoSuggestFromHistory(),
        completer=WordCompleter(list(words), sentence=True),
        complete_while_typing=False,
        key_bindings=keys,
        bottom_toolbar=toolbar,
    )


def history_file() -> Path:
    """The file with what was typed, for this user's eyes only.

    Raises:
        ConfigError: it cannot be made.
    """
    path = Path(typer.get_app_dir("mirrorsd")) / "chat_history"
    if not path.is_absolute():  # of a user without a home: a folder called ~ where he is
        raise ConfigError("There is no folder for what is typed, which is not kept: set XDG_CONFIG_HOME to one.")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        os.close(os.open(path, os.O_CREAT | os.O_APPEND, 0o600))
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be written ({error.strerror}): what is typed cannot be kept there."
        ) from error
    return path
