"""Calibrating: the float model runs on data, and its tensors pass observers.

Every batch runs once, its tensors are observed and forgotten: memory does not grow with the number of batches. With a
budget, only so many bytes of tensors are taken from a run, and the batches pass as often as that needs.

Clipping: which activations may lose their outliers.

The range of least error of a tensor is not always that of its layer: large values may be few, and count for much. So
each tensor that layers read has the range under which these layers' outputs are closest to float. Tensors that reach
an output of the model without another layer keep all that was seen: a detector whose scores are clipped has a better
signal-to-noise ratio, and no detections.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from math import prod
from os import PathLike
from typing import Any

import numpy as np
from numpy.typing import NDArray
from onnx import ModelProto, helper

from detent import observers as core
from detent.errors import NaNError, NotCalibratedError, SpecError
from detent.observers import MinMax, Observer
from detent.onnx.graph_plan import GraphPlan
from detent.onnx.layer_error import Probe, noise, recorded_inputs
from detent.onnx.placement import Place
from detent.onnx_model.batches import Batches, BatchSource, inputs_of, open_batches
from detent.onnx_model.graph import Graph, reads
from detent.onnx_model.sessions import _more_outputs, make_session, record, refusals
from detent.ops import fake_quantize
from detent.params import QuantParams
from detent.rule import ObserverLike, ObserverSpec, get_observer_spec

__all__ = ["Calibration", "activation_params", "calibrate", "choose_clipped", "choose_params", "tensor_groups"]

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
        for feed in self.batches.hashed():
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


def activation_params(place: Place, calibration: Calibration, *, clipped: bool) -> QuantParams:
    """The parameters of a tensor.

    Args:
        place: where its quantizer stands.
        calibration: what the data have shown.
        clipped: whether the observer's own range is taken, or all that was seen.

    >>> from detent.observers import MinMax
    >>> from detent.onnx.placement import Place
    >>> from detent.spec import QuantSpec
    >>> seen = Calibration({"x": MinMax().observe([0.0, 51.0])}, (), 1, "")
    >>> activation_params(Place("x", QuantSpec("uint8"), "x"), seen, clipped=False).scale
    array(0.2, dtype=float32)
    """
    name, factor = calibration.source(place.group)
    observer = calibration.observers.get(name)
    if observer is None:
        raise NotCalibratedError(f"tensor {place.group!r} was not observed: calibrate with the plan that is inserted")
    if clipped:
        params = observer.params(place.spec)
    else:
        params = QuantParams.from_range(place.spec, *Observer.range(observer), dtype="float32")
    if factor != 1:
        params = QuantParams(place.spec, np.asarray(params.scale * factor, np.float32), params.zero_point)
    return _bounded(params, place)


def choose_params(
    plan: GraphPlan, calibration: Calibration, clipped: Iterable[str] | None = None
) -> dict[str, QuantParams]:
    """The parameters of all tensors that have their own, by name.

    Args:
        plan: what is quantized.
        calibration: what the data have shown.
        clipped: the tensors whose observers may clip; None for all.

    >>> import detent.onnx as qo
    >>> from onnx import parser
    >>> made = qo.plan(parser.parse_model('''<ir_version: 8, opset_import: ["" : 17]>
    ...     g (float[1,1] x) => (float[1,1] y) <float[1,1] w = {3.0}> { [fc] y = MatMul(x, w) }'''))
    >>> list(choose_params(made, qo.calibrate(made, [np.float32([[2.0]])])))
    ['x']
    """
    free = None if clipped is None else set(clipped)
    return {
        place.group: activation_params(place, calibration, clipped=free is None or place.group in free)
        for place in plan.places(calibration.ranges)
        if place.tensor == place.group and not place.origin
    }


def _bounded(params: QuantParams, place: Place) -> QuantParams:
    """The parameters with a largest value that the Clip before them lets pass, so that it has nothing to do."""
    spec, steps = params.spec, np.float32(params.spec.qmax - params.zero_point)
    scale = np.float32(params.scale)
    if not np.isfinite(place.most) or place.most <= 0 or steps * scale <= np.float32(place.most):
        return params
    scale = np.float32(place.most) / steps
    while steps * scale > np.float32(place.most):
        scale = np.nextafter(scale, np.float32(0))
    return QuantParams(spec, np.asarray(scale), params.zero_point)


CLIP_SAMPLES = 1
GAIN = 0.98  # clipping must make something better


def choose_clipped(plan: GraphPlan, calibration: Calibration, samples: int = CLIP_SAMPLES) -> set[str]:
    """The tensors for which the range of the observer is taken, not all that was seen.

    Args:
        plan: what is quantized.
        calibration: what the data have shown.
        samples: how many batches the layers are compared on.

    >>> import numpy as np, detent.onnx as qo
    >>> from onnx import parser
    >>> made = qo.plan(parser.parse_model('''<ir_version: 8, opset_import: ["" : 17]>
    ...     g (float[1,1] x) => (float[1,1] y) <float[1,1] w = {3.0}> { [fc] y = MatMul(x, w) }'''))
    >>> choose_clipped(made, qo.calibrate(made, [np.float32([[2.0]])]))
    set()
    """
    places = plan.places(calibration.ranges)
    leaving = _leaving(plan.graph, [plan.found[layer.name].node.output[0] for layer in plan.quantized])
    free = [place for place in places if place.group == place.tensor and not place.origin]
    free = [
        place for place in free if not isinstance(calibration.observers[calibration.source(place.group)[0]], MinMax)
    ]
    readers = defaultdict(list)
    for layer in plan.quantized:
        if layer.input is not None:
            readers[plan.found[layer.name].data].append(layer.name)
    chosen = {place.group for place in free if place.tensor not in leaving and not readers[place.tensor]}
    judged = [place for place in free if place.tensor not in leaving and readers[place.tensor]]
    return chosen | _judge(plan, calibration, judged, readers, samples)


def _judge(
    plan: GraphPlan, calibration: Calibration, places: list[Place], readers: dict[str, list[str]], samples: int
) -> set[str]:
    ways = {
        place.tensor: [activation_params(place, calibration, clipped=clipped) for clipped in (False, True)]
        for place in places
    }
    errors = {tensor: [0.0, 0.0] for tensor in ways}
    names = [name for tensor in ways for name in readers[tensor]]
    probes = {name: Probe(plan.found[name]) for name in names}
    for inputs in recorded_inputs(plan, names, calibration.samples[:samples]):
        for tensor, params in ways.items():
            for name in readers[tensor]:
                x, weight = inputs[name], plan.graph.array(plan.found[name].weight)
                reference = probes[name].run(x, weight)
                for i, way in enumerate(params):
                    errors[tensor][i] += noise(reference, probes[name].run(fake_quantize(x, way), weight))
    return {tensor for tensor, (whole, clipped) in errors.items() if clipped < GAIN * whole}


def _leaving(graph: Graph, stops: Iterable[str]) -> set[str]:
    """The tensors that reach an output of the model without passing another layer."""
    made_by_layers = set(stops)
    found = set(graph.outputs)
    for node in reversed(graph.nodes):
        if found & set(node.output) and not made_by_layers & set(node.output) and node.op_type != "Shape":
            found.update(reads(node))
    return found
