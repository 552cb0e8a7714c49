"""A JSON schema made finite: objects that name properties are closed, and every text of it ends.

A schema may allow texts without end: invented keys, endless lists, strings and numbers, objects within objects. A small
model that repeats itself then never comes to the end. What is allowed here is a part of what the schema allows. Owns:
what is closed, and how long things may become. Does not own: the grammar, which is llguidance's.

All follows from the *room*, in characters. A text has half as much room as the model's context has tokens: the other
half is the prompt's. The properties of an object share its room. A list of room `r` has at most about the root of `r`
items, which together have `2 r`.

>>> finite_schema({"type": "array", "items": {"type": "string"}}, 2048)["maxItems"]
32
>>> finite_schema({"type": "array", "items": {"type": "string"}}, 2048)["items"]
{'type': 'string', 'maxLength': 64}
"""

from collections.abc import Mapping, Sequence
from itertools import permutations
from math import isqrt
from typing import Any, NamedTuple

from mirrorsd.graphs.errors import ConfigError
from mirrorsd.texts.finite_pattern import any_text, finite_pattern
from mirrorsd.texts.finite_values import (
    LEAST_ROOM,
    differ,
    even,
    exact_bounds,
    finite_number,
    finite_string,
    is_exact,
)
from mirrorsd.texts.followed_words import (
    IN_PLACE,
    KEYWORDS,
    OWN_VALUES,
    REFUSED,
    Schema,
    followed,
    is_followed,
    is_map,
    is_read,
    pointed,
    says,
)

KEY_LENGTH = 64
"""Most characters of a key that the schema does not name; and how often a part of a key's pattern may come."""
WHITESPACE = r"[ ]|\r?\n[ \t]{0,32}"
"""Between two parts of a document: nothing, a space, or a line's end and the next line's indent."""
_MOST_PARTS = 50_000
"""Of a schema with its definitions written out for each place: a second of work. Each doubling more doubles time and
memory: without this bound, twenty take gigabytes (`pytest tests/unit/texts/test_large_schemas.py`)."""
_OVERLAP = 'an object may fit two branches of oneOf; use anyOf, or allow both: "x-guidance": {"coerce_one_of": true}.'
Names = frozenset[str]


