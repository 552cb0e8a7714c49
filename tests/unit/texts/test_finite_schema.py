"""Objects are closed, required properties come first, and every text ends, however long a model wants to go on."""

import json
import random
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from schema_texts import CONTEXT, END, VOCAB, compiler, constraint_of, is_allowed

from mirrorsd.graphs.errors import ConfigError
from mirrorsd.texts.config import GenerationConfig
from mirrorsd.texts.constraint import ConstraintCompiler
from mirrorsd.texts.finite_schema import finite_schema

__all__ = ["compiler"]
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
    "an object that says nothing of properties has any": ({"type": "object"}, [{}, {"a": {"b": None}}], [1, []]),
    "any object with a property at least": ({"type": "object", "minProperties": 1}, [{"a": 1}], [{}]),
    "any object within one": (
        an_object("o", o={"type": ["object", "null"]}),
        [{"o": {"a": 1}}, {"o": None}],
        [{"b": 1}],
    ),
    "an object with properties, none of them named, is empty": (an_object(), [{}], [{"a": 1}]),
    "any object beside a sibling's names": ({"type": "object", "allOf": [A]}, [{"a": True}], [{"a": True, "b": 1}]),
    "what says nothing is left out": (
        {
            **{"type": "object", "properties": {"a": {**YES, "not": False, "enum": None}}, "required": None},
            **{"uniqueItems": False, "dependentRequired": {}, "unevaluatedProperties": True, "$defs": None},
        },
        [{"a": True}, {}],
        [{"b": 1}],
    ),
    "properties that are null": ({"type": "object", "properties": None, "required": []}, [{"a": 1}], [1]),
    "a branch that nothing fits": ({"anyOf": [YES, {"not": {}}, {"not": True, "title": "T"}]}, [True], [1, None]),
    "a property that nothing fits": (an_object(a=YES, b={"not": {}}), [{"a": True}], [{"b": 1}]),
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
    "keys by a pattern that a name fits": (
        {**keys_by("^a+$"), "properties": {"a": {"type": ["string", "integer"]}, "b": YES}},
        [{"a": 1}, {"b": True}, {"aa": 1}],
        [{"a": "b"}, {"aa": "b"}],
    ),
    "keys by a pattern beside a name, or a text": (
        {**keys_by("^a+$"), "type": ["string", "object"], "properties": {"b": YES}},
        ["a", {"aa": 1}, {"b": True}],
        [1, {"c": 1}],
    ),
    "a closed object knows its own names alone": (
        {"anyOf": [{**A, "additionalProperties": False}, B], "properties": {"b": YES}},
        [{"a": True}, {"b": True}],
        [{"a": True, "b": True}, {}],
    ),
    "others of an object hold for names that its parts have": (
        {**an_object(a=YES), "additionalProperties": YES, "allOf": [an_object("b", b={})]},
        [{"b": True}],
        [{"b": 1}, {}],
    ),
    "others of an object hold for required names": (
        {"type": "object", "required": ["a"], "additionalProperties": YES},
        [{"a": True}],
        [{"a": 1}, {}],
    ),
    "a required name by a pattern": (
        {**keys_by("^a+$"), "required": ["aa"], "additionalProperties": False},
        [{"aa": 1}],
        [{}, {"aa": True}],
    ),
    "one of two with different names": ({"oneOf": [A, B]}, [{"a": True}, {"b": True}], [{"a": True, "b": True}, {}]),
    "one of two with tags": (
        {"oneOf": [an_object("k", k={"const": "x"}, v=YES), an_object(k={"enum": ["y", "z"]}, v=YES)]},
        [{"k": "x", "v": True}, {"k": "y"}, {"k": "z", "v": True}],
        [{"k": "w"}, {"v": True, "k": "x"}],
    ),
    "one of two definitions with tags": (
        {
            "oneOf": [{"$ref": "#/$defs/x"}, {"$ref": "#/$defs/y"}],
            "discriminator": {"propertyName": "k"},
            "$defs": {"x": an_object("k", k={"const": "x"}), "y": an_object("k", k={"const": "y"}, a=YES)},
        },
        [{"k": "x"}, {"k": "y", "a": True}],
        [{"k": "x", "a": True}, {"k": "z"}],
    ),
    "one of an object and others": (
        {"oneOf": [A, TEXT, {"type": "null"}, {"const": 3}]},
        [{"a": True}, "a", None, 3],
        [{}, 4],
    ),
    "one of two that may both fit where the caller says so": (
        {"oneOf": [A, an_object("a", "b", a=YES, b=YES)], "x-guidance": {"coerce_one_of": True}},
        [{"a": True}, {"a": True, "b": True}],
        [{"b": True}],
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
        {"allOf": [{**A, "additionalProperties": False}, B]},
        {"type": "object", "required": ["a"], "additionalProperties": False},
    ],
    ids=str,
)
def test_what_has_no_value_or_no_sense_is_refused(compiler: ConstraintCompiler, schema: Any) -> None:
    with pytest.raises(ConfigError, match="cannot be taken"):
        compiler.compile(GenerationConfig(json_schema=schema))


