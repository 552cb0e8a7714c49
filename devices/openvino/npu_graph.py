"""The draft's graph cut in three for an NPU: what the host does before a pass, the pass, what the host does after it.

An NPU is fast at products over few rows and slow at everything that copies. So look-ups (token rows, cosines and sines)
and the masks are the host's, and so is all that follows the head: noise, the best tokens, log-probabilities, the
streams' link. What is left has a form that every platform's compiler takes: rotation before the heads are transposed,
masks of one head, tips chosen by a product. All three parts are cut out of the bundle's one graph, at fixed shapes.
"""

from collections import Counter
from typing import NamedTuple

import numpy as np
import openvino as ov
from openvino import Node, Output
from openvino import opset13 as ops
from openvino.passes import ConstantFolding, Manager
from openvino.preprocess import PrePostProcessor

from mirrorsd.devices.openvino.joined_attention import join_attention
from mirrorsd.graphs import names
from mirrorsd.graphs.contract import DraftShape

_HOST_INPUTS = (
    names.DRAFT_IDS,
    names.DRAFT_POSITIONS,
    names.DRAFT_MASK,
    names.DRAFT_TIP_ROWS,
    names.DRAFT_NOISE,
    names.DRAFT_NOISE_ROWS,
)
_HANDED = "handed"
_INTEGER_WEIGHTS = (ov.Type.i8, ov.Type.u8, ov.Type.i4, ov.Type.u4)


class NpuParts(NamedTuple):
    """`before` and `after` are the host's; what one part hands to another has the same name in both."""

    before: ov.Model
    core: ov.Model
    after: ov.Model


def cut_for_npu(model: ov.Model, shape: DraftShape, kind: ov.Type) -> NpuParts:
    """Cut a draft's static graph; what the parts hand over, and the caches, are of `kind`. `model` is used up.

    Where the layers have integer weights the head gets them, too: an NPU reads all of it in every pass.

    Raises:
        ValueError: the graph has no head as the exporter writes it.
    """
    _rewrite(model)
    if any(node.get_element_type() in _INTEGER_WEIGHTS for node in model.get_ops() if _is_constant(node)):
        round_weight(_head_of(model, shape))
    places = _places(model, shape)
    parts = (_part(model.clone(), wanted, places) for wanted in ("before", "core", "after"))
    return NpuParts(*(_with_ports_of(part, kind) for part in parts))


class _Places(NamedTuple):
    """Names of operations: those of the core, and those whose value the host hands to it or takes from it."""

    core: frozenset[str]
    to_core: tuple[str, ...]
    from_core: tuple[str, ...]


def _places(model: ov.Model, shape: DraftShape) -> _Places:
    operations = model.get_ordered_ops()
    by_host = _made_by_host(operations)
    head = _head_of(model, shape)
    kept = [result for result in model.get_results() if _tensor_name(result).startswith("new_")]
    core = frozenset(_before_all([head, *kept]) - by_host.keys())
    to_core = {
        source.get_friendly_name()
        for node in operations
        if node.get_friendly_name() in core
        for source in _sources(node)
        if by_host.get(source.get_friendly_name()) == "host"
    }
    results = [result for result in model.get_results() if not _tensor_name(result).startswith("new_")]
    after = _before_all(results) - core
    from_core = {
        source.get_friendly_name()
        for node in operations
        if node.get_friendly_name() in after
        for source in _sources(node)
        if source.get_friendly_name() in core
    }
    return _Places(core, tuple(sorted(to_core)), tuple(sorted(from_core)))


def _head_of(model: ov.Model, shape: DraftShape) -> Node:
    products = [node for node in model.get_ordered_ops() if node.get_type_name() == "MatMul"]
    heads = [node for node in products if node.get_output_shape(0)[-1] == shape.vocab_size]
    if not heads:
        raise ValueError(f"the draft's graph has no product with {shape.vocab_size} columns")
    return heads[-1]


