"""Calibration: ranges of activations, and the scales and zero points made of them.

The float model runs on the calibration batches, and its tensors pass observers. Every batch runs once, its tensors are
observed and forgotten: memory does not grow with the number of batches. With a budget, only so many bytes of tensors
are taken from a run, and the batches pass as often as that needs.

Each tensor has its min-max range or the range that its observer searches (MSE-optimal by default). The range of least
error of a tensor is not always that of its layer: large values may be few, and count for much. So each tensor that
layers read has the range under which these layers' outputs are closest to float. Tensors that reach an output of the
model without another layer are never clipped: a detector whose scores are clipped has a better SQNR, and no detections.
"""

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from os import PathLike
from typing import Any

import numpy as np
from numpy.typing import NDArray
from onnx import ModelProto

from detent import observers as core
from detent.checks import refuse_nan
from detent.errors import NotCalibratedError, SpecError
from detent.observers import MinMax, Observer
from detent.onnx.decisions import QuantizerPlacement, RangeDecision, scaled
from detent.onnx.graph_plan import GraphPlan
from detent.onnx.layer_error import IsolatedLayers, noise
from detent.onnx_model.batches import Batches, BatchSource, inputs_of, open_batches
from detent.onnx_model.graph import Graph, reads
from detent.onnx_model.sessions import record, tensor_nbytes
from detent.ops import fake_quantize
from detent.params import QuantParams
from detent.rule import ObserverLike, ObserverSpec, get_observer_spec

__all__ = [
    "Calibration",
    "activation_params",
    "calibrate",
    "calibrate_groups",
    "check_passes",
    "choose_clipped",
    "choose_params",
    "observed_tensors",
    "range_decisions",
    "tensor_groups",
]

