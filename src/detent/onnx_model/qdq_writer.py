"""Writer of quantized graphs: Q/DQ pairs, switches for Q/DQ pairs, weights and tables as codes, int32 biases.

``QdqParams`` holds quantization parameters in the layout of a file:

=============== ============================================= ======================
granularity     shape of the scale in the file                attributes
=============== ============================================= ======================
PerTensor       ()
PerAxis(a)      (number of channels,)                         axis=a
PerGroup(n, a)  as the data, but ceil(size / n) on axis a     axis=a, block_size=n
=============== ============================================= ======================

``QdqWriter`` adds constants and makes nodes; callers compute the codes and insert the nodes. If not all codes of the
type are used, a Clip is written before QuantizeLinear. The bounds of the Clip are the values of the smallest and
largest code in use. ``gather`` dequantizes only the rows of a table that are looked up:

==================== ==================================================================
scale                nodes
==================== ==================================================================
one, or per column   Gather(codes) -> DequantizeLinear
per row              (Cast(Gather(codes)) - Gather(zero point)) * Gather(scale)
per group of a row   as per row, with the groups as an additional axis
==================== ==================================================================

The results are the same as with DequantizeLinear: the subtraction is exact, and the product is rounded once. A
DequantizeLinear could read looked-up scales only as blocks, which OpenVINO does not support.

Codes of 4 bits that a kernel reads in bytes are stored as ``codes -> Cast``, which runtimes compute at load.

A layer with a dynamically quantized input is ``integer_matmul``, which ONNX Runtime fuses into one kernel::

    x -> DynamicQuantizeLinear -> MatMulInteger(weight codes) -> Cast -> Mul(input scale * weight scale) [-> Add(bias)]
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from onnx import NodeProto, TensorProto, helper

from detent.errors import FileFormatError, ParamsError, UnsupportedError
from detent.formats import FORMATS, Format
from detent.granularity import Granularity, PerAxis, PerGroup, PerTensor
from detent.onnx_model.graph import (
    DEQUANTIZE,
    DYNAMIC_QUANTIZE,
    INTEGER_MATMUL,
    QUANTIZE,
    Graph,
    element_range,
)
from detent.onnx_model.targets import Container
from detent.params import QuantParams
from detent.spec import QuantSpec

__all__ = [
    "DynamicCodes",
    "Names",
    "Pair",
    "QdqParams",
    "QdqWriter",
    "dequantize_node",
    "gather",
    "group_shapes",
    "integer_matmul",
    "needs_clip",
    "quantize_node",
    "stored_codes",
]

Array = NDArray[Any]


@dataclass(frozen=True, eq=False)
class QdqParams:
    """Quantization parameters in the layout of a file.

    Attributes:
        scale: float32 array.
        zero_point: integers in the range of the codes' type, with the shape of the scale.
        kind: ONNX type of the stored codes.
        axis: axis with one scale per channel, or axis that is split into blocks.
        block: block size; 0 without blocks.
        low: smallest code in use.
        high: largest code in use.
        read_as: ONNX type to which a Cast converts the codes before they are read; 0 without a Cast.

    >>> qparams = QdqParams.of(QuantParams("int8", 0.5), Container(TensorProto.UINT8, 128), 2)
    >>> qparams.scale, qparams.zero_point, qparams.low, qparams.high, qparams.block
    (array(0.5, dtype=float32), array(128), 1, 255, 0)
    """

    scale: Array
    zero_point: Array
    kind: int
    axis: int = 1
    block: int = 0
    low: float = 0
    high: float = 255
    read_as: int = 0

    @classmethod
    def of(cls, params: QuantParams, container: Container, rank: int) -> "QdqParams":
        """Convert quantization parameters to the layout of a file, for data with ``rank`` axes.

        Raises:
            UnsupportedError: ONNX files cannot store the scales.
            ParamsError: a scale cannot be stored exactly in float32.
        """
        spec = params.spec
        if params.block_scale is not None or spec.scale_format != "float":
            raise UnsupportedError(f"ONNX files cannot store the scales of {spec}: use a spec with float scales")
        axis, block = _layout(spec.granularity, rank)
        scale = np.asarray(params.scale, np.float32)
        if not np.array_equal(scale, params.scale):
            raise ParamsError(
                "got float64 scales that float32 cannot represent, but ONNX files store float32 scales: use "
                "float32 params"
            )
        zero = np.asarray(params.zero_point.astype(np.int64) + container.shift)
        low, high = spec.qmin + container.shift, spec.qmax + container.shift
        return cls(scale, zero, container.kind, axis, block, low, high, container.read_as)

    @property
    def read_kind(self) -> int:
        """ONNX type of the codes that are read, and of the zero point."""
        return self.read_as or self.kind

    @property
    def format(self) -> Format:
        """Format of the codes."""
        name = TensorProto.DataType.Name(self.kind)
        for format in FORMATS.values():
            if format.onnx == name:
                return format
        raise UnsupportedError(f"codes of ONNX type {name} are not supported")

    def granularity(self, shape: tuple[int, ...]) -> Granularity:
        """Return the granularity of these parameters, for data with the shape ``shape``."""
        if self.block:
            return PerGroup(self.block, axis=self.axis)
        return PerAxis(self.axis_in(len(shape))) if self.scale.ndim else PerTensor()

    def axis_in(self, rank: int) -> int:
        """Return the axis of per-channel scales as a non-negative number, for data with ``rank`` axes."""
        if not rank:
            raise FileFormatError(
                f"got scales of shape {self.scale.shape} for codes of shape (), expected a scalar scale"
            )
        return self.axis % rank

    def params(self, shape: tuple[int, ...]) -> QuantParams:
        """Return these parameters as ``QuantParams``, for data with the shape ``shape`` and codes as in the file."""
        format = self.format
        low, high = (self.low, self.high) if format.is_integer else (None, None)
        spec = QuantSpec(format, self.granularity(shape), symmetric=not format.is_integer, qmin=low, qmax=high)
        return QuantParams(spec, self.scale, self.zero_point)

    def attributes(self) -> dict[str, int]:
        """Return the attributes of Q/DQ nodes with these parameters."""
        if self.block:
            return {"axis": self.axis, "block_size": self.block}
        return {"axis": self.axis} if self.scale.ndim else {}


def _layout(granularity: Granularity, rank: int) -> tuple[int, int]:
    """Return the axis of scales in a file, and the block size."""
    if isinstance(granularity, PerTensor):
        return 1, 0
    if isinstance(granularity, PerAxis):
        return granularity.axis % rank, 0
    if isinstance(granularity, PerGroup):
        return granularity.axis % rank, granularity.size
    raise UnsupportedError(f"ONNX files cannot store {granularity} scales: use a tensor, axis or group granularity")


def needs_clip(qparams: QdqParams) -> bool:
    """Return whether a Clip must precede quantization, because not all codes of the type are used."""
    return qparams.format.is_integer and (qparams.low, qparams.high) != element_range(qparams.kind)


def quantize_node(x: str, scale: str, zero_point: str, y: str, qparams: QdqParams) -> NodeProto:
    """Make a QuantizeLinear node from x to y.

    >>> quantize_node("x", "s", "z", "y", QdqParams(np.float32(1), np.array(0), TensorProto.UINT8)).op_type
    'QuantizeLinear'
    """
    return _node(QUANTIZE, [x, scale, zero_point], y, qparams)


def dequantize_node(x: str, scale: str, zero_point: str | None, y: str, qparams: QdqParams) -> NodeProto:
    """Make a DequantizeLinear node from x to y; ``zero_point`` is None for int32 codes.

    >>> dequantize_node("x", "s", None, "y", QdqParams(np.ones(2, np.float32), np.zeros(2), TensorProto.INT32)).input
    ['x', 's']
    """
    inputs = [x, scale] if zero_point is None else [x, scale, zero_point]
    return _node(DEQUANTIZE, inputs, y, qparams)


def _node(operator: str, inputs: list[str], y: str, qparams: QdqParams) -> NodeProto:
    node = helper.make_node(operator, inputs, [y], name=f"{y}_node")
    node.attribute.extend(helper.make_attribute(name, value) for name, value in qparams.attributes().items())
    return node


Names = tuple[str, str, str]  # names of codes, scale and zero point


class Pair(NamedTuple):
    """The nodes of a Q/DQ pair, and the names of their outputs."""

    nodes: list[NodeProto]  # [Clip,] QuantizeLinear, DequantizeLinear
    codes: str
    dequantized: str


class DynamicCodes(NamedTuple):
    """Names of the outputs of a DynamicQuantizeLinear node."""

    codes: str
    scale: str
    zero_point: str


class QdqWriter:
    """Writer of Q/DQ nodes: adds their constants to a graph, and makes the nodes; the caller inserts the nodes.

    ``bounds`` are the suffixes of the names of a Clip's two bounds. Nodes are named ``<stem>_<operator>`` if
    ``named_by_operator``, otherwise ``<output>_node``.
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
        """Add scale and zero point to the graph; return their names."""
        scale = self.graph.add_constant(f"{stem}_scale", qparams.scale)
        return scale, self.graph.add_constant(f"{stem}_zero_point", qparams.zero_point, qparams.read_kind)

    def pair(
        self,
        x: str,
        stem: str,
        parameters: tuple[str, str],
        qparams: QdqParams,
        *,
        y: str = "",
    ) -> Pair:
        """Make a Q/DQ pair from x to y; if y is "", the output gets a new name.

        ``parameters`` are the names of scale and zero point.
        """
        graph, (scale, zero) = self.graph, parameters
        nodes: list[NodeProto] = []
        if needs_clip(qparams):
            clipped, bounds = graph.fresh(f"{stem}_clipped"), zip(self.bounds, _clip_bounds(qparams), strict=True)
            names = [graph.add_constant(f"{stem}_{name}", bound) for name, bound in bounds]
            nodes.append(self._named(helper.make_node("Clip", [x, *names], [clipped]), stem))
            x = clipped
        codes, dequantized = graph.fresh(f"{stem}_codes"), y or graph.fresh(f"{stem}_dq")
        nodes.append(self._named(quantize_node(x, scale, zero, codes, qparams), stem))
        nodes.append(self.dequantized((codes, scale, zero), dequantized, stem, qparams))
        return Pair(nodes, codes, dequantized)

    def dequantized(self, names: tuple[str, str, str | None], y: str, stem: str, qparams: QdqParams) -> NodeProto:
        """Make a DequantizeLinear node; ``names`` are the names of codes, scale and zero point."""
        codes, scale, zero = names
        return self._named(dequantize_node(codes, scale, zero, y, qparams), stem)

    def codes(self, stem: str, codes: Array, qparams: QdqParams) -> Names:
        """Add the codes, scale and zero point of a weight to the graph; return the three names."""
        return self.graph.add_constant(f"{stem}_codes", codes, qparams.kind), *self.parameters(stem, qparams)

    def widened(self, codes: str, stem: str, qparams: QdqParams) -> tuple[list[NodeProto], str]:
        """Make the Cast that widens stored codes; return it and the name of the codes to read.

        Without a Cast, the list is empty, and the name is ``codes``.
        """
        if not qparams.read_as:
            return [], codes
        wide = self.graph.fresh(f"{codes}_widened")
        return [self._named(helper.make_node("Cast", [codes], [wide], to=qparams.read_as), stem)], wide

    def bias(self, stem: str, codes: Array, scale: Array) -> tuple[NodeProto, str]:
        """Add the int32 codes and the scale of a bias; return the DequantizeLinear node and its output's name."""
        qparams = QdqParams(np.asarray(scale, np.float32), np.zeros(scale.shape), TensorProto.INT32, axis=0)
        codes_name = self.graph.add_constant(f"{stem}_codes", codes, TensorProto.INT32)
        scale_name = self.graph.add_constant(f"{stem}_scale", qparams.scale)
        y = self.graph.fresh(f"{stem}_dq")
        return self.dequantized((codes_name, scale_name, None), y, stem, qparams), y

    def product(self, stem: str, codes: Array, qparams: QdqParams) -> tuple[list[NodeProto], Names]:
        """Make the nodes that dequantize a weight by Cast, [Reshape, Sub,] Mul[, Reshape]; add their constants.

        Returns the nodes, and the names of codes, scale and zero point. The zero point is "" if it is 0.
        """
        graph, shape, groups = self.graph, codes.shape, group_shapes(qparams, codes.shape)
        code_name = graph.add_constant(f"{stem}_codes", codes, qparams.kind)
        scale = graph.add_constant(f"{stem}_scale", qparams.scale.reshape(groups.scale))
        nodes: list[NodeProto] = []

        def add(operator: str, inputs: list[str], y: str, **attributes: Any) -> str:
            name = graph.fresh(f"{stem}_{y}")
            node = helper.make_node(operator, inputs, [name], **attributes)
            nodes.append(self._named(node, stem))
            return name

        def reshape(name: str, sizes: Sequence[int], y: str) -> str:
            return add("Reshape", [name, graph.add_constant(f"{stem}_shape", np.array(sizes))], y)

        numbers = add("Cast", [code_name], "numbers", to=TensorProto.FLOAT)
        if groups.codes != shape:
            numbers = reshape(numbers, groups.codes, "groups")
        zero = ""
        if qparams.zero_point.any():
            zero = graph.add_constant(f"{stem}_zero_point", qparams.zero_point.reshape(groups.scale), qparams.kind)
            origin = add("Cast", [zero], "zero_point_as_number", to=TensorProto.FLOAT)
            numbers = add("Sub", [numbers, origin], "centred")
        dequantized = add("Mul", [numbers, scale], "dq")
        if groups.codes != shape:
            reshape(dequantized, shape, "dq_reshaped")
        return nodes, (code_name, scale, zero)

    def dynamic(self, x: str) -> tuple[NodeProto, DynamicCodes]:
        """Make a DynamicQuantizeLinear node; return it and the names of its outputs."""
        names = DynamicCodes(*(self.graph.fresh(f"{x}_{part}") for part in DynamicCodes._fields))
        name = self.graph.fresh(f"{x}_{DYNAMIC_QUANTIZE}")
        return helper.make_node(DYNAMIC_QUANTIZE, [x], list(names), name=name), names

    def switch(self, flag: str, nodes: Sequence[NodeProto], quantized: str, x: str) -> tuple[NodeProto, str]:
        """Make an If node: if ``flag`` is true, it runs ``nodes`` and outputs ``quantized``; otherwise it outputs x.

        Returns the node and its output's name. An If runs only one branch. With Where instead of If, every run would
        compute the Q/DQ pairs of all layers.
        """
        same, chosen = self.graph.fresh(f"{x}_same"), self.graph.fresh(f"{x}_chosen")
        on = helper.make_graph(nodes, "on", [], [helper.make_empty_tensor_value_info(quantized)])
        passed = [helper.make_node("Identity", [x], [same])]
        off = helper.make_graph(passed, "off", [], [helper.make_empty_tensor_value_info(same)])
        return helper.make_node("If", [flag], [chosen], name=f"{chosen}_node", then_branch=on, else_branch=off), chosen


