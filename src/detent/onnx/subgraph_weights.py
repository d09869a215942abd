"""Weights of layers in subgraphs of If, Loop and Scan: ``hoist_weights`` moves them into the main graph.

Exporters store such a weight in four ways. After this step, all of them are constants of the main graph, which the
layer reads by name:

- A constant of the subgraph, as an initializer or a Constant node.
- A constant of a graph around the subgraph; if that is the main graph, nothing changes.
- The result of nodes in the subgraph that read only constants and move or cast their values. For example, PyTorch
  reorders the gates of an LSTM in each branch of an If. The result is computed here, and the nodes are removed.
- A value that a Loop passes from one step to the next without changing it. The Loop then reads the constant directly.

Equal weights, such as those of two branches, are stored once. Nothing is rounded, so outputs stay the same.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from numpy.typing import NDArray
from onnx import GraphProto, ModelProto, NodeProto, TensorProto

from detent.onnx_model.graph import MAIN, MOVING, Graph, array_of, attribute_of, reads, rename_tensors, subgraphs
from detent.onnx_model.layers import COMPUTING, RECURRENT, RECURRENT_WEIGHTS, all_nodes

__all__ = ["hoist_weights"]

Array = NDArray[Any]
RunAlone = Callable[[ModelProto, list[str]], dict[str, Array]]
_CARRIED = 2  # first input of a Loop that is passed from step to step, after the number of steps and the condition
_EXACT = (*MOVING, "Identity", "Split", "Concat", "Gather", "Cast", "Shape")  # operators that do not round floats


def hoist_weights(graph: Graph, run_alone: RunAlone) -> None:
    """Move weights of layers in subgraphs into the main graph, and give these layers unique names.

    ``run_alone`` runs a model without inputs, and returns the named outputs.
    """
    if not any(_weights(node.node) for node in all_nodes(graph.nodes) if node.outer is not None):
        return
    for node in graph.nodes:
        _capture_carried(graph, node, lambda name: _is_read(graph, name))
    hoister = _Hoister(graph, run_alone)
    for node in graph.nodes:
        for body in subgraphs(node):
            hoister.visit(body, (), node)
    _name_layers(graph)
    graph.finish()


def _weights(node: NodeProto) -> list[int]:
    """Return the positions of the weights among the inputs of a node; [] if the node is not a layer."""
    if node.op_type not in COMPUTING or node.domain not in MAIN:
        return []
    positions = RECURRENT_WEIGHTS.values() if node.op_type in RECURRENT else [1]
    return [position for position in positions if len(node.input) > position]


# Values that a Loop does not change


def _is_read(graph: Graph, name: str) -> bool:
    return bool(graph.consumers(name)) or name in graph.outputs


def _capture_carried(graph: Graph, node: NodeProto, is_read: Callable[[str], bool]) -> None:
    """Let a Loop read weights by name, if it now passes them from step to step; subgraphs at any depth are included.

    ``is_read`` tells whether an output of the node is read.
    """
    if node.op_type == "Loop" and node.domain in MAIN:
        (body,) = subgraphs(node)
        for i in reversed(range(len(node.input) - _CARRIED)):
            name = node.input[_CARRIED + i]
            result = node.output[i] if i < len(node.output) else ""
            if name in graph.constants and not (result and is_read(result)) and _is_unchanged_weight(body, i):
                rename_tensors(body.node, {body.input[_CARRIED + i].name: name})
                graph.set_input(node, _CARRIED + i, "")
                del node.input[_CARRIED + i], body.input[_CARRIED + i], body.output[1 + i]
                if i < len(node.output):
                    del node.output[i]
    for body in subgraphs(node):
        for inner in body.node:
            _capture_carried(graph, inner, lambda name, body=body: _is_read_in(body, name))  # type: ignore[misc]


def _is_unchanged_weight(body: GraphProto, index: int) -> bool:
    """Whether a carried value is the weight of a layer in the body, and the body only passes it on."""
    name, results = body.input[_CARRIED + index].name, [value.name for value in body.output]
    is_weight = any(node.input[i] == name for node in body.node for i in _weights(node))
    return is_weight and results[1 + index] == name and results.count(name) == 1


def _is_read_in(body: GraphProto, name: str) -> bool:
    return any(name in reads(node) for node in body.node) or name in {value.name for value in body.output}


# Constants of subgraphs


class _Scope(NamedTuple):
    """A subgraph, its constants, and the nodes that compute its tensors, by tensor name."""

    body: GraphProto
    constants: dict[str, TensorProto]
    producers: dict[str, NodeProto]

    @classmethod
    def of(cls, body: GraphProto) -> "_Scope":
        constants = {tensor.name: tensor for tensor in body.initializer}
        producers = {name: node for node in body.node for name in node.output if name}
        for name, node in producers.items():
            value = attribute_of(node, "value") if node.op_type == "Constant" and node.domain in MAIN else None
            if isinstance(value, TensorProto):
                constants[name] = value
        return cls(body, constants, producers)


class _Hoister:
    """Moves weights into the main graph; equal weights get one name."""

    def __init__(self, graph: Graph, run_alone: RunAlone) -> None:
        self._graph, self._run_alone = graph, run_alone
        self._names: dict[tuple[str, tuple[int, ...], bytes], str] = {}

    def visit(self, body: GraphProto, outer: tuple[_Scope, ...], main_node: NodeProto) -> None:
        """Move the weights of the layers in a subgraph and in the subgraphs within it."""
        scopes = (*outer, _Scope.of(body))
        for node in body.node:
            for inner in subgraphs(node):
                self.visit(inner, scopes, main_node)
            for position in _weights(node):
                name = node.input[position]
                if name not in self._graph.constants and (value := self._value(name, scopes)) is not None:
                    self._graph.set_input(node, position, self._constant(name, value), main_node)
        _drop_unread(body)

    def _constant(self, stem: str, value: Array) -> str:
        key = str(value.dtype), value.shape, value.tobytes()
        if key not in self._names:
            self._names[key] = self._graph.add_constant(f"{stem}_weight", value)
        return self._names[key]

    def _value(self, name: str, scopes: Sequence[_Scope]) -> Array | None:
        """Return the value of a tensor that follows from constants; None for any other tensor."""
        constants: dict[str, TensorProto] = {}
        nodes: list[NodeProto] = []
        if not self._collect(name, scopes, constants, nodes):
            return None
        if name in constants:
            return array_of(constants[name])
        part = GraphProto(name="weight", node=nodes, initializer=[])
        for each, tensor in constants.items():
            part.initializer.add().CopyFrom(tensor)
            part.initializer[-1].name = each
        model = self._graph.model
        alone = ModelProto(graph=part, ir_version=model.ir_version, opset_import=model.opset_import)
        return self._run_alone(alone, [name])[name]

    def _collect(
        self, name: str, scopes: Sequence[_Scope], constants: dict[str, TensorProto], nodes: list[NodeProto]
    ) -> bool:
        """Add what computes a tensor to ``constants`` and ``nodes``, in graph order; return whether all is constant."""
        if name in constants or any(name in node.output for node in nodes):
            return True
        if name in self._graph.constants:
            constants[name] = self._graph.constants[name]
            return True
        for depth in reversed(range(len(scopes))):
            scope = scopes[depth]
            if name in scope.constants:
                constants[name] = scope.constants[name]
                return True
            node = scope.producers.get(name)
            if node is not None:
                if node.op_type not in _EXACT or node.domain not in MAIN:
                    return False
                is_constant = all(self._collect(each, scopes[: depth + 1], constants, nodes) for each in reads(node))
                nodes.append(node)
                return is_constant
        return False


def _drop_unread(body: GraphProto) -> None:
    """Remove nodes that move or cast values, and constants, if nothing reads them."""
    needed = {value.name for value in body.output}
    kept = []
    for node in reversed(body.node):
        if node.op_type not in {*_EXACT, "Constant"} or needed.intersection(node.output):
            kept.append(node)
            needed.update(reads(node))
    if len(kept) < len(body.node):
        nodes = [NodeProto.FromString(node.SerializeToString()) for node in reversed(kept)]
        del body.node[:]
        body.node.extend(nodes)
    for i in reversed(range(len(body.initializer))):
        if body.initializer[i].name not in needed:
            del body.initializer[i]


# Names


def _name_layers(graph: Graph) -> None:
    """Give layers in subgraphs unique names; two branches of an If may use the same names."""
    seen: set[str] = set()
    for each in all_nodes(graph.nodes):
        if each.outer is None or not _weights(each.node):
            continue
        own, name, count = Graph.node_name(each.node), each.name, 0
        while name in seen:
            count += 1
            each.node.name = f"{own}_{count}"
            name = f"{each.name}_{count}"
        seen.add(name)
