"""Probe: a model in ONNX Runtime whose inner tensors are looked at, in groups that fit into memory.

A reading names tensors that are looked at together. Readings share a run as long as what they look at fits into the
budget; where it does not, the model runs once more for each further group. Sizes are asked of the model itself, with
the first batch, by Shape nodes, which cost no memory.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from math import prod
from typing import Any, NamedTuple

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray
from onnx import ModelProto, NodeProto, TensorProto, ValueInfoProto, helper

from detent.onnx_model import array_of, make_session

__all__ = ["Probe", "Reading"]

Array = NDArray[Any]
BUDGET = 1 << 29
ITEM_BYTES = 4
_STRANGE = frozenset(  # types that ONNX Runtime does not hand over as arrays
    {TensorProto.INT4, TensorProto.UINT4, TensorProto.FLOAT8E4M3FN, TensorProto.FLOAT8E5M2}
)


class Reading(NamedTuple):
    """Tensors that are looked at together.

    Attributes:
        names: the tensors; inputs and constants may be among them.
        take: what looks at them, given the arrays by name.

    >>> Reading(("x",), lambda arrays: None).names
    ('x',)
    """

    names: tuple[str, ...]
    take: Callable[[Mapping[str, Array]], None]


class Probe:
    """A model with readings.

    Args:
        model: run as it is written; it is left as it is.
        readings: what to look at, in this order.
        kinds: the element types of tensors, as far as they are known; codes of strange types are read as float32.
        budget: bytes that may be looked at in one run.

    >>> from onnx import parser
    >>> made = parser.parse_model('''<ir_version: 8, opset_import: ["" : 17]>
    ...     g (float[1] x) => (float[1] y) { t = Relu(x) y = Neg(t) }''')
    >>> probe = Probe(made, [Reading(("x", "t"), lambda arrays: print(arrays["t"]))])
    >>> probe.run({"x": np.float32([3])})
    [3.]
    >>> [value.name for value in made.graph.output]
    ['y']
    """

    def __init__(
        self,
        model: ModelProto,
        readings: Iterable[Reading],
        *,
        kinds: Mapping[str, int] | None = None,
        budget: int = BUDGET,
    ) -> None:
        self._model, self._readings, self._budget = model, list(readings), budget
        made = {name for node in model.graph.node for name in node.output}
        constants = {tensor.name: tensor for tensor in model.graph.initializer}
        wanted = {name for reading in self._readings for name in reading.names}
        self._constants = {name: array_of(constants[name]) for name in wanted if name in constants}
        self._made = wanted & made
        self._strange = {name for name in self._made if (kinds or {}).get(name, 0) in _STRANGE}
        self._groups: list[tuple[ort.InferenceSession, list[str], list[Reading]]] | None = None

    def run(self, feeds: Mapping[str, Array]) -> None:
        """Run the model on a batch, and show the readings what they look at."""
        if self._groups is None:
            self._groups = [self._prepare(group) for group in self._grouped(feeds)]
        for session, names, readings in self._groups:
            values = session.run([self._output(name) for name in names], dict(feeds))
            arrays = {**self._constants, **feeds, **dict(zip(names, values, strict=True))}
            del values
            for reading in readings:
                reading.take(arrays)

    def _output(self, name: str) -> str:
        return f"{name}__as_float" if name in self._strange else name

    def _prepare(self, readings: list[Reading]) -> tuple[ort.InferenceSession, list[str], list[Reading]]:
        names = list(dict.fromkeys(name for reading in readings for name in reading.names if name in self._made))
        return self._session([self._output(name) for name in names], self._casts(names)), names, readings

    def _casts(self, names: Iterable[str]) -> list[NodeProto]:
        strange = [name for name in names if name in self._strange]
        return [helper.make_node("Cast", [name], [self._output(name)], to=TensorProto.FLOAT) for name in strange]

    def _session(self, outputs: Sequence[str], nodes: Sequence[NodeProto]) -> ort.InferenceSession:
        """A session with further nodes and outputs; the model is as before afterwards, for copies of it are large."""
        graph = self._model.graph
        known = {value.name for value in graph.output}
        before = len(graph.node), len(graph.output)
        graph.node.extend(nodes)
        graph.output.extend(ValueInfoProto(name=name) for name in outputs if name not in known)
        try:
            return make_session(self._model, optimise=False)
        finally:
            del graph.node[before[0] :], graph.output[before[1] :]

    def _grouped(self, feeds: Mapping[str, Array]) -> list[list[Reading]]:
        sizes = self._sizes(feeds)
        groups: list[list[Reading]] = []
        held: set[str] = set()
        for reading in self._readings:
            added = held | (set(reading.names) & self._made)
            if not groups or sum(sizes[name] for name in added) > self._budget:
                groups.append([])
                added = set(reading.names) & self._made
            groups[-1].append(reading)
            held = added
        return groups

    def _sizes(self, feeds: Mapping[str, Array]) -> dict[str, int]:
        names = sorted(self._made)
        if not names:
            return {}
        shapes = [helper.make_node("Shape", [self._output(name)], [f"{name}__shape"]) for name in names]
        outputs = [node.output[0] for node in shapes]
        found = self._session(outputs, [*self._casts(names), *shapes]).run(outputs, dict(feeds))
        return {name: ITEM_BYTES * prod(np.asarray(shape).tolist()) for name, shape in zip(names, found, strict=True)}
