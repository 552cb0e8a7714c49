"""Grammars of answers with tools: a demanded call is the whole text; elsewhere it is free until a call begins."""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from mirrorsd.graphs.errors import ConfigError
from mirrorsd.server.bundles.call_forms import ID_MARK, CallForm, Speech
from mirrorsd.server.wire.chat import Tool
from mirrorsd.texts.channels import CHANNEL, MARKS, MESSAGE
from mirrorsd.texts.finite_schema import finite_schema
from mirrorsd.texts.followed_words import says
from mirrorsd.texts.messages import ID_LENGTH

_AS_WRITTEN = {"item_separator": ", ?", "key_separator": ": ?", "whitespace_flexible": False}
"""For llguidance: arguments as `json.dumps` and templates write them, with and without spaces."""
_ID = f"[A-Za-z0-9]{{{ID_LENGTH}}}"


def call_grammar(
    tools: Sequence[Tool], speech: Speech, *, most: int = 1, is_free: bool = False, answer: Any = None
) -> str:
    """A grammar in Lark's notation: calls of these tools, or text in which they may begin.

    Args:
        tools: of which one must be called.
        speech: of the bundle.
        most: calls in one answer.
        is_free: text may come before the calls, or instead of them.
        answer: the schema of a text without calls.
    """
    form, specials = speech.form, speech.specials
    rules = [f"call_id: /{_ID}/"]
    for number, tool in enumerate(tools):
        schema = _finite_parameters(tool, speech.context)
        if isinstance(schema, dict):
            schema = {
                **schema,
                "x-guidance": {**schema.get("x-guidance", {}), "whitespace_pattern": None, **_AS_WRITTEN},
            }
        name, middle = json.dumps(tool.function.name), _spelled(form.middle, specials)
        rules.append(f"call_{number}: {name} {'middle' if form.is_in_channels else middle} %json {json.dumps(schema)}")
    rules.append("call: " + " | ".join(f"call_{number}" for number in range(len(tools))))
    if is_free and answer is not None:
        rules.append(f"answer: %json {json.dumps(finite_schema(answer, speech.context))}")
    if form.is_in_channels:
        return _grammar([*_call_in_channels(specials, is_free=is_free, has_answer=answer is not None), *rules])
    more = (
        f"({_spelled(form.separator, specials)} call){{0,{most - 1}}}"
        if form.separator is not None and most > 1
        else ""
    )
    tail = f"call {more} {_spelled(form.closing, specials)}"
    if not is_free:
        return _grammar([f"start: {_spelled(form.opening, specials)} {tail}", *rules])
    if answer is not None:
        return _grammar([f"start: answer | {_spelled(form.opening, specials)} {tail}", *rules])
    return _grammar([*_free_start(form, speech, tail), *rules])


def _finite_parameters(tool: Tool, context: int) -> Any:
    try:
        return finite_schema(_parameters(tool), context, is_strict=bool(tool.function.strict))
    except ConfigError as error:
        reason = str(error).removeprefix("The JSON schema")
        raise ConfigError(f"tools: the parameters of {json.dumps(tool.function.name)}{reason}") from error


def _parameters(tool: Tool) -> dict[str, Any]:
    """The schema of a tool's arguments, which have names: one that only says that they are an object allows none."""
    given = tool.function.parameters or {"type": "object"}
    said = [word for word, value in given.items() if says(word) and value not in (None, [])]
    is_bare = said == ["type"] and given["type"] == "object"
    return {**given, "additionalProperties": False} if is_bare else given


def _grammar(rules: Sequence[str]) -> str:
    return "\n".join(["%llguidance {}", *rules, ""])


def answer_in_channels(answer: Any, speech: Speech) -> str:
    """A grammar of thoughts, and behind them an answer with this schema."""
    schema = json.dumps(finite_schema(answer, speech.context))
    return _grammar(["start: before* final", *_in_channels(speech.specials, "answer"), f"answer: %json {schema}"])


def _call_in_channels(specials: Mapping[str, int], *, is_free: bool, has_answer: bool) -> list[str]:
    """Rules of thoughts and words before a call, then the call, or what is said at last."""
    channel, message = (f"<[{specials[mark]}]>" for mark in (CHANNEL, MESSAGE))
    return [
        f"start: before* ({'final | ' if is_free else ''}tool)",
        *_in_channels(specials, "answer" if has_answer else "TEXT?"),
        f'tool: ({channel} "commentary to=functions." | " to=functions.") call',
        f'middle: ({channel} "commentary")? kind {message}',
    ]


def _in_channels(specials: Mapping[str, int], said: str) -> list[str]:
    """Rules of messages in channels; what is `said` in the last one is a rule's name."""
    start, channel, constrain, message, end = (f"<[{specials[mark]}]>" for mark in MARKS[:5])
    return [
        f'before: {channel} ("analysis" | "commentary") {message} TEXT? {end} {start} "assistant"',
        f'final: {channel} "final" kind {message} {said}',
        f'kind: (" "? {constrain} "json" | " json")?',
        "TEXT: /(?s:.+)/",
    ]


def _free_start(form: CallForm, speech: Speech, tail: str) -> list[str]:
    """Rules of a text in which calls may begin: anywhere with their mark, or at the beginning where they have none."""
    marker, specials = form.marker, speech.specials
    used = {specials[marker]} if marker in specials else set()
    others = sorted(set(specials.values()) - set(speech.eos_ids) - used)
    other = [f"other: <[{','.join(map(str, others))}]>"] if others else []
    lead = "(TEXT? other)*" if others else ""
    rest = f"{_spelled(form.opening[len(marker) :], specials)} {tail}"
    if not marker:
        first = f"FIRST: /(?s:.+)/ & ~/{pattern_of(form.opening, slash=True)}(?s:.*)/"
        before, behind = ("other* ", " (other TEXT?)*") if others else ("", "")  # Llama's mark a call, or nothing
        called = f"{before}{_spelled(form.opening, specials)} {tail}"
        return [f"start: {before}(FIRST{behind})? | {called}", "TEXT: /(?s:.+)/", first, *other]
    if marker in specials:
        return [f"start: {lead} TEXT? (<[{specials[marker]}]> {rest})?", "TEXT: /(?s:.+)/", *other]
    begun = [f"begun[lazy]: ANY {json.dumps(marker, ensure_ascii=False)}", "ANY: /(?s:.*)/"]
    return [f"start: {lead} TEXT? | {lead} begun {rest}", "TEXT: /(?s:.+)/", *begun, *other]


def _spelled(text: str, specials: Mapping[str, int]) -> str:
    """A text as a grammar has it: special tokens by number, ids of calls by their rule."""
    marks = "|".join(map(re.escape, [ID_MARK, *sorted(specials, key=len, reverse=True)]))
    found = []
    for piece in re.split(f"({marks})", text):
        if piece == ID_MARK:
            found.append("call_id")
        elif piece in specials:
            found.append(f"<[{specials[piece]}]>")
        elif piece:
            found.append(json.dumps(piece, ensure_ascii=False))
    return " ".join(found)


def pattern_of(text: str, *, slash: bool = False) -> str:
    """A regular expression for a part of a form, ids of calls as groups; with `slash` as Lark writes one."""
    found = re.escape(text).replace(re.escape(ID_MARK), f"({_ID})")
    return found.replace("/", r"\/").replace("\\\n", r"\n") if slash else found
