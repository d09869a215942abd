"""Levels: one pass over the data, in which all levels that are asked for look at what they need.

::

    weights of the file                                         level 1
    each batch -> source                    outputs, codes      level 2
               -> ONNX Runtime, as written  inner tensors       levels 1, 2
               -> ONNX Runtime, optimised   inner tensors       levels 2, 3
               -> OpenVINO                  outputs             level 2

Fused: where the codes of a file's quantizers are in the graph that ONNX Runtime makes of it.

Many keep their name. Convolutions with their channels last give theirs under the name of the convolution, with their
axes in another order; they are found through the node they were: ``conv1``, now ``conv1_token_3``.
"""

import re
import sys
from collections.abc import Iterable, Mapping
from os import PathLike
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from onnx import ModelProto, NodeProto, TensorProto

from detent.errors import UnsupportedError
from detent.onnx_model import Graph, make_session, optimised
from detent.onnx_model.batches import inputs_of, open_batches
from detent.onnx_model.files import LoadedModel, ModelSource, load_model
from detent.onnx_model.graph import QUANTIZE, attribute_of, trace_back
from detent.onnx_model.qdq_reader import QuantizedGraph, is_quantized, open_quantized
from detent.onnx_model.sessions import Probe, Reading, refusals
from detent.tensor import QuantizedTensor
from detent.verification.codes import (
    ActivationCheck,
    Tally,
    check_biases,
    check_decoding,
    check_limit,
    compare_weight,
    decode_weights,
)
from detent.verification.digests import check_digests, check_origin
from detent.verification.kernel_oracle import ORACLES, KernelCheck, is_integer_kernel
from detent.verification.openvino import OpenVino, is_installed
from detent.verification.outputs import OutputCheck
from detent.verification.source import OnnxSource, Reference, Source
from detent.verification.verify_report import Difference, VerifyReport

__all__ = ["Found", "find_codes", "run_levels"]

_SUFFIX = re.compile(r"(_token_\d+|_nhwc)+$")
_FUSED = ("Relu", "Clip")


class Found(NamedTuple):
    """A tensor of codes in an optimised graph.

    Attributes:
        tensor: its name.
        channels_last: whether its channels are its last axis.

    >>> Found("conv1", channels_last=True).tensor
    'conv1'
    """

    tensor: str
    channels_last: bool


def find_codes(artifact: QuantizedGraph, optimised: ModelProto) -> dict[str, Found]:
    """The codes of QuantizeLinear nodes by node, as far as they are still there.

    >>> from onnx import parser
    >>> made = open_quantized(parser.parse_model('''<ir_version: 10, opset_import: ["" : 21]>
    ...     g (float[N] x) => (float[N] y) <float s = {0.5}, uint8 z = {3}>
    ...     { q = QuantizeLinear(x, s, z) y = DequantizeLinear(q, s, z) }'''))
    >>> find_codes(made, made.model)
    {'QuantizeLinear_q': Found(tensor='q', channels_last=False)}
    """
    written = {name for node in optimised.graph.node for name in node.output}
    last = {
        _SUFFIX.sub("", node.name): node.output[0]
        for node in optimised.graph.node
        if attribute_of(node, "channels_last", 0) and node.name
    }
    found = {}
    for site in artifact.quantize_nodes:
        if site.codes in written:
            found[site.node] = Found(site.codes, channels_last=False)
            continue
        origin = _origin(artifact.graph, site.x)
        if origin is not None and origin.name in last:
            found[site.node] = Found(last[origin.name], channels_last=True)
    return found


def _origin(graph: Graph, name: str) -> NodeProto | None:
    """The node whose result is quantized, past what is fused into it."""
    return graph.producer(trace_back(name, graph.producer, _FUSED))


Array = NDArray[Any]
ACCURACY = "session.qdq_matmulnbits_accuracy_level"


