"""Guarding: layers that are to stay float, kept from being quantized by ONNX Runtime itself.

A Conv or Gemm with a float weight that stands between a DequantizeLinear and a QuantizeLinear is quantized by ONNX
Runtime when it loads the model (seen in 1.31.1): per tensor and without a word, which can cost more than all other
layers together. A Max with the lowest float between them changes no value and keeps the layer as it is.

ONNX Runtime also gives every reader of dequantized data a DequantizeLinear of its own. Patterns of several float
operators that begin with one tensor, such as GELU, are no longer found then: they read it behind such a Max, too.
"""

import numpy as np
from onnx import NodeProto, TensorProto, helper

from detent.onnx_model.graph import Graph

__all__ = ["guard_float", "share_floats"]

GUARDED = ("Conv", "ConvTranspose", "Gemm", "MatMul")


def guard_float(graph: Graph) -> list[str]:
    """Protect the float layers of a graph with quantizers; returns their names."""
    threatened = [node for node in graph.nodes if node.op_type in GUARDED and _is_threatened(graph, node)]
    for node in threatened:
        _keep(graph, node.input[0], [node])
    return [graph.node_name(node) for node in threatened]


def _keep(graph: Graph, tensor: str, readers: list[NodeProto]) -> None:
    lowest = graph.add_constant("lowest_float", np.asarray(np.finfo(np.float32).min, np.float32))
    kept = graph.fresh(f"{tensor}_kept_float")
    graph.redirect(tensor, kept, readers)
    graph.insert([helper.make_node("Max", [tensor, lowest], [kept], name=f"{kept}_node")])


def share_floats(graph: Graph) -> list[str]:
    """Let the float operators of a GELU read one tensor, where that was dequantized; returns the tensors' names."""
    shared = []
    for node in [each for each in graph.nodes if each.op_type == "Erf"]:
        scaled = graph.producer(node.input[0])
        if scaled is None or scaled.op_type not in {"Mul", "Div"}:
            continue
        for tensor in scaled.input:
            producer = graph.producer(tensor)
            readers = [each for each in graph.consumers(tensor) if each is scaled or each.op_type == "Mul"]
            if producer is not None and producer.op_type == "DequantizeLinear" and len(readers) > 1:
                _keep(graph, tensor, readers)
                shared.append(tensor)
    return shared


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
