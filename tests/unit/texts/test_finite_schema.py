"""Objects are closed, required properties come first, and every text ends, however long a model wants to go on."""

import json
import random
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from mirrorsd.graphs.errors import ConfigError
from mirrorsd.texts.config import GenerationConfig
from mirrorsd.texts.constraint import Constraint, ConstraintCompiler
from mirrorsd.texts.finite_schema import finite_schema
from mirrorsd.texts.tokenizer import BundleTokenizer

VOCAB, END, CONTEXT = 257, 256, 256
TEXT, YES = {"type": "string"}, {"type": "boolean"}
NODE = {"type": "object", "properties": {"v": TEXT, "kids": {"type": "array", "items": {"$ref": "#/$defs/node"}}}}
A = {"type": "object", "properties": {"a": YES}, "required": ["a"]}
B = {"type": "object", "properties": {"b": YES}, "required": ["b"]}


def an_object(*required: str, **properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(required)}


def keys_by(pattern: str) -> dict[str, Any]:
    return {"type": "object", "patternProperties": {pattern: {"type": "integer"}}}


ENDLESS: dict[str, Any] = {
    "anything": {},
    "an open object": {"type": "object", "additionalProperties": True},
    "a map": {"type": "object", "additionalProperties": {"type": "integer"}},
    "a map beside optional properties": {**an_object("z", a=YES, z=YES), "additionalProperties": {"type": "integer"}},
    "a map of maps": {"type": "object", "additionalProperties": {"type": "object", "additionalProperties": TEXT}},
    "a string": TEXT,
    "a string or nothing": {"type": ["string", "null"]},
    "a pattern": {"type": "string", "pattern": "^a+$"},
    "an address": {"type": "string", "format": "uri"},
    "an integer": {"type": "integer"},
    "a number": {"type": "number"},
    "a share": {"type": "number", "minimum": 0, "maximum": 1},
    "a positive number": {"type": "number", "exclusiveMinimum": 0},
    "a list": {"type": "array"},
    "a list with a least length": {"type": "array", "items": TEXT, "minItems": 3},
    "lists of lists": {"type": "array", "items": {"type": "array", "items": TEXT}},
    "a beginning and a rest": {"type": "array", "prefixItems": [TEXT, {"type": "integer"}], "items": YES},
    "a tree": {"$ref": "#/$defs/node", "$defs": {"node": NODE}},
    "a chain": an_object("v", "next", v={"type": "integer"}, next={"anyOf": [{"$ref": "#"}, {"type": "null"}]}),
    "a required property without a schema": {"type": "object", "required": ["x"]},
    "a number within a hair": {"type": "number", "exclusiveMinimum": 0, "maximum": 1e-9},
    "a number within a hair, or a text": {"type": ["number", "string"], "minimum": 0, "maximum": 1e-9},
    **{f"keys by {name}": keys_by(name) for name in ("^a+$", "a", "^(a+,)*a*$", "(^a|,$)", "^[^]1]{2,}|a$", "")},
    "keys by two patterns": {"type": "object", "patternProperties": {"^a.*$": YES, "^1": TEXT}},
    "keys by a pattern beside a name": {**keys_by("^a+$"), "properties": {"b": YES}},
    "a union": {"anyOf": [TEXT, {"type": "array", "items": {"type": "number"}}]},
    "many strings": an_object(*"abcdefgh", **dict.fromkeys("abcdefgh", TEXT)),
}
ALLOWED: dict[str, tuple[Any, list[Any], list[Any]]] = {
    "an object is closed": (an_object(a=YES), [{}, {"a": True}], [{"b": 1}, {"a": True, "b": 1}]),
    "an object may say that it is open": (
        {**an_object(a=YES), "additionalProperties": True},
        [{"b": 1}, {"b": {"c": None}}],
        [{"a": 1}],
    ),
    "an object without properties is empty": ({"type": "object"}, [{}], [{"a": 1}]),
    "required comes first": (
        an_object("b", a=YES, b=YES),
        [{"b": True}, {"b": True, "a": True}],
        [{"a": True, "b": True}],
    ),
    "parts of one object": ({"allOf": [A, B]}, [{"a": True, "b": True}], [{"a": True}, {"b": True}]),
    "one of two objects": ({"anyOf": [A, B]}, [{"a": True}, {"b": True}], [{"a": True, "b": True}, {}]),
    "a reference beside properties": (
        {"$ref": "#/$defs/a", **B, "$defs": {"a": A}},
        [{"a": True, "b": False}],
        [{"a": True}, {"b": True}],
    ),
    "requirements in branches": (
        {**an_object(a=YES, b=YES), "anyOf": [{"required": ["a"]}, {"required": ["b"]}]},
        [{"a": True}, {"b": True}],
        [{}, {"c": 1}],
    ),
    "requirements in branches of an open object": (
        {**an_object(a=YES, b=YES), "additionalProperties": True, "anyOf": [{"required": ["a"]}, {"required": ["b"]}]},
        [{"a": True}, {"b": True}, {"a": True, "b": True}],
        [{}, {"a": 1}],
    ),
    "parts of an open object": (
        {**an_object(a=YES), "additionalProperties": YES, "allOf": [B]},
        [{"b": True}, {"b": True, "a": True}],
        [{}, {"a": True}],
    ),
    "a map beside a name, or nothing": (
        {**an_object(a=YES), "type": ["object", "null"], "additionalProperties": YES},
        [None, {}, {"a": True}, {"b": True}],
        [1, {"b": 1}, {"a": None}],
    ),
    "an open object, or a list": (
        {**an_object(a=YES), "type": ["object", "array"], "additionalProperties": True, "items": YES},
        [[True], {"b": 1}],
        [[1], None],
    ),
    "keys by a pattern beside a name, or a text": (
        {**keys_by("^a+$"), "type": ["string", "object"], "properties": {"b": YES}},
        ["a", {"aa": 1}, {"b": True}],
        [1, {"c": 1}],
    ),
    "a bound of the schema's own": ({**TEXT, "maxLength": 900}, ["a" * 900], ["a" * 901]),
    "a form nobody knows is a remark": ({**TEXT, "format": "phone"}, ["+1"], [1]),
    "remarks beside a type": ({**TEXT, "title": "T", "nullable": True, "x-order": 3, "example": "b"}, ["a"], [None]),
    "remarks alone": ({"description": "what you like"}, ["a", 1, [True], {"a": None}], []),
    "keys by a pattern": (keys_by("^a+$"), [{"a" * 30: 1, "aa": 2}], [{"b": 1}, {"ab": 1}, {"a": True}]),
    "keys by a pattern anywhere": (keys_by("_id"), [{"an_ids": 1}], [{"an_di": 1}]),
    "keys by a pattern at an end": (keys_by("^x|_id$"), [{"an_id": 1}, {"xs": 1}], [{"ids": 1}, {"ax": 1}]),
    "keys by alternatives": (keys_by("(?:^a$)|(?:^b)"), [{"a": 1}, {"bc": 1}], [{"ac": 1}, {"cb": 1}]),
    "keys by a pattern beside a name": (
        {**keys_by("^a+$"), "properties": {"b": YES}},
        [{"b": True}, {"aa": 1}, {}],
        [{"b": 1}, {"c": 1}],
    ),
    "a tree ends in leaves": (
        {"$ref": "#/$defs/node", "$defs": {"node": NODE}},
        [{"v": "a", "kids": [{"v": "b", "kids": []}]}],
        [{"kids": [{"w": 1}]}],
    ),
}


