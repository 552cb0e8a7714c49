"""A bundle's chat templates, in the sandbox and with the helpers that transformers gives them.

Owns: which template is used, and which form of a conversation it takes. Does not own: messages (`messages.py`).
"""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from mirrorsd.graphs import names
from mirrorsd.graphs.errors import BundleError, ConfigError, GenerationError
from mirrorsd.texts.channels import CHANNEL, begun_thoughts, with_thoughts_apart
from mirrorsd.texts.messages import Conversation, forms, places_in_parts, with_joined_parts

TEMPLATE_NAME = "chat_template"
"""The variable by which a caller chooses one of several templates."""
_DEFAULT, _WITH_TOOLS = names.DEFAULT_TEMPLATE, "tool_use"
_WORD = "Zq{}zq{}q"
"""Stands for the text of a part while a template is asked whether it writes parts."""
_STOP = "Zq stops here"
_LISTED = ("'text': '{}'", '"text": "{}"', '"text":"{}"')


class ChatTemplate:
    """The compiled templates of a bundle: one, or several by name.

    Attributes:
        texts: their sources by name; the one that is used without tools is "default".
    """

    def __init__(self, files: Mapping[str, Path]) -> None:
        """Read and compile the files by their templates' names.

        Raises:
            BundleError: a file is no template.
        """
        self.texts = {name: _read(path) for name, path in files.items()}
        self._compiled = {name: _compile(text, files[name]) for name, text in self.texts.items()}

    def name(self, variables: Mapping[str, Any]) -> str:
        """Which template is used: the one that `chat_template` names, else `tool_use` with tools, else the default.

        Raises:
            ConfigError: `chat_template` names none of them.
            GenerationError: several, none of which is the default.
        """
        asked = variables.get(TEMPLATE_NAME)
        if asked is not None and not (isinstance(asked, str) and asked in self.texts):
            raise ConfigError(
                f"GenerationConfig.template_variables names the chat_template {asked!r}; allowed: "
                f"{', '.join(sorted(self.texts))}, the templates of this bundle."
            )
        if asked is None and variables.get("tools") is not None and _WITH_TOOLS in self.texts:
            asked = _WITH_TOOLS
        if asked is None and _DEFAULT not in self.texts:
            raise GenerationError(
                f"This bundle has the chat templates {', '.join(sorted(self.texts))} and none that is the default: "
                f"choose one by template_variables={{'{TEMPLATE_NAME}': ...}}."
            )
        return str(asked or _DEFAULT)

    def render(self, messages: Conversation, variables: Mapping[str, Any], *, is_continued: bool = False) -> str:
        """The conversation as one text.

        A template gets the first form that it takes: see `forms`. It gets a content in parts where it writes the text
        of every part, as transformers does, else the parts joined.

        Args:
            messages: as `read_messages` gives them.
            variables: all that the template is told beside them.
            is_continued: end with the last message's content, for the model to go on with.

        Raises:
            ConfigError: see `name`.
            GenerationError: the template refuses every form, or does not write a last message that is continued.
        """
        name = self.name(variables)
        template = self._compiled[name]
        has_channels = CHANNEL in self.texts[name]
        if has_channels and is_continued and (thoughts := begun_thoughts(messages)):
            begun = {**variables, "add_generation_prompt": True}
            return self.render(messages[:-1], begun) + thoughts
        if has_channels:
            messages = with_thoughts_apart(messages)
        told = {name: value for name, value in variables.items() if name != TEMPLATE_NAME}
        if is_continued:
            return _continued(template, messages, told)
        return _first_form(template, _in_written_parts(template, messages, told), told)


class GenerationBlocks(Extension):
    """`{% generation %}`, which marks what the assistant says for training; here its content is simply written."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it as an attribute of instances

    def parse(self, parser: Parser) -> nodes.Node:
        """Return a block with a scope of its own: what is set within it is not seen behind it."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_written"), [], [], body).set_lineno(line)

    def _written(self, caller: Any) -> str:
        return str(caller())


class _Namespace(Namespace):
    """`namespace(...)` without names that begin with an underscore, which lead into Python."""

    def __init__(*args: Any, **attributes: Any) -> None:
        self, given = args[0], dict(*args[1:], **attributes)
        for name in given:
            _check_name(name)
        Namespace.__init__(self, given)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


