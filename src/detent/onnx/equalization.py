r"""Cross-layer equalization: gives the channels of an activation between convolutions similar ranges.

.. math:: \operatorname{relu}(W_1 x) = \operatorname{diag}(s) \operatorname{relu}(\operatorname{diag}(s)^{-1} W_1 x)

See Nagel et al. 2019 and Meller et al. 2019. An activation has one scale, so the channels with the largest range
determine the precision of all channels. The weight before the activation is divided by the factors along its output
channels. The weights after it are multiplied by the factors along their input channels.

With one scale per output channel, the division costs no precision. In depthwise convolutions the multiplication costs
no precision either. In other convolutions, input channels with different factors share a scale, which costs precision.
So each activation gets the strength with the smallest error at the outputs of the layers after it.

``choose`` compares strengths on sample data, each tensor by itself. ``apply`` writes the chosen factors into a model
and needs no data.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from onnx import ModelProto, NodeProto

from detent.channel_factors import MAX_REMAINING_NOISE, MIN_CHANNEL_VALUES, STRENGTHS, equalization_factors
from detent.error_places import at
from detent.errors import SpecError
from detent.granularity import PerAxis
from detent.onnx.decisions import Equalized
from detent.onnx.graph_plan import GraphPlan, LayerPlan, weight_params
from detent.onnx.layer_error import Probe, gain_db, mean_power, noise, part_of
from detent.onnx_model.graph import Graph, attribute_of
from detent.onnx_model.layers import Layer, layers_of
from detent.onnx_model.sessions import record_in_parts
from detent.ops import fake_quantize
from detent.params import QuantParams
from detent.spec import QuantSpec

__all__ = ["Strength", "TensorToEqualize", "apply", "choose", "compare_strengths"]

Array = NDArray[Any]
Feed = dict[str, Array]

HOMOGENEOUS = ("Relu", "LeakyRelu", "PRelu")  # f(s * x) = s * f(x) for s > 0


@dataclass(frozen=True)
class _Between:
    """A tensor between convolutions, the node that computes it, and the nodes that read it."""

    tensor: str
    maker: NodeProto
    readers: tuple[NodeProto, ...]


class TensorToEqualize(NamedTuple):
    """A tensor between convolutions: the layers that read it, with the specs of their inputs and weights as JSON."""

    tensor: str
    readers: tuple[tuple[str, str, str], ...]


class Strength(NamedTuple):
    """The best strength of a tensor, its factors, and the fraction of noise that remains."""

    strength: float
    factors: Array
    remaining: float


Compare = Callable[[Sequence[TensorToEqualize]], Iterable[Strength | None]]


def choose(
    plan: GraphPlan, samples: Sequence[Feed], memory_budget: int | None = None, compare: Compare | None = None
) -> tuple[Equalized, ...]:
    """Choose factors for tensors between convolutions; keep those that lower the error of the layers after them.

    Args:
        plan: the plan of the model.
        samples: samples on which strengths are compared.
        memory_budget: limits the bytes of activations in memory.
        compare: does the work of ``compare_strengths``, for example on workers; None for this process.
    """
    lines = {line.name: line for line in plan.quantized if line.type == "Conv" and line.input is not None}
    graph = plan.graph
    between = [each for each in _between(graph) if all(graph.node_name(reader) in lines for reader in each.readers)]
    if not between or not samples:
        return ()
    tensors = [TensorToEqualize(each.tensor, _specs(lines, graph, each.readers)) for each in between]
    if compare is None:
        strengths: Iterable[Strength | None] = compare_strengths(plan.model, tensors, samples, memory_budget)
    else:
        strengths = compare(tensors)
    return tuple(
        Equalized(
            each.tensor,
            graph.node_name(each.maker),
            tuple(graph.node_name(node) for node in each.readers),
            best.factors,
            best.strength,
            gain_db(best.remaining),
        )
        for each, best in zip(between, strengths, strict=True)
        if best is not None
    )


def _specs(
    lines: Mapping[str, LayerPlan], graph: Graph, readers: Iterable[NodeProto]
) -> tuple[tuple[str, str, str], ...]:
    rows = [lines[graph.node_name(node)] for node in readers]
    return tuple(
        (row.name, "" if row.input is None else row.input.to_json(), "" if row.weight is None else row.weight.to_json())
        for row in rows
    )


def compare_strengths(
    model: ModelProto, tensors: Sequence[TensorToEqualize], samples: Sequence[Feed], memory_budget: int | None = None
) -> list[Strength | None]:
    """Return the best strength of each tensor; None if no strength lowers the error enough.

    Tensors do not depend on each other: a layer reads one of them, and its factors change the rows of the weights of
    layers before it, but not the error that is compared.
    """
    graph = Graph(model)
    layers = {layer.name: layer for layer in layers_of(graph)}
    channels = _observed_channels(model, layers, tensors, samples, memory_budget)
    strengths: list[Strength | None] = []
    for each in tensors:
        observed, best = channels.pop(each.tensor), None
        with at("tensor", each.tensor):
            if observed.count >= MIN_CHANNEL_VALUES:
                readers = [_Reader.of(layers[name], graph, specs) for name, *specs in each.readers]
                best = _best_strength(readers, observed)
        strengths.append(best)
    return strengths


def apply(model: ModelProto, equalized: Sequence[Equalized]) -> ModelProto:
    """Write the chosen factors into the weights and biases of a model, in place."""
    if not equalized:
        return model
    graph = Graph(model)
    for each in equalized:
        with at("tensor", each.tensor):
            _apply(graph, each)
    graph.drop_unread()
    return graph.finish()


def _apply(graph: Graph, decision: Equalized) -> None:
    between = _checked(graph, decision)
    maker = between.maker
    weights = {graph.node_name(node): graph.array(node.input[1]) for node in _nodes(between)}
    changed = _changed_weights(graph, between, decision.factors, weights)
    bias = maker.input[2] if len(maker.input) > 2 else ""
    for node, weight in changed:
        graph.set_input(node, 1, graph.add_constant(f"{node.input[1]}_equalized", weight))
        if node is maker and bias:
            shifted = np.asarray(graph.array(bias) * _inverse(decision.factors), np.float32)
            graph.set_input(maker, 2, graph.add_constant(f"{bias}_equalized", shifted))


def _checked(graph: Graph, decision: Equalized) -> _Between:
    """Return the tensor that a decision names; reject decisions that do not fit the model."""
    where = f"equalized {decision.tensor!r}"
    between = next((each for each in _between(graph) if each.tensor == decision.tensor), None)
    if between is None:
        raise SpecError(
            f"{where}: the model has no tensor {decision.tensor!r} between convolutions: remove this entry of equalized"
        )
    names = graph.node_name(between.maker), tuple(graph.node_name(node) for node in between.readers)
    if names != (decision.maker, decision.readers):
        raise SpecError(
            f"{where}: got maker {decision.maker!r} and readers {decision.readers}, expected maker {names[0]!r} and "
            f"readers {names[1]}"
        )
    sizes = {len(graph.array(between.maker.input[1]))}
    for node in between.readers:
        sizes.add(graph.constants[node.input[1]].dims[1] * int(attribute_of(node, "group", 1)))
    if sizes != {len(decision.factors)}:
        raise SpecError(f"{where}: got {len(decision.factors)} factors, expected {min(sizes)}, one per channel")
    return between


def _between(graph: Graph) -> Iterator[_Between]:
    """Yield the tensors between convolutions whose weights are constant and not shared with other nodes."""
    for node in graph.nodes:
        if node.op_type != "Conv" or node.input[1] not in graph.constants:
            continue
        if len(node.input) > 2 and node.input[2] and node.input[2] not in graph.constants:
            continue
        tensor = _result(graph, node)
        readers = tuple(graph.consumers(tensor))
        if not readers or tensor in graph.outputs or tensor in graph.captured:
            continue
        convolutions = all(
            each.op_type == "Conv" and each.input[0] == tensor and each.input[1] in graph.constants for each in readers
        )
        if convolutions and all(len(graph.consumers(each.input[1])) == 1 for each in (node, *readers)):
            yield _Between(tensor, node, readers)


def _nodes(between: _Between) -> tuple[NodeProto, ...]:
    return between.maker, *between.readers


def _result(graph: Graph, node: NodeProto) -> str:
    """Return a layer's output, or the output of an activation function in ``HOMOGENEOUS`` after the layer."""
    result = node.output[0]
    readers = graph.consumers(result)
    passes = len(readers) == 1 and readers[0].op_type in HOMOGENEOUS and readers[0].input[0] == result
    return str(readers[0].output[0] if passes and result not in graph.outputs else result)


