"""Helpers for ONNX graphs: ``Graph``, families of operators, and functions for tensors and nodes.

Codes are stored in the smallest ONNX type that holds them:

====== =============== ===========================================
bits   type            in memory
====== =============== ===========================================
2..4   INT4, UINT4     two codes per byte, the first in the low half
5..8   INT8, UINT8
9..16  INT16, UINT16
fp8    FLOAT8E4M3FN..  one byte per code
====== =============== ===========================================
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from heapq import heapify, heappop, heappush
from typing import Any

import numpy as np
from numpy.typing import NDArray
from onnx import AttributeProto, GraphProto, ModelProto, NodeProto, TensorProto, ValueInfoProto, helper, numpy_helper

from detent.errors import FileFormatError, UnsupportedError
from detent.formats import Format
from detent.packing import pack

__all__ = [
    "BITS",
    "CODE_OPERATORS",
    "DEQUANTIZE",
    "DYNAMIC_QUANTIZE",
    "INTEGER_KERNELS",
    "INTEGER_MATMUL",
    "MAIN",
    "MATMULS",
    "MOVING",
    "PASSING_CODES",
    "QUANTIZE",
    "QUANTIZERS",
    "WIDER",
    "Graph",
    "array_of",
    "attribute_of",
    "check_depth",
    "clear_notes",
    "describe",
    "element_range",
    "element_type",
    "interpolates",
    "is_depthwise",
    "is_integer_type",
    "make_tensor",
    "node_name",
    "reads",
    "rename_tensors",
    "sort_nodes",
    "subgraphs",
    "trace_back",
    "widened_constant",
]

Array = NDArray[Any]

# Families of operators; other modules combine them into further families.
MAIN = ("", "ai.onnx")  # names of the domain of ONNX's own operators
QUANTIZE, DEQUANTIZE = QUANTIZERS = ("QuantizeLinear", "DequantizeLinear")
DYNAMIC_QUANTIZE, INTEGER_MATMUL = "DynamicQuantizeLinear", "MatMulInteger"
MATMULS = ("MatMul", "Gemm")
MOVING = ("Flatten", "Reshape", "Slice", "Squeeze", "Transpose", "Unsqueeze")  # change shapes, not values
# Operators that only pick or repeat values, so codes and scale stay the same (Resize only in mode "nearest").
PASSING_CODES = (*MOVING, "MaxPool", "Split", "Resize", "DepthToSpace")
INTEGER_KERNELS = (
    *("ConvInteger", "DynamicQuantizeMatMul", INTEGER_MATMUL, "MatMulIntegerToFloat"),
    *("QGemm", "QLinearConv", "QLinearMatMul"),
)
# Operators whose names begin with one of these compute with codes: integer kernels of layers, QLinearAdd and others.
CODE_OPERATORS = (*INTEGER_KERNELS, "DynamicQuantize", "MatMulNBits", "QAttention", "QLinear")


def interpolates(node: NodeProto) -> bool:
    """Return whether a node is a Resize that computes new values instead of repeating values."""
    return node.op_type == "Resize" and bool(attribute_of(node, "mode", b"nearest") != b"nearest")


def is_depthwise(groups: int, shape: Sequence[int | None]) -> bool:
    """Return whether a convolution with a weight of shape ``shape`` computes one output channel per input channel."""
    return 1 < groups == shape[0] and shape[1] == 1


# Tensors

_SMALL: dict[int, int] = {
    TensorProto.INT4: 4,
    TensorProto.UINT4: 4,
    TensorProto.FLOAT4E2M1: 4,
    TensorProto.INT2: 2,
    TensorProto.UINT2: 2,
}
# The type to which a Cast widens 4-bit codes, so that integer kernels can read them.
WIDER: dict[int, int] = {TensorProto.INT4: TensorProto.INT8, TensorProto.UINT4: TensorProto.UINT8}
BITS = {
    kind: _SMALL.get(kind) or helper.tensor_dtype_to_np_dtype(kind).itemsize * 8
    for kind in TensorProto.DataType.values()
    if kind not in {TensorProto.UNDEFINED, TensorProto.STRING}
}


def element_type(format: Format, min_bits: int = 4) -> int:
    """Return the smallest ONNX type that holds the codes of a format and has at least ``min_bits`` bits.

    Raises:
        UnsupportedError: ONNX has no such type.

    >>> from detent.formats import get_format
    >>> names = ("int2", "uint8", "int12", "float8_e5m2")
    >>> [TensorProto.DataType.Name(element_type(get_format(name))) for name in names]
    ['INT4', 'UINT8', 'INT16', 'FLOAT8E5M2']
    """
    name = format.onnx
    if format.is_integer:
        bits = next((bits for bits in (4, 8, 16) if bits >= max(format.bits, min_bits)), None)
        name = f"{'' if format.signed else 'U'}INT{bits}" if bits else ""
    if not name:
        raise UnsupportedError(f"ONNX has no type for the codes of {format.name}: use another format, such as int8")
    return int(TensorProto.DataType.Value(name))


def widened_constant(node: NodeProto | None, constants: Mapping[str, TensorProto]) -> str:
    """Return the name of the constant of 4-bit codes that ``node`` widens to 8 bits; "" for any other node.

    >>> codes = make_tensor("w", np.array([1, -2]), TensorProto.INT4)
    >>> [widened_constant(helper.make_node("Cast", ["w"], ["wide"], to=kind), {"w": codes})
    ...     for kind in (TensorProto.INT8, TensorProto.UINT8, TensorProto.FLOAT)]
    ['w', '', '']
    """
    if node is None or node.op_type != "Cast" or not node.input or node.input[0] not in constants:
        return ""
    wider = WIDER.get(constants[node.input[0]].data_type)
    return str(node.input[0]) if wider is not None and attribute_of(node, "to") == wider else ""


def is_integer_type(kind: int) -> bool:
    """Return whether an ONNX type is INT2..INT64 or UINT2..UINT64."""
    return str(TensorProto.DataType.Name(kind)).lstrip("U").startswith("INT")


def element_range(kind: int) -> tuple[int, int]:
    """Return the smallest and largest value of an integer type, for example -8 and 7 for INT4."""
    bits = BITS[kind]
    is_signed = TensorProto.DataType.Name(kind).startswith("INT")
    return (-(1 << (bits - 1)), (1 << (bits - 1)) - 1) if is_signed else (0, (1 << bits) - 1)


def make_tensor(name: str, values: Array, kind: int | None = None) -> TensorProto:
    """Make an initializer of the ONNX type ``kind``; if ``kind`` is None, use the type of the array.

    Raises:
        FileFormatError: values do not fit an integer type.

    >>> make_tensor("w", np.array([1, -2, 3]), TensorProto.INT4).raw_data.hex()
    'e103'
    """
    array = np.asarray(values)
    if kind is None:
        return numpy_helper.from_array(np.ascontiguousarray(array).reshape(array.shape), name)
    if is_integer_type(kind) and array.size:
        lo, hi = element_range(kind)
        if array.min() < lo or array.max() > hi:
            raise FileFormatError(
                f"{name}: codes from {array.min()} to {array.max()} do not fit the range of their type, {lo}..{hi}"
            )
    if kind in {TensorProto.INT4, TensorProto.UINT4}:
        stored = pack(array.ravel().astype(np.uint8) & 0xF, 4)
    else:
        stored = np.ascontiguousarray(array, helper.tensor_dtype_to_np_dtype(kind))
    return TensorProto(name=name, data_type=kind, dims=array.shape, raw_data=stored.tobytes())


def array_of(tensor: TensorProto) -> Array:
    """Return the values of a tensor; 2-bit and 4-bit integers become int8 or uint8.

    Raises:
        FileFormatError: the tensor cannot be read.

    >>> array_of(make_tensor("w", np.array([1, -2, 3]), TensorProto.INT4))
    array([ 1, -2,  3], dtype=int8)
    """
    try:
        array: Array = numpy_helper.to_array(tensor)
    except (TypeError, ValueError) as error:
        raise FileFormatError(f"tensor {tensor.name!r} cannot be read: {error}") from error
    if tensor.data_type in _SMALL and tensor.data_type != TensorProto.FLOAT4E2M1:
        return array.astype(np.int8 if TensorProto.DataType.Name(tensor.data_type).startswith("INT") else np.uint8)
    return array


# Nodes and subgraphs

MAX_NESTED_GRAPHS = 30  # protobuf allows 100 nested messages, and each subgraph needs three


def node_name(node: NodeProto) -> str:
    """Return the name of a node; for an Add without a name and with the output y, return Add_y."""
    return node.name or f"{node.op_type}_{node.output[0] if node.output else ''}"


def describe(node: NodeProto) -> str:
    """Describe a node in a message: its operator and name, or its outputs if it has no name."""
    return f"{node.op_type} {node.name or ', '.join(node.output)}"


def attribute_of(node: NodeProto, name: str, default: Any = None) -> Any:  # noqa: ANN401 - attributes have any type
    """Return the value of a node's attribute, or ``default`` if the node lacks the attribute."""
    for attribute in node.attribute:
        if attribute.name == name:
            return helper.get_attribute_value(attribute)
    return default


