"""Layers: nodes with weights. ``Layer`` says where the weight is, or why the layer cannot be quantized.

The column *weight* is the index of the weight among the node's inputs; *output channels* is an axis of the weight.

============== ======= ======================== ================================
operator       weight  output channels          names for rules
============== ======= ======================== ================================
Conv           1       axis 0                   Conv, Conv1d, Conv2d, Conv3d
ConvTranspose  1       axis 1                   ConvTranspose, ConvTranspose1d ..
MatMul         1       axis 1                   MatMul, Linear
Gemm           1       axis 1, 0 if transposed  Gemm, Linear
Gather         0       axis 0                   Gather, Embedding
============== ======= ======================== ================================

A MatMul of two activations, as in attention, is a layer without a weight. Rules match it as MatMul and
ActivationMatMul.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from onnx import NodeProto, TensorProto

from detent.onnx_model.graph import (
    DEQUANTIZE,
    MAIN,
    MATMULS,
    Graph,
    attribute_of,
    is_depthwise,
    node_name,
    subgraphs,
)

__all__ = ["ACTIVATION_MATMUL", "QUANTIZED_ALREADY", "TWO_ACTIVATIONS", "WEIGHTED", "Layer", "layers_of"]

CONVS = ("Conv", "ConvTranspose")
RECURRENT = ("LSTM", "GRU", "RNN")
COMPUTING = (*CONVS, *MATMULS, *RECURRENT)
WEIGHTED = (*COMPUTING, "Gather")
_ERROR_MAGNIFYING = ("Pow", "Sqrt", "Log", "Exp", "Reciprocal")
QUANTIZED_ALREADY = "its weight is quantized already"  # reason to keep a layer in float
TWO_ACTIVATIONS = "a matmul of two activations"  # reason to keep a layer in float
ACTIVATION_MATMUL = "ActivationMatMul"  # type of a matmul of two activations, for rules
_DIMENSIONS = {3: "1d", 4: "2d", 5: "3d"}  # maps the rank of a convolution's weight to the suffix of its type


@dataclass(frozen=True, eq=False)
class Layer:
    """A node with a weight, or a matmul of two activations."""

    node: NodeProto
    name: str
    types: tuple[str, ...]  # type names that rules match
    data: str = ""  # name of the activation that the layer reads
    weight: str = ""  # name of the weight
    shape: tuple[int, ...] = ()  # shape of the weight
    axis: int = 0  # axis of the weight's output channels
    bias: str = ""  # name of the bias, "" without a bias
    depthwise: bool = False
    reason: str = ""  # why the layer cannot be quantized, "" if it can
    second: str = ""  # name of the second activation of a matmul of two activations, "" for layers with a weight

    @property
    def activations(self) -> tuple[str, ...]:
        """Names of the activations that are quantized as inputs of the layer."""
        return (self.data, self.second) if self.second else (self.data,)


def layers_of(graph: Graph) -> Iterator[Layer]:
    """Yield all layers in graph order, including those that cannot be quantized."""
    for node in graph.nodes:
        yield from _inner_layers(node, node_name(node))
        if node.op_type in WEIGHTED and node.domain in MAIN and (node.op_type != "Gather" or _is_table(graph, node)):
            yield _layer(graph, node)


def _inner_layers(node: NodeProto, name: str) -> Iterator[Layer]:
    """Yield the layers in the subgraphs of a node, at any depth; these layers are listed, but kept in float."""
    for body in subgraphs(node):
        for inner in body.node:
            own = f"{name}/{node_name(inner)}"
            if inner.op_type in COMPUTING:
                yield Layer(inner, own, (inner.op_type,), reason=f"inside a subgraph of {node.op_type} {name!r}")
            yield from _inner_layers(inner, own)


def _layer(graph: Graph, node: NodeProto) -> Layer:
    name, op = node_name(node), node.op_type
    position = 0 if op == "Gather" else 1
    weight, data = node.input[position], node.input[1 - position]
    if op == "MatMul" and _is_activation(graph, weight) and _is_activation(graph, data):
        return Layer(node, name, (op, ACTIVATION_MATMUL), data, second=weight)
    reason = _weight_problem(graph, node, weight)
    if reason:
        return Layer(node, name, (op,), reason=reason)
    shape = tuple(graph.constants[weight].dims)
    return Layer(
        node,
        name,
        _types(op, shape),
        data,
        weight,
        shape,
        axis=0 if op in {"Conv", "Gather"} or (op == "Gemm" and attribute_of(node, "transB", 0)) else 1,
        bias=node.input[2] if op in {*CONVS, "Gemm"} and len(node.input) > 2 else "",
        depthwise=op == "Conv" and is_depthwise(attribute_of(node, "group", 1), shape),
        reason=_form_problem(graph, node, shape),
    )


def _types(op: str, shape: tuple[int, ...]) -> tuple[str, ...]:
    if op in CONVS:
        return op, f"{op}{_DIMENSIONS.get(len(shape), 'Nd')}"
    return op, "Embedding" if op == "Gather" else "Linear"


def _is_activation(graph: Graph, name: str) -> bool:
    """Return whether a tensor is computed in float, and is neither a constant nor a dequantized weight."""
    producer = graph.producer(name)
    if producer is not None and producer.op_type in {DEQUANTIZE, "Cast"} and producer.input[0] in graph.constants:
        return False
    return name not in graph.constants and graph.kind(name) in {TensorProto.UNDEFINED, TensorProto.FLOAT}


def _weight_problem(graph: Graph, node: NodeProto, weight: str) -> str:
    """Return why the weight of a node is not a float constant, or "" if the weight is a float constant."""
    if node.op_type in RECURRENT:
        return "recurrent layers are not supported"
    producer = graph.producer(weight)
    if producer is not None and producer.op_type == DEQUANTIZE:
        return QUANTIZED_ALREADY
    if producer is not None and producer.op_type == "Cast" and producer.input[0] in graph.constants:
        return f"its weight is stored as {TensorProto.DataType.Name(graph.kind(producer.input[0]))}"
    if weight not in graph.constants:
        is_left = node.input[0] in graph.constants
        return "constant on the left (W @ x); only x @ W is supported" if is_left else TWO_ACTIVATIONS
    if graph.kind(weight) != TensorProto.FLOAT:
        return f"its weight is {TensorProto.DataType.Name(graph.kind(weight))}, not FLOAT"
    return ""


def _form_problem(graph: Graph, node: NodeProto, shape: tuple[int, ...]) -> str:
    """Return why a layer with a float weight cannot be quantized, or "" if the layer can be quantized."""
    if 0 in shape:
        return f"its weight is empty (shape {shape})"
    if node.op_type in MATMULS and len(shape) != 2:
        return f"its weight has {len(shape)} axes, expected 2"
    if node.op_type == "Gemm":
        is_plain = attribute_of(node, "alpha", 1.0) == 1.0 and attribute_of(node, "beta", 1.0) == 1.0
        if not is_plain or attribute_of(node, "transA", 0):
            return "a Gemm with alpha, beta or transA is not supported"
    if node.op_type != "Gather" and _feeds_only_magnifying(graph, node):
        return "feeds only powers, roots, exponentials or logarithms, which magnify its error"
    return ""


def _is_table(graph: Graph, node: NodeProto) -> bool:
    """Return whether a Gather is an embedding: it reads rows of a float matrix, and a layer depends on these rows."""
    table = node.input[0]
    if table not in graph.constants or graph.kind(table) != TensorProto.FLOAT:
        return False
    if len(graph.constants[table].dims) != 2 or attribute_of(node, "axis", 0) != 0:
        return False
    seen: set[str] = set()
    pending = list(node.output)
    while pending:
        for reader in graph.consumers(pending.pop()):
            if reader.op_type in COMPUTING:
                return True
            pending += [name for name in reader.output if name and name not in seen]
            seen.update(reader.output)
    return False


def _feeds_only_magnifying(graph: Graph, node: NodeProto) -> bool:
    """Return whether every path from a layer's output passes through an operator that magnifies errors."""
    seen: set[str] = set()
    pending = list(node.output[:1])
    has_magnifying = False
    while pending:
        name = pending.pop()
        if name in graph.outputs or name in graph.captured:
            return False
        for reader in graph.consumers(name):
            is_square = reader.op_type == "Mul" and len(set(reader.input)) == 1
            if is_square or (reader.op_type in _ERROR_MAGNIFYING and not _is_softmax(graph, reader)):
                has_magnifying = True
            elif reader.op_type in WEIGHTED or reader.op_type == "Exp":
                return False
            elif reader.output[0] not in seen:
                seen.update(reader.output)
                pending += [each for each in reader.output if each]
    return has_magnifying


def _is_softmax(graph: Graph, node: NodeProto) -> bool:
    """Return whether an Exp belongs to a softmax that is written as Exp, ReduceSum and Div or Mul."""
    readers = {reader.op_type for reader in graph.consumers(node.output[0])}
    return node.op_type == "Exp" and "ReduceSum" in readers and bool(readers & {"Div", "Mul"})
