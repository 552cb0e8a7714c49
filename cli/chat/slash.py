"""The lines of a conversation: questions, and commands, which is everything that begins with a slash."""

from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from mirrorsd.cli.chat.chat import Chat
from mirrorsd.cli.chat.conversation import Conversation
from mirrorsd.cli.chat.screen import closing_line
from mirrorsd.cli.input.options import checked_method
from mirrorsd.cli.input.requests import checked_text
from mirrorsd.cli.output.console import as_word
from mirrorsd.cli.output.failures import as_typed
from mirrorsd.graphs.errors import Cancelled, ConfigError, GenerationError, MirrorError


class Command(NamedTuple):
    """What it takes, what it does in words, and who does it; `argument` is empty where it takes nothing."""

    argument: str
    meaning: str
    do: Callable[[Chat, str], None]


def converse(chat: Chat, lines: Iterable[str], *, is_patient: bool) -> None:
    """Take line after line, questions and commands, until they end or one says so.

    Args:
        chat: the conversation.
        lines: what was typed.
        is_patient: go on after an error; otherwise it is raised, and so is Ctrl-C.

    Raises:
        MirrorError: one went wrong, and nobody is there to read it.
    """
    for line in lines:
        try:
            checked_text(line, "The line")
            if line.startswith("/"):
                if not obey(chat, line):
                    return
            elif line.strip():
                chat.ask(line)
                if not is_patient and chat.is_stopped:
                    raise Cancelled("Stopped.")
        except MirrorError as error:
            if not is_patient:
                raise
            chat.screen.say_error(as_typed(str(error)))


def obey(chat: Chat, line: str) -> bool:
    """Do what a line says; False where it says to end.

    Raises:
        ConfigError: no such command, or not what it takes.
        MirrorError: it cannot be done.
    """
    name, _, argument = line[1:].partition(" ")
    argument = argument.strip()
    if name in ("quit", "exit"):
        return False
    if name not in COMMANDS:
        raise ConfigError(f"There is no /{name}; /help lists the commands.")
    command = COMMANDS[name]
    if argument and not command.argument:
        raise ConfigError(f"/{name} takes nothing; found {argument!r}.")
    if not argument and command.argument.isupper():
        raise ConfigError(f"/{name} needs {command.argument}.")
    command.do(chat, argument)
    return True


def _help(chat: Chat, _: str) -> None:
    rows = [(f"/{name} {command.argument}".strip(), command.meaning) for name, command in COMMANDS.items()]
    width = max(len(usage) for usage, _ in rows)
    chat.screen.say("\n".join(f"{usage:{width}}  {meaning}" for usage, meaning in [*rows, ("/quit", "End.")]))


def _method(chat: Chat, name: str) -> None:
    method = checked_method(name)
    chat.answers.check_method(method)
    chat.config = replace(chat.config, method=method)
    chat.screen.say(f"method: {name} (the text does not change with it)")


def _seed(chat: Chat, text: str) -> None:
    if text and text != "random":
        try:
            chat.config = replace(chat.config, seed=int(text))
        except ValueError as error:
            raise ConfigError(f"/seed is {text!r}; allowed: a whole number, or random.") from error
    elif text:
        chat.config = replace(chat.config, seed=None)
    chat.screen.say(f"seed: {'drawn for each answer' if chat.config.seed is None else chat.config.seed}")


def _system(chat: Chat, text: str) -> None:
    if text:
        chat.conversation.system = "" if text == "-" else text
    chat.screen.say(f"system prompt: {chat.conversation.system or 'none'}")


def _stats(chat: Chat, _: str) -> None:
    last = chat.last
    if last is None:
        raise GenerationError("There is no answer yet: ask something first.")
    read = f"{last.num_prompt_tokens} tokens read, {last.num_reused_tokens} of them cached"
    steps = f"{last.tokens_per_step:.2f} tokens per pass of the target"
    drafted = f"{last.num_drafted} tokens drafted, {last.num_accepted} of them right"
    chat.screen.say(f"{last.method}: {closing_line(last)}\n{read}\n{steps}\n{drafted}")


def _place(name: str) -> Path:
    try:
        return Path(name).expanduser()
    except RuntimeError as error:
        raise ConfigError(f"{name} is no place: this machine knows no home of that user.") from error


def _save(chat: Chat, name: str) -> None:
    chat.conversation.save(_place(name))
    chat.screen.say(f"wrote {name}: {len(chat.conversation.messages)} messages")


def _load(chat: Chat, name: str) -> None:
    chat.conversation, chat.last = Conversation.load(_place(name)), None
    chat.screen.say(f"read {name}: {len(chat.conversation.messages)} messages")


def _new(chat: Chat, _: str) -> None:
    chat.conversation, chat.last = Conversation(chat.conversation.system), None
    chat.screen.say("a new conversation")


def _trace(chat: Chat, name: str) -> None:
    path = _place(name)
    chat.write_trace(path)
    chat.screen.say(f"wrote {name}: `mirrorsd trace {as_word(path)} -o trace.html` draws it")


COMMANDS = {
    "help": Command("", "This list.", _help),
    "new": Command("", "Begin a new conversation; the system prompt stays.", _new),
    "retry": Command("", "Ask the last question again.", lambda chat, _: chat.retry()),
    "system": Command("[text]", "Show or set the system prompt; - takes it away.", _system),
    "method": Command("NAME", "How to decode: auto, mirror, serial, plain, lookup, or a head's kind.", _method),
    "seed": Command("[number]", "Show or fix the seed; random draws one for each answer.", _seed),
    "stats": Command("", "Figures of the last answer.", _stats),
    "compare": Command(
        "", "Decode the last answer again, plainly, and compare the texts.", lambda chat, _: chat.compare()
    ),
    "trace": Command("FILE", "Write what each device did in the last answer.", _trace),
    "save": Command("FILE", "Write the conversation as JSON.", _save),
    "load": Command("FILE", "Go on with a conversation from a file.", _load),
}
WORDS = tuple(f"/{name}" for name in (*COMMANDS, "quit"))
"""What begins a command."""
