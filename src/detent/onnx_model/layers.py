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
LSTM, GRU, RNN 1 and 2 axis 1                   LSTM, GRU, RNN
============== ======= ======================== ================================

A recurrent node is two layers: ``<node>/W`` for the weights of its input, ``<node>/R`` for those of its state. Both
weights have three axes: directions, rows of gates, and columns.

A layer in a subgraph of If, Loop or Scan has the name ``<outer node>/<node>``. Its weight is a constant of the main
graph, if ``subgraph_weights`` could move it there.

Recurrent layers, layers in subgraphs, and layers that share their weight with a subgraph are weight-only. The exception
are MatMuls without a bias, whose inputs can be quantized, too (``has_integer_form``).

A MatMul of two activations, as in attention, is a layer without a weight. Rules match it as MatMul and
ActivationMatMul.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

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

__all__ = [
    "ACTIVATION_MATMUL",
    "QUANTIZED_ALREADY",
    "RECURRENT",
    "TWO_ACTIVATIONS",
    "WEIGHTED",
    "Layer",
    "NamedNode",
    "all_nodes",
    "layers_of",
]

CONVS = ("Conv", "ConvTranspose")
RECURRENT = ("LSTM", "GRU", "RNN")
COMPUTING = (*CONVS, *MATMULS, *RECURRENT)
WEIGHTED = (*COMPUTING, "Gather")
RECURRENT_WEIGHTS = {"W": 1, "R": 2}  # positions of the weights among the inputs of a recurrent node
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
    data: str = ""  # name of the activation that the layer reads; "" if the layer is recurrent or in a subgraph
    weight: str = ""  # name of the weight
    shape: tuple[int, ...] = ()  # shape of the weight
    axis: int = 0  # axis of the weight's output channels
    bias: str = ""  # name of the bias, "" without a bias
    depthwise: bool = False
    reason: str = ""  # why the layer cannot be quantized, "" if it can
    position: int = 1  # index of the weight among the node's inputs
    outer: NodeProto | None = None  # node of the main graph whose subgraph contains ``node``; None in the main graph
    is_weight_only: bool = False  # whether the layer has no integer kernel, except if has_integer_form is True
    has_integer_form: bool = False  # whether the input of a weight-only layer can be quantized
    second: str = ""  # name of the second activation of a matmul of two activations, "" for layers with a weight
    is_scanned: bool = False  # whether a layer with this weight is in a Scan
    reads_state: bool = False  # whether a layer with this weight reads a value that a Loop passes from step to step

    @property
    def activations(self) -> tuple[str, ...]:
        """Names of the activations that are quantized as inputs of the layer."""
        return (self.data, self.second) if self.second else (self.data,)

    @property
    def is_recurrent(self) -> bool:
        """Whether the layer is one of the two weights of an LSTM, GRU or RNN."""
        return self.node.op_type in RECURRENT

    def set_weight(self, graph: Graph, name: str) -> None:
        """Let the node read tensor ``name`` of the main graph as the layer's weight."""
        graph.set_input(self.node, self.position, name, self.outer)


class NamedNode(NamedTuple):
    """A node of the main graph or of a subgraph at any depth.

    Attributes:
        name: name of the node; in subgraphs, it begins with the names of the nodes around it.
        node: the node.
        outer: node of the main graph that contains it; None for a node of the main graph.
        parents: operators of the nodes around it, outermost first.
        carried: inputs of the subgraph that contains it: values that a Loop or Scan passes from step to step.
    """

    name: str
    node: NodeProto
    outer: NodeProto | None = None
    parents: tuple[str, ...] = ()
    carried: frozenset[str] = frozenset()


def all_nodes(nodes: Sequence[NodeProto]) -> Iterator[NamedNode]:
    """Yield nodes of a main graph in graph order, each after the nodes of its subgraphs."""
    for node in nodes:
        name = node_name(node)
        yield from _inner_nodes(NamedNode(name, node), node)
        yield NamedNode(name, node)


def _inner_nodes(around: NamedNode, outer: NodeProto) -> Iterator[NamedNode]:
    for body in subgraphs(around.node):
        carried = frozenset(value.name for value in body.input)
        for inner in body.node:
            parents = (*around.parents, around.node.op_type)
            each = NamedNode(f"{around.name}/{node_name(inner)}", inner, outer, parents, carried)
            yield each
            yield from _inner_nodes(each, outer)


def layers_of(graph: Graph) -> Iterator[Layer]:
    """Yield all layers in graph order, including those that cannot be quantized."""
    for each in all_nodes(graph.nodes):
        node = each.node
        if node.domain not in MAIN:
            continue
        if node.op_type in RECURRENT:
            yield from (_weight_only(graph, each, position, part) for part, position in RECURRENT_WEIGHTS.items())
        elif each.outer is not None and node.op_type in COMPUTING:
            yield _weight_only(graph, each, 1)
        elif each.outer is None and (
            node.op_type in COMPUTING or (node.op_type == "Gather" and _is_table(graph, node))
        ):
            yield _layer(graph, node)


