"""Reader of quantized graphs from any tool.

==================================================== ============================================ =========
in the file                                          record                                       form
==================================================== ============================================ =========
codes -> DequantizeLinear                            ``WeightCodes``; int32 codes are a bias      codes
4-bit codes -> Cast to 8 bits -> DequantizeLinear    ``WeightCodes``; the Cast changes no code    codes
codes -> Gather, Transpose, ... -> DequantizeLinear  ``WeightCodes``, ``direct`` is False         codes
float constant -> QuantizeLinear -> DequantizeLinear ``WeightCodes``, quantized at run time       float
codes -> Gather -> Cast [-> Sub] -> Mul              ``WeightCodes``; rows are looked up          table
codes -> Cast [-> Sub] -> Mul                        ``WeightCodes``; computed once, at load      product
codes -> MatMulInteger -> Cast -> Mul by two scales  ``WeightCodes``; the input is dynamic, and   integer
                                                     4-bit codes may be widened
QuantizeLinear                                       ``QuantizeNode``, with the Clip before it
DynamicQuantizeLinear                                ``DynamicQuantizer``
model input -> DequantizeLinear                      ``CodedInput``
QLinearConv, MatMulNBits, ..., or a computed scale   ``Unread``, with the reason
==================================================== ============================================ =========

A constant is an initializer or the value of a Constant node. ``QuantizedGraph`` holds the records of a model. Records
from subgraphs are marked ``inner``. Verification and reports open a model with ``open_quantized``. ``QuantizedModel``
is the public view of the same records. Parameters are not checked in this module. Integer operators of ONNX Runtime are
listed as ``Unread``.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
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
    CODE_OPERATORS,
    DEQUANTIZE,
    DYNAMIC_QUANTIZE,
    INTEGER_MATMUL,
    MOVING,
    QUANTIZE,
    QUANTIZERS,
    WIDER,
    Graph,
    array_of,
    attribute_of,
    describe,
    element_range,
    is_integer_type,
    node_name,
    subgraphs,
    trace_back,
    widened_constant,
)
from detent.onnx_model.provenance import Provenance
from detent.onnx_model.qdq_writer import QdqParams, group_shapes
from detent.tables import counted

__all__ = [
    "CodedInput",
    "DynamicQuantizer",
    "QuantizeNode",
    "QuantizedGraph",
    "Unread",
    "WeightCodes",
    "is_quantized",
    "open_quantized",
    "read_quantization",
]

Array = NDArray[Any]
Form = Literal["codes", "float", "table", "product", "integer"]
COMPUTED = "its scale or zero point is computed, not constant"
_CARRYING = (*MOVING, "Identity", "Gather", "Cast")  # operators between codes and a DequantizeLinear
_CODE_TYPES = [
    TensorProto.DataType.Value(name)
    for name in ("INT4", "UINT4", "INT8", "UINT8", "INT16", "UINT16", "FLOAT8E4M3FN", "FLOAT8E5M2")
]
_FLOATS = (TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16, TensorProto.DOUBLE)
_OWN_CODES = (*CODE_OPERATORS, "GatherBlockQuantized", "MatMulBnb4")  # operators with their own layout of codes
_PRODUCT_STEPS = ("Cast", "Reshape", "Sub")  # between the codes and the Mul of a product
_TABLE_STEPS = {  # between a table's Gather and its Mul: maps each operator to the operators that may follow it
    "Gather": ("Cast",),
    "Cast": ("Reshape", "Sub", "Mul"),
    "Reshape": ("Sub", "Mul"),
    "Sub": ("Mul",),
}


def is_quantized(model: ModelProto, operators: tuple[str, ...] = (*QUANTIZERS, DYNAMIC_QUANTIZE)) -> bool:
    """Return whether the main graph has a node whose operator is in ``operators``.

    The default is any Q/DQ node and DynamicQuantizeLinear.
    """
    return any(node.op_type in operators for node in model.graph.node)


def read_quantization(
    node: NodeProto, constants: Mapping[str, TensorProto], kind_of: Callable[[str], int] | None = None
) -> QdqParams | None:
    """Read the parameters of a QuantizeLinear or DequantizeLinear node; return None if a parameter is not constant.

    Args:
        node: a QuantizeLinear or DequantizeLinear node.
        constants: maps names to initializers.
        kind_of: maps the name of a tensor to its element type; used for nodes without a zero point.

    Raises:
        UnsupportedError: the scale is not float32.
        FileFormatError: scale and zero point have different shapes.

    >>> from onnx import helper, numpy_helper
    >>> node = helper.make_node("QuantizeLinear", ["x", "s"], ["y"])
    >>> qparams = read_quantization(node, {"s": numpy_helper.from_array(np.float32([0.5]).reshape(()), "s")})
    >>> qparams.scale, qparams.kind == TensorProto.UINT8
    (array(0.5, dtype=float32), True)
    """
    x, scale_name, zero_name = (*node.input, "")[:3]
    if any(name and name not in constants for name in (scale_name, zero_name)):
        return None
    scale = array_of(constants[scale_name])
    if scale.dtype != np.float32:
        raise UnsupportedError(
            f"{node.name}: {scale.dtype} scales are not supported, expected float32: export the model in float32"
        )
    kind: int = TensorProto.UINT8
    zero = np.zeros(scale.shape, np.int64)
    if zero_name:
        kind, zero = constants[zero_name].data_type, array_of(constants[zero_name]).astype(np.int64)
    elif node.op_type == QUANTIZE:
        kind = attribute_of(node, "output_dtype", 0) or kind
    elif x in constants:
        kind = constants[x].data_type
    elif kind_of is not None:
        kind = kind_of(x) or kind
    if scale.size == zero.size == 1:  # in some files, either the scale or the zero point is a scalar
        zero = zero.reshape(scale.shape)
    if zero.shape != scale.shape:
        raise FileFormatError(
            f"{node.name}: the zero point has shape {zero.shape}, expected the shape of the scale, {scale.shape}"
        )
    axis, block = int(attribute_of(node, "axis", 1)), int(attribute_of(node, "block_size", 0))
    if scale.size == 1 and not block:
        scale, zero = scale.reshape(()), zero.reshape(())
    return QdqParams(scale, zero, kind, axis, block, *_code_range(kind))


def _code_range(kind: int) -> tuple[int, int]:
    return element_range(kind) if is_integer_type(kind) else (0, 0)


# Records of quantized tensors


@dataclass(frozen=True, eq=False)
class QuantizeNode:
    """A QuantizeLinear node whose parameters are constants."""

    node: str  # name of the node
    x: str
    unclipped: str  # input of the Clip before the node; x if there is no Clip
    codes: str  # name of the node's output
    qparams: QdqParams
    scale: str
    zero_point: str  # "" if the node has no zero point
    readers: tuple[str, ...] = ()  # nodes that read the codes or the dequantized values
    is_constant: bool = False  # x is a constant
    inner: bool = False


@dataclass(frozen=True, eq=False)
class WeightCodes:
    """A quantized constant, and the node that dequantizes it: a DequantizeLinear, or the Mul after a table lookup.

    In the form "integer", the node is the MatMulInteger that reads the codes.
    """

    name: str  # name of the constant
    tensor: TensorProto = field(repr=False)  # holds floats, not codes, if form is "float"
    node: NodeProto = field(repr=False)
    qparams: QdqParams
    constants: tuple[str, str] = ("", "")  # names of scale and zero point
    path: tuple[str, ...] = ()  # operators between the constant and the node
    form: Form = "codes"
    readers: tuple[str, ...] = ()  # nodes that read the dequantized values
    inner: bool = False

    @cached_property
    def codes(self) -> Array:
        """The constant as an array, decoded once."""
        return array_of(self.tensor)

    @property
    def direct(self) -> bool:
        """Whether the node reads the whole constant, not some rows or a reshaped copy."""
        return not self.path

    @property
    def is_bias(self) -> bool:
        """Whether the constant is a bias: its codes are int32."""
        return self.qparams.kind == TensorProto.INT32

    @property
    def node_name(self) -> str:
        """Name of the node that dequantizes the constant."""
        return node_name(self.node)


@dataclass(frozen=True, eq=False)
class DynamicQuantizer:
    """A DynamicQuantizeLinear node, which computes scale and zero point from the range of its input."""

    node: str  # name of the node
    x: str
    codes: str  # names of the node's outputs
    scale: str
    zero_point: str
    readers: tuple[str, ...] = ()  # nodes that read the codes
    inner: bool = False


@dataclass(frozen=True, eq=False)
class CodedInput:
    """A model input that holds codes, and the constant parameters that dequantize it."""

    name: str
    qparams: QdqParams
    constants: tuple[str, str]  # names of scale and zero point
    readers: tuple[str, ...] = ()
    inner: bool = False


@dataclass(frozen=True, eq=False)
class Unread:
    """A node that reads or writes codes in a form that this reader does not support."""

    node: NodeProto
    reason: str
    of_weight: bool = False  # whether the node's codes come from a constant
    inner: bool = False


Record = QuantizeNode | DynamicQuantizer | WeightCodes | CodedInput | Unread


def _parameter_names(record: Record) -> Sequence[str]:
    """List the names of a record's scale and zero point, and of a float weight that is quantized at run time."""
    if isinstance(record, Unread):
        return record.node.input[1:] if record.node.op_type in QUANTIZERS else ()
    if isinstance(record, QuantizeNode):
        return record.scale, record.zero_point
    if isinstance(record, DynamicQuantizer):
        return ()
    is_float = isinstance(record, WeightCodes) and record.form == "float"
    return (*record.constants, record.name) if is_float else record.constants


