"""Graph: a model's main graph with its names looked up, and changes that keep them right.

Tensors: arrays as ONNX initializers, and back.

====== =============== ===========================================
bits   type            in memory
====== =============== ===========================================
2..4   INT4, UINT4     two codes per byte, the first in the low half
5..8   INT8, UINT8
9..16  INT16, UINT16
fp8    FLOAT8E4M3FN..  their bytes
====== =============== ===========================================

Order: nodes of a graph so that each comes after those it reads from.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from heapq import heapify, heappop, heappush
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray
from onnx import AttributeProto, GraphProto, ModelProto, NodeProto, TensorProto, ValueInfoProto, helper, numpy_helper

from detent.errors import FileFormatError, UnsupportedError
from detent.formats import Format
from detent.packing import pack

__all__ = [
    "BITS",
    "DEQUANTIZE",
    "INTEGER_KERNELS",
    "MAIN",
    "MOVING",
    "QUANTIZE",
    "QUANTIZERS",
    "Graph",
    "array_of",
    "attribute_of",
    "check_depth",
    "element_range",
    "element_type",
    "make_tensor",
    "node_name",
    "reads",
    "sort_nodes",
    "subgraphs",
    "trace_back",
]

Array = NDArray[Any]
_SMALL: dict[int, int] = {
    TensorProto.INT4: 4,
    TensorProto.UINT4: 4,
    TensorProto.FLOAT4E2M1: 4,
    TensorProto.INT2: 2,
    TensorProto.UINT2: 2,
}


def _bits(kind: int) -> int:
    return _SMALL.get(kind) or helper.tensor_dtype_to_np_dtype(kind).itemsize * 8


BITS = {
    kind: _bits(kind)
    for kind in TensorProto.DataType.values()
    if kind not in {TensorProto.UNDEFINED, TensorProto.STRING}
}
_INTEGERS = {
    (4, True): TensorProto.INT4,
    (4, False): TensorProto.UINT4,
    (8, True): TensorProto.INT8,
    (8, False): TensorProto.UINT8,
    (16, True): TensorProto.INT16,
    (16, False): TensorProto.UINT16,
}
_NARROW = {TensorProto.INT4: ml_dtypes.int4, TensorProto.UINT4: ml_dtypes.uint4}


def element_type(format: Format, least: int = 4) -> int:
    """The smallest ONNX type that holds the codes of a format.

    Args:
        format: of the codes.
        least: bits; 8 keeps codes of few bits out of the 4-bit types, which some kernels do not take.

    Raises:
        UnsupportedError: ONNX has no such type.

    >>> from detent.formats import get_format
    >>> names = ("int2", "uint8", "int12", "float8_e5m2")
    >>> [TensorProto.DataType.Name(element_type(get_format(name))) for name in names]
    ['INT4', 'UINT8', 'INT16', 'FLOAT8E5M2']
    """
    if format.is_integer:
        width = next((bits for bits in (4, 8, 16) if bits >= max(format.bits, least)), None)
        if width is not None:
            return _INTEGERS[width, format.signed]
    elif format.onnx:
        return int(TensorProto.DataType.Value(format.onnx))
    raise UnsupportedError(f"ONNX has no type for the codes of {format.name}")


def element_range(kind: int) -> tuple[int, int]:
    """The smallest and largest value of an integer type.

    >>> element_range(TensorProto.INT4)
    (-8, 7)
    """
    bits, signed = BITS[kind], TensorProto.DataType.Name(kind).startswith("INT")
    return (-(1 << (bits - 1)), (1 << (bits - 1)) - 1) if signed else (0, (1 << bits) - 1)


def make_tensor(name: str, values: Array, kind: int | None = None) -> TensorProto:
    """An initializer.

    Args:
        name: its name.
        values: numbers; those of integer types must fit.
        kind: the ONNX type, None that of the array.

    >>> make_tensor("w", np.array([1, -2, 3]), TensorProto.INT4).raw_data.hex()
    'e103'
    """
    given = np.asarray(values)
    if kind is None:
        return numpy_helper.from_array(np.ascontiguousarray(given).reshape(given.shape), name)
    tensor = TensorProto(name=name, data_type=kind, dims=given.shape)
    if TensorProto.DataType.Name(kind).lstrip("U").startswith("INT") and given.size:
        low, high = element_range(kind)
        if given.min() < low or given.max() > high:
            raise FileFormatError(f"{name}: codes from {given.min()} to {given.max()} do not fit {low}..{high}")
    if kind in _NARROW:
        tensor.raw_data = pack(given.ravel().astype(np.uint8) & 0xF, 4).tobytes()
        return tensor
    dtype = helper.tensor_dtype_to_np_dtype(kind)
    tensor.raw_data = np.ascontiguousarray(given, dtype).tobytes()
    return tensor


def array_of(tensor: TensorProto) -> Array:
    """The values of a tensor; 4-bit ones as int8 and uint8.

    >>> array_of(make_tensor("w", np.array([1, -2, 3]), TensorProto.INT4))
    array([ 1, -2,  3], dtype=int8)
    """
    try:
        found: Array = numpy_helper.to_array(tensor)
    except (TypeError, ValueError) as error:
        raise FileFormatError(f"tensor {tensor.name!r} cannot be read: {error}") from error
    if tensor.data_type in _SMALL and tensor.data_type != TensorProto.FLOAT4E2M1:
        return found.astype(np.int8 if TensorProto.DataType.Name(tensor.data_type).startswith("INT") else np.uint8)
    return found


MOST_NESTED = 30  # protocol buffers nest 100 messages, three per graph


def subgraphs(node: NodeProto) -> Iterator[GraphProto]:
    """The bodies of a node: the branches of an If, the body of a Loop or Scan.

    >>> list(subgraphs(NodeProto()))
    []
    """
    for attribute in node.attribute:
        if attribute.type == AttributeProto.GRAPH:
            yield attribute.g
        yield from attribute.graphs


def check_depth(graph: GraphProto) -> None:
    """Refuse graphs within graphs that are nested deeper than a file can hold.

    Raises:
        FileFormatError: there are such.

    >>> check_depth(GraphProto())
    """
    level = [graph]
    for _ in range(MOST_NESTED):
        level = [body for each in level for node in each.node for body in subgraphs(node)]
    if level:
        raise FileFormatError(f"the graph is nested more than {MOST_NESTED} deep, which no ONNX file can hold")


def reads(node: NodeProto) -> Iterator[str]:
    """The names that a node reads from its own graph, and what its bodies take from outside.

    >>> list(reads(NodeProto(input=["a", ""])))
    ['a']
    """
    yield from (name for name in node.input if name)
    for graph in subgraphs(node):
        known = {value.name for value in graph.input} | {tensor.name for tensor in graph.initializer}
        for inner in graph.node:
            yield from (name for name in reads(inner) if name not in known)
            known.update(inner.output)
        yield from (value.name for value in graph.output if value.name not in known)


def sort_nodes(graph: GraphProto) -> None:
    """Put the nodes into an order in which each comes after those it reads from; those in order stay as they are.

    Raises:
        FileFormatError: there is a circle, or two nodes write one name.

    >>> a, b = NodeProto(input=["x"], output=["y"], op_type="Relu"), NodeProto(input=["y"], output=["z"], op_type="Abs")
    >>> graph = GraphProto(node=[b, a])
    >>> sort_nodes(graph)
    >>> [node.op_type for node in graph.node]
    ['Relu', 'Abs']
    """
    for node in graph.node:
        for inner in subgraphs(node):
            sort_nodes(inner)
    writer = _writers(graph)
    needs = [{writer[name] for name in reads(node) if name in writer} for node in graph.node]
    if all(max(before, default=-1) < i for i, before in enumerate(needs)):
        return
    nodes = [NodeProto.FromString(graph.node[i].SerializeToString()) for i in _sorted(graph, needs)]
    del graph.node[:]
    graph.node.extend(nodes)


def _writers(graph: GraphProto) -> dict[str, int]:
    writer: dict[str, int] = {}
    for i, node in enumerate(graph.node):
        for name in node.output:
            if name and writer.setdefault(name, i) != i:
                other = graph.node[writer[name]]
                raise FileFormatError(f"two nodes write {name!r}, {_called(other)} and {_called(node)}")
    return writer


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
        raise FileFormatError(f"the graph is cyclic: {_called(graph.node[stuck])} waits for its own result")
    return order


def _called(node: NodeProto) -> str:
    return f"{node.op_type} {node.name or '->' + ', '.join(node.output)!r}"


MAIN = ("", "ai.onnx")
QUANTIZE, DEQUANTIZE = QUANTIZERS = ("QuantizeLinear", "DequantizeLinear")
MOVING = ("Flatten", "Reshape", "Slice", "Squeeze", "Transpose", "Unsqueeze")  # values stay, shapes change
INTEGER_KERNELS = (  # beginnings of the names of operators that compute with codes
    "ConvInteger",
    "DynamicQuantize",
    "MatMulInteger",
    "MatMulNBits",
    "QAttention",
    "QGemm",
    "QLinear",
)


def node_name(node: NodeProto) -> str:
    """The name of a node, or one made of its type and its result.

    >>> node_name(NodeProto(op_type="Add", output=["y"]))
    'Add_y'
    """
    return node.name or f"{node.op_type}_{node.output[0] if node.output else ''}"


def trace_back(name: str, producer: Callable[[str], NodeProto | None], operators: Sequence[str]) -> str:
    """The tensor before the nodes of those operators that lead to a tensor; each is followed by its first input.

    >>> nodes = {"b": NodeProto(op_type="Reshape", input=["a"]), "a": NodeProto(op_type="Relu", input=["x"])}
    >>> trace_back("b", nodes.get, MOVING)
    'a'
    """
    node = producer(name)
    while node is not None and node.op_type in operators:
        name = node.input[0]
        node = producer(name)
    return name


class Graph:
    """The nodes, tensors and names of a model, which is changed in place.

    Attributes:
        model: the model.
        constants: initializers by name.
        inputs: the names of the inputs that a caller gives, initializers among the declared ones left out.
        outputs: the names of the outputs.

    >>> import numpy as np
    >>> from onnx import parser
    >>> graph = Graph(parser.parse_model(
    ...     '<ir_version: 8, opset_import: ["" : 17]> g (float[1] x) => (float[1] y) { t = Relu(x) y = Abs(t) }'))
    >>> graph.producer("t").op_type, [node.op_type for node in graph.consumers("t")], graph.fresh("t")
    ('Relu', ['Abs'], 't_1')
    >>> graph.add_constant("one", np.ones(1, np.float32)), graph.array("one"), graph.shape("x"), graph.opset
    ('one', array([1.], dtype=float32), (1,), 17)
    >>> graph.insert([NodeProto(op_type="Neg", input=["t"], output=["n"])])
    >>> graph.set_input(graph.consumers("t")[0], 0, "n")
    >>> graph.redirect("x", "x", graph.nodes)
    >>> [node.op_type for node in graph.finish().graph.node], graph.kind("x"), graph.node_name(graph.nodes[0])
    (['Relu', 'Neg', 'Abs'], 1, 'Relu_t')
    >>> graph.remove([graph.producer("y")])
    >>> [node.op_type for node in graph.nodes], graph.captured, graph.drop_unread()
    (['Relu', 'Neg'], set(), ['one'])
    >>> graph.rename("n", "m")
    >>> graph.refresh()
    """

    def __init__(self, model: ModelProto) -> None:
        self.model = model
        self._proto = model.graph
        self.refresh()

    def refresh(self) -> None:
        """Look all names up once more, after changes that were made to the model itself."""
        graph = self._proto
        self.nodes: list[NodeProto] = list(graph.node)
        self.constants: dict[str, TensorProto] = {tensor.name: tensor for tensor in graph.initializer}
        self._written = dict(self.constants)  # those that the model holds
        self.inputs = [value.name for value in graph.input if value.name not in self.constants]
        self.outputs = [value.name for value in graph.output]
        self._infos: dict[str, ValueInfoProto] = {
            value.name: value for part in (graph.value_info, graph.input, graph.output) for value in part
        }
        self._index()

    def _index(self) -> None:
        self._producers: dict[str, NodeProto] = {}
        self._consumers: dict[str, list[NodeProto]] = defaultdict(list)
        self.captured: set[str] = set()  # what bodies of If, Loop and Scan read from here
        self._names = {*self.constants, *self._infos}
        for node in self.nodes:
            self._enter(node)

    def _enter(self, node: NodeProto) -> None:
        read = dict.fromkeys(reads(node))
        for name in read:
            self._consumers[name].append(node)
        self.captured.update(set(read) - set(node.input))
        self._producers.update((name, node) for name in node.output if name)
        self._names.update((node.name, *node.output))
        for inner in subgraphs(node):
            self._names.update(name for each in inner.node for name in (*each.output, *reads(each)))

    def producer(self, name: str) -> NodeProto | None:
        """The node that makes a tensor."""
        return self._producers.get(name)

    def consumers(self, name: str) -> list[NodeProto]:
        """The nodes that read a tensor, those whose bodies read it included."""
        return self._consumers.get(name, [])

    def array(self, name: str) -> NDArray[Any]:
        """The values of a constant."""
        return array_of(self.constants[name])

    def shape(self, name: str) -> tuple[int | None, ...] | None:
        """The shape of a tensor as far as it is known, with None for sizes that vary."""
        if name in self.constants:
            return tuple(self.constants[name].dims)
        info = self._infos.get(name)
        if info is None or not info.type.tensor_type.HasField("shape"):
            return None
        return tuple(size.dim_value if size.HasField("dim_value") else None for size in info.type.tensor_type.shape.dim)

    def kind(self, name: str) -> int:
        """The element type of a tensor, 0 where it is not known."""
        if name in self.constants:
            return self.constants[name].data_type
        info = self._infos.get(name)
        return 0 if info is None else info.type.tensor_type.elem_type

    @property
    def opset(self) -> int:
        """The version of ONNX's own operators."""
        found = [entry.version for entry in self.model.opset_import if entry.domain in MAIN]
        if not found:
            raise UnsupportedError("the model imports no operators of ONNX itself")
        return int(max(found))

    def fresh(self, stem: str) -> str:
        """A name that nothing has."""
        name, count = stem, 0
        while name in self._names:
            count += 1
            name = f"{stem}_{count}"
        self._names.add(name)
        return name

    def node_name(self, node: NodeProto) -> str:
        """The name of a node, or one made of its type and its result."""
        return node_name(node)

    def add_constant(self, stem: str, values: NDArray[Any], kind: int | None = None) -> str:
        """Add an initializer under a name like that; returns its name."""
        name = self.fresh(stem)
        self.constants[name] = make_tensor(name, values, kind)
        return name

    def insert(self, nodes: Iterable[NodeProto]) -> None:
        """Add nodes; ``finish`` puts them where they belong."""
        for node in nodes:
            self.nodes.append(node)
            self._enter(node)

    def remove(self, nodes: Iterable[NodeProto]) -> None:
        """Take nodes out."""
        gone = {id(node): node for node in nodes}
        self.nodes = [node for node in self.nodes if id(node) not in gone]
        for node in gone.values():
            self._forget(node)
            for name in node.output:
                if self._producers.get(name) is node:
                    del self._producers[name]

    def redirect(self, old: str, new: str, nodes: Iterable[NodeProto]) -> None:
        """Let nodes read another tensor; what their bodies read stays."""
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

    def set_input(self, node: NodeProto, place: int, name: str) -> None:
        """Let a node read a tensor in that place, and what it read there no longer."""
        self._forget(node)
        while len(node.input) <= place:
            node.input.append("")
        node.input[place] = name
        for each in dict.fromkeys(reads(node)):
            self._consumers[each].append(node)

    def _forget(self, node: NodeProto) -> None:
        for name in dict.fromkeys(reads(node)):
            self._consumers[name] = [each for each in self._consumers[name] if each is not node]

    def rename(self, old: str, new: str) -> None:
        """Let the node that makes a tensor make it under another name; those that read it are the caller's business."""
        node = self._producers.pop(old)
        node.output[list(node.output).index(old)] = new
        self._producers[new] = node

    def drop_unread(self) -> list[str]:
        """Remove constants that nothing reads; returns their names."""
        needed = {*self.outputs, *(name for name, nodes in self._consumers.items() if nodes)}
        unread = [name for name in self.constants if name not in needed]
        for name in unread:
            del self.constants[name]
        return unread

    def finish(self) -> ModelProto:
        """The model with all changes, its nodes in order."""
        graph = self._proto
        nodes = [NodeProto.FromString(node.SerializeToString()) for node in self.nodes]
        del graph.node[:]
        graph.node.extend(nodes)
        # Weights may be large: what stays is left where it is.
        stays = {name for name, tensor in self._written.items() if self.constants.get(name) is tensor}
        for i in reversed(range(len(graph.initializer))):
            if graph.initializer[i].name not in stays:
                del graph.initializer[i]
        graph.initializer.extend(tensor for name, tensor in self.constants.items() if name not in stays)
        sort_nodes(graph)
        self.refresh()
        return self.model


def attribute_of(node: NodeProto, name: str, default: Any = None) -> Any:  # noqa: ANN401 - of any type
    """The value of a node's attribute.

    >>> attribute_of(helper.make_node("Gemm", ["a", "b"], ["c"], alpha=2.0), "alpha")
    2.0
    """
    for attribute in node.attribute:
        if attribute.name == name:
            return helper.get_attribute_value(attribute)
    return default
