"""Chat templates as this project renders them, held against transformers on a folder of other people's templates.

    python scripts/chat_templates.py TEMPLATES              # against the record, jinja2 only
    python scripts/chat_templates.py TEMPLATES --against transformers --write

TEMPLATES holds `*.jinja`: llama.cpp keeps a collection in `models/templates`, which the source package of
llama-cpp-python on PyPI has under `vendor/llama.cpp`. None of them is kept here: the record, `--record`, has the
SHA-256 of every template and of every text that transformers renders, and null where it fails.

A case is a conversation. Where it has no content beside calls, transformers is given an empty text, then none; where a
content in parts is not written part by part, it is given the parts joined by a line end.
"""

import argparse
import hashlib
import json
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from datetime import datetime
from pathlib import Path
from typing import Any
from unittest import mock

from tokenizers import Tokenizer, models

from mirrorsd.graphs import names
from mirrorsd.graphs.errors import GenerationError
from mirrorsd.texts import chat_template
from mirrorsd.texts.messages import joined_text
from mirrorsd.texts.tokenizer import BundleTokenizer

RECORD = Path(__file__).parents[1] / "tests/unit/texts/rendered_templates.json"
NOW = datetime(2026, 7, 26, 12, 0, 0)
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}
PARAMETERS = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "description": "Name of a city"},
        "unit": {"type": "string", "enum": ["C", "F"]},
    },
    "required": ["city"],
}
TOOL = {
    "type": "function",
    "function": {"name": "weather", "description": "The weather of a city", "parameters": PARAMETERS},
}
CALL = {"id": "call00001", "type": "function", "function": {"name": "weather", "arguments": {"city": 'Zürich "old"'}}}
SYSTEM = {"role": "system", "content": "Be brief."}
QUESTION = {"role": "user", "content": "How warm is <b>Zürich</b> & why?"}
RESULT = {"role": "tool", "tool_call_id": "call00001", "name": "weather", "content": '{"degrees": 21}'}
ANSWER = {"role": "assistant", "content": "21 degrees."}
NEXT = {"role": "user", "content": "And now?"}
Renderer = Callable[..., str]


def parts(*texts: str) -> list[dict[str, str]]:
    """A content in parts."""
    return [{"type": "text", "text": text} for text in texts]


def calling(**fields: Any) -> dict[str, Any]:
    """An assistant's message that calls."""
    return {"role": "assistant", "tool_calls": [CALL], **fields}


CASES: dict[str, dict[str, Any]] = {
    "text": {"messages": [QUESTION]},
    "turns": {"messages": [QUESTION, ANSWER, NEXT]},
    "system": {"messages": [SYSTEM, QUESTION]},
    "tools": {"messages": [SYSTEM, QUESTION], "tools": [TOOL]},
    "tool calls": {"messages": [QUESTION, calling(content="I look."), RESULT], "tools": [TOOL]},
    "two results": {"messages": [QUESTION, calling(content=""), RESULT, RESULT, ANSWER, NEXT], "tools": [TOOL]},
    "null content": {"messages": [QUESTION, calling(content=None), RESULT], "tools": [TOOL]},
    "null fields": {
        "messages": [{**QUESTION, "name": None}, {**ANSWER, "tool_calls": None, "reasoning_content": None}, NEXT]
    },
    "reasoning": {"messages": [QUESTION, {**ANSWER, "reasoning_content": "Let me think."}, NEXT]},
    "reasoning beside calls": {
        "messages": [QUESTION, calling(content="", reasoning="I should look."), RESULT],
        "tools": [TOOL],
    },
    "thinking off": {"messages": [QUESTION], "variables": {"enable_thinking": False, "thinking": False}},
    "parts of a user": {"messages": [{"role": "user", "content": parts("One.", "Two.")}]},
    "parts of a system": {"messages": [{"role": "system", "content": parts("Be brief.", "Be kind.")}, QUESTION]},
    "parts of an assistant": {"messages": [QUESTION, {"role": "assistant", "content": parts("Yes.", "No.")}, NEXT]},
    "parts of a tool": {
        "messages": [QUESTION, calling(content=""), {**RESULT, "content": parts("21", "sunny")}],
        "tools": [TOOL],
    },
    "documents": {
        "messages": [QUESTION],
        "variables": {
            "documents": [{"doc_id": 1, "title": "Zürich", "text": "It is warm.", "contents": "It is warm."}]
        },
    },
    "no prompt": {"messages": [QUESTION, ANSWER], "add_generation_prompt": False},
    "continued": {"messages": [QUESTION, {**ANSWER, "content": "It is "}], "continue_final_message": True},
}


