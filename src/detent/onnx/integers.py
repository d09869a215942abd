"""Integers: which layers a runtime really computes in integers, read back from the graph that it made.

ONNX Runtime replaces quantizers around an operator by an integer one where all its conditions hold, and otherwise
computes in float without a word. The weights tell which layer an operator of the optimised graph is.
"""

from collections.abc import Mapping

from onnx import ModelProto

from detent.qdq.graph import Graph
from detent.qdq.provenance import Provenance
from detent.qdq.sessions import optimised

__all__ = ["WEIGHT_ONLY", "kernels_of"]

INTEGER = ("QLinearConv", "QLinearMatMul", "QGemm", "MatMulIntegerToFloat", "ConvInteger", "MatMulInteger")
WEIGHT_ONLY = ("MatMulNBits", "DequantizeLinear", "Gather", "GatherBlockQuantized")


def kernels_of(model: ModelProto, config: Mapping[str, str] | None = None) -> dict[str, str]:
    """The operator that computes each layer in ONNX Runtime on this machine, by the layer's name.

    Layers that run in float have the operator that reads their dequantized weight.

    >>> from onnx import parser
    >>> import numpy as np, detent.onnx as qo
    >>> made = qo.plan(parser.parse_model('''<ir_version: 8, opset_import: ["" : 17]>
    ...     g (float[1,1] x) => (float[1,1] y) <float[1,1] w = {3.0}> { [fc] y = MatMul(x, w) }'''))
    >>> kernels_of(qo.insert(made, qo.calibrate(made, [np.float32([[2.0]])])))
    {'fc': 'MatMulIntegerToFloat'}
    """
    about = Provenance.read(model)
    names = {} if about is None else about.weights
    written, graph = Graph(model), Graph(optimised(model, config))
    readers = {node.name: node.op_type for node in graph.nodes}
    found = {}
    for codes, layer in names.items():
        users = [node.op_type for node in graph.consumers(codes)]
        whole = [user for user in users if user in INTEGER or user in WEIGHT_ONLY[:1]]
        # Kernels may repack their weights: then the node of the layer's own name tells.
        found[layer] = whole[0] if whole else _by_name(readers, written, layer) or (users[0] if users else "float")
    return found


def _by_name(operators: Mapping[str, str], written: Graph, layer: str) -> str:
    if layer in operators:
        return operators[layer]
    outputs = next((node.op_type for node in written.nodes if node.name == layer), "")
    near = [kind for name, kind in operators.items() if name.startswith(f"{layer}_token_") and kind in INTEGER]
    return near[0] if near else outputs
