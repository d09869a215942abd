"""Reading: what quantized ONNX models of any origin hold, as detent's own values.

=================================== =========================================
in the file                         here
=================================== =========================================
constant -> DequantizeLinear        a weight; with 32 bits a bias
constant -> Quantize-, Dequantize-  a weight, quantized now
Gather of codes -> DequantizeLinear a weight: an embedding, looked up in codes
Gather of codes -> Cast -> Mul      the same, with one scale per row or for all
QuantizeLinear of anything else     an activation quantizer
=================================== =========================================

What uses integers in other ways, such as QLinearConv or MatMulNBits, is listed with the reason why it is not read.

Summary: a table of what a quantized model holds.
"""

import json
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray
from onnx import GraphProto, NodeProto, TensorProto, inliner

from detent import ops
from detent.errors import DetentError, FileFormatError, UnsupportedError
from detent.onnx_model.files import ModelSource, load
from detent.onnx_model.graph import BITS, array_of, attribute_of, element_range, subgraphs
from detent.onnx_model.qdq_writer import _ATTRIBUTES, Quantization
from detent.tensor import QuantizedTensor

__all__ = [
    "ActivationQuantizer",
    "QuantizedBias",
    "QuantizedModel",
    "Summary",
    "SummaryRow",
    "load_quantized",
    "read_quantization",
]


