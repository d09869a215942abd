r"""Equalizing: channels of an activation made equally large, between the convolutions that make and read it.

.. math:: \operatorname{relu}(W_1 x) = \operatorname{diag}(s) \operatorname{relu}(\operatorname{diag}(s)^{-1} W_1 x)

(Nagel et al. 2019; Meller et al. 2019). One scale for a tensor serves its largest channels and starves the others. The
factors go into the rows of the weight before it and the columns of those behind it. Rows have a scale each, so that
nothing is lost there, and so have the channels of a depthwise convolution; columns of dense weights share a scale, and
the strength is the one under which the layers' own outputs are closest to float.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from onnx import ModelProto, NodeProto

from detent.granularity import PerAxis
from detent.onnx.graph_plan import GraphPlan, LayerPlan, weight_params
from detent.onnx.layer_error import Probe, noise, part_of
from detent.onnx_model.graph import Graph, attribute_of
from detent.onnx_model.layers import Layer
from detent.onnx_model.sessions import record
from detent.ops import fake_quantize
from detent.params import QuantParams

__all__ = ["Equalization", "equalize"]

Array = NDArray[Any]

Feed = dict[str, Array]
STRENGTHS = (0.25, 0.5, 0.75, 1.0)
WIDEST = 1e3  # how far the factors of a tensor may lie apart
ENOUGH = 0.9  # the part of the noise that may be left
SAMPLES = 2
ENOUGH_VALUES = 256  # of a channel, below which its largest says little about others to come
HOMOGENEOUS = ("Relu", "LeakyRelu", "PRelu")


@dataclass(frozen=True)
class Equalization:
    """What was done to a tensor.

    Attributes:
        tensor: between the layers.
        layers: the one that makes it, then those that read it.
        strength: of the factors, 1 where all channels are equally large afterwards.
        gain_db: how much less noise the outputs of the reading layers have.

    >>> str(Equalization("x", ("a", "b"), 1.0, 6.0))
    'equalized x (a, b) with strength 1: 6.0 dB less noise'
    """

    tensor: str
    layers: tuple[str, ...]
    strength: float
    gain_db: float

    def __str__(self) -> str:
        layers = ", ".join(self.layers)
        return f"equalized {self.tensor} ({layers}) with strength {self.strength:g}: {self.gain_db:.1f} dB less noise"


@dataclass(frozen=True)
class _Between:
    """A tensor between convolutions."""

    tensor: str
    maker: NodeProto
    readers: tuple[LayerPlan, ...]


class _Channels:
    """The ends of a tensor's channels in all samples, and the parts of them that each of its readers is judged on."""

    def __init__(self) -> None:
        self.low, self.high = np.float32(0), np.float32(0)
        self.count = 0  # of values in a channel
        self.parts: list[list[Array]] = []

    def see(self, x: Array, readers: list[Layer]) -> None:
        axes = tuple(axis for axis in range(x.ndim) if axis != 1)
        self.low, self.high = np.minimum(self.low, x.min(axis=axes)), np.maximum(self.high, x.max(axis=axes))
        self.count += x.size // x.shape[1]
        self.parts.append([part_of(layer, x) for layer in readers])


def equalize(plan: GraphPlan, samples: Sequence[Feed]) -> tuple[ModelProto, list[Equalization]]:
    """The plan's model with equalized activations, and what was done.

    Args:
        plan: whose layers are equalized where input and weight are quantized; its model is not changed.
        samples: batches to judge on.

    >>> import detent.onnx as qo
    >>> from onnx import parser
    >>> made = qo.plan(parser.parse_model('''<ir_version: 8, opset_import: ["" : 17]>
    ...     g (float[1,2,N] x) => (float[1,2,N] y)
    ...     <float[2,2,1] v = {9.0, 0.0, 0.0, 0.01}, float[2,1,1] w = {1.0, 1.0}> {
    ...       [a] t = Conv(x, v) [b] y = Conv<group = 2>(t, w) }'''))
    >>> model, done = equalize(made, [{"x": np.linspace(0, 1, 1000, dtype=np.float32).reshape(1, 2, 500)}])
    >>> [each.layers for each in done]
    [('a', 'b')]
    """
    between = list(_find(plan))
    if not between or not samples:
        return plan.model, []
    model = ModelProto()
    model.CopyFrom(plan.model)
    graph, done = Graph(model), []
    by_name = {graph.node_name(node): node for node in graph.nodes}
    used = samples[:SAMPLES]
    seen = {each.tensor: _Channels() for each in between}
    for found in record(plan.model, seen, used):
        for each in between:
            if found[each.tensor].size:
                seen[each.tensor].see(found[each.tensor], [plan.found[line.name] for line in each.readers])
    for each in between:
        if seen[each.tensor].count < ENOUGH_VALUES:
            continue
        # Weights may have been changed by the tensor before.
        weights = [graph.array(by_name[line.name].input[1]) for line in each.readers]
        chosen = _choose(plan, each, seen[each.tensor], weights)
        if chosen is None:
            continue
        strength, factors, ratio = chosen
        _apply(graph, by_name, each, factors)
        names = (graph.node_name(each.maker), *(line.name for line in each.readers))
        done.append(Equalization(each.tensor, names, strength, float(-10 * np.log10(max(ratio, 1e-12)))))
    graph.drop_unread()
    return graph.finish(), done