def finite_schema(schema: Any, context: int, *, is_strict: bool = True, is_apart: bool = True) -> Any:
    """The schema with closed objects, and with bounds where it has none; what is no schema is returned as it is.

    Objects that name properties and do not say `additionalProperties` have no others. Required ones come first.

    Args:
        schema: a JSON schema. Its `x-guidance` is kept: llguidance's own options.
        context: most tokens of the model.
        is_strict: whether words that llguidance cannot hold a text to are kept for it to refuse, and `oneOf` is one.
        is_apart: whether further keys are other ones than those that are required, as far as llguidance takes that.

    Raises:
        ConfigError: no value that ends fits the schema, its definitions are no object, or its numbers are too large.
    """
    if not isinstance(schema, dict | bool):
        return schema
    for name in ("$defs", "definitions"):
        if isinstance(schema, dict) and not (schema.get(name) is None or is_map(schema[name])):
            raise ConfigError(f"The JSON schema cannot be taken: {name} must be an object.")
    room = even(context // 2)
    given = schema["x-guidance"] if isinstance(schema, dict) and is_map(schema.get("x-guidance")) else {}
    options = given if is_strict else {"coerce_one_of": True, **given}
    is_any_of = bool(options.get("coerce_one_of"))
    expander = _Expander(schema, room, is_strict=is_strict, is_any_of=is_any_of, is_apart=is_apart)
    try:
        found = expander.at(schema, room)
    except RecursionError:
        raise ConfigError(
            "The JSON schema cannot be taken: its definitions stand within each other too deep."
        ) from None
    if found is None:
        raise ConfigError("The JSON schema cannot be taken: no value that ends fits it.")
    if options.get("whitespace_flexible", True) and not options.get("whitespace_pattern"):
        options = {**options, "whitespace_pattern": WHITESPACE}
    definitions = {"$defs": expander.definitions} if expander.definitions else {}
    whole = {**found, **definitions, "x-guidance": options}
    is_fine = not expander.has_taken or is_followed(whole)
    return whole if is_fine else finite_schema(schema, context, is_strict=is_strict, is_apart=False)


class _Expander:
    """Walks a schema. A definition is written once for each room that it is used in; within itself it has less."""

    def __init__(self, root: Any, room: int, *, is_strict: bool, is_any_of: bool, is_apart: bool) -> None:
        self.definitions: dict[str, Any] = {}
        self.has_taken, self._is_apart, self._num_parts = False, is_apart, 0
        self._root, self._room, self._is_strict = root, room, is_strict
        self._is_any_of = is_any_of
        self._written: dict[tuple[str, int, Names], str | None] = {}
        self._within: list[tuple[str, int]] = []
        self._named: dict[str, Names] = {}

    def at(self, schema: Any, room: int, others: Names = frozenset()) -> Any:
        """The schema within this room, None where nothing fits; `others` are properties that its siblings name."""
        self._num_parts += 1
        if self._num_parts > _MOST_PARTS:
            reason = (
                "written out for all places that use them, its definitions have too many parts; use them less often"
            )
            raise ConfigError(f"The JSON schema cannot be taken: {reason}.")
        if not is_map(schema):
            is_kept = schema is not True and (self._is_strict or isinstance(schema, list | None))
            return None if schema is False else schema if is_kept else self._anything(room)
        said = followed(schema, self._points, is_strict=self._is_strict)
        if said is None:
            return None
        if not any(map(says, said)):
            return self._anything(room)
        schema = exact_bounds(said)
        if "const" in schema or "enum" in schema:
            if not is_exact([schema.get("const"), schema.get("enum")]):
                raise ConfigError("The JSON schema cannot be taken: a number of a const or enum has too many digits.")
            is_plain = ("const", "enum", "type").__contains__  # what else says something holds parts of its own
            return schema if self._is_strict else {word: schema[word] for word in schema if is_plain(word)}
        own, found = _own_names(schema) | others, dict(schema)
        for key in ("$ref", *IN_PLACE):
            if key in found:
                found[key] = self._in_place(schema, key, room, own)
                if found[key] is None:
                    return None
        others = others.union(*(self._names({key: schema[key]}) for key in ("$ref", *IN_PLACE) if key in schema))
        types = _types(found)
        bounded = {name: self._bounded(name, found, room, others) for name in types}
        if types and not any(bounded.values()):
            return None
        for kept in filter(None, bounded.values()):
            found = {**found, **kept}
        left = [name for name in types if bounded[name]]
        return {**found, "type": left if len(left) > 1 else left[0]} if left else found

    def _points(self, target: Any) -> bool:
        return pointed(self._root, target) is not None

    def _bounded(self, kind: str, schema: Schema, room: int, others: Names) -> Schema | None:
        """The keywords of one type; None where its values have no room."""
        if kind == "object":
            return self._object(schema, room, others)
        if kind == "array":
            return self._array(schema, room)
        if kind == "string":
            return finite_string(schema, room, self._room)
        if kind not in ("integer", "number"):
            return {"type": kind}
        return finite_number(schema, kind, is_alone=len(_types(schema)) == 1)

    def _object(self, schema: Schema, room: int, others: Names) -> Schema | None:
        given, required = schema.get("properties", {}), schema.get("required", [])
        if not is_map(given) or not isinstance(required, list):
            return {"type": "object"}
        needed = [name for name in required if isinstance(name, str)]
        if _names_nothing(schema) and not others:
            schema = {**schema, "additionalProperties": True}
        beside = schema.get("additionalProperties", True)  # where an object says it, for its siblings' names too
        beside = beside if not is_map(beside) or any(map(says, beside)) else True
        unnamed = [name for name in (*needed, *sorted(others)) if name not in given and beside is not False]
        given = {**given, **{name: beside for name in unnamed if beside is not True or name not in others}}
        share = even(room // max(1, sum(map(_grows, given.values()))))
        read = {name: self.at(value, share) for name, value in given.items()}
        if any(read[name] is None for name in needed if name in read):
            return None
        read |= {name: True for name in unnamed if name not in read}
        read = {name: read[name] for name in sorted(read, key=lambda name: name not in needed)}
        named = {name: value for name, value in read.items() if value is not None}
        is_alone = not others and not {*schema} & {"$ref", *IN_PLACE}  # siblings' further keys have the same pattern
        taken = [name for name in needed if self._is_apart and is_alone and name in named]
        return {"type": "object", "properties": named} | self._others_of(schema, read, needed, taken, room)

    def _others_of(self, schema: Schema, read: Schema, needed: list[str], taken: Sequence[str], room: int) -> Schema:
        """What may stand beside the properties that were read: nothing, or some keys of bounded length, none taken."""
        patterns, more = schema.get("patternProperties"), schema.get("additionalProperties", False)
        count = _count(schema, "minProperties", "maxProperties", room)
        share = _share(room, count)
        length = min(max(share, LEAST_ROOM), KEY_LENGTH)
        other = any_text(length, taken)
        named = {name: value for name, value in read.items() if value is not None}
        never = {name: False for name, value in read.items() if value is None}
        if is_map(patterns) and patterns:
            values = {
                finite_pattern(pattern, length) if self._is_strict or is_read(pattern) else other: self.at(value, share)
                for pattern, value in patterns.items()
            }
        else:
            value = None if more is False else self.at(more, share)
            values = {} if value is None else {other: value}
        closed: Schema = {"additionalProperties": False}
        if not (values := {pattern: value for pattern, value in values.items() if value is not None}):
            return closed
        self.has_taken = self.has_taken or bool(taken)
        optional = [name for name in named if name not in needed]
        limits = {"patternProperties": values, "maxProperties": schema.get("maxProperties", len(needed) + count)}
        if not optional:
            return closed | limits | {"properties": {**named, **never}}
        # llguidance counts further keys only where all named ones are required: these, or those, or no object.
        alone = {"type": "object", "properties": {**named, **dict.fromkeys(optional, False), **never}}
        alone["required"] = needed
        both = {"type": "object", "properties": dict(named), "required": needed}
        others = [name for name in _types(schema) if name != "object"]
        branches = [both | closed, alone | closed | limits, *([{"type": others}] if others else [])]
        given = [{"allOf": schema["allOf"]}] if "allOf" in schema else []
        kept = {} if not patterns or {*schema} & {"minProperties", "maxProperties"} else values
        free = {"properties": {}, "required": [], "patternProperties": kept}
        return free | {"additionalProperties": True, "allOf": [*given, {"anyOf": branches}]}

    def _array(self, schema: Schema, room: int) -> Schema | None:
        count = _count(schema, "minItems", "maxItems", room)
        prefix = schema.get("prefixItems", [])
        if not isinstance(prefix, list):
            return {"type": "array"}
        share = _share(room, count)
        first = [self.at(item, share) for item in prefix]
        items = self.at(schema.get("items", True), share)
        most = schema.get("maxItems", count + len(prefix))
        if items is None or None in first:
            most = first.index(None) if None in first else len(first)
            if isinstance(schema.get("minItems", 0), int) and schema.get("minItems", 0) > most:
                return None
            first, items = first[:most], False
        return {"type": "array", "maxItems": most, "items": items, **({"prefixItems": first} if first else {})}

    def _in_place(self, schema: Mapping[str, Any], key: str, room: int, own: Names) -> Any:
        """What holds for the same value: its siblings' properties belong to it, those of other branches do not."""
        siblings = [other for other in ("$ref", *IN_PLACE) if other in schema and other != key]
        known = own.union(*(self._names({other: schema[other]}) for other in siblings))
        if key == "$ref":
            return self._reference(schema["$ref"], room, known)
        parts = schema[key]
        if not isinstance(parts, list):
            return parts
        if key == "oneOf" and not self._is_any_of:
            self._check_one_of(parts, known)
        if key == "allOf":
            each = [self._names(part) for part in parts]
            read = [
                self.at(part, room, known.union(*(names for place, names in enumerate(each) if place != number)))
                for number, part in enumerate(parts)
            ]
            return None if None in read else read
        return [branch for branch in (self.at(part, room, known) for part in parts) if branch is not None] or None

    def _reference(self, target: Any, room: int, others: Names) -> str | None:
        schema = pointed(self._root, target)
        if schema is None:
            return str(target)  # llguidance says what it lacks
        if (target, room) in self._within:
            room //= 4
        if room < LEAST_ROOM and any(target == name for name, _ in self._within):
            return None
        key = (target, room, others)
        if key not in self._written:
            self._within.append((target, room))
            self._written[key] = self._defined(self.at(schema, room, others))
            self._within.pop()
        return self._written[key]

    def _anything(self, room: int) -> Schema:
        """Any value: at the end of the room no lists and objects any more."""
        key = ("", room, frozenset[str]())
        if key not in self._written:
            kinds: list[Any] = [{"type": name} for name in ("string", "number", "boolean", "null")]
            if room >= LEAST_ROOM:
                kinds += [{"type": "array", "items": True}, {"type": "object", "additionalProperties": True}]
            within = room // 2  # lists in lists take more room than they have
            self._written[key] = self._defined({"anyOf": [self.at(kind, within) for kind in kinds]})
        return {"$ref": self._written[key]}

    def _defined(self, schema: Any) -> str | None:
        if schema is None:
            return None
        name = f"finite{len(self.definitions)}"
        self.definitions[name] = schema
        return f"#/$defs/{name}"

    def _names(self, schema: Any) -> Names:
        """Properties that a schema names for the value itself, through whatever holds in place; each part once."""
        alone = str(schema["$ref"]) if is_map(schema) and list(schema) == ["$ref"] else ""
        if not alone or alone not in self._named:
            self._named[alone] = frozenset[str]().union(*map(_own_names, self._parts(schema, IN_PLACE)))
        return self._named[alone]

    def _parts(self, schema: Any, keys: Sequence[str]) -> list[Mapping[str, Any]]:
        """The schema and what holds in place for the same value, by references and these keywords; each part once."""
        found, seen, parts = list[Mapping[str, Any]](), set[str](), [schema]
        while parts:
            part = {} if parts[-1] is True else parts[-1]
            parts.pop()
            if not is_map(part):
                continue
            found.append(part)
            for key in keys:
                parts += part[key] if isinstance(part.get(key), list) else []
            target = part.get("$ref")
            if isinstance(target, str) and target not in seen:
                seen.add(target)
                parts.append(pointed(self._root, target))
        return found

    def _check_one_of(self, branches: list[Any], known: Names) -> None:
        """Refuse objects that are told apart by no more than that they are closed: the schema's own are open."""
        for one, other in permutations(filter(None, (self._objects(branch, known) for branch in branches)), 2):
            values = ((one.values.get(name, []), other.values.get(name, [])) for name in one.needed | other.needed)
            is_apart = any(differ(left, right) for lefts, rights in values for left in lefts for right in rights)
            if not is_apart and (one.names is None or other.needed <= one.names | known):
                raise ConfigError(f"The JSON schema cannot be taken: {_OVERLAP}")

    def _objects(self, branch: Any, known: Names) -> "_Objects | None":
        sure, all_parts = self._parts(branch, ("allOf",)), self._parts(branch, IN_PLACE)
        if any(differ(part, {"type": "object"}) for part in sure):
            return None
        values: dict[str, list[Any]] = {}
        for part in sure:
            for name, value in part["properties"].items() if is_map(part.get("properties")) else ():
                values.setdefault(name, []).extend(self._parts(value, ("allOf",)))
        is_open = any(map(_is_open, all_parts)) or (not known and all(map(_names_nothing, all_parts)))
        return _Objects(
            needed=frozenset(name for part in sure for name in _needed(part)),
            names=None if is_open else self._names(branch),
            values=values,
        )


class _Objects(NamedTuple):
    """What is known of the objects of a branch: names that they have, that they may have if not any, and values."""

    needed: Names
    names: Names | None
    values: Mapping[str, list[Any]]


def _is_open(schema: Mapping[str, Any]) -> bool:
    """Whether a schema may allow objects with names that it does not know."""
    more = schema.get("additionalProperties", False) is not False or any(map(schema.get, ("const", "enum")))
    return more or bool(schema.get("patternProperties")) or not any(map(says, schema))


def _names_nothing(schema: Mapping[str, Any]) -> bool:
    """Whether a schema says of an object neither what it has nor what else it may have: it may have anything."""
    is_said = schema.get("properties") is not None or schema.get("additionalProperties") is not None
    return not (is_said or schema.get("patternProperties") or _needed(schema))


def _types(schema: Mapping[str, Any]) -> list[str]:
    """The types of a schema; where it names none, those that its keywords are about."""
    given = schema.get("type")
    if isinstance(given, str):
        return [given]
    if isinstance(given, list):
        return [name for name in given if isinstance(name, str)]
    return [kind for kind, words in KEYWORDS.items() if any(word in schema for word in words)]


def _own_names(schema: Mapping[str, Any]) -> Names:
    named = schema.get("properties")
    return frozenset([*(named if is_map(named) else ()), *_needed(schema)])


def _needed(schema: Mapping[str, Any]) -> list[str]:
    required = schema.get("required")
    return [name for name in required if isinstance(name, str)] if isinstance(required, list) else []


def _count(schema: Schema, least: str, most: str, room: int) -> int:
    """Most items or keys: the schema's own number, or about the root of the room."""
    fewest, given = schema.get(least, 0), schema.get(most)
    usual = max(even(isqrt(room)), 2, 2 * fewest if isinstance(fewest, int) else 0)
    return given if isinstance(given, int) else usual


def _share(room: int, count: int) -> int:
    """The room of one item."""
    return even(2 * room // max(count, 3))


def _grows(schema: Any) -> bool:
    """Whether a value of the schema may need room."""
    if not is_map(schema) or not any(map(says, schema)):
        return True
    if "const" in schema or "enum" in schema:
        return False
    return bool({*_types(schema)} & {"array", "object", "string"} | {*schema} & {*OWN_VALUES, *REFUSED})