# The reader


class QuantizedGraph:
    """A model, and ``records`` of its quantized tensors in graph order, including those in subgraphs.

    ``operators`` maps each operator to its number of nodes. ``parameters`` contains the names of all scales and zero
    points, and of float weights that are quantized at run time. ``float_nbytes`` is the size in bytes of all other
    float constants.
    """

    def __init__(self, model: ModelProto) -> None:
        self.model, self.graph = model, Graph(model)
        self.records: list[Record] = []
        self.operators: Counter[str] = Counter()
        self.parameters: set[str] = set()
        self._floats: dict[str, int] = {}
        self._read(model.graph, None)
        self.float_nbytes = sum(size for name, size in self._floats.items() if name not in self.parameters)

    def _read(self, graph: GraphProto, outer: "_Scope | None") -> None:
        scope = _Scope(graph, outer)
        outer_constants = {} if outer is None else outer.constants
        for name, tensor in scope.constants.items():
            if name not in outer_constants and tensor.data_type in _FLOATS:
                self._floats[name] = prod(tensor.dims) * BITS[tensor.data_type] // 8
        for node in graph.node:
            self.operators[node.op_type] += 1
            record = scope.read(node)
            if record is not None:
                self.records.append(record)
                self.parameters.update(_parameter_names(record))
            for body in subgraphs(node):
                self._read(body, scope)

    @cached_property
    def provenance(self) -> Provenance | None:
        """The provenance in the file's metadata, or None if detent did not write the file."""
        return Provenance.read(self.model)

    @cached_property
    def quantize_nodes(self) -> list[QuantizeNode]:
        """The QuantizeLinear nodes of the main graph."""
        return [each for each in self.records if isinstance(each, QuantizeNode) and not each.inner]

    @cached_property
    def dynamic_quantizers(self) -> list[DynamicQuantizer]:
        """The DynamicQuantizeLinear nodes of the main graph."""
        return [each for each in self.records if isinstance(each, DynamicQuantizer) and not each.inner]

    @cached_property
    def weights(self) -> list[WeightCodes]:
        """Weights and biases of the main graph that are stored as codes.

        Tables and products that the metadata lists come last; others are left out.
        """
        names = {} if self.provenance is None else self.provenance.weights
        stored = [
            each
            for each in self.records
            if isinstance(each, WeightCodes) and (not each.inner or self._is_own_integer(each, names))
        ]
        tables = [each for each in stored if each.form in {"table", "product"} and each.name in names]
        return [*(each for each in stored if each.form in {"codes", "integer"}), *tables]

    def _is_own_integer(self, weight: WeightCodes, names: Mapping[str, str]) -> bool:
        """Whether detent stored a weight of the main graph for an integer matmul in a subgraph."""
        is_stored = weight.form in {"codes", "integer"} and not weight.is_bias
        return is_stored and weight.name in names and weight.name in self.graph.constants

    @property
    def kinds(self) -> dict[str, int]:
        """Map from the name of each activation's codes to their element type."""
        return {each.codes: each.qparams.kind for each in self.quantize_nodes}

    @property
    def notes(self) -> list[str]:
        """Notes on quantizers that cannot be compared with another model; each note has a reason."""
        unread = (each for each in self.records if isinstance(each, Unread) and not each.inner)
        quantizers = (each for each in unread if each.node.op_type == QUANTIZE or each.of_weight)
        notes = [f"{node_name(each.node)} was not compared: {each.reason}" for each in quantizers]
        inner = (each for node in self.graph.nodes for body in subgraphs(node) for each in _all_nodes(body))
        count = sum(node.op_type in QUANTIZERS for node in inner)
        what, verb = counted(count, "Q/DQ node"), "was" if count == 1 else "were"
        return [*notes, f"{what} in subgraphs of If, Loop or Scan {verb} not compared"] if count else notes

    def has_own_clip(self, quantizer: QuantizeNode) -> bool:
        """Return whether detent wrote a Clip before a QuantizeLinear, so that only some codes of the type occur."""
        is_clipped = quantizer.unclipped != quantizer.x and "_clipped" in quantizer.x
        return self.provenance is not None and is_clipped