def round_weight(product: Node) -> None:
    """Give a product with a weight in floating point one of eight bits, a scale per row."""
    weight = product.input_value(1).get_node()
    while weight.get_type_name() == "Convert":
        weight = weight.input_value(0).get_node()
    if not _is_constant(weight) or not weight.get_element_type().is_real():
        return
    numbers = weight.get_data().astype(np.float32)
    axis = 1 if product.get_attributes()["transpose_b"] else 0
    scales = np.maximum(np.abs(numbers).max(axis=axis, keepdims=True), 1e-12) / 127
    rounded = ops.constant(np.rint(numbers / scales).astype(np.int8))
    whole = ops.multiply(ops.convert(rounded, ov.Type.f16), ops.constant(scales.astype(np.float16)))
    product.input(1).replace_source_output(ops.convert(whole, ov.Type.f32).output(0))


def _is_constant(node: Node) -> bool:
    return str(node.get_type_name()) == "Constant"


def _made_by_host(operations: list[Node]) -> dict[str, str]:
    """What is made of constants ("constant"), or of the host's inputs up to a token's row ("host"), by name."""
    found: dict[str, str] = {}
    rows: set[str] = set()
    for node in operations:
        name, sources = node.get_friendly_name(), [source.get_friendly_name() for source in _sources(node)]
        if node.get_type_name() == "Constant":
            found[name] = "constant"
        elif node.get_type_name() == "Parameter":
            if name in _HOST_INPUTS or _is_token_rows(node):
                found[name] = "host"
            if _is_token_rows(node):
                rows.add(name)
        elif node.get_type_name() != "Result" and all(s in found and s not in rows for s in sources):
            is_constant = all(found[source] == "constant" for source in sources)
            found[name] = "constant" if is_constant else "host"
            if _is_token_rows(node):
                rows.add(name)
    return found


def _sources(node: Node) -> list[Node]:
    return [node.input_value(i).get_node() for i in range(node.get_input_size())]


def _before_all(last: list[Node]) -> set[str]:
    """Names of `last` and of all that they are made of."""
    pending, seen = list(last), set()
    while pending:
        node = pending.pop()
        if node.get_friendly_name() not in seen:
            seen.add(node.get_friendly_name())
            pending += _sources(node)
    return seen


def _part(model: ov.Model, wanted: str, places: _Places) -> ov.Model:
    """One of the three parts of `model`, a copy that is used up."""
    nodes = {node.get_friendly_name(): node for node in model.get_ops()}
    results = [result for result in model.get_results() if _tensor_name(result).startswith("new_")]
    others = [result for result in model.get_results() if not _tensor_name(result).startswith("new_")]
    inputs = {"before": (), "core": places.to_core, "after": places.from_core}[wanted]
    outputs = {"before": places.to_core, "core": places.from_core, "after": ()}[wanted]
    kept = {"before": [], "core": results, "after": others}[wanted]
    handed = [_result_of(nodes[name], name) for name in outputs]
    parameters = [_parameter_for(nodes[name], name) for name in inputs]
    needed = _before_all([*handed, *kept])
    if wanted == "before":  # and the ids, which no part needs where the host has looked them up
        needed |= {
            node.get_friendly_name() for node in model.get_parameters() if not node.output(0).get_target_inputs()
        }
    own = [node for node in model.get_parameters() if node.get_friendly_name() in needed]
    return ov.Model([*handed, *kept], [*parameters, *own], wanted)


def _result_of(node: Node, name: str) -> Node:
    value = ops.convert(node.output(0), node.get_output_element_type(0)) if _is_parameter(node) else node
    result = ops.result(value)
    result.output(0).get_tensor().set_names({f"{_HANDED}.{name}"})
    return result


def _parameter_for(node: Node, name: str) -> Node:
    parameter = ops.parameter(node.get_output_shape(0), node.get_output_element_type(0))
    parameter.set_friendly_name(f"{_HANDED}.{name}")
    node.output(0).get_tensor().set_names(set())
    node.output(0).replace(parameter.output(0))
    parameter.output(0).get_tensor().set_names({f"{_HANDED}.{name}"})
    return parameter


