"""Calibration: ranges of activations, and their scales and zero points.

The float model runs once on each calibration batch. Its tensors are observed and freed, so memory does not grow with
the number of batches. With a memory budget, each pass observes only as many tensors as fit, and the data is read
several times.

Each tensor gets its min-max range or the clipping range of its observer (MSE-optimal by default). The MSE-optimal range
of a tensor is not always best for its layer: a few large values may matter most. So a tensor that layers read gets the
range with the smaller error at these layers' outputs. Tensors that reach a model output without another layer are never
clipped: clipped scores of a detector give a better SQNR, but no detections.
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
FLOAT_FAILS = "the float model itself computes NaN on this data"
Feed = dict[str, Array]
Progress = bool | Callable[[int, int | None], object]
MAX_SAMPLES, MAX_SAMPLE_BYTES = 4, 64 << 20  # the first batches, kept in memory for the accuracy passes
MAX_REMAINING_NOISE = 0.98  # clipping must remove at least 2 % of the noise


@dataclass(frozen=True, repr=False)
class Calibration:
    """Observed activations of a model.

    Attributes:
        observers: observers by tensor name.
        samples: the first batches, for accuracy passes that run the model again.
        batches: number of batches.
        fingerprint: hash of all batches.
        scaled: tensors that are a constant times another tensor, as (tensor, constant); these are not observed.

    >>> from detent.observers import MinMax
    >>> Calibration({"x": MinMax().observe([1.0, 3.0])}, (), 1, "").range("x")
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

    def __repr__(self) -> str:
        return f"<Calibration of {len(self.observers)} tensors on {self.batches} batches>"

    def source(self, tensor: str) -> tuple[str, float]:
        """Return the observed tensor that ``tensor`` is a multiple of, and the factor; itself and 1.0 if observed."""
        factor = 1.0
        while tensor not in self.observers and tensor in self.scaled:
            tensor, part = self.scaled[tensor]
            factor *= part
        return tensor, factor

    def range(self, tensor: str) -> tuple[float, float]:
        """Return the smallest and largest observed value of a tensor."""
        name, factor = self.source(tensor)
        lo, hi = Observer.range(self.observers[name])
        return float(lo) * factor, float(hi) * factor

    @property
    def ranges(self) -> dict[str, tuple[float, float]]:
        """Smallest and largest observed value of every tensor, by name."""
        return {name: self.range(name) for name in (*self.observers, *self.scaled)}


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
        plan: a plan from ``qo.plan``.
        data: calibration batches, see ``qo.quantize``.
        observer: observer of the tensors whose rule names none; None for the MSE-optimal range.
        memory_budget: bytes of activations that may be held at once.
        progress: True for a progress bar, or a function of (batches done, total).
        resume_file: calibration state is saved here; if the file exists, calibration resumes from it.

    Raises:
        SpecError: the budget needs several passes, but data is a one-shot iterator.
        NaNError: a tensor holds NaN; the message names the tensor and the batch.
        NotCalibratedError: data holds no batch.

    >>> from onnx import parser
    >>> import detent.onnx as qo
    >>> plan = qo.plan(parser.parse_model('''<ir_version: 8, opset_import: ["" : 17]>
    ...     g (float[1,1] x) => (float[1,1] y) <float[1,1] w = {3.0}> { [fc] y = MatMul(x, w) }'''))
    >>> qo.calibrate(plan, [np.float32([[2.0]])]).range("x")
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
    """Observe tensors in groups, with one pass over the data per group; None for all tensors in one pass."""
    placements = plan.placements()
    observers = _observers(plan, placements, observer)
    sampled = _SampledBatches(batches)
    groups = [list(observers)] if groups is None else groups
    check_passes(groups, resume_file)
    for number, names in enumerate(groups):
        part = {name: observers[name] for name in names}
        source: Iterable[Feed] = sampled if not number else batches
        stream = _Stream(plan.model, list(names), source, part, batches.count)
        core.calibrate(
            iter(stream) if batches.count is None else stream, part, progress=progress, resume_file=resume_file
        )
    if not sampled.count:
        raise NotCalibratedError("calibration got no batch: pass at least one")
    group_of = {each.tensor: each.group for each in placements}
    scaled = {each.tensor: (group_of[each.source_tensor], each.factor) for each in placements if each.source_tensor}
    return Calibration(observers, tuple(sampled.samples), sampled.count, batches.fingerprint(), scaled)


def check_passes(groups: Sequence[Sequence[str]], resume_file: str | PathLike[str] | None) -> None:
    """Reject a resume file if several passes are needed."""
    if resume_file is not None and len(groups) > 1:
        raise SpecError("resume_file works with one pass over the data, memory_budget needs more: leave one out")


def _observers(
    plan: GraphPlan, placements: Sequence[QuantizerPlacement], observer: ObserverLike | None
) -> dict[str, Observer]:
    default = get_observer_spec("mse" if observer is None else observer)
    by_group: dict[str, ObserverSpec] = {}  # observer of the first layer that reads the group and whose rule names one
    for layer in plan.quantized:
        if layer.observer is not None and layer.input is not None:
            data = plan.layers_by_name[layer.name].data
            groups = [each.group for each in placements if each.tensor == data]
            by_group.update({group: layer.observer for group in groups if group not in by_group})
    return {each.tensor: by_group.get(each.group, default).make() for each in placements if not each.source_tensor}