@pytest.fixture(scope="module")
def compiler(tmp_path_factory: pytest.TempPathFactory) -> ConstraintCompiler:
    """Single bytes and an end."""
    folder = tmp_path_factory.mktemp("bundle")
    letters = {letter: place for place, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(letters, []))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer.add_special_tokens(["<end>"])
    (folder / "tokenizer").mkdir()
    tokenizer.save(str(folder / "tokenizer" / "tokenizer.json"))
    return ConstraintCompiler(BundleTokenizer(folder), VOCAB, (END,), CONTEXT)


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


def longest(compiler: ConstraintCompiler, schema: Any, wishes: list[list[int]], seed: int) -> tuple[str, int]:
    """The text of a model that ends only when nothing else may come, and prefers some tokens over others."""
    constraint, found, pick = constraint_of(compiler, schema), [], random.Random(seed)
    while len(found) < 40 * CONTEXT:
        may_come = set(np.flatnonzero(constraint.allowed(VOCAB)).tolist()) - {END}
        if not may_come:
            break
        wanted = next((kept for wish in wishes if (kept := [token for token in wish if token in may_come])), None)
        token = pick.choice(sorted(wanted or may_come))
        constraint.advance(token)
        found.append(token)
    return compiler._tokenizer.decode(found), len(found)


@pytest.mark.parametrize("kind", ENDLESS)
def test_every_text_ends(compiler: ConstraintCompiler, kind: str) -> None:
    ids = {letter: compiler._tokenizer.encode(letter)[0] for letter in 'a1,[{"'}
    filling = [[ids["{"], ids["["]], [ids["a"]], [ids["1"]], [ids[","]], [ids['"']]]
    for wishes in (filling, filling[1:], []):
        text, length = longest(compiler, ENDLESS[kind], wishes, seed=len(kind))
        assert length < 8 * CONTEXT
        json.loads(text)


def test_a_number_within_a_hair_is_in_its_range(compiler: ConstraintCompiler) -> None:
    schema = {"type": "number", "exclusiveMinimum": 0, "maximum": 3.2e-15}
    assert all(0 < float(longest(compiler, schema, [], seed)[0]) <= 3.2e-15 for seed in range(8))


@pytest.mark.parametrize("kind", ALLOWED)
def test_what_a_schema_allows(compiler: ConstraintCompiler, kind: str) -> None:
    schema, good, bad = ALLOWED[kind]
    for value in (*good, *bad):
        assert is_allowed(compiler, schema, value) == any(value is kept for kept in good), value


