"""Numbers of a JSON schema keep their last digits, or the schema is refused."""

from typing import Any

import pytest
from schema_texts import compiler, is_allowed

from mirrorsd.graphs.errors import ConfigError
from mirrorsd.texts.config import GenerationConfig
from mirrorsd.texts.constraint import ConstraintCompiler

__all__ = ["compiler"]
WITHOUT = {"exclusiveMinimum": 2**53, "exclusiveMaximum": 2**60}
INT64 = {"minimum": -(2**63), "maximum": 2**63 - 1}
LARGE: dict[str, tuple[Any, list[int], list[int]]] = {
    "a whole number that is a double": ({"const": 2**60}, [2**60], [2**60 - 1]),
    "a largest number": ({"type": "integer", "minimum": 0, "maximum": 2**60 + 255}, [2**59], [2**60 + 256]),
    "a largest number of any kind": ({"type": "number", "maximum": 2**60 + 255}, [10**17], [2**60 + 256, 10**19]),
    "a smallest number": ({"type": "integer", "minimum": 2**53 + 1}, [2**53 + 9, 10**16], [2**53, 0]),
    "bounds without themselves": ({"type": "integer", **WITHOUT}, [2**53 + 9, 10**18], [2**53, 2**60, 2**60 + 1]),
    "any without its bounds": ({"type": "number", **WITHOUT}, [2**53 + 9, 10**17], [2**53, 2**60, 2**60 + 1]),
    "a bound with a point": ({"type": "integer", "maximum": 9007199254739329.0}, [2**53 - 1663], [2**53 - 1662]),
    "two largest numbers": ({"type": "integer", "exclusiveMaximum": 2**60, "maximum": 5}, [5], [6, 10**18]),
    "two, one far below": (
        {"type": "integer", "maximum": -9, "exclusiveMaximum": -(2**60)},
        [-5 * 10**18],
        [-9, -(2**60)],
    ),
    "all of 64 bits": ({"type": "integer", **INT64}, [-1234567890123456789, 0, 9 * 10**18], [-(2**63) - 1, 2**63]),
    "all of 64 bits, of any kind": ({"type": "number", **INT64}, [-(10**17), 0, 10**17], [-(2**63) - 1, 2**63]),
    "far below": ({"type": "integer", "maximum": -(2**62)}, [-5 * 10**18], [1 - 2**62, 0]),
    "no bound at all": ({"type": "integer", "minimum": 0, "maximum": 10**400}, [0, 10**18], [-1]),
}


@pytest.mark.parametrize("kind", LARGE)
def test_large_numbers_keep_their_last_digits(compiler: ConstraintCompiler, kind: str) -> None:
    schema, good, bad = LARGE[kind]
    for value in (*good, *bad):
        assert is_allowed(compiler, schema, value) == (value in good), value


@pytest.mark.parametrize(
    "schema",
    [
        {"enum": [1, 1234567890123456789]},
        {"const": {"a": [2**53 + 1]}},
        {"const": 0.9713745010588913},
        {"const": -(2**63)},  # llguidance itself ends the process
        {"type": "integer", "const": -1e19},  # here too
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
