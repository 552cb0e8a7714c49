"""Answers as Spec-Bench keeps them: one file per method and run, one line per question.

Owns: what a line says, that it is in the file whole or not at all, and reading it back. Does not own: decoding.
"""

import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from uuid import uuid4

from mirrorsd.cli.input.prompt_file import Question
from mirrorsd.graphs.documents import DocumentError, parse_json, read_text
from mirrorsd.graphs.errors import ConfigError
from mirrorsd.graphs.whole_file import write_whole

Line = dict[str, Any]
_ID_LETTERS = 22
"""As Spec-Bench's ids have."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """One decoded turn.

    Attributes:
        text: without special tokens.
        token_ids: the new tokens, the one that ended the text included.
        wall_s: seconds from the request to the last token, prompt included, tokenising left out.
        finish_reason: why it ended.
        num_steps: passes that the target verified; None where a runtime does not say.
        accept_lengths: tokens that each step brought, correction included; empty where nobody knows.
        window_lengths: tokens that each step verified.
        step_ends_s: when each step ended, in seconds from the request.
        prefill_s: when the prompt was read, in seconds from the request; None where nobody knows.
        ttft_s: when the first token was decided; None where nobody knows.
        sources: how many steps got their next window from where (`early`, `exit`, `late`, `fresh`, `text`).
        write_trace: writes what the devices did when to a file; None where nobody recorded it.
    """

    text: str
    token_ids: list[int]
    wall_s: float
    finish_reason: str
    num_steps: int | None = None
    accept_lengths: list[int] = field(default_factory=list)
    window_lengths: list[int] = field(default_factory=list)
    step_ends_s: list[float] = field(default_factory=list)
    prefill_s: float | None = None
    ttft_s: float | None = None
    sources: Mapping[str, int] = field(default_factory=dict)
    write_trace: Callable[[Path], None] | None = None


def answer_line(question: Question, answers: Sequence[Answer], *, model_id: str, seed: int | None) -> Line:
    """The line of a question: Spec-Bench's keys in its order, then our own."""
    choice: Line = {
        "index": 0,
        "turns": [answer.text for answer in answers],
        "decoding_steps": [answer.num_steps for answer in answers],
        "new_tokens": [len(answer.token_ids) for answer in answers],
        "wall_time": [round(answer.wall_s, 6) for answer in answers],
        "accept_lengths": [length for answer in answers for length in answer.accept_lengths],
        "tokens": [answer.token_ids for answer in answers],
        "prefill_s": [_rounded(answer.prefill_s) for answer in answers],
        "ttft_s": [_rounded(answer.ttft_s) for answer in answers],
        "step_ends_s": [[round(end, 5) for end in answer.step_ends_s] for answer in answers],
        "window_lengths": [answer.window_lengths for answer in answers],
        "sources": [dict(answer.sources) for answer in answers],
        "finish_reason": [answer.finish_reason for answer in answers],
        "seed": seed,
    }
    return {
        "question_id": question.question_id,
        "category": question.category,
        "answer_id": uuid4().hex[:_ID_LETTERS],
        "model_id": model_id,
        "choices": [choice],
        "tstamp": time.time(),
    }


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 6)


class AnswerFile:
    """The answers of one method in one run; what is in it survives the process, whenever that is killed."""

    def __init__(self, path: Path) -> None:
        """Read what is there; half a line at the end, left by a killed process, is cut off.

        Raises:
            ConfigError: a whole line that is no answer.
        """
        self._path = path
        self.lines = _read_lines(path) if path.is_file() else []

    def __contains__(self, question_id: int | str) -> bool:
        return any(line["question_id"] == question_id for line in self.lines)

    def add(self, line: Line) -> None:
        """Append a line with one write, and see it on the disk.

        Raises:
            OSError: the file cannot be written.
        """
        with self._path.open("ab", buffering=0) as stream:
            stream.write(f"{json.dumps(line)}\n".encode())
            os.fsync(stream.fileno())
        self.lines.append(line)

    def sort(self, order: Sequence[int | str]) -> None:
        """Put the lines into the questions' order, as Spec-Bench does when a run is over."""
        places = {question_id: place for place, question_id in enumerate(order)}
        self.lines.sort(key=lambda line: places.get(line["question_id"], len(places)))
        write_whole(self._path, "".join(f"{json.dumps(line)}\n" for line in self.lines).encode())


def _read_lines(path: Path) -> list[Line]:
    content = path.read_bytes()
    whole = content[: content.rfind(b"\n") + 1]
    if len(whole) < len(content):
        with path.open("r+b") as stream:
            stream.truncate(len(whole))
    lines = []
    try:
        for text in read_text(path).split("\n"):
            if text:
                lines.append(parse_json(text))
                _ = lines[-1]["question_id"], lines[-1]["choices"][0]["tokens"]
    except (DocumentError, LookupError, TypeError) as error:
        raise ConfigError(
            f"{path}, line {len(lines)} is no answer of `mirrorsd bench`; remove the file, or name another --out."
        ) from error
    return lines