class GroupShapes(NamedTuple):
    """Shapes in which codes and scales of a weight can be multiplied, because they broadcast."""

    codes: tuple[int, ...]
    scale: tuple[int, ...]


def group_shapes(qparams: QdqParams, shape: tuple[int, ...]) -> GroupShapes:
    """Return the shapes in which codes of shape ``shape`` and their scales broadcast.

    >>> group_shapes(QdqParams(np.ones((2, 3, 4), np.float32), np.zeros((2, 3, 4)), TensorProto.INT8, 2, 8), (2, 3, 32))
    GroupShapes(codes=(2, 3, 4, 8), scale=(2, 3, 4, 1))
    """
    if not qparams.scale.ndim:
        return GroupShapes(shape, ())
    axis = qparams.axis_in(len(shape))
    if not qparams.block:
        return GroupShapes(shape, tuple(size if i == axis else 1 for i, size in enumerate(shape)))
    count = qparams.scale.shape[axis]
    if count == 1:
        return GroupShapes(shape, qparams.scale.shape)
    return GroupShapes(
        (*shape[:axis], count, qparams.block, *shape[axis + 1 :]), (*shape[:axis], count, 1, *shape[axis + 1 :])
    )


def stored_codes(codes: Array, params: QuantParams, qparams: QdqParams) -> Array:
    """Shift codes by the offset that ``qparams`` adds to zero points, so that the codes fit the file's type."""
    if not params.spec.format.is_integer:
        return codes
    return np.asarray(codes.astype(np.int32) + int(qparams.low - params.spec.qmin))