class _Channels:
    """Per-channel ranges of a tensor in each half of the samples, and the data on which errors are measured."""

    def __init__(self) -> None:
        self.lo, self.hi = np.zeros((2, 1), np.float32), np.zeros((2, 1), np.float32)  # one row per half
        self.count = 0  # values per channel
        self.parts: list[list[Array]] = []  # by sample, then by reader

    def observe(self, x: Array, readers: list[Layer], samples: int) -> None:
        half, axes = len(self.parts) % 2, tuple(axis for axis in range(x.ndim) if axis != 1)
        if not self.parts:
            self.lo, self.hi = np.zeros((2, x.shape[1]), np.float32), np.zeros((2, x.shape[1]), np.float32)
        self.lo[half] = np.minimum(self.lo[half], x.min(axis=axes))
        self.hi[half] = np.maximum(self.hi[half], x.max(axis=axes))
        self.count += x.size // x.shape[1]
        self.parts.append([part_of(layer, x, samples) for layer in readers])

    def largest(self, half: int | None = None) -> Array:
        """Return the largest magnitude of each channel, in one half of the samples or in all."""
        by_half = np.maximum(-self.lo, self.hi).astype(np.float64)
        result: Array = by_half.max(axis=0) if half is None else by_half[half]
        return result


def _observed_channels(
    model: ModelProto,
    layers: Mapping[str, Layer],
    tensors: Sequence[TensorToEqualize],
    samples: Sequence[Feed],
    memory_budget: int | None,
) -> dict[str, _Channels]:
    channels = {each.tensor: _Channels() for each in tensors}
    for _, recorded in record_in_parts(model, channels, samples, memory_budget):
        for tensor, readers in tensors:
            with at("tensor", tensor):
                if tensor in recorded and recorded[tensor].size:
                    channels[tensor].observe(recorded[tensor], [layers[name] for name, *_ in readers], len(samples))
    return channels


