"""Batch norm folding: arithmetic with constants after a layer is folded into the layer's weight and bias.

====================== ==============================================
Conv, ConvTranspose    followed by BatchNormalization
Conv, ConvTranspose    followed by Add, Sub, Mul or Div with a scalar or per-channel constant
====================== ==============================================

Then a Q/DQ pair can follow the layer directly, and runtimes can fuse the layer with the Q/DQ pair.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray
from onnx import NodeProto

from detent.onnx_model.graph import Graph, attribute_of

__all__ = ["fold"]

Array = NDArray[Any]
FoldedWeights = dict[tuple[str, tuple[int, ...], bytes], str]  # by weight, and shape and bytes of the gain
FOLDED = ("Conv", "ConvTranspose")
EPSILON = 1e-5  # default epsilon of BatchNormalization


def fold(graph: Graph) -> int:
    """Fold constant arithmetic after layers into the layers, and return the number of removed nodes."""
    removed = 0
    folded: FoldedWeights = {}
    for node in list(graph.nodes):
        while node.op_type in FOLDED and _fold_next(graph, node, folded):
            removed += 1
    if removed:
        graph.drop_unread()
    return removed


def _fold_next(graph: Graph, layer: NodeProto, folded: FoldedWeights) -> bool:
    """Fold the node after a layer into the layer; return False if the node cannot be folded.

    ``folded`` has the weights so far: layers with the same weight and the same gain still share a weight afterwards.
    """
    result = layer.output[0]
    if any(name and name not in graph.constants for name in layer.input[1:]):
        return False
    readers = graph.consumers(result)
    if len(readers) != 1 or result in graph.outputs or result in graph.captured:
        return False
    follower = readers[0]
    weight = graph.array(layer.input[1])
    if weight.dtype != np.float32:
        return False
    channels = _channels(layer, weight)
    affine = _affine(graph, follower, result, channels, weight.ndim)
    if affine is None:
        return False
    gain, offset = affine
    bias = (
        graph.array(layer.input[2]).astype(np.float64)
        if len(layer.input) > 2 and layer.input[2]
        else np.zeros(channels)
    )
    if not np.array_equal(gain, np.ones(channels)):
        along = _along(layer, weight, gain)
        key = layer.input[1], along.shape, along.tobytes()
        if key not in folded:
            scaled = (weight.astype(np.float64) * along).astype(np.float32)
            folded[key] = graph.add_constant(f"{layer.input[1]}_folded", scaled)
        graph.set_input(layer, 1, folded[key])
    graph.set_input(layer, 2, graph.add_constant(f"{layer.output[0]}_bias", (bias * gain + offset).astype(np.float32)))
    target = follower.output[0]
    graph.remove([follower])
    graph.rename(result, target)
    return True


def _channels(layer: NodeProto, weight: Array) -> int:
    return int(weight.shape[0] if layer.op_type == "Conv" else weight.shape[1] * attribute_of(layer, "group", 1))


def _along(layer: NodeProto, weight: Array, gain: Array) -> Array:
    """Reshape per-channel gains to broadcast over the weight."""
    if layer.op_type == "Conv":
        return gain.reshape(-1, *(1,) * (weight.ndim - 1))
    groups = int(attribute_of(layer, "group", 1))
    per_group = np.repeat(gain.reshape(groups, -1), weight.shape[0] // groups, axis=0)
    return per_group.reshape(weight.shape[0], weight.shape[1], *(1,) * (weight.ndim - 2))


def _affine(graph: Graph, node: NodeProto, x: str, channels: int, rank: int) -> tuple[Array, Array] | None:
    """Return the per-channel gain and offset of a node that multiplies or adds constants, or None for other nodes."""
    if node.op_type == "BatchNormalization":
        return _batch_norm(graph, node, x)
    if node.op_type not in {"Add", "Sub", "Mul", "Div"} or len(node.input) != 2:
        return None
    first = node.input[0] == x
    other = node.input[1] if first else node.input[0]
    if other == x or other not in graph.constants or (not first and node.op_type in {"Sub", "Div"}):
        return None
    constant = graph.array(other)
    if constant.dtype != np.float32 or constant.ndim > rank:
        return None
    aligned = constant.reshape((1,) * (rank - constant.ndim) + constant.shape)
    if any(size != 1 for axis, size in enumerate(aligned.shape) if axis != 1) or aligned.shape[1] not in {1, channels}:
        return None
    values = np.broadcast_to(aligned.ravel(), channels).astype(np.float64)
    if node.op_type == "Div" and not values.all():
        return None
    ones, zeros = np.ones(channels), np.zeros(channels)
    return {
        "Add": (ones, values),
        "Sub": (ones, -values),
        "Mul": (values, zeros),
        "Div": (1 / _nonzero(values), zeros),
    }[node.op_type]


def _nonzero(values: Array) -> Array:
    return np.where(values == 0, np.nan, values)


def _batch_norm(graph: Graph, node: NodeProto, x: str) -> tuple[Array, Array] | None:
    is_inference = not attribute_of(node, "training_mode", 0) and len([name for name in node.output if name]) == 1
    if node.input[0] != x or not is_inference or any(name not in graph.constants for name in node.input[1:5]):
        return None
    gamma, beta, mean, variance = (graph.array(name).astype(np.float64) for name in node.input[1:5])
    gain = gamma / np.sqrt(variance + float(attribute_of(node, "epsilon", EPSILON)))
    return gain, beta - mean * gain