def _is_parameter(node: Node) -> bool:
    return str(node.get_type_name()) == "Parameter"


def _tensor_name(result: Node) -> str:
    return min(result.output(0).get_names(), default="")


def _with_ports_of(part: ov.Model, kind: ov.Type) -> ov.Model:
    """Give everything in floating point that is handed over, and the caches, another type."""
    ports = PrePostProcessor(part)
    for port in part.inputs:
        if is_handed(port.get_any_name()) and port.get_element_type().is_real():
            ports.input(port.get_any_name()).tensor().set_element_type(kind)
    for port in part.outputs:
        if is_handed(port.get_any_name()) and port.get_element_type().is_real():
            ports.output(port.get_any_name()).tensor().set_element_type(kind)
    return ports.build()


def is_handed(name: str) -> bool:
    """Whether one part makes what another uses, or it is of the caches."""
    return name.startswith((f"{_HANDED}.", "past_", "new_"))


def _rewrite(model: ov.Model) -> None:
    _fold_shapes(model)
    join_attention(model)
    for node in model.get_ordered_ops():
        if node.get_type_name() == "Add":
            _rotate_before_transposing(node)
            _mask_one_head(node)
        elif node.get_type_name() == "Gather":
            _choose_by_product(node)
    model.validate_nodes_and_infer_types()
    seen: Counter[str] = Counter()
    for node in model.get_ordered_ops():
        name = node.get_friendly_name()
        if seen[name]:
            node.set_friendly_name(f"{name}.{seen[name]}")
        seen[name] += 1


def _fold_shapes(model: ov.Model) -> None:
    """Work out whatever the fixed shapes decide; integer weights stay integers."""
    kept = []
    for node in model.get_ops():
        if _is_constant(node) and node.get_element_type() in _INTEGER_WEIGHTS:
            stand_in = ops.parameter(node.get_output_shape(0), node.get_element_type())
            node.output(0).replace(stand_in.output(0))
            model.add_parameters([stand_in])
            kept.append((node, stand_in))
    manager = Manager()
    manager.register_pass(ConstantFolding())
    manager.run_passes(model)
    for node, stand_in in kept:
        stand_in.output(0).replace(node.output(0))
        model.remove_parameter(stand_in)


def _rotate_before_transposing(total: Node) -> None:
    """`T(x) cos + half(T(x)) sin` as `T(x cos' + (x P) sin')`: the compiler for 3720 refuses the former."""
    plain, turned = (total.input_value(i).get_node() for i in (0, 1))
    if plain.get_type_name() != "Multiply" or turned.get_type_name() != "Multiply":
        return
    rotated_part = plain.input_value(0).get_node()
    is_cut = rotated_part.get_type_name() == "Slice"  # only a part of each head is rotated
    transposed = rotated_part.input_value(0).get_node() if is_cut else rotated_part
    halves = turned.input_value(0).get_node()
    if transposed.get_type_name() != "Transpose" or halves.get_type_name() != "Concat":
        return
    if not all(_stems_from(halves.input_value(i), transposed) for i in range(halves.get_input_size())):
        return
    rows = transposed.input_value(0)
    if is_cut:
        rows = ops.slice(rows, *(rotated_part.input_value(i) for i in range(1, 5))).output(0)
    width = rows.get_shape()[-1]
    cos, sin = (_by_rows(factor.input_value(1)) for factor in (plain, turned))
    half = width // 2
    turn = np.zeros((width, width), np.float32)
    turn[np.arange(half) + half, np.arange(half)] = -1.0
    turn[np.arange(half), np.arange(half) + half] = 1.0
    mixed = ops.matmul(rows, ops.constant(turn), False, False)
    rotated = ops.add(ops.multiply(rows, cos), ops.multiply(mixed, sin))
    again = ops.transpose(rotated, transposed.input_value(1))
    _stand_in(total, again)


def _stand_in(old: Node, new: Node) -> None:
    new.set_friendly_name(old.get_friendly_name())
    found = old.output(0).get_names()
    old.output(0).replace(new.output(0))
    if found:
        new.output(0).set_names(found)