class _Reader(NamedTuple):
    """A layer that reads a tensor, its weight, and the specs of its input and its weight; None for float."""

    layer: Layer
    weight: Array
    input_spec: QuantSpec | None
    weight_spec: QuantSpec | None

    @classmethod
    def of(cls, layer: Layer, graph: Graph, specs: Sequence[str]) -> "_Reader":
        parsed = [QuantSpec.from_json(text) if text else None for text in specs]
        return cls(layer, graph.array(layer.weight), parsed[0], parsed[1])

    @property
    def is_per_channel(self) -> bool:
        return self.weight_spec is not None and isinstance(self.weight_spec.granularity, PerAxis)


def _best_strength(readers: Sequence[_Reader], channels: _Channels) -> Strength | None:
    """Return the best strength, or None if the gain is too small.

    The factors of each half of the samples are evaluated on the other half.
    """
    largest = channels.largest()
    if not (largest > 0).any():
        return None
    probes = [Probe(reader.layer) for reader in readers]
    data = list(zip(*channels.parts, strict=True))  # indexed by reader, then by sample
    runs = zip(probes, readers, data, strict=True)
    references: list[list[Array]] = []
    for probe, reader, parts in runs:
        with at("layer", reader.layer.name):
            references.append([probe.run(x, reader.weight) for x in parts])
    powers = [mean_power(outputs) for outputs in references]
    shape = [1, -1, *(1,) * (data[0][0].ndim - 2)]

    def error(factors: Array, samples: Sequence[int]) -> float:
        total = 0.0
        lo, hi = float((channels.lo / factors).min()), float((channels.hi / factors).max())
        for reader, probe, parts, expected, power in zip(readers, probes, data, references, powers, strict=True):
            if reader.weight_spec is None or reader.input_spec is None:
                continue
            with at("layer", reader.layer.name):
                params = QuantParams.from_range(reader.input_spec, lo, hi, dtype="float32")
                scaled_weight = _columns(reader.layer.node, reader.weight, factors)
                rounded = fake_quantize(scaled_weight, weight_params(scaled_weight, reader.weight_spec))
                for i in samples:
                    scaled = (parts[i] / factors.reshape(shape)).astype(np.float32)
                    total += noise(expected[i], probe.run(fake_quantize(scaled, params), rounded)) / power
        return total

    every = range(len(channels.parts))
    baseline = error(np.ones(len(largest)), every)
    if baseline == 0:  # for example, all weights are zero
        return None
    best: Strength | None = None
    is_lossless = all(reader.layer.depthwise and reader.is_per_channel for reader in readers)
    for strength in STRENGTHS[-1:] if is_lossless else STRENGTHS:
        if len(every) > 1:
            unseen = [
                error(equalization_factors(channels.largest(1 - half), strength), every[half::2]) for half in (0, 1)
            ]
        else:
            unseen = [error(equalization_factors(largest, strength), every)]
        ratio = sum(unseen) / baseline
        if best is None or ratio < best.remaining:
            best = Strength(strength, equalization_factors(largest, strength), ratio)
    return best if best is not None and best.remaining < MAX_REMAINING_NOISE else None


def _inverse(factors: Array) -> Array:
    inverse: Array = (1 / factors).astype(np.float32)
    return inverse


def _changed_weights(
    graph: Graph, between: _Between, factors: Array, weights: dict[str, Array]
) -> Iterator[tuple[NodeProto, Array]]:
    """Yield each convolution next to a tensor, and its weight with the factors applied; the maker comes first."""
    rows = weights[graph.node_name(between.maker)]
    scaled = rows * _inverse(factors).reshape(-1, *(1,) * (rows.ndim - 1))
    yield between.maker, np.asarray(scaled, np.float32)
    for node in between.readers:
        yield node, _columns(node, weights[graph.node_name(node)], factors)


def _columns(node: NodeProto, weight: Array, factors: Array) -> Array:
    """Multiply the input channels of a weight by the factors."""
    groups = int(attribute_of(node, "group", 1))
    rows = factors.reshape(groups, 1, -1)  # one row of factors per convolution group
    spread = np.broadcast_to(rows, (groups, len(weight) // groups, weight.shape[1])).reshape(len(weight), -1)
    return np.asarray(weight * spread.reshape(*spread.shape, *(1,) * (weight.ndim - 2)), np.float32)
