"""Probing: what one layer computes, alone, from its inputs on sample data.

Steps that choose between ways to quantize a layer compare its outputs; running the whole model for each would take
hundreds of times longer. A part of the data is enough: some rows of a matrix, some blocks of an image.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray
from onnx import ModelProto, NodeProto, TensorProto, helper

from detent.onnx.calibrating import Feed, record
from detent.onnx.layers import Layer
from detent.onnx.planning import GraphPlan
from detent.qdq.graph import attribute_of
from detent.qdq.sessions import make_session

__all__ = ["Probe", "noise", "part_of", "recorded_inputs"]

Array = NDArray[Any]
ROWS = 512
POINTS, BLOCK = 64 * 64, 8  # of an image that are looked at, and the side of the blocks they are taken in


class Probe:
    """A layer of its own.

    >>> from onnx import parser
    >>> from detent.onnx.layers import layers_of
    >>> from detent.qdq import Graph
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
        found: Array = self._session.run(None, {"x": x, "w": weight})[0]
        return found


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
        return flat[:: max(1, len(flat) // ROWS)][:ROWS]
    sizes = layer.shape[2:]
    gaps = attribute_of(layer.node, "dilations", [1] * len(sizes))
    left = POINTS
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
    count = -(-side // BLOCK)
    starts = np.linspace(0, length - BLOCK, count).astype(np.intp)
    return (starts[:, None] + np.arange(BLOCK)).ravel()


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


def noise(reference: Array, found: Array) -> float:
    """The power of a difference.

    >>> noise(np.ones(2), np.zeros(2))
    2.0
    """
    difference = (found - reference).ravel()
    return float(difference @ difference)


def recorded_inputs(plan: GraphPlan, names: Iterable[str], samples: Iterable[Feed]) -> Iterator[Mapping[str, Array]]:
    """A part of the data that come to some layers, sample after sample, by the layers' names.

    >>> import detent.onnx as qo
    >>> from onnx import parser
    >>> made = qo.plan(parser.parse_model('''<ir_version: 8, opset_import: ["" : 17]>
    ...     g (float[1,1] x) => (float[1,1] y) <float[1,1] w = {3.0}> { [fc] y = MatMul(x, w) }'''))
    >>> next(recorded_inputs(made, ["fc"], [{"x": np.float32([[2.0]])}]))
    {'fc': array([[2.]], dtype=float32)}
    """
    wanted = {name: plan.found[name].data for name in names}
    for tensors in record(plan.model, wanted.values(), samples):
        yield {name: part_of(plan.found[name], tensors[tensor]) for name, tensor in wanted.items()}
