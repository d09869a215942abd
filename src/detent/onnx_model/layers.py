"""Layers: which nodes of a graph have weights, where these are, and what runtimes can do with them.

============== ======= ================= ================================================
operator       weight  output channels   known to rules as
============== ======= ================= ================================================
Conv           1       axis 0            Conv, Conv1d, Conv2d, Conv3d
ConvTranspose  1       axis 1            ConvTranspose, ConvTranspose1d ..
MatMul         1       axis 1            MatMul, Linear
Gemm           1       axis 1, 0 if transposed  Gemm, Linear
Gather         0       axis 0            Gather, Embedding
============== ======= ================= ================================================
"""

from collections.abc import Iterator
from dataclasses import dataclass

from onnx import NodeProto, TensorProto

from detent.onnx_model.graph import MAIN, Graph, attribute_of, subgraphs

__all__ = ["Layer", "layers_of"]

MATRIX = 2
RECURRENT = ("LSTM", "GRU", "RNN")
WEIGHTED = ("Conv", "ConvTranspose", "MatMul", "Gemm", "Gather", *RECURRENT)
_SENSITIVE = ("Pow", "Sqrt", "Log", "Exp", "Reciprocal")
_DIMENSIONS = {3: "1d", 4: "2d", 5: "3d"}


@dataclass(frozen=True, eq=False)
class Layer:
    """A node with a weight.

    Attributes:
        node: the node.
        name: its name.
        types: the names that rules may call it by.
        data: the tensor that comes in.
        weight: the name of its weight.
        shape: the weight's shape.
        axis: the weight's axis of output channels.
        bias: the name of its bias, "" where it has none.
        depthwise: whether each channel is convolved by itself into one.
        reason: why it cannot be quantized, "" where it can.

    >>> Layer(NodeProto(), "fc", ("MatMul",), "x", "w", (2, 3), 1).inner
    2
    """

    node: NodeProto
    name: str
    types: tuple[str, ...]
    data: str = ""
    weight: str = ""
    shape: tuple[int, ...] = ()
    axis: int = 0
    bias: str = ""
    depthwise: bool = False
    reason: str = ""

    @property
    def inner(self) -> int:
        """How many products make one output."""
        count = 1
        for axis, size in enumerate(self.shape):
            count *= size if axis != self.axis else 1
        return count


def layers_of(graph: Graph) -> Iterator[Layer]:
    """All nodes with weights, in order, and those that would have some if they were constants.

    >>> from onnx import parser
    >>> graph = Graph(parser.parse_model('''<ir_version: 8, opset_import: ["" : 17]>
    ...     g (float[1,1] x) => (float[1,1] y) <float[1,1] w = {3.0}> { y = MatMul(x, w) }'''))
    >>> [(layer.types, layer.weight, layer.axis, layer.reason) for layer in layers_of(graph)]
    [(('MatMul', 'Linear'), 'w', 1, '')]
    """
    for node in graph.nodes:
        yield from _inside(node, graph.node_name(node))
        if node.op_type in WEIGHTED and node.domain in MAIN:
            found = _layer(graph, node)
            if found is not None:
                yield found


def _inside(node: NodeProto, name: str) -> Iterator[Layer]:
    """The layers in the bodies of a node, and in bodies within them, which are listed and left alone."""
    for body in subgraphs(node):
        for inner in body.node:
            own = f"{name}/{inner.name or inner.op_type + '_' + ''.join(inner.output[:1])}"
            if inner.op_type in WEIGHTED and inner.op_type != "Gather":
                yield Layer(inner, own, (inner.op_type,), reason=f"inside the body of {node.op_type} {name!r}")
            yield from _inside(inner, own)


