"""What the user asks for: a prompt from the command line or stdin, or a conversation from a file."""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mirrorsd.graphs import names
from mirrorsd.graphs.documents import DocumentError, parse_json, read_text
from mirrorsd.graphs.errors import ConfigError, GenerationError
from mirrorsd.graphs.whole_file import try_place

_FORM = 'expected a list like [{"role": "user", "content": "..."}]'
Messages = list[dict[str, Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """Either a prompt to go on with, or a conversation to answer."""

    prompt: str | None = None
    messages: Messages | None = None


def read_request(prompt: str | None, messages_file: Path | None, *, is_chat: bool) -> Request:
    """Find out what to generate from; without a prompt, read stdin.

    Args:
        prompt: what the user typed.
        messages_file: a conversation instead.
        is_chat: whether the prompt is a message to answer; else it is text to go on with.

    Raises:
        ConfigError: both a prompt and a file, nothing at all, or a file of another form.
    """
    if messages_file is not None:
        if prompt is not None:
            raise ConfigError("Both PROMPT and --messages are given; give one of them.")
        return Request(messages=read_messages(messages_file))
    text = checked_text(_read_stdin() if prompt is None else prompt, "The prompt")
    if not text.strip():
        raise ConfigError("The prompt is empty. Give PROMPT, --messages FILE, or pipe the prompt in.")
    return as_asked(text, is_chat=is_chat)


def as_asked(text: str, *, is_chat: bool) -> Request:
    """A text as it is, or as a message to answer."""
    return Request(messages=[{"role": "user", "content": text}]) if is_chat else Request(prompt=text)


def has_chat_template(bundle: Path) -> bool:
    """Whether the bundle's tokenizer brings a chat template."""
    return (bundle / names.TOKENIZER_FOLDER / "chat_template.jinja").is_file()


def check_writable(option: str, path: Path | None) -> None:
    """Refuse a place to write to that is none, before any work is done for it.

    Raises:
        ConfigError: its folder does not exist or takes no file of this name, or it is a folder itself.
    """
    if path is None:
        return
    if not path.parent.is_dir():
        raise ConfigError(f"{option} {path} cannot be written: there is no folder {path.parent}.")
    try:
        if path.is_dir():
            raise ConfigError(f"{option} {path} cannot be written: it is a folder; give a file's name.")
        try_place(path)
    except OSError as error:
        raise ConfigError(f"{option} {path} cannot be written: {error.strerror}. Give another place.") from error


def read_messages(path: Path) -> Messages:
    """Read a conversation: a JSON list of objects with `role`, `content` and what else the chat template reads.

    Raises:
        ConfigError: no such file, not UTF-8, not JSON, or another form.
    """
    try:
        document = parse_json(read_text(path))
    except DocumentError as error:
        raise ConfigError(f"{path} {error}; {_FORM}.") from error
    if not isinstance(document, list) or not document:
        raise ConfigError(f"{path} holds no messages; {_FORM}.")
    from mirrorsd.texts import messages as conversations

    try:
        return conversations.read_messages(document)
    except GenerationError as error:
        raise ConfigError(f"{path}: {error}") from error


def checked_text(text: str, what: str) -> str:
    """The text, unless it has bytes that are not text: Python hands those on as lone surrogates.

    Raises:
        ConfigError: it has some; `what` names it.
    """
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ConfigError(f"{what} is not text (a byte that is not UTF-8 at character {error.start}).") from error
    return text


def without_line_end(text: str) -> str:
    r"""A text without the one end of line that `echo`, or an editor of DOS, adds.

    >>> [without_line_end(text) for text in ("a\r\nb\r\n", "a\n\n", "a\r")]
    ['a\r\nb', 'a\n', 'a\r']
    """
    return text[:-2] if text.endswith("\r\n") else text.removesuffix("\n")


def _read_stdin() -> str:
    """Everything on stdin, without the end of line that `echo` adds and the mark that PowerShell begins with."""
    if sys.stdin.isatty():
        raise ConfigError("No prompt. Give PROMPT, --messages FILE, or pipe the prompt in.")
    try:
        return without_line_end(sys.stdin.read().removeprefix("\ufeff"))
    except UnicodeDecodeError as error:
        raise ConfigError(f"The prompt on stdin is not text ({error.reason} at byte {error.start}).") from error
