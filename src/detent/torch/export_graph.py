"""Exported graph: replace the marks of ``export_marks`` by codes, scales and Q/DQ nodes.

=========================================== ===========================================================================
mark                                        replaced by
=========================================== ===========================================================================
activation                                  [Clip ->] QuantizeLinear -> DequantizeLinear
weight                                      codes -> DequantizeLinear
weight that a kernel reads in bytes         4-bit codes -> Cast to 8 bits -> DequantizeLinear
weight of a Linear with float input         codes [in, out], as weight-only kernels need them -> DequantizeLinear
weight that Gather reads                    codes -> Gather -> DequantizeLinear, or codes -> Gather -> Cast -> Mul
bias of an 8-bit Conv or Gemm               int32 codes -> DequantizeLinear, with scale x_scale * weight_scale
=========================================== ===========================================================================

This module decides the Q/DQ placement, ``QdqWriter`` writes the nodes, and ``ort_workarounds`` prevents ONNX Runtime
from fusing float layers into integer kernels. ``clean`` removes data that only the exporter needs; ``finalize`` sets
versions and names that runtimes and readers expect.
"""

import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from onnx import GraphProto, ModelProto, NodeProto, TensorProto, inliner

from detent.errors import DetentError, SpecError, UnsupportedError
from detent.granularity import PerAxis, PerGroup, PerTensor
from detent.onnx_model import Graph, QdqParams, Target
from detent.onnx_model.graph import BITS, attribute_of, clear_notes, subgraphs
from detent.onnx_model.ort_workarounds import guard_float
from detent.onnx_model.qdq_writer import QdqWriter, gather, stored_codes
from detent.params import QuantParams
from detent.scale_mode import PerBatch
from detent.spec import QuantSpec, reads_bytes
from detent.torch.export_marks import DOMAIN, Marked
from detent.torch.quantizer import FakeQuantize

__all__ = ["Lowering", "clean", "finalize"]

MAX_IR_VERSION = 10  # files with a later IR version need newer runtimes
BATCH = "batch"  # name of axis 0 if its size varies
_TORCH_SYMBOL = re.compile(r"s\d+")  # torch's names for symbolic sizes that the user did not name


def clean(model: ModelProto) -> ModelProto:
    """Inline the functions of a model, and remove metadata and doc strings, which contain paths of source files."""
    if model.functions:
        model = inliner.inline_local_functions(model)
    del model.metadata_props[:]
    clear_notes(model.graph)
    for graph in _graphs(model.graph):
        for part in (graph, *graph.input, *graph.output, *graph.value_info):
            del part.metadata_props[:]
            part.ClearField("doc_string")
    return model


def _graphs(graph: GraphProto) -> Iterator[GraphProto]:
    yield graph
    for node in graph.node:
        for body in subgraphs(node):
            yield from _graphs(body)


def finalize(model: ModelProto, version: str) -> ModelProto:
    """Change a model in place: set versions, name axis 0, and remove the shapes of intermediate tensors."""
    graph = model.graph
    kept = [(entry.domain, entry.version) for entry in model.opset_import if entry.domain != DOMAIN]
    del model.opset_import[:], graph.value_info[:]
    for domain, number in kept:
        model.opset_import.add(domain=domain, version=number)
    model.ir_version = min(model.ir_version, MAX_IR_VERSION)
    model.producer_name, model.producer_version = "detent", version
    first_sizes = (size.dim_param for value in graph.input for size in value.type.tensor_type.shape.dim[:1])
    symbols = {size for size in first_sizes if _TORCH_SYMBOL.fullmatch(size)}
    if len(symbols) == 1:
        word = re.compile(rf"\b{re.escape(symbols.pop())}\b")
        for value in (*graph.input, *graph.output):
            for size in value.type.tensor_type.shape.dim:
                if size.dim_param:
                    size.dim_param = word.sub(BATCH, size.dim_param)
    return model


MAX_BIAS_CODE = 2**31 - 1
BYTE = 8  # bits
WIDE_OPSET = 21  # first opset with 4-bit and 16-bit codes, and with per-block scales
FLOAT8_OPSET = 19  # first opset with float8 codes


