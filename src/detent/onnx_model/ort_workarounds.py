"""Workarounds: Max nodes that stop ONNX Runtime from quantizing layers that must be kept in float.

When ONNX Runtime (observed with 1.31.1) loads a model, it quantizes some layers with float weights: each Conv,
ConvTranspose or Gemm between a DequantizeLinear and a QuantizeLinear. It uses one scale per tensor, without a warning.
This can cost more accuracy than the quantization of all other layers. Before that, it changes the graph:

- It moves Q/DQ nodes across operators that only move data (MaxPool, Reshape, Slice, ...).
- It removes operators without effect (Dropout, Identity, Cast).
- It fuses other operators (Pad, BatchNormalization, Add and Mul with a constant; MatMul and Add become a Gemm).

So detent assumes that a Q/DQ node can move across every operator that reads exactly one computed tensor, except
those in ``IMPASSABLE``. The workaround is a Max node before the layer, with the lowest float as its second input. The
Max node changes no value, and Q/DQ nodes cannot move across it.

ONNX Runtime also inserts a separate DequantizeLinear for every node that reads dequantized data. Then it no longer
fuses patterns of float operators that start from one tensor, such as GELU. A Max node before the pattern prevents this.

If a MaxPool reads float data, ONNX Runtime moves a QuantizeLinear from the output of the MaxPool to its input. The
MaxPool then runs on a kernel for bytes that is several times slower. A Max node after the MaxPool prevents this.
"""

from collections.abc import Callable, Collection, Iterable, Iterator

import numpy as np
from onnx import NodeProto, TensorProto, helper

from detent.onnx_model.graph import DEQUANTIZE, QUANTIZE, Graph, subgraphs
from detent.onnx_model.layers import COMPUTING

__all__ = ["guard_float", "guard_pools", "share_floats"]

GUARDED = ("Conv", "ConvTranspose", "Gemm", "MatMul")
# Operators that mix values or are not linear: no Q/DQ node can be moved across them.
IMPASSABLE = (
    *COMPUTING,
    *("AveragePool", "GlobalAveragePool", "GlobalMaxPool", "LpNormalization", "Softmax", "LogSoftmax"),
    *("LayerNormalization", "InstanceNormalization", "GroupNormalization", "RMSNormalization"),
    *(
        "ReduceMean",
        "ReduceSum",
        "ReduceMax",
        "ReduceL2",
        "Sigmoid",
        "Tanh",
        "Erf",
        "Gelu",
        "Exp",
        "Log",
        "Sqrt",
        "Pow",
    ),
    "Shape",
)


def guard_float(graph: Graph, names: Collection[str] = ()) -> list[str]:
    """Stop ONNX Runtime from quantizing layers with a float weight or input; return the names of these layers.

    ``names`` are the names of layers that must read float data, even if their weight is quantized.
    """
    threats = _Threats(graph)
    guarded = [node for node in graph.nodes if node.op_type in GUARDED and threats.holds(node, names)]
    for node in guarded:
        _keep(graph, node.input[0], [node])
    return [graph.node_name(node) for node in guarded]


def guard_pools(graph: Graph) -> list[str]:
    """Stop ONNX Runtime from moving a QuantizeLinear before a MaxPool of float data; return the MaxPool outputs."""
    guarded = []
    for node in [each for each in graph.nodes if each.op_type == QUANTIZE]:
        pool = graph.producer(node.input[0])
        if pool is None or pool.op_type != "MaxPool":
            continue
        source = graph.producer(pool.input[0])
        if source is None or source.op_type != DEQUANTIZE:
            guarded.append(node.input[0])
            _keep(graph, node.input[0], [node])
    return guarded


def _keep(graph: Graph, tensor: str, readers: list[NodeProto]) -> None:
    lowest = graph.add_constant("lowest_float", np.asarray(np.finfo(np.float32).min, np.float32))
    kept = graph.fresh(f"{tensor}_kept_float")
    graph.redirect(tensor, kept, readers)
    graph.insert([helper.make_node("Max", [tensor, lowest], [kept], name=f"{kept}_node")])


def share_floats(graph: Graph) -> list[str]:
    """Insert a Max if several operators of a GELU read the same dequantized tensor; return the tensors' names."""
    shared = []
    for node in [each for each in graph.nodes if each.op_type == "Erf"]:
        scaled = graph.producer(node.input[0])
        if scaled is None or scaled.op_type not in {"Mul", "Div"}:
            continue
        for tensor in scaled.input:
            producer = graph.producer(tensor)
            readers = [each for each in graph.consumers(tensor) if each is scaled or each.op_type == "Mul"]
            if producer is not None and producer.op_type == DEQUANTIZE and len(readers) > 1:
                _keep(graph, tensor, readers)
                shared.append(tensor)
    return shared


class _Threats:
    """The tensors to which ONNX Runtime can move Q/DQ nodes, and the layers that it may then quantize."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        sources = [node for node in graph.nodes if not node.input and node.op_type != "Constant"]
        generated = [name for node in sources for name in node.output]
        self.computed = _closure([*graph.inputs, *generated], self._results)
        dequantized = [node.output[0] for node in graph.nodes if node.op_type == DEQUANTIZE and self._is_data(node)]
        self.dequantized = _closure(dequantized, self._moved_forward)
        quantized = [node.input[0] for node in graph.nodes if node.op_type == QUANTIZE]
        self.quantized = _closure(quantized, self._moved_back)

    def _results(self, name: str) -> Iterator[str]:
        return (result for node in self.graph.consumers(name) for result in node.output if result)

    def _is_data(self, node: NodeProto) -> bool:
        return node.input[0] in self.computed and self.graph.kind(node.input[1]) == TensorProto.FLOAT

    def _inputs(self, node: NodeProto) -> set[str]:
        return {name for name in node.input if name in self.computed}

    def _is_passable(self, node: NodeProto) -> bool:
        return len(self._inputs(node)) == 1 and node.op_type not in IMPASSABLE and not any(subgraphs(node))

    def _moved_forward(self, name: str) -> Iterator[str]:
        return (
            result for node in self.graph.consumers(name) if self._is_passable(node) for result in node.output if result
        )

    def _moved_back(self, name: str) -> Iterator[str]:
        node = self.graph.producer(name)
        return iter(self._inputs(node) if node is not None and self._is_passable(node) else ())

    def holds(self, node: NodeProto, names: Collection[str]) -> bool:
        """Return whether ONNX Runtime may quantize a layer that must compute in float."""
        if node.input[0] not in self.dequantized:
            return False
        if self.graph.node_name(node) in names:  # even if no QuantizeLinear follows the layer
            return True
        return node.output[0] in self.quantized and self._is_float_constant(node.input[1])

    def _is_float_constant(self, name: str) -> bool:
        """Return whether a tensor is a float constant, or is computed from constants without a DequantizeLinear."""
        if name in self.graph.constants:
            return self.graph.kind(name) == TensorProto.FLOAT
        sources = _closure([name], self._sources)
        nodes = [self.graph.producer(each) for each in sources if each not in self.graph.constants]
        return name not in self.computed and all(node is not None and node.op_type != DEQUANTIZE for node in nodes)

    def _sources(self, name: str) -> Iterator[str]:
        node = self.graph.producer(name)
        return (each for each in (() if node is None else node.input) if each)


def _closure(names: Iterable[str], following: Callable[[str], Iterable[str]]) -> set[str]:
    """Return ``names`` and all names that repeated calls of ``following`` reach from ``names``."""
    reached = set(names)
    pending = list(reached)
    while pending:
        new = set(following(pending.pop())) - reached
        reached |= new
        pending += new
    return reached