def _clip_bounds(qparams: QdqParams) -> tuple[Array, Array]:
    """Return the bounds of a Clip: the values of the smallest and largest code in use."""
    if qparams.scale.ndim:
        raise UnsupportedError(
            f"data must be clipped to the codes {qparams.low}..{qparams.high}, but ONNX cannot clip per channel: use "
            "one scale per tensor, or a format of 4, 8 or 16 bits without qmin and qmax"
        )
    lo, hi = (
        np.asarray((code - qparams.zero_point) * qparams.scale, np.float32) for code in (qparams.low, qparams.high)
    )
    return lo, hi


def integer_matmul(
    graph: Graph, node: NodeProto, x: DynamicCodes, weight: Names, qparams: QdqParams
) -> list[NodeProto]:
    """Make the nodes that replace a MatMul or Gemm whose input is quantized dynamically.

    ``weight`` are the names of codes, scale and zero point, and ``qparams`` the parameters of the weight. The
    MatMulInteger has the name of ``node``. Equal zero points are one scalar, and zero points of 0 are left out.
    """
    codes, scale, zero_points = weight
    inputs, values = [x.codes, codes, x.zero_point], qparams.zero_point
    if values.any():
        is_equal = bool((values == values.flat[0]).all())
        inputs.append(
            graph.add_constant(f"{codes}_zero_point", values.flat[0], qparams.read_kind) if is_equal else zero_points
        )
    names = {part: graph.fresh(f"{node.name}_{part}") for part in ("sums", "sums_as_float", "scale")}
    out, bias = node.output[0], node.input[2] if len(node.input) > 2 else ""
    product = graph.fresh(f"{node.name}_product") if bias else out
    nodes = [
        helper.make_node(INTEGER_MATMUL, inputs, [names["sums"]], name=node.name),
        helper.make_node("Cast", [names["sums"]], [names["sums_as_float"]], to=TensorProto.FLOAT),
        helper.make_node("Mul", [x.scale, scale], [names["scale"]]),
        helper.make_node("Mul", [names["sums_as_float"], names["scale"]], [product]),
        *([helper.make_node("Add", [product, bias], [out])] if bias else []),
    ]
    for each in nodes[1:]:
        each.name = graph.fresh(f"{each.output[0]}_{each.op_type}")
    return nodes