def _layer(graph: Graph, node: NodeProto) -> Layer:
    name, op = node_name(node), node.op_type
    position = 0 if op == "Gather" else 1
    weight, data = node.input[position], node.input[1 - position]
    if op == "MatMul" and _is_activation(graph, weight) and _is_activation(graph, data):
        return Layer(node, name, (op, ACTIVATION_MATMUL), data, second=weight)
    reason = _weight_problem(graph, node, weight)
    if reason:
        return Layer(node, name, (op,), reason=reason, position=position)
    if weight in graph.captured and op != "Gather":
        return _weight_only(graph, NamedNode(name, node), position)
    shape = tuple(graph.constants[weight].dims)
    return Layer(
        node,
        name,
        _types(op, shape),
        data,
        weight,
        shape,
        axis=_channel_axis(node),
        bias=node.input[2] if op in {*CONVS, "Gemm"} and len(node.input) > 2 else "",
        depthwise=op == "Conv" and is_depthwise(attribute_of(node, "group", 1), shape),
        reason=_form_problem(graph, node, shape),
        position=position,
    )


def _has_bias(graph: Graph, matmul: NamedNode) -> bool:
    """Return whether a constant, or an input of the subgraph, is added to a MatMul in a subgraph.

    ONNX Runtime merges both to a Gemm if the data have two axes. The Gemm would run in float, and dequantize its weight
    in each step of a loop.
    """
    if matmul.outer is None:
        return False
    result = matmul.node.output[0]
    additions = (each.node for each in all_nodes([matmul.outer]) if each.node.op_type == "Add")
    added = {name for node in additions if result in node.input for name in node.input}
    return any(name in graph.constants or name in matmul.carried for name in added)


def _weight_only(graph: Graph, named: NamedNode, position: int, part: str = "") -> Layer:
    """Return a layer whose weight is dequantized before the node runs; ``part`` is "W" or "R" if it is recurrent."""
    node, op = named.node, named.node.op_type
    name = f"{named.name}/{part}" if part else named.name
    weight = node.input[position] if len(node.input) > position else ""
    reason = _weight_problem(graph, node, weight)
    if reason and named.parents and reason != QUANTIZED_ALREADY:
        reason = f"inside a subgraph of {named.parents[-1]} {named.name.removesuffix(node_name(node))[:-1]!r}: {reason}"
    if reason:
        return Layer(node, name, (op,), reason=reason, position=position, outer=named.outer, is_weight_only=True)
    shape = tuple(graph.constants[weight].dims)
    readers = [each for each in all_nodes(graph.consumers(weight)) if weight in each.node.input]
    has_integer_form = all(reader.node.op_type == "MatMul" and not _has_bias(graph, reader) for reader in readers)
    return Layer(
        node,
        name,
        (op,) if part else _types(op, shape),
        node.input[0] if has_integer_form and named.outer is None else "",
        weight=weight,
        shape=shape,
        axis=1 if part else _channel_axis(node),
        reason=_shape_problem(op, shape),
        position=position,
        outer=named.outer,
        is_weight_only=True,
        has_integer_form=has_integer_form,
        is_scanned=any("Scan" in reader.parents for reader in readers),
        reads_state=any(reader.node.input[0] in reader.carried for reader in readers),
    )


def _channel_axis(node: NodeProto) -> int:
    """Return the axis of a weight's output channels."""
    op = node.op_type
    return 0 if op in {"Conv", "Gather"} or (op == "Gemm" and attribute_of(node, "transB", 0)) else 1


def _types(op: str, shape: tuple[int, ...]) -> tuple[str, ...]:
    if op in CONVS:
        return op, f"{op}{_DIMENSIONS.get(len(shape), 'Nd')}"
    return op, "Embedding" if op == "Gather" else "Linear"


def _is_activation(graph: Graph, name: str) -> bool:
    """Return whether a tensor is computed in float, and is neither a constant nor a dequantized weight."""
    producer = graph.producer(name)
    is_converted = producer is not None and producer.op_type in {DEQUANTIZE, "Cast"}
    if producer is not None and is_converted and graph.code_constant(producer.input[0]) in graph.constants:
        return False
    return name not in graph.constants and graph.kind(name) in {TensorProto.UNDEFINED, TensorProto.FLOAT}


def _weight_problem(graph: Graph, node: NodeProto, weight: str) -> str:
    """Return why the weight of a node is not a float constant, or "" if the weight is a float constant."""
    producer = graph.producer(weight)
    if producer is not None and producer.op_type == DEQUANTIZE:
        return QUANTIZED_ALREADY
    if producer is not None and producer.op_type == "Cast" and producer.input[0] in graph.constants:
        return f"its weight is stored as {TensorProto.DataType.Name(graph.kind(producer.input[0]))}"
    if weight not in graph.constants:
        if node.op_type in RECURRENT:
            return "its weight is computed, not constant"
        is_left = node.input[0] in graph.constants
        return "constant on the left (W @ x); only x @ W is supported" if is_left else TWO_ACTIVATIONS
    if graph.kind(weight) != TensorProto.FLOAT:
        return f"its weight is {TensorProto.DataType.Name(graph.kind(weight))}, not FLOAT"
    return ""


def _shape_problem(op: str, shape: tuple[int, ...]) -> str:
    """Return why a weight of this shape cannot be quantized, or "" if it can."""
    if 0 in shape:
        return f"its weight is empty (shape {shape})"
    expected = 3 if op in RECURRENT else 2 if op in MATMULS else len(shape)
    return f"its weight has {len(shape)} axes, expected {expected}" if len(shape) != expected else ""


def _form_problem(graph: Graph, node: NodeProto, shape: tuple[int, ...]) -> str:
    """Return why a layer with a float weight cannot be quantized, or "" if the layer can be quantized."""
    if problem := _shape_problem(node.op_type, shape):
        return problem
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
