"""Tools: what a request's tools demand of the text, as a grammar, and calls read out of it.

Where a call is demanded the text is one; where the model may choose, its text is free until it begins a call, and from
there on constrained to the tools' names and schemas. See `call_forms.py` for how calls are written.
"""

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any, NamedTuple
from uuid import uuid4

from mirrorsd.graphs.errors import ConfigError
from mirrorsd.server.answers.call_grammar import answer_in_channels, call_grammar, pattern_of
from mirrorsd.server.answers.settings_of import Settings, check_schema
from mirrorsd.server.bundles.call_forms import ID_MARK, CallForm, Speech, told_plainly
from mirrorsd.server.bundles.loaded import LoadedBundle
from mirrorsd.server.errors import ApiError
from mirrorsd.server.settings import Limits
from mirrorsd.server.wire.chat import Tool
from mirrorsd.server.wire.known_fields import MOST_NAMED
from mirrorsd.texts.followed_words import unfollowed_words
from mirrorsd.texts.messages import ID_LENGTH

_NAME = r"([A-Za-z0-9_.:/-]{1,128})"


class Call(NamedTuple):
    """A call of a tool; `arguments` is JSON text."""

    id: str
    name: str
    arguments: str

    @property
    def document(self) -> dict[str, Any]:
        """As in an answer."""
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": self.arguments}}


class Read(NamedTuple):
    """What a piece of text turned out to be: text to show, calls that are complete."""

    text: str
    calls: Sequence[Call] = ()


class Reader:
    """Reads an answer that has no calls: all of it is text."""

    def push(self, text: str) -> Read:
        """What is certain with this piece."""
        return Read(text)

    def finish(self) -> Read:
        """What is left at the end."""
        return Read("")


class CallReader(Reader):
    """Reads calls of a form out of text; a call that was cut short stays text.

    Args:
        form: how calls are written.
        specials: special tokens, which are left out of what is shown.
        name: of the answer, of which calls without an id of their own get theirs; by default none is like another.
    """

    def __init__(self, form: CallForm, specials: Sequence[str] = (), name: str | None = None) -> None:
        self._form = form
        self._ids = (derived_name(name or uuid4().hex, number)[:ID_LENGTH] for number in count())
        self._hidden = re.compile("|".join(map(re.escape, specials)) or "(?!)")
        self._name = re.compile(_NAME + pattern_of(form.middle))
        ends = [text for text in (form.separator, form.closing) if text is not None]
        self._ends = [re.compile(pattern_of(text)) for text in ends]
        self._longest = max(len(text) + ID_LENGTH * text.count(ID_MARK) for text in ends)
        self._held, self._begun = "", ""
        self._is_call = self._has_shown = self._has_called = False

    def push(self, text: str) -> Read:
        """Text up to where a call has begun or may begin, and the calls that have ended."""
        self._held += text
        shown = "" if self._is_call else self._before_call()
        place = max(0, len(self._held) - len(text) - self._longest)
        may_end = self._is_call and any(pattern.search(self._held, place) for pattern in self._ends)
        return Read(shown, self._calls() if may_end else ())

    def finish(self) -> Read:
        """What is left: text, or the beginning of a call."""
        shown = "" if self._is_call else self._before_call()
        calls = self._calls(is_last=True) if self._is_call else []
        rest = self._begun + self._held
        rest = "" if self._has_called and rest.isspace() else rest
        self._held = self._begun = ""
        return Read(shown + self._hidden.sub("", rest), calls)

    def _before_call(self) -> str:
        opening, held = self._form.opening, self._held
        is_anywhere = bool(self._form.marker)
        start = held.find(opening) if is_anywhere else (0 if held.startswith(opening) and not self._has_shown else -1)
        if start >= 0:
            self._is_call, self._begun, self._held = True, opening, held[start + len(opening) :]
            return self._shown(held[:start].rstrip("\n"))
        keep = _begins(held, opening) if is_anywhere or not self._has_shown else 0
        if not is_anywhere and keep < len(held):
            keep = 0
        lines = len(held) - keep - len(held[: len(held) - keep].rstrip("\n"))
        keep += lines if is_anywhere else 0  # line ends before a call belong to its form
        self._held = held[len(held) - keep :]
        return self._shown(held[: len(held) - keep])

    def _shown(self, text: str) -> str:
        self._has_shown = self._has_shown or bool(text)
        return self._hidden.sub("", text)

    def _calls(self, *, is_last: bool = False) -> list[Call]:
        found = []
        while self._is_call and (name := self._name.match(self._held)):
            try:
                value, end = json.JSONDecoder().raw_decode(self._held, name.end())
            except (ValueError, RecursionError):
                break
            behind = next((match for pattern in self._ends if (match := pattern.match(self._held, end))), None)
            if behind is None and not (is_last and isinstance(value, dict)):
                break
            marks = [*name.groups()[1:], *(behind.groups() if behind else ())]
            given = marks[0] if marks else next(self._ids)
            found.append(Call(given, name[1], self._held[name.end() : end].strip()))
            self._has_called = True
            self._is_call = behind is not None and behind.re is not self._ends[-1]
            self._begun = behind[0] if behind is not None and self._is_call else ""
            self._held = self._held[behind.end() :] if behind is not None else ""
        return found


