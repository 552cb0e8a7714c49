"""A conversation: asks, answers, keeps what was said within the context."""

from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from mirrorsd.cli.chat.answers import CANCELLED, Answers, Ended
from mirrorsd.cli.chat.conversation import Conversation
from mirrorsd.cli.chat.listening import hear
from mirrorsd.cli.chat.screen import Screen, closing_line
from mirrorsd.graphs.errors import ConfigError, GenerationError, MirrorError

if TYPE_CHECKING:
    from mirrorsd.cli.input.requests import Messages
    from mirrorsd.runtime import GenerationConfig

_ANSWER_SHARE = 4
"""A question is asked only with a quarter of the context left for its answer, or `max_new_tokens` if that is less."""


class Chat:
    """One conversation with one model.

    Attributes:
        answers: who answers.
        conversation: what was said.
        config: how it is answered; the seed stays open (None) unless it was fixed.
        last: how the last answer ended, for `/stats`, `/compare` and `/trace`.
    """

    def __init__(self, answers: Answers, config: "GenerationConfig", screen: Screen, system: str = "") -> None:
        self.answers, self.config, self.screen = answers, config, screen
        self.conversation = Conversation(system)
        self.last: Ended | None = None
        self._last_sent: Messages = []
        self._is_advised = False

    @property
    def toolbar(self) -> str:
        """What stands under the line editor."""
        seed = "" if self.config.seed is None else f" | seed {self.config.seed}"
        return f"{self.answers.name} | {self.config.method}{seed} | /help | Ctrl-D ends"

    @property
    def is_stopped(self) -> bool:
        """Whether the last answer was stopped by hand."""
        return self.last is not None and self.last.stop_reason == CANCELLED

    def ask(self, text: str) -> None:
        """Ask, and show the answer.

        Raises:
            MirrorError: it cannot be answered; the question is taken back.
        """
        self.conversation.ask(text)
        try:
            self._make_room()
            sent = self.conversation.sent
            with closing(hear(self.answers, sent, self.config)) as pieces:
                self.last = self.screen.show_answer(pieces)
        except MirrorError:
            self.conversation.take_back()
            raise
        self._last_sent = sent
        self.conversation.answer(self.last.text)
        if self.answers.advice and not self._is_advised:
            self._is_advised = True
            self.screen.say(self.answers.advice)

    def retry(self) -> None:
        """Ask the last question again.

        Raises:
            GenerationError: there is none.
            MirrorError: it cannot be answered; its last answer stays.
        """
        before = replace(self.conversation, messages=[*self.conversation.messages])
        question = self.conversation.take_back()
        if question is None:
            raise GenerationError("There is no question to ask again.")
        if self.config.seed is not None or (self.last is not None and self.last.seed is None):
            self.screen.say("the same text will come again: it is greedy, or its seed is fixed (/seed random)")
        try:
            self.ask(question)
        except MirrorError:
            self.conversation = before
            raise

    def compare(self) -> None:
        """Decode the last answer again, plainly and with the same seed.

        Raises:
            GenerationError: there is no finished answer, or the texts differ.
        """
        last = self._finished()
        again = replace(self.config, method="plain", seed=last.seed)
        plain = None
        for piece in hear(self.answers, self._last_sent, again):
            plain = piece.ended if piece is not None and piece.ended else plain
        if plain is None or plain.stop_reason == CANCELLED:
            raise GenerationError("The comparison was stopped.")
        self.screen.say(f"{last.method}: {closing_line(last)}\nplain: {closing_line(plain)}")
        if plain.text != last.text:
            raise GenerationError(f"identical: no. By {last.method}: {last.text!r}, plainly: {plain.text!r}")
        times = last.tokens_per_second / plain.tokens_per_second if plain.tokens_per_second else 0.0
        self.screen.say(f"identical: yes{f' | {times:.2f} times as fast as plain' if times else ''}")

    def write_trace(self, path: Path) -> None:
        """Write what each device did in the last answer.

        Raises:
            GenerationError: there is no finished answer, or its steps are not known.
            ConfigError: the file cannot be written.
        """
        write_trace = self._finished().write_trace
        if write_trace is None:
            raise GenerationError("A server tells no steps: `mirrorsd chat BUNDLE` and `generate --trace` do.")
        try:
            write_trace(path)
        except OSError as error:
            raise ConfigError(f"{path} cannot be written: {error.strerror}.") from error

    def _finished(self) -> Ended:
        if self.last is None:
            raise GenerationError("There is no answer yet: ask something first.")
        if self.is_stopped:
            raise GenerationError("The last answer was stopped: /retry, and let it end.")
        return self.last

    def _make_room(self) -> None:
        limit = self.answers.context
        room = min(self.config.max_new_tokens, limit // _ANSWER_SHARE)
        num = self.conversation.drop_until(lambda sent: self.answers.num_tokens(sent) + room <= limit)
        if num:
            turns = "turn is" if num == 1 else f"{num} turns are"
            self.screen.say(f"the oldest {turns} left out from here on: the context holds {limit} tokens")
