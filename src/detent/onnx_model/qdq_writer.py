"""The one writer of quantized graphs: Q/DQ pairs, weights and tables as codes, int32 biases, switches.

``QdqParams`` holds the parameters of a quantizer as a file holds them:

=============== ============================== ======================
granularity     scale in the file              attributes
=============== ============================== ======================
PerTensor       a number
PerAxis(a)      one per channel                axis=a
PerGroup(n, a)  the data's rank, ceil(D / n)   axis=a, block_size=n
=============== ============================== ======================

``QdqWriter`` adds constants and makes nodes; where they stand, and which codes they hold, is decided elsewhere:

==================== ==================================================================
activation           [Clip ->] QuantizeLinear -> DequantizeLinear
weight               codes -> DequantizeLinear
bias                 int32 codes -> DequantizeLinear
switch               If(flag), a quantized tensor or the float one
==================== ==================================================================

A Clip stands where fewer codes are used than the type has: its bounds are the values of the outermost ones. From a
table of codes, rows are picked first and become numbers then, never the whole table:

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

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

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

__all__ = [
    "Pair",
    "QdqParams",
    "QdqWriter",
    "dequantize_node",
    "gather",
    "needs_clip",
    "quantize_node",
    "stored_codes",
]

Array = NDArray[Any]
_ATTRIBUTES = ("axis", "block_size")


@dataclass(frozen=True, eq=False)
class QdqParams:
    """The parameters of a quantizer as a file holds them.

    Attributes:
        scale: float32.
        zero_point: integers of the codes' type, of the scale's shape.
        kind: the ONNX type of the codes.
        axis, block: where the scale has more than one value.
        low, high: the smallest and largest code that is used.

    >>> made = QdqParams.of(QuantParams("int8", 0.5), Container(TensorProto.UINT8, 128), 2)
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
    def of(cls, params: QuantParams, container: Container, rank: int) -> "QdqParams":
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


def needs_clip(quantization: QdqParams) -> bool:
    """Whether the codes in use are fewer than the type has, so that data must be clipped first.

    >>> needs_clip(QdqParams(np.float32(1), np.array(0), TensorProto.UINT8, high=15))
    True
    """
    if not quantization.format.is_integer:
        return False
    return (quantization.low, quantization.high) != element_range(quantization.kind)


def quantize_node(x: str, scale: str, zero_point: str, y: str, qparams: QdqParams) -> NodeProto:
    """A QuantizeLinear node from x to y.

    >>> quantize_node("x", "s", "z", "y", QdqParams(np.float32(1), np.array(0), TensorProto.UINT8)).op_type
    'QuantizeLinear'
    """
    return _node("QuantizeLinear", [x, scale, zero_point], y, qparams)


def dequantize_node(x: str, scale: str, zero_point: str | None, y: str, qparams: QdqParams) -> NodeProto:
    """A DequantizeLinear node from x to y; without a zero point where that is 0 and needs no type.

    >>> dequantize_node("x", "s", None, "y", QdqParams(np.ones(2, np.float32), np.zeros(2), TensorProto.INT32)).input
    ['x', 's']
    """
    inputs = [x, scale] if zero_point is None else [x, scale, zero_point]
    return _node("DequantizeLinear", inputs, y, qparams)


def _node(operator: str, inputs: list[str], y: str, qparams: QdqParams) -> NodeProto:
    node = helper.make_node(operator, inputs, [y], name=f"{y}_node")
    node.attribute.extend(helper.make_attribute(name, value) for name, value in qparams.attributes().items())
    return node


Names = tuple[str, str, str]  # of codes, scale and zero point


class Pair(NamedTuple):
    """The nodes of a Q/DQ pair, and the names of the tensors that they make.

    Attributes:
        nodes: in order, the QuantizeLinear last but one.
        codes, dequantized: the tensors.
    """

    nodes: list[NodeProto]
    codes: str
    dequantized: str