@pytest.mark.parametrize(
    "branches",
    [
        [A, an_object("a", "b", a=YES, b=YES)],
        [an_object("a", a=YES, b=YES), B],
        [an_object("k", k={"const": "x"}), {**an_object(k={"const": "x"}, a=YES), "required": ["a", "k"]}],
        [{**A, "additionalProperties": True}, B],
        [an_object("a", a=YES), True],
        [{"anyOf": [A, {"const": {"b": True}}]}, B],
        [keys_by("^b$"), B],
        [{"type": "object"}, B],
    ],
    ids=str,
)
def test_objects_that_may_fit_two_branches_of_one_of_are_refused(compiler: ConstraintCompiler, branches: Any) -> None:
    with pytest.raises(ConfigError, match="may fit two branches of oneOf; use anyOf"):
        compiler.compile(GenerationConfig(json_schema={"oneOf": branches}))


VALUES = st.sampled_from([YES, {"const": "x"}, {"enum": ["x", "y"]}, {"type": "null"}, True])
NAMES = st.lists(st.sampled_from("abk"), unique=True, max_size=2)
OBJECTS = st.fixed_dictionaries(
    {
        "type": st.sampled_from(["object", ["object", "null"], ["boolean", "object"]]),
        "properties": st.dictionaries(st.sampled_from("abk"), VALUES, max_size=3),
        "required": NAMES,
    },
    optional={
        "additionalProperties": st.sampled_from([False, True, YES]),
        "patternProperties": st.just({"^b": YES}),
    },
)
SCHEMAS = st.builds(
    lambda own, key, parts: {**own, key: parts},
    OBJECTS | st.just({}),
    st.sampled_from(["allOf", "anyOf", "oneOf"]),
    st.lists(OBJECTS | st.sampled_from([YES, {"type": "null"}]), min_size=1, max_size=3)
    | st.lists(NAMES.map(lambda names: {"required": names}), min_size=1, max_size=3),
)


@settings(max_examples=250, deadline=None, derandomize=True, database=None)
@given(schema=SCHEMAS, seed=st.integers(0, 99))
def test_what_is_allowed_fits_the_schema_that_was_given(compiler: ConstraintCompiler, schema: Any, seed: int) -> None:
    validator = pytest.importorskip("jsonschema_rs").Draft202012Validator(schema)
    try:
        constraint = constraint_of(compiler, schema)
    except ConfigError:
        return
    found, pick = list[int](), random.Random(seed)
    while END not in found and len(found) < CONTEXT:
        may_come = np.flatnonzero(constraint.allowed(VOCAB)).tolist()
        found.append(END if END in may_come and pick.random() < 0.5 else pick.choice(may_come))
        constraint.advance(found[-1])
    if END in found:
        text = compiler._tokenizer.decode(found[:-1])
        assert validator.is_valid(json.loads(text)), text


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