def run_levels(
    source: object, artifact: ModelSource, data: Iterable[Any] | str | PathLike[str], levels: tuple[int, ...]
) -> VerifyReport:
    """What ``verify`` does once its arguments are checked.

    >>> from onnx import parser
    >>> made = parser.parse_model('''<ir_version: 10, opset_import: ["" : 21]>
    ...     g (float[N] x) => (float[N] y) <float s = {0.5}, uint8 z = {3}>
    ...     { q = QuantizeLinear(x, s, z) y = DequantizeLinear(q, s, z) }''')
    >>> run_levels(made, made, [np.float32([0.5, 1.5])], (1, 2)).end_to_end["optimised"].compared_codes
    2
    """
    file = open_quantized(artifact)
    batches = open_batches(data, inputs_of(file.model))
    return _Verification(file, _as_source(source, file), levels).run(batches)


def _as_source(source: object, artifact: QuantizedGraph) -> Source:
    torch = sys.modules.get("torch")  # a module cannot be given before it is there
    if torch is not None and isinstance(source, torch.nn.Module):
        from detent.verification.torch_source import TorchSource  # noqa: PLC0415 - it loads PyTorch

        return TorchSource(source, artifact)
    if not isinstance(source, LoadedModel | ModelProto | str | PathLike):
        raise UnsupportedError(
            f"source is a prepared torch model, an ONNX model or its path, got {type(source).__name__}"
        )
    model = load_model(source)
    has_quantizers = is_quantized(model.proto, operators=(QUANTIZE,))  # a weight-only source counts as float
    return OnnxSource(open_quantized(model) if has_quantizers else model.proto, artifact)