def gather(
    graph: Graph,
    node: NodeProto,
    names: Names,
    qparams: QdqParams,
    shape: tuple[int, ...],
    key: str,
    index_rank: int | None = None,
) -> list[NodeProto]:
    """Make the nodes that replace a Gather along axis 0 of a quantized table; add their constants to the graph.

    ``names`` are the names of codes, scale and zero point. ``shape`` is the shape of the table. New names begin with
    ``key``. If ``index_rank`` is None, the rank of the indices is read from the graph.
    """
    codes, scale, zero = names
    lookup = _Lookup(graph, node, key, index_rank)
    picked = lookup.add("Gather", [codes, lookup.indices], "picked")
    last = len(shape) - 1
    if not qparams.scale.ndim or (qparams.axis == last and not qparams.block):
        dequantize = dequantize_node(picked, scale, zero, lookup.out, replace(qparams, axis=-1))
        dequantize.name = graph.fresh(f"{key}_DequantizeLinear")
        return [*lookup.nodes, dequantize]
    if qparams.axis != (last if qparams.block else 0):
        raise UnsupportedError(
            f"{key}: an embedding cannot have scales along axis {qparams.axis}: use a scale per row, per group of a "
            "row, or per tensor"
        )
    numbers = lookup.add("Cast", [picked], "numbers", to=TensorProto.FLOAT)
    if qparams.block:
        numbers = lookup.reshape(numbers, [qparams.scale.shape[-1], qparams.block], "groups")
    if qparams.zero_point.any():
        origin = lookup.add("Cast", [lookup.rows(zero)], "zero_points_as_numbers", to=TensorProto.FLOAT)
        numbers = lookup.add("Sub", [numbers, origin], "centred")
    product = lookup.add("Mul", [numbers, lookup.rows(scale)], "products" if qparams.block else lookup.out)
    if qparams.block:
        lookup.reshape(product, [shape[-1]], lookup.out)
    return lookup.nodes