class _SampledBatches:
    """All batches; the first ones are kept as samples."""

    def __init__(self, batches: Batches) -> None:
        self.batches, self.samples, self.count = batches, list[Feed](), 0

    def __iter__(self) -> Iterator[Feed]:
        size = 0
        for feed in self.batches.hashed():
            self.count += 1
            size += sum(array.nbytes for array in feed.values())
            if not self.samples or (len(self.samples) < MAX_SAMPLES and size <= MAX_SAMPLE_BYTES):
                self.samples.append(dict(feed))
            yield feed


class _Stream:
    """Tensors of each batch by name; after they are observed, they are checked for NaN."""

    def __init__(
        self,
        model: ModelProto,
        names: list[str],
        feeds: Iterable[Feed],
        observers: Mapping[str, Observer],
        count: int | None,
    ) -> None:
        self.model, self.names, self.feeds, self.observers, self.count = model, names, feeds, observers, count

    def __len__(self) -> int:
        return self.count or 0

    def __iter__(self) -> Iterator[Feed]:
        before = {name: observer.nonfinite for name, observer in self.observers.items()}
        for number, tensors in enumerate(record(self.model, self.names, self.feeds)):
            yield tensors
            for name, observer in self.observers.items():
                if observer.nonfinite > before[name]:
                    refuse_nan(f"tensor {name!r} of batch {number}", tensors[name], FLOAT_FAILS)
                    before[name] = observer.nonfinite
            tensors.clear()  # free them before the model runs on the next batch


def observed_tensors(plan: GraphPlan) -> list[str]:
    """List the tensors that calibration observes, in graph order."""
    return [each.tensor for each in plan.placements() if not each.source_tensor]


def tensor_groups(plan: GraphPlan, batches: Batches, budget: int) -> list[list[str]]:
    """Group the tensors that a plan observes, so that each group fits the budget in bytes on the first batch."""
    model, names = plan.model, observed_tensors(plan)
    inner = [name for name in names if name not in plan.graph.inputs]
    sizes = tensor_nbytes(model, inner, batches.check_first())
    groups: list[list[str]] = [[]]
    group_bytes = 0
    for name in names:
        size = sizes.get(name, 0)
        if groups[-1] and group_bytes + size > budget:
            groups.append([])
            group_bytes = 0
        groups[-1].append(name)
        group_bytes += size
    if len(groups) > 1 and not batches.is_repeatable:
        raise SpecError(
            f"memory_budget={budget:,} needs {len(groups)} passes over the data ({sum(sizes.values()):,} bytes of "
            "activations per batch), but data is a one-shot iterator: pass a list, a file or a directory"
        )
    return groups


def activation_params(placement: QuantizerPlacement, calibration: Calibration, *, clipped: bool) -> QuantParams:
    """Compute the parameters of a tensor from its clipping or min-max range; cached, because searching is slow."""
    key = placement, clipped
    if key not in calibration._params:
        calibration._params[key] = _activation_params(placement, calibration, clipped=clipped)
    return calibration._params[key]


def _activation_params(placement: QuantizerPlacement, calibration: Calibration, *, clipped: bool) -> QuantParams:
    name, factor = calibration.source(placement.group)
    observer = calibration.observers.get(name)
    if observer is None:
        raise NotCalibratedError(
            f"tensor {placement.group!r} was not observed: call qo.calibrate with the plan that you insert"
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
    """Compute the parameters of all groups; ``clipped`` are the groups with their clipping range, None for all."""
    return {
        each.group: activation_params(each, calibration, clipped=clipped is None or each.group in clipped)
        for each in placements
        if each.tensor == each.group and not each.source_tensor
    }


def range_decisions(
    params: Mapping[str, QuantParams], calibration: Calibration | None, clipped: Collection[str] | None = None
) -> dict[str, RangeDecision]:
    """Convert chosen parameters to the ranges of ``Decisions``."""
    observed = {} if calibration is None else calibration.ranges
    return {
        group: RangeDecision(
            float(each.scale), int(each.zero_point), clipped is None or group in clipped, observed.get(group)
        )
        for group, each in params.items()
    }


def _bounded(params: QuantParams, placement: QuantizerPlacement) -> QuantParams:
    """Shrink the scale until the largest code stays within the Clip before it, which is redundant then."""
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
    """Choose the groups that get the clipping range of their observer instead of the min-max range."""
    layers = plan.layers_by_name
    leaving = _reaching_output(plan.graph, [layers[line.name].node.output[0] for line in plan.quantized])
    readers = defaultdict(list)
    for line in plan.quantized:
        if line.input is not None:
            readers[layers[line.name].data].append(line.name)
    first_of_group = [each for each in placements if each.group == each.tensor and not each.source_tensor]
    clippable = [
        each
        for each in first_of_group
        if each.tensor not in leaving
        and not isinstance(calibration.observers[calibration.source(each.group)[0]], MinMax)
    ]
    unread = {each.group for each in clippable if not readers[each.tensor]}
    compared = [each for each in clippable if readers[each.tensor]]
    return unread | _better_clipped(plan, calibration, compared, readers, isolated)


def _better_clipped(
    plan: GraphPlan,
    calibration: Calibration,
    placements: list[QuantizerPlacement],
    readers: dict[str, list[str]],
    isolated: IsolatedLayers,
) -> set[str]:
    """Choose the tensors whose readers have less error with clipped outliers, measured on the first sample."""
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


def _reaching_output(graph: Graph, layer_results: Iterable[str]) -> set[str]:
    """Find the tensors that reach a model output without passing another quantized layer."""
    stops, leaving = set(layer_results), set(graph.outputs)
    for node in reversed(graph.nodes):
        if leaving & set(node.output) and not stops & set(node.output) and node.op_type != "Shape":
            leaving.update(reads(node))
    return leaving
