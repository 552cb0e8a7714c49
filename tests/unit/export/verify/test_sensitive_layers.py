"""Which weights get eight bits, by losses that are given: whole kinds, then quarters of the depth."""

import doctest

from mirrorsd.export.verify import sensitive_layers
from mirrorsd.export.verify.sensitive_layers import kind_names, most_sensitive

NUM_LAYERS = 8
QUERIES, DOWN = [[(f"h.{layer}.{kind}",) for layer in range(NUM_LAYERS)] for kind in ("q", "down")]
GATED = [(f"h.{layer}.gate", f"h.{layer}.up") for layer in range(NUM_LAYERS)]
SIZES = {name: size for groups, size in ((QUERIES, 3), (DOWN, 10), (GATED, 10)) for group in groups for name in group}


def chosen(loss_by_name: dict[str, float]) -> tuple[tuple[str, ...], list[set[str]]]:
    """What is chosen where each weight adds a loss of its own, and what was measured beside whole kinds."""
    measured: list[set[str]] = []

    def loss(names: object) -> float:
        rounded = set(names)  # type: ignore[call-overload]
        measured.append(rounded)
        return sum(loss_by_name.get(name, 0.001) for name in rounded)

    found = most_sensitive([QUERIES, GATED, DOWN], SIZES, loss)
    return found, measured[3:]


def test_a_kind_that_does_not_fit_is_cut_into_quarters() -> None:
    """Of 264 weights 52 have room: the queries' 24, and one quarter of the products down, 20; of the gated, 40."""
    found, parts = chosen({"h.0.q": 9.0, "h.5.down": 5.0, "h.6.down": 4.0})

    assert parts == [{f"h.{layer}.down" for layer in (first, first + 1)} for first in (0, 2, 4, 6)]
    assert set(found) == {name for (name,) in QUERIES} | {"h.4.down", "h.5.down"}
    assert kind_names(found, SIZES) == ["h.*.q", "h.4-5.down"]


def test_a_kind_whose_quarters_are_too_large_is_passed_over() -> None:
    """The gated products lose most per weight, and none of their quarters fits."""
    found, parts = chosen({"h.0.q": 9.0, "h.1.gate": 60.0, "h.7.down": 5.0})

    assert len(parts) == 4
    assert set(found) == {name for (name,) in QUERIES} | {"h.6.down", "h.7.down"}


def test_examples() -> None:
    assert doctest.testmod(sensitive_layers).failed == 0