def _stems_from(value: Output, origin: Node) -> bool:
    """Whether a value is a cut of `origin`, negated or not."""
    node = value.get_node()
    while node.get_type_name() in ("Multiply", "Slice", "StridedSlice"):
        node = node.input_value(0).get_node()
    return str(node.get_friendly_name()) == str(origin.get_friendly_name())


def _by_rows(table: Output) -> Output:
    """`[1, 1, N, hd]` as `[1, N, 1, hd]`, made once for all layers."""
    name = f"{table.get_node().get_friendly_name()}.by_rows"
    for user in table.get_target_inputs():
        if user.get_node().get_friendly_name() == name:
            return user.get_node().output(0)
    _, _, num_rows, width = table.get_shape()
    shaped = ops.reshape(table, ops.constant([1, num_rows, 1, width], np.int64), False)
    shaped.set_friendly_name(name)
    return shaped.output(0)


def _mask_one_head(total: Node) -> None:
    """Add a mask to each head of a group instead of one that is repeated for them."""
    repeated = total.input_value(1).get_node()
    if repeated.get_type_name() != "Concat" or not _is_host_only(repeated):
        return
    sources = {repeated.input_value(i).get_node().get_friendly_name() for i in range(repeated.get_input_size())}
    if len(sources) != 1:
        return
    num_heads, group = total.get_output_shape(0)[1], repeated.get_input_size()
    num_rows, num_columns = repeated.input_value(0).get_shape()[2:]
    apart = ops.constant([num_heads, group, num_rows, num_columns], np.int64)
    masked = ops.add(ops.reshape(total.input_value(0), apart, False), repeated.input_value(0))
    (softmax,) = (user.get_node() for user in total.output(0).get_target_inputs())
    weights = ops.softmax(masked, 3)
    _stand_in(softmax, ops.reshape(weights, ops.constant(list(total.get_output_shape(0)), np.int64), False))


def _choose_by_product(gather: Node) -> None:
    """Rows of hidden states by a product with ones and zeros: dynamic indices copy, products do not."""
    data, index = gather.input_value(0), gather.input_value(1)
    is_by_tips = index.get_node().get_type_name() == "Parameter"
    if not is_by_tips or _is_host_only(data.get_node()) or len(data.get_shape()) != 3:
        return
    num_rows = data.get_shape()[1]
    every = ops.constant(np.arange(num_rows, dtype=np.int64)[None])
    is_chosen = ops.equal(ops.unsqueeze(index, ops.constant(1, np.int64)), every)
    chosen = ops.unsqueeze(ops.convert(is_chosen, data.get_element_type()), ops.constant(0, np.int64))
    chosen.set_friendly_name(f"{gather.get_friendly_name()}.choice")
    _stand_in(gather, ops.matmul(chosen, data, False, False))


def _is_host_only(node: Node) -> bool:
    """Whether a value is made of the host's inputs and constants alone, no token's row among them."""
    return not any(
        (found.get_type_name() == "Parameter" and found.get_friendly_name() not in _HOST_INPUTS)
        or _is_token_rows(found)
        for found in _all_before(node)
    )


def _all_before(node: Node) -> list[Node]:
    pending, seen = [node], {}
    while pending:
        node = pending.pop()
        if node.get_friendly_name() not in seen:
            seen[node.get_friendly_name()] = node
            pending += _sources(node)
    return list(seen.values())


def _is_token_rows(node: Node) -> bool:
    """Whether this is the look-up of token rows, a table of constants by ids; or what the host has looked up."""
    if _is_parameter(node):
        return str(node.get_friendly_name()) == names.DRAFT_TOKEN_ROWS
    if node.get_type_name() != "Gather":
        return False
    index = node.input_value(1).get_node()
    while index.get_type_name() in ("Clamp", "Convert", "Minimum"):
        index = index.input_value(0).get_node()
    table = _all_before(node.input_value(0).get_node())
    return str(index.get_friendly_name()) == names.DRAFT_IDS and not any(_is_parameter(found) for found in table)