def _layer(graph: Graph, node: NodeProto) -> Layer | None:
    name, op = graph.node_name(node), node.op_type
    if op in RECURRENT:
        return Layer(node, name, (op,), reason="recurrent layers stay float")
    place = 0 if op == "Gather" else 1
    weight = node.input[place]
    if op == "Gather" and not _is_table(graph, node):
        return None
    made = graph.producer(weight)
    if made is not None and made.op_type == "DequantizeLinear":
        return Layer(node, name, (op,), reason="its weight is quantized already")
    if weight not in graph.constants:
        constant = node.input[0] in graph.constants
        return Layer(
            node, name, (op,), reason="its constant comes first" if constant else "a product of two activations"
        )
    if graph.kind(weight) != TensorProto.FLOAT:
        kind = TensorProto.DataType.Name(graph.kind(weight))
        return Layer(node, name, (op,), reason=f"its weight is {kind}, not FLOAT")
    shape = tuple(graph.constants[weight].dims)
    reason = _misfit(node, shape)
    if not reason and op != "Gather" and _feeds_only_sensitive(graph, node):
        reason = "feeds only powers, roots, exponentials or logarithms, which magnify its error"
    axis = {"Conv": 0, "ConvTranspose": 1, "MatMul": 1, "Gather": 0}.get(
        op, 0 if attribute_of(node, "transB", 0) else 1
    )
    bias = node.input[2] if op in {"Conv", "ConvTranspose", "Gemm"} and len(node.input) > MATRIX else ""
    groups = int(attribute_of(node, "group", 1))
    return Layer(
        node,
        name,
        _types(op, shape),
        node.input[1 - place],
        weight,
        shape,
        axis,
        bias,
        op == "Conv" and 1 < groups == shape[0] and shape[1] == 1,
        reason,
    )


def _types(op: str, shape: tuple[int, ...]) -> tuple[str, ...]:
    if op in {"Conv", "ConvTranspose"}:
        return op, f"{op}{_DIMENSIONS.get(len(shape), 'Nd')}"
    return op, {"MatMul": "Linear", "Gemm": "Linear", "Gather": "Embedding"}[op]


def _is_table(graph: Graph, node: NodeProto) -> bool:
    """Whether a Gather looks rows of floats up."""
    table = node.input[0]
    if table not in graph.constants or graph.kind(table) != TensorProto.FLOAT:
        return False
    rows = len(graph.constants[table].dims) == MATRIX and attribute_of(node, "axis", 0) == 0
    return rows and _leads_to_layer(graph, node)


def _leads_to_layer(graph: Graph, node: NodeProto) -> bool:
    """Whether a layer reads what is made of a node's result: anchors at the end of a detector are no embeddings."""
    seen: set[str] = set()
    pending = list(node.output)
    while pending:
        for reader in graph.consumers(pending.pop()):
            if reader.op_type in WEIGHTED and reader.op_type != "Gather":
                return True
            pending += [name for name in reader.output if name and name not in seen]
            seen.update(reader.output)
    return False


def _misfit(node: NodeProto, shape: tuple[int, ...]) -> str:
    if node.op_type in {"MatMul", "Gemm"} and len(shape) != MATRIX:
        return f"its weight has {len(shape)} axes, expected 2"
    if node.op_type == "Gemm":
        plain = attribute_of(node, "alpha", 1.0) == 1.0 and attribute_of(node, "beta", 1.0) == 1.0
        if not plain or attribute_of(node, "transA", 0):
            return "a Gemm with alpha, beta or a transposed input"
    return ""


def _feeds_only_sensitive(graph: Graph, node: NodeProto) -> bool:
    """Whether all that is made of a layer's result goes through operators that magnify errors."""
    seen: set[str] = set()
    pending = list(node.output[:1])
    met = False
    while pending:
        name = pending.pop()
        if name in graph.outputs or name in graph.captured:
            return False
        for reader in graph.consumers(name):
            squares = reader.op_type == "Mul" and len(set(reader.input)) == 1
            if squares or (reader.op_type in _SENSITIVE and not _is_softmax(graph, reader)):
                met = True
            elif reader.op_type in WEIGHTED or reader.op_type == "Exp":
                return False
            elif reader.output[0] not in seen:
                seen.update(reader.output)
                pending += [each for each in reader.output if each]
    return met


def _is_softmax(graph: Graph, node: NodeProto) -> bool:
    """Whether an Exp is part of a softmax that is written out."""
    readers = {reader.op_type for reader in graph.consumers(node.output[0])}
    return node.op_type == "Exp" and "ReduceSum" in readers and bool(readers & {"Div", "Mul"})
