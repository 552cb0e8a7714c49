"""Texts in channels, as gpt-oss writes them ("harmony"), told in the marks that other models have.

Such a model writes messages: a header that names a channel, or a tool, and a body, between special tokens. Shown are
thoughts (`analysis`) between `<think>` and `</think>`, a call as `<tool_call>` with JSON, and everything else as it is,
so that whoever reads an answer knows one form. The source is OpenAI's description of the format
(https://cookbook.openai.com/articles/openai-harmony).
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

from mirrorsd.texts.messages import Conversation, text_of
from mirrorsd.texts.shown_text import TokenDecoder

START, CHANNEL, CONSTRAIN, MESSAGE, END, CALL = (
    *("<|start|>", "<|channel|>", "<|constrain|>"),
    *("<|message|>", "<|end|>", "<|call|>"),
)
MARKS = (START, CHANNEL, CONSTRAIN, MESSAGE, END, CALL)
CALL_OPENING, CALL_MIDDLE, CALL_CLOSING = '<tool_call>\n{"name": "', '", "arguments": ', "}\n</tool_call>"
_THOUGHTS = "analysis"
_THINK, _THOUGHT = "<think>\n", "\n</think>\n\n"
_APART = ("thinking", "reasoning_content")
_THOUGHT_AT_FIRST = re.compile(r"\s*<think>(.*?)</think>\s*", re.DOTALL)
_TO = "to="
_WORDS = ("assistant", "analysis", "commentary", "final", "json", "code", _TO)
"""Of headers, marks apart: role, channel, kind of a body, and whom a call is for."""
_TOOL = re.compile(r"to=(?:functions\.)?([\w.:/-]+)")


def has_channels(special_tokens: Mapping[str, int]) -> bool:
    """Whether a vocabulary has the marks of such texts."""
    return special_tokens.keys() >= {*MARKS}


def with_thoughts_apart(messages: Conversation) -> Conversation:
    r"""The conversation with the thoughts that answers begin with where a template with channels wants them.

    >>> with_thoughts_apart([{"role": "assistant", "content": "<think>\nHm.\n</think>\n\nYes."}])
    [{'role': 'assistant', 'content': 'Yes.', 'thinking': 'Hm.', 'reasoning_content': 'Hm.'}]
    """
    found = []
    for message in messages:
        content = text_of(message["content"]) if message["role"] == "assistant" else ""
        if thought := _THOUGHT_AT_FIRST.match(content):
            apart = {"content": content[thought.end() :], **dict.fromkeys(_APART, thought[1].strip())}
            message = {**message, **apart}
        found.append(message)
    return found


def begun_thoughts(messages: Conversation) -> str | None:
    """How an answer that was cut within its thoughts begins, for a prompt that ends where the assistant speaks."""
    content = text_of(messages[-1]["content"]).lstrip()
    is_begun = messages[-1]["role"] == "assistant" and content.startswith(_THINK) and "</think>" not in content
    return f"{CHANNEL}{_THOUGHTS}{MESSAGE}{content.removeprefix(_THINK)}" if is_begun else None


def _may_be_header(text: str) -> bool:
    """Whether a header may go on after this part of it.

    >>> _may_be_header(" to=functions.look"), _may_be_header("comm"), _may_be_header("A fox"), _may_be_header('{"a"')
    (True, True, False, False)
    """
    return all(word.startswith(_TO) or any(known.startswith(word) for known in _WORDS) for word in text.split(" "))


class ChannelDecoder:
    """Turns tokens into text as an `IncrementalDecoder` does, with the marks of channels told in other words.

    Attributes:
        mark: what is told behind the last piece of text in the place of the model's own marks.
    """

    def __init__(
        self, begin: Callable[[Sequence[int]], TokenDecoder], special_tokens: Mapping[str, int], prompt: Sequence[int]
    ) -> None:
        """Begin behind a prompt, which may end anywhere: what it says behind its last `<|start|>` is read as well.

        Args:
            begin: Makes a decoder of what stands between the marks, behind these ids.
            special_tokens: Ids by text.
            prompt: Ids that the text goes on behind.
        """
        self.mark = ""
        self._marks = {special_tokens[mark]: mark for mark in MARKS}
        ids = [int(token) for token in prompt]
        starts = [place for place, token in enumerate(ids) if self._marks.get(token) == START]
        before = starts[-1] + 1 if starts else len(ids)
        self._inner = begin(ids[:before])
        self._header: list[str] | None = [""] if starts else None  # what stands between its marks
        self._is_thinking, self._call, self._given = False, "", ""
        for token in ids[before:]:
            self.push(token)
        self._given = "".join(self._header or ())  # of a header, by the prompt

    def push(self, token: int) -> str:
        """The text that is certain with this token."""
        mark, self.mark = self._marks.get(token), ""
        if mark is None:
            return self._read(self._inner.push(token))
        left = self._read(self._inner.finish())
        if mark == MESSAGE:
            self.mark = self._begin()
        elif mark in (END, CALL):
            self.mark = self._end()
        else:
            self._header = [""] if mark == START else [*(self._header or [""]), ""]
        return left

    def finish(self) -> str:
        """What is left at the end: a header that no body followed is text."""
        left = self._read(self._inner.finish())
        header = self._no_header()
        self.mark = self._end()
        return left + header

    def _read(self, text: str) -> str:
        """Text of a body, or of something that is no header after all."""
        if self._header is None:
            self._call += text if self._call else ""
            return text
        self._header[-1] += text
        if _may_be_header(self._header[-1]):
            return ""
        return self._no_header()

    def _no_header(self) -> str:
        """What seemed to be a header is text."""
        said, self._header = "".join(self._header or ()), None
        given, self._given = self._given, ""
        return said.removeprefix(given)

    def _begin(self) -> str:
        """A body begins."""
        header, self._header, self._given = self._header or [], None, ""
        channel = header[1].split(" ")[0] if len(header) > 1 else ""
        tool = _TOOL.search(" ".join(header))
        if tool is not None:
            self._call = CALL_OPENING + tool[1] + CALL_MIDDLE
            return self._end_of_thoughts() + self._call
        if channel != _THOUGHTS:
            return self._end_of_thoughts()
        before, self._is_thinking = "\n" if self._is_thinking else _THINK, True
        return before

    def _end(self) -> str:
        """A body ends; a call that is whole gets its closing."""
        written, self._call = self._call + CALL_CLOSING, ""
        with suppress(ValueError, RecursionError):
            json.loads(written.removeprefix("<tool_call>").removesuffix("</tool_call>"))
            return CALL_CLOSING
        return ""

    def _end_of_thoughts(self) -> str:
        is_thinking, self._is_thinking = self._is_thinking, False
        return _THOUGHT if is_thinking else ""
