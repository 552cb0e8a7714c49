"""Asking every question of everybody: in which order, what is still missing, where the answers are kept.

Owns: the order, conversations of several turns, going on after a kill, refusing to mix two measurements in a folder.
Does not own: decoding (`entrants`, `peers`), what a line says (`answers`).
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from mirrorsd.cli.bench.answers import Answer, AnswerFile, Line, answer_line
from mirrorsd.cli.bench.entrants import Entrant
from mirrorsd.cli.bench.peers import PeerOption
from mirrorsd.cli.bench.questions import task_of
from mirrorsd.cli.input.prompt_file import Question
from mirrorsd.graphs.documents import DocumentError, parse_json, read_text
from mirrorsd.graphs.errors import ConfigError, ContextLengthError
from mirrorsd.graphs.names import Method
from mirrorsd.graphs.whole_file import write_whole

SETTINGS = "settings.json"
REFERENCE = "plain"
"""Whose texts are the right ones, and whose speed is 1."""
_WARM_UPS, _WARM_UP_TOKENS = 3, 32
"""Spec-Bench, too, answers its first question three times before it measures."""
Messages = list[dict[str, str]]
Report = Callable[[str, float], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What is measured, and how.

    Attributes:
        model: the bundle's name.
        questions: who is asked what, in this order.
        methods: of our own.
        runs: how often.
        temperature: 0 is greedy.
        seed: of the first run's sampled texts, and of the order; the `i`-th run has `seed + i`.
        max_tokens: most new tokens of a turn.
        ignore_eos: whether texts go on past their end.
        is_raw: whether questions are texts to go on with; else the chat template asks them.
        peers: other runtimes.
        drafted: tokens that those with a draft draft at a time.
        threads: of the processor that those may use.
    """

    model: str
    questions: tuple[Question, ...]
    methods: tuple[Method, ...]
    runs: int = 3
    temperature: float = 0.0
    seed: int = 0
    max_tokens: int = 1024
    ignore_eos: bool = False
    is_raw: bool = False
    peers: tuple[PeerOption, ...] = ()
    drafted: int = 4
    threads: int = 1

    def seed_of(self, run: int) -> int | None:
        """The seed of a run's texts; None where they are greedy."""
        return self.seed + run if self.temperature else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompts:
    """How conversations become ids, and how many fit.

    Attributes:
        encode: the ids of a conversation.
        context: most tokens of prompt and text together.
    """

    encode: Callable[[Messages], list[int]]
    context: int

    def room_for(self, messages: Messages) -> list[int] | None:
        """The ids of a conversation; None where they leave no room for a token."""
        ids = self.encode(messages)
        return ids if len(ids) < self.context else None


def keep_settings(folder: Path, settings: Mapping[str, Any]) -> None:
    """Write down in a folder without answers how it is measured; in one that has some, see that it is measured alike.

    Raises:
        ConfigError: the folder's answers were measured otherwise, or its settings cannot be read.
        OSError: the folder cannot be written.
    """
    path = folder / SETTINGS
    if not path.is_file() or not any(file.stat().st_size for file in folder.glob("run-*/*.jsonl")):
        folder.mkdir(parents=True, exist_ok=True)
        write_whole(path, f"{json.dumps(settings, indent=1)}\n".encode())
        return
    found = read_settings(folder)
    wanted = parse_json(json.dumps(settings))
    for name in dict.fromkeys((*wanted, *found)):
        if found.get(name) != wanted.get(name):
            raise ConfigError(
                f"{folder} holds answers that were measured with {name} = {json.dumps(found.get(name))}; this run has "
                f"{json.dumps(wanted.get(name))}. Give the same, or another --out."
            )


def read_settings(folder: Path) -> dict[str, Any]:
    """What `keep_settings` wrote.

    Raises:
        ConfigError: it is not there, or not readable.
    """
    path = folder / SETTINGS
    try:
        found: dict[str, Any] = parse_json(read_text(path))
    except DocumentError as error:
        raise ConfigError(f"{path} {error}; name another --out.") from error
    return found