class _Verification:
    """The state of one verification."""

    def __init__(self, artifact: QuantizedGraph, source: Source, levels: tuple[int, ...]) -> None:
        self.artifact, self.source, self.levels = artifact, source, levels
        self.tally = Tally()
        self.notes: dict[str, None] = dict.fromkeys(artifact.notes)
        self.checks: dict[str, OutputCheck] = {}
        self.kernels: KernelCheck | None = None
        self.activations = ActivationCheck(artifact, source, self.tally)
        self.reference = Reference([])
        self.seen: dict[str, Array] = {}
        self.kept: dict[str, Found] = {}
        self.outputs: list[Array] = []
        self.sessions: list[tuple[str, Any]] = []
        self.second: OpenVino | None = None
        self.missing: dict[str, QuantizedTensor] = {}
        self.weights_by = "source"

    def run(self, batches: Iterable[Mapping[str, Array]]) -> VerifyReport:
        if 1 in self.levels:
            self._weights()
            self._origin()
        count = 0
        try:
            with refusals():
                probes = self._probes()
                for count, feeds in enumerate(batches, 1):
                    self._batch(feeds, probes, first=count == 1)
        except UnsupportedError as error:
            if self.tally.first is None:
                raise
            self.notes[f"{error}; levels 2 and 3 need a file that runs"] = None
        finally:
            if self.second is not None:
                self.second.close()
        if 1 in self.levels and not self.tally.differing:  # else the source has told more of it
            check_digests(self.artifact, self.tally)
        return self._report(count)

    def _origin(self) -> None:
        """Of a float source no weight can be compared: ask the file which model its weights were made of."""
        if not isinstance(self.source, OnnxSource) or not self.source.is_float:
            return
        self.weights_by = check_origin(self.artifact, self.source.model, self.tally)
        if self.weights_by == "nothing":
            self.notes[
                "weights were not compared: the file does not say which model they were made of, as those of "
                "qo.quantize do"
            ] = None

    def _weights(self) -> None:
        state, names = self.source.weights(), self.source.names
        found: set[str] = set()
        biases: dict[str, Array] = {}
        scales: dict[str, Array] = {}
        for site in self.artifact.quantize_nodes:
            expected = self.source.expected(site)
            if expected is not None:
                scales[site.codes] = expected.params.scale
        for decoded in decode_weights(self.artifact):
            weight = decoded.weight
            name = names.get(weight.name, "")
            known = state.get(name)
            if known is not None:
                found.add(name)
                scales[weight.name] = known.params.scale
                if not compare_weight(self.artifact, weight, known, self.tally):
                    continue
                bias = self.source.bias(name)
                if bias is not None:
                    biases[weight.name] = bias
            elif self.source.knows_weights and not weight.is_bias:
                self.notes[f"{weight.name} is no weight of the source: only its decoding was checked"] = None
            check_decoding(decoded, self.tally, count=known is None and not weight.is_bias)
            check_limit(self.artifact, weight, self.tally)
        if self.artifact.provenance is not None:
            check_biases(self.artifact, self.tally, biases, scales)
        self.missing = {name: tensor for name, tensor in state.items() if name not in found}

    def _probes(self) -> list[Probe]:
        readings = []
        for site, reading in zip(self.artifact.quantize_nodes, self.activations.readings(), strict=True):
            if 1 in self.levels:
                readings.append(reading)
            if 2 in self.levels:
                readings.append(self._code_reading("unoptimised", site.node, Found(site.codes, channels_last=False)))
        probes = []
        if 2 in self.levels:
            causes = ["sums in another order", *self.source.causes]
            self.checks["unoptimised"] = OutputCheck(self.artifact.graph.outputs, causes)
            readings.append(self._output_reading("unoptimised"))
        if readings:
            probes.append(Probe(self.artifact.model, readings, kinds=self.artifact.kinds))
        if {2, 3} & set(self.levels):
            probes += self._optimised_probe()
        return probes

    def _optimised_probe(self) -> list[Probe]:
        model = optimised(self.artifact.model)
        readings: list[Reading] = []
        kinds: dict[str, int] = {}
        if 2 in self.levels:
            self._add_optimised_check(model)
            self.kept = find_codes(self.artifact, model)
            kinds = {
                self.kept[site.node].tensor: site.qparams.kind
                for site in self.artifact.quantize_nodes
                if site.node in self.kept
            }
            readings += [self._code_reading("optimised", node, found) for node, found in self.kept.items()]
            readings.append(self._output_reading("optimised"))
            if any(node.op_type == "MatMulNBits" for node in model.graph.node):
                self._add_accurate_session()
            if is_installed():
                self._add_openvino()
        if 3 in self.levels:
            self.kernels = KernelCheck(model)
            readings += self.kernels.readings()
        return [Probe(model, readings, kinds=kinds)]

    def _add_optimised_check(self, model: ModelProto) -> None:
        causes = ["sums in another order", *self.source.causes]
        kernels = sorted({node.op_type for node in model.graph.node if is_integer_kernel(node)})
        unknown = [name for name in kernels if name not in ORACLES]
        if kernels:
            causes.append("integer kernels, which round once")
        if unknown:
            causes.append(f"kernels with formulas of their own ({', '.join(unknown)})")
        own = {weight.name for weight in self.artifact.weights}
        rounded = [each.name for each in model.graph.initializer if each.data_type == TensorProto.INT32]
        rounded = [name for name in rounded if name.endswith("_bias_int32") and name not in own]
        if rounded:
            causes.append("float biases that ONNX Runtime rounds to int32")
            self.notes[
                f"ONNX Runtime rounds {len(rounded)} float biases to the unit of their products when it optimises, the "
                f"first is {rounded[0]!r}; disabled_optimizers=['WeightBiasQuantization'] keeps them"
            ] = None
        self.checks["optimised"] = OutputCheck(self.artifact.graph.outputs, causes)

    def _add_accurate_session(self) -> None:
        name = "accuracy_level_0"
        self.checks[name] = OutputCheck(self.artifact.graph.outputs)
        self.sessions.append((name, make_session(self.artifact.model, config={ACCURACY: "0"})))
        self.notes[
            f"products with float inputs run with 8-bit activations in ONNX Runtime, unless the session has {ACCURACY} "
            "set to 0 or 1; the file cannot carry it: compare 'optimised' with 'accuracy level 0'"
        ] = None

    def _add_openvino(self) -> None:
        try:
            self.second = OpenVino(self.artifact.model)
        except UnsupportedError as error:
            self.notes[str(error)] = None
            return
        self.checks["openvino"] = OutputCheck(
            self.artifact.graph.outputs, ["sums in another order", "multiplication where ONNX divides"]
        )

    def _code_reading(self, run: str, node: str, found: Found) -> Reading:
        def take(arrays: Mapping[str, Array]) -> None:
            codes = arrays[found.tensor]
            codes = np.moveaxis(codes, -1, 1) if found.channels_last else codes
            expected = self.reference.codes.get(node, self.seen.get(node))
            if expected is not None:
                self.checks[run].add_codes(node, expected, codes)
            elif run == "unoptimised" and node in self.kept:
                self.seen[node] = codes

        return Reading((found.tensor,), take)

    def _output_reading(self, run: str) -> Reading:
        names = tuple(self.artifact.graph.outputs)

        def take(arrays: Mapping[str, Array]) -> None:
            got = [arrays[name] for name in names]
            self.checks[run].add_outputs(self.reference.outputs, got)
            if run == "unoptimised":
                self.outputs = got

        return Reading(names, take)

    def _batch(self, feeds: Mapping[str, Array], probes: list[Probe], *, first: bool) -> None:
        self.seen = {}
        if 2 in self.levels or (first and 1 in self.levels and self.source.knows_weights):
            self.reference = self.source.run(feeds)
        for probe in probes:
            probe.run(feeds)
        for name, session in self.sessions:
            self.checks[name].add_outputs(self.reference.outputs, session.run(None, dict(feeds)))
        if self.second is not None:
            self._second(feeds)

    def _second(self, feeds: Mapping[str, Array]) -> None:
        try:
            got = self.second.run(feeds) if self.second is not None else []
        except UnsupportedError as error:
            self.notes[str(error)] = None
            self.second = None
            del self.checks["openvino"]
            return
        check = self.checks["openvino"]
        check.add_outputs(self.reference.outputs, got)
        for name, here, there in zip(self.artifact.graph.outputs, self.outputs, got, strict=True):
            scale = self._step(name)
            if scale is not None:
                check.add_codes(name, np.rint(here / scale), np.rint(there / scale))

    def _step(self, name: str) -> Array | None:
        """The distance of two numbers of an output that is dequantized."""
        node, graph = self.artifact.graph.producer(name), self.artifact.graph
        if node is None or node.op_type != "DequantizeLinear" or node.input[1] not in graph.constants:
            return None
        scale = graph.array(node.input[1])
        return scale.reshape(()) if scale.size == 1 else None

    def _report(self, batches: int) -> VerifyReport:
        if 1 in self.levels and batches:
            self._absent()
        self.notes.update(self.activations.notes if 1 in self.levels else {})
        self.notes.update(self.source.notes)
        for check in self.checks.values():
            self.notes.update(check.notes)
        kernels = self.kernels
        if kernels is not None:
            self.notes.update(kernels.notes)
            strange = [row.kernel for row in kernels.rows() if not row.compared]
            if strange:
                names = ", ".join(sorted(set(strange)))
                self.notes[f"level 3 did not compare {len(strange)} of {names}, whose formulas are not known here"] = (
                    None
                )
        return VerifyReport(
            self.levels,
            batches,
            self.tally.compared,
            self.tally.differing,
            self.tally.first,
            {name: check.result() for name, check in self.checks.items()},
            () if kernels is None else kernels.rows(),
            None if kernels is None else kernels.saturation(),
            tuple(self.notes),
            self.weights_by,
        )

    def _absent(self) -> None:
        """Count what the source has and the file has not."""
        for name, tensor in self.source.absent_weights(self.missing).items():
            self.tally.count(tensor.size, tensor.size)
            cause = "a quantized weight of the source is not in the file"
            self.tally.note(Difference(name, name, (), str(tensor.shape), None, None, None, None, cause))
        for name in self.source.absent_quantizers():
            self.tally.count(1, 1)
            cause = "a quantizer of the source is no node of the file"
            self.tally.note(Difference(name, name, (), None, None, None, None, None, cause))
