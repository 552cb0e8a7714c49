"""What the conformance report finds in small graphs."""

import numpy as np
import openvino as ov
import pytest
from openvino import opset13 as ops

from mirrorsd.machine.npu.conformance import check_conformance


def test_a_static_graph_is_fine_and_its_sizes_are_counted() -> None:
    rows = ops.parameter([2, 3], np.float32, name="rows")
    model = ov.Model([ops.matmul(rows, ops.constant(np.ones((3, 4), np.float32)), False, False)], [rows])
    found = check_conformance(model)
    assert found.problems == ()
    assert (found.weight_bytes, found.port_bytes) == (4 * 12, 4 * (6 + 8))


def test_dynamic_ports_are_named() -> None:
    rows = ops.parameter([-1, 3], np.float32, name="rows")
    rows.output(0).tensor.set_names({"rows"})
    result = ops.relu(rows)
    result.output(0).tensor.set_names({"hidden"})
    problems = check_conformance(ov.Model([result], [rows])).problems
    assert problems == ("input or output rows is dynamic", "input or output hidden is dynamic")


def test_shapes_that_depend_on_values_are_found_inside() -> None:
    rows = ops.parameter([2, 3], np.float32, name="rows")
    places = ops.non_zero(rows)
    model = ov.Model([ops.reduce_sum(places, ops.constant(np.array([0, 1])), False)], [rows])
    problems = check_conformance(model).problems
    assert any(problem.startswith("NonZero") and "dynamic shape inside" in problem for problem in problems)
    assert "operation NonZero (1 times) is refused" in problems


@pytest.mark.parametrize(("dtype", "is_taken"), [(np.float64, False), (np.float16, True), (np.int64, True)])
def test_element_types(dtype: type, is_taken: bool) -> None:
    rows = ops.parameter([2], dtype, name="rows")
    problems = check_conformance(ov.Model([ops.add(rows, rows)], [rows])).problems
    assert problems == (() if is_taken else ("element type f64 is not taken",))


def test_caches_written_inside_the_graph_are_refused() -> None:
    cache = ops.parameter([4, 2], np.float32, name="cache")
    written = ops.scatter_update(cache, ops.constant(np.array([1])), ops.constant(np.ones((1, 2), np.float32)), 0)
    problems = check_conformance(ov.Model([written], [cache])).problems
    assert problems == ("operation ScatterUpdate (1 times) is refused",)


@pytest.mark.parametrize("is_behind", [True, False])
def test_a_rotation_is_found_behind_the_transposition_of_heads_and_nowhere_else(is_behind: bool) -> None:
    rows = ops.parameter([1, 8, 4, 64], np.float32, name="rows")
    order = ops.constant(np.array([0, 2, 1, 3]))
    heads = ops.transpose(rows, order) if is_behind else rows
    first, second = (
        ops.slice(heads, *(ops.constant(np.array([place])) for place in (start, start + 32, 1, 3))) for start in (0, 32)
    )
    turned = ops.concat([ops.multiply(second, ops.constant(np.float32(-1.0))), first], 3)
    problems = check_conformance(ov.Model([turned if is_behind else ops.transpose(turned, order)], [rows])).problems
    assert [("refused by the compiler for 3720" in problem) for problem in problems] == [True] * is_behind
