"""The storyteller's recipe: reading the corpus strictly, the held-back split, the tokenizer's files."""

import json
import lzma
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tokenizers import Tokenizer
from transformers import AutoTokenizer

RECIPE = Path(__file__).parents[3] / "samples" / "storyteller" / "recipe"


@pytest.fixture(autouse=True)
def recipe_path(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.syspath_prepend(str(RECIPE))
    yield
    for name in ("read_corpus", "corpus_mix", "story_tokenizer", "sums", "build_corpus", "task_prompts"):
        sys.modules.pop(name, None)


def write_set(folder: Path, content: bytes, name: str = "tales") -> Path:
    with lzma.open(folder / f"{name}.jsonl.xz", "wb") as file:
        file.write(content)
    return folder


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"text": "a"}\n\n{"text": "b"}\n', r"tales\.jsonl\.xz, line 2: the line is empty"),
        (b'{"text": "a"}\n{"text": "\xff"}\n', r"line 2: not UTF-8 .* at byte 10"),
        (b'{"text": \n', r"line 1: not JSON"),
        (b"[1]\n", r"line 1: found a JSON list, expected an object"),
    ],
)
def test_bad_lines_are_named(tmp_path: Path, content: bytes, message: str) -> None:
    from read_corpus import CorpusError, read_set

    with pytest.raises(CorpusError, match=message):
        list(read_set(write_set(tmp_path, content), "tales"))


def test_a_missing_set_is_named(tmp_path: Path) -> None:
    from read_corpus import CorpusError, read_set

    with pytest.raises(CorpusError, match=r"nothing\.jsonl\.xz does not exist"):
        list(read_set(tmp_path, "nothing"))


def test_records_come_in_order(tmp_path: Path) -> None:
    from read_corpus import read_set

    assert list(read_set(write_set(tmp_path, b'{"n": 1}\n{"n": 2}\n'), "tales")) == [{"n": 1}, {"n": 2}]


def test_one_document_in_fifty_is_held_back() -> None:
    from read_corpus import is_held_back

    share = sum(is_held_back(f"document {number}") for number in range(20_000)) / 20_000
    assert 0.017 < share < 0.023


def test_the_tokenizer_speaks_both_libraries(tmp_path: Path) -> None:
    from corpus_mix import Document
    from story_tokenizer import render, save_tokenizer, train_tokenizer

    text = "Once upon a time there was a fox. 12 + 30 = 42."
    save_tokenizer(train_tokenizer([Document("tales", [("text", text)], False)]), tmp_path)
    bare = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    full = AutoTokenizer.from_pretrained(tmp_path)
    assert bare.encode(text).ids == full(text)["input_ids"]
    assert bare.encode(text).tokens[0] == "<|bos|>"
    assert full.decode(bare.encode(text).ids, skip_special_tokens=True) == text
    messages = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hi"}]
    chat = full.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert chat == "<|bos|><|system|>Be kind.<|end|><|user|>Hi<|end|><|assistant|>"
    ids = full.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
    assert ids == bare.encode(chat, add_special_tokens=False).ids
    assert render([("user", "Hi"), ("assistant", "Ho")]) == "<|bos|><|user|>Hi<|end|><|assistant|>Ho<|end|>"
    assert (full.bos_token, full.eos_token, full.pad_token) == ("<|bos|>", "<|end|>", "<|pad|>")
    assert bare.encode("42").tokens[1:] == ["4", "2"]


def test_an_unknown_role_is_refused(tmp_path: Path) -> None:
    from corpus_mix import Document
    from story_tokenizer import save_tokenizer, train_tokenizer

    save_tokenizer(train_tokenizer([Document("tales", [("text", "A fox.")], False)]), tmp_path)
    with pytest.raises(Exception, match="Unknown role 'tool'"):
        AutoTokenizer.from_pretrained(tmp_path).apply_chat_template([{"role": "tool", "content": "x"}])


def test_documents_are_in_the_form_that_training_reads(tmp_path: Path) -> None:
    from build_corpus import write_documents
    from corpus_mix import Document

    from mirrorsd.training.text.corpus import read_documents

    chat = [("user", "Hi"), ("assistant", "Ho")]
    documents = [Document("tales", [("text", "Once.\n\nTwice.")], False), Document("chats", chat, False)]
    write_documents(tmp_path / "documents.jsonl", documents)
    tale, talk = read_documents(tmp_path / "documents.jsonl")
    assert tale.text == "Once.\n\nTwice."
    assert [(turn["role"], turn["content"]) for turn in talk.messages] == chat


def test_task_prompts_end_with_the_user_and_leave_out_what_is_held_back(tmp_path: Path) -> None:
    from read_corpus import is_held_back
    from task_prompts import main

    story = 'There was an old man who had three sons, all of them lazy. "Go," said he. So they went, and Hans cried.'
    records = {
        "fairy_tales": [{"title": f"tale {n}", "text": f"{story} " * 3 + f"This was tale {n}."} for n in range(200)],
        "children_books": [{"title": "Kim", "text": "Left out."}, {"title": "Hans", "text": f"{story} " * 9}],
        "fairy_tale_qa": [{"story": "tale 1", "context": story, "question": "Who?", "answer": "hans"}] * 4,
        "math": [{"question": f"{n} + 1 = ?", "answer": f"#### {n + 1}"} for n in range(9)],
        "dialogues": [
            {"id": "a", "turns": [["user", "Tea"], ["assistant", "Yes."], ["assistant", "Sugar?"], ["user", "No"]]},
            {"id": "b", "turns": [["user", "Cake"], ["assistant", "Here."]]},
        ],
        "short_qa": [{"question": "where is it?", "answers": ["Rome"]}],
        "instructions": [{"instruction": "Name one.", "input": "", "output": "One."}],
    }
    for name, rows in records.items():
        write_set(tmp_path, "".join(json.dumps(row) + "\n" for row in rows).encode(), name)
    main(tmp_path, tmp_path / "prompts.jsonl", count=120)
    prompts = [json.loads(line)["messages"] for line in (tmp_path / "prompts.jsonl").read_text().splitlines()]
    assert len({json.dumps(prompt) for prompt in prompts}) == len(prompts) == 120
    assert all(prompt[-1]["role"] == "user" for prompt in prompts)
    held = [f"tale {number}." for number in range(200) if is_held_back(f"tale-{number}")]
    said = [turn["content"] for prompt in prompts for turn in prompt]
    assert held and not any(tale in text for tale in held for text in said)
    assert not any("Left out" in text for text in said)
    for sign in ("about an old man who had three sons.", "Summarize this", "Tea", "= ?", "Name one."):
        assert any(sign in text for text in said), sign


def test_sums_are_right() -> None:
    import random

    from sums import make_sum

    rng = random.Random(0)
    for _ in range(200):
        _, answer = make_sum(rng)
        left, right = answer.split(".")[0].split(" = ")
        assert eval(left) == int(right)  # only digits and + - * from make_sum itself


def test_prompts_are_spec_bench_form() -> None:
    rows = [json.loads(line) for line in (RECIPE.parent / "prompts.jsonl").read_text(encoding="utf-8").splitlines()]
    assert len(rows) == 120
    assert {row["category"] for row in rows} == {"story", "question", "summary", "dialogue", "sums", "instruction"}
    assert all(set(row) == {"question_id", "category", "turns"} and row["turns"] for row in rows)
    assert all(len(row["turns"]) == 2 for row in rows if row["category"] == "dialogue")
