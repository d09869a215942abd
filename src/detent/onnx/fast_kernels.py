"""Fast kernels: the conditions under which ONNX Runtime runs a layer on a fast integer kernel.

Three choices depend on the data, and are made here:

- **Last layers.** ONNX Runtime runs a Conv on an integer kernel only if its output is quantized. The same holds for a
  Gemm before an activation, such as Relu. Without a quantized layer after it, such a layer would run in float and
  dequantize its weight in every run. A small layer is kept in float. A large layer gets a quantized output. So does a
  small layer before or after a Resize that interpolates, if the noise allows it (``accuracy_passes``): after a float
  layer, ONNX Runtime resizes tensors in NCHW order, or padded to 16 channels, instead of NHWC order. In networks for
  segmentation, files with quantized outputs take less time, with a lower SQNR.
- **Weights of float layers.** ONNX Runtime has no integer kernel for ConvTranspose. Its weight is stored as codes for
  the size of the file, and dequantized in every run. If that would take too much time, the weight is kept in float.
- **Bits of weights.** Kernels that are fast on every CPU need weights of 7 bits (see ``targets``). Kernels for 8 bits
  take up to three times as long. So only a few layers get 8 bits: those where 8 bits lower the noise at the outputs the
  most. Together, these layers do a small part of the multiplications.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray
from onnx import NodeProto

from detent.error_places import at
from detent.onnx.float_fallback import NEGLIGIBLE_NOISE, NoiseByLayer, search_by_halves
from detent.onnx.graph_plan import NO_KERNEL, GraphPlan, LayerPlan, Preference
from detent.onnx_model.graph import Graph, interpolates, reads, subgraphs
from detent.onnx_model.sessions import FLOAT_NBYTES, tensor_shapes

__all__ = [
    "choose_slow_weights",
    "choose_wide",
    "multiplications",
    "recurrent_multiplications",
    "with_last_layers",
]

RECURRENT = ("LSTM", "GRU", "RNN", "Loop", "Scan")
Array = NDArray[Any]
Feed = Mapping[str, Array]

FLOAT_REASON = "last layer: an integer kernel would need a quantized output"
MERGED_ACTIVATIONS = ("Relu", "LeakyRelu", "Sigmoid", "HardSigmoid", "Tanh", "Elu", "Selu", "Softplus", "Softsign")
MAX_FLOAT_WORK = 0.05  # a last layer with a larger share of the multiplications is not kept in float
MAX_FLOAT_BYTES = 0.02  # bytes that last layers in float may add, relative to all quantized weights
SLOW_REASON = "ONNX Runtime would dequantize its weight in every run, which takes too long"
# To dequantize one weight takes as long as this many multiplications in float. Measured on one thread with 8 shapes:
# 14 to 22 for kernels of 4 x 4, and up to 45 for kernels of 2 x 2, which have few weights between two scales.
DEQUANTIZE_WORK = 24
MAX_DEQUANTIZE_WORK = 0.4  # relative to all multiplications; weights that would exceed it stay in float
MAX_WIDE_WORK = 0.01  # layers with 8-bit weights do at most this share of the multiplications
ACCEPTED_NOISE = 1.1  # relative to the noise with 8 bits for all weights (0.4 dB); below it, no more layers get 8 bits
MIN_GAIN = 0.02  # a layer gets 8 bits only if this removes at least this share of the noise


def multiplications(plan: GraphPlan, feed: Feed, *, with_float: bool = False) -> dict[str, float]:
    """Count the multiplications of each quantized layer on a batch, by layer name.

    The count of a Gather and of a weight-only layer is 0, because their weights have no influence on the time. With
    ``with_float``, layers in float are counted, too; the count of a recurrent layer is 0.
    """
    lines = plan.layers if with_float else plan.quantized
    layers = {line.name: plan.layers_by_name[line.name] for line in lines if line.type != "Gather"}
    layers = {name: each for name, each in layers.items() if not each.is_weight_only and each.data}
    # The count is output values times weights per output channel. For a ConvTranspose, it is input values times weights
    # per input channel. For a matmul of two activations, it is output values times the length of the rows of the first.
    is_spread = {name: layer.node.op_type == "ConvTranspose" for name, layer in layers.items()}
    tensors = {name: layer.data if is_spread[name] else layer.node.output[0] for name, layer in layers.items()}
    rows = [layer.data for layer in layers.values() if layer.second]
    shapes = tensor_shapes(plan.model, list(dict.fromkeys((*tensors.values(), *rows))), feed)
    counts = {line.name: 0.0 for line in lines}
    for name, layer in layers.items():
        with at("layer", name):
            axis = 0 if is_spread[name] else layer.axis
            per_value = shapes[layer.data][-1] if layer.second else prod(layer.shape) / max(layer.shape[axis], 1)
            counts[name] = float(prod(shapes[tensors[name]]) * per_value)
    return counts


def recurrent_multiplications(graph: Graph, feed: Feed) -> float:
    """Estimate the multiplications of recurrent layers and loops on a batch: one per weight and step.

    The number of steps is not known before the model runs. It is estimated as the longest axis of the inputs, except
    for their first axis.
    """
    weights = 0
    for node in graph.nodes:
        if node.op_type in RECURRENT:
            weights += sum(prod(graph.constants[name].dims) for name in reads(node) if name in graph.constants)
            weights += sum(prod(each.dims) for body in subgraphs(node) for each in body.initializer)
    steps = max((size for array in feed.values() for size in array.shape[1:]), default=1)
    return float(weights * steps)


def with_last_layers(
    plan: GraphPlan, work: Mapping[str, float], prefer: Preference, tensors: Collection[str] | None = None
) -> GraphPlan:
    """Return a plan in which each last Conv, or last Gemm before an activation, is in float or has a quantized output.

    ``work`` is the result of ``multiplications``. ``tensors`` are the tensors that can be quantized; None means all.
    With ``plan.resized_outputs``, or if ``prefer`` is "speed", layers before or after a Resize get a quantized output.
    The plan does not change for OpenVINO, or if ``prefer`` is "accuracy".
    """
    if plan.target.runtime != "onnxruntime" or prefer == "accuracy":
        return plan
    total, allowed = sum(work.values()), MAX_FLOAT_BYTES * plan.nbytes_after
    while last := [line for line in _last_layers(plan, tensors) if line.name not in plan.last_layers]:
        small: list[str] = []
        resized = _resized_layers(plan) if plan.resized_outputs or prefer == "speed" else set[str]()
        for line in sorted((each for each in last if each.name not in resized), key=lambda line: line.nbytes_before):
            added = line.nbytes_before - line.nbytes_after
            if work[line.name] <= MAX_FLOAT_WORK * total and added <= allowed:
                small.append(line.name)
                allowed -= added
        large = [line.name for line in last if line.name not in small]
        # The layers before the new float layers are last layers now.
        plan = plan.without(small, FLOAT_REASON).with_quantized_outputs(large)
    return plan


def _resized_layers(plan: GraphPlan) -> set[str]:
    """Return the quantized layers before or after a Resize that interpolates, with only float nodes between them."""
    graph = plan.graph
    layers = {id(plan.layers_by_name[line.name].node): line.name for line in plan.quantized}
    resized = set[str]()
    for start in filter(interpolates, graph.nodes):
        source = graph.producer(start.input[0])
        resized |= _first_layers(layers, [source], lambda node: [*map(graph.producer, reads(node))])
        readers = graph.consumers(start.output[0])
        resized |= _first_layers(
            layers, readers, lambda node: [each for x in node.output for each in graph.consumers(x)]
        )
    return resized


def _first_layers(
    layers: Mapping[int, str],
    start: Sequence[NodeProto | None],
    neighbors: Callable[[NodeProto], Sequence[NodeProto | None]],
) -> set[str]:
    """Follow nodes from ``start`` to the first layers and return them; a path ends at a Shape or Size node.

    ``layers`` has the names of layers by id of the node.
    """
    first, seen, pending = set[str](), set[int](), [*start]
    while pending:
        node = pending.pop()
        if node is None or id(node) in seen or node.op_type in {"Shape", "Size"}:
            continue
        seen.add(id(node))
        if id(node) in layers:
            first.add(layers[id(node)])
        else:
            pending += neighbors(node)
    return first


def _last_layers(plan: GraphPlan, tensors: Collection[str] | None) -> list[LayerPlan]:
    """Return the layers that need a quantized output for an integer kernel, but have a float output."""
    placed = {each.tensor for each in plan.placements()} | plan.graph.captured
    lines = [line for line in plan.quantized if line.input is not None and _needs_quantized_output(plan, line)]
    results = {line.name: _results(plan, line) for line in lines}
    return [
        line
        for line in lines
        if not results[line.name] & placed and (tensors is None or results[line.name] & set(tensors))
    ]


def _needs_quantized_output(plan: GraphPlan, line: LayerPlan) -> bool:
    """Whether ONNX Runtime runs a layer in float if its output is float.

    This holds for a Conv, and for a Gemm before an activation, because ONNX Runtime first merges these two.
    """
    readers = plan.graph.consumers(plan.layers_by_name[line.name].node.output[0])
    return line.type == "Conv" or (
        line.type == "Gemm" and len(readers) == 1 and readers[0].op_type in MERGED_ACTIVATIONS
    )


def _results(plan: GraphPlan, line: LayerPlan) -> set[str]:
    """Return the output of a layer, and of a Relu or Clip after it."""
    result = plan.layers_by_name[line.name].node.output[0]
    readers = [node for node in plan.graph.consumers(result) if node.op_type in {"Relu", "Clip"}]
    return {result, *(node.output[0] for node in readers)}


def choose_slow_weights(plan: GraphPlan, work: Mapping[str, float]) -> list[str]:
    """Choose the ConvTranspose layers whose weights are kept in float, because dequantizing them takes too long.

    ``work`` is the result of ``multiplications``. Only layers whose input would be quantized on other runtimes count:
    a weight-only recipe is for the size of the file.
    """
    lines = [line for line in plan.quantized if line.note.startswith(NO_KERNEL)]
    spare = MAX_DEQUANTIZE_WORK * sum(work.values())
    slow = []
    for line in sorted(lines, key=lambda line: line.nbytes_before / (work[line.name] + 1)):
        cost = DEQUANTIZE_WORK * line.nbytes_before / FLOAT_NBYTES
        if cost <= spare:
            spare -= cost
        else:
            slow.append(line.name)
    return slow


def choose_wide(noise: NoiseByLayer, plan: GraphPlan, work: Mapping[str, float]) -> dict[str, float]:
    """Choose the layers whose weights get 8 instead of 7 bits; return the share of the noise that each one removes."""
    lines = {line.name: line for line in plan.quantized if line.wide_weight is not None}
    narrow = noise.noise_with({}) if lines else 0.0
    if not np.isfinite(narrow) or narrow <= NEGLIGIBLE_NOISE * noise.count:
        return {}
    wide = noise.noise_with({name: _wide(line) for name, line in lines.items()})
    total = sum(work.values())
    cheap = [name for name in lines if work[name] <= MAX_WIDE_WORK * total]
    if narrow <= ACCEPTED_NOISE * wide or not cheap:
        return {}

    def gain(names: Sequence[str]) -> float:
        return (narrow - noise.noise_with({name: _wide(lines[name]) for name in names})) / narrow

    gains = search_by_halves(cheap, gain, MIN_GAIN)
    chosen: dict[str, float] = {}
    remaining, spare = narrow, MAX_WIDE_WORK * total
    for name in sorted(gains, key=lambda name: -gains[name] / (work[name] + 1)):
        if work[name] > spare or remaining <= ACCEPTED_NOISE * wide:
            continue
        with at("layer", name):
            without = noise.noise_with({each: _wide(lines[each]) for each in (*chosen, name)})
        if remaining - without >= MIN_GAIN * narrow:
            chosen[name], remaining = (remaining - without) / narrow, without
            spare -= work[name]
    return chosen


def _wide(line: LayerPlan) -> LayerPlan:
    """Return the row of a layer with its 8-bit weight."""
    return LayerPlan(line.name, line.type, weight=line.wide_weight, input=line.input, dynamic_input=line.dynamic_input)