def open_quantized(source: ModelSource) -> QuantizedGraph:
    """Load a quantized model with the checks of ``load_model``, and read it; the caller must not change the model.

    Raises:
        UnsupportedError: the model has no Q/DQ nodes.
        FileFormatError: the file or its metadata are damaged.
    """
    quantized = QuantizedGraph(load_model(source).proto)
    if not (quantized.weights or quantized.quantize_nodes or quantized.dynamic_quantizers or quantized.notes):
        raise UnsupportedError(
            "the model has no QuantizeLinear or DequantizeLinear node, expected a quantized model: pass the "
            "quantized model as artifact, and the float model as source"
        )
    return quantized


class _Scope:
    """Constants of a graph and of the graphs around it, and for each name the nodes that write and read it."""

    def __init__(self, graph: GraphProto, outer: "_Scope | None") -> None:
        self.inner = outer is not None
        self.constants: dict[str, TensorProto] = {} if outer is None else dict(outer.constants)
        self.constants.update((tensor.name, tensor) for tensor in graph.initializer)
        for node in graph.node:
            value = attribute_of(node, "value") if node.op_type == "Constant" else None
            if isinstance(value, TensorProto):
                self.constants[node.output[0]] = value
        self._producers = {name: node for node in graph.node for name in node.output}
        self._widened: dict[str, str] = {} if outer is None else dict(outer._widened)  # constants by output of a Cast
        for name, node in self._producers.items():
            if constant := widened_constant(node, self.constants):
                self._widened[name] = constant
        self._input_kinds: dict[str, int] = {value.name: value.type.tensor_type.elem_type for value in graph.input}
        self._consumers: dict[str, list[NodeProto]] = defaultdict(list)
        for node in _all_nodes(graph):
            for name in dict.fromkeys(node.input):
                self._consumers[name].append(node)

    def read(self, node: NodeProto) -> Record | None:
        """Return the record of a node, or None if the node quantizes nothing or is part of another node's record."""
        try:
            if (read := self._reader(node)) is not None:
                return read(node)
            if node.op_type == INTEGER_MATMUL and (weight := self._integer_weight(node)) is not None:
                return weight
        except DetentError as error:
            of_weight = node.op_type == DEQUANTIZE and self._trace(node.input[0])[0] in self.constants
            return Unread(node, str(error), of_weight, self.inner)
        if node.op_type.startswith(_OWN_CODES):
            return Unread(node, f"{node.op_type} uses its own code layout, which is not supported", inner=self.inner)
        return None

    def _reader(self, node: NodeProto) -> Callable[[NodeProto], Record | None] | None:
        """Return the method that reads nodes of this type."""
        if node.op_type == "Gather":
            return self._table if node.input[0] in self.constants else None
        return {
            QUANTIZE: self._quantize_node,
            DEQUANTIZE: self._dequantize_node,
            DYNAMIC_QUANTIZE: self._dynamic_quantizer,
            "Mul": self._product,
        }.get(node.op_type)

    def _quantize_node(self, node: NodeProto) -> Record:
        qparams = read_quantization(node, self.constants)
        if qparams is None:
            return Unread(node, COMPUTED, inner=self.inner)
        x, scale, zero_point = (*node.input, "")[:3]
        clip = self._producers.get(x)
        return QuantizeNode(
            node_name(node),
            x,
            unclipped=clip.input[0] if clip is not None and clip.op_type == "Clip" else x,
            codes=node.output[0],
            qparams=qparams,
            scale=scale,
            zero_point=zero_point,
            readers=self._code_readers(node.output[0]),
            is_constant=x in self.constants,
            inner=self.inner,
        )

    def _dequantize_node(self, node: NodeProto) -> Record | None:
        codes, scale, zero_point = (*node.input, "")[:3]
        origin, path = self._trace(codes)
        qparams = read_quantization(node, self.constants, lambda _: self._kind(origin))
        if qparams is None:
            return Unread(node, COMPUTED, origin in self.constants, self.inner)
        if codes in self._widened:
            qparams = self._stored_params(qparams, origin)
        form: Form = "codes"
        producer = self._producers.get(codes)
        if origin not in self.constants:
            if producer is None:
                return CodedInput(codes, qparams, (scale, zero_point), self._code_readers(codes), self.inner)
            if producer.op_type != QUANTIZE or producer.input[0] not in self.constants:
                return None
            origin, path, form = producer.input[0], (QUANTIZE,), "float"
        tensor, names = self.constants[origin], (scale, zero_point)
        readers = _described(self._readers(node.output[0]))
        return WeightCodes(origin, tensor, node, qparams, names, path, form, readers, self.inner)

    def _table(self, gather: NodeProto) -> WeightCodes | None:
        """Read a table: rows of codes are looked up, cast, and multiplied by scales, which may be looked up, too."""
        table = self.constants[gather.input[0]]
        is_empty = not table.dims or 0 in table.dims
        if is_empty or table.data_type not in _CODE_TYPES or attribute_of(gather, "axis", 0) != 0:
            return None
        path, node, zero = list[str](), gather, ""
        while node.op_type != "Mul":
            path.append(node.op_type)
            before, steps = node.output[0], _TABLE_STEPS[node.op_type]
            following = next((reader for reader in self._readers(before) if reader.op_type in steps), None)
            if following is None:
                return None
            node = following
            if node.op_type == "Sub":
                zero = self._row_constant(node, before, gather)
                if not zero:
                    return None
        scale = self._row_constant(node, before, gather)
        is_grouped = "Reshape" in path
        qparams = self._table_params(table, scale, zero, is_grouped=is_grouped) if scale else None
        if qparams is None:
            return None
        last = self._readers(node.output[0])
        if is_grouped and len(last) == 1 and last[0].op_type == "Reshape":
            last = self._readers(last[0].output[0])
        names, readers = (scale, zero), _described(last)
        return WeightCodes(gather.input[0], table, node, qparams, names, tuple(path), "table", readers, self.inner)

    def _product(self, mul: NodeProto) -> WeightCodes | None:
        """Read a weight that is dequantized by Cast and Mul; None for any other Mul.

        A Reshape before and after the Mul splits and joins groups.
        """
        numbers, scale = mul.input
        path: list[str] = []
        zero = ""
        node = self._producers.get(numbers)
        while node is not None and node.op_type in _PRODUCT_STEPS and node.op_type not in path:
            path.insert(0, node.op_type)
            if node.op_type == "Sub":
                zero, _ = self._trace(node.input[1])
            if node.op_type == "Cast":
                break
            node = self._producers.get(node.input[0])
        codes = "" if node is None or path[:1] != ["Cast"] else node.input[0]
        if any(name not in self.constants for name in (codes, scale, *([zero] if zero else []))):
            return None
        tensor, last, is_grouped = self.constants[codes], mul, "Reshape" in path
        if tensor.data_type not in _CODE_TYPES or (zero and zero not in self.constants):
            return None
        if is_grouped:
            following = self._only_reader(mul.output[0], "Reshape")
            if following is None:
                return None
            last = following
        zeros = array_of(self.constants[zero]).astype(np.int64) if zero else None
        qparams = _product_params(tensor, array_of(self.constants[scale]), zeros, is_grouped=is_grouped)
        if qparams is None:
            return None
        readers = _described(self._readers(last.output[0]))
        return WeightCodes(codes, tensor, last, qparams, (scale, zero), (), "product", readers, self.inner)

    def _dynamic_quantizer(self, node: NodeProto) -> Record:
        if not all(node.output):
            return Unread(node, "one of its outputs is omitted", inner=self.inner)
        codes, scale, zero_point = node.output
        readers = self._code_readers(codes)
        return DynamicQuantizer(node_name(node), node.input[0], codes, scale, zero_point, readers, self.inner)

    def _integer_weight(self, matmul: NodeProto) -> WeightCodes | None:
        """Read the weight of a MatMulInteger whose input is quantized dynamically; None for any other pattern."""
        x, codes, x_zero, zero = (*matmul.input, "", "")[:4]
        quantizer = self._producers.get(x)
        if quantizer is None or quantizer.op_type != DYNAMIC_QUANTIZE or [*quantizer.output[::2]] != [x, x_zero]:
            return None
        cast = self._only_reader(matmul.output[0], "Cast")
        product = None if cast is None else self._only_reader(cast.output[0], "Mul")
        if cast is None or product is None or attribute_of(cast, "to") != TensorProto.FLOAT:
            return None
        scales = self._producers.get(next((name for name in product.input if name != cast.output[0]), ""))
        if scales is None or scales.op_type != "Mul" or quantizer.output[1] not in scales.input:
            return None
        scale = next((name for name in scales.input if name != quantizer.output[1]), "")
        is_widened, codes = codes in self._widened, self._widened.get(codes, codes)
        names = codes, scale, *([zero] if zero else [])
        if any(name not in self.constants for name in names) or len(self.constants[codes].dims) != 2:
            return None
        qparams = self._column_params(self.constants[codes], scale, zero)
        if qparams is None:
            return None
        qparams = self._stored_params(qparams, codes) if is_widened else qparams
        readers = _described([matmul])
        tensor = self.constants[codes]
        return WeightCodes(codes, tensor, matmul, qparams, (scale, zero), (), "integer", readers, self.inner)

    def _column_params(self, codes: TensorProto, scale: str, zero: str) -> QdqParams | None:
        """Return the parameters of a matrix with one scale, or with one scale per column."""
        scales, columns = array_of(self.constants[scale]), codes.dims[1]
        zeros = array_of(self.constants[zero]).astype(np.int64) if zero else np.zeros((), np.int64)
        if scales.dtype != np.float32 or scales.size not in {1, columns} or zeros.size not in {1, scales.size}:
            return None
        scales = scales.reshape(() if scales.size == 1 else (columns,))
        zeros = np.broadcast_to(zeros.reshape(() if zeros.size == 1 else (columns,)), scales.shape)
        return QdqParams(scales, zeros, codes.data_type, 1, 0, *_code_range(codes.data_type))

    def _only_reader(self, name: str, operator: str) -> NodeProto | None:
        readers = self._readers(name)
        return readers[0] if len(readers) == 1 and readers[0].op_type == operator else None

    def _row_constant(self, node: NodeProto, before: str, gather: NodeProto) -> str:
        """Return the name of the scalar or per-row constant that a table's Sub or Mul reads, or "" for other inputs."""
        other = next((name for name in node.input if name != before), "")
        lookup = self._producers.get(trace_back(other, self._producers.get, (*MOVING, "Cast")))
        if lookup is not None and lookup.op_type == "Gather" and lookup.input[1] == gather.input[1]:
            values, rows = self.constants.get(lookup.input[0]), self.constants[gather.input[0]].dims[0]
            return lookup.input[0] if values is not None and list(values.dims[:1]) == [rows] else ""
        origin, _ = self._trace(other)
        return origin if origin in self.constants and prod(self.constants[origin].dims) == 1 else ""

    def _table_params(self, table: TensorProto, scale: str, zero: str, *, is_grouped: bool) -> QdqParams | None:
        scales, kind = array_of(self.constants[scale]), table.data_type
        if scales.dtype != np.float32 or not scales.size:
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

    def _stored_params(self, qparams: QdqParams, constant: str) -> QdqParams:
        """Return the parameters of codes that are widened, with the type of the stored codes.

        Raises:
            FileFormatError: a zero point is out of range for the stored codes.
        """
        kind, zeros = self.constants[constant].data_type, qparams.zero_point
        low, high = _code_range(kind)
        if zeros.size and not low <= zeros.min() <= zeros.max() <= high:
            raise FileFormatError(
                f"the zero points of {constant!r} are {zeros.min()} to {zeros.max()}, but its codes are {low} to {high}"
            )
        return replace(qparams, kind=kind, low=low, high=high, read_as=WIDER[kind])

    def _trace(self, name: str) -> tuple[str, tuple[str, ...]]:
        """Follow codes backward through operators that move or cast them; a Cast that widens codes is left out.

        Returns the name of the tensor from which the codes come, and these operators in graph order.
        """
        path: list[str] = []
        while name not in self.constants and name not in self._widened:
            node = self._producers.get(name)
            if node is None or node.op_type not in _CARRYING:
                break
            path.insert(0, node.op_type)
            name = node.input[0]
        return self._widened.get(name, name), tuple(path)

    def _kind(self, name: str) -> int:
        return self.constants[name].data_type if name in self.constants else self._input_kinds.get(name, 0)

    def _readers(self, name: str) -> list[NodeProto]:
        return self._consumers.get(name, [])

    def _code_readers(self, codes: str) -> tuple[str, ...]:
        """Describe the nodes that read codes; a DequantizeLinear is replaced by the nodes that read its output."""
        return _described(
            each
            for reader in self._readers(codes)
            for each in (self._readers(reader.output[0]) if reader.op_type == DEQUANTIZE else [reader])
        )