@pytest.mark.parametrize(
    "schema",
    [
        {
            **{
                "type": "object",
                "properties": {"a": {"type": "string"}},
                "patternProperties": {"^x": {"type": "string"}},
            },
            **{"additionalProperties": False, "minProperties": 1},
        },
        {
            **{"type": "object", "required": ["c"], "additionalProperties": {}},
            "anyOf": [{"required": ["c"]}, {"required": ["d"]}],
        },
        {"const": 1000000000000000.0},
    ],
)
def test_what_needs_no_refusal_is_taken(compiler: Any, schema: Any) -> None:
    assert compiler.compile(GenerationConfig(json_schema=json.dumps(schema))) is not None


CANNOT_BE_FOLLOWED: dict[str, tuple[Any, list[Any]]] = {
    "not": ({**TEXT, "not": {"const": "a"}}, ["a"]),
    "not alone": ({"not": {"type": "null"}}, ["a", None]),
    "a branch that nothing fits": ({"anyOf": [TEXT, {"not": {}}]}, ["a"]),
    "uniqueItems": ({"type": "array", "items": YES, "uniqueItems": True}, [[True, True]]),
    "if and then": ({**an_object(a=YES), "if": {"required": ["a"]}, "then": {"required": ["b"]}}, [{"a": True}]),
    "contains": ({"type": "array", "items": YES, "contains": {"const": True}}, [[False]]),
    "dependentRequired": ({**an_object(a=YES, b=YES), "dependentRequired": {"a": ["b"]}}, [{"a": True}]),
    "unevaluatedProperties": ({**A, "unevaluatedProperties": False}, [{"a": True}]),
    "keys of a form": ({"type": "object", "propertyNames": {"pattern": "^a"}}, [{"b": 1}]),
    "a pattern that nobody reads": ({"type": "string", "pattern": "("}, ["a"]),
    "a pattern that looks back": ({"pattern": "(a)\\1"}, ["a"]),
    "a pattern of keys that nobody reads": (keys_by("("), [{"a": 1}]),
    "a type that is none": ({"type": "any"}, ["a", 1]),
    "a type that is none beside one": ({"type": ["string", "file"]}, ["a"]),
    "what is required as a word": ({**an_object(a=YES), "required": True}, [{"a": True}, {}]),
    "a length that is a text": ({**TEXT, "maxLength": "3"}, ["a"]),
    "a reference to nothing": ({"$ref": "#/$defs/nowhere"}, ["a", 1]),
    "a reference to elsewhere": (an_object(a={"$ref": "https://x.example/y.json"}), [{"a": 1}]),
    "a choice of none": ({**TEXT, "enum": []}, ["a"]),
    "a number of too many digits": ({"enum": [2**60 + 1]}, ["a", 1]),
    "a property whose schema is a word": (an_object(a="string", b=YES), [{"a": 1, "b": True}]),
}


@pytest.mark.parametrize("kind", CANNOT_BE_FOLLOWED)
def test_what_cannot_be_followed_is_left_out_where_nobody_insists(compiler: ConstraintCompiler, kind: str) -> None:
    schema, good = CANNOT_BE_FOLLOWED[kind]
    loose = finite_schema(schema, CONTEXT, is_strict=False)
    assert all(is_allowed(compiler, loose, value) for value in good)
    if kind not in ("a branch that nothing fits", "what is required as a word"):
        with pytest.raises(ConfigError, match="cannot be taken"):
            compiler.compile(GenerationConfig(json_schema=schema))


@pytest.mark.parametrize("value", [{"const": "x"}, {"enum": ["x", "y"]}])
def test_words_beside_a_value_are_left_out_where_nobody_insists(compiler: ConstraintCompiler, value: Any) -> None:
    schema = {**value, "type": "string", "additionalProperties": {"if": {}, "then": {}}, "items": {"uniqueItems": True}}
    loose = finite_schema(schema, CONTEXT, is_strict=False)
    assert is_allowed(compiler, loose, "x") and not is_allowed(compiler, loose, "z")