class QdqWriter:
    """Adds the constants of quantizers to a graph, and makes their nodes.

    Args:
        graph: where constants are added; nodes are returned, and not inserted.
        bounds: how names of a Clip's bounds end.
        named_by_operator: whether a node is called by its operator and what it is about, or by its result.

    >>> from onnx import parser
    >>> graph = Graph(parser.parse_model(
    ...     '<ir_version: 8, opset_import: ["" : 17]> g (float[2] x) => (float[2] y) { y = Relu(x) }'))
    >>> writer = QdqWriter(graph)
    >>> qparams = QdqParams(np.float32(0.5), np.array(0), TensorProto.UINT8, high=15)
    >>> pair = writer.pair("x", "x", writer.parameters("x", qparams), qparams)
    >>> [node.op_type for node in pair.nodes], pair.dequantized, graph.array("x_most")
    (['Clip', 'QuantizeLinear', 'DequantizeLinear'], 'x_dequantized', array(7.5, dtype=float32))
    """

    def __init__(
        self, graph: Graph, *, bounds: tuple[str, str] = ("least", "most"), named_by_operator: bool = False
    ) -> None:
        self.graph, self.bounds, self.named_by_operator = graph, bounds, named_by_operator

    def _named(self, node: NodeProto, stem: str) -> NodeProto:
        by_operator = f"{stem}_{node.op_type}"
        node.name = self.graph.fresh(by_operator) if self.named_by_operator else f"{node.output[0]}_node"
        return node

    def parameters(self, stem: str, qparams: QdqParams) -> tuple[str, str]:
        """Add scale and zero point; returns their names."""
        scale = self.graph.add_constant(f"{stem}_scale", qparams.scale)
        return scale, self.graph.add_constant(f"{stem}_zero_point", qparams.zero_point, qparams.kind)

    def pair(
        self,
        x: str,
        stem: str,
        parameters: tuple[str, str],
        qparams: QdqParams,
        *,
        y: str = "",
        clip: bool = True,
    ) -> Pair:
        """Make a Q/DQ pair behind a tensor.

        Args:
            x: the tensor.
            stem: what new names begin with.
            parameters: the names of scale and zero point.
            qparams: their values.
            y: the dequantized tensor; "" for a new name.
            clip: False leaves the Clip out: values beyond the codes in use saturate at those of the type.
        """
        graph, (scale, zero) = self.graph, parameters
        nodes, source = list[NodeProto](), x
        if clip and needs_clip(qparams):
            source = graph.fresh(f"{stem}_clipped")
            names = [
                graph.add_constant(f"{stem}_{name}", bound)
                for name, bound in zip(self.bounds, _clip_bounds(qparams), strict=True)
            ]
            nodes.append(self._named(helper.make_node("Clip", [x, *names], [source]), stem))
        codes, dequantized = graph.fresh(f"{stem}_codes"), y or graph.fresh(f"{stem}_dequantized")
        nodes.append(self._named(quantize_node(source, scale, zero, codes, qparams), stem))
        nodes.append(self.dequantized((codes, scale, zero), dequantized, stem, qparams))
        return Pair(nodes, codes, dequantized)

    def dequantized(self, names: tuple[str, str, str | None], y: str, stem: str, qparams: QdqParams) -> NodeProto:
        """Make the DequantizeLinear of codes, scale and zero point."""
        codes, scale, zero = names
        return self._named(dequantize_node(codes, scale, zero, y, qparams), stem)

    def codes(self, stem: str, codes: Array, qparams: QdqParams) -> Names:
        """Add the codes of a weight with scale and zero point; returns their names."""
        return self.graph.add_constant(f"{stem}_codes", codes, qparams.kind), *self.parameters(stem, qparams)

    def bias(self, stem: str, codes: Array, scale: Array) -> tuple[NodeProto, str]:
        """Add the int32 codes of a bias; returns their DequantizeLinear and its result."""
        qparams = QdqParams(np.asarray(scale, np.float32), np.zeros(scale.shape), TensorProto.INT32, axis=0)
        names = (
            self.graph.add_constant(f"{stem}_codes", codes, TensorProto.INT32),
            self.graph.add_constant(f"{stem}_scale", qparams.scale),
            None,
        )
        y = self.graph.fresh(f"{stem}_dequantized")
        return self.dequantized(names, y, stem, qparams), y

    def switch(self, flag: str, nodes: Sequence[NodeProto], quantized: str, x: str) -> tuple[NodeProto, str]:
        """Make the If node that runs nodes to a quantized tensor if a flag is set, and passes a tensor on if not.

        It runs one branch only: a Where would run the quantizers of all layers to measure a single one.
        """
        same, chosen = self.graph.fresh(f"{x}_same"), self.graph.fresh(f"{x}_chosen")
        on = helper.make_graph(nodes, "on", [], [helper.make_empty_tensor_value_info(quantized)])
        passed = [helper.make_node("Identity", [x], [same])]
        off = helper.make_graph(passed, "off", [], [helper.make_empty_tensor_value_info(same)])
        return helper.make_node("If", [flag], [chosen], name=f"{chosen}_node", then_branch=on, else_branch=off), chosen


