"""Hear an answer out on a thread of its own, so that Ctrl-C ends the answer and nothing else."""

import queue
import signal
import sys
import threading
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING

from mirrorsd.cli.chat.answers import Answers, Ended, Piece
from mirrorsd.graphs.errors import GenerationError, MirrorError

if TYPE_CHECKING:
    from mirrorsd.cli.input.requests import Messages
    from mirrorsd.runtime import GenerationConfig

_TICK_S = 0.1
Heard = Piece | MirrorError | None


def hear(answers: Answers, messages: "Messages", config: "GenerationConfig") -> Generator[Piece | None, None, None]:
    """The pieces of an answer as they come, and None a few times a second while nothing comes.

    Who stops reading stops the answer.

    Raises:
        MirrorError: it cannot be answered.
    """
    heard: queue.SimpleQueue[Heard] = queue.SimpleQueue()
    thread = threading.Thread(target=_listen, args=(answers, messages, config, heard), name="answer")
    with interrupts() as is_interrupted:
        thread.start()
        ended: Ended | None = None
        is_over = False
        try:
            while not is_over:
                if is_interrupted.is_set():  # again and again: the answer may not have begun yet
                    answers.cancel()
                try:
                    piece = heard.get(timeout=_TICK_S)
                except queue.Empty:
                    yield None
                    continue
                is_over = piece is None or isinstance(piece, MirrorError)
                if isinstance(piece, MirrorError):
                    raise piece
                if piece is not None:
                    ended = piece.ended or ended
                    yield piece
        finally:
            if not is_over:
                answers.cancel()
            thread.join()
    if ended is None:
        raise GenerationError("The answer broke off before its end: the thread that read it failed.")


def _listen(
    answers: Answers, messages: "Messages", config: "GenerationConfig", heard: "queue.SimpleQueue[Heard]"
) -> None:
    try:
        for piece in answers.stream(messages, config):
            heard.put(piece)
    except MirrorError as error:
        heard.put(error)
    finally:
        heard.put(None)


@contextmanager
def interrupts() -> Iterator[threading.Event]:
    """Within it, Ctrl-C sets the event instead of raising KeyboardInterrupt; only on the main thread."""
    is_interrupted = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield is_interrupted
        return

    def note_it(_: int, __: FrameType | None) -> None:
        is_interrupted.set()

    before = signal.signal(signal.SIGINT, note_it)
    try:
        yield is_interrupted
    finally:
        signal.signal(signal.SIGINT, before)


@contextmanager
def unseen_keys() -> Iterator[None]:
    """Within it, what is typed is not shown, and waits for whoever reads the terminal next; Ctrl-C still interrupts.

    Windows does so by itself. Where stdin is no terminal, nothing changes.
    """
    try:
        import termios

        before = termios.tcgetattr(sys.stdin.fileno())
    except (ImportError, OSError, ValueError):  # a stdin of a test, or one that is closed, has no number
        yield
        return
    except termios.error:
        yield
        return
    unseen = [*before]
    unseen[3] &= ~(termios.ECHO | termios.ICANON)
    termios.tcsetattr(sys.stdin.fileno(), termios.TCSANOW, unseen)
    try:
        yield
    finally:
        termios.tcsetattr(sys.stdin.fileno(), termios.TCSANOW, before)
