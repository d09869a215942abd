"""The one reader of quantized graphs, whoever wrote them.

============================================ ============================================ =========
in the file                                  record                                       form
============================================ ============================================ =========
codes -> DequantizeLinear                    ``WeightCodes``; of 32 bits a bias           codes
codes -> Gather, Transpose .. -> Dequantize- ``WeightCodes``, ``direct`` is False         codes
float constant -> Quantize-, DequantizeLin.  ``WeightCodes``, quantized as the model runs float
codes -> Gather -> Cast [-> Sub] -> Mul      ``WeightCodes``: rows looked up with scales  table
QuantizeLinear                               ``QuantizeNode``, with the Clip before it
model input -> DequantizeLinear              ``CodedInput``
QLinearConv, MatMulNBits ..., computed scale ``Unread``, with the reason
============================================ ============================================ =========

A constant is an initializer or the value of a Constant node. ``QuantizedGraph`` holds the records of a model, those in
subgraphs marked ``inner``; verification and reports read it through ``open_quantized``. ``quantized_model`` has the
public view of the same records, in detent's own values.

Parameters in the records are as the file has them: nothing here says that they are sound. Operators of ONNX Runtime
with integers inside are listed, not read.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from onnx import GraphProto, ModelProto, NodeProto, TensorProto

from detent.errors import DetentError, FileFormatError, UnsupportedError
from detent.onnx_model.files import ModelSource, load_model
from detent.onnx_model.graph import (
    BITS,
    DEQUANTIZE,
    INTEGER_KERNELS,
    MOVING,
    QUANTIZE,
    QUANTIZERS,
    Graph,
    array_of,
    attribute_of,
    element_range,
    node_name,
    subgraphs,
    trace_back,
)
from detent.onnx_model.provenance import Provenance
from detent.onnx_model.qdq_writer import _ATTRIBUTES, QdqParams

__all__ = [
    "CodedInput",
    "QuantizeNode",
    "QuantizedGraph",
    "Unread",
    "WeightCodes",
    "called",
    "is_quantized",
    "open_quantized",
    "read_quantization",
]

Array = NDArray[Any]
Form = Literal["codes", "float", "table"]
COMPUTED = "its scale or zero point is computed, not constant"
_CARRYING = (*MOVING, "Identity", "Gather", "Cast")  # between the codes of a weight and their DequantizeLinear
_CODE_TYPES = (
    TensorProto.INT8,
    TensorProto.UINT8,
    TensorProto.INT4,
    TensorProto.UINT4,
    TensorProto.INT16,
    TensorProto.UINT16,
    TensorProto.FLOAT8E4M3FN,
    TensorProto.FLOAT8E5M2,
)
_FLOATS = (TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16, TensorProto.DOUBLE)
_OWN_CODES = (*INTEGER_KERNELS, "GatherBlockQuantized", "MatMulBnb4")  # operators that keep codes in their own form


def is_quantized(model: ModelProto, operators: tuple[str, ...] = QUANTIZERS) -> bool:
    """Whether the main graph has a QuantizeLinear or DequantizeLinear node, or one of the given operators.

    >>> from onnx import parser
    >>> is_quantized(parser.parse_model(
    ...     '<ir_version: 8, opset_import: ["" : 17]> g (float[1] x) => (float[1] y) { y = Abs(x) }'))
    False
    """
    return any(node.op_type in operators for node in model.graph.node)


def read_quantization(
    node: NodeProto, constants: Mapping[str, TensorProto], kind_of: Callable[[str], int] | None = None
) -> QdqParams | None:
    """Read the parameters of a QuantizeLinear or DequantizeLinear node; None if they are not constants.

    Args:
        node: such a node.
        constants: the model's.
        kind_of: the element type of a tensor, for nodes without a zero point.

    Raises:
        UnsupportedError: the scale is not float32.
        FileFormatError: scale and zero point have different shapes.

    >>> from onnx import helper, numpy_helper
    >>> node = helper.make_node("QuantizeLinear", ["x", "s"], ["y"])
    >>> qparams = read_quantization(node, {"s": numpy_helper.from_array(np.float32([0.5]).reshape(()), "s")})
    >>> qparams.scale, qparams.kind == TensorProto.UINT8
    (array(0.5, dtype=float32), True)
    """
    names = [*node.input, ""]
    if any(name and name not in constants for name in names[1:3]):
        return None
    scale = array_of(constants[names[1]])
    if scale.dtype != np.float32:
        raise UnsupportedError(f"{node.name}: scales of {scale.dtype} are not read here, only float32")
    kind: int = TensorProto.UINT8
    zero = np.zeros(scale.shape, np.int64)
    if names[2]:
        kind, zero = constants[names[2]].data_type, array_of(constants[names[2]]).astype(np.int64)
    elif node.op_type == QUANTIZE:
        kind = attribute_of(node, "output_dtype", 0) or kind
    elif names[0] in constants:
        kind = constants[names[0]].data_type
    elif kind_of is not None:
        kind = kind_of(names[0]) or kind
    if scale.size == zero.size == 1:  # some write one number as an array, the other as a scalar
        zero = zero.reshape(scale.shape)
    if zero.shape != scale.shape:
        raise FileFormatError(f"{node.name}: its scale has shape {scale.shape}, its zero point {zero.shape}")
    axis, block = (int(attribute_of(node, name, default)) for name, default in zip(_ATTRIBUTES, (1, 0), strict=True))
    if scale.size == 1 and not block:
        scale, zero = scale.reshape(()), zero.reshape(())
    return QdqParams(scale, zero, kind, axis, block, *_code_range(kind))


def _code_range(kind: int) -> tuple[int, int]:
    return element_range(kind) if TensorProto.DataType.Name(kind).lstrip("U").startswith("INT") else (0, 0)


# Records: what is quantized, as the file has it


@dataclass(frozen=True, eq=False)
class QuantizeNode:
    """A QuantizeLinear node whose parameters are constants.

    Attributes:
        node: its name.
        x: the tensor that it quantizes.
        unclipped: the input of the Clip before it, x itself if there is none.
        codes: its result.
        qparams: the parameters in the file.
        scale, zero_point: their names in the file.
        readers: the nodes that read its codes, or the numbers made of them.
        is_constant: whether x is a constant.
        inner: whether it is in a subgraph.
    """

    node: str
    x: str
    unclipped: str
    codes: str
    qparams: QdqParams
    scale: str
    zero_point: str
    readers: tuple[str, ...] = ()
    is_constant: bool = False
    inner: bool = False


@dataclass(frozen=True, eq=False)
class WeightCodes:
    """A constant and a node that makes numbers of its codes.

    Attributes:
        name: the constant's.
        tensor: the constant; a float one where ``form`` is "float".
        node: a DequantizeLinear node, or the Mul of a table.
        qparams: the parameters in the file.
        constants: the names of scale and zero point.
        path: the operators between the constant and the node.
        form: how the codes are stored, see the table above.
        readers: the nodes that read the numbers.
        inner: whether it is in a subgraph.
    """

    name: str
    tensor: TensorProto = field(repr=False)
    node: NodeProto = field(repr=False)
    qparams: QdqParams
    constants: tuple[str, str] = ("", "")
    path: tuple[str, ...] = ()
    form: Form = "codes"
    readers: tuple[str, ...] = ()
    inner: bool = False

    @cached_property
    def codes(self) -> Array:
        """The constant as an array, decoded once."""
        return array_of(self.tensor)

    @property
    def direct(self) -> bool:
        """Whether the node reads the constant itself, not a part of it or another shape."""
        return not self.path

    @property
    def is_bias(self) -> bool:
        """Whether the codes have 32 bits."""
        return self.qparams.kind == TensorProto.INT32

    @property
    def node_name(self) -> str:
        """The name of the node."""
        return node_name(self.node)


@dataclass(frozen=True, eq=False)
class CodedInput:
    """An input of the model that comes as codes, dequantized with constant parameters."""

    name: str
    qparams: QdqParams
    readers: tuple[str, ...] = ()
    inner: bool = False


@dataclass(frozen=True, eq=False)
class Unread:
    """A node with integers that is not read.

    Attributes:
        node: the node.
        reason: why.
        of_weight: whether its codes come from a constant.
        inner: whether it is in a subgraph.
    """

    node: NodeProto
    reason: str
    of_weight: bool = False
    inner: bool = False


Record = QuantizeNode | WeightCodes | CodedInput | Unread


# The reader


class QuantizedGraph:
    """A model, with all that is quantized in it.

    Attributes:
        model, graph: the model, and its main graph with names looked up.
        records: everything found, in the order of the graph, subgraphs included.
        operators: how many nodes there are of each operator.
        parameters: the names of scales and zero points, and of float constants that are quantized as the model runs.
        float_nbytes: bytes of all other float constants.

    >>> from onnx import parser
    >>> read = QuantizedGraph(parser.parse_model('''<ir_version: 10, opset_import: ["" : 21]>
    ...     g (float[N] x) => (float[N] y) <float s = {0.5}, uint8 z = {3}, uint8[2] w = {3, 4}>
    ...     { q = QuantizeLinear(x, s, z) d = DequantizeLinear(q, s, z)
    ...       v = DequantizeLinear(w, s, z) y = Add(d, v) }'''))
    >>> [each.codes for each in read.quantize_nodes], [each.node_name for each in read.weights], read.kinds
    (['q'], ['DequantizeLinear_v'], {'q': 2})
    """

    def __init__(self, model: ModelProto) -> None:
        self.model, self.graph = model, Graph(model)
        self.records: list[Record] = []
        self.operators: Counter[str] = Counter()
        self.parameters: set[str] = set()
        self._floats: dict[str, int] = {}
        self._read(model.graph, {}, inner=False)
        self.float_nbytes = sum(size for name, size in self._floats.items() if name not in self.parameters)

    def _read(self, graph: GraphProto, outer: Mapping[str, TensorProto], *, inner: bool) -> None:
        scope = _Scope(graph, outer, inner=inner)
        for name, tensor in scope.constants.items():
            if name not in outer and tensor.data_type in _FLOATS:
                self._floats[name] = prod(tensor.dims) * BITS[tensor.data_type] // 8
        for node in graph.node:
            self.operators[node.op_type] += 1
            for record, parameters in scope.read(node):
                self.records.append(record)
                self.parameters.update(parameters)
            for body in subgraphs(node):
                self._read(body, scope.constants, inner=True)

    @cached_property
    def provenance(self) -> Provenance | None:
        """What the file says of itself; None if detent did not write it."""
        return Provenance.read(self.model)

    @cached_property
    def quantize_nodes(self) -> list[QuantizeNode]:
        """The QuantizeLinear nodes of the main graph."""
        return [each for each in self.records if isinstance(each, QuantizeNode) and not each.inner]

    @cached_property
    def weights(self) -> list[WeightCodes]:
        """Codes stored in the main graph, biases included; tables, which come last, only if the metadata name them."""
        names = {} if self.provenance is None else self.provenance.weights
        stored = [each for each in self.records if isinstance(each, WeightCodes) and not each.inner]
        tables = [each for each in stored if each.form == "table" and each.name in names]
        return [*(each for each in stored if each.form == "codes"), *tables]

    @property
    def kinds(self) -> dict[str, int]:
        """The element types of activation codes, by name."""
        return {each.codes: each.qparams.kind for each in self.quantize_nodes}

    @property
    def inner_count(self) -> int:
        """How many quantizers there are in subgraphs."""
        nodes = (inner for node in self.graph.nodes for body in subgraphs(node) for inner in _all_nodes(body))
        return sum(node.op_type in QUANTIZERS for node in nodes)

    @property
    def notes(self) -> list[str]:
        """What a comparison of codes leaves out, and why."""
        unread = (each for each in self.records if isinstance(each, Unread) and not each.inner)
        quantizers = (each for each in unread if each.node.op_type == QUANTIZE or each.of_weight)
        notes = [f"{node_name(each.node)} was not compared: {each.reason}" for each in quantizers]
        count = self.inner_count
        return [*notes, f"{count} quantizers in the bodies of If, Loop or Scan are not compared"] if count else notes

    def has_own_clip(self, quantizer: QuantizeNode) -> bool:
        """Whether the Clip before a quantizer is part of it: it uses fewer codes than its type has."""
        is_clipped = quantizer.unclipped != quantizer.x and "_clipped" in quantizer.x
        return self.provenance is not None and is_clipped


def open_quantized(source: ModelSource) -> QuantizedGraph:
    """Load and read a quantized model, which is not to be changed; files are checked as ``load_model`` does.

    Raises:
        UnsupportedError: it has no quantizers.
        FileFormatError: it is damaged, or its metadata are.

    >>> from onnx import parser
    >>> open_quantized(parser.parse_model(
    ...     '<ir_version: 8, opset_import: ["" : 17]> g (float[1] x) => (float[1] y) { y = Abs(x) }'))
    Traceback (most recent call last):
    ...
    detent.errors.UnsupportedError: the artifact has no QuantizeLinear or DequantizeLinear node: give the quantized \