def _product_params(codes: TensorProto, scale: Array, zero: Array | None, *, is_grouped: bool) -> QdqParams | None:
    """Return the parameters of a weight that is multiplied by ``scale``; None if the shapes are not those of a weight.

    ``is_grouped`` tells whether the codes are split into groups before.
    """
    shape, kind, limits = tuple(codes.dims), codes.data_type, _code_range(codes.data_type)
    zeros = np.zeros(scale.shape, np.int64) if zero is None else zero
    if scale.dtype != np.float32 or zeros.shape != scale.shape:
        return None
    if scale.size == 1:
        return QdqParams(scale.reshape(()), zeros.reshape(()), kind, 1, 0, *limits)
    for axis, length in enumerate(shape):
        count = scale.shape[axis] if is_grouped and scale.ndim == len(shape) + 1 else 1
        blocked = (*shape[:axis], count, *shape[axis + 1 :])
        if not is_grouped and scale.size == length:
            qparams = QdqParams(scale.ravel(), zeros.ravel(), kind, axis, 0, *limits)
        elif scale.size == prod(blocked) and count and length % count == 0:
            parts = scale.reshape(blocked), zeros.reshape(blocked)
            qparams = QdqParams(*parts, kind, axis, length // count, *limits)
        else:
            continue
        if group_shapes(qparams, shape).scale == scale.shape:
            return qparams
    return None


def _all_nodes(graph: GraphProto) -> Iterator[NodeProto]:
    for node in graph.node:
        yield node
        for body in subgraphs(node):
            yield from _all_nodes(body)


def _described(nodes: Iterable[NodeProto]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(describe(node) for node in nodes))