def read_quantization(
    node: NodeProto, constants: Mapping[str, TensorProto], kind_of: Callable[[str], int] | None = None
) -> Quantization | None:
    """The parameters of a QuantizeLinear or DequantizeLinear node; None where they are no constants.

    Args:
        node: such a node.
        constants: the model's.
        kind_of: the element type of a tensor, for nodes without a zero point.

    >>> from onnx import helper, numpy_helper
    >>> node = helper.make_node("QuantizeLinear", ["x", "s"], ["y"])
    >>> found = read_quantization(node, {"s": numpy_helper.from_array(np.float32([0.5]).reshape(()), "s")})
    >>> found.scale, found.kind == TensorProto.UINT8
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
    elif node.op_type == "QuantizeLinear":
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
    low, high = element_range(kind) if TensorProto.DataType.Name(kind).lstrip("U").startswith("INT") else (0, 0)
    return Quantization(scale, zero, kind, axis, block, low, high)


WIDEST = 48
FLOAT = 4  # bytes of a float32


@dataclass(frozen=True)
class SummaryRow:
    """One quantized tensor.

    Attributes:
        name: in the file.
        kind: weight, bias or activation.
        type: its spec, or the type of its codes.
        shape: of weights and biases.
        nbytes: of its codes, scales and zero points; none for activations.
        readers: the nodes that read it.

    >>> SummaryRow("w", "weight", "int8/tensor/symmetric/onnx", (2, 3), 10, ("MatMul y",)).nbytes
    10
    """

    name: str
    kind: str
    type: str
    shape: tuple[int, ...] | None
    nbytes: int
    readers: tuple[str, ...]


@dataclass(frozen=True)
class Summary:
    """All of them; ``str`` is a table.

    Attributes:
        rows: one per quantized tensor.
        nodes: how many there are of each operator.
        skipped: what is quantized in ways that are not read, and why.
        float_nbytes: bytes of constants that stay floats.

    >>> row = SummaryRow("w", "weight", "int8/tensor/symmetric/onnx", (2, 3), 10, ("MatMul y",))
    >>> made = Summary((row,), {"MatMul": 1}, {}, 0)
    >>> print(made)
    1 weight, 10 bytes (24 as float32); 0 biases, 0 bytes; 0 activation quantizers; 0 bytes of other floats
    1 MatMul
    tensor  kind    type                        shape  bytes  read by
    w       weight  int8/tensor/symmetric/onnx  2x3       10  MatMul y
    >>> made.count("weight"), made.nbytes("weight"), made.to_json()[:14]
    (1, 10, '{"rows": [{"na')
    """

    rows: tuple[SummaryRow, ...]
    nodes: Mapping[str, int]
    skipped: Mapping[str, str]
    float_nbytes: int

    def count(self, kind: str) -> int:
        """How many rows are of that kind."""
        return sum(row.kind == kind for row in self.rows)

    def nbytes(self, kind: str) -> int:
        """The bytes of the rows of that kind."""
        return sum(row.nbytes for row in self.rows if row.kind == kind)

    def to_json(self) -> str:
        """The same facts for machines."""
        return json.dumps(asdict(self))

    def __str__(self) -> str:
        floats = sum(FLOAT * prod(row.shape or ()) for row in self.rows if row.kind == "weight")
        weights, biases, activations = (self.count(kind) for kind in ("weight", "bias", "activation"))
        head = (
            f"{weights} weight{'s' * (weights != 1)}, {self.nbytes('weight')} bytes ({floats} as float32); "
            f"{biases} bias{'es' * (biases != 1)}, {self.nbytes('bias')} bytes; "
            f"{activations} activation quantizer{'s' * (activations != 1)}; {self.float_nbytes} bytes of other floats"
        )
        nodes = ", ".join(
            f"{count} {name}" for name, count in sorted(self.nodes.items(), key=lambda at: (-at[1], at[0]))
        )
        skipped = [f"not read: {name}: {reason}" for name, reason in self.skipped.items()]
        return "\n".join([head, nodes, *self._table(), *skipped])

    def _table(self) -> list[str]:
        cells = [("tensor", "kind", "type", "shape", "bytes", "read by")]
        for row in self.rows:
            shape = "" if row.shape is None else "x".join(map(str, row.shape)) or "1"
            amount = "" if row.kind == "activation" else str(row.nbytes)
            cells.append((_short(row.name), row.kind, row.type, shape, amount, ", ".join(row.readers)))
        if len(cells) == 1:
            return []
        widths = [max(len(line[i]) for line in cells) for i in range(len(cells[0]) - 1)]
        return [
            "  ".join(
                cell.rjust(width) if i == 4 else cell.ljust(width)
                for i, (cell, width) in enumerate(zip(line[:-1], widths, strict=True))
            )
            + f"  {line[-1]}"
            for line in cells
        ]


def _short(name: str) -> str:
    """The end of a long name, where names of modules differ."""
    return name if len(name) <= WIDEST else "..." + name[3 - WIDEST :]


Array = NDArray[Any]
QUANTIZE, DEQUANTIZE = "QuantizeLinear", "DequantizeLinear"
_CODES = (TensorProto.INT8, TensorProto.UINT8, TensorProto.INT4, TensorProto.UINT4, TensorProto.INT16)
_INTEGER_OPERATORS = (
    "ConvInteger",
    "DynamicQuantize",
    "GatherBlockQuantized",
    "MatMulBnb4",
    "MatMulInteger",
    "MatMulNBits",
    "QAttention",
    "QGemm",
    "QLinear",
)
_FLOATS = (TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16, TensorProto.DOUBLE)


@dataclass(frozen=True, eq=False)
class QuantizedBias:
    """Codes of 32 bits, which no spec has, and their scales.

    Attributes:
        codes: int32.
        scale, zero_point: for all codes, or one per code along ``axis``.
        axis: where there are several.

    >>> bias = QuantizedBias(np.array([4, -2], np.int32), np.array([0.5, 0.25], np.float32), np.zeros(2, np.int64), 0)
    >>> bias.dequantize(), bias.nbytes
    (array([ 2. , -0.5], dtype=float32), 16)
    """

    codes: Array
    scale: Array
    zero_point: Array
    axis: int

    def dequantize(self) -> Array:
        """The values in float32."""
        shape = (
            [-1 if i == self.axis % self.codes.ndim else 1 for i in range(self.codes.ndim)] if self.scale.ndim else ()
        )
        # The difference wraps around as it does in 32 bits.
        whole = (self.codes.astype(np.int64) - self.zero_point.reshape(shape)).astype(np.int32)
        values: Array = whole.astype(np.float32) * self.scale.reshape(shape)
        return values

    @property
    def nbytes(self) -> int:
        """Of codes and scales."""
        return int(self.codes.nbytes + self.scale.nbytes)


@dataclass(frozen=True, eq=False)
class ActivationQuantizer:
    """A QuantizeLinear node.

    Attributes:
        tensor: what it quantizes.
        output: its codes.
        scale, zero_point: one, or one per channel.
        type: of the codes, as ONNX calls it.
        axis: of the channels.

    >>> ActivationQuantizer("x", "x_codes", np.float32(0.5), np.int64(128), "UINT8", 1).type
    'UINT8'
    """

    tensor: str
    output: str
    scale: Array
    zero_point: Array
    type: str
    axis: int


@dataclass(frozen=True, eq=False)
class QuantizedModel:
    """What a quantized model holds.

    Attributes:
        weights: by the names of their codes in the file.
        biases: the same, of 32 bits.
        activations: quantizers in the order of the graph.
        readers: the nodes that read a weight, a bias or the codes of an activation, by its name.
        skipped: what else is quantized, and why it is not read.
        nodes: how many there are of each operator.
        float_nbytes: bytes of constants that are floats and belong to no quantizer.

    >>> import onnx
    >>> made = onnx.parser.parse_model('''<ir_version: 8, opset_import: ["" : 17]> g (float[2] x) => (float[2] y)
    ...     <int8[2] w = {3, -4}, float s = {0.5}> { v = DequantizeLinear(w, s) y = Add(x, v) }''')
    >>> found = load_quantized(made)
    >>> found.weights["w"].dequantize(), found.readers["w"]
    (array([ 1.5, -2. ], dtype=float32), ('Add y',))
    >>> print(found.summary())
    1 weight, 7 bytes (8 as float32); 0 biases, 0 bytes; 0 activation quantizers; 0 bytes of other floats
    1 Add, 1 DequantizeLinear
    tensor  kind    type                     shape  bytes  read by
    w       weight  int8/tensor/affine/onnx  2          7  Add y
    """

    weights: Mapping[str, QuantizedTensor]
    biases: Mapping[str, QuantizedBias]
    activations: tuple[ActivationQuantizer, ...]
    readers: Mapping[str, tuple[str, ...]]
    skipped: Mapping[str, str]
    nodes: Mapping[str, int]
    float_nbytes: int

    def summary(self) -> Summary:
        """A table of everything; ``str`` of it is text."""
        rows = [
            SummaryRow(name, "weight", str(tensor.spec), tensor.shape, tensor.nbytes, self.readers.get(name, ()))
            for name, tensor in self.weights.items()
        ]
        rows += [
            SummaryRow(name, "bias", "int32", bias.codes.shape, bias.nbytes, self.readers.get(name, ()))
            for name, bias in self.biases.items()
        ]
        rows += [
            SummaryRow(each.tensor, "activation", each.type.lower(), None, 0, self.readers.get(each.output, ()))
            for each in self.activations
        ]
        return Summary(tuple(rows), dict(self.nodes), dict(self.skipped), self.float_nbytes)


def load_quantized(source: ModelSource) -> QuantizedModel:
    """Read a quantized model, whoever wrote it; the file is checked as ``load`` does.

    Args:
        source: a path, or a model in memory.

    Raises:
        FileFormatError, UnsupportedError: as ``load``.

    >>> import onnx
    >>> load_quantized(onnx.parser.parse_model(
    ...     '<ir_version: 8, opset_import: ["" : 17]> g (float[1] x) => (float[1] y) { y = Abs(x) }')).weights
    {}
    """
    model = load(source)
    if model.functions:
        model = inliner.inline_local_functions(model)
    reader = _Reader()
    reader.read(model.graph, {})
    return QuantizedModel(
        reader.weights,
        reader.biases,
        tuple(reader.activations),
        {name: tuple(dict.fromkeys(found)) for name, found in reader.readers.items()},
        reader.skipped,
        dict(Counter(reader.operators)),
        sum(reader.floats.values()),
    )


@dataclass(frozen=True, eq=False)
class _Scope:
    """What names mean in a graph: its constants and those around it, who makes a name and who reads it."""

    constants: Mapping[str, TensorProto]
    makers: Mapping[str, NodeProto]
    users: Mapping[str, list[NodeProto]]
    inputs: Mapping[str, int]

    @classmethod
    def of(cls, graph: GraphProto, outer: Mapping[str, TensorProto]) -> "_Scope":
        constants = {**outer, **{tensor.name: tensor for tensor in graph.initializer}}
        for node in graph.node:
            value = attribute_of(node, "value") if node.op_type == "Constant" else None
            if isinstance(value, TensorProto):
                constants[node.output[0]] = value
        makers = {name: node for node in graph.node for name in node.output}
        inputs = {value.name: value.type.tensor_type.elem_type for value in graph.input}
        return cls(constants, makers, _users(graph), inputs)

    def readers(self, name: str) -> list[NodeProto]:
        return self.users.get(name, [])

    def kind(self, name: str) -> int:
        """The type of codes that are an input or looked up in a table, 0 of others."""
        table = self.maker(name, "Gather")
        return self.inputs.get(name, 0) if table is None else self.constants[table.input[0]].data_type

    def maker(self, name: str, operator: str) -> NodeProto | None:
        """The node of that type that makes a name from a constant."""
        found = self.makers.get(name)
        is_it = found is not None and found.op_type == operator and found.input[0] in self.constants
        return found if is_it else None


@dataclass
class _Reader:
    """What was found so far, in a graph and in the bodies of its nodes."""

    weights: dict[str, QuantizedTensor] = field(default_factory=dict)
    biases: dict[str, QuantizedBias] = field(default_factory=dict)
    activations: list[ActivationQuantizer] = field(default_factory=list)
    readers: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))
    skipped: dict[str, str] = field(default_factory=dict)
    operators: list[str] = field(default_factory=list)
    floats: dict[str, int] = field(default_factory=dict)

    def read(self, graph: GraphProto, outer: Mapping[str, TensorProto]) -> None:
        scope = _Scope.of(graph, outer)
        for name, tensor in scope.constants.items():
            if name not in outer and tensor.data_type in _FLOATS:
                self.floats[name] = prod(tensor.dims) * BITS[tensor.data_type] // 8
        for node in graph.node:
            self.operators.append(node.op_type)
            try:
                self._read_node(node, scope)
            except DetentError as error:
                self.skipped[_called(node)] = str(error)
            for body in subgraphs(node):
                self.read(body, scope.constants)

    def _read_node(self, node: NodeProto, scope: _Scope) -> None:
        if node.op_type in {QUANTIZE, DEQUANTIZE}:
            how = read_quantization(node, _matched(node, scope.constants), scope.kind)
            for name in node.input[1:]:
                self.floats.pop(name, None)
            if how is None:
                self.skipped[_called(node)] = "its scale or zero point is computed, not constant"
            elif node.op_type == DEQUANTIZE:
                self._read_weight(node, how, scope)
            elif node.input[0] not in scope.constants:
                self._add_activation(node.input[0], node.output[0], how, scope)
        elif node.op_type == "Gather" and node.input[0] in scope.constants:
            self._read_table(node, scope)
        elif node.op_type.startswith(_INTEGER_OPERATORS):
            self.skipped[_called(node)] = f"{node.op_type} keeps its codes in a form of its own"

    def _read_weight(self, node: NodeProto, how: Quantization, scope: _Scope) -> None:
        name = node.input[0]
        quantized, looked_up = scope.maker(name, QUANTIZE), scope.maker(name, "Gather")
        if quantized is not None:
            name = quantized.input[0]
            self.floats.pop(name, None)
            self._add(name, ops.quantize(array_of(scope.constants[name]), how.params(_shape(scope.constants[name]))))
        elif name in scope.constants or (looked_up is not None and not how.scale.ndim):
            name = name if looked_up is None else looked_up.input[0]
            codes = array_of(scope.constants[name])
            if how.kind == TensorProto.INT32:
                self.biases[name] = QuantizedBias(codes, how.scale, how.zero_point, how.axis)
            else:
                self._add(name, QuantizedTensor(codes, how.params(codes.shape)))
        elif name not in scope.makers:  # an input of the model that comes as codes
            self._add_activation(name, name, how, scope)
            return
        else:
            return
        self._add_readers(name, scope.readers(node.output[0]))

    def _read_table(self, node: NodeProto, scope: _Scope) -> None:
        """A table of codes whose rows are looked up, cast and multiplied by a scale, which may be looked up, too."""
        name = node.input[0]
        table = scope.constants[name]
        casts = [user for user in scope.readers(node.output[0]) if user.op_type == "Cast"]
        products = [user for cast in casts for user in scope.readers(cast.output[0]) if user.op_type == "Mul"]
        if table.data_type not in _CODES or not products or attribute_of(node, "axis", 0) != 0:
            return
        factor = next((given for given in products[0].input if given != casts[0].output[0]), "")
        rows = scope.maker(factor, "Gather")
        source = factor if rows is None else rows.input[0]
        if source not in scope.constants or scope.constants[source].data_type != TensorProto.FLOAT:
            return
        scale = array_of(scope.constants[source])
        if rows is None and scale.size == 1:
            scale = scale.reshape(())
        elif rows is not None and rows.input[1] == node.input[1] and scale.size == table.dims[0]:
            scale = scale.reshape(-1)
        else:
            return
        low, high = element_range(table.data_type)
        how = Quantization(scale, np.zeros(scale.shape, np.int64), table.data_type, 0, low=low, high=high)
        self.floats.pop(source, None)
        self._add(name, QuantizedTensor(array_of(table), how.params(_shape(table))))
        self._add_readers(name, scope.readers(products[0].output[0]))

    def _add(self, name: str, tensor: QuantizedTensor) -> None:
        if self.weights.setdefault(name, tensor) != tensor:
            self.skipped[name] = "it is dequantized in two ways; the first is read"

    def _add_activation(self, tensor: str, output: str, how: Quantization, scope: _Scope) -> None:
        kind = TensorProto.DataType.Name(how.kind)
        self.activations.append(ActivationQuantizer(tensor, output, how.scale, how.zero_point, kind, how.axis))
        for user in scope.readers(output):
            self._add_readers(output, scope.readers(user.output[0]) if user.op_type == DEQUANTIZE else [user])

    def _add_readers(self, name: str, nodes: list[NodeProto]) -> None:
        self.readers[name] += [_called(node) for node in nodes]


def _users(graph: GraphProto) -> dict[str, list[NodeProto]]:
    """The nodes that read a name, those in bodies included."""
    found: dict[str, list[NodeProto]] = defaultdict(list)
    for node in _all_nodes(graph):
        for name in dict.fromkeys(node.input):
            found[name].append(node)
    return found


def _all_nodes(graph: GraphProto) -> Iterator[NodeProto]:
    for node in graph.node:
        yield node
        for body in subgraphs(node):
            yield from _all_nodes(body)


def _called(node: NodeProto) -> str:
    return f"{node.op_type} {node.name or ', '.join(node.output)}"


def _matched(node: NodeProto, constants: Mapping[str, TensorProto]) -> Mapping[str, TensorProto]:
    """Constants in which a lone zero point has the shape of its scale: some files mix [1] and []."""
    names = list(node.input[1:3])
    if len(names) == 1 or not all(name in constants and prod(constants[name].dims) == 1 for name in names):
        return constants
    zero = TensorProto()
    zero.CopyFrom(constants[names[1]])
    zero.dims[:] = constants[names[0]].dims
    return {**constants, names[1]: zero}


def _shape(tensor: TensorProto) -> tuple[int, ...]:
    return tuple(tensor.dims)