class _Dict:
    """`dict(...)` and `dict.fromkeys(...)`, without the rest of Python's type."""

    def __call__(self, *given: Any, **items: Any) -> dict[Any, Any]:
        return dict(*given, **items)

    def fromkeys(self, *given: Any) -> dict[Any, Any]:
        """As Python's."""
        return dict.fromkeys(*given)


def _check_name(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a namespace holds no {name!r}: its names begin with a letter")


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise BundleError(f"{path} cannot be read ({error}). Export again.") from error


def _compile(text: str, path: Path) -> jinja2.Template:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, GenerationBlocks]
    )
    environment.filters["tojson"] = _to_json
    environment.globals |= {
        "raise_exception": _raise_template_error,
        "strftime_now": _strftime_now,
        "dict": _Dict(),
        "namespace": _Namespace,
    }
    try:
        return environment.from_string(text)
    except (jinja2.TemplateError, RecursionError) as error:
        raise BundleError(f"{path} cannot be read ({error}). Export again.") from error


def _render(template: jinja2.Template, messages: Conversation, variables: Mapping[str, Any]) -> str:
    try:
        return template.render({**variables, "messages": messages})
    except Exception as error:  # a program that came with the checkpoint may raise anything
        raise GenerationError(f"The chat template refused the messages: {error}") from error


def _first_form(template: jinja2.Template, messages: Conversation, variables: Mapping[str, Any]) -> str:
    refusal: GenerationError | None = None
    for form in forms(messages):
        try:
            return _render(template, form, variables)
        except GenerationError as error:
            refusal = refusal or error
    assert refusal is not None
    raise refusal


def _in_written_parts(template: jinja2.Template, messages: Conversation, variables: Mapping[str, Any]) -> Conversation:
    """Join the parts of those messages whose parts the template does not write one by one.

    It is asked with a made-up word for each part, so that the answer does not depend on what the parts say.
    """
    places = places_in_parts(messages)
    if not places:
        return messages
    words = {place: [_WORD.format(place, part) for part in range(len(messages[place]["content"]))] for place in places}
    asked = [
        {**message, "content": _worded(message["content"], words[place])} if place in words else message
        for place, message in enumerate(messages)
    ]
    try:
        written = _first_form(template, asked, variables)
    except GenerationError:
        return with_joined_parts(messages, places)
    lost = [place for place in places if not _writes(written, words[place])]
    if lost:
        try:
            joined = _first_form(template, with_joined_parts(asked, lost), variables)
        except GenerationError:
            return messages
        lost = [place for place in lost if not words[place] or any(word in joined for word in words[place])]
    return with_joined_parts(messages, lost)


def _worded(parts: Sequence[Mapping[str, Any]], words: Sequence[str]) -> list[dict[str, Any]]:
    return [{**part, "text": word} for part, word in zip(parts, words, strict=True)]


def _writes(written: str, words: Sequence[str]) -> bool:
    """Whether there are words, each of which was written."""
    return bool(words) and all(is_written(word, written) for word in words)


def is_written(word: str, text: str) -> bool:
    """Whether a text has a part's word, and not within Python's or JSON's way to write a list of parts."""
    return word in text and not any(form.format(word) in text for form in _LISTED)


def _continued(template: jinja2.Template, messages: Conversation, variables: Mapping[str, Any]) -> str:
    """The conversation up to the end of the last message's content."""
    said = messages[-1]["content"]
    if not said:
        raise GenerationError("The last message has no content to go on with: give it one, or ask for a new message.")
    marked = [*messages[:-1], {**messages[-1], "content": _marked(said)}]
    written = _first_form(template, _in_written_parts(template, marked, variables), variables)
    end = written.rfind(_STOP)
    last = said if isinstance(said, str) else said[-1]["text"]
    if last.strip() not in written[:end]:
        raise GenerationError("The chat template does not write the last message as it is: it cannot be continued.")
    return written[:end] if written.startswith(" ", end + len(_STOP)) else written[:end].rstrip()


def _marked(content: Any) -> Any:
    if isinstance(content, str):
        return f"{content}{_STOP} "
    return [*content[:-1], {**content[-1], "text": f"{content[-1]['text']}{_STOP} "}]


def _to_json(
    x: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)


def _raise_template_error(message: str) -> None:
    raise jinja2.TemplateError(message)
