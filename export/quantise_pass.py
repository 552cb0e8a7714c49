"""Weights in 8 or 4 bits: matrix products with constant weights become `MatMulNBits`.

Owns: round-to-nearest block quantisation and its packing. Does not own: which precisions a user may ask for
(`options.py`), nor how much the result may differ (`tolerances.py`).
"""

from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from .graph_edits import add_tensor, take_over
from .lazy_weight import lazy_weight, pack_rows

Array = npt.NDArray[Any]

BLOCK_SIZES = (128, 64, 32)
HEAD_BITS = 8
_INT8_ACTIVATIONS = 4


def block_size_of(width: int) -> int:
    """The block size for rows of `width` weights: the largest one that pads them no more than blocks of 32 do.

    Fewer scales are fewer bytes and fewer additions: on a CPU a row through blocks of 128 takes about 0.65 of the time
    through blocks of 32 (see docs/peers.md).

    >>> block_size_of(1152), block_size_of(192), block_size_of(40)
    (128, 64, 64)
    """
    padded = -(-width // 32) * 32
    return next(size for size in BLOCK_SIZES if padded % size == 0)


def quantise_blocks(weight: Array, bits: int, block_size: int) -> tuple[Array, Array]:
    """Quantise `weight` `[N, K]` symmetrically in blocks along K.

    With 4 bits a block whose largest magnitude is 0.7 has the scale 0.7 / 7 = 0.1; a weight of -0.32 in it becomes
    round(-3.2) = -3, stored as -3 + 8 = 5. Two neighbours share a byte, the first in the low half.

    Args:
        weight: Float weights; K is padded with zeros to whole blocks.
        bits: 8 or 4.
        block_size: Weights per scale.

    Returns:
        Packed uint8 `[N, K / block_size, block_size * bits / 8]` and float32 scales `[N, K / block_size]`.
    """
    num_rows, width = weight.shape
    num_blocks = -(-width // block_size)
    padded = np.zeros((num_rows, num_blocks * block_size), np.float32)
    padded[:, :width] = weight
    blocks = padded.reshape(num_rows, num_blocks, block_size)
    zero_point = 1 << (bits - 1)
    scales = np.abs(blocks).max(axis=-1) / (zero_point - 1)
    scales[scales == 0] = 1.0
    levels = np.rint(blocks / scales[..., None]) + zero_point
    packed = levels.clip(0, 2 * zero_point - 1).astype(np.uint8)
    if bits == 4:
        packed = packed[..., 0::2] | (packed[..., 1::2] << 4)
    return packed, scales.astype(np.float32)


class QuantiseWeights(ir.passes.InPlacePass):
    """Quantise every product with constant weights to `bits`, the LM head to 8 bits.

    The head is the `Gemm` with transB that is `head_width` wide. Embedding tables are left as they are.
    Ensures: no float matrix product with constant weights is left.
    """

    def __init__(self, bits: int, head_width: int) -> None:
        self._bits = bits
        self._head_width = head_width

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Quantise `model`."""
        weighted = [node for node in model.graph if _weight_of(node) is not None]
        for node in weighted:
            self._quantise(model.graph, node)
        if weighted:
            model.opset_imports["com.microsoft"] = 1
        return ir.passes.PassResult(model, modified=bool(weighted))

    def ensures(self, model: ir.Model) -> None:
        """Check that nothing was overlooked."""
        if any(_weight_of(node) is not None for node in model.graph):
            raise ir.passes.PostconditionError("a matrix product with float weights is left")

    def _quantise(self, graph: ir.Graph, node: ir.Node) -> None:
        weight = _weight_of(node)
        assert weight is not None and weight.const_value is not None  # `call` has looked
        is_by_output = (
            node.op_type == "Gemm" and "transB" in node.attributes and node.attributes["transB"].as_int() == 1
        )
        source = lazy_weight(weight.const_value)
        by_output = source if is_by_output else source.transposed()
        num_rows, width = by_output.shape.numpy()
        is_head = is_by_output and num_rows == self._head_width
        bits = HEAD_BITS if is_head else self._bits
        block_size = block_size_of(width)
        num_blocks = -(-width // block_size)
        shapes = ((num_rows, num_blocks, block_size * bits // 8), (num_rows * num_blocks,))
        pack = partial(quantise_blocks, bits=bits, block_size=block_size)
        packed, scales = pack_rows(by_output, f"q{bits}", pack, shapes)
        sizes = {"K": width, "N": num_rows, "bits": bits, "block_size": block_size}
        sizes["accuracy_level"] = _INT8_ACTIVATIONS
        inputs = [node.inputs[0], add_tensor(graph, f"{weight.name}.q{bits}", packed)]
        inputs.append(add_tensor(graph, f"{weight.name}.scale{bits}", scales))
        if len(node.inputs) > 2:
            inputs += [None, None, node.inputs[2]]
        attributes = [ir.AttrInt64(name, size) for name, size in sizes.items()]
        quantised = ir.Node("com.microsoft", "MatMulNBits", inputs, attributes, name=node.name)
        graph.insert_before(node, quantised)
        take_over(node.outputs[0], quantised.outputs[0])
        graph.remove(node, safe=True)


def _weight_of(node: ir.Node) -> ir.Value | None:
    """The constant matrix of a MatMul or Gemm `[K, N]`, or of a Gemm with transB `[N, K]`."""
    if node.op_type not in ("MatMul", "Gemm"):
        return None
    weight = node.inputs[1]
    if weight is None or weight.const_value is None or len(weight.const_value.shape) != 2:
        return None
    return weight