class Lowering:
    """Replacement of the export marks of a model in place; weights are stored in types of ``min_bits`` bits or more."""

    def __init__(self, model: ModelProto, marked: Marked, target: Target, *, min_bits: int) -> None:
        self.graph = Graph(model)
        self.marked = marked
        self.target = target
        self.min_bits = min_bits
        self.weights: dict[str, str] = {}  # name of the initializer with the codes -> full name of the weight
        self.activations: dict[str, str] = {}  # name of the QuantizeLinear node -> name of the quantizer
        self._writer = QdqWriter(self.graph, bounds=("lowest", "highest"), named_by_operator=True)
        self._new_nodes: list[NodeProto] = []
        self._removed: list[NodeProto] = []
        self._qparams: dict[str, QdqParams] = {}  # output name of a DequantizeLinear node -> its parameters

    def run(self) -> ModelProto:
        """Replace all marks and return the model."""
        graph = self.graph
        for node in graph.nodes:
            for body in subgraphs(node):
                _check_no_marks(body.node)
        marks = [node for node in graph.nodes if node.domain == DOMAIN]
        by_key: dict[str, list[NodeProto]] = defaultdict(list)
        for node in marks:
            key = attribute_of(node, "key").decode()
            if graph.kind(node.output[0]) not in {TensorProto.FLOAT, TensorProto.UNDEFINED}:
                raise UnsupportedError(
                    f"{key}: the model is not float32, but only float32 models can be exported: use model.float()"
                )
            if node.op_type == "Weight":
                by_key[key].append(node)
            else:
                self._activation(node, key)
        for key, nodes in by_key.items():
            self._weight(nodes, key)
        self._biases()
        graph.remove([*marks, *self._removed])
        graph.insert(self._new_nodes)
        for node in marks:
            self._rename(node.output[0], attribute_of(node, "key").decode().removesuffix("_quantizer"))
        guard_float(graph)
        graph.drop_unread()
        return graph.finish()

    def _rename(self, old: str, stem: str) -> None:
        graph = self.graph
        if graph.producer(old) is not None and old not in graph.outputs and old not in graph.captured:
            new = graph.fresh(f"{stem}_dq")
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
        self._new_nodes += pair.nodes
        self.activations[pair.nodes[-2].name] = key
        self._qparams[node.output[0]] = qparams

    def _activation_quantization(self, quantizer: FakeQuantize, key: str, rank: int) -> QdqParams:
        spec, convention = quantizer.spec, quantizer.spec.convention
        if isinstance(quantizer.mode, PerBatch):
            raise UnsupportedError(
                f"{key} has mode PerBatch, but ONNX's DynamicQuantizeLinear would compute different scales: use mode "
                "EMA, Fixed or Learned for activations, or quantize the float model's ONNX file by qo.quantize with "
                "recipe 'w8a8-dynamic'"
            )
        if not isinstance(spec.granularity, PerTensor | PerAxis):
            raise UnsupportedError(
                f"{key} has granularity {spec.granularity}, whose number of scales depends on the batch: use "
                "per-tensor or per-channel scales for activations"
            )
        if not spec.format.is_integer and self.target.runtime == "onnxruntime":
            raise UnsupportedError(
                f"{key}: ONNX Runtime cannot run {spec.format.name} activations: use an integer format, or keep the "
                "activation in float"
            )
        rules = (convention.division, str(spec.rounding), convention.zero_point)
        if spec.format.is_integer and rules != ("divide", "half_even", "after_round"):
            raise UnsupportedError(
                f"{key} has spec {spec} ({', '.join(rules)}), but QuantizeLinear divides, rounds half to even and then "
                "adds the zero point: train with the convention 'onnx'"
            )
        return self._quantization(key, quantizer.params, rank, of_weight=False)

    def _quantization(
        self,
        key: str,
        params: QuantParams,
        rank: int,
        *,
        of_weight: bool,
        depthwise: bool = False,
        min_bits: int = 4,
        as_bytes: bool = False,
    ) -> QdqParams:
        """Return the parameters in the file's layout; raise if the target or the opset does not support them."""
        target, format = self.target, params.spec.format
        try:
            if of_weight:
                container = target.weight_container(
                    params.spec, depthwise=depthwise, min_bits=min_bits, as_bytes=as_bytes
                )
            else:
                # Clip has no per-channel bounds, so per-channel codes must use the full range of their type
                min_bits = 4 if params.scale.ndim else BYTE
                container = target.activation_container(format, min_bits=min_bits)
            qparams = QdqParams.of(params, container, rank)
        except DetentError as error:
            raise UnsupportedError(f"{key}: {error}") from error
        wide = BITS[qparams.kind] != BYTE or qparams.block
        needed = WIDE_OPSET if wide else FLOAT8_OPSET if not format.is_integer else 0
        if self.graph.opset < needed:
            raise UnsupportedError(
                f"got opset={self.graph.opset}, but {key} has spec {params.spec}, which needs opset {needed}: pass "
                f"opset={needed}"
            )
        return qparams

    def _weight(self, marks: list[NodeProto], key: str) -> None:
        """Write the codes of a weight once, and replace all marks of this weight."""
        weight, graph = self.marked.weights[key], self.graph
        tensor, rank = weight.tensor, len(weight.tensor.shape)
        readers = [node for mark in marks for node in graph.consumers(mark.output[0])]
        gathers = [node for node in readers if node.op_type == "Gather" and attribute_of(node, "axis", 0) == 0]
        if isinstance(tensor.spec.granularity, PerGroup) and any(graph.shape(g.input[1]) is None for g in gathers):
            gathers = []  # the group axis comes after the axes of the indices, so the rank of the indices must be known
        is_transposed = not gathers and all(self._is_read_transposed(mark.output[0]) for mark in marks)
        signed = weight.depthwise or len(gathers) == len(readers)
        min_bits = BYTE if gathers else self.min_bits  # Gather does not support 4-bit types
        as_bytes = not is_transposed and any(self._reads_bytes(node, tensor.spec) for node in readers)
        qparams = self._quantization(
            key, tensor.params, rank, of_weight=True, depthwise=signed, min_bits=min_bits, as_bytes=as_bytes
        )
        if not (signed or is_transposed):
            self._check_limit(key, tensor.codes)
        codes = stored_codes(tensor.codes, tensor.params, qparams)
        if is_transposed:
            codes, qparams = codes.T, _transposed(qparams)
        names = self._writer.codes(key, codes, qparams)
        self.weights[names[0]] = key
        nodes, codes_read = self._writer.widened(names[0], key, qparams)
        self._new_nodes += nodes
        names = codes_read, *names[1:]
        for node in gathers:
            self._removed.append(node)
            self._new_nodes += gather(graph, node, names, qparams, tensor.shape, key)
        for out in (mark.output[0] for mark in marks):
            if out in graph.outputs or any(node not in gathers for node in graph.consumers(out)):
                self._new_nodes.append(self._writer.dequantized(names, out, key, qparams))
                self._qparams[out] = qparams
            if is_transposed:
                self._use_transposed(out)

    def _check_limit(self, key: str, codes: NDArray[Any]) -> None:
        limit = self.target.limit
        if limit is None or codes.dtype.kind not in "iu":
            return
        largest = int(np.abs(codes.astype(np.int64)).max(initial=0))
        if largest > limit:
            raise SpecError(
                f"{key} contains the code {largest}, but target {self.target.name!r} allows at most {limit}: prepare "
                f"the model with qmin=-{limit} and qmax={limit}, or choose another target"
            )

    def _is_read_transposed(self, name: str) -> bool:
        """Return whether all nodes that read a weight multiply float data by the transposed weight."""
        readers = self.graph.consumers(name)
        return bool(readers) and all(self._has_float_input(node, name) for node in readers)

    def _has_float_input(self, node: NodeProto, name: str) -> bool:
        if node.op_type == "Gemm":
            is_linear = (
                attribute_of(node, "transB", 0) and not attribute_of(node, "transA", 0) and not _has_alpha_or_beta(node)
            )
            return bool(is_linear) and node.input[1] == name and not self._is_marked(node.input[0])
        if node.op_type != "Transpose" or list(attribute_of(node, "perm", [])) != [1, 0]:
            return False
        out = node.output[0]
        readers = self.graph.consumers(out)
        are_matmuls = all(each.op_type == "MatMul" and list(each.input).index(out) == 1 for each in readers)
        return bool(readers) and are_matmuls and not any(self._is_marked(each.input[0]) for each in readers)

    def _reads_bytes(self, node: NodeProto, spec: QuantSpec) -> bool:
        """Return whether a node that reads a weight, directly or transposed, needs the weight's codes in bytes."""
        if node.op_type == "Transpose":
            return any(self._reads_bytes(each, spec) for each in self.graph.consumers(node.output[0]))
        x = self._qparams.get(node.input[0])
        return reads_bytes(node.op_type, spec, 0 if x is None else BITS[x.kind])

    def _is_marked(self, name: str) -> bool:
        node = self.graph.producer(name)
        return node is not None and node.domain == DOMAIN

    def _use_transposed(self, name: str) -> None:
        """Let the nodes that read a weight use its transposed codes."""
        for node in list(self.graph.consumers(name)):
            if node.op_type == "Gemm":
                next(each for each in node.attribute if each.name == "transB").i = 0
                continue
            self._removed.append(node)
            for reader in list(self.graph.consumers(node.output[0])):
                self.graph.set_input(reader, 1, name)

    def _biases(self) -> None:
        for node in self.graph.nodes:
            if node.op_type in {"Conv", "Gemm"} and len(node.input) == 3 and node.input[2] in self.graph.constants:
                x, weight = (self._qparams.get(name) for name in node.input[:2])
                if x is not None and weight is not None:
                    self._bias(node, x, weight)

    def _bias(self, node: NodeProto, x: QdqParams, weight: QdqParams) -> None:
        """Quantize the bias with scale x_scale * weight_scale.

        The bias stays float if integer kernels do not support the layer, or if a code of the bias exceeds int32.
        """
        is_int8 = BITS[x.kind] == BITS[weight.read_kind] == BYTE and x.format.is_integer and weight.format.is_integer
        if (
            not is_int8
            or x.scale.ndim
            or weight.block
            or (weight.scale.ndim and weight.axis)
            or _has_alpha_or_beta(node)
        ):
            return
        bias = self.graph.array(node.input[2])
        scale = np.asarray(x.scale * weight.scale, np.float32)
        if bias.ndim != 1 or bias.dtype != np.float32 or scale.min() < np.finfo(np.float32).smallest_normal:
            return
        codes = np.rint(bias.astype(np.float64) / scale)
        if not np.abs(codes).max(initial=0) <= MAX_BIAS_CODE:
            return
        mark = self.graph.producer(node.input[1])
        layer = "" if mark is None else attribute_of(mark, "key").decode().rpartition(".")[0]
        stem = f"{layer}.bias".lstrip(".")
        dequantize, dequantized = self._writer.bias(stem, codes, scale)
        self._new_nodes.append(dequantize)
        self.graph.set_input(node, 2, dequantized)


def _transposed(qparams: QdqParams) -> QdqParams:
    scale, zero = (part.T if qparams.block else part for part in (qparams.scale, qparams.zero_point))
    return replace(qparams, scale=scale, zero_point=zero, axis=1 - qparams.axis)


def _has_alpha_or_beta(node: NodeProto) -> bool:
    return any(attribute_of(node, name, 1.0) != 1.0 for name in ("alpha", "beta"))


def _check_no_marks(nodes: list[NodeProto]) -> None:
    for node in nodes:
        if node.domain == DOMAIN:
            key = attribute_of(node, "key").decode()
            raise UnsupportedError(
                f"{key} is used inside a loop or branch, where quantization cannot be exported: move the layer out of "
                "the loop or branch, or skip the layer in the recipe"
            )
        for body in subgraphs(node):
            _check_no_marks(body.node)