def subgraphs(node: NodeProto) -> Iterator[GraphProto]:
    """Yield the subgraphs of a node: the branches of an If, or the body of a Loop or Scan."""
    for attribute in node.attribute:
        if attribute.type == AttributeProto.GRAPH:
            yield attribute.g
        yield from attribute.graphs


def _all_subgraphs(node: NodeProto) -> Iterator[GraphProto]:
    """Yield the subgraphs of a node at any depth."""
    for body in subgraphs(node):
        yield body
        for inner in body.node:
            yield from _all_subgraphs(inner)


def clear_notes(graph: GraphProto) -> None:
    """Remove doc strings and metadata of nodes and initializers, which may contain stack traces of exporters."""
    for part in (*graph.node, *graph.initializer):
        del part.metadata_props[:]
        part.ClearField("doc_string")
    for node in graph.node:
        for body in subgraphs(node):
            clear_notes(body)


def check_depth(graph: GraphProto) -> None:
    """Raise FileFormatError if subgraphs are nested deeper than a file can store."""
    level = [graph]
    for _ in range(MAX_NESTED_GRAPHS):
        level = [inner for each in level for node in each.node for inner in subgraphs(node)]
    if level:
        raise FileFormatError(
            f"subgraphs are nested more than {MAX_NESTED_GRAPHS} levels deep, which ONNX files cannot store: "
            "export the model with fewer nested subgraphs"
        )


