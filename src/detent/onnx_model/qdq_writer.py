"""Nodes: QuantizeLinear and DequantizeLinear, written from parameters and read back into them.

=============== ============================== ======================
granularity     scale in the file              attributes
=============== ============================== ======================
PerTensor       a number
PerAxis(a)      one per channel                axis=a
PerGroup(n, a)  the data's rank, ceil(D / n)   axis=a, block_size=n
=============== ============================== ======================

Gathering: rows of a table of codes are picked first and become numbers then, never the whole table.

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

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from onnx import NodeProto, TensorProto, helper

from detent.errors import ParamsError, UnsupportedError
from detent.formats import FORMATS, Format
from detent.granularity import Granularity, PerAxis, PerGroup, PerTensor
from detent.onnx_model.graph import Graph, element_range
from detent.onnx_model.targets import Container
from detent.params import QuantParams
from detent.spec import QuantSpec

__all__ = ["Quantization", "dequantize_node", "gather", "needs_clip", "quantize_node"]

Array = NDArray[Any]
FIRST_BLOCKED = 21
_ATTRIBUTES = ("axis", "block_size")


@dataclass(frozen=True, eq=False)
class Quantization:
    """The parameters of a quantizer as a file holds them.

    Attributes:
        scale: float32.
        zero_point: integers of the codes' type, of the scale's shape.
        kind: the ONNX type of the codes.
        axis, block: where the scale has more than one value.
        low, high: the smallest and largest code that is used.

    >>> made = Quantization.of(QuantParams("int8", 0.5), Container(TensorProto.UINT8, 128), 2)
    >>> made.scale, made.zero_point, made.low, made.high, made.block
    (array(0.5, dtype=float32), array(128), 1, 255, 0)
    >>> made.params((4, 4)).spec.format.name, made.format.name, made.granularity((4, 4)), made.attributes()
    ('uint8', 'uint8', PerTensor(), {})
    """

    scale: Array
    zero_point: Array
    kind: int
    axis: int = 1
    block: int = 0
    low: float = 0
    high: float = 255

    @classmethod
    def of(cls, params: QuantParams, container: Container, rank: int) -> "Quantization":
        """What a file says of these parameters, for data of that rank."""
        spec = params.spec
        if params.block_scale is not None or spec.scale_format != "float":
            raise UnsupportedError(f"ONNX files cannot hold the scales of {spec}: use a spec with float scales")
        axis, block = _place(spec.granularity, rank)
        scale = np.asarray(params.scale, np.float32)
        if not np.array_equal(scale, params.scale):
            raise ParamsError("scales of float64 that are no float32 cannot be stored: make the params in float32")
        zero = np.asarray(params.zero_point.astype(np.int64) + container.shift)
        return cls(scale, zero, container.kind, axis, block, spec.qmin + container.shift, spec.qmax + container.shift)

    @property
    def format(self) -> Format:
        """The format of the codes."""
        name = TensorProto.DataType.Name(self.kind)
        found = next((format for format in FORMATS.values() if format.onnx == name), None)
        if found is None:
            raise UnsupportedError(f"codes of type {name} are not known here")
        return found

    def granularity(self, shape: tuple[int, ...]) -> Granularity:
        """The granularity for data of that shape."""
        if self.block:
            return PerGroup(self.block, axis=self.axis)
        return PerTensor() if self.scale.size == 1 and self.scale.ndim == 0 else PerAxis(self.axis % len(shape))

    def params(self, shape: tuple[int, ...]) -> QuantParams:
        """The parameters for data of that shape; codes are those of the file."""
        format = self.format
        low, high = (self.low, self.high) if format.is_integer else (None, None)
        spec = QuantSpec(format, self.granularity(shape), symmetric=not format.is_integer, qmin=low, qmax=high)
        return QuantParams(spec, self.scale, self.zero_point)

    def attributes(self) -> dict[str, int]:
        """Those of the nodes."""
        if self.block:
            return {"axis": self.axis, "block_size": self.block}
        return {"axis": self.axis} if self.scale.ndim else {}


def _place(granularity: Granularity, rank: int) -> tuple[int, int]:
    if isinstance(granularity, PerTensor):
        return 1, 0
    if isinstance(granularity, PerAxis):
        return granularity.axis % rank, 0
    if isinstance(granularity, PerGroup):
        return granularity.axis % rank, granularity.size
    raise UnsupportedError(f"ONNX files cannot hold scales of granularity {granularity}: use tensor, axis or group")


def needs_clip(quantization: Quantization) -> bool:
    """Whether the codes in use are fewer than the type has, so that data must be clipped first.

    >>> needs_clip(Quantization(np.float32(1), np.array(0), TensorProto.UINT8, high=15))
    True
    """
    if not quantization.format.is_integer:
        return False
    return (quantization.low, quantization.high) != element_range(quantization.kind)


def quantize_node(x: str, scale: str, zero_point: str, y: str, how: Quantization) -> NodeProto:
    """A QuantizeLinear node from x to y.

    >>> quantize_node("x", "s", "z", "y", Quantization(np.float32(1), np.array(0), TensorProto.UINT8)).op_type
    'QuantizeLinear'
    """
    return _node("QuantizeLinear", [x, scale, zero_point], y, how)


def dequantize_node(x: str, scale: str, zero_point: str | None, y: str, how: Quantization) -> NodeProto:
    """A DequantizeLinear node from x to y; without a zero point where that is 0 and needs no type.

    >>> dequantize_node("x", "s", None, "y", Quantization(np.ones(2, np.float32), np.zeros(2), TensorProto.INT32)).input
    ['x', 's']
    """
    inputs = [x, scale] if zero_point is None else [x, scale, zero_point]
    return _node("DequantizeLinear", inputs, y, how)


def _node(operator: str, inputs: list[str], y: str, how: Quantization) -> NodeProto:
    node = helper.make_node(operator, inputs, [y], name=f"{y}_node")
    node.attribute.extend(helper.make_attribute(name, value) for name, value in how.attributes().items())
    return node


Names = tuple[str, str, str]


def gather(
    graph: Graph,
    node: NodeProto,
    names: Names,
    how: Quantization,
    shape: tuple[int, ...],
    key: str,
    index_rank: int | None = None,
) -> list[NodeProto]:
    """What takes the place of a Gather node that reads a quantized table.

    Args:
        graph: where constants are added.
        node: the Gather node, along axis 0.
        names: those of codes, scale and zero point.
        how: the table's quantization.
        shape: the table's.
        key: what new names begin with.
        index_rank: how many axes the indices have; None for what the graph says.

    >>> from onnx import parser
    >>> graph = Graph(parser.parse_model('''<ir_version: 10, opset_import: ["" : 21]>
    ...     g (float[9, 4] table, int64[2] i) => (float[2, 4] y) { y = Gather(table, i) }'''))
    >>> how = Quantization(np.ones(9, np.float32), np.zeros(9, np.int64), TensorProto.INT8, axis=0)
    >>> made = gather(graph, graph.nodes[0], ("codes", "scale", "zero"), how, (9, 4), "table")
    >>> [each.op_type for each in made]
    ['Gather', 'Cast', 'Gather', 'Unsqueeze', 'Mul']
    """
    return _Gathering(graph, node, how, shape, key, index_rank).build(names)


class _Gathering:
    def __init__(
        self,
        graph: Graph,
        node: NodeProto,
        how: Quantization,
        shape: tuple[int, ...],
        key: str,
        index_rank: int | None,
    ) -> None:
        self.graph, self.how, self.shape, self.key = graph, how, shape, key
        self.indices, self.out = node.input[1], node.output[0]
        self.index_rank = len(graph.shape(self.indices) or ()) if index_rank is None else index_rank
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
        rank = self.index_rank
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