LARGE: dict[str, tuple[Any, list[int], list[int]]] = {
    "a whole number that is a double": ({"const": 2**60}, [2**60], [2**60 - 1]),
    "a largest number": ({"type": "integer", "minimum": 0, "maximum": 2**60 + 255}, [2**59], [2**60 + 256]),
    "a largest number of any kind": ({"type": "number", "maximum": 2**60 + 255}, [10**17], [2**60 + 256, 10**19]),
    "a smallest number": ({"type": "integer", "minimum": 2**53 + 1}, [2**53 + 9, 10**16], [2**53, 0]),
    "bounds without themselves": (
        {"type": "integer", "exclusiveMinimum": 2**53, "exclusiveMaximum": 2**60},
        [2**53 + 9, 10**18],
        [2**53 - 1, 2**53, 2**60, 2**60 + 1],
    ),
    "bounds of any kind without themselves": (
        {"type": "number", "exclusiveMinimum": 2**53, "exclusiveMaximum": 2**60},
        [2**53 + 9, 10**17],
        [2**53 - 1, 2**53, 2**60, 2**60 + 1],
    ),
    "a bound with a point": (
        {"type": "integer", "maximum": -9007199254739807.0},
        [-9007199254739807],
        [-9007199254739806],
    ),
    "two largest numbers, one far below": (
        {"type": "integer", "maximum": 5 - 2**53, "exclusiveMaximum": -(2**60)},
        [-5 * 10**18],
        [5 - 2**53, -(2**60)],
    ),
    "two largest numbers": ({"type": "integer", "exclusiveMaximum": 2**60, "maximum": 5}, [5], [6, 10**18]),
    "all of 64 bits": (
        {"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1},
        [-1234567890123456789, 0, 9 * 10**18],
        [-(2**63) - 1, 2**63],
    ),
    "all of 64 bits and of any kind": (
        {"type": "number", "minimum": -(2**63), "maximum": 2**63 - 1},
        [-(10**17), 0, 10**17],
        [-(2**63) - 1, 2**63],
    ),
    "far below": ({"type": "integer", "maximum": -(2**62)}, [-5 * 10**18], [1 - 2**62, 0]),
    "no bound at all": ({"type": "integer", "minimum": 0, "maximum": 10**400}, [0, 10**18], [-1]),
}


@pytest.mark.parametrize("kind", LARGE)
def test_large_numbers_keep_their_last_digits(compiler: ConstraintCompiler, kind: str) -> None:
    schema, good, bad = LARGE[kind]
    assert {value: is_allowed(compiler, schema, value) for value in (*good, *bad)} == {
        **dict.fromkeys(good, True),
        **dict.fromkeys(bad, False),
    }


@pytest.mark.parametrize(
    "schema",
    [
        {"enum": [1, 1234567890123456789]},
        {"const": {"a": [2**53 + 1]}},
        {"const": 0.9713745010588913},
        {"const": -(2**63)},  # llguidance itself ends the process
        {"type": "integer", "minimum": 2**63},
        {"type": "integer", "maximum": -(2**63)},
        {"type": "integer", "maximum": -1e19},
        {"type": "integer", "exclusiveMinimum": 2**63 - 1},
    ],
    ids=str,
)
def test_numbers_that_would_change_are_refused(compiler: ConstraintCompiler, schema: Any) -> None:
    with pytest.raises(ConfigError, match="too many digits"):
        compiler.compile(GenerationConfig(json_schema=schema))


@pytest.mark.parametrize(
    "schema",
    [
        False,
        {"$ref": "#"},
        an_object("n", n={"$ref": "#"}),
        {"$defs": 5},
        {"$ref": "#/$defs/a", "$defs": []},
        {"anyOf": {}},
        {"type": "number", "exclusiveMinimum": 5, "exclusiveMaximum": 5},
    ],
    ids=str,
)
def test_what_has_no_value_or_no_sense_is_refused(compiler: ConstraintCompiler, schema: Any) -> None:
    with pytest.raises(ConfigError, match="cannot be taken"):
        compiler.compile(GenerationConfig(json_schema=schema))


def test_a_schema_is_not_changed() -> None:
    schema = {**an_object("b", a=TEXT, b={"$ref": "#/$defs/a"}), "$defs": {"a": {"format": "phone", **TEXT}}}
    before = json.dumps(schema)
    finite_schema(schema, CONTEXT)
    assert json.dumps(schema) == before


def test_whitespace_is_the_callers_where_he_says_so() -> None:
    given = {**TEXT, "x-guidance": {"whitespace_flexible": False, "item_separator": ","}}
    assert finite_schema(given, CONTEXT)["x-guidance"] == given["x-guidance"]


def test_patterns_that_look_around_leave_bounded_texts_where_nobody_insists() -> None:
    pattern = "^(?!a)b"
    assert finite_schema({"pattern": pattern}, 512)["pattern"] == pattern
    found = finite_schema({"pattern": pattern}, 512, is_strict=False)
    assert (found["type"], "pattern" in found, found["maxLength"] > 0) == ("string", False, True)
    keys = finite_schema({"type": "object", "patternProperties": {pattern: {"type": "null"}}}, 512, is_strict=False)
    assert list(keys["patternProperties"]) == ["^(?s:.){1,32}$"]
