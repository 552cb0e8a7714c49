"""Attention of the draft's graph as processors compute it fastest: one fused kernel a layer.

The graph attends to the cache and to a pass's own rows in two products, so that no device copies a long cache
(`export/stages/attention.py`). OpenVINO's CPU plugin makes one kernel of product, softmax and product, but only where
there is one of each; a short cache is copied in less time than many small kernels take to hand over to each other.
"""

import openvino as ov
from openvino import Node
from openvino import opset13 as ops
from openvino.passes import AnyInput, Manager, Matcher, MatcherPass, WrapType

from mirrorsd.device_maps import DraftPlacement
from mirrorsd.graphs.contract import DraftShape

MOST_COPIED_BYTES = 2 << 20
"""Keys and values of a layer up to which one product is faster, however few the rows
(`bench/studies/joined_attention.py`)."""


def pays_to_join(shape: DraftShape, placement: DraftPlacement, capacity: int, kind: ov.Type) -> bool:
    """Whether a pass with a cache of `capacity` slots of `kind` is faster joined."""
    num_bytes = 2 * capacity * shape.num_kv_heads * shape.head_dim * kind.size
    return placement.device == "CPU" and not placement.emulated and num_bytes <= MOST_COPIED_BYTES


def join_attention(model: ov.Model) -> None:
    """Let every layer attend to cache and rows in one product; layers that cap their scores are left alone."""
    manager = Manager()
    manager.register_pass(_JoinAttention())
    manager.run_passes(model)


class _JoinAttention(MatcherPass):  # type: ignore[misc]  # openvino.passes has no types
    """`softmax([q ck', q rk'] + b)`, cut into two and times `cv` and `rv`: `softmax(q [ck, rk]' + b) [cv, rv]`."""

    def __init__(self) -> None:
        super().__init__()
        query, bias = AnyInput(), AnyInput()
        halves = [WrapType("opset13.MatMul", [query, AnyInput()]) for _ in range(2)]
        scores = WrapType("opset13.Concat", halves)
        softmax = WrapType("opset13.Softmax", [WrapType("opset13.Add", [scores, bias])])
        weights = [WrapType("opset13.Slice", [softmax, *(AnyInput() for _ in range(4))]) for _ in range(2)]
        products = [WrapType("opset13.MatMul", [half, AnyInput()]) for half in weights]
        attended = WrapType("opset13.Add", products)

        def join(matcher: Matcher) -> bool:
            found = matcher.get_pattern_value_map()
            over_cache, over_rows = (found[half].get_node() for half in halves)
            by_cache, by_rows = sorted((found[one].get_node() for one in products), key=_is_not_of_input)
            if _is_not_of_input(over_cache) or _is_not_of_input(by_cache) or not _are_transposed(over_cache, over_rows):
                return False
            keys = ops.concat([over_cache.input_value(1), over_rows.input_value(1)], 2)
            values = ops.concat([by_cache.input_value(1), by_rows.input_value(1)], 2)
            joined = ops.matmul(over_cache.input_value(0), keys, False, True)
            found[scores].replace(joined.output(0))
            found[attended].replace(ops.matmul(found[softmax], values, False, False).output(0))
            return True

        self.register_matcher(Matcher(attended, "JoinAttention"), join)


def _is_not_of_input(product: Node) -> bool:
    return str(product.input_value(1).get_node().get_type_name()) != "Parameter"


def _are_transposed(*products: Node) -> bool:
    return all(bool(product.get_attributes()["transpose_b"]) for product in products)
