"""QuantizedModel: the contents of a quantized ONNX file, whoever wrote it, in detent's own values.

It is a view of what ``qdq_reader`` finds: weights as ``QuantizedTensor``, biases, activation quantizers, and a summary
of all of them as a table. Functions are inlined, subgraphs are read, parameters are checked. What cannot be read is
listed with the reason, in ``skipped``.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray
from onnx import TensorProto, inliner

from detent import ops
from detent.errors import DetentError, UnsupportedError
from detent.onnx_model.files import ModelSource, load_model
from detent.onnx_model.qdq_reader import CodedInput, QuantizedGraph, QuantizeNode, Unread, WeightCodes, called
from detent.onnx_model.qdq_writer import QdqParams
from detent.tensor import QuantizedTensor

__all__ = ["ActivationQuantizer", "QuantizedBias", "QuantizedModel", "Summary", "SummaryRow", "load_quantized"]

Array = NDArray[Any]
FLOAT_NBYTES = 4
MAX_NAME_CHARS = 48


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
    >>> model = onnx.parser.parse_model('''<ir_version: 8, opset_import: ["" : 17]> g (float[2] x) => (float[2] y)
    ...     <int8[2] w = {3, -4}, float s = {0.5}> { v = DequantizeLinear(w, s) y = Add(x, v) }''')
    >>> quantized = load_quantized(model)
    >>> quantized.weights["w"].dequantize(), quantized.readers["w"]
    (array([ 1.5, -2. ], dtype=float32), ('Add y',))
    >>> print(quantized.summary())
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

    @classmethod
    def of(cls, graph: QuantizedGraph) -> "QuantizedModel":
        """The view of a graph that was read; of two ways to dequantize one constant, the first counts."""
        view = _View()
        for record in graph.records:
            view.add(record)
        parts = view.weights, view.biases, tuple(view.activations), view.readers, view.skipped
        return cls(*parts, dict(graph.operators), graph.float_nbytes)

    def summary(self) -> "Summary":
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
    model = load_model(source).proto
    return QuantizedModel.of(QuantizedGraph(inliner.inline_local_functions(model) if model.functions else model))


@dataclass
class _View:
    """The fields of a ``QuantizedModel``, filled record by record."""

    weights: dict[str, QuantizedTensor] = field(default_factory=dict)
    biases: dict[str, QuantizedBias] = field(default_factory=dict)
    activations: list[ActivationQuantizer] = field(default_factory=list)
    readers: dict[str, tuple[str, ...]] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)

    def add(self, record: QuantizeNode | WeightCodes | CodedInput | Unread) -> None:
        if isinstance(record, Unread):
            self.skipped[called(record.node)] = record.reason
        elif isinstance(record, CodedInput):
            self._add_activation(record.name, record.name, record)
        elif isinstance(record, WeightCodes):
            self._add_weight(record)
        elif not record.is_constant:
            self._add_activation(record.x, record.codes, record)

    def _add_weight(self, weight: WeightCodes) -> None:
        name, qparams = weight.name, weight.qparams
        try:
            if weight.is_bias:
                self.biases[name] = QuantizedBias(weight.codes, qparams.scale, qparams.zero_point, qparams.axis)
            else:
                tensor = _tensor(weight)
                if self.weights.setdefault(name, tensor) != tensor:
                    self.skipped[name] = "it is dequantized in two ways; the first is read"
        except DetentError as error:
            self.skipped[called(weight.node)] = str(error)
        else:
            self._add_readers(name, weight.readers)

    def _add_activation(self, tensor: str, codes: str, record: QuantizeNode | CodedInput) -> None:
        qparams = record.qparams
        kind = TensorProto.DataType.Name(qparams.kind)
        self.activations.append(
            ActivationQuantizer(tensor, codes, qparams.scale, qparams.zero_point, kind, qparams.axis)
        )
        if record.readers:
            self._add_readers(codes, record.readers)

    def _add_readers(self, name: str, readers: tuple[str, ...]) -> None:
        self.readers[name] = tuple(dict.fromkeys((*self.readers.get(name, ()), *readers)))


def _tensor(weight: WeightCodes) -> QuantizedTensor:
    params = _whole(weight).params(weight.codes.shape)
    if weight.form == "float":
        return ops.quantize(weight.codes, params)
    return QuantizedTensor(weight.codes, params)


def _whole(weight: WeightCodes) -> QdqParams:
    """The parameters for the constant itself, of which the node may see some rows or another shape."""
    qparams = weight.qparams
    if weight.direct or weight.form != "codes":
        return qparams
    is_per_column = weight.path == ("Gather",) and qparams.axis == -1  # whatever rows are picked
    if "Cast" in weight.path or (qparams.scale.ndim and not is_per_column):
        raise UnsupportedError("its codes are moved or cast before they are dequantized")
    return replace(qparams, axis=len(weight.codes.shape) - 1)


@dataclass(frozen=True)
class SummaryRow:
    """One quantized tensor.

    Attributes:
        name: its name in the file.
        kind: weight, bias or activation.
        type: its spec, or the type of its codes.
        shape: its shape; None for activations.
        nbytes: bytes of its codes, scales and zero points; 0 for activations.
        readers: the nodes that read it.
    """

    name: str
    kind: str
    type: str
    shape: tuple[int, ...] | None
    nbytes: int
    readers: tuple[str, ...]


@dataclass(frozen=True)
class Summary:
    """A table of all quantized tensors; ``str`` is its text.

    Attributes:
        rows: one per quantized tensor.
        nodes: number of nodes per operator.
        skipped: what is quantized but not read, and why.
        float_nbytes: bytes of the constants that stay float.

    >>> row = SummaryRow("w", "weight", "int8/tensor/symmetric/onnx", (2, 3), 10, ("MatMul y",))
    >>> summary = Summary((row,), {"MatMul": 1}, {}, 0)
    >>> print(summary)
    1 weight, 10 bytes (24 as float32); 0 biases, 0 bytes; 0 activation quantizers; 0 bytes of other floats
    1 MatMul
    tensor  kind    type                        shape  bytes  read by
    w       weight  int8/tensor/symmetric/onnx  2x3       10  MatMul y
    >>> summary.count("weight"), summary.nbytes("weight"), summary.to_json()[:14]
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
        """The summary as a JSON object."""
        return json.dumps(asdict(self))

    def __str__(self) -> str:
        floats = sum(FLOAT_NBYTES * prod(row.shape or ()) for row in self.rows if row.kind == "weight")
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
    return name if len(name) <= MAX_NAME_CHARS else "..." + name[3 - MAX_NAME_CHARS :]