Array = NDArray[Any]
FLOAT_FAILS = "the float model itself fails on these data"
Feed = dict[str, Array]
Progress = bool | Callable[[int, int | None], object]
SAMPLES, SAMPLE_BYTES = 4, 64 << 20  # of the first batches that are kept for comparisons
MAX_REMAINING_NOISE = 0.98  # clipping must remove at least 2 % of the noise


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
    _params: dict[tuple[QuantizerPlacement, bool], QuantParams] = field(default_factory=dict, repr=False, compare=False)

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
    resume_file: str | PathLike[str] | None = None,
) -> Calibration:
    """Observe all tensors that a plan may quantize.

    Args:
        plan: as ``qo.plan`` makes it.
        data: see ``qo.quantize``.
        observer: of every tensor whose rule names none.
        memory_budget: bytes of tensors that may be held at once.
        progress: True for a bar, or a function of the batches done and in all.
        resume_file: calibration state is saved here; if the file exists, calibration resumes from it.

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
    groups = None if memory_budget is None else tensor_groups(plan, batches, memory_budget)
    return calibrate_groups(plan, batches, groups, observer, progress, resume_file)


def calibrate_groups(
    plan: GraphPlan,
    batches: Batches,
    groups: Sequence[Sequence[str]] | None,
    observer: ObserverLike | None,
    progress: Progress,
    resume_file: str | PathLike[str] | None,
) -> Calibration:
    """Observe tensors in groups, one pass over the data for each; None for all tensors in one pass."""
    placements = plan.placements()
    observers = _observers(plan, placements, observer)
    kept = _Kept(batches)
    groups = [list(observers)] if groups is None else groups
    check_passes(groups, resume_file)
    for number, names in enumerate(groups):
        part = {name: observers[name] for name in names}
        source: Iterable[Feed] = kept if not number else batches
        stream = _Stream(plan.model, list(names), source, part, batches.count)
        core.calibrate(
            iter(stream) if batches.count is None else stream, part, progress=progress, resume_file=resume_file
        )
    if not kept.count:
        raise NotCalibratedError("there was no batch to calibrate with: give at least one")
    group_of = {each.tensor: each.group for each in placements}
    scaled = {each.tensor: (group_of[each.source_tensor], each.factor) for each in placements if each.source_tensor}
    return Calibration(observers, tuple(kept.samples), kept.count, batches.fingerprint(), scaled)


def check_passes(groups: Sequence[Sequence[str]], resume_file: str | PathLike[str] | None) -> None:
    """Reject a resume file if several passes are needed."""
    if resume_file is not None and len(groups) > 1:
        raise SpecError("resume_file works with one pass over the data, memory_budget needs more: leave one out")


def _observers(
    plan: GraphPlan, placements: Sequence[QuantizerPlacement], observer: ObserverLike | None
) -> dict[str, Observer]:
    default = get_observer_spec("mse" if observer is None else observer)
    asked: dict[str, ObserverSpec] = {}  # by group: the first rule that names one, of the layers that read its tensors
    for layer in plan.quantized:
        if layer.observer is not None and layer.input is not None:
            data = plan.layers_by_name[layer.name].data
            groups = [each.group for each in placements if each.tensor == data]
            asked.update({group: layer.observer for group in groups if group not in asked})
    return {each.tensor: asked.get(each.group, default).make() for each in placements if not each.source_tensor}


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
                    refuse_nan(f"tensor {name!r} of batch {number}", tensors[name], FLOAT_FAILS)
                    before[name] = observer.nonfinite
            tensors.clear()  # or they would be held while the model runs on the next batch


def observed_tensors(plan: GraphPlan) -> list[str]:
    """The tensors that calibration observes, in order."""
    return [each.tensor for each in plan.placements() if not each.source_tensor]


def tensor_groups(plan: GraphPlan, batches: Batches, budget: int) -> list[list[str]]:
    """The tensors that a plan observes, in groups that fit a budget of bytes; sizes are those of the first batch."""
    model, names = plan.model, observed_tensors(plan)
    inner = [name for name in names if name not in plan.graph.inputs]
    sizes = tensor_nbytes(model, inner, batches.check_first())
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


def activation_params(placement: QuantizerPlacement, calibration: Calibration, *, clipped: bool) -> QuantParams:
    """The parameters of a tensor; those of a searched range are kept, since searching takes long."""
    key = placement, clipped
    if key not in calibration._params:
        calibration._params[key] = _activation_params(placement, calibration, clipped=clipped)
    return calibration._params[key]


def _activation_params(placement: QuantizerPlacement, calibration: Calibration, *, clipped: bool) -> QuantParams:
    name, factor = calibration.source(placement.group)
    observer = calibration.observers.get(name)
    if observer is None:
        raise NotCalibratedError(
            f"tensor {placement.group!r} was not observed: calibrate with the plan that is inserted"
        )
    if clipped:
        params = observer.params(placement.spec)
    else:
        params = QuantParams.from_range(placement.spec, *Observer.range(observer), dtype="float32")
    if factor != 1:
        params = scaled(params, factor)
    return _bounded(params, placement)


def choose_params(
    placements: Iterable[QuantizerPlacement], calibration: Calibration, clipped: Collection[str] | None = None
) -> dict[str, QuantParams]:
    """The parameters of all groups of tensors, by name."""
    return {
        each.group: activation_params(each, calibration, clipped=clipped is None or each.group in clipped)
        for each in placements
        if each.tensor == each.group and not each.source_tensor
    }


def range_decisions(
    params: Mapping[str, QuantParams], calibration: Calibration | None, clipped: Collection[str] | None = None
) -> dict[str, RangeDecision]:
    """Chosen parameters as a part of Decisions."""
    known = {} if calibration is None else calibration.ranges
    return {
        group: RangeDecision(
            float(each.scale), int(each.zero_point), clipped is None or group in clipped, known.get(group)
        )
        for group, each in params.items()
    }


def _bounded(params: QuantParams, placement: QuantizerPlacement) -> QuantParams:
    """The parameters with a largest value that the Clip before them lets pass, so that it has nothing to do."""
    spec, codes, limit = params.spec, np.float32(params.spec.qmax - params.zero_point), np.float32(placement.clip_max)
    scale = np.float32(params.scale)
    if not np.isfinite(placement.clip_max) or placement.clip_max <= 0 or codes * scale <= limit:
        return params
    scale = limit / codes
    while codes * scale > limit:
        scale = np.nextafter(scale, np.float32(0))
    return QuantParams(spec, np.asarray(scale), params.zero_point)


def choose_clipped(
    plan: GraphPlan,
    calibration: Calibration,
    placements: Sequence[QuantizerPlacement],
    isolated: IsolatedLayers,
) -> set[str]:
    """The groups of tensors that have the clipping range of their observers, not the min-max range."""
    layers = plan.layers_by_name
    leaving = _leaving(plan.graph, [layers[line.name].node.output[0] for line in plan.quantized])
    readers = defaultdict(list)
    for line in plan.quantized:
        if line.input is not None:
            readers[layers[line.name].data].append(line.name)
    own = [each for each in placements if each.group == each.tensor and not each.source_tensor]
    free = [
        each
        for each in own
        if each.tensor not in leaving
        and not isinstance(calibration.observers[calibration.source(each.group)[0]], MinMax)
    ]
    unread = {each.group for each in free if not readers[each.tensor]}
    compared = [each for each in free if readers[each.tensor]]
    return unread | _better_clipped(plan, calibration, compared, readers, isolated)


def _better_clipped(
    plan: GraphPlan,
    calibration: Calibration,
    placements: list[QuantizerPlacement],
    readers: dict[str, list[str]],
    isolated: IsolatedLayers,
) -> set[str]:
    """The tensors whose readers come closer to float where outliers are clipped, on the first sample."""
    candidates = {
        each.tensor: [activation_params(each, calibration, clipped=clipped) for clipped in (False, True)]
        for each in placements
    }
    errors = {tensor: [0.0, 0.0] for tensor in candidates}
    inputs = isolated.inputs(0) if candidates else {}
    for tensor, params in candidates.items():
        for name in readers[tensor]:
            x, weight = inputs[name], plan.graph.array(plan.layers_by_name[name].weight)
            reference = isolated.run(name, x, weight)
            for i, each in enumerate(params):
                errors[tensor][i] += noise(reference, isolated.run(name, fake_quantize(x, each), weight))
    return {tensor for tensor, (full, clipped) in errors.items() if clipped < MAX_REMAINING_NOISE * full}


def _leaving(graph: Graph, layer_results: Iterable[str]) -> set[str]:
    """The tensors that reach an output of the model without passing another layer."""
    stops, leaving = set(layer_results), set(graph.outputs)
    for node in reversed(graph.nodes):
        if leaving & set(node.output) and not stops & set(node.output) and node.op_type != "Shape":
            leaving.update(reads(node))
    return leaving
