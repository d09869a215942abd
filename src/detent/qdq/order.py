"""Order: nodes of a graph so that each comes after those it reads from."""

from collections.abc import Iterator
from heapq import heapify, heappop, heappush

from onnx import AttributeProto, GraphProto, NodeProto

from detent.errors import FileFormatError

__all__ = ["check_depth", "reads", "sort_nodes", "subgraphs"]

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
