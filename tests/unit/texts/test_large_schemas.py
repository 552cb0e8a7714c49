"""Schemas that are small where they are sent and large where their definitions are written out."""

from typing import Any

import pytest
from schema_texts import compiler, is_allowed

from mirrorsd.graphs.errors import ConfigError
from mirrorsd.texts.constraint import ConstraintCompiler
from mirrorsd.texts.finite_schema import finite_schema

__all__ = ["compiler"]
CONTEXT = 32_768


def chained(schemas: list[Any]) -> dict[str, Any]:
    """Definitions by number, of which the first is the schema."""
    return {"$ref": "#/$defs/d0", "$defs": {f"d{number}": schema for number, schema in enumerate(schemas)}}


def doubled(count: int) -> dict[str, Any]:
    """Two ways at each step to what may have one name more, so that every step has twice as many names beside it."""

    def step(number: int, letter: str) -> dict[str, Any]:
        named = {"properties": {f"{letter}{number}": {"type": "string"}}}
        return {"allOf": [{"$ref": f"#/$defs/d{number + 1}"}, named]}

    steps = [{"anyOf": [step(number, "a"), step(number, "b")]} for number in range(count)]
    return chained([*steps, {"type": "object", "properties": {"z": {"type": "string"}}}])


def within(count: int) -> dict[str, Any]:
    """Objects within objects."""
    return chained([*({"properties": {"x": {"$ref": f"#/$defs/d{at + 1}"}}} for at in range(count)), {"type": "null"}])


def test_definitions_that_double_at_every_step_are_refused() -> None:
    """Twenty steps would take gigabytes."""
    with pytest.raises(ConfigError, match="written out for all places that use them"):
        finite_schema(doubled(15), CONTEXT)


@pytest.mark.parametrize("count", [300, 2000])
def test_definitions_that_stand_too_deep_within_each_other_are_refused(count: int) -> None:
    for schema in (within(count), {"type": "object", "properties": {"a": within(count)}, **within(count)}):
        with pytest.raises(ConfigError, match="within each other too deep"):
            finite_schema(schema, CONTEXT)


def test_some_steps_are_taken(compiler: ConstraintCompiler) -> None:
    assert is_allowed(compiler, doubled(4), {"z": "x", "a0": "y"})
    assert is_allowed(compiler, within(3), {"x": {"x": {"x": None}}})
    assert finite_schema(within(60), CONTEXT)
