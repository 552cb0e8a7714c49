"""Texts in channels, as gpt-oss writes them ("harmony"), told in the marks that other models have.

Such a model writes messages: a header that names a channel, or a tool, and a body, between special tokens. Shown are
thoughts (`analysis`) between `<think>` and `</think>`, a call as `<tool_call>` with JSON, and everything else as it is,
so that whoever reads an answer knows one form. The source is OpenAI's description of the format
(https://cookbook.openai.com/articles/openai-harmony).
"""

import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress

from mirrorsd.texts.messages import Conversation
from mirrorsd.texts.shown_text import IncrementalDecoder

START, CHANNEL, CONSTRAIN, MESSAGE, END, CALL = (
    *("<|start|>", "<|channel|>", "<|constrain|>"),
    *("<|message|>", "<|end|>", "<|call|>"),
)
MARKS = (START, CHANNEL, CONSTRAIN, MESSAGE, END, CALL)
CALL_OPENING, CALL_MIDDLE, CALL_CLOSING = '<tool_call>\n{"name": "', '", "arguments": ', "}\n</tool_call>"
_THOUGHTS = "analysis"
_THINK, _THOUGHT = "<think>\n", "\n</think>\n\n"
_THOUGHT_AT_FIRST = re.compile(r"\s*<think>(.*?)</think>\s*", re.DOTALL)
_HEADER = re.compile(r"[\w .=:/-]{0,200}")
"""What a header may be, marks apart: role, channel, the name of a tool, the kind of a body."""
_TOOL = re.compile(r"to=(?:functions\.)?([\w.:/-]+)")


def has_channels(special_tokens: Mapping[str, int]) -> bool:
    """Whether a vocabulary has the marks of such texts."""
    return special_tokens.keys() >= {*MARKS}


def with_thoughts_apart(messages: Conversation) -> Conversation:
    r"""The conversation with the thoughts that answers begin with where a template with channels wants them.

    >>> with_thoughts_apart([{"role": "assistant", "content": "<think>\nHm.\n</think>\n\nYes."}])
    [{'role': 'assistant', 'content': 'Yes.', 'thinking': 'Hm.'}]
    """
    found = []
    for message in messages:
        content = message["content"]
        thought = (
            _THOUGHT_AT_FIRST.match(content) if message["role"] == "assistant" and isinstance(content, str) else None
        )
        apart = {"content": content[thought.end() :], "thinking": thought[1].strip()} if thought else {}
        found.append({**message, **apart})
    return found


class ChannelDecoder:
    """Turns tokens into text as an `IncrementalDecoder` does, with the marks of channels told in other words.

    Args:
        inner: Decodes what stands between the marks.
        special_tokens: Ids by text.
        prompt: Ids that the text goes on behind: it may end within a header.
    """

    def __init__(self, inner: IncrementalDecoder, special_tokens: Mapping[str, int], prompt: Sequence[int]) -> None:
        self._inner = inner
        self._marks = {special_tokens[mark]: mark for mark in MARKS}
        last = next((self._marks[token] for token in reversed(prompt) if token in self._marks), MESSAGE)
        parts = {START: [""], CHANNEL: ["", ""]}
        self._header: list[str] | None = parts.get(last)  # what stands between the marks of a header
        self._is_thinking, self._call = False, ""

    def push(self, token: int) -> str:
        """The text that is certain with this token."""
        mark = self._marks.get(token)
        if mark is None:
            return self._read(self._inner.push(token))
        left = self._read(self._inner.finish())
        if mark == MESSAGE:
            return left + self._begin()
        if mark in (END, CALL):
            return left + self._end()
        self._header = [""] if mark == START else [*(self._header or [""]), ""]
        return left

    def finish(self) -> str:
        """What is left at the end: a header that no body followed is text."""
        left = self._read(self._inner.finish())
        header, self._header = "".join(self._header or ()), None
        return left + header + self._end()

    def _read(self, text: str) -> str:
        """Text of a body, or of something that is no header after all."""
        if self._header is None:
            self._call += text if self._call else ""
            return text
        self._header[-1] += text
        if _HEADER.fullmatch(self._header[-1]):
            return ""
        said, self._header = "".join(self._header), None
        return said

    def _begin(self) -> str:
        """A body begins."""
        header, self._header = self._header or [], None
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
        with suppress(ValueError):
            json.loads(written.removeprefix("<tool_call>").removesuffix("</tool_call>"))
            return CALL_CLOSING
        return ""

    def _end_of_thoughts(self) -> str:
        is_thinking, self._is_thinking = self._is_thinking, False
        return _THOUGHT if is_thinking else ""
