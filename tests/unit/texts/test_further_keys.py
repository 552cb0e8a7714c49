"""Keys that a schema does not name are none of those that it names, and leave the named ones as they are."""

from typing import Any

import pytest
from schema_texts import END, VOCAB, compiler, is_allowed

from mirrorsd.texts.constraint import ConstraintCompiler

__all__ = ["compiler"]
TEXT, COUNT = {"type": "string"}, {"type": "integer"}
TREE = {"type": "object", "properties": {"v": TEXT, "kid": {"$ref": "#/$defs/tree"}}, "required": ["v"]}


def named(schema: Any, name: str = "a", **more: Any) -> dict[str, Any]:
    return {"type": "object", "properties": {name: schema}, "required": [name], **more}


@pytest.mark.parametrize("name", ["a", '"\n/\\', "^[a-z]-\\d]$", "x" * 80])
def test_further_keys_have_their_own_schema_beside_a_required_name(compiler: ConstraintCompiler, name: str) -> None:
    schema = named(TEXT, name, additionalProperties=COUNT)
    assert is_allowed(compiler, schema, {name: "x"})
    assert is_allowed(compiler, schema, {name: "x", "b": 1, "ab": 2})
    for value in ({name: 1}, {name: "x", "b": "y"}, {"b": 1}, {name: "x", "": 1}):
        assert not is_allowed(compiler, schema, value)


def test_a_named_text_is_as_long_beside_further_keys_as_without(compiler: ConstraintCompiler) -> None:
    for more in (False, True, {}, TEXT):
        assert is_allowed(compiler, named(TEXT, additionalProperties=more), {"a": "x" * 100})


def test_a_property_that_never_comes_is_no_further_key(compiler: ConstraintCompiler) -> None:
    schema = {"type": "object", "properties": {"a": False, "b": COUNT}, "additionalProperties": COUNT}
    for required in ([], ["b"]):
        assert is_allowed(compiler, {**schema, "required": required}, {"b": 1})
        assert not is_allowed(compiler, {**schema, "required": required}, {"b": 1, "a": 1})
    assert is_allowed(compiler, schema, {"c": 1}) and not is_allowed(compiler, schema, {"a": 1})


def test_a_property_that_has_no_room_left_is_no_further_key(compiler: ConstraintCompiler) -> None:
    schema = {"$ref": "#/$defs/tree", "$defs": {"tree": {**TREE, "additionalProperties": TEXT}}}

    def within(depth: int, innermost: Any) -> Any:
        return {"v": "x", "kid": within(depth - 1, innermost)} if depth else innermost

    deepest = max(depth for depth in range(10) if is_allowed(compiler, schema, within(depth, {"v": "x"})))
    assert deepest > 1
    assert not is_allowed(compiler, schema, within(deepest + 1, "x"))


def test_objects_that_hold_together_are_taken_as_ever(compiler: ConstraintCompiler) -> None:
    """llguidance takes further keys of two objects by one pattern alone."""
    compiler = ConstraintCompiler(compiler._tokenizer, VOCAB, (END,), 4096)
    schema = {"allOf": [True, named(TEXT, additionalProperties=True)]}
    assert is_allowed(compiler, schema, {"a": "x"}) and is_allowed(compiler, schema, {"a": "x", "b": "y"})
    assert not is_allowed(compiler, schema, {"a": 1})
