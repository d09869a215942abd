"""Gathering: rows of a table of codes are picked first and become numbers then, never the whole table.

==================== ==================================================================
scale                nodes
==================== ==================================================================
one, or per column   Gather(codes) -> DequantizeLinear
per row              (Cast(Gather(codes)) - Gather(zero point)) * Gather(scale)
per group of a row   the same, over groups as an axis of their own
==================== ==================================================================

Numbers are those of DequantizeLinear: the subtraction is exact, and the product rounds once. DequantizeLinear itself
takes scales that depend on the data in blocks only, which OpenVINO does not read.
"""

from dataclasses import replace
from typing import Any

import numpy as np
from onnx import NodeProto, TensorProto, helper

from detent.errors import UnsupportedError
from detent.qdq.graph import Graph
from detent.qdq.nodes import Quantization, dequantize_node

__all__ = ["gather"]

Names = tuple[str, str, str]


def gather(
    graph: Graph, node: NodeProto, names: Names, how: Quantization, shape: tuple[int, ...], key: str
) -> list[NodeProto]:
    """What takes the place of a Gather node that reads a quantized table.

    Args:
        graph: where constants are added.
        node: the Gather node, along axis 0.
        names: those of codes, scale and zero point.
        how: the table's quantization.
        shape: the table's.
        key: what new names begin with.

    >>> from onnx import parser
    >>> graph = Graph(parser.parse_model('''<ir_version: 10, opset_import: ["" : 21]>
    ...     g (float[9, 4] table, int64[2] i) => (float[2, 4] y) { y = Gather(table, i) }'''))
    >>> how = Quantization(np.ones(9, np.float32), np.zeros(9, np.int64), TensorProto.INT8, axis=0)
    >>> made = gather(graph, graph.nodes[0], ("codes", "scale", "zero"), how, (9, 4), "table")
    >>> [each.op_type for each in made]
    ['Gather', 'Cast', 'Gather', 'Unsqueeze', 'Mul']
    """
    return _Gathering(graph, node, how, shape, key).build(names)


class _Gathering:
    def __init__(self, graph: Graph, node: NodeProto, how: Quantization, shape: tuple[int, ...], key: str) -> None:
        self.graph, self.how, self.shape, self.key = graph, how, shape, key
        self.indices, self.out = node.input[1], node.output[0]
        self.made: list[NodeProto] = []

    def build(self, names: Names) -> list[NodeProto]:
        how, last = self.how, len(self.shape) - 1
        codes, scale, zero = names
        picked = self._add("Gather", [codes, self.indices], "picked")
        if not how.scale.ndim or (how.axis == last and not how.block):
            node = dequantize_node(picked, scale, zero, self.out, replace(how, axis=-1))
            node.name = self.graph.fresh(f"{self.key}_DequantizeLinear")
            return [*self.made, node]
        if how.axis != (last if how.block else 0):
            raise UnsupportedError(
                f"{self.key} is looked up by rows and has scales along axis {how.axis}: use one per row, per group of "
                "a row, or per tensor"
            )
        numbers = self._add("Cast", [picked], "numbers", to=TensorProto.FLOAT)
        if how.block:
            numbers = self._reshape(numbers, [how.scale.shape[-1], how.block], "groups")
        if how.zero_point.any():
            origin = self._add("Cast", [self._rows(zero)], "zero_points_as_numbers", to=TensorProto.FLOAT)
            numbers = self._add("Sub", [numbers, origin], "centred")
        if not how.block:
            self._add("Mul", [numbers, self._rows(scale)], self.out)
        else:
            product = self._add("Mul", [numbers, self._rows(scale)], "products")
            self._reshape(product, [self.shape[-1]], self.out)
        return self.made

    def _rows(self, name: str) -> str:
        """The scales or zero points of the rows that are picked, with an axis to spread over."""
        picked = self._add("Gather", [name, self.indices], f"{name.removeprefix(self.key + '_')}s")
        axes = self._constant("last_axis", [-1])
        return self._add("Unsqueeze", [picked, axes], f"{name.removeprefix(self.key + '_')}s_spread")

    def _reshape(self, name: str, sizes: list[int], y: str) -> str:
        """The same with the last axis split, or the last two joined; 0 keeps what the indices have."""
        rank = len(self.graph.shape(self.indices) or ())
        shape = self._constant(f"shape_{rank}_{len(sizes)}", [0] * rank + sizes)
        return self._add("Reshape", [name, shape], y)

    def _constant(self, stem: str, values: list[int]) -> str:
        name = f"{self.key}_{stem}"
        return name if name in self.graph.constants else self.graph.add_constant(name, np.array(values))

    def _add(self, operator: str, inputs: list[str], y: str, **attributes: Any) -> str:
        name = y if y == self.out else self.graph.fresh(f"{self.key}_{y}")
        node = helper.make_node(operator, inputs, [name], name=self.graph.fresh(f"{self.key}_{operator}"), **attributes)
        self.made.append(node)
        return name
