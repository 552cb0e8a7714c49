"""What a JSON schema allows, byte by byte: a compiler of constraints, and questions to it."""

import json
from typing import Any

import pytest
from byte_tokenizer import byte_tokenizer

from mirrorsd.texts.config import GenerationConfig
from mirrorsd.texts.constraint import Constraint, ConstraintCompiler

VOCAB, END, CONTEXT = 257, 256, 256


@pytest.fixture(scope="module")
def compiler(tmp_path_factory: pytest.TempPathFactory) -> ConstraintCompiler:
    """Single bytes and an end."""
    tokenizer = byte_tokenizer(tmp_path_factory.mktemp("bundle"), ["<end>"])
    return ConstraintCompiler(tokenizer, VOCAB, (END,), CONTEXT)


def constraint_of(compiler: ConstraintCompiler, schema: Any) -> Constraint:
    found = compiler.compile(GenerationConfig(json_schema=schema))
    assert found is not None
    return found


def is_allowed(compiler: ConstraintCompiler, schema: Any, value: Any) -> bool:
    constraint = constraint_of(compiler, schema)
    for token in (*compiler._tokenizer.encode(json.dumps(value)), END):
        if not constraint.allowed(VOCAB)[token]:
            return False
        constraint.advance(token)
    return True
