"""QuantizedModel: the contents of a quantized ONNX file as objects of detent, whichever tool wrote the file.

``QuantizedModel`` is a view of the records of ``qdq_reader``: weights as ``QuantizedTensor``, biases, activation
quantizers, and a summary table. Functions are inlined, subgraphs are read, and parameters are checked. ``skipped``
lists the tensors and nodes that cannot be read, with the reasons.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray
from onnx import TensorProto, inliner

from detent import ops
from detent.errors import DetentError, FileFormatError, UnsupportedError
from detent.onnx_model.files import ModelSource, load_model
from detent.onnx_model.graph import describe
from detent.onnx_model.qdq_reader import (
    CodedInput,
    DynamicQuantizer,
    QuantizedGraph,
    QuantizeNode,
    Record,
    Unread,
    WeightCodes,
)
from detent.onnx_model.qdq_writer import QdqParams
from detent.tables import html_table, short_name, table_lines
from detent.tensor import QuantizedTensor

__all__ = ["ActivationQuantizer", "QuantizedBias", "QuantizedModel", "Summary", "SummaryRow", "load_quantized"]

Array = NDArray[Any]
FLOAT_NBYTES = 4


@dataclass(frozen=True, eq=False)
class QuantizedBias:
    """A bias as int32 codes, with one scale and zero point for all codes, or for each code along ``axis``."""

    codes: Array
    scale: Array
    zero_point: Array
    axis: int

    def dequantize(self) -> Array:
        """Return the dequantized values in float32."""
        shape = [1] * self.codes.ndim if self.scale.ndim else []
        if shape:
            shape[self.axis % self.codes.ndim] = -1
        # The difference wraps around as in int32 arithmetic.
        centered = (self.codes.astype(np.int64) - self.zero_point.reshape(shape)).astype(np.int32)
        values: Array = centered.astype(np.float32) * self.scale.reshape(shape)
        return values

    @property
    def nbytes(self) -> int:
        """Number of bytes of codes and scales."""
        return int(self.codes.nbytes + self.scale.nbytes)


@dataclass(frozen=True, eq=False)
class ActivationQuantizer:
    """A QuantizeLinear node, with one scale and zero point per tensor or per channel."""

    tensor: str
    output: str  # name of the codes
    scale: Array
    zero_point: Array
    type: str  # ONNX type of the codes
    axis: int  # axis of the channels


@dataclass(frozen=True, eq=False, repr=False)
class QuantizedModel:
    """The contents of a quantized model.

    Attributes:
        weights: maps the name of codes in the file to the quantized weight.
        biases: maps the name of codes in the file to the int32 bias.
        activations: QuantizeLinear nodes in graph order.
        readers: maps the name of codes (of a weight, bias or activation) to the nodes that read the tensor.
        skipped: maps the name of each tensor or node that cannot be read to the reason.
        nodes: maps each operator to its number of nodes.
        float_nbytes: bytes of float constants that are not quantization parameters.
        dynamic: DynamicQuantizeLinear nodes in graph order.

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
    dynamic: tuple[DynamicQuantizer, ...] = ()

    @classmethod
    def of(cls, graph: QuantizedGraph) -> "QuantizedModel":
        """Make a ``QuantizedModel`` from the records of ``graph``; only the first record of each constant counts."""
        view = _View()
        for record in graph.records:
            view.add(record)
        parts = view.weights, view.biases, tuple(view.activations), view.readers, view.skipped
        return cls(*parts, dict(graph.operators), graph.float_nbytes, tuple(view.dynamic))

    def __repr__(self) -> str:
        return f"<QuantizedModel {self.summary()._head()}>"

    def _repr_html_(self) -> str:
        return self.summary()._repr_html_()

    def summary(self) -> "Summary":
        """Return a table of all quantized tensors; ``str`` formats the table as text."""
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
        rows += [SummaryRow(each.x, "activation", "uint8 dynamic", None, 0, each.readers) for each in self.dynamic]
        return Summary(tuple(rows), dict(self.nodes), dict(self.skipped), self.float_nbytes)


