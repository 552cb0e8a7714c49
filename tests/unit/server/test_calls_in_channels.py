"""Calls in channels, as gpt-oss was trained to write them and as its template does: allowed, and read."""

from typing import Any

import pytest
from byte_tokenizer import byte_tokenizer

from mirrorsd.server.answers.tools import Call, Wish, plan_tools
from mirrorsd.server.bundles.call_forms import IN_CHANNELS, Speech
from mirrorsd.server.settings import Limits
from mirrorsd.server.wire.chat import Tool
from mirrorsd.texts.channels import CALL, MARKS
from mirrorsd.texts.config import GenerationConfig
from mirrorsd.texts.constraint import ConstraintCompiler

RETURN, CONTEXT = "<|return|>", 1024
VOCAB = 256 + len(MARKS) + 1
AT = {"type": "object", "properties": {"at": {"type": "string"}}, "required": ["at"]}
TOOLS = [Tool.model_validate({"type": "function", "function": {"name": "look", "parameters": AT}})]
THOUGHT = "<|channel|>analysis<|message|>Hm, é.<|end|><|start|>assistant"
FINAL = "<|channel|>final<|message|>"
TRAINED = '<|channel|>commentary to=functions.look <|constrain|>json<|message|>{"at": "x"}'
WRITTEN = ' to=functions.look<|channel|>commentary json<|message|>{"at": "x"}'


@pytest.fixture(scope="module")
def speech(tmp_path_factory: pytest.TempPathFactory) -> tuple[Speech, ConstraintCompiler]:
    tokenizer = byte_tokenizer(tmp_path_factory.mktemp("bundle"), [*MARKS, RETURN])
    specials = tokenizer.special_tokens
    ends = (specials[RETURN], specials[CALL])
    return Speech(IN_CHANNELS, specials, ends, CONTEXT), ConstraintCompiler(tokenizer, VOCAB, ends, CONTEXT)


def is_allowed(given: tuple[Speech, ConstraintCompiler], text: str, answer: Any = None, **wish: Any) -> bool:
    speech, compiler = given
    plan = plan_tools(Wish(TOOLS, **wish), speech, Limits(), answer)
    constraint = compiler.compile(GenerationConfig(grammar=plan.grammar))
    assert constraint is not None
    for token in [*compiler._tokenizer.encode(text), speech.eos_ids["to=" in text]]:
        if not constraint.allowed(VOCAB)[token]:
            return False
        constraint.advance(token)
    return True


def test_what_the_model_was_trained_to_write_may_come(speech: Any) -> None:
    for text in (FINAL + "Hello!", THOUGHT + FINAL + "Hello!", TRAINED, WRITTEN, THOUGHT + TRAINED, THOUGHT + WRITTEN):
        assert is_allowed(speech, text), text
        assert is_allowed(speech, text, choice="required") == ("to=" in text), text
    assert not is_allowed(speech, "Hello!")
    assert not is_allowed(speech, THOUGHT), "thoughts alone are no answer"


def test_a_call_has_a_tool_s_name_and_its_schema(speech: Any) -> None:
    assert not is_allowed(speech, TRAINED.replace("look", "other"))
    assert not is_allowed(speech, TRAINED.replace('{"at": "x"}', "{}"))
    assert not is_allowed(speech, TRAINED.replace('"x"', "5"))


def test_an_answer_with_a_schema_stands_in_the_last_channel(speech: Any) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    assert is_allowed(speech, THOUGHT + FINAL + '{"a": 1}', schema)
    assert is_allowed(speech, THOUGHT + TRAINED, schema)
    assert not is_allowed(speech, FINAL + "Hello!", schema)
    assert is_allowed(speech, THOUGHT + FINAL + '{"a": 1}', schema, choice="none")
    assert not is_allowed(speech, THOUGHT + TRAINED, schema, choice="none")


@pytest.mark.parametrize("call", [TRAINED, WRITTEN])
def test_a_call_is_read_out_of_what_is_shown(speech: Any, call: str) -> None:
    given, compiler = speech
    plan = plan_tools(Wish(TOOLS), given, Limits())
    for asked in ({}, {"skip_special_tokens": False}):
        assert "skip_special_tokens" not in plan.settings_of(asked), "else the marks themselves would be the text"
    reader, tokenizer = plan.reader("name"), compiler._tokenizer
    decoder = tokenizer.decoder(tokenizer.encode("<|start|>assistant"))
    pieces = []
    for token in tokenizer.encode(THOUGHT + call):
        pieces += [decoder.push(token), decoder.mark]
    pieces += [decoder.finish(), decoder.mark]
    found = [*map(reader.push, pieces), reader.finish()]
    assert "".join(read.text for read in found) == "<think>\nHm, é.\n</think>"
    (made,) = [one for read in found for one in read.calls]
    assert made == Call(made.id, "look", '{"at": "x"}')
