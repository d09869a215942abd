"""Exported graphs: marks become codes, scales, QuantizeLinear and DequantizeLinear, and the exporter's traces go.

=========================================== =====================================================================
mark                                        what takes its place
=========================================== =====================================================================
an activation                               [Clip ->] QuantizeLinear -> DequantizeLinear
a weight                                    codes -> DequantizeLinear
a weight of Linear whose input stays float  the same, transposed: [in, out], as kernels for such weights want it
a weight that Gather reads                  codes -> Gather -> DequantizeLinear, or times the gathered scales
the bias of an 8-bit Conv or Gemm           int32 codes -> DequantizeLinear, with the scale of the products
=========================================== =====================================================================

What stands where is decided here, the nodes are ``QdqWriter``'s. Before, ``clean`` removes what only the exporter
needs; after, ``finalize`` sets what runtimes and readers expect.
"""

import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from onnx import GraphProto, ModelProto, NodeProto, TensorProto, ValueInfoProto, inliner

from detent.errors import DetentError, SpecError, UnsupportedError
from detent.granularity import PerAxis, PerGroup, PerTensor
from detent.onnx_model import Graph, QdqParams, Target
from detent.onnx_model.graph import BITS, attribute_of, subgraphs
from detent.onnx_model.qdq_writer import QdqWriter, gather, stored_codes
from detent.params import QuantParams
from detent.scale_mode import PerBatch
from detent.torch.export_marks import DOMAIN, Marked
from detent.torch.quantizer import FakeQuantize

__all__ = ["Lowering", "clean", "finalize"]

IR_VERSION = 10
BATCH = "batch"
_TORCHS_OWN = re.compile(r"s\d+")  # the name of a size that nobody has named


def clean(model: ModelProto) -> ModelProto:
    """The model without functions, and without notes, which hold paths of source files.

    >>> from onnx import parser
    >>> made = parser.parse_model(
    ...     '<ir_version: 10, opset_import: ["" : 21]> g (float[1] x) => (float[1] y) { y = Abs(x) }')
    >>> made.graph.node[0].doc_string = "line 3 of /home/me/model.py"
    >>> clean(made).graph.node[0].doc_string
    ''
    """
    if model.functions:
        model = inliner.inline_local_functions(model)
    del model.metadata_props[:]
    for graph in _graphs(model.graph):
        for part in (graph, *graph.node, *graph.input, *graph.output, *graph.value_info, *graph.initializer):
            del part.metadata_props[:]
            part.ClearField("doc_string")
    return model


def _graphs(graph: GraphProto) -> Iterator[GraphProto]:
    yield graph
    for node in graph.node:
        for body in subgraphs(node):
            yield from _graphs(body)


def finalize(model: ModelProto, version: str) -> ModelProto:
    """The model with versions that runtimes take, a name for axis 0, and no shapes of tensors that are gone.

    Args:
        model: is changed in place.
        version: detent's.

    >>> from onnx import parser
    >>> made = parser.parse_model('''<ir_version: 12, opset_import: ["" : 21, "detent" : 1]>
    ...     g (float[s77] x) => (float[s77] y) { y = Abs(x) }''')
    >>> finalize(made, "1.0").ir_version, len(made.opset_import), _sizes(made.graph.output[0])
    (10, 1, ['batch'])
    """
    graph = model.graph
    kept = [(entry.domain, entry.version) for entry in model.opset_import if entry.domain != DOMAIN]
    del model.opset_import[:], graph.value_info[:]
    for domain, number in kept:
        model.opset_import.add(domain=domain, version=number)
    model.ir_version = min(model.ir_version, IR_VERSION)
    model.producer_name, model.producer_version = "detent", version
    symbols = {size for value in graph.input for size in _sizes(value)[:1] if _TORCHS_OWN.fullmatch(size)}
    if len(symbols) == 1:
        word = re.compile(rf"\b{re.escape(symbols.pop())}\b")
        for value in (*graph.input, *graph.output):
            for size in value.type.tensor_type.shape.dim:
                if size.dim_param:
                    size.dim_param = word.sub(BATCH, size.dim_param)
    return model