class _Lookup:
    """Builder of the nodes that replace a Gather."""

    def __init__(self, graph: Graph, gather: NodeProto, key: str, index_rank: int | None) -> None:
        self.graph, self.key = graph, key
        self.indices, self.out = gather.input[1], gather.output[0]
        self.index_rank = len(graph.shape(self.indices) or ()) if index_rank is None else index_rank
        self.nodes: list[NodeProto] = []

    def rows(self, name: str) -> str:
        """Look up the scales or zero points of the selected rows, and append an axis for broadcasting."""
        stem = f"{name.removeprefix(self.key + '_')}s"
        picked = self.add("Gather", [name, self.indices], stem)
        return self.add("Unsqueeze", [picked, self._constant("last_axis", [-1])], f"{stem}_spread")

    def reshape(self, name: str, sizes: list[int], y: str) -> str:
        """Reshape the axes after the index axes to ``sizes``, to split the last axis or to join the last two axes."""
        shape = self._constant(f"shape_{self.index_rank}_{len(sizes)}", [0] * self.index_rank + sizes)
        return self.add("Reshape", [name, shape], y)

    def _constant(self, stem: str, values: list[int]) -> str:
        name = f"{self.key}_{stem}"
        return name if name in self.graph.constants else self.graph.add_constant(name, np.array(values))

    def add(self, operator: str, inputs: list[str], y: str, **attributes: Any) -> str:
        name = y if y == self.out else self.graph.fresh(f"{self.key}_{y}")
        node = helper.make_node(operator, inputs, [name], name=self.graph.fresh(f"{self.key}_{operator}"), **attributes)
        self.nodes.append(node)
        return name
