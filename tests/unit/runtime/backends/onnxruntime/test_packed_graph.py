"""Graphs of several conversations: what is rewritten, what is refused, and bytes that are read as they were written."""

import doctest

import numpy as np
import pytest

from mirrorsd.runtime.backends.onnxruntime import onnx_bytes, packed_graph
from mirrorsd.runtime.backends.onnxruntime.onnx_bytes import field, fields, joined, model, node
from mirrorsd.runtime.backends.onnxruntime.packed_graph import NotPackableError, packed

CACHES = ["past_key.0", "past_value.0"]
LENGTHS = ["seqlens_k", "total_length"]


def stage(*, table: str = "table", more: tuple[bytes, ...] = (), is_padded: bool = True) -> bytes:
    """Attention of one layer, its queries, keys and values in one input."""
    rows = "padded" if is_padded else "rows"
    attention = node(
        "GroupQueryAttention", [rows, "", "", *CACHES, *LENGTHS, table], ["all", "present_key.0", "present_value.0"]
    )
    pad = [node("Norm", ["rows"], ["", "normal"]), node("Pad", ["normal", "pads"], ["padded"])] if is_padded else []
    cut = [node("Slice", ["all", "pads"], ["attended"])] if is_padded else [node("Identity", ["all"], ["attended"])]
    inputs = [("rows", 1, 3), *((name, 1, 4) for name in CACHES), *((name, 6, 1) for name in LENGTHS)]
    ports = [("attended", 1, 3), ("present_key.0", 1, 4), ("present_value.0", 1, 4)]
    constants = {"table": np.zeros(2, np.int64), "pads": np.zeros(2, np.int64)}
    return model([*pad, attention, *cut, *more], inputs, ports, constants)


def nodes_of(message: bytes) -> list[tuple[str, list[str], list[str]]]:
    (graph,) = (part.data for part in fields(message) if part.number == 7)
    found = []
    for part in fields(graph):
        if part.number == 1:
            parts = fields(part.data)
            texts = {number: [one.text for one in parts if one.number == number] for number in (1, 2, 4)}
            found.append((texts[4][0], texts[1], texts[2]))
    return found


def names_of(message: bytes, number: int) -> list[str]:
    (graph,) = (part.data for part in fields(message) if part.number == 7)
    return [fields(part.data)[0].text for part in fields(graph) if part.number == number]


def test_each_slot_has_attention_of_its_own_and_all_rows_the_rest() -> None:
    rewritten = packed(stage(), 2, 1)
    operators = [operator for operator, _, _ in nodes_of(rewritten)]
    assert operators == ["Norm", "Gather", "Split", "GroupQueryAttention", "GroupQueryAttention", "Concat", "Gather"]
    second = nodes_of(rewritten)[4][1]
    assert second[3:7] == [f"{name}.slot1" for name in (*CACHES, *LENGTHS)]
    assert second[7] == "table"
    assert nodes_of(rewritten)[-1][2] == ["attended"]
    inputs = names_of(rewritten, 11)
    assert set(inputs) == {
        *("rows", "slot_rows", "rows_of_slots", "own_rows"),
        *(f"{name}.slot{slot}" for name in (*CACHES, *LENGTHS) for slot in (0, 1)),
    }
    assert "present_key.0.slot1" in names_of(rewritten, 12)


def test_without_spare_rows_nothing_is_gathered() -> None:
    operators = [operator for operator, _, _ in nodes_of(packed(stage(is_padded=False), 2, 0))]
    assert operators == ["Split", "GroupQueryAttention", "GroupQueryAttention", "Concat", "Identity"]


@pytest.mark.parametrize(
    ("message", "words"),
    [
        (stage(more=(node("Sub", ["seqlens_k", "one"], ["positions"]),)), "Sub  reads seqlens_k"),
        (stage(table="attended"), "GroupQueryAttention  reads attended"),
        (stage(more=(node("Neg", ["all"], ["other"]),)), "has no spare rows of its own"),
        (stage(more=(node("Neg", ["padded"], ["other"]),)), "are read elsewhere"),
        (stage(is_padded=False), "has no spare rows of its own"),
        (
            model([node("Neg", ["rows"], ["attended"])], [("rows", 1, 3)], [("attended", 1, 3)]),
            "no GroupQueryAttention",
        ),
    ],
)
def test_a_graph_whose_rows_cannot_be_told_apart_is_refused(message: bytes, words: str) -> None:
    with pytest.raises(NotPackableError, match=words):
        packed(message, 2, 1)


@pytest.mark.parametrize(
    "message", [b"\x0a\x05ab", b"\x08", b"\x08\xff", field(7, b"\x0a\x05ab"), b"\x0d\x00\x00\x00\x00"]
)
def test_bytes_that_are_no_message_are_refused(message: bytes) -> None:
    with pytest.raises(ValueError, match="message"):
        packed(message, 2, 1)


def test_what_is_taken_apart_is_put_together_again() -> None:
    assert joined(fields(stage())) == stage()


def test_worked_examples() -> None:
    for module in (onnx_bytes, packed_graph):
        assert doctest.testmod(module).failed == 0
