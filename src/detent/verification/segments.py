"""Level 2: cuts the source at its quantizers, runs the segments, and compares their results with the file as written.

::

    file           x -> Q -> DQ -> Conv(DQ(codes)) -> Relu -> Q -> DQ -> ...
                        |                                     |
                      codes                                 codes   compared
                        v                                     ^
    source     dequantized codes -> Conv(fake-quantized) -> Relu -> quantized by detent

Here, the source is the float model after batch norm folding, equalization and SmoothQuant. detent fake-quantizes its
weights and biases. Nodes after a quantizer read the file's own codes, dequantized by detent. So an error stays in its
segment, and segments are independent. All segments form one model, whose outputs are the inputs of the quantizers. Both
models run node by node with the same kernels, so codes and outputs must be bit-exact.

A layer whose input is quantized dynamically is an integer matmul in the file. detent computes its output from the
file's codes, scale and zero point of the input, in exact arithmetic (``kernel_oracle``). Nodes after the layer read
this output. detent quantizes the input of the layer, too, and compares codes, scale and zero point.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray
from onnx import ModelProto, NodeProto, TensorProto, helper

from detent.checks import first_index
from detent.onnx.decisions import Decisions, LayerDecision, QuantizerPlacement
from detent.onnx.quantized_graph import bias_codes, bias_scale, own_nodes, readers_of, replace_layer, stays_float
from detent.onnx_model.graph import Graph, node_name, reads
from detent.onnx_model.layers import Layer, layers_of
from detent.onnx_model.qdq_reader import DynamicQuantizer, QuantizedGraph, QuantizeNode
from detent.onnx_model.qdq_writer import QdqParams, QdqWriter, stored_codes
from detent.onnx_model.sessions import PROBE_BUDGET, make_session, ort_errors
from detent.onnx_model.targets import Container, Target, get_target
from detent.ops import dequantize, fake_quantize, quantize
from detent.params import QuantParams
from detent.verification.codes import compare_codes, shift_of
from detent.verification.dynamic_quantizer import compare_dynamic
from detent.verification.kernel_oracle import dynamic_matmul
from detent.verification.tally import Tally
from detent.verification.verify_report import Segments, element

__all__ = ["SegmentCheck"]

Array = NDArray[Any]
FLOAT_NBYTES = 4
BYTE = 8  # bits
MAX_NODES_SHOWN = 4


@dataclass(frozen=True)
class _QuantizedTensor:
    """A tensor that the file quantizes.

    Attributes:
        tensor: name of the tensor in the float model.
        quantizer: QuantizeLinear node of the file that computes the tensor's codes.
        params: scale and zero point from the file's decisions.
        shift: offset that the file adds to codes.
        replacement: name of the model input that replaces the tensor.
        is_scaled: whether the tensor is a multiple of another tensor and shares that tensor's codes.
    """

    tensor: str
    quantizer: QuantizeNode
    params: QuantParams
    shift: int
    replacement: str
    is_scaled: bool

    def dequantized(self, codes: Array) -> Array:
        if codes.dtype.kind == "f":  # ONNX Runtime returns 4-bit codes as floats
            return dequantize(codes.astype(np.int32) - self.shift, self.params)
        kind = self.quantizer.qparams.kind
        stored = QdqParams.of(self.params, Container(kind, self.shift), codes.ndim).params(codes.shape)
        return dequantize(codes, stored)


@dataclass(frozen=True)
class _DynamicLayer:
    """A layer whose input the file quantizes dynamically.

    Attributes:
        quantizer: DynamicQuantizeLinear node of the file.
        weight: codes of the weight, computed from the source.
        params: parameters of the weight from the file's decisions.
        bias: float bias, or None.
    """

    quantizer: DynamicQuantizer
    weight: Array
    params: QuantParams
    bias: Array | None

    def output(self, codes: Mapping[str, Array]) -> Array:
        return dynamic_matmul(_outputs_of(self.quantizer, codes), self.weight, self.params, self.bias)


def _outputs_of(quantizer: DynamicQuantizer, codes: Mapping[str, Array]) -> tuple[Array, Array, Array]:
    return codes[quantizer.codes], codes[quantizer.scale], codes[quantizer.zero_point]


class SegmentCheck:
    """Comparison of the segments of an ONNX source with a file; ``float_graph`` is modified."""

    checks_quantizers = True  # codes are compared bit for bit here, so level 1 skips them

    def __init__(
        self, float_graph: Graph, decisions: Decisions, artifact: QuantizedGraph, tally: Tally,
        budget: int = PROBE_BUDGET,
    ) -> None:  # fmt: skip
        self._artifact, self._tally, self._budget = artifact, tally, budget
        self._model, self._graph = float_graph.model, float_graph
        self._arrays: dict[str, Array] = {}  # maps names of inputs to weights and biases
        self._tensors: dict[str, _QuantizedTensor] = {}
        self._quantized_outputs: set[str] = set()
        self._dynamic_inputs: dict[str, DynamicQuantizer] = {}  # by the name of the quantized tensor
        self._dynamic_layers: dict[str, _DynamicLayer] = {}  # by the name of the input that replaces the layer's output
        self._dynamic_outputs: dict[str, _DynamicLayer] = {}  # by the name of the model's output
        self._by_tensor = self._quantizers()
        self._outputs = list(self._graph.outputs)
        self.differing_outputs: list[str] = []
        self.compared_outputs = 0
        params = decisions.tensor_params()
        self._replace_weights(decisions, params)
        source_of = {each.tensor: each.source_tensor for each in decisions.placements}
        for placement in decisions.placements:
            quantized = placement.tensor
            # A multiple of a tensor shares the codes of that tensor, which may itself be a multiple.
            while source_of.get(quantized):
                quantized = source_of[quantized]
            self._cut(placement, params[placement.tensor], self._by_tensor.get(quantized))
        self._cut_dynamic(decisions)
        self._graph.drop_unread()
        self._model = self._graph.finish()
        self._sessions: list[tuple[Any, list[str]]] | None = None

    def _quantizers(self) -> dict[str, QuantizeNode]:
        """Map each quantized tensor of the source to the file's QuantizeLinear node, as recorded in its metadata."""
        provenance = self._artifact.provenance
        names = {} if provenance is None else provenance.activations
        return {names[each.node]: each for each in self._artifact.quantize_nodes if each.node in names}

    def _input(self, stem: str, array: Array | None = None) -> str:
        """Add an input to the model, and return its name.

        ``array`` is the value of the input for all batches, or None if the value depends on the batch.
        """
        name = self._graph.fresh(stem)
        shape = None if array is None else array.shape
        self._model.graph.input.append(helper.make_tensor_value_info(name, TensorProto.FLOAT, shape))
        if array is not None:
            self._arrays[name] = np.ascontiguousarray(array, np.float32)
        return name

    def _replace_weights(self, decisions: Decisions, params: Mapping[str, QuantParams]) -> None:
        graph, layers = self._graph, {layer.name: layer for layer in layers_of(self._graph)}
        for line in decisions.layers:
            if line.weight is None or line.dynamic_input is not None or line.own_range is not None:
                continue
            layer, node = layers[line.name], layers[line.name].node
            weight = fake_quantize(graph.array(layer.weight), line.weight_params)
            layer.set_weight(graph, self._input(f"{layer.weight}_quantized", weight))
            bias = graph.array(layer.bias) if layer.bias in graph.constants else None
            bias = bias if line.bias is None else line.bias
            if bias is None:
                continue
            incoming = params.get(layer.data) if line.input is not None else None
            scale = None if incoming is None else bias_scale(incoming, line.weight_params)
            if scale is not None and not stays_float(bias, scale):
                codes = bias if bias.dtype == np.int32 else bias_codes(bias, scale)
                quantized = codes.astype(np.float32) * scale
                graph.set_input(node, 2, self._input(f"{line.name}_bias_quantized", quantized))
            elif line.bias is not None:
                graph.set_input(node, 2, graph.add_constant(f"{line.name}_bias_corrected", bias))

    def _cut(self, placement: QuantizerPlacement, params: QuantParams, quantizer: QuantizeNode | None) -> None:
        """Add an input to the model, and let the nodes that read a quantized tensor read the input instead."""
        graph, tensor = self._graph, placement.tensor
        if quantizer is None:
            self._tally.count(0, 1)
            self._tally.note("missing quantizer", tensor, tensor, (), "QuantizeLinear", None)
            return
        if placement.source_tensor:
            source = self._tensors.get(placement.source_tensor)
            producer = graph.producer(tensor)
            if source is not None and producer is not None:
                graph.redirect(placement.source_tensor, source.replacement, [producer])
        replacement = self._input(f"{tensor}_fed")
        graph.redirect(tensor, replacement, readers_of(graph, placement))
        if tensor in graph.outputs and placement.is_read_by_all:
            self._quantized_outputs.add(tensor)
        shift, is_scaled = shift_of(params, quantizer.qparams.kind), bool(placement.source_tensor)
        self._tensors[tensor] = _QuantizedTensor(tensor, quantizer, params, shift, replacement, is_scaled)

    def _cut_dynamic(self, decisions: Decisions) -> None:
        """Replace the output of each layer with a dynamically quantized input by an input of the model."""
        graph, layers = self._graph, {layer.name: layer for layer in layers_of(self._graph)}
        provenance = self._artifact.provenance
        names = {} if provenance is None else provenance.activations
        quantizers = {names.get(each.node): each for each in self._artifact.dynamic_quantizers}
        for line in decisions.layers:
            if line.own_range is None and line.dynamic_input is None:
                continue
            layer = layers[line.name]
            if line.own_range is not None or layer.outer is not None:
                self._write_own(line, layer, get_target(decisions.target))
                continue
            quantizer, output = quantizers.get(layer.data), layer.node.output[0]
            if quantizer is None:
                self._tally.count(0, 1)
                self._tally.note("missing quantizer", layer.data, layer.data, (), "DynamicQuantizeLinear", None)
                continue
            bias = graph.array(layer.bias) if layer.bias in graph.constants else None
            codes = quantize(graph.array(layer.weight), line.weight_params).codes
            dynamic = _DynamicLayer(quantizer, codes, line.weight_params, bias if line.bias is None else line.bias)
            self._dynamic_inputs[layer.node.input[0]] = quantizer
            replacement = self._input(f"{output}_fed")
            self._dynamic_layers[replacement] = dynamic
            graph.redirect(output, replacement, graph.consumers(output))
            if output in graph.outputs:
                self._dynamic_outputs[output] = dynamic

    def _write_own(self, line: LayerDecision, layer: Layer, target: Target) -> None:
        """Quantize a layer in a subgraph as the file does, with codes that detent computes from the source's weight."""
        graph, writer, params = self._graph, QdqWriter(self._graph), line.weight_params
        qparams = QdqParams.of(params, target.weight_container(params.spec, min_bits=BYTE), len(layer.shape))
        codes = stored_codes(quantize(graph.array(layer.weight), params).codes, params, qparams)
        names = writer.codes(layer.weight, codes, qparams)
        replace_layer(graph, layer, own_nodes(writer, line, layer, target, names, qparams))

    def result(self) -> Segments:
        """Return the result over all batches."""
        tally = self._tally
        counts = tally.compared, tally.differing, 0, self.compared_outputs, len(self.differing_outputs)
        return Segments("", *counts, "", tally.first)

    @property
    def readers(self) -> tuple[tuple[str, str], ...]:
        """Return (node name, output name) of each QuantizeLinear node whose codes are an argument of ``run``."""
        return tuple(dict.fromkeys((each.quantizer.node, each.quantizer.codes) for each in self._tensors.values()))

    def run(self, feeds: Mapping[str, Array], codes: Mapping[str, Array], outputs: Sequence[Array]) -> None:
        """Run the segments on a batch; compare the results with the file's ``codes`` and ``outputs``."""
        if self._sessions is None:
            self._set_ranks(codes)
            self._sessions = list(self._grouped({name: array.size for name, array in codes.items()}))
        expected = dict(zip(self._outputs, outputs, strict=True))
        for session, names in self._sessions:
            inputs = self._inputs([value.name for value in session.get_inputs()], feeds, codes)
            with ort_errors():
                values = dict(zip(names, session.run(names, inputs), strict=True))
            for name in names:
                if name in self._tensors and not self._tensors[name].is_scaled:
                    self._compare(self._tensors[name], values[name], codes)
                if name in self._quantized_outputs:
                    tensor = self._tensors[name]
                    values[name] = tensor.dequantized(codes[tensor.quantizer.node])
                if name in self._dynamic_inputs:
                    self._compare_dynamic(name, values[name], codes)
                if name in expected:
                    self._compare_output(name, values[name], expected[name])
        for name in self._tensors.keys() & feeds.keys():  # inputs of the model
            self._compare(self._tensors[name], feeds[name], codes)
        for name in self._dynamic_inputs.keys() & feeds.keys():
            self._compare_dynamic(name, feeds[name], codes)
        for name, layer in self._dynamic_outputs.items():
            self._compare_output(name, layer.output(codes), expected[name])

    def _inputs(self, names: Sequence[str], feeds: Mapping[str, Array], codes: Mapping[str, Array]) -> dict[str, Array]:
        """Return the inputs of a session: dequantized codes, outputs of integer matmuls, weights, and the batch."""
        by_replacement = {each.replacement: each for each in self._tensors.values()}
        inputs: dict[str, Array] = {}
        for name in names:
            tensor = by_replacement.get(name)
            if tensor is not None:
                inputs[name] = tensor.dequantized(codes[tensor.quantizer.node])
            elif name in self._dynamic_layers:
                inputs[name] = self._dynamic_layers[name].output(codes)
            else:
                inputs[name] = self._arrays[name] if name in self._arrays else feeds[name]
        return inputs

    def _compare_dynamic(self, name: str, x: Array, codes: Mapping[str, Array]) -> None:
        quantizer = self._dynamic_inputs[name]
        cause = partial(self._wrong_code, name)
        compare_dynamic(self._tally, quantizer, x, _outputs_of(quantizer, codes), cause)

    def _compare(self, tensor: _QuantizedTensor, x: Array, codes: Mapping[str, Array]) -> None:
        compare_codes(
            self._tally,
            tensor.quantizer,
            x,
            codes[tensor.quantizer.node],
            tensor.params,
            tensor.shift,
            partial(self._wrong_code, tensor.tensor),
        )

    def _wrong_code(self, tensor: str) -> str:
        return f"wrong code in the segment {self._segment_text(tensor)}"

    def _segment_text(self, tensor: str) -> str:
        """List the nodes of the segment that computes a tensor, last node first."""
        names = [node_name(node) for node in self._segment_nodes(tensor)]
        more = f" and {len(names) - MAX_NODES_SHOWN} more" if len(names) > MAX_NODES_SHOWN else ""
        return f"({', '.join(names[:MAX_NODES_SHOWN])}{more})" if names else "(a model input)"

    def _segment_nodes(self, tensor: str) -> Iterator[NodeProto]:
        """Yield the nodes between a tensor and the quantizers before it."""
        graph, pending, seen = self._graph, [tensor], set[int]()
        while pending:
            node = graph.producer(pending.pop(0))
            if node is not None and id(node) not in seen:
                seen.add(id(node))
                yield node
                pending += list(reads(node))

    def _compare_output(self, name: str, expected: Array | list[Array], got: Array | list[Array]) -> None:
        self.compared_outputs += 1
        if isinstance(expected, list) or isinstance(got, list):  # a sequence of arrays
            count = len(self.differing_outputs)
            if len(expected) != len(got):
                self.differing_outputs.append(name)
                self._tally.note("wrong length of a sequence", f"output {name}", name, (), len(expected), len(got))
            for each, other in zip(expected, got, strict=False):
                if len(self.differing_outputs) == count:
                    self._compare_array(name, each, other)
        else:
            self._compare_array(name, expected, got)

    def _compare_array(self, name: str, expected: Array, got: Array) -> None:
        if expected.dtype == got.dtype and expected.shape == got.shape and _same_bits(expected, got):
            return
        self.differing_outputs.append(name)
        cause = f"wrong output of the segment {self._segment_text(name)}"
        if expected.shape != got.shape or expected.dtype != got.dtype:
            types = [f"{each.dtype}{list(each.shape)}" for each in (expected, got)]
            self._tally.note(cause, f"output {name}", name, (), types[0], types[1])
            return
        wrong = expected != got
        if expected.dtype.kind == "f":
            wrong = (wrong & ~(np.isnan(expected) & np.isnan(got))) | (np.signbit(expected) != np.signbit(got))
        index = first_index(np.atleast_1d(wrong))[: expected.ndim]
        self._tally.note(cause, f"output {name}", name, index, element(expected[index]), element(got[index]))

    def _set_ranks(self, codes: Mapping[str, Array]) -> None:
        """Set the rank of dequantized tensors; without it, ONNX infers wrong sizes from their shapes."""
        ranks = {each.replacement: codes[each.quantizer.node].ndim for each in self._tensors.values()}
        ranks |= {name: codes[layer.quantizer.codes].ndim for name, layer in self._dynamic_layers.items()}
        for value in self._model.graph.input:
            if value.name in ranks:
                shape = [None] * ranks[value.name]
                value.CopyFrom(helper.make_tensor_value_info(value.name, TensorProto.FLOAT, shape))

    def _grouped(self, sizes: Mapping[str, int]) -> Iterator[tuple[Any, list[str]]]:
        """Yield sessions, each with the names of the tensors that it computes.

        The tensors of one session and the inputs of their segments fit the memory budget.
        """
        quantized = [name for name, each in self._tensors.items() if not each.is_scaled]
        computed = [name for name in quantized if self._graph.producer(name) is not None]
        dynamic = [name for name in self._dynamic_inputs if self._graph.producer(name) is not None]
        computed = list(dict.fromkeys([*computed, *dynamic]))
        others = {*computed, *quantized, *self._dynamic_outputs}
        computed += [name for name in self._outputs if name not in others]
        size_of = {name: sizes[each.quantizer.node] for name, each in self._tensors.items()}
        size_of |= {name: sizes[each.codes] for name, each in self._dynamic_inputs.items()}
        replaced = {each.replacement: name for name, each in self._tensors.items()}
        total = 2 * FLOAT_NBYTES * sum(size_of.values())
        if total <= self._budget:
            groups = [computed] if computed else []
        else:
            groups, group_nbytes = [[]], 0
            for name in computed:
                read = {each for node in self._segment_nodes(name) for each in reads(node)} & replaced.keys()
                nbytes = FLOAT_NBYTES * (size_of.get(name, 0) + sum(size_of[replaced[each]] for each in read))
                if groups[-1] and group_nbytes + nbytes > self._budget:
                    groups.append([])
                    group_nbytes = 0
                groups[-1].append(name)
                group_nbytes += nbytes
        for names in groups:
            yield make_session(self._part(names), optimize=False), names

    def _part(self, names: Sequence[str]) -> ModelProto:
        """Return the part of the model that computes the named tensors."""
        needed = {id(node) for name in names for node in self._segment_nodes(name)}
        nodes = [node for node in self._graph.nodes if id(node) in needed]
        read = {name for node in nodes for name in reads(node)} | set(names)
        model, graph = self._model, self._model.graph
        values = [value for value in graph.input if value.name in read]
        outputs = [helper.make_empty_tensor_value_info(name) for name in names]
        tensors = [tensor for tensor in graph.initializer if tensor.name in read]
        part = helper.make_graph(nodes, "segments", values, outputs, tensors)
        return helper.make_model(part, opset_imports=model.opset_import, ir_version=model.ir_version)


def _same_bits(a: Array, b: Array) -> bool:
    if a.dtype == object:
        return bool(np.array_equal(a, b))
    if a.dtype.kind == "f" and np.array_equal(a, b, equal_nan=True):
        return bool(np.array_equal(np.signbit(a), np.signbit(b)))
    return bool(np.array_equal(a, b))