def main() -> None:
    """Render, compare, print what differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("templates", type=Path)
    parser.add_argument("--record", type=Path, default=RECORD)
    parser.add_argument("--against", choices=("record", "transformers"), default="record")
    parser.add_argument("--write", action="store_true", help="write the record; with --against transformers")
    options = parser.parse_args()
    files = sorted(options.templates.glob("*.jinja"))
    if not files:
        sys.exit(f"{options.templates} holds no *.jinja")
    is_recorded = options.against == "record"
    recorded = json.loads(options.record.read_text(encoding="utf-8"))["templates"] if is_recorded else {}
    found: dict[str, dict[str, str | None]] = {}
    counts = {"the same": 0, "different": 0, "transformers fails": 0, "not recorded": 0}
    for file in files:
        text = file.read_text(encoding="utf-8")
        mark = hashlib.sha256(text.encode()).hexdigest()
        right = of_transformers(text) if options.against == "transformers" else recorded.get(mark)
        if right is None:
            counts["not recorded"] += 1
            continue
        found[mark] = right
        for case, outcome in compared(text, right):
            counts[outcome] += 1
            if outcome == "different":
                print(f"{file.name}: {case} differs")
    print(f"{len(found)} templates:", ", ".join(f"{count} {name}" for name, count in counts.items()))
    if options.write:
        from transformers import __version__

        document = {"transformers": __version__, "now": NOW.isoformat(), "templates": dict(sorted(found.items()))}
        options.record.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    sys.exit(bool(counts["different"] or not found))


def compared(text: str, right: Mapping[str, str | None]) -> Iterator[tuple[str, str]]:
    """Every case and whether it is rendered as it was recorded."""
    for case, rendered in ours(text).items():
        is_same = rendered is not None and hash_of(rendered) == right[case]
        yield case, "transformers fails" if right[case] is None else "the same" if is_same else "different"


def hash_of(text: str) -> str:
    """Names a text."""
    return hashlib.sha256(text.encode()).hexdigest()


def ours(text: str) -> dict[str, str | None]:
    """Every case as this project renders it; None where it refuses."""
    with tempfile.TemporaryDirectory() as place, mock.patch.object(chat_template, "datetime", _Frozen):
        folder = Path(place) / names.TOKENIZER_FOLDER
        folder.mkdir()
        Tokenizer(models.BPE()).save(str(folder / "tokenizer.json"))
        (folder / "tokenizer_config.json").write_text(json.dumps(SPECIAL), encoding="utf-8")
        (folder / names.CHAT_TEMPLATE_FILE).write_text(text, encoding="utf-8")
        tokenizer = BundleTokenizer(Path(place))
        return {case: _tried(tokenizer.render_chat, given) for case, given in CASES.items()}


def of_transformers(text: str) -> dict[str, str | None]:
    """The hash of every case as transformers renders it; None where it fails."""
    from transformers import PreTrainedTokenizerFast
    from transformers.utils import chat_template_utils

    kind: Any = PreTrainedTokenizerFast
    made = kind(tokenizer_object=Tokenizer(models.BPE()), chat_template=text, **SPECIAL)

    def render(messages: Any, tools: Any = None, variables: Any = None, **settings: Any) -> str:
        asked = {"add_generation_prompt": not settings.get("continue_final_message"), **settings}
        rendered = made.apply_chat_template(messages, tools=tools, tokenize=False, **asked, **(variables or {}))
        return str(rendered)

    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(chat_template_utils, "datetime", _Frozen))
        rendered = {case: _first(render, given) for case, given in CASES.items()}
    return {case: None if one is None else hash_of(one) for case, one in rendered.items()}


class _Frozen(datetime):
    @classmethod
    def now(cls, tz: Any = None) -> "_Frozen":
        return cls(NOW.year, NOW.month, NOW.day, NOW.hour)


def _tried(render: Renderer, given: Mapping[str, Any]) -> str | None:
    try:
        return render(**given)
    except GenerationError:
        return None


def _first(render: Renderer, given: Mapping[str, Any]) -> str | None:
    """What transformers makes of the first form that it can render, of a content in parts with all its text."""
    for messages in _forms(given["messages"]):
        try:
            rendered = render(**{**given, "messages": messages})
        except Exception:  # whatever a template raises
            continue
        written = [part["text"] for m in messages if isinstance(m.get("content"), list) for part in m["content"]]
        if all(chat_template.is_written(text, rendered) for text in written):
            return rendered
    return None


def _forms(messages: list[dict[str, Any]]) -> Iterator[list[dict[str, Any]]]:
    for is_joined in (False, True):
        given = [
            {**m, "content": joined_text(m["content"])} if is_joined and isinstance(m.get("content"), list) else m
            for m in messages
        ]
        yield [{**m, "content": ""} if m.get("content") is None else m for m in given]
        yield given


if __name__ == "__main__":
    main()