def derived_name(name: str, number: int) -> str:
    """A name for a part of an answer, 32 digits: whoever goes on with the answer gives it the same one.

    >>> derived_name("chatcmpl-1", 0) == derived_name("chatcmpl-1", 0) != derived_name("chatcmpl-1", 1)
    True
    """
    return hashlib.sha256(f"{name}/{number}".encode()).hexdigest()[:32]


class Wish(NamedTuple):
    """What a request says about tools, whichever way it was asked.

    Attributes:
        tools: that the model is told of.
        choice: `none`, `auto` or `required`.
        names: of those that may be called; None for all.
        is_parallel: whether several calls may come at once; None where the request does not say.
    """

    tools: Sequence[Tool] = ()
    choice: str = "auto"
    names: Sequence[str] | None = None
    is_parallel: bool | None = None

    @property
    def is_free(self) -> bool:
        """Whether the model chooses."""
        return self.choice == "auto"

    @property
    def wants_call(self) -> bool:
        """Whether a call may come."""
        return bool(self.tools) and self.choice != "none"


def demanded(tools: Sequence[Tool], name: str) -> Wish:
    """The wish for one call of this tool."""
    return Wish(tools, "required", (name,), is_parallel=False)


@dataclass(frozen=True, slots=True)
class ToolPlan:
    """What tools mean for a request.

    Attributes:
        form: how calls are written; None where none may come.
        tools: what the template is told.
        grammar: of the text; None where it is free.
        specials: special tokens by text, where the form has some: they must be in the text.
        left_out: words of the tools' schemas that hold their arguments to nothing, with the tools' numbers.
    """

    form: CallForm | None = None
    tools: Sequence[dict[str, Any]] = ()
    grammar: str | None = None
    specials: Mapping[str, int] | None = None
    left_out: Sequence[str] = ()

    def reader(self, name: str) -> Reader:
        """A reader for one choice, which has this name."""
        return CallReader(self.form, list(self.specials or ()), name) if self.form and self.grammar else Reader()

    def blamed(self, error: ConfigError) -> Exception:
        """The same error about the tool whose schema it is about, where its rule of the grammar is named."""
        place = re.search(r"cannot be taken: at (\d+)\(\d+\)", str(error))
        rules = (self.grammar or "").splitlines()
        rule = rules[int(place[1]) - 1] if place is not None and int(place[1]) <= len(rules) else ""
        found = re.match(r"call_(\d+): (\"[^\"]*\")", rule)
        if found is None:
            return error
        message = f"tools: the parameters of {found[2]} cannot be taken: {str(error).rpartition('): ')[2]}"
        return ApiError(400, message, param="tools", code="invalid_value")

    def told(self, messages: Sequence[Mapping[str, Any]]) -> tuple[list[dict[str, Any]], Sequence[dict[str, Any]]]:
        """Messages and tools for the chat template."""
        if self.form is not None and self.form.is_own:
            return told_plainly(messages, self.tools, self.form), ()
        return [dict(message) for message in messages], self.tools

    def settings_of(self, settings: Settings) -> Settings:
        """The request's fields of `GenerationConfig`; the grammar takes the place of a schema, which is in it.

        Calls are found in a text that has special tokens where the form has some, and none elsewhere.
        """
        if self.grammar is None:
            return settings
        found = {name: settings[name] for name in settings if name not in ("json_schema", "skip_special_tokens")}
        return found | {"grammar": self.grammar} | ({"skip_special_tokens": False} if self.specials else {})


