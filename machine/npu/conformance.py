"""Whether a draft's static graph is one that an NPU takes, found before any compiler is asked.

An NPU takes fixed shapes and no control flow (OpenVINO's page on supported devices: dynamic shapes "No" for NPU); what
graphs for it had better not hold is listed here by operation and element type. Sizes are reported, not judged.
"""

from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import openvino as ov

from mirrorsd.graphs.manifest import TargetEntry
from mirrorsd.runtime.backends.openvino.exits import ROW_BUCKETS, OpenVinoExits

_REFUSED_OPERATIONS = frozenset(
    (
        # Control flow and state: the NPU runs one straight graph.
        *("If", "Loop", "TensorIterator", "ReadValue", "Assign"),
        # Shapes that depend on values.
        *("NonZero", "Unique", "NonMaxSuppression", "Bucketize", "RandomUniform", "Multinomial"),
        # Writing into a cache inside the graph is slow or refused; the host does it.
        *("ScatterUpdate", "ScatterNDUpdate", "ScatterElementsUpdate"),
        # Fused forms that the plugin does not know; exporters must leave the plain operations.
        *("PagedAttentionExtension", "StringTensorPack", "StringTensorUnpack"),
    )
)
_TAKEN_TYPES = frozenset(
    ("f32", "f16", "bf16", "i64", "i32", "i16", "i8", "i4", "u64", "u32", "u16", "u8", "u4", "boolean")
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Conformance:
    """What was found in one static graph; `problems` is empty where an NPU can take it."""

    problems: tuple[str, ...]
    num_operations: int
    weight_bytes: int
    port_bytes: int


def check_conformance(model: ov.Model) -> Conformance:
    """Look through a graph that has been reshaped to static shapes."""
    operations = model.get_ops()
    names = Counter(operation.get_type_name() for operation in operations)
    problems = [f"input or output {name} is dynamic" for name in _dynamic_ports(model)]
    if not problems:
        problems += [f"{name} has a dynamic shape inside" for name in _dynamic_operations(operations)]
    problems += [
        f"operation {name} ({count} times) is refused" for name, count in names.items() if name in _REFUSED_OPERATIONS
    ]
    if num_turned := sum(map(_is_turned_behind_heads, operations)):
        problems.append(
            f"a rotation behind the transposition of heads ({num_turned} times) is refused by the compiler for 3720"
        )
    types = {output.get_element_type().get_type_name() for operation in operations for output in operation.outputs()}
    problems += [f"element type {name} is not taken" for name in sorted(types - _TAKEN_TYPES)]
    constants = [operation for operation in operations if operation.get_type_name() == "Constant"]
    ports = [port for port in (*model.inputs, *model.outputs) if port.get_partial_shape().is_static]
    return Conformance(
        problems=tuple(problems),
        num_operations=sum(names.values()) - names["Constant"],
        weight_bytes=sum(constant.get_byte_size() for constant in constants),
        port_bytes=sum(port.get_tensor().size for port in ports),
    )


def _is_turned_behind_heads(node: ov.Node) -> bool:
    """Whether the halves of transposed heads change places here (`rotate_half` of rotary positions).

    "UnrollPermuteDMA Pass failed", says the compiler for platform 3720; 4000 and 5010 take it.
    """
    if node.get_type_name() != "Concat" or node.get_input_size() != 2:
        return False
    origins = [_uncut(node.input_value(i)) for i in range(2)]
    is_of_heads = all(origin.get_type_name() == "Transpose" for origin in origins)
    return is_of_heads and origins[0].get_friendly_name() == origins[1].get_friendly_name()


def _uncut(value: ov.Output) -> ov.Node:
    """What a value was cut out of, negated or not."""
    node = value.get_node()
    while node.get_type_name() in ("Multiply", "Slice", "StridedSlice", "VariadicSplit", "Split"):
        node = node.input_value(0).get_node()
    return node


def _dynamic_ports(model: ov.Model) -> list[str]:
    ports = (*model.inputs, *model.outputs)
    return [port.get_any_name() for port in ports if port.get_partial_shape().is_dynamic]


def _dynamic_operations(operations: list[ov.Node]) -> list[str]:
    return [
        f"{operation.get_type_name()} {operation.get_friendly_name()}"
        for operation in operations
        if any(output.get_partial_shape().is_dynamic for output in operation.outputs())
    ]


def exit_conformance(exits: OpenVinoExits, entry: TargetEntry) -> dict[str, Conformance]:
    """Return what an NPU would have against each exit's graph, by `file, rows`.

    Raises:
        DeviceError: OpenVINO cannot read one.
    """
    return {
        f"{Path(point.file).name}, {rows} rows": check_conformance(exits.static_model(point.layer, rows))
        for point in entry.exits
        for rows in ROW_BUCKETS
    }