def reads(node: NodeProto) -> Iterator[str]:
    """Yield the names of the tensors that a node and its subgraphs read from the graph around the node."""
    yield from filter(None, node.input)
    for graph in subgraphs(node):
        inside = {value.name for value in graph.input} | {tensor.name for tensor in graph.initializer}
        for inner in graph.node:
            yield from (name for name in reads(inner) if name not in inside)
            inside.update(inner.output)
        yield from (value.name for value in graph.output if value.name not in inside)


def rename_tensors(nodes: Iterable[NodeProto], new: Mapping[str, str]) -> None:
    """Rename tensors in nodes and their subgraphs, except where a subgraph defines the name itself.

    >>> node = NodeProto(op_type="Add", input=["a", "b"], output=["c"])
    >>> rename_tensors([node], {"a": "x"})
    >>> list(node.input)
    ['x', 'b']
    """
    for node in nodes if new else ():
        for names in (node.input, node.output):
            names[:] = [new.get(name, name) for name in names]
        for body in subgraphs(node):
            defined = {name for each in body.node for name in each.output}
            defined |= {each.name for each in (*body.input, *body.initializer)}
            inner = {name: to for name, to in new.items() if name not in defined}
            rename_tensors(body.node, inner)
            for value in body.output:
                value.name = inner.get(value.name, value.name)


def trace_back(name: str, producer: Callable[[str], NodeProto | None], operators: Sequence[str]) -> str:
    """Follow a tensor back through the first inputs of its nodes, as long as their types are in ``operators``."""
    node = producer(name)
    while node is not None and node.op_type in operators:
        name = node.input[0]
        node = producer(name)
    return name


def sort_nodes(graph: GraphProto) -> None:
    """Sort the nodes of a graph and its subgraphs topologically; a sorted graph is not changed.

    Raises:
        FileFormatError: there is a cycle, or two nodes write tensors with the same name.
    """
    for node in graph.node:
        for inner in subgraphs(node):
            sort_nodes(inner)
    writer: dict[str, int] = {}
    for i, node in enumerate(graph.node):
        for name in node.output:
            if name and writer.setdefault(name, i) != i:
                first = describe(graph.node[writer[name]])
                raise FileFormatError(
                    f"two nodes write tensor {name!r}: {first} and {describe(node)}; rename one of the outputs"
                )
    needs = [{writer[name] for name in reads(node) if name in writer} for node in graph.node]
    if all(max(before, default=-1) < i for i, before in enumerate(needs)):
        return
    nodes = [NodeProto.FromString(graph.node[i].SerializeToString()) for i in _sorted(graph, needs)]
    del graph.node[:]
    graph.node.extend(nodes)


