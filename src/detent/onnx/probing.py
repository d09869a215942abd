"""Probing: what one layer computes, alone, from its inputs on sample data.

Steps that choose between ways to quantize a layer compare its outputs; running the whole model for each would take
hundreds of times longer.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import onnxruntime as ort
from numpy.typing import NDArray
from onnx import ModelProto, NodeProto, TensorProto, helper

from detent.onnx.calibrating import Feed, record
from detent.onnx.layers import Layer
from detent.onnx.planning import GraphPlan
from detent.qdq.graph import attribute_of
from detent.qdq.sessions import make_session

__all__ = ["Probe", "noise", "recorded_inputs"]

Array = NDArray[Any]
ROWS = 512


class Probe:
    """A layer of its own.

    >>> import numpy as np
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
        """The result without a bias; of matrix products only of some rows."""
        kind = self.layer.node.op_type
        if kind in {"MatMul", "Gemm"}:
            matrix = weight.T if attribute_of(self.layer.node, "transB", 0) else weight
            return _rows(x) @ matrix
        if self._session is None:
            self._session = make_session(_alone(self.layer.node), threads=0)
        found: Array = self._session.run(None, {"x": x, "w": weight})[0]
        return found


def _rows(x: Array) -> Array:
    """At most so many rows of a matrix, evenly spread."""
    flat = x.reshape(-1, x.shape[-1])
    return flat[:: max(1, len(flat) // ROWS)][:ROWS]


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

    >>> import numpy as np
    >>> noise(np.ones(2), np.zeros(2))
    2.0
    """
    difference = (found - reference).ravel()
    return float(difference @ difference)


def recorded_inputs(plan: GraphPlan, names: Iterable[str], samples: Iterable[Feed]) -> Iterator[Mapping[str, Array]]:
    """The data that come to some layers, sample after sample, by the layers' names.

    >>> import numpy as np, detent.onnx as qo
    >>> from onnx import parser
    >>> made = qo.plan(parser.parse_model('''<ir_version: 8, opset_import: ["" : 17]>
    ...     g (float[1,1] x) => (float[1,1] y) <float[1,1] w = {3.0}> { [fc] y = MatMul(x, w) }'''))
    >>> next(recorded_inputs(made, ["fc"], [{"x": np.float32([[2.0]])}]))
    {'fc': array([[2.]], dtype=float32)}
    """
    wanted = {name: plan.found[name].data for name in names}
    for tensors in record(plan.model, wanted.values(), samples):
        yield {name: tensors[tensor] for name, tensor in wanted.items()}
