"""Guarding: layers that are to stay float, kept from being quantized by ONNX Runtime itself.

A Conv or Gemm with a float weight that stands between a DequantizeLinear and a QuantizeLinear is quantized by ONNX
Runtime when it loads the model (seen in 1.31.1): per tensor and without a word, which can cost more than all other
layers together. A Max with the lowest float between them changes no value and keeps the layer as it is.
"""

import numpy as np
from onnx import NodeProto, TensorProto, helper

from detent.qdq.graph import Graph

__all__ = ["guard_float"]

GUARDED = ("Conv", "ConvTranspose", "Gemm", "MatMul")


def guard_float(graph: Graph) -> list[str]:
    """Protect the float layers of a graph with quantizers; returns their names.

    >>> from onnx import parser
    >>> graph = Graph(parser.parse_model('''<ir_version: 8, opset_import: ["" : 17]>
    ...     g (uint8[1,1] x) => (uint8[1,1] y) <float s = {1.0}, uint8 z = {0}, float[1,1] w = {3.0}> {
    ...       a = DequantizeLinear(x, s, z) [fc] b = Gemm(a, w) y = QuantizeLinear(b, s, z) }'''))
    >>> guard_float(graph), [node.op_type for node in graph.finish().graph.node]
    (['fc'], ['DequantizeLinear', 'Max', 'Gemm', 'QuantizeLinear'])
    """
    found = [node for node in graph.nodes if node.op_type in GUARDED and _is_threatened(graph, node)]
    if not found:
        return []
    lowest = graph.add_constant("lowest", np.asarray(np.finfo(np.float32).min, np.float32))
    for node in found:
        source = node.input[0]
        kept = graph.fresh(f"{source}_kept_float")
        graph.insert([helper.make_node("Max", [source, lowest], [kept], name=f"{kept}_node")])
        graph.give(node, 0, kept)
    return [graph.node_name(node) for node in found]


def _is_threatened(graph: Graph, node: NodeProto) -> bool:
    before = graph.producer(node.input[0])
    weight = graph.constants.get(node.input[1])
    if (
        before is None
        or before.op_type != "DequantizeLinear"
        or weight is None
        or weight.data_type != TensorProto.FLOAT
    ):
        return False
    readers = graph.consumers(node.output[0])
    behind = [
        further for each in readers if each.op_type in {"Relu", "Clip"} for further in graph.consumers(each.output[0])
    ]
    return any(each.op_type == "QuantizeLinear" for each in (*readers, *behind))
