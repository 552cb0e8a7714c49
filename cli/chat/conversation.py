"""The conversation itself: what was said, what of it the model still reads, and its file."""

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mirrorsd.cli.input.requests import Messages, read_messages
from mirrorsd.graphs.errors import ConfigError
from mirrorsd.graphs.whole_file import write_whole


@dataclass(slots=True)
class Conversation:
    """Questions and answers in turn.

    Attributes:
        system: what the model is told before everything; empty for nothing.
        messages: what was said since, the user first.
        num_dropped: how many of the oldest messages the model no longer reads.
    """

    system: str = ""
    messages: Messages = field(default_factory=list)
    num_dropped: int = 0

    @property
    def sent(self) -> Messages:
        """What the model reads."""
        return [*self._system_message(), *self.messages[self.num_dropped :]]

    def ask(self, text: str) -> None:
        """Add a question."""
        self.messages.append({"role": "user", "content": text})

    def answer(self, text: str) -> None:
        """Add an answer."""
        self.messages.append({"role": "assistant", "content": text})

    def take_back(self) -> str | None:
        """Take the last question and its answer back; the question, or None where there is none."""
        while self.messages:
            message = self.messages.pop()
            if message["role"] == "user":
                self.num_dropped = min(self.num_dropped, len(self.messages))
                return _text_of(message["content"])
        return None

    def drop_until(self, fits: Callable[[Messages], bool]) -> int:
        """Leave the oldest turns out until the rest fits, or only the last question is left.

        Returns:
            How many turns (questions with their answers) were left out now.
        """
        num_turns = 0
        while not fits(self.sent):
            later = [
                place
                for place in range(self.num_dropped + 1, len(self.messages))
                if self.messages[place]["role"] == "user"
            ]
            if not later:
                break
            self.num_dropped = later[0]
            num_turns += 1
        return num_turns

    def save(self, path: Path) -> None:
        """Write everything that was said as a JSON list of messages, which `generate --messages` reads, too.

        Raises:
            ConfigError: the file cannot be written.
        """
        said = json.dumps([*self._system_message(), *self.messages], ensure_ascii=False, indent=1)
        try:
            write_whole(path, f"{said}\n".encode())
        except OSError as error:
            raise ConfigError(f"{path} cannot be written: {error.strerror}.") from error

    @classmethod
    def load(cls, path: Path) -> "Conversation":
        """Read what `save` wrote, or any list of messages.

        Raises:
            ConfigError: it is none.
        """
        messages = read_messages(path)
        system = _text_of(messages.pop(0)["content"]) if messages[0]["role"] == "system" else ""
        return cls(system, messages)

    def _system_message(self) -> Messages:
        return [{"role": "system", "content": self.system}] if self.system else []


def _text_of(content: Any) -> str:
    from mirrorsd.texts.messages import text_of

    return text_of(content)
