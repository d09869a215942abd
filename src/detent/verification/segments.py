"""Level 2: the source's operators, segment by segment between quantizers, beside the file as it is written.

::

    file           x -> Q -> DQ -> Conv(DQ(codes)) -> Relu -> Q -> DQ -> ...
                        |                                     |
                      codes                                 codes   compared
                        v                                     ^
    source     dequantized codes -> Conv(fake-quantized) -> Relu -> quantized by detent

The float model that decisions quantize (normal form, with factors) gets its weights and biases as detent quantizes and
dequantizes them. Wherever a quantizer stands, readers get the file's own codes, dequantized by detent. So an error
stays in its segment, and segments do not depend on each other: all of them are one model, whose outputs are what the
quantizers get. Both models run node by node, by the same kernels: their codes and outputs are equal to the bit.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from onnx import ModelProto, NodeProto, TensorProto, helper

from detent.checks import first_index
from detent.onnx.decisions import Decisions, QuantizerPlacement
from detent.onnx.quantized_graph import bias_codes, bias_scale, readers_of, stays_float
from detent.onnx_model.graph import Graph, node_name, reads
from detent.onnx_model.layers import layers_of
from detent.onnx_model.qdq_reader import QuantizedGraph, QuantizeNode
from detent.onnx_model.qdq_writer import QdqParams
from detent.onnx_model.sessions import PROBE_BUDGET, make_session, ort_errors
from detent.onnx_model.targets import Container
from detent.ops import dequantize, fake_quantize
from detent.params import QuantParams
from detent.verification.codes import compare_codes, shift_of
from detent.verification.tally import Tally
from detent.verification.verify_report import Segments, element

__all__ = ["SegmentCheck"]

Array = NDArray[Any]
FLOAT_NBYTES = 4
MAX_NODES_NAMED = 4


@dataclass(frozen=True)
class _Target:
    """A tensor that the file quantizes: its node, the parameters that were decided, what the file adds to codes."""

    tensor: str
    quantizer: QuantizeNode
    params: QuantParams
    shift: int
    fed: str  # the input that its readers get
    is_scaled: bool  # it has the codes of another tensor, and no quantizer of its own

    def dequantized(self, codes: Array) -> Array:
        if codes.dtype.kind == "f":  # codes of 4 bits come as floats
            return dequantize(codes.astype(np.int32) - self.shift, self.params)
        kind = self.quantizer.qparams.kind
        stored = QdqParams.of(self.params, Container(kind, self.shift), codes.ndim).params(codes.shape)
        return dequantize(codes, stored)


class SegmentCheck:
    """The segments of a source beside a file; the graph of the float model is changed."""

    checks_quantizers = True  # codes are those that detent makes, too: level 1 need not look again

    def __init__(
        self, float_graph: Graph, decisions: Decisions, artifact: QuantizedGraph, tally: Tally,
        budget: int = PROBE_BUDGET,
    ) -> None:  # fmt: skip
        self._artifact, self._tally, self._budget = artifact, tally, budget
        self._model, self._graph = float_graph.model, float_graph
        self._arrays: dict[str, Array] = {}  # weights and biases, by the names of inputs
        self._targets: dict[str, _Target] = {}
        self._by_tensor = self._quantizers()
        self._outputs = list(self._graph.outputs)
        self.differing_outputs: list[str] = []
        self.compared_outputs = 0
        params = decisions.tensor_params()
        self._replace_weights(decisions, params)
        source_of = {each.tensor: each.source_tensor for each in decisions.placements}
        for placement in decisions.placements:
            quantized = placement.tensor
            while source_of.get(quantized):  # a multiple, maybe of a multiple, has the codes of its source
                quantized = source_of[quantized]
            self._cut(placement, params[placement.tensor], self._by_tensor.get(quantized))
        self._graph.drop_unread()
        self._model = self._graph.finish()
        self._sessions: list[tuple[Any, list[str]]] | None = None

    def _quantizers(self) -> dict[str, QuantizeNode]:
        """The file's quantizers, by the tensor that its metadata name."""
        provenance = self._artifact.provenance
        names = {} if provenance is None else provenance.activations
        return {names[each.node]: each for each in self._artifact.quantize_nodes if each.node in names}

    def _input(self, stem: str, array: Array | None = None) -> str:
        """A new input of the model, for an array that does not change or for what each batch gives."""
        name = self._graph.fresh(stem)
        self._model.graph.input.append(helper.make_tensor_value_info(name, TensorProto.FLOAT, None))
        if array is not None:
            self._arrays[name] = np.ascontiguousarray(array, np.float32)
        return name

    def _replace_weights(self, decisions: Decisions, params: Mapping[str, QuantParams]) -> None:
        graph, layers = self._graph, {layer.name: layer for layer in layers_of(self._graph)}
        nodes = {node_name(node): node for node in graph.nodes}
        for line in decisions.layers:
            if not line.is_quantized:
                continue
            layer, node = layers[line.name], nodes[line.name]
            weight = fake_quantize(graph.array(layer.weight), line.weight_params)
            position = list(node.input).index(layer.weight)
            graph.set_input(node, position, self._input(f"{layer.weight}_quantized", weight))
            bias = graph.array(layer.bias) if layer.bias in graph.constants else None
            bias = bias if line.bias is None else line.bias
            if bias is None:
                continue
            incoming = params.get(layer.data) if line.input is not None else None
            scale = None if incoming is None else bias_scale(incoming, line.weight_params)
            if scale is not None and not stays_float(bias, scale):
                codes = bias if bias.dtype == np.int32 else bias_codes(bias, scale)
                rounded = codes.astype(np.float32) * scale
                graph.set_input(node, 2, self._input(f"{line.name}_bias_quantized", rounded))
            elif line.bias is not None:
                graph.set_input(node, 2, graph.add_constant(f"{line.name}_bias_corrected", bias))

    def _cut(self, placement: QuantizerPlacement, params: QuantParams, quantizer: QuantizeNode | None) -> None:
        """Let the readers of a tensor get an input in its place."""
        graph, tensor = self._graph, placement.tensor
        if quantizer is None:
            self._tally.count(0, 1)
            self._tally.note("its quantizer is not in the file", tensor, tensor, (), "QuantizeLinear", None)
            return
        if placement.source_tensor:
            before = self._targets.get(placement.source_tensor)
            producer = graph.producer(tensor)
            if before is not None and producer is not None:
                graph.redirect(placement.source_tensor, before.fed, [producer])
        fed = self._input(f"{tensor}_fed")
        graph.redirect(tensor, fed, readers_of(graph, placement))
        shift, is_scaled = shift_of(params, quantizer.qparams.kind), bool(placement.source_tensor)
        self._targets[tensor] = _Target(tensor, quantizer, params, shift, fed, is_scaled)

    def result(self) -> Segments:
        """What all batches have shown."""
        tally = self._tally
        counts = tally.compared, tally.differing, 0, self.compared_outputs, len(self.differing_outputs)
        return Segments("", *counts, "", tally.first)

    @property
    def readers(self) -> tuple[tuple[str, str], ...]:
        """The file's tensors of codes that a run needs, by node."""
        return tuple(dict.fromkeys((each.quantizer.node, each.quantizer.codes) for each in self._targets.values()))

    def run(self, feeds: Mapping[str, Array], codes: Mapping[str, Array], outputs: Sequence[Array]) -> None:
        """Run the segments on a batch, and compare them with the file's codes, by node, and with its outputs."""
        if self._sessions is None:
            self._sessions = list(self._grouped({name: array.size for name, array in codes.items()}))
        expected = dict(zip(self._outputs, outputs, strict=True))
        fed_of = {each.fed: each for each in self._targets.values()}
        for session, wanted in self._sessions:
            given: dict[str, Array] = {}
            for value in session.get_inputs():
                name = value.name
                target = fed_of.get(name)
                if target is not None:
                    given[name] = target.dequantized(codes[target.quantizer.node])
                else:
                    given[name] = self._arrays[name] if name in self._arrays else feeds[name]
            with ort_errors():
                values = dict(zip(wanted, session.run(wanted, given), strict=True))
            for name in wanted:
                if name in self._targets and not self._targets[name].is_scaled:
                    self._compare(self._targets[name], values[name], codes)
                if name in expected:
                    self._compare_output(name, values[name], expected[name])
        for name in self._targets.keys() & feeds.keys():  # inputs of the model
            self._compare(self._targets[name], feeds[name], codes)

    def _compare(self, target: _Target, x: Array, codes: Mapping[str, Array]) -> None:
        compare_codes(
            self._tally,
            target.quantizer,
            x,
            codes[target.quantizer.node],
            target.params,
            target.shift,
            lambda: f"not the code that the source gives ({self._segment(target.tensor)})",
        )

    def _segment(self, tensor: str) -> str:
        """The operators that make a tensor of the data before them, the last first."""
        names = [node_name(node) for node in self._before(tensor)]
        more = f" and {len(names) - MAX_NODES_NAMED} more" if len(names) > MAX_NODES_NAMED else ""
        return f"by {', '.join(names[:MAX_NODES_NAMED])}{more}" if names else "an input"

    def _before(self, tensor: str) -> Iterator[NodeProto]:
        graph, pending, seen = self._graph, [tensor], set[int]()
        while pending:
            node = graph.producer(pending.pop(0))
            if node is not None and id(node) not in seen:
                seen.add(id(node))
                yield node
                pending += list(reads(node))

    def _compare_output(self, name: str, ours: Array | list[Array], theirs: Array | list[Array]) -> None:
        self.compared_outputs += 1
        if isinstance(ours, list) or isinstance(theirs, list):  # a sequence
            before = len(self.differing_outputs)
            if len(ours) != len(theirs):
                self.differing_outputs.append(name)
                self._tally.note("a sequence of another length", f"output {name}", name, (), len(ours), len(theirs))
            for each, other in zip(ours, theirs, strict=False):
                if len(self.differing_outputs) == before:
                    self._compare_array(name, each, other)
        else:
            self._compare_array(name, ours, theirs)

    def _compare_array(self, name: str, ours: Array, theirs: Array) -> None:
        if ours.dtype == theirs.dtype and ours.shape == theirs.shape and _same_bits(ours, theirs):
            return
        self.differing_outputs.append(name)
        cause = f"not the output that the source gives ({self._segment(name)})"
        if ours.shape != theirs.shape or ours.dtype != theirs.dtype:
            expected, got = (f"{each.dtype}{list(each.shape)}" for each in (ours, theirs))
            self._tally.note(cause, f"output {name}", name, (), expected, got)
            return
        wrong = ours != theirs
        if ours.dtype.kind == "f":
            wrong = (wrong & ~(np.isnan(ours) & np.isnan(theirs))) | (np.signbit(ours) != np.signbit(theirs))
        index = first_index(np.atleast_1d(wrong))[: ours.ndim]
        self._tally.note(cause, f"output {name}", name, index, element(ours[index]), element(theirs[index]))

    def _grouped(self, sizes: Mapping[str, int]) -> Iterator[tuple[Any, list[str]]]:
        """Sessions for tensors that fit into memory together with what they are made of."""
        own = [name for name, each in self._targets.items() if not each.is_scaled]
        computed = [name for name in own if self._graph.producer(name) is not None]
        computed += [name for name in self._outputs if name not in own]
        size_of = {name: sizes[each.quantizer.node] for name, each in self._targets.items()}
        fed = {each.fed: name for name, each in self._targets.items()}
        total = 2 * FLOAT_NBYTES * sum(size_of.values())
        if total <= self._budget:
            groups = [computed] if computed else []
        else:
            groups, held = [[]], 0
            for name in computed:
                read = {each for node in self._before(name) for each in reads(node)} & fed.keys()
                nbytes = FLOAT_NBYTES * (size_of.get(name, 0) + sum(size_of[fed[each]] for each in read))
                if groups[-1] and held + nbytes > self._budget:
                    groups.append([])
                    held = 0
                groups[-1].append(name)
                held += nbytes
        for names in groups:
            yield make_session(self._part(names), optimize=False), names

    def _part(self, names: Sequence[str]) -> ModelProto:
        """The part of the model that makes some tensors."""
        chosen = {id(node) for name in names for node in self._before(name)}
        nodes = [node for node in self._graph.nodes if id(node) in chosen]
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