def _sorted(graph: GraphProto, needs: list[set[int]]) -> list[int]:
    followers: list[list[int]] = [[] for _ in needs]
    for i, before in enumerate(needs):
        for j in before:
            followers[j].append(i)
    missing = [len(before) for before in needs]
    ready = [i for i, count in enumerate(missing) if not count]
    heapify(ready)
    order = []
    while ready:
        i = heappop(ready)
        order.append(i)
        for j in followers[i]:
            missing[j] -= 1
            if not missing[j]:
                heappush(ready, j)
    if len(order) < len(needs):
        stuck = next(i for i, count in enumerate(missing) if count)
        raise FileFormatError(f"the graph is cyclic: {describe(graph.node[stuck])} depends on its own output")
    return order


class Graph:
    """The main graph of a model, with an index of its names; changes are made in place.

    ``constants`` maps names to initializers. ``inputs`` lists the names of inputs without an initializer. ``captured``
    contains the names of tensors that subgraphs read from the main graph. ``finish`` writes changes into the model.

    >>> from onnx import parser
    >>> graph = Graph(parser.parse_model(
    ...     '<ir_version: 8, opset_import: ["" : 17]> g (float[1] x) => (float[1] y) { t = Relu(x) y = Abs(t) }'))
    >>> graph.producer("t").op_type, [node.op_type for node in graph.consumers("t")], graph.fresh("t")
    ('Relu', ['Abs'], 't_1')
    >>> graph.insert([NodeProto(op_type="Neg", input=["t"], output=["n"])])
    >>> graph.set_input(graph.consumers("t")[0], 0, "n")
    >>> [node.op_type for node in graph.finish().graph.node]
    ['Relu', 'Neg', 'Abs']
    """

    node_name = staticmethod(node_name)

    def __init__(self, model: ModelProto) -> None:
        self.model = model
        self._proto = model.graph
        self.refresh()

    def refresh(self) -> None:
        """Update the index of names; call this method after other code has changed the model."""
        graph = self._proto
        self.nodes: list[NodeProto] = list(graph.node)
        self.constants: dict[str, TensorProto] = {tensor.name: tensor for tensor in graph.initializer}
        self._written = dict(self.constants)  # initializers in the model, before changes
        self.inputs = [value.name for value in graph.input if value.name not in self.constants]
        self.outputs = [value.name for value in graph.output]
        self._infos: dict[str, ValueInfoProto] = {
            value.name: value for part in (graph.value_info, graph.input, graph.output) for value in part
        }
        self._producers: dict[str, NodeProto] = {}
        self._consumers: dict[str, list[NodeProto]] = defaultdict(list)
        self.captured: set[str] = set()
        self._names = {*self.constants, *self._infos}
        for node in self.nodes:
            self._enter(node)

    def _enter(self, node: NodeProto) -> None:
        read = dict.fromkeys(reads(node))
        for name in read:
            self._consumers[name].append(node)
        self._producers.update((name, node) for name in node.output if name)
        self._names.update((node.name, *node.output))
        for inner in subgraphs(node):
            self.captured.update(read.keys() - set(node.input))
            self._names.update(name for each in inner.node for name in (*each.output, *reads(each)))

    def producer(self, name: str) -> NodeProto | None:
        """Return the node that computes a tensor, or None for inputs and constants."""
        return self._producers.get(name)

    def consumers(self, name: str) -> list[NodeProto]:
        """Return the nodes that read a tensor, directly or in their subgraphs."""
        return self._consumers.get(name, [])

    def array(self, name: str) -> Array:
        """Return the values of a constant."""
        return array_of(self.constants[name])

    def code_constant(self, name: str) -> str:
        """Return the constant of 4-bit codes that a Cast widens to the tensor ``name``, or ``name`` without a Cast."""
        return widened_constant(self.producer(name), self.constants) or name

    def shape(self, name: str) -> tuple[int | None, ...] | None:
        """Return the shape of a tensor, with None for each size that varies; return None if the shape is unknown."""
        if name in self.constants:
            return tuple(self.constants[name].dims)
        info = self._infos.get(name)
        if info is None or not info.type.tensor_type.HasField("shape"):
            return None
        return tuple(size.dim_value if size.HasField("dim_value") else None for size in info.type.tensor_type.shape.dim)

    def kind(self, name: str) -> int:
        """Return the element type of a tensor, 0 if unknown."""
        if name in self.constants:
            return self.constants[name].data_type
        info = self._infos.get(name)
        return 0 if info is None else info.type.tensor_type.elem_type

    @property
    def opset(self) -> int:
        """Opset of the main ONNX domain."""
        versions = [entry.version for entry in self.model.opset_import if entry.domain in MAIN]
        if not versions:
            raise UnsupportedError(
                "the model imports no opset of the main ONNX domain, expected one: export the model again"
            )
        return int(max(versions))

    def fresh(self, stem: str) -> str:
        """Reserve an unused name: ``stem``, or ``<stem>_<number>`` if ``stem`` or ``<stem>_node`` is in use."""
        name, count = stem, 0
        while name in self._names or f"{name}_node" in self._names:
            count += 1
            name = f"{stem}_{count}"
        self._names.add(name)
        return name

    def add_constant(self, stem: str, values: Array, kind: int | None = None) -> str:
        """Add an initializer under an unused name, and return the name."""
        name = self.fresh(stem)
        self.constants[name] = make_tensor(name, values, kind)
        return name

    def insert(self, nodes: Iterable[NodeProto]) -> None:
        """Add nodes; ``finish`` sorts the nodes into the graph."""
        for node in nodes:
            self.nodes.append(node)
            self._enter(node)

    def remove(self, nodes: Iterable[NodeProto]) -> None:
        """Remove nodes."""
        removed = {id(node): node for node in nodes}
        self.nodes = [node for node in self.nodes if id(node) not in removed]
        for node in removed.values():
            self._forget(node)
            for name in node.output:
                if self._producers.get(name) is node:
                    del self._producers[name]

    def redirect(self, old: str, new: str, nodes: Iterable[NodeProto]) -> None:
        """Make nodes read ``new`` instead of ``old``; their subgraphs still read ``old``."""
        for node in list(nodes):
            if old not in node.input:
                continue
            for i, name in enumerate(node.input):
                if name == old:
                    node.input[i] = new
            if old not in set(reads(node)):
                self._consumers[old] = [each for each in self._consumers[old] if each is not node]
            if not any(each is node for each in self._consumers[new]):
                self._consumers[new].append(node)

    def set_input(self, node: NodeProto, position: int, name: str, outer: NodeProto | None = None) -> None:
        """Let a node read tensor ``name`` as its input number ``position``.

        ``outer`` is the node of the main graph whose subgraph contains ``node``; None if ``node`` is in the main graph.
        """
        reader = node if outer is None else outer
        self._forget(reader)
        while len(node.input) <= position:
            node.input.append("")
        node.input[position] = name
        for each in dict.fromkeys(reads(reader)):
            self._consumers[each].append(reader)
        if outer is not None:
            self.captured.add(name)

    def replace_in_subgraph(self, node: NodeProto, new: Sequence[NodeProto], outer: NodeProto) -> None:
        """Put the nodes ``new`` in the place of a node in a subgraph of ``outer``, a node of the main graph."""
        self._forget(outer)
        body = next(each for each in _all_subgraphs(outer) if any(node.output == other.output for other in each.node))
        place = next(i for i, other in enumerate(body.node) if node.output == other.output)
        del body.node[place]
        for i, each in enumerate(new):
            body.node.insert(place + i, each)
        for name in dict.fromkeys(reads(outer)):
            self._consumers[name].append(outer)
            if name not in outer.input:
                self.captured.add(name)

    def _forget(self, node: NodeProto) -> None:
        for name in dict.fromkeys(reads(node)):
            self._consumers[name] = [each for each in self._consumers[name] if each is not node]

    def rename(self, old: str, new: str) -> None:
        """Rename a tensor in the node that computes it; the caller updates the nodes that read it."""
        node = self._producers.pop(old)
        node.output[list(node.output).index(old)] = new
        self._producers[new] = node

    def drop_unread(self) -> list[str]:
        """Remove DequantizeLinear nodes and constants that nothing reads; return the names of the removed constants."""
        unread_nodes = [
            node
            for node in self.nodes
            if node.op_type == DEQUANTIZE and node.output[0] not in self.outputs and not self.consumers(node.output[0])
        ]
        self.remove(unread_nodes)
        needed = {*self.outputs, *(name for name, nodes in self._consumers.items() if nodes)}
        unread = [name for name in self.constants if name not in needed]
        for name in unread:
            del self.constants[name]
        return unread

    def finish(self) -> ModelProto:
        """Write all changes into the model, sort its nodes, and return the model."""
        graph = self._proto
        nodes = [NodeProto.FromString(node.SerializeToString()) for node in self.nodes]
        del graph.node[:]
        graph.node.extend(nodes)
        # Weights may be large, so unchanged weights are not copied.
        stays = {name for name, tensor in self._written.items() if self.constants.get(name) is tensor}
        for i in reversed(range(len(graph.initializer))):
            if graph.initializer[i].name not in stays:
                del graph.initializer[i]
        graph.initializer.extend(tensor for name, tensor in self.constants.items() if name not in stays)
        sort_nodes(graph)
        self.refresh()
        return self.model
