"""Graph: a model's main graph with its names looked up, and changes that keep them right."""

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

from numpy.typing import NDArray
from onnx import ModelProto, NodeProto, TensorProto, ValueInfoProto, helper

from detent.errors import UnsupportedError
from detent.qdq.order import reads, sort_nodes, subgraphs
from detent.qdq.tensors import array_of, make_tensor

__all__ = ["Graph", "attribute_of"]

MAIN = ("", "ai.onnx")


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
    >>> graph.give(graph.consumers("t")[0], 0, "n")
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
        """What a node is called: its name, or one made of its type and its result."""
        return node.name or f"{node.op_type}_{node.output[0] if node.output else ''}"

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

    def give(self, node: NodeProto, place: int, name: str) -> None:
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