def stored_codes(codes: Array, params: QuantParams, qparams: QdqParams) -> Array:
    """Codes as the file's type holds them, shifted with their zero point."""
    if not params.spec.format.is_integer:
        return codes
    return np.asarray(codes.astype(np.int32) + int(qparams.low - params.spec.qmin))


def _clip_bounds(qparams: QdqParams) -> tuple[Array, Array]:
    """The values of the smallest and largest code in use."""
    if qparams.scale.ndim:
        raise UnsupportedError(
            f"it uses the codes {qparams.low}..{qparams.high} of a wider type with a scale per channel, and Clip takes "
            "one bound: use one scale per tensor, or a format of 4, 8 or 16 bits and all of its codes"
        )
    lo, hi = (
        np.asarray((code - qparams.zero_point) * qparams.scale, np.float32) for code in (qparams.low, qparams.high)
    )
    return lo, hi


def gather(
    graph: Graph,
    node: NodeProto,
    names: Names,
    qparams: QdqParams,
    shape: tuple[int, ...],
    key: str,
    index_rank: int | None = None,
) -> list[NodeProto]:
    """What takes the place of a Gather node that reads a quantized table.

    Args:
        graph: where constants are added.
        node: the Gather node, along axis 0.
        names: those of codes, scale and zero point.
        qparams: the table's quantization.
        shape: the table's.
        key: what new names begin with.
        index_rank: how many axes the indices have; None for what the graph says.

    >>> from onnx import parser
    >>> graph = Graph(parser.parse_model('''<ir_version: 10, opset_import: ["" : 21]>
    ...     g (float[9, 4] table, int64[2] i) => (float[2, 4] y) { y = Gather(table, i) }'''))
    >>> qparams = QdqParams(np.ones(9, np.float32), np.zeros(9, np.int64), TensorProto.INT8, axis=0)
    >>> made = gather(graph, graph.nodes[0], ("codes", "scale", "zero"), qparams, (9, 4), "table")
    >>> [each.op_type for each in made]
    ['Gather', 'Cast', 'Gather', 'Unsqueeze', 'Mul']
    """
    return _Gathering(graph, node, qparams, shape, key, index_rank).build(names)


class _Gathering:
    def __init__(
        self,
        graph: Graph,
        node: NodeProto,
        qparams: QdqParams,
        shape: tuple[int, ...],
        key: str,
        index_rank: int | None,
    ) -> None:
        self.graph, self.qparams, self.shape, self.key = graph, qparams, shape, key
        self.indices, self.out = node.input[1], node.output[0]
        self.index_rank = len(graph.shape(self.indices) or ()) if index_rank is None else index_rank
        self.made: list[NodeProto] = []

    def build(self, names: Names) -> list[NodeProto]:
        qparams, last = self.qparams, len(self.shape) - 1
        codes, scale, zero = names
        picked = self._add("Gather", [codes, self.indices], "picked")
        if not qparams.scale.ndim or (qparams.axis == last and not qparams.block):
            node = dequantize_node(picked, scale, zero, self.out, replace(qparams, axis=-1))
            node.name = self.graph.fresh(f"{self.key}_DequantizeLinear")
            return [*self.made, node]
        if qparams.axis != (last if qparams.block else 0):
            raise UnsupportedError(
                f"{self.key} is looked up by rows and has scales along axis {qparams.axis}: use one per row, per group "
                "of a row, or per tensor"
            )
        numbers = self._add("Cast", [picked], "numbers", to=TensorProto.FLOAT)
        if qparams.block:
            numbers = self._reshape(numbers, [qparams.scale.shape[-1], qparams.block], "groups")
        if qparams.zero_point.any():
            origin = self._add("Cast", [self._rows(zero)], "zero_points_as_numbers", to=TensorProto.FLOAT)
            numbers = self._add("Sub", [numbers, origin], "centred")
        if not qparams.block:
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
