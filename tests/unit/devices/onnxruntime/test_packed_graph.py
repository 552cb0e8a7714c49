"""Graphs of several conversations: what is rewritten, what is refused, and bytes that are read as they were written."""

import doctest
import itertools
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from mirrorsd.device_maps import TargetPlacement
from mirrorsd.devices.onnxruntime import masked_graph, onnx_bytes, packed_graph
from mirrorsd.devices.onnxruntime.device import OnnxDevice, rewritten
from mirrorsd.devices.onnxruntime.onnx_bytes import NotRewritableError, field, fields, joined, model, node
from mirrorsd.devices.onnxruntime.packed_graph import Heads, NotPackableError, Packed, Sizes, packed
from mirrorsd.graphs.errors import BundleError
from mirrorsd.runtime.backends.onnxruntime import seating
from mirrorsd.runtime.backends.onnxruntime.seating import Slots

CACHES = ["past_key.0", "past_value.0"]
LENGTHS = ["seqlens_k", "total_length"]
HEADS = {"num_heads": 6, "kv_num_heads": 2}
SIZES = Sizes(num_tables=1, num_slots=4, num_guests=1, spare_rows=1)


def stage(
    *,
    table: str = "table",
    more: tuple[bytes, ...] = (),
    is_padded: bool = True,
    rotary: int = 1,
    size: int = 16,
    **attributes: int,
) -> bytes:
    """Attention of one layer, its queries, keys and values in one input."""
    rows = "padded" if is_padded else "rows"
    attention = node(
        "GroupQueryAttention",
        [rows, "", "", *CACHES, *LENGTHS, table, "table"],
        ["all", "present_key.0", "present_value.0"],
        domain="com.microsoft",
        **HEADS | {"do_rotary": rotary} | attributes,
    )
    pad = [node("Norm", ["rows"], ["", "normal"]), node("Pad", ["normal", "pads"], ["padded"])] if is_padded else []
    cut = [node("Slice", ["all", "pads"], ["attended"])] if is_padded else [node("Identity", ["all"], ["attended"])]
    inputs = [("rows", 1, 3), *((name, 1, (1, 2, 9, size)) for name in CACHES), *((name, 6, 1) for name in LENGTHS)]
    ports = [("attended", 1, 3), ("present_key.0", 1, 4), ("present_value.0", 1, 4)]
    constants = {"table": np.zeros((9, 8), np.int64), "pads": np.zeros(2, np.int64)}
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


def operators_of(found: Packed) -> list[str]:
    return [operator for operator, _, _ in nodes_of(found.model)]


def test_one_node_attends_for_all_slots_and_one_for_each_guest() -> None:
    found = packed(stage(), SIZES)
    assert (found.heads, found.window) == (Heads(2, 3), 0)
    assert operators_of(found) == [
        *("Norm", "Split", "RotaryEmbedding", "Concat", "Reshape"),
        *("Gather", "Split", "ScatterND", "Slice", "Reshape"),
        *("Reshape", "GroupQueryAttention", "Gather", "GroupQueryAttention"),
        *("Reshape", "Reshape", "Concat", "Gather", "Reshape"),
    ]
    of_slots, of_guest = (inputs for operator, inputs, _ in nodes_of(found.model) if operator == "GroupQueryAttention")
    assert of_slots[3:] == [
        *(f"{name}.table0" for name in (*CACHES, *LENGTHS)),
        *("", "", "", "slot_mask.table0"),
    ]
    assert of_guest[3:] == [*(f"{name}.guest0" for name in (*CACHES, *LENGTHS)), "table", "table"]
    assert nodes_of(found.model)[-1][2] == ["attended"]
    assert set(names_of(found.model, 11)) == {
        *("rows", "slot_heads", "slot_sizes", "row_positions", "slot_places", "slot_mask.table0", "own_heads"),
        *("guest0_rows", "past_key.0.room"),
        *(f"{name}.{of}" for name in (*CACHES, *LENGTHS) for of in ("table0", "guest0")),
    }
    assert set(names_of(found.model, 12)) == {
        *("attended", "present_key.0.guest0", "present_value.0.guest0", "past_key.0.room.written"),
    }


def test_tables_read_their_caches_after_these_were_written() -> None:
    """The room and a table's part of it are two inputs: what stands between is a value that holds nothing."""
    found = nodes_of(packed(stage(), SIZES._replace(num_tables=2)).model)
    producers = {name: inputs for _, inputs, outputs in found for name in outputs}
    of_tables = [inputs for operator, inputs, _ in found if operator == "GroupQueryAttention"][:2]
    for inputs in of_tables:
        assert inputs[1] == inputs[2]
        assert producers[producers[inputs[1]][0]][0] == "past_key.0.room.written"