def check_wish(wish: Wish, limits: Limits) -> None:
    """Refuse what no bundle could do.

    Raises:
        ApiError: too many or too big, or a tool that is not there.
    """
    if len(wish.tools) > limits.tools:
        raise ApiError(400, f"tools: at most {limits.tools} are taken.", param="tools")
    names = [tool.function.name for tool in wish.tools]
    if len(set(names)) < len(names):
        raise ApiError(400, "tools: two have the same name.", param="tools")
    for number, tool in enumerate(wish.tools):
        check_schema(tool.function.parameters, limits, f"tools.{number}.function.parameters")
    if not names and wish.choice == "required":
        raise ApiError(400, "tool_choice demands a tool, but no tools are given.", param="tool_choice")
    unknown = next((name for name in wish.names or () if name not in names), None)
    if unknown is not None:
        raise ApiError(400, f"tool_choice names {unknown!r}, which is no tool.", param="tool_choice")


async def plan(
    bundle: LoadedBundle, wish: Wish, settings: Settings, messages: Sequence[Mapping[str, Any]], limits: Limits
) -> ToolPlan:
    """What a request's tools and messages demand of a bundle.

    Args:
        bundle: who answers.
        wish: what the request says about tools.
        settings: fields of `GenerationConfig`, among them the form that the text shall have.
        messages: the conversation.
        limits: see there.

    Raises:
        ApiError: see `check_wish`; or a form of the text that has no place beside calls.
    """
    check_wish(wish, limits)
    has_called = any(message["role"] == "tool" or message.get("tool_calls") for message in messages)
    if not wish.tools and not has_called and "json_schema" not in settings:
        return ToolPlan()
    if wish.wants_call:
        if settings.get("ignore_eos"):
            raise ApiError(400, "ignore_eos has no place beside tools: a call ends the text.", param="ignore_eos")
        for name in ("regex", "grammar"):
            if name in settings:
                raise ApiError(
                    400,
                    f"A text by {name} has no place beside tools that may be called: set tool_choice to 'none'.",
                    param="response_format",
                )
    speech = await bundle.speech()
    return await bundle.read("", lambda: plan_tools(wish, speech, limits, settings.get("json_schema")))


def plan_tools(wish: Wish, speech: Speech, limits: Limits, answer: Any = None) -> ToolPlan:
    """What tools demand of the text; `answer` is the schema that it has where it is no call, None where it is free."""
    form = speech.form
    if not wish.wants_call:
        is_behind_thoughts = form.is_in_channels and answer is not None
        return ToolPlan(form, grammar=answer_in_channels(answer, speech) if is_behind_thoughts else None)
    documents = [tool.model_dump(exclude_none=True) for tool in wish.tools]
    wanted = [tool for tool in wish.tools if wish.names is None or tool.function.name in wish.names]
    is_usual = wish.is_free and not form.is_own  # a model that was trained for tools ends its calls by itself
    is_several = is_usual if wish.is_parallel is None else wish.is_parallel
    most = limits.calls if is_several and form.separator is not None else 1
    parts = form.opening + form.middle + (form.separator or "") + form.closing
    is_special = any(text in parts for text in speech.specials)
    grammar = call_grammar(wanted, speech, most=most, is_free=wish.is_free, answer=answer)
    left_out = [
        f"tools.{place}.{word}"
        for place, tool in enumerate(wish.tools)
        if not tool.function.strict
        for word in unfollowed_words(tool.function.parameters)
    ]
    return ToolPlan(form, documents, grammar, speech.specials if is_special else None, left_out[:MOST_NAMED])


def _begins(text: str, mark: str) -> int:
    """Length of the longest end of `text` that begins `mark`.

    >>> _begins("so <tool", "<tool_call>"), _begins("so", "<tool_call>")
    (5, 0)
    """
    return next((size for size in range(min(len(mark) - 1, len(text)), 0, -1) if text.endswith(mark[:size])), 0)