def _find(plan: GraphPlan) -> list[_Between]:
    graph = plan.graph
    lines = {line.name: line for line in plan.quantized if line.type == "Conv" and line.input is not None}
    found = []
    for node in graph.nodes:
        if node.op_type != "Conv" or node.input[1] not in graph.constants:
            continue
        if len(node.input) > 2 and node.input[2] and node.input[2] not in graph.constants:
            continue
        tensor = _result(graph, node)
        readers = [lines.get(graph.node_name(each)) for each in graph.consumers(tensor)]
        whole = tensor not in graph.outputs and tensor not in graph.captured
        shared = [graph.consumers(each) for each in (node.input[1], *(plan.found[r.name].weight for r in readers if r))]
        if whole and readers and all(r is not None for r in readers) and all(len(users) == 1 for users in shared):
            found.append(_Between(tensor, node, tuple(line for line in readers if line is not None)))
    return found


def _result(graph: Graph, node: NodeProto) -> str:
    """The result of a layer, behind an activation that factors pass through."""
    result = node.output[0]
    readers = graph.consumers(result)
    passes = len(readers) == 1 and readers[0].op_type in HOMOGENEOUS and readers[0].input[0] == result
    return str(readers[0].output[0] if passes and result not in graph.outputs else result)


def _choose(
    plan: GraphPlan, between: _Between, seen: _Channels, weights: list[Array]
) -> tuple[float, Array, float] | None:
    """The strength, the factors and the part of the noise that is left; None where nothing helps enough."""
    largest = np.maximum(-seen.low, seen.high).astype(np.float64)
    if not (largest > 0).any():
        return None
    layers = [plan.found[line.name] for line in between.readers]
    probes = [Probe(layer) for layer in layers]
    data = list(zip(*seen.parts, strict=True))  # by reader, then by sample
    runs = zip(probes, weights, data, strict=True)
    references = [[probe.run(x, weight) for x in parts] for probe, weight, parts in runs]
    shape = [1, -1, *(1,) * (data[0][0].ndim - 2)]

    def error(factors: Array) -> float:
        total = 0.0
        low, high = float((seen.low / factors).min()), float((seen.high / factors).max())
        rows = zip(between.readers, layers, probes, weights, data, references, strict=True)
        for line, layer, probe, weight, parts, expected in rows:
            if line.weight is None or line.input is None:
                continue
            params = QuantParams.from_range(line.input, low, high, dtype="float32")
            turned = _columns(layer, weight, factors)
            coarse = fake_quantize(turned, weight_params(turned, line.weight))
            for x, reference in zip(parts, expected, strict=True):
                scaled = (x / factors.reshape(shape)).astype(np.float32)
                total += noise(reference, probe.run(fake_quantize(scaled, params), coarse))
        return total

    plain = error(np.ones(len(largest)))
    best: tuple[float, Array, float] | None = None
    free = all(layer.depthwise and _is_per_channel(line) for layer, line in zip(layers, between.readers, strict=True))
    for strength in STRENGTHS[-1:] if free else STRENGTHS:
        factors = _factors(largest, strength)
        ratio = error(factors) / max(plain, 1e-30)
        if best is None or ratio < best[2]:
            best = strength, factors, ratio
    return best if best is not None and best[2] < ENOUGH else None


def _is_per_channel(line: LayerPlan) -> bool:
    return line.weight is not None and isinstance(line.weight.granularity, PerAxis)


def _factors(largest: Array, strength: float) -> Array:
    usable = largest > 0
    found = np.ones(len(largest))
    found[usable] = largest[usable] ** strength
    found[usable] /= found[usable].max()
    clipped: Array = np.maximum(found, 1 / WIDEST).astype(np.float32)
    return clipped


def _columns(layer: Layer, weight: Array, factors: Array) -> Array:
    """A weight whose inputs come divided by the factors."""
    groups = int(attribute_of(layer.node, "group", 1))
    rows = factors.reshape(groups, 1, -1)  # the inputs of each group
    spread = np.broadcast_to(rows, (groups, len(weight) // groups, weight.shape[1])).reshape(len(weight), -1)
    return np.asarray(weight * spread.reshape(*spread.shape, *(1,) * (weight.ndim - 2)), np.float32)


def _apply(graph: Graph, by_name: dict[str, NodeProto], between: _Between, factors: Array) -> None:
    maker = by_name[graph.node_name(between.maker)]
    weight = graph.array(maker.input[1])
    inverse = (1 / factors).astype(np.float32)
    scaled = weight * inverse.reshape(-1, *(1,) * (weight.ndim - 1))
    graph.give(maker, 1, graph.add_constant(f"{maker.input[1]}_equalized", np.asarray(scaled, np.float32)))
    if len(maker.input) > 2 and maker.input[2]:
        bias = np.asarray(graph.array(maker.input[2]) * inverse, np.float32)
        graph.give(maker, 2, graph.add_constant(f"{maker.input[2]}_equalized", bias))
    for line in between.readers:
        node = by_name[line.name]
        turned = _columns(Layer(node, line.name, ()), graph.array(node.input[1]), factors)
        graph.give(node, 1, graph.add_constant(f"{node.input[1]}_equalized", turned))
