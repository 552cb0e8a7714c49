"""What the user asks for: a prompt from the command line or stdin, or a conversation from a file."""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mirrorsd.graphs.documents import DocumentError, parse_json, read_text
from mirrorsd.graphs.errors import ConfigError, GenerationError

_FORM = 'expected a list like [{"role": "user", "content": "..."}]'
Messages = list[dict[str, Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """Either a prompt to go on with, or a conversation to answer."""

    prompt: str | None = None
    messages: Messages | None = None


def read_request(prompt: str | None, messages_file: Path | None, *, is_chat: bool) -> Request:
    """Find out what to generate from; without a prompt, read stdin.

    Raises:
        ConfigError: both a prompt and a file, neither of them on a terminal, or a file of another form.
    """
    if messages_file is not None:
        if prompt is not None:
            raise ConfigError("Both PROMPT and --messages are given; give one of them.")
        return Request(messages=read_messages(messages_file))
    text = _checked_text(_read_stdin() if prompt is None else prompt)
    if is_chat:
        return Request(messages=[{"role": "user", "content": text}])
    return Request(prompt=text)


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
    from mirrorsd.runtime.text import tokenizer as tokenization

    try:
        return tokenization.read_messages(document)
    except GenerationError as error:
        raise ConfigError(f"{path}: {error}") from error


def _read_stdin() -> str:
    """Everything on stdin, without the newline that `echo` adds."""
    if sys.stdin.isatty():
        raise ConfigError("No prompt. Give PROMPT, --messages FILE, or pipe the prompt in.")
    try:
        return sys.stdin.read().removesuffix("\n")
    except UnicodeDecodeError as error:
        raise ConfigError(f"The prompt on stdin is not text ({error.reason} at byte {error.start}).") from error


def _checked_text(text: str) -> str:
    """Refuse bytes that are not text: Python hands those on as lone surrogates."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ConfigError(f"The prompt is not text (a byte that is not UTF-8 at character {error.start}).") from error
    return text
