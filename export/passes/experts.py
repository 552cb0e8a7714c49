"""A product of all experts in the graph: each multiplies the rows that are its own, with constant weights.

Most experts have no rows in a short pass, and a product without rows costs next to nothing. So each is one product of
constant weights, like any other of the graph: it is packed as they are, and gives a row the same bits beside any rows.

Owns: the nodes in the place of `families/experts.py`'s operator. Does not own: sorting rows by expert, which is traced;
the weights' formats (`quantise.py`).
"""

import onnx_ir as ir

from mirrorsd.export.passes.graph_edits import add_tensor, take_over
from mirrorsd.export.weights.block_formats import FLOAT_WEIGHTS, WeightFormats
from mirrorsd.export.weights.lazy_weight import joined_rows, lazy_weight
from mirrorsd.families.experts import DOMAIN, JOINED, PRODUCT

EXPERT = "_expert_"
"""In the name of every product of one expert."""
_WEIGHTS = 2
"""Where the weights begin among the operator's inputs: rows and counts stand before them."""


class SpreadExperts(ir.passes.InPlacePass):
    """Write each product of all experts as a product an expert, between a `Split` and a `Concat`.

    Where an expert's weights have several forms in the file that `formats` carry them from, each form has a product.
    Ensures: no such operator is left.
    """

    def __init__(self, formats: WeightFormats = FLOAT_WEIGHTS) -> None:
        self._formats = formats

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Spread every such product of `model`."""
        nodes = [node for node in model.graph if (node.domain, node.op_type) == (DOMAIN, PRODUCT)]
        for node in nodes:
            self._spread(model.graph, node)
        model.opset_imports.pop(DOMAIN, None)
        return ir.passes.PassResult(model, modified=bool(nodes))

    def ensures(self, model: ir.Model) -> None:
        """Check that no operator is left."""
        if any(node.domain == DOMAIN for node in model.graph):
            raise ir.passes.PostconditionError("a product of all experts is left")

    def _spread(self, graph: ir.Graph, node: ir.Node) -> None:
        rows, counts, *weights = node.inputs
        num_joined = node.attributes[JOINED].as_int()
        groups = [weights[first : first + num_joined] for first in range(0, len(weights), num_joined)]
        split = ir.Node(
            "", "Split", [rows, counts], [ir.AttrInt64("axis", 0)], num_outputs=len(groups), name=f"{node.name}_split"
        )
        nodes, found = [split], list[ir.Value]()
        for number, (own, group) in enumerate(zip(split.outputs, groups, strict=True)):
            name = f"{node.name}{EXPERT}{number}"
            parts = self._by_form(group)
            names = [name] if len(parts) == 1 else [f"{name}_part_{place}" for place in range(len(parts))]
            products = [
                ir.Node("", "MatMul", [own, _joined(graph, part)], name=named)
                for named, part in zip(names, parts, strict=True)
            ]
            answers = [product.outputs[0] for product in products]
            if len(parts) > 1:
                products.append(ir.Node("", "Concat", answers, [ir.AttrInt64("axis", 1)], name=name))
            for product in products:
                _describe(product.outputs[0], f"{product.name}_answers", node)
            _describe(own, f"{name}_rows", node)
            nodes += products
            found.append(products[-1].outputs[0])
        joined = ir.Node("", "Concat", found, [ir.AttrInt64("axis", 0)], name=f"{node.name}_concat")
        graph.insert_before(node, [*nodes, joined])
        take_over(node.outputs[0], joined.outputs[0])
        graph.remove(node, safe=True)

    def _by_form(self, group: list[ir.Value | None]) -> list[list[ir.Value | None]]:
        """The weights of one expert, in order, those of one form together."""
        carried = self._formats.carried
        forms = [
            None
            if carried is None or value is None or value.const_value is None
            else carried.form(lazy_weight(value.const_value).key)
            for value in group
        ]
        starts = [place for place in range(len(group)) if not place or forms[place] != forms[place - 1]]
        return [group[start:end] for start, end in zip(starts, [*starts[1:], len(group)], strict=True)]


def _describe(value: ir.Value, name: str, node: ir.Node) -> None:
    value.name, value.type = name, node.outputs[0].type
    value.shape = ir.Shape([None, None])  # as many rows as chose this expert


def _joined(graph: ir.Graph, group: list[ir.Value | None]) -> ir.Value:
    """The weights `[N, K]` of one expert side by side, `[K, N + N]`."""
    parts = [lazy_weight(value.const_value) for value in group if value is not None and value.const_value is not None]
    whole = (parts[0] if len(parts) == 1 else joined_rows(parts)).transposed()
    return add_tensor(graph, whole.key, whole)