def load_quantized(source: ModelSource) -> QuantizedModel:
    """Read a quantized model of any tool from a file or from memory; ``QuantizedModel`` has an example.

    Raises:
        FileFormatError, UnsupportedError: the model is invalid or not supported, see ``qo.load``.
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
    dynamic: list[DynamicQuantizer] = field(default_factory=list)

    def add(self, record: Record) -> None:
        if isinstance(record, Unread):
            self.skipped[describe(record.node)] = record.reason
        elif isinstance(record, CodedInput):
            self._add_activation(record.name, record.name, record)
        elif isinstance(record, WeightCodes):
            self._add_weight(record)
        elif isinstance(record, DynamicQuantizer):
            self.dynamic.append(record)
            self._add_readers(record.codes, record.readers)
        elif not record.is_constant:
            self._add_activation(record.x, record.codes, record)

    def _add_weight(self, weight: WeightCodes) -> None:
        name, qparams = weight.name, weight.qparams
        try:
            if weight.is_bias:
                _check_bias(weight)
                self.biases[name] = QuantizedBias(weight.codes, qparams.scale, qparams.zero_point, qparams.axis)
            else:
                tensor = _tensor(weight)
                if self.weights.setdefault(name, tensor) != tensor:
                    self.skipped[name] = "the file dequantizes it in two ways, and only the first way is read"
        except DetentError as error:
            self.skipped[describe(weight.node)] = str(error)
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
    params = _constant_params(weight).params(weight.codes.shape)
    if weight.form == "float":
        return ops.quantize(weight.codes, params)
    return QuantizedTensor(weight.codes, params)


def _check_bias(weight: WeightCodes) -> None:
    scales, shape = weight.qparams.scale.shape, weight.codes.shape
    if scales and scales != (shape[axis := weight.qparams.axis_in(len(shape))],):
        raise FileFormatError(
            f"got scales of shape {scales} for codes of shape {shape}, expected a scalar or shape ({shape[axis]},)"
        )


def _constant_params(weight: WeightCodes) -> QdqParams:
    """Return the parameters for the whole constant, even if the node reads only some rows or a reshaped copy."""
    qparams = weight.qparams
    if weight.direct or weight.form != "codes":
        return qparams
    is_per_column = weight.path == ("Gather",) and qparams.axis == -1  # so it does not matter which rows are read
    if "Cast" in weight.path or (qparams.scale.ndim and not is_per_column):
        raise UnsupportedError("its codes are moved or cast before they are dequantized")
    return replace(qparams, axis=len(weight.codes.shape) - 1)


@dataclass(frozen=True)
class SummaryRow:
    """One quantized tensor."""

    name: str
    kind: str  # weight, bias or activation
    type: str  # spec of a weight; type of the codes of a bias or activation
    shape: tuple[int, ...] | None  # None for activations
    nbytes: int  # bytes of codes, scales and zero points; 0 for activations
    readers: tuple[str, ...]  # nodes that read the tensor


@dataclass(frozen=True)
class Summary:
    """A table of all quantized tensors; ``str`` formats the table as text, and notebooks show it as HTML."""

    rows: tuple[SummaryRow, ...]
    nodes: Mapping[str, int]
    skipped: Mapping[str, str]
    float_nbytes: int

    def count(self, kind: str) -> int:
        """Count the rows of a kind, such as "weight"."""
        return sum(row.kind == kind for row in self.rows)

    def nbytes(self, kind: str) -> int:
        """Add up the bytes of the rows of a kind, such as "weight"."""
        return sum(row.nbytes for row in self.rows if row.kind == kind)

    def to_json(self) -> str:
        """Return the summary as a JSON object."""
        return json.dumps(asdict(self))

    def __str__(self) -> str:
        table = table_lines(self._cells(short_name), right=_NUMBERS) if self.rows else []
        return "\n".join([self._head(), self._operators(), *table, *self._not_read()])

    def _repr_html_(self) -> str:
        notes = [self._head(), self._operators(), *self._not_read()]
        return html_table(self._cells(str), right=_NUMBERS, notes=notes)

    def _head(self) -> str:
        floats = sum(FLOAT_NBYTES * prod(row.shape or ()) for row in self.rows if row.kind == "weight")
        weights, biases, activations = (self.count(kind) for kind in ("weight", "bias", "activation"))
        return (
            f"{weights} weight{'s' * (weights != 1)}, {self.nbytes('weight')} bytes ({floats} as float32); "
            f"{biases} bias{'es' * (biases != 1)}, {self.nbytes('bias')} bytes; "
            f"{activations} activation quantizer{'s' * (activations != 1)}; {self.float_nbytes} bytes of other floats"
        )

    def _operators(self) -> str:
        by_count = sorted(self.nodes.items(), key=lambda item: (-item[1], item[0]))
        return ", ".join(f"{count} {name}" for name, count in by_count)

    def _not_read(self) -> list[str]:
        return [f"not read: {name}: {reason}" for name, reason in self.skipped.items()]

    def _cells(self, shorten: Callable[[str], str]) -> list[tuple[str, ...]]:
        cells: list[tuple[str, ...]] = [("tensor", "kind", "type", "shape", "bytes", "read by")]
        for row in self.rows:
            shape = "" if row.shape is None else "x".join(map(str, row.shape)) or "1"
            nbytes = "" if row.kind == "activation" else str(row.nbytes)
            cells.append((shorten(row.name), row.kind, row.type, shape, nbytes, ", ".join(row.readers)))
        return cells


_NUMBERS = (4,)  # columns