def open_files(folder: Path, names: Sequence[str], runs: int) -> dict[tuple[int, str], AnswerFile]:
    """The answers so far, by run (from 0) and entrant: `run-1/plain.jsonl` and so on.

    Raises:
        ConfigError: a file has something else in it.
    """
    found: dict[tuple[int, str], AnswerFile] = {}
    for run in range(runs):
        place = folder / f"run-{run + 1}"
        place.mkdir(exist_ok=True)
        found |= {(run, name): AnswerFile(place / f"{name}.jsonl") for name in names}
    return found


def fitting(plan: Plan, prompts: Prompts) -> list[Question]:
    """The questions whose first turn leaves room for a token.

    Raises:
        ContextLengthError: none does.
    """
    kept = [question for question in plan.questions if prompts.room_for(_first(question)) is not None]
    if not kept:
        raise ContextLengthError(
            f"No question fits into the bundle's context of {prompts.context} tokens; export it with more --context."
        )
    return kept


def _first(question: Question) -> Messages:
    return [{"role": "user", "content": question.turns[0]}]


def turns(plan: Plan, questions: Sequence[Question], names: Sequence[str]) -> Iterator[tuple[int, Question, str]]:
    """Run (from 0), question and name of every answer: who goes first is drawn anew for every question."""
    for run in range(plan.runs):
        for question in questions:
            shuffled = list(names)
            Random(f"{plan.seed} {run} {question.question_id}").shuffle(shuffled)
            for name in shuffled:
                yield run, question, name


def ask_everybody(
    folder: Path, plan: Plan, entrants: Sequence[Entrant], prompts: Prompts, report: Report
) -> dict[str, list[list[Line]]]:
    """Get the answers that `folder` lacks; what is there stays.

    Args:
        folder: where `keep_settings` was.
        plan: how it is measured.
        entrants: who answers.
        prompts: how they are asked.
        report: told what is asked, and the share of what was missing that is done.

    Returns:
        All answer lines by entrant: those of each run.
    """
    by_name = {entrant.name: entrant for entrant in entrants}
    files = open_files(folder, list(by_name), plan.runs)
    questions = fitting(plan, prompts)
    missing = [
        (run, question, by_name[name])
        for run, question, name in turns(plan, questions, list(by_name))
        if question.question_id not in files[run, name]
    ]
    if missing:
        report("warming up", 0.0)
        warm_up(entrants, prompts.encode(_first(questions[0])), plan)
    for number, (run, question, entrant) in enumerate(missing):
        report(f"run {run + 1}, {task_of(question.question_id, question.category)}", number / len(missing))
        answers = converse(question, entrant, prompts, plan.max_tokens, plan.seed_of(run))
        trace = answers[0].write_trace
        if trace is not None and entrant.name != REFERENCE and question == questions[0] and not run:
            trace(folder / f"trace-{entrant.name}.json")
        line = answer_line(question, answers, model_id=f"{plan.model}-{entrant.name}", seed=plan.seed_of(run))
        files[run, entrant.name].add(line)
    for file in files.values():
        file.sort([question.question_id for question in plan.questions])
    return {name: [files[run, name].lines for run in range(plan.runs)] for name in by_name}


def warm_up(entrants: Sequence[Entrant], ids: Sequence[int], plan: Plan) -> None:
    """Let everybody begin the first question three times, untimed: first runs allocate and compile."""
    for entrant in entrants:
        for _ in range(_WARM_UPS):
            entrant.answer(ids, most=min(plan.max_tokens, _WARM_UP_TOKENS), seed=plan.seed_of(0))


def converse(question: Question, entrant: Entrant, prompts: Prompts, most: int, seed: int | None) -> list[Answer]:
    """Ask the turns of one question in order, the entrant's own answers between them.

    A turn that does not fit into the context ends the conversation.
    """
    messages: Messages = []
    answers: list[Answer] = []
    for text in question.turns:
        messages = [*messages, {"role": "user", "content": text}]
        ids = prompts.room_for(messages)
        if ids is None:
            break
        answers.append(entrant.answer(ids, most=most, seed=seed))
        messages = [*messages, {"role": "assistant", "content": answers[-1].text}]
    return answers
