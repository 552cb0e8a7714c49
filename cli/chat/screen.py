"""What is seen: an answer as it comes, on a terminal as rich markdown with a live status line, in a pipe as it is."""

import re
import sys
from collections.abc import Iterator
from time import perf_counter
from typing import Protocol

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.markdown import Markdown
from rich.segment import Segment, Segments
from rich.text import Text

from mirrorsd.cli.chat.answers import CANCELLED, Ended, Piece
from mirrorsd.cli.output.console import note, visible

_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
"""What a model's text must not tell a terminal: no colours, no titles, no cursor moves."""
_FRAME_S = 0.1
_ENDS = {"length": "cut at --max-new-tokens", "context": "the context is full", CANCELLED: "stopped"}


class Screen(Protocol):
    """Where a conversation is shown."""

    def show_answer(self, pieces: Iterator[Piece | None]) -> Ended:
        """Show an answer as it comes, and return how it ended."""

    def say(self, text: str) -> None:
        """Say something that no model said."""

    def say_error(self, text: str) -> None:
        """Say what went wrong."""


class PipeScreen:
    """Answers on stdout exactly as they are, everything else on stderr."""

    def show_answer(self, pieces: Iterator[Piece | None]) -> Ended:
        """Print the text as it comes, and a line feed."""
        ended: Ended | None = None
        for piece in pieces:
            if piece is not None:
                print(piece.text, end="", flush=True)
                ended = piece.ended or ended
        print(flush=True)
        assert ended is not None  # `hear` raises otherwise
        return ended

    def say(self, text: str) -> None:
        """On stderr."""
        note(text)

    def say_error(self, text: str) -> None:
        """On stderr."""
        note(f"error: {text}")


class TerminalScreen:
    """Markdown: paragraphs stand as soon as they are complete, the last one and the status line move."""

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console(highlight=False)

    def show_answer(self, pieces: Iterator[Piece | None]) -> Ended:
        """Show the answer, and a line with its figures."""
        rest, ended, status = "", None, Status()
        with Live(console=self._console, auto_refresh=False, transient=True) as live:
            for piece in pieces:
                if piece is not None:
                    status.count(piece)
                    rest += _CONTROL.sub("", piece.text)
                    ended = piece.ended or ended
                if status.is_due():
                    complete, rest = split_complete(rest)
                    self._print(complete)
                    live.update(Group(self._tail_of(rest), status.line()), refresh=True)
        self._print(rest)
        assert ended is not None  # `hear` raises otherwise
        self._console.print(Text(closing_line(ended), style="dim"))
        for warning in ended.warnings:
            self._console.print(Text(visible(f"warning: {warning}"), style="yellow"))
        return ended

    def say(self, text: str) -> None:
        """In a dim colour."""
        self._console.print(Text(visible(text), style="dim"))

    def say_error(self, text: str) -> None:
        """In red."""
        self._console.print(Text.assemble(("error: ", "bold red"), visible(text)))

    def _print(self, text: str) -> None:
        if text.strip():
            self._console.print(Markdown(text))
            self._console.print()

    def _tail_of(self, text: str) -> RenderableType:
        """The last lines that fit on the screen."""
        options = self._console.options
        lines = self._console.render_lines(Markdown(text), options, pad=False)
        fitting = lines[-max(options.size.height - 3, 1) :]
        return Segments([segment for line in fitting for segment in (*line, Segment.line())])


class Status:
    """The moving line under an answer: how long, how many tokens, how fast, how often the draft was right."""

    def __init__(self) -> None:
        self._started = self._shown = perf_counter()
        self._first: float | None = None
        self._num_tokens = self._num_from_windows = self._num_at_first = 0

    def count(self, piece: Piece) -> None:
        """Take a piece in."""
        self._num_tokens += piece.num_tokens
        self._num_from_windows += piece.num_from_windows
        if self._first is None and self._num_tokens:
            self._first, self._num_at_first = perf_counter(), self._num_tokens

    def is_due(self) -> bool:
        """Whether it is time for a new frame."""
        now = perf_counter()
        if now - self._shown < _FRAME_S:
            return False
        self._shown = now
        return True

    def line(self) -> Text:
        """The line."""
        now = perf_counter()
        if self._first is None:
            return Text(f"reading {now - self._started:.1f} s | Ctrl-C stops", style="dim")
        speed = (self._num_tokens - self._num_at_first) / max(now - self._first, 1e-3)
        share = self._num_from_windows / max(self._num_tokens, 1)
        return Text(
            f"{self._num_tokens} tokens, {speed:.1f} tokens/s | drafted {share:.0%} | Ctrl-C stops", style="dim"
        )


def closing_line(ended: Ended) -> str:
    """One line about a finished answer."""
    parts = [f"{ended.num_tokens} tokens", f"{ended.tokens_per_second:.1f} tokens/s"]
    if not ended.tokens_per_second:
        parts.pop()
    if ended.num_drafted:
        parts.append(f"draft right {ended.num_accepted / ended.num_drafted:.0%}")
    if ended.first_token_ms:
        parts.append(f"first after {1e-3 * ended.first_token_ms:.2f} s")
    if ended.seed is not None:
        parts.append(f"seed {ended.seed}")
    parts += [_ENDS[ended.stop_reason]] if ended.stop_reason in _ENDS else []
    return " | ".join(parts)


def split_complete(text: str) -> tuple[str, str]:
    r"""The paragraphs that are complete, and the rest; a fenced block is complete only with its closing fence.

    >>> split_complete("One.\n\nTwo")
    ('One.\n\n', 'Two')
    >>> split_complete("```\na\n\nb")
    ('', '```\na\n\nb')
    """
    place = end = 0
    fence = ""
    for line in text.splitlines(keepends=True):
        place += len(line)
        mark = line.lstrip()[:3]
        if mark in ("```", "~~~") and fence in ("", mark):
            fence = "" if fence else mark
        elif not line.strip() and not fence and line.endswith("\n"):
            end = place
    return text[:end], text[end:]


def is_interactive() -> bool:
    """Whether somebody sits at both ends."""
    return sys.stdin.isatty() and sys.stdout.isatty()
