"""Ranges of the inputs of layers in subgraphs: ``observe_ranges`` measures them on calibration data.

A tensor in a subgraph cannot be an output of the model. So the subgraphs get more outputs: the smallest and largest
value of each observed tensor. These pass to the main graph:

- An If returns the range of the branch that runs; for tensors of the other branch, it returns an empty range.
- A Loop returns the ranges of all steps, which are then combined; they are empty if there is no step.

An empty range is (inf, -inf). Layers in a Scan are not observed. Only the min-max range is measured.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from onnx import GraphProto, ModelProto, NodeProto, TensorProto, helper

from detent.error_places import at
from detent.onnx_model.files import copied
from detent.onnx_model.graph import Graph, node_name, subgraphs
from detent.onnx_model.sessions import make_session, ort_errors

__all__ = ["batch_ranges", "merged_ranges", "observe_ranges"]

Feed = Mapping[str, NDArray[Any]]
Range = tuple[float, float]


def observe_ranges(model: ModelProto, names: Collection[str], batches: Iterable[Feed]) -> dict[str, Range]:
    """Return the smallest and largest input of each named layer over all batches.

    Layers that never run, and layers whose inputs are not finite, are left out.
    """
    return merged_ranges([batch_ranges(model, names, batches)])


def merged_ranges(parts: Iterable[Mapping[str, Range]]) -> dict[str, Range]:
    """Merge the ranges of several parts of the data; leave out layers as ``observe_ranges`` does."""
    merged: dict[str, Range] = {}
    for part in parts:
        for layer, (lo, hi) in part.items():
            least, most = merged.get(layer, (np.inf, -np.inf))
            merged[layer] = float(np.minimum(least, lo)), float(np.maximum(most, hi))
    return {name: (lo, hi) for name, (lo, hi) in merged.items() if np.isfinite([lo, hi]).all() and lo <= hi}


def batch_ranges(model: ModelProto, names: Collection[str], batches: Iterable[Feed]) -> dict[str, Range]:
    """Return the smallest and largest input of each named layer over some batches, also if they are not finite."""
    copy = copied(model)
    observer = _Instrument(Graph(copy), names)
    ranges = observer.add(copy.graph, "")
    copy.graph.output.extend(_value(name) for each in ranges for name in each.tensors)
    copy.graph.initializer.extend(observer.constants)
    session = make_session(copy)
    tensors = [name for each in ranges for name in each.tensors]
    observed: dict[str, Range] = {}
    for feed in batches if ranges else ():
        with ort_errors():
            values = iter(session.run(tensors, dict(feed)))
        for each in ranges:
            with at("layer", each.layer):
                lo, hi = observed.get(each.layer, (np.inf, -np.inf))
                observed[each.layer] = float(np.minimum(lo, next(values))), float(np.maximum(hi, next(values)))
    return observed


class _LayerRange(NamedTuple):
    """A layer, and the tensors with the smallest and largest value of its input."""

    layer: str
    tensors: tuple[str, str]


def _value(name: str) -> Any:  # noqa: ANN401 - onnx has no type for it
    return helper.make_tensor_value_info(name, TensorProto.FLOAT, [])


class _Instrument:
    """Adds nodes that compute the ranges of layers' inputs, in place."""

    def __init__(self, graph: Graph, names: Collection[str]) -> None:
        self._graph, self._layers = graph, set(names)
        self._empty = graph.fresh("empty_lo"), graph.fresh("empty_hi")
        self._flat = graph.fresh("flat_shape")
        self.constants = [
            helper.make_tensor(name, TensorProto.FLOAT, [1], [value])
            for name, value in zip(self._empty, (np.inf, -np.inf), strict=True)
        ]
        self.constants.append(helper.make_tensor(self._flat, TensorProto.INT64, [1], [-1]))

    def add(self, graph: GraphProto, path: str) -> list[_LayerRange]:
        """Add nodes to a graph and its subgraphs; return the ranges that the graph computes."""
        ranges: list[_LayerRange] = []
        nodes: list[NodeProto] = []
        for node in graph.node:
            name = f"{path}{node_name(node)}"
            nodes.append(node)
            if name in self._layers:
                nodes += self._reduced(name, (node.input[0], node.input[0]), ranges)
            elif node.op_type == "If":
                nodes += self._if(node, name, ranges)
            elif node.op_type == "Loop":
                nodes += self._loop(node, name, ranges)
        copies = [NodeProto.FromString(node.SerializeToString()) for node in nodes]
        del graph.node[:]
        graph.node.extend(copies)
        return ranges

    def _reduced(self, layer: str, given: tuple[str, str], ranges: list[_LayerRange]) -> list[NodeProto]:
        """Make nodes that reduce two tensors, of any shape, to the smallest and the largest value."""
        nodes, tensors = [], []
        for x, empty, operator in zip(given, self._empty, ("ReduceMin", "ReduceMax"), strict=True):
            flat, joined, result = (self._graph.fresh(f"range_{part}") for part in ("flat", "joined", "value"))
            nodes += [
                helper.make_node("Reshape", [x, self._flat], [flat]),
                helper.make_node("Concat", [flat, empty], [joined], axis=0),
                helper.make_node(operator, [joined], [result], keepdims=0),
            ]
            tensors.append(result)
        ranges.append(_LayerRange(layer, (tensors[0], tensors[1])))
        return nodes

    def _if(self, node: NodeProto, name: str, ranges: list[_LayerRange]) -> list[NodeProto]:
        branches = list(subgraphs(node))
        inner = [self.add(branch, f"{name}/") for branch in branches]
        nodes: list[NodeProto] = []
        for number, branch_ranges in enumerate(inner):
            for each in branch_ranges:
                for branch in branches:
                    self._return(branch, each.tensors if branch is branches[number] else None)
                outputs = self._graph.fresh("range_lo"), self._graph.fresh("range_hi")
                node.output.extend(outputs)
                nodes += self._reduced(each.layer, outputs, ranges)
        return nodes

    def _return(self, branch: GraphProto, tensors: Sequence[str] | None) -> None:
        """Add two outputs to a branch; None stands for an empty range."""
        if tensors is None:
            tensors = [self._graph.fresh("range_empty") for _ in self._empty]
            for empty, name in zip(self._empty, tensors, strict=True):
                branch.node.append(helper.make_node("ReduceMax", [empty], [name], keepdims=0))
        branch.output.extend(_value(each) for each in tensors)

    def _loop(self, node: NodeProto, name: str, ranges: list[_LayerRange]) -> list[NodeProto]:
        (body,) = subgraphs(node)
        inner = self.add(body, f"{name}/")
        if inner:
            missing = len(body.output) - 1 - len(node.output)  # a node may omit its last outputs
            node.output.extend(self._graph.fresh("range_unread") for _ in range(missing))
        nodes: list[NodeProto] = []
        for each in inner:
            body.output.extend(_value(tensor) for tensor in each.tensors)
            outputs = self._graph.fresh("range_lo"), self._graph.fresh("range_hi")
            node.output.extend(outputs)
            nodes += self._reduced(each.layer, outputs, ranges)
        return nodes
