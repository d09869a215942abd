"""Calibrating: the float model runs on data, and its tensors pass observers.

Every batch runs once, its tensors are observed and forgotten: memory does not grow with the number of batches. With a
budget, only so many bytes of tensors are taken from a run, and the batches pass as often as that needs.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import prod
from os import PathLike
from typing import Any

import numpy as np
from numpy.typing import NDArray
from onnx import ModelProto, NodeProto, helper

from detent import observers as core
from detent.errors import NaNError, NotCalibratedError, SpecError
from detent.observers import Observer
from detent.onnx.data import Batches, BatchSource, inputs_of, open_batches
from detent.onnx.planning import GraphPlan
from detent.qdq.graph import Graph
from detent.qdq.sessions import make_session, refusals
from detent.rule import ObserverLike, ObserverSpec, get_observer_spec

__all__ = ["Calibration", "calibrate", "record", "tensor_groups"]

Array = NDArray[Any]
Feed = dict[str, Array]
Progress = bool | Callable[[int, int | None], object]
SAMPLES, SAMPLE_BYTES = 8, 64 << 20


@dataclass(frozen=True)
class Calibration:
    """What the data have shown.

    Attributes:
        observers: by the tensor's name.
        samples: the first batches, for steps that run the model again.
        batches: how many there were.
        scaled: tensors that are others times a number, which are not observed.
        fingerprint: a hash of them all.

    >>> from detent.observers import MinMax
    >>> Calibration({"x": MinMax().observe([1.0, 3.0])}, (), 1, "").ends("x")
    (1.0, 3.0)
    >>> Calibration({"x": MinMax().observe([1.0, 3.0])}, (), 1, "", {"y": ("x", 2.0)}).source("y")
    ('x', 2.0)
    """

    observers: Mapping[str, Observer]
    samples: tuple[Feed, ...]
    batches: int
    fingerprint: str
    scaled: Mapping[str, tuple[str, float]] = field(default_factory=dict)

    def source(self, tensor: str) -> tuple[str, float]:
        """The observed tensor that one is a multiple of, and the number it is multiplied by."""
        factor = 1.0
        while tensor not in self.observers and tensor in self.scaled:
            tensor, part = self.scaled[tensor]
            factor *= part
        return tensor, factor

    def ends(self, tensor: str) -> tuple[float, float]:
        """The smallest and largest value seen."""
        name, factor = self.source(tensor)
        low, high = Observer.range(self.observers[name])
        return float(low) * factor, float(high) * factor

    @property
    def ranges(self) -> dict[str, tuple[float, float]]:
        """The same of all tensors."""
        return {name: self.ends(name) for name in (*self.observers, *self.scaled)}


def calibrate(
    plan: GraphPlan,
    data: BatchSource | Batches,
    *,
    observer: ObserverLike | None = None,
    memory_budget: int | None = None,
    progress: Progress = False,
    checkpoint: str | PathLike[str] | None = None,
) -> Calibration:
    """Observe all tensors that a plan may quantize.

    Args:
        plan: as ``qo.plan`` makes it.
        data: see ``qo.quantize``.
        observer: of every tensor whose rule names none.
        memory_budget: bytes of tensors that may be held at once.
        progress: True for a bar, or a function of the batches done and in all.
        checkpoint: a file from which an interrupted calibration goes on.

    Raises:
        SpecError: the budget needs several passes over data that can be read once.
        NaNError: a tensor holds NaN; names it and the batch.
        NotCalibratedError: there were no data.

    >>> from onnx import parser
    >>> import detent.onnx as qo
    >>> made = qo.plan(parser.parse_model('''<ir_version: 8, opset_import: ["" : 17]>
    ...     g (float[1,1] x) => (float[1,1] y) <float[1,1] w = {3.0}> { [fc] y = MatMul(x, w) }'''))
    >>> qo.calibrate(made, [np.float32([[2.0]])]).ends("x")
    (2.0, 2.0)
    """
    batches = data if isinstance(data, Batches) else open_batches(data, inputs_of(plan.model))
    seen = _observers(plan, observer)
    kept = _Kept(batches)
    groups = [list(seen)]
    if memory_budget is not None:
        groups = tensor_groups(plan, batches, memory_budget)
    if checkpoint is not None and len(groups) > 1:
        raise SpecError("a checkpoint serves one pass over the data: leave out memory_budget or checkpoint")
    for number, names in enumerate(groups):
        part = {name: seen[name] for name in names}
        source: Iterable[Feed] = kept if not number else batches
        stream = _Stream(plan.model, names, source, part, batches.count)
        core.calibrate(
            iter(stream) if batches.count is None else stream, part, progress=progress, checkpoint=checkpoint
        )
    if not kept.count:
        raise NotCalibratedError("there was no batch to calibrate with: give at least one")
    places = plan.places()
    group_of = {place.tensor: place.group for place in places}
    scaled = {place.tensor: (group_of[place.origin], place.factor) for place in places if place.origin}
    return Calibration(seen, tuple(kept.samples), kept.count, batches.fingerprint(), scaled)


def _observers(plan: GraphPlan, observer: ObserverLike | None) -> dict[str, Observer]:
    default = get_observer_spec("mse" if observer is None else observer)
    places = plan.places()
    asked: dict[str, ObserverSpec] = {}  # by group: the first rule that names one, of the layers that read its tensors
    for layer in plan.quantized:
        if layer.observer is not None and layer.input is not None:
            data = plan.found[layer.name].data
            groups = [place.group for place in places if place.tensor == data]
            asked.update({group: layer.observer for group in groups if group not in asked})
    return {place.tensor: asked.get(place.group, default).make() for place in places if not place.origin}


class _Kept:
    """Batches as they come, of which the first are kept."""

    def __init__(self, batches: Batches) -> None:
        self.batches, self.samples, self.count = batches, list[Feed](), 0

    def __iter__(self) -> Iterator[Feed]:
        size = 0
        for feed in self.batches:
            self.count += 1
            size += sum(array.nbytes for array in feed.values())
            if not self.samples or (len(self.samples) < SAMPLES and size <= SAMPLE_BYTES):
                self.samples.append(dict(feed))
            yield feed


class _Stream:
    """The tensors of each batch by name, which are checked for NaN once they were observed."""

    def __init__(
        self,
        model: ModelProto,
        names: list[str],
        feeds: Iterable[Feed],
        seen: Mapping[str, Observer],
        count: int | None,
    ) -> None:
        self.model, self.names, self.feeds, self.seen, self.count = model, names, feeds, seen, count

    def __len__(self) -> int:
        return self.count or 0

    def __iter__(self) -> Iterator[Feed]:
        before = {name: observer.nonfinite for name, observer in self.seen.items()}
        for number, tensors in enumerate(record(self.model, self.names, self.feeds)):
            yield tensors
            for name, observer in self.seen.items():
                if observer.nonfinite > before[name]:
                    _refuse_nan(name, tensors[name], number)
                    before[name] = observer.nonfinite
            tensors.clear()  # or they would be held while the model runs on the next batch


def _refuse_nan(name: str, values: Array, batch: int) -> None:
    count = int(np.isnan(values).sum())
    if count:
        first = tuple(int(i) for i in np.argwhere(np.isnan(values))[0])
        raise NaNError(
            f"tensor {name!r} holds {count} NaN of {values.size} values in batch {batch}, the first at {first}: the "
            "float model fails on these data",
            count,
            first,
        )


def record(model: ModelProto, names: Iterable[str], feeds: Iterable[Feed], *, threads: int = 0) -> Iterator[Feed]:
    """Run a model and yield some of its tensors by name, batch after batch.

    >>> from onnx import parser
    >>> made = parser.parse_model('''<ir_version: 8, opset_import: ["" : 17]>
    ...     g (float[1] x) => (float[1] y) { t = Abs(x) y = Neg(t) }''')
    >>> list(record(made, ["t"], [{"x": np.float32([-2])}]))
    [{'t': array([2.], dtype=float32)}]
    """
    wanted = list(dict.fromkeys(names))
    graph = Graph(model)
    made = [name for name in wanted if name not in graph.inputs]
    with _more_outputs(model, made):
        session = make_session(model, threads=threads)
    for feed in feeds:
        with refusals():
            results = dict(zip(made, session.run(made, feed), strict=True)) if made else {}
        found = {name: results[name] if name in results else feed[name] for name in wanted}
        del results
        yield found


@contextmanager
def _more_outputs(model: ModelProto, names: list[str], nodes: Iterable[NodeProto] = ()) -> Iterator[None]:
    """A model with some more outputs for a while; a copy of a large one would be large."""
    graph = model.graph
    outputs, before = len(graph.output), len(graph.node)
    present = {value.name for value in graph.output}
    graph.node.extend(nodes)
    graph.output.extend(helper.make_empty_tensor_value_info(name) for name in names if name not in present)
    try:
        yield
    finally:
        del graph.output[outputs:], graph.node[before:]


def tensor_groups(plan: GraphPlan, batches: Batches, budget: int) -> list[list[str]]:
    """The tensors that a plan observes, in groups that fit a budget of bytes; sizes are those of the first batch.

    Raises:
        SpecError: several passes are needed over data that can be read once.

    >>> import detent.onnx as qo
    >>> from onnx import parser
    >>> made = qo.plan(parser.parse_model('''<ir_version: 8, opset_import: ["" : 17]>
    ...     g (float[1,1] x) => (float[1,1] y) <float[1,1] w = {3.0}> { [fc] y = MatMul(x, w) }'''))
    >>> tensor_groups(made, open_batches([np.float32([[2.0]])], inputs_of(made.model)), 100)
    [['x']]
    """
    model, names = plan.model, list(_observers(plan, None))
    made = [name for name in names if name not in plan.graph.inputs]
    shapes = [helper.make_node("Shape", [name], [f"{name}//shape"]) for name in made]
    outputs = [f"{name}//shape" for name in made]
    with _more_outputs(model, outputs, shapes):
        session = make_session(model)
    with refusals():
        found = session.run(outputs, batches.check_first()) if made else []
    sizes = {name: 4 * prod(int(size) for size in shape) for name, shape in zip(made, found, strict=True)}
    groups: list[list[str]] = [[]]
    used = 0
    for name in names:
        size = sizes.get(name, 0)
        if groups[-1] and used + size > budget:
            groups.append([])
            used = 0
        groups[-1].append(name)
        used += size
    if len(groups) > 1 and not batches.is_repeatable:
        raise SpecError(
            f"the tensors of a batch take {sum(sizes.values()):,} bytes, a budget of {budget:,} needs {len(groups)} "
            "passes, and the data can be read once: give a list, a file or a folder, which can be read more than once"
        )
    return groups
