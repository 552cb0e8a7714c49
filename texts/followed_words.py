"""Words of a JSON schema that a text can be held to; the others are left out, or kept for llguidance to refuse.

Owns: which words say something, and which of them say nothing or can be followed by nobody. Does not own: what becomes
of the rest (`finite_schema.py`).
"""

import json
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any, TypeGuard
from urllib.parse import unquote

from mirrorsd.texts.finite_values import is_exact

IN_PLACE = ("allOf", "anyOf", "oneOf")
KEYWORDS = {
    "object": ("properties", "required", "additionalProperties", "patternProperties", "minProperties", "maxProperties"),
    "array": ("items", "prefixItems", "minItems", "maxItems"),
    "string": ("minLength", "maxLength", "pattern", "format"),
    "number": ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
}
OWN_VALUES = ("const", "enum", "$ref", *IN_PLACE)
REFUSED = (
    *("not", "if", "then", "else", "uniqueItems", "contains", "minContains", "maxContains", "propertyNames"),
    *("dependencies", "dependentRequired", "dependentSchemas", "unevaluatedItems", "unevaluatedProperties"),
    *("$dynamicRef", "$dynamicAnchor", "$recursiveRef"),
)
"""Words that llguidance refuses by name: kept for it where the caller insists. Any other one not here is a remark."""
_FORMATS = ["date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"]
"""Forms of strings that llguidance can hold a text to. Others are remarks, as the standard has them: left out."""
_TYPES = ("object", "array", "string", "number", "integer", "boolean", "null")
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "uniqueItems": (False,),
    "not": (False,),
    "propertyNames": (True, {}, {"type": "string"}),  # in JSON all keys are strings
    **dict.fromkeys(("unevaluatedItems", "unevaluatedProperties"), (True, {})),
    **dict.fromkeys(("dependencies", "dependentRequired", "dependentSchemas"), ({},)),
}
"""Values with which a word says nothing; a null says nothing beside any word but `const`."""
Schema = dict[str, Any]


def is_map(value: Any) -> TypeGuard[Mapping[str, Any]]:
    """Whether it is an object of JSON."""
    return isinstance(value, Mapping)


def says(keyword: str) -> bool:
    """Whether a keyword says something about the value; others are remarks."""
    return keyword in ("type", *OWN_VALUES, *REFUSED) or any(keyword in words for words in KEYWORDS.values())


def followed(schema: Mapping[str, Any], is_there: Callable[[Any], bool], *, is_strict: bool) -> Schema | None:
    """The schema without words that say nothing; None where no value fits it by its `not`.

    Args:
        schema: one, whose parts are left as they are.
        is_there: whether a reference points at something.
        is_strict: whether words that nobody can follow are kept to be refused; else they are left out, too.
    """
    found = {word: value for word, value in schema.items() if not _is_unsaid(word, value)}
    if "not" in found and _is_anything(found["not"]):
        return None
    if isinstance(found.get("format"), str) and found["format"] not in _FORMATS:
        del found["format"]
    if is_strict:
        return found
    if isinstance(found.get("type"), list):
        found["type"] = [name for name in found["type"] if name in _TYPES]
    kept = {word: value for word, value in found.items() if _can_follow(word, value, is_there)}
    is_text = "pattern" in found and not any(map(kept.__contains__, ("type", *OWN_VALUES, "pattern")))
    return kept | ({"type": "string"} if is_text else {})


def unfollowed_words(schema: Any) -> list[str]:
    """Words that a schema and its parts have and that are left out where nobody insists on them, each once.

    >>> unfollowed_words({"properties": {"not": {"not": {"type": "null"}, "uniqueItems": False}}})
    ['not']
    """
    found, open_ones = dict[str, None](), [schema]
    while open_ones:
        part = open_ones.pop()
        if isinstance(part, list):
            open_ones += part
        elif is_map(part):
            for word, value in part.items():
                if word in ("properties", "patternProperties", "$defs", "definitions") and is_map(value):
                    open_ones += value.values()
                elif word not in ("const", "enum", "default", "examples", *REFUSED):
                    open_ones.append(value)
                is_left_out = says(word) and not _is_unsaid(word, value) and not _is_never(word, value)
                found |= {word: None} if is_left_out and not _can_follow(word, value, lambda _: True) else {}
    return list(found)


def pointed(root: Any, target: Any) -> Any:
    """What a reference like `#/$defs/city` points at; None where it points elsewhere or at nothing."""
    if not isinstance(target, str) or not target.startswith("#"):
        return None
    found = root
    for step in filter(None, target[1:].split("/")):
        name = unquote(step).replace("~1", "/").replace("~0", "~")
        if is_map(found) and name in found:
            found = found[name]
        elif isinstance(found, list) and name.isdecimal() and int(name) < len(found):
            found = found[int(name)]
        else:
            return None
    return found


@lru_cache
def is_read(pattern: str) -> bool:
    """Whether llguidance can hold a text to a pattern: not where it looks around, for example.

    >>> is_read("^(?!a)b"), is_read("[(]?=b")
    (False, True)
    """
    return is_followed({"pattern": pattern})


def is_followed(schema: Any) -> bool:
    """Whether llguidance can hold a text to a schema."""
    try:
        from llguidance import LLMatcher
    except ModuleNotFoundError:  # nobody will be held to it
        return True
    return not LLMatcher.validate_grammar(LLMatcher.grammar_from_json_schema(json.dumps(schema)))


def _is_unsaid(word: str, value: Any) -> bool:
    if word in ("$defs", "definitions", "x-guidance"):
        return True
    return (value is None and word != "const" and says(word)) or value in _NEUTRAL.get(word, ())


def _is_anything(schema: Any) -> bool:
    return schema is True or (is_map(schema) and not any(map(says, schema)))


def _is_never(word: str, value: Any) -> bool:
    return word == "not" and _is_anything(value)


def _can_follow(word: str, value: Any, is_there: Callable[[Any], bool]) -> bool:
    """Whether a word has a value of its form, and is one that a text can be held to."""
    if word in REFUSED:
        return False
    if word == "$ref":
        return is_there(value)
    if word == "pattern":
        return isinstance(value, str) and is_read(value)
    return word not in _FORMS or _FORMS[word](value)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


_FORMS: dict[str, Callable[[Any], bool]] = {
    "type": lambda value: bool(value) and (isinstance(value, list) or value in _TYPES),
    "const": is_exact,
    "enum": lambda value: isinstance(value, list) and bool(value) and is_exact(value),
    **dict.fromkeys(IN_PLACE, lambda value: isinstance(value, list) and bool(value)),
    "required": lambda value: isinstance(value, list) and all(isinstance(name, str) for name in value),
    **dict.fromkeys(("properties", "patternProperties"), is_map),
    "prefixItems": lambda value: isinstance(value, list),
    "additionalProperties": lambda value: is_map(value) or isinstance(value, bool),
    "items": lambda value: is_map(value) or isinstance(value, bool | list),
    "format": lambda value: isinstance(value, str),
    **dict.fromkeys(("minimum", "maximum"), _is_number),
    **dict.fromkeys(("exclusiveMinimum", "exclusiveMaximum"), lambda value: isinstance(value, int | float)),
    "multipleOf": lambda value: _is_number(value) and value > 0,
    **dict.fromkeys(("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties"), _is_count),
}
"""What a word's value must be for anybody to follow it."""