def _sizes(value: ValueInfoProto) -> list[str]:
    """The names of the sizes that vary, "" for those that do not."""
    return [size.dim_param for size in value.type.tensor_type.shape.dim]


BIAS_LIMIT = 2**31 - 1
BYTE = 8
FIRST_WIDE = 21  # the operator set with codes of 4 and 16 bits, and with scales of blocks
FIRST_FLOAT8 = 19


class Lowering:
    """One pass over an exported model, which is changed in place.

    Attributes:
        weights: initializers of codes, and the weight that each of them holds.
        activations: QuantizeLinear nodes, and the quantizer that each of them is.

    >>> from onnx import parser
    >>> from detent.onnx_model import get_target
    >>> made = parser.parse_model('''<ir_version: 10, opset_import: ["" : 21]>
    ...     g (float[1] x) => (float[1] y) { y = Relu(x) }''')
    >>> lowering = Lowering(made, Marked(None, {}, {}), get_target("onnxruntime"), least=4)
    >>> lowering.run().graph.node[0].op_type, lowering.weights
    ('Relu', {})
    """

    def __init__(self, model: ModelProto, marked: Marked, target: Target, *, least: int) -> None:
        self.graph = Graph(model)
        self.marked = marked
        self.target = target
        self.least = least
        self.weights: dict[str, str] = {}
        self.activations: dict[str, str] = {}
        self._writer = QdqWriter(self.graph, bounds=("lowest", "highest"), named_by_operator=True)
        self._nodes: list[NodeProto] = []  # to be inserted
        self._gone: list[NodeProto] = []  # to be removed
        self._qparams: dict[str, QdqParams] = {}  # of the results of DequantizeLinear

    def run(self) -> ModelProto:
        """The model without marks."""
        graph = self.graph
        for node in graph.nodes:
            for body in subgraphs(node):
                _refuse_inner(body.node)
        marks = [node for node in graph.nodes if node.domain == DOMAIN]
        by_key: dict[str, list[NodeProto]] = defaultdict(list)
        for node in marks:
            key = attribute_of(node, "key").decode()
            if graph.kind(node.output[0]) not in {TensorProto.FLOAT, TensorProto.UNDEFINED}:
                raise UnsupportedError(f"{key}: only float32 models are exported: model.float() first")
            if node.op_type == "Weight":
                by_key[key].append(node)
            else:
                self._activation(node, key)
        for key, nodes in by_key.items():
            self._weight(nodes, key)
        self._biases()
        graph.remove([*marks, *self._gone])
        graph.insert(self._nodes)
        for node in marks:
            self._rename(node.output[0], attribute_of(node, "key").decode().removesuffix("_quantizer"))
        graph.drop_unread()
        return graph.finish()

    def _rename(self, old: str, stem: str) -> None:
        graph = self.graph
        if graph.producer(old) is not None and old not in graph.outputs and old not in graph.captured:
            new = graph.fresh(f"{stem}_dequantized")
            graph.redirect(old, new, graph.consumers(old))
            graph.rename(old, new)

    def _activation(self, node: NodeProto, key: str) -> None:
        rank = int(attribute_of(node, "rank"))
        qparams = self._activation_quantization(self.marked.activations[key], key, rank)
        stem = key.removesuffix("_quantizer")
        try:
            parameters = self._writer.parameters(stem, qparams)
            pair = self._writer.pair(node.input[0], stem, parameters, qparams, y=node.output[0])
        except UnsupportedError as error:
            raise UnsupportedError(f"{stem}: {error}") from error
        self._nodes += pair.nodes
        self.activations[pair.nodes[-2].name] = key
        self._qparams[node.output[0]] = qparams

    def _activation_quantization(self, quantizer: FakeQuantize, key: str, rank: int) -> QdqParams:
        spec, convention = quantizer.spec, quantizer.spec.convention
        if isinstance(quantizer.mode, PerBatch):
            raise UnsupportedError(
                f"{key} takes its scale from each batch, and ONNX's DynamicQuantizeLinear makes other scales than "
                "those it was trained with: use mode EMA, Fixed or Learned for activations"
            )
        if not isinstance(spec.granularity, PerTensor | PerAxis):
            raise UnsupportedError(
                f"{key} has scales per {spec.granularity}, which depend on the batch: use tensor or axis"
            )
        if not spec.format.is_integer and self.target.runtime == "onnxruntime":
            raise UnsupportedError(
                f"{key} has codes of {spec.format.name}, of which ONNX Runtime makes integer kernels that it then "
                "refuses: use integers for activations, or keep them float"
            )
        rules = (convention.division, str(spec.rounding), convention.zero_point)
        if spec.format.is_integer and rules != ("divide", "half_even", "after_round"):
            raise UnsupportedError(
                f"{key} quantizes by the rules of {spec} ({', '.join(rules)}), QuantizeLinear divides, rounds half "
                "to even and then adds the zero point: train with the convention 'onnx'"
            )
        return self._quantization(key, quantizer.params, rank, of_weight=False)

    def _quantization(
        self, key: str, params: QuantParams, rank: int, *, of_weight: bool, depthwise: bool = False, least: int = 4
    ) -> QdqParams:
        """How a file holds the parameters, if the operator set can."""
        target, format = self.target, params.spec.format
        try:
            if of_weight:
                container = target.weight_container(format, depthwise=depthwise, least=least)
            else:
                container = target.activation_container(format)
            qparams = QdqParams.of(params, container, rank)
        except DetentError as error:
            raise UnsupportedError(f"{key}: {error}") from error
        wide = BITS[qparams.kind] != BYTE or qparams.block
        needed = FIRST_WIDE if wide else FIRST_FLOAT8 if not format.is_integer else 0
        if self.graph.opset < needed:
            raise UnsupportedError(
                f"{key} is {params.spec}, which needs operator set {needed}, got opset={self.graph.opset}: export "
                f"with opset={needed}"
            )
        return qparams

    def _weight(self, marks: list[NodeProto], key: str) -> None:
        """The codes of a weight, once, and what each of its marks becomes."""
        weight, graph = self.marked.weights[key], self.graph
        readers = [node for mark in marks for node in graph.consumers(mark.output[0])]
        gathers = [node for node in readers if _gathers(node)]
        if isinstance(weight.tensor.spec.granularity, PerGroup) and any(
            graph.shape(g.input[1]) is None for g in gathers
        ):
            gathers = []  # groups become an axis, and how many there are before it is not known
        turned = not gathers and all(self._wants_transposed(mark.output[0]) for mark in marks)
        signed = weight.depthwise or len(gathers) == len(readers)
        least = BYTE if gathers else self.least  # ONNX gathers no codes of 4 bits
        tensor, rank = weight.tensor, len(weight.tensor.shape)
        qparams = self._quantization(key, tensor.params, rank, of_weight=True, depthwise=signed, least=least)
        if not (signed or turned):
            self._check_limit(key, tensor.codes)
        codes = stored_codes(tensor.codes, tensor.params, qparams)
        if turned:
            codes, qparams = codes.T, _transposed(qparams)
        names = self._writer.codes(key, codes, qparams)
        self.weights[names[0]] = key
        for node in gathers:
            self._gone.append(node)
            self._nodes += gather(graph, node, names, qparams, tensor.shape, key)
        for out in (mark.output[0] for mark in marks):
            if out in graph.outputs or any(node not in gathers for node in graph.consumers(out)):
                self._nodes.append(self._writer.dequantized(names, out, key, qparams))
                self._qparams[out] = qparams
            if turned:
                self._turn(out)

    def _check_limit(self, key: str, codes: NDArray[Any]) -> None:
        limit = self.target.limit
        if limit is None or codes.dtype.kind not in "iu":
            return
        largest = int(np.abs(codes.astype(np.int64)).max(initial=0))
        if largest > limit:
            raise SpecError(
                f"{key} holds the code {largest}, target {self.target.name!r} takes no more than {limit}: prepare the "
                f"model with qmin=-{limit} and qmax={limit}, or export for another target"
            )

    def _wants_transposed(self, name: str) -> bool:
        """Whether all that reads a weight multiplies float data by its transpose."""
        readers = self.graph.consumers(name)
        return bool(readers) and all(self._float_input(node, name) for node in readers)

    def _float_input(self, node: NodeProto, name: str) -> bool:
        if node.op_type == "Gemm":
            as_linear = attribute_of(node, "transB", 0) and not attribute_of(node, "transA", 0) and not _scales(node)
            return bool(as_linear) and node.input[1] == name and not self._is_marked(node.input[0])
        if node.op_type != "Transpose" or list(attribute_of(node, "perm", [])) != [1, 0]:
            return False
        out = node.output[0]
        readers = self.graph.consumers(out)
        products = all(each.op_type == "MatMul" and list(each.input).index(out) == 1 for each in readers)
        return bool(readers) and products and not any(self._is_marked(each.input[0]) for each in readers)

    def _is_marked(self, name: str) -> bool:
        node = self.graph.producer(name)
        return node is not None and node.domain == DOMAIN

    def _turn(self, name: str) -> None:
        """Let what reads a weight read it as it lies now."""
        for node in list(self.graph.consumers(name)):
            if node.op_type == "Gemm":
                next(each for each in node.attribute if each.name == "transB").i = 0
                continue
            self._gone.append(node)
            for reader in list(self.graph.consumers(node.output[0])):
                self.graph.set_input(reader, 1, name)

    def _biases(self) -> None:
        for node in self.graph.nodes:
            if node.op_type in {"Conv", "Gemm"} and len(node.input) == 3 and node.input[2] in self.graph.constants:
                x, weight = (self._qparams.get(name) for name in node.input[:2])
                if x is not None and weight is not None:
                    self._bias(node, x, weight)

    def _bias(self, node: NodeProto, x: QdqParams, weight: QdqParams) -> None:
        """The bias in the unit of the products; as it is where it does not fit, or where products stay float."""
        bytes_only = BITS[x.kind] == BITS[weight.kind] == BYTE and x.format.is_integer and weight.format.is_integer
        if not bytes_only or x.scale.ndim or weight.block or (weight.scale.ndim and weight.axis) or _scales(node):
            return
        bias = self.graph.array(node.input[2])
        scale = np.asarray(x.scale * weight.scale, np.float32)
        if bias.ndim != 1 or bias.dtype != np.float32 or scale.min() < np.finfo(np.float32).smallest_normal:
            return
        codes = np.rint(bias.astype(np.float64) / scale)
        if not np.abs(codes).max(initial=0) <= BIAS_LIMIT:
            return
        mark = self.graph.producer(node.input[1])
        layer = "" if mark is None else attribute_of(mark, "key").decode().rpartition(".")[0]
        stem = f"{layer}.bias".lstrip(".")
        dequantize, dequantized = self._writer.bias(stem, codes, scale)
        self._nodes.append(dequantize)
        self.graph.set_input(node, 2, dequantized)


def _transposed(qparams: QdqParams) -> QdqParams:
    scale, zero = (part.T if qparams.block else part for part in (qparams.scale, qparams.zero_point))
    return replace(qparams, scale=scale, zero_point=zero, axis=1 - qparams.axis)


def _scales(node: NodeProto) -> bool:
    return any(attribute_of(node, name, 1.0) != 1.0 for name in ("alpha", "beta"))


def _gathers(node: NodeProto) -> bool:
    """Whether a node that reads a weight picks rows of it; weights are no indices."""
    return node.op_type == "Gather" and attribute_of(node, "axis", 0) == 0


def _refuse_inner(nodes: list[NodeProto]) -> None:
    for node in nodes:
        if node.domain == DOMAIN:
            key = attribute_of(node, "key").decode()
            raise UnsupportedError(f"{key} is used inside a loop or a branch, where no quantizer is exported")
        for body in subgraphs(node):
            _refuse_inner(body.node)
