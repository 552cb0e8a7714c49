"""Masked stages: which inputs attention gets, what rows see, and what takes no mask."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from mirrorsd.devices.onnxruntime.masked_graph import (
    MASK,
    PASS_ROWS,
    TABLE_ROWS,
    NotMaskableError,
    RowLayout,
    masked,
    reading_rows,
    why_not,
)
from mirrorsd.devices.onnxruntime.onnx_bytes import ONNX_TYPES, field, fields, model, node
from mirrorsd.graphs.bundle_files import read_bundle

CACHES = ["past_key.0", "past_value.0"]
LENGTHS = ["seqlens_k", "total_length"]


def stage(*more: str, counts: bool = False, **attributes: int) -> bytes:
    inputs = ["rows", "", "", *CACHES, *LENGTHS, "cos", "sin", *more]
    attention = node("GroupQueryAttention", inputs, ["attended", "present_key.0"], **attributes)
    ports = [("rows", 1, 3), *((name, 1, 4) for name in CACHES), *((name, 6, 1) for name in LENGTHS)]
    other = node("Identity", ["seqlens_k" if counts else "rows"], ["copy"])
    return model([other, attention], ports, [("attended", 1, 3)])


def parts_of_graph(message: bytes, number: int) -> list[bytes]:
    (graph,) = (part.data for part in fields(message) if part.number == 7)
    return [part.data for part in fields(graph) if part.number == number]


def names(message: bytes, number: int) -> list[str]:
    return [part.text for part in fields(message) if part.number == number]


def test_attention_gets_positions_and_a_mask_and_nothing_else_changes() -> None:
    before, after = stage(), masked(stage(), "float16")
    *gathers, first, attention = parts_of_graph(after, 1)
    assert [names(one, 1) for one in gathers] == [["cos", TABLE_ROWS], ["sin", TABLE_ROWS]]
    assert first == parts_of_graph(before, 1)[0]
    assert names(attention, 1) == ["rows", "", "", *CACHES, *LENGTHS, "cos.by_row", "sin.by_row", "", MASK]
    assert names(attention, 2) == ["attended", "present_key.0"]
    ports = parts_of_graph(after, 11)
    assert ports[:-2] == parts_of_graph(before, 11)
    assert [names(port, 1) for port in ports[-2:]] == [[TABLE_ROWS], [MASK]]
    assert field(1, ONNX_TYPES["float16"]) in ports[-1]


def test_what_stands_behind_the_mask_stays() -> None:
    nodes = parts_of_graph(masked(stage("", "", "sinks"), "float32"), 1)
    assert names(nodes[-1], 1)[9:] == ["", MASK, "sinks"]


def test_attention_that_sees_so_many_rows_back_takes_no_mask() -> None:
    with pytest.raises(NotMaskableError, match="so many rows back"):
        masked(stage(local_window_size=128), "float32")
    with pytest.raises(NotMaskableError, match="a mask already"):
        masked(stage("", "bias"), "float32")


def test_nobody_else_may_count_rows() -> None:
    with pytest.raises(NotMaskableError, match="more than attention reads seqlens_k, as learned positions do"):
        masked(stage(counts=True), "float32")


def test_a_head_reads_rows_of_its_taps_and_all_else_as_before() -> None:
    nodes = [node("Add", ["tap.2", "tap.7"], ["sum"]), node("Add", ["tokens", "sum"], ["found"])]
    before = model(nodes, [("tap.2", 1, 3), ("tap.7", 1, 3), ("tokens", 7, 2)], [("found", 1, 3)])
    after = reading_rows(before, ["tap.2", "tap.7"])
    *gathers, first, second = parts_of_graph(after, 1)
    assert [names(one, 1) for one in gathers] == [["tap.2", PASS_ROWS], ["tap.7", PASS_ROWS]]
    assert names(first, 1) == [names(one, 2)[0] for one in gathers]
    assert second == parts_of_graph(before, 1)[1]
    ports = parts_of_graph(after, 11)
    assert ports[:-1] == parts_of_graph(before, 11)
    assert names(ports[-1], 1) == [PASS_ROWS]


def test_rows_see_what_leads_to_them() -> None:
    layout = RowLayout(6, 10, [-1, 0, 1, 0, 3])
    assert layout.table_rows(20)[9:17].tolist() == [9, 10, 11, 12, 11, 12, 13, 16], "a spare row follows the last"
    mask = layout.mask("float32", 16)
    assert mask.shape == (1, 1, 6, 16)
    assert not mask[..., :10].any(), "all see the cache"
    sees = mask[0, 0, :, 10:] == 0
    assert [np.flatnonzero(row).tolist() for row in sees] == [[0], [0, 1], [0, 1, 2], [0, 3], [0, 3, 4], [0, 3, 4, 5]]
    assert np.isfinite(mask).all()


def test_the_mask_of_a_chain_is_all_zeros() -> None:
    layout = RowLayout(3, 4, None)
    assert layout.table_rows(9).tolist() == [*range(9)]
    assert not layout.mask("float16", 7).any()


def test_targets_without_a_mask_say_why(bundle: Path) -> None:
    entry = read_bundle(bundle).target
    assert why_not(entry) == ""
    assert "bfloat16" in why_not(replace(entry, shape=replace(entry.shape, dtype="bfloat16")))
