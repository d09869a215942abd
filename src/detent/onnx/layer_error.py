"""Layer error: how much a quantized layer is off, at its own output and at the outputs of the model.

A ``Probe`` computes one layer, alone, from its inputs on sample data. Accuracy passes that choose between ways to
quantize a layer compare its outputs; running the whole model for each would take hundreds of times longer. A part of
the data is enough: some rows of a matrix, some blocks of an image.

A ``SwitchableModel`` measures the noise of layers at the outputs of the model. One session serves all questions: its
graph holds every weight twice, as it is and as codes, and a switch before each quantizer. Noise of several layers about
adds up, so that groups of layers are measured first, and only those that cause much are measured one by one.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray
from onnx import ModelProto, NodeProto, TensorProto, helper

from detent.onnx.graph_plan import GraphPlan
from detent.onnx_model.graph import Graph, attribute_of, element_type
from detent.onnx_model.layers import Layer
from detent.onnx_model.qdq_writer import QdqParams, QdqWriter
from detent.onnx_model.sessions import make_session, record
from detent.onnx_model.targets import Container
from detent.ops import quantize
from detent.params import QuantParams

__all__ = ["Probe", "Probes", "SwitchableModel", "noise", "part_of", "recorded_inputs"]

Array = NDArray[Any]

Feed = dict[str, Array]
PART_ROWS = 512  # of a matrix that are compared
PART_POINTS, BLOCK_SIDE = 64 * 64, 8  # of an image that are compared, and the side of the blocks they are taken in
SEARCH_SAMPLES = 1  # batches on which layers are searched; whether it helps to keep them in float is compared on all


class Probe:
    """A layer of its own.

    >>> from onnx import parser
    >>> from detent.onnx_model.layers import layers_of
    >>> from detent.onnx_model import Graph
    >>> layer = next(layers_of(Graph(parser.parse_model('''<ir_version: 8, opset_import: ["" : 17]>
    ...     g (float[1,1] x) => (float[1,1] y) <float[1,1] w = {3.0}> { y = MatMul(x, w) }'''))))
    >>> Probe(layer).run(np.float32([[2.0]]), np.float32([[3.0]]))
    array([[6.]], dtype=float32)
    """

    def __init__(self, layer: Layer) -> None:
        self.layer = layer
        self._session: ort.InferenceSession | None = None

    def run(self, x: Array, weight: Array) -> Array:
        """The result without a bias."""
        kind = self.layer.node.op_type
        if kind in {"MatMul", "Gemm"}:
            matrix = weight.T if attribute_of(self.layer.node, "transB", 0) else weight
            return x.reshape(-1, x.shape[-1]) @ matrix
        if self._session is None:
            self._session = make_session(_alone(self.layer.node), threads=1)  # pools of many sessions would spin
        result: Array = self._session.run(None, {"x": x, "w": weight})[0]
        return result


class Probes:
    """One probe per layer, made when it is first asked for: a session for a convolution takes longer than its runs."""

    def __init__(self) -> None:
        self._by_name: dict[str, Probe] = {}

    def __getitem__(self, layer: Layer) -> Probe:
        return self._by_name.setdefault(layer.name, Probe(layer))


def part_of(layer: Layer, x: Array) -> Array:
    """As much of a layer's input as tells how well it is quantized: rows of a matrix, blocks of an image, all spread.

    >>> from onnx import helper
    >>> part_of(Layer(helper.make_node("MatMul", ["x", "w"], ["y"]), "fc", ()), np.zeros((4, 1000, 3))).shape
    (512, 3)
    >>> conv = Layer(helper.make_node("Conv", ["x", "w"], ["y"]), "conv", (), shape=(8, 3, 3, 3))
    >>> part_of(conv, np.zeros((1, 3, 50, 500))).shape
    (1, 3, 50, 88)
    """
    if layer.node.op_type in {"MatMul", "Gemm"}:
        flat = x.reshape(-1, x.shape[-1])
        return flat[:: max(1, len(flat) // PART_ROWS)][:PART_ROWS]
    sizes = layer.shape[2:]
    gaps = attribute_of(layer.node, "dilations", [1] * len(sizes))
    left = PART_POINTS
    for number, axis in enumerate(sorted(range(2, x.ndim), key=lambda axis: x.shape[axis])):
        fair = int(left ** (1 / (x.ndim - 2 - number)) + 1e-9)
        whole = 2 * (sizes[axis - 2] - 1) * gaps[axis - 2] + 2  # wider than what one result is made of
        side = max(fair, whole)
        if x.shape[axis] > side:
            x = x.take(_blocks(x.shape[axis], side), axis)
        left = max(1, left // x.shape[axis])
    return x


def _blocks(length: int, side: int) -> NDArray[np.intp]:
    """Indices of blocks of neighbours, evenly spread, as many as a side takes."""
    count = -(-side // BLOCK_SIDE)
    starts = np.linspace(0, length - BLOCK_SIDE, count).astype(np.intp)
    return (starts[:, None] + np.arange(BLOCK_SIDE)).ravel()


def _alone(node: NodeProto) -> ModelProto:
    """A model of one convolution, with its weight as an input."""
    copy = NodeProto()
    copy.CopyFrom(node)
    del copy.input[:], copy.output[:]
    copy.input.extend(["x", "w"])
    copy.output.append("y")
    inputs = [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in ("x", "w")]
    outputs = [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)]
    graph = helper.make_graph([copy], "layer", inputs, outputs)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8)


def noise(reference: Array, result: Array) -> float:
    """The power of a difference.

    >>> noise(np.ones(2), np.zeros(2))
    2.0
    """
    difference = (result - reference).ravel()
    return float(difference @ difference)


def recorded_inputs(plan: GraphPlan, names: Iterable[str], samples: Iterable[Feed]) -> Iterator[Mapping[str, Array]]:
    """A part of the data that come to some layers, sample after sample, by the layers' names.

    Each caller records the tensors that it needs, and no others: which tensors are outputs decides what ONNX Runtime
    fuses, and so the last bits of their values.

    >>> import detent.onnx as qo
    >>> from onnx import parser
    >>> made = qo.plan(parser.parse_model('''<ir_version: 8, opset_import: ["" : 17]>
    ...     g (float[1,1] x) => (float[1,1] y) <float[1,1] w = {3.0}> { [fc] y = MatMul(x, w) }'''))
    >>> next(recorded_inputs(made, ["fc"], [{"x": np.float32([[2.0]])}]))
    {'fc': array([[2.]], dtype=float32)}
    """
    inputs = {name: plan.layers_by_name[name].data for name in names}
    for tensors in record(plan.model, inputs.values(), samples):
        yield {name: part_of(plan.layers_by_name[name], tensors[tensor]) for name, tensor in inputs.items()}


class SwitchableModel:
    """A model whose layers can be quantized one by one.

    Args:
        plan: what is quantized.
        params: of activations, by tensor.
        samples: the batches on which noise is measured.

    >>> import detent.onnx as qo
    >>> from onnx import parser
    >>> made = qo.plan(parser.parse_model('''<ir_version: 8, opset_import: ["" : 17]>
    ...     g (float[1,2] x) => (float[1,1] y) <float[2,1] w = {127.0, 0.6}> { [fc] y = Gemm(x, w) }'''), "w4a8")
    >>> switches = SwitchableModel(made, {}, [{"x": np.float32([[2.0, 2.0]])}])
    >>> switches.noise([]), switches.noise(["fc"]) > 0, switches.all_noise() == switches.noise(["fc"])
    (0.0, True, True)
    >>> list(switches.worst(0.25))
    ['fc']
    """

    def __init__(self, plan: GraphPlan, params: Mapping[str, QuantParams], samples: Sequence[Feed]) -> None:
        self.layers = [line.name for line in plan.quantized]
        self._of_layer: dict[str, list[str]] = {name: [f"{name}//weight"] for name in self.layers}
        self._flags = [f"{name}//weight" for name in self.layers]
        self._session = make_session(self._build(plan, params))
        self._samples = samples
        self._names = [name for name in Graph(plan.model).outputs if plan.graph.kind(name) in {0, TensorProto.FLOAT}]
        self._references = [self._run(feed, ()) for feed in samples]
        self._ratios: dict[tuple[frozenset[str], int], list[float]] = {}

    def _build(self, plan: GraphPlan, params: Mapping[str, QuantParams]) -> ModelProto:
        model = ModelProto()
        model.CopyFrom(plan.model)
        graph = Graph(model)
        by_name = {graph.node_name(node): node for node in graph.nodes}
        for line in plan.quantized:
            layer, node = plan.layers_by_name[line.name], by_name[line.name]
            if line.weight is None:
                continue
            place = 0 if layer.node.op_type == "Gather" else 1
            rounding, rounded = _rounding(graph, layer.weight, plan.weight_params(line))
            switch, chosen = QdqWriter(graph).switch(f"{line.name}//weight", [rounding], rounded, layer.weight)
            graph.insert([switch])
            graph.set_input(node, place, chosen)
        for tensor, each in params.items():
            self._quantize(plan, graph, tensor, each)
        for flag in self._flags:
            model.graph.input.append(helper.make_tensor_value_info(flag, TensorProto.BOOL, []))
        return graph.finish()

    def _quantize(self, plan: GraphPlan, graph: Graph, tensor: str, params: QuantParams) -> None:
        """Put a quantizer with a switch behind a tensor; it belongs to the layers that read or make it."""
        flag = f"{tensor}//input"
        owners = [name for name in self.layers if plan.layers_by_name[name].data == tensor]
        owners = owners or [name for name in self.layers if _makes(plan, name, tensor)]
        for name in owners:
            self._of_layer[name].append(flag)
        self._flags.append(flag)
        qparams = QdqParams.of(params, plan.target.activation_container(params.spec.format, least=8), 0)
        writer, readers = QdqWriter(graph), list(graph.consumers(tensor))
        # Without the Clip that the file has: below 8 bits, layers are compared without saturation.
        pair = writer.pair(tensor, tensor, writer.parameters(tensor, qparams), qparams, clip=False)
        switch, chosen = writer.switch(flag, pair.nodes, pair.dequantized, tensor)
        graph.redirect(tensor, chosen, readers)
        graph.insert([switch])

    def _run(self, feed: Feed, flags: Iterable[str]) -> list[Array]:
        on = set(flags)
        switches = {flag: np.array(flag in on) for flag in self._flags}
        outputs: list[Array] = self._session.run(self._names, {**feed, **switches})
        return outputs

    def noise(self, layers: Iterable[str], samples: int | None = None) -> float:
        """The noise at the outputs, relative to their power, when these layers are quantized and no others."""
        return self._noise([flag for name in layers for flag in self._of_layer[name]], samples)

    @property
    def count(self) -> int:
        """How many outputs are compared in all."""
        return len(self._names) * len(self._samples)

    def all_noise(self, but: Iterable[str] = ()) -> float:
        """The noise at the outputs with every layer quantized except ``but``."""
        off = {flag for name in but for flag in self._of_layer[name]}
        return self._noise(flag for flag in self._flags if flag not in off)

    def _noise(self, flags: Iterable[str], samples: int | None = None) -> float:
        on, total = frozenset(flags), 0.0
        for i in range(len(self._samples))[:samples]:
            if (on, i) not in self._ratios:
                self._ratios[on, i] = list(self._sample_noise(on, i))
            for ratio in self._ratios[on, i]:
                total += ratio
        return total

    def _sample_noise(self, flags: frozenset[str], sample: int) -> Iterator[float]:
        """The noise at each float output, relative to its power."""
        for old, new in zip(self._references[sample], self._run(self._samples[sample], flags), strict=True):
            if old.dtype == np.float32:
                yield noise(old, new) / max(noise(old, np.zeros_like(old)), 1e-30)

    def worst(self, share: float) -> dict[str, float]:
        """Layers that alone cause at least that share of all noise, with their shares; on the first sample only."""
        total = self._noise(self._flags, SEARCH_SAMPLES)
        shares: dict[str, float] = {}

        def ask(names: list[str]) -> None:
            caused = self.noise(names, SEARCH_SAMPLES) / max(total, 1e-30)
            if caused < share or not names:
                return
            if len(names) == 1:
                shares[names[0]] = caused
                return
            half = len(names) // 2
            ask(names[:half])
            ask(names[half:])

        ask(self.layers)
        return shares


def _rounding(graph: Graph, name: str, params: QuantParams) -> tuple[NodeProto, str]:
    """A node that makes the rounded weight of its codes, which take a quarter of its memory; and its result."""
    writer, weight, result = QdqWriter(graph), graph.array(name), graph.fresh(f"{name}_rounded")
    qparams = QdqParams.of(params, Container(element_type(params.spec.format, 8)), weight.ndim)
    names = writer.codes(name, quantize(weight, params).codes, qparams)
    return writer.dequantized(names, result, name, qparams), result


def _makes(plan: GraphPlan, name: str, tensor: str) -> bool:
    """Whether a tensor is a layer's result, or what a Relu or Clip makes of it."""
    result = plan.layers_by_name[name].node.output[0]
    producer = plan.graph.producer(tensor)
    return tensor == result or (
        producer is not None and producer.op_type in {"Relu", "Clip"} and producer.input[0] == result
    )