model as artifact, and what it was made from as source
    """
    read = QuantizedGraph(load_model(source).proto)
    if not (read.weights or read.quantize_nodes or read.notes):
        raise UnsupportedError(
            "the artifact has no QuantizeLinear or DequantizeLinear node: give the quantized model as artifact, "
            "and what it was made from as source"
        )
    return read


class _Scope:
    """The names of one graph: its constants and those around it, who makes a name and who reads it."""

    def __init__(self, graph: GraphProto, outer: Mapping[str, TensorProto], *, inner: bool) -> None:
        self.inner = inner
        self.constants = {**outer, **{tensor.name: tensor for tensor in graph.initializer}}
        for node in graph.node:
            value = attribute_of(node, "value") if node.op_type == "Constant" else None
            if isinstance(value, TensorProto):
                self.constants[node.output[0]] = value
        self._makers = {name: node for node in graph.node for name in node.output}
        self._kinds: dict[str, int] = {value.name: value.type.tensor_type.elem_type for value in graph.input}
        self._users: dict[str, list[NodeProto]] = defaultdict(list)
        for node in _all_nodes(graph):
            for name in dict.fromkeys(node.input):
                self._users[name].append(node)

    def read(self, node: NodeProto) -> Iterator[tuple[Record, tuple[str, ...]]]:
        """What a node tells, if anything, and the constants that are parameters of it."""
        try:
            if node.op_type == QUANTIZE:
                yield from self._quantize_node(node)
            elif node.op_type == DEQUANTIZE:
                yield from self._dequantize_node(node)
            elif node.op_type == "Gather" and node.input[0] in self.constants:
                yield from self._table(node)
            elif node.op_type.startswith(_OWN_CODES):
                yield Unread(node, f"{node.op_type} keeps its codes in a form of its own", inner=self.inner), ()
        except DetentError as error:
            of_weight = node.op_type == DEQUANTIZE and self._origin(node.input[0]) in self.constants
            yield Unread(node, str(error), of_weight, self.inner), tuple(node.input[1:])

    def _quantize_node(self, node: NodeProto) -> Iterator[tuple[Record, tuple[str, ...]]]:
        names = tuple(node.input[1:])
        qparams = read_quantization(node, self.constants)
        if qparams is None:
            yield Unread(node, COMPUTED, inner=self.inner), names
            return
        x, codes = node.input[0], node.output[0]
        clip = self._maker(x)
        unclipped = clip.input[0] if clip is not None and clip.op_type == "Clip" else x
        zero_point = node.input[2] if len(node.input) > 2 else ""
        yield (
            QuantizeNode(
                node_name(node),
                x,
                unclipped,
                codes,
                qparams,
                node.input[1],
                zero_point,
                self._code_readers(codes),
                x in self.constants,
                self.inner,
            ),
            names,
        )

    def _dequantize_node(self, node: NodeProto) -> Iterator[tuple[Record, tuple[str, ...]]]:
        codes, names = node.input[0], tuple(node.input[1:])
        origin = self._origin(codes)
        quantize = self._maker(codes)
        qparams = read_quantization(node, self.constants, lambda _: self._kind(origin))
        if qparams is None:
            yield Unread(node, COMPUTED, origin in self.constants, self.inner), names
        elif origin in self.constants:
            yield self._weight(node, origin, qparams, self._path(codes)), names
        elif quantize is not None and quantize.op_type == QUANTIZE and quantize.input[0] in self.constants:
            x = quantize.input[0]
            yield self._weight(node, x, qparams, (QUANTIZE,), "float"), (*names, x)
        elif quantize is None:
            yield CodedInput(codes, qparams, self._code_readers(codes), self.inner), names

    def _weight(
        self, node: NodeProto, name: str, qparams: QdqParams, path: tuple[str, ...], form: Form = "codes"
    ) -> WeightCodes:
        names = [*node.input[1:], ""]
        readers = _called_all(self._readers(node.output[0]))
        constants = names[0], names[1]
        return WeightCodes(name, self.constants[name], node, qparams, constants, path, form, readers, self.inner)

    def _table(self, gather: NodeProto) -> Iterator[tuple[Record, tuple[str, ...]]]:
        """Rows of codes that are looked up, cast, and multiplied by a scale; scales may be looked up with them."""
        table = self.constants[gather.input[0]]
        if table.data_type not in _CODE_TYPES or attribute_of(gather, "axis", 0) != 0:
            return
        path, node, zero = ["Gather"], gather, ""
        while node.op_type != "Mul":
            before = node.output[0]
            found = next((user for user in self._readers(before) if user.op_type in _TABLE_STEPS[node.op_type]), None)
            if found is None:
                return
            node = found
            if node.op_type == "Sub":
                zero = self._row_constant(node, before, gather)
                if not zero:
                    return
            path.append(node.op_type)
        scale = self._row_constant(node, before, gather)
        qparams = self._table_params(table, scale, zero, is_grouped="Reshape" in path) if scale else None
        if qparams is None:
            return
        last = self._readers(node.output[0])
        if "Reshape" in path and len(last) == 1 and last[0].op_type == "Reshape":
            last = self._readers(last[0].output[0])
        yield (
            WeightCodes(
                gather.input[0],
                table,
                node,
                qparams,
                (scale, zero),
                tuple(path[:-1]),
                "table",
                _called_all(last),
                self.inner,
            ),
            (scale, zero),
        )

    def _row_constant(self, node: NodeProto, before: str, gather: NodeProto) -> str:
        """The constant that a Sub or Mul of a table reads, looked up with the rows or one number; "" if neither."""
        other = next((name for name in node.input if name != before), "")
        lookup = self._maker(trace_back(other, self._maker, (*MOVING, "Cast")))
        if lookup is not None and lookup.op_type == "Gather" and lookup.input[1] == gather.input[1]:
            name = lookup.input[0]
            is_per_row = name in self.constants and list(self.constants[name].dims[:1]) == [
                self.constants[gather.input[0]].dims[0]
            ]
            return name if is_per_row else ""
        origin = self._origin(other)
        return origin if origin in self.constants and prod(self.constants[origin].dims) == 1 else ""

    def _table_params(self, table: TensorProto, scale: str, zero: str, *, is_grouped: bool) -> QdqParams | None:
        scales, kind = array_of(self.constants[scale]), table.data_type
        if scales.dtype != np.float32:
            return None
        zeros = array_of(self.constants[zero]).astype(np.int64) if zero else np.zeros(scales.shape, np.int64)
        if zeros.size != scales.size:
            return None
        zeros, width = zeros.reshape(scales.shape), table.dims[-1]
        if is_grouped and scales.ndim == 2 and width % scales.shape[-1] == 0:
            return QdqParams(scales, zeros, kind, -1, width // scales.shape[-1], *_code_range(kind))
        if scales.size not in {1, table.dims[0]}:
            return None
        shape = () if scales.size == 1 else (-1,)
        return QdqParams(scales.reshape(shape), zeros.reshape(shape), kind, 0, 0, *_code_range(kind))

    def _origin(self, name: str) -> str:
        """The tensor before all that only moves or casts codes; stops at a constant."""
        return trace_back(name, lambda each: None if each in self.constants else self._maker(each), _CARRYING)

    def _path(self, name: str) -> tuple[str, ...]:
        path: list[str] = []
        while name not in self.constants:
            node = self._makers[name]
            path.insert(0, node.op_type)
            name = node.input[0]
        return tuple(path)

    def _maker(self, name: str) -> NodeProto | None:
        return self._makers.get(name)

    def _kind(self, name: str) -> int:
        return self.constants[name].data_type if name in self.constants else self._kinds.get(name, 0)

    def _readers(self, name: str) -> list[NodeProto]:
        return self._users.get(name, [])

    def _code_readers(self, codes: str) -> tuple[str, ...]:
        """The nodes that read codes, with DequantizeLinear replaced by the nodes behind it."""
        nodes = [
            each
            for user in self._readers(codes)
            for each in (self._readers(user.output[0]) if user.op_type == DEQUANTIZE else [user])
        ]
        return _called_all(nodes)


_TABLE_STEPS = {
    "Gather": ("Cast",),
    "Cast": ("Reshape", "Sub", "Mul"),
    "Reshape": ("Sub", "Mul"),
    "Sub": ("Mul",),
}


def _all_nodes(graph: GraphProto) -> Iterator[NodeProto]:
    for node in graph.node:
        yield node
        for body in subgraphs(node):
            yield from _all_nodes(body)


def called(node: NodeProto) -> str:
    """The operator and the name of a node, or of its results.

    >>> called(NodeProto(op_type="Add", output=["y"]))
    'Add y'
    """
    return f"{node.op_type} {node.name or ', '.join(node.output)}"


def _called_all(nodes: list[NodeProto]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(called(node) for node in nodes))