def test_a_single_row_whose_queries_share_no_head_is_attended_twice_as_it_has_another_routine() -> None:
    heads = packed(stage(kv_num_heads=6), SIZES).heads
    assert heads == Heads(6, 1)
    assert [Slots(1, 4, heads, 0, 99, 1).num_attended(count) for count in (1, 2, 3)] == [2, 2, 3]


def test_without_angles_nothing_is_turned_and_without_spare_rows_nothing_is_left_out() -> None:
    assert "RotaryEmbedding" not in operators_of(packed(stage(rotary=0), SIZES))
    assert operators_of(packed(stage(is_padded=False), SIZES._replace(spare_rows=0)))[-1] == "Identity"


def test_every_table_has_a_node_of_its_own() -> None:
    found = packed(stage(), SIZES._replace(num_tables=2))
    assert operators_of(found).count("GroupQueryAttention") == 3
    assert {f"past_key.0.table{table}" for table in (0, 1)} <= set(names_of(found.model, 11))


def test_a_window_of_attention_bounds_the_texts_of_slots() -> None:
    assert packed(stage(local_window_size=64), SIZES).window == 64


def test_heads_that_are_added_up_in_parts_want_longer_texts_in_slots() -> None:
    assert [packed(stage(size=size), SIZES).fewest for size in (64, 128, 256)] == [0, 0, 64]


@pytest.mark.parametrize(
    ("message", "words"),
    [
        (stage(more=(node("Sub", ["seqlens_k", "one"], ["positions"]),)), "Sub  reads seqlens_k"),
        (stage(table="attended"), "GroupQueryAttention  reads attended"),
        (
            stage(more=(node("GroupQueryAttention", [*"qkvpw", "s", "l", "table", "table", "pads"], ["o"]),)),
            "reads pads",
        ),
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
        packed(message, SIZES)


@pytest.mark.parametrize(
    "message", [b"\x0a\x05ab", b"\x08", b"\x08\xff", field(7, b"\x0a\x05ab"), b"\x0d\x00\x00\x00\x00"]
)
def test_bytes_that_are_no_message_are_refused(message: bytes) -> None:
    with pytest.raises(ValueError, match="message"):
        packed(message, SIZES)


def test_what_is_taken_apart_is_put_together_again() -> None:
    assert joined(fields(stage())) == stage()


def test_worked_examples() -> None:
    for module in (onnx_bytes, packed_graph, seating):
        assert doctest.testmod(module).failed == 0


def test_damaged_files_are_the_bundles_error_and_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cut at every byte, and with every byte changed: what can still be read is rewritten, whatever it says then."""
    path, content = tmp_path / "suffix.onnx", stage()
    ways = [
        partial(packed, sizes=SIZES),
        partial(masked_graph.masked, dtype="float32"),
        partial(masked_graph.reading_rows, taps=["rows"]),
    ]
    damaged = [content[:size] for size in range(len(content))]
    damaged += [bytes([*content[:at], content[at] ^ 0xFF, *content[at + 1 :]]) for at in range(len(content))]
    refused = 0
    for found, rewrite in itertools.product(damaged, ways):
        monkeypatch.setattr(Path, "read_bytes", lambda _, found=found: found)
        try:
            rewritten(path, rewrite)
        except BundleError as error:
            refused += 1
            assert str(error).startswith(f"{path} is no graph that ONNX Runtime")
        except NotRewritableError:
            pass
    assert refused > len(content) * len(ways)
    monkeypatch.undo()
    with pytest.raises(BundleError, match=r"suffix\.onnx is no graph .*No such file"):
        rewritten(path, ways[0])


def test_numbers_end() -> None:
    with pytest.raises(ValueError, match="has no end"):
        fields(b"\xff" * 1000)


@pytest.mark.parametrize("content", [b"", field(1, 10), stage()[:-9]], ids=["empty", "no graph", "cut short"])
@pytest.mark.parametrize("is_rewritten", [False, True])
def test_a_file_without_its_graph_is_the_bundles_error_on_every_way_in(
    tmp_path: Path, content: bytes, *, is_rewritten: bool
) -> None:
    path = tmp_path / "suffix.onnx"
    path.write_bytes(content)
    with pytest.raises(BundleError, match=r"suffix\.onnx is no graph .*Copy the whole bundle again"):
        graph = rewritten(path, partial(masked_graph.masked, dtype="float32")) if is_rewritten else None
        OnnxDevice(TargetPlacement()).open(path, "float32", rewritten=graph)
