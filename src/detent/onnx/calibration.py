"""Calibration: observes the ranges of activations, and computes their scales and zero points.

The float model runs once on each calibration batch. Its activations are observed and then freed, so memory does not
grow with the number of batches. With a memory budget, each pass observes only as many tensors as fit into the budget,
so the data may be read several times.

Each tensor gets its min-max range or the clipping range of its observer; the default observer finds the MSE-optimal
range. The MSE-optimal range is not always best for the layer that reads the tensor: a few large values may matter most.
So, without an observer from the user, ``choose_clipped`` selects the tensors for which clipping reduces the error at
the outputs of these layers. ``range_search`` then compares ranges by the noise at the outputs of the model.

A tensor that reaches a model output without passing through a quantized layer is never clipped. Clipping the scores of
a detector improves their SQNR, but loses the detections.
"""

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field
from os import PathLike
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from detent import observers as core
from detent.error_places import at
from detent.errors import NotCalibratedError, SpecError
from detent.observers import MinMax, Observer
from detent.onnx.calibration_items import Survey, observe_on_executor, survey_data
from detent.onnx.decisions import QuantizerPlacement, RangeDecision, scaled
from detent.onnx.graph_plan import GraphPlan
from detent.onnx.layer_error import IsolatedLayers, noise, power
from detent.onnx.quality_warnings import DataSummary
from detent.onnx.samples import SampleChooser, choose_surveyed
from detent.onnx.tensor_stream import TensorStream
from detent.onnx_model.batches import Batches, BatchSource, open_batches
from detent.onnx_model.graph import Graph, reads
from detent.onnx_model.model_inputs import inputs_of
from detent.onnx_model.sessions import split_by_bytes
from detent.onnx_model.workspace import Workspace, open_workspace
from detent.ops import fake_quantize
from detent.params import QuantParams
from detent.rule import ObserverLike, ObserverSpec, get_observer_spec
from detent.tables import counted

__all__ = [
    "Calibration",
    "activation_params",
    "calibrate",
    "calibrate_groups",
    "check_passes",
    "choose_clipped",
    "choose_params",
    "observed_tensors",
    "observers_of_rules",
    "range_decisions",
    "range_params",
    "tensor_groups",
]

Array = NDArray[Any]
Feed = dict[str, Array]
Progress = bool | Callable[[int, int | None], object]
MAX_REMAINING_NOISE = 0.98  # clipping must remove at least 2 % of the noise


@dataclass(frozen=True, repr=False)
class Calibration:
    """Observed activations of a model.

    Attributes:
        observers: observers by tensor name.
        samples: samples of the data, for accuracy passes that run the model again (see ``detent.onnx.samples``).
        batches: number of calibration batches.
        fingerprint: SHA-256 of all batches.
        scaled: maps each tensor that is a constant multiple of another tensor to (other tensor, constant). Such tensors
            are not observed.
        summary: number of samples and ranges of inputs, for warnings.

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
    summary: DataSummary = field(default_factory=DataSummary, repr=False, compare=False)
    _params: dict[tuple[QuantizerPlacement, bool], QuantParams] = field(default_factory=dict, repr=False, compare=False)

    def __repr__(self) -> str:
        return f"<Calibration of {counted(len(self.observers), 'tensor')} on {counted(self.batches, 'batch')}>"

    def source(self, tensor: str) -> tuple[str, float]:
        """Return the observed tensor that ``tensor`` is a multiple of, and the factor (1.0 for an observed tensor)."""
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
    executor: Executor | None = None,
    work_directory: str | PathLike[str] | None = None,
) -> Calibration:
    """Observe all activations that a plan may quantize.

    Args:
        plan: a plan from ``qo.plan``.
        data: calibration batches, see ``qo.quantize``.
        observer: observer for tensors whose rule names no observer; None for the MSE-optimal range.
        memory_budget: maximum bytes of activations in memory; a small budget needs several passes over the data.
        progress: whether to show a progress bar on a terminal, or a callback f(batches_done, total); total is None if
            unknown.
        resume_file: the file where calibration saves its state; if it exists, calibration resumes from it.
        executor: runs the model on workers, see ``docs/howto/cluster.md``; the result has the same bits. None runs it
            in this process.
        work_directory: a directory that all workers see, for the model that they run, and for data in memory; required
            with an executor.

    Raises:
        WorkerError: a worker died, or differs from this process.
        SpecError: data holds no batches, or ``memory_budget`` needs several passes and data is a one-shot iterator.
        NaNError: a tensor contains NaN; the message names the tensor and the batch.
        NotCalibratedError: a tensor has no finite value in any batch.

    >>> from onnx import parser
    >>> import detent.onnx as qo
    >>> plan = qo.plan(parser.parse_model('''<ir_version: 8, opset_import: ["" : 17]>
    ...     g (float[1,1] x) => (float[1,1] y) <float[1,1] w = {3.0}> { [fc] y = MatMul(x, w) }'''))
    >>> qo.calibrate(plan, [np.float32([[2.0]])]).range("x")
    (2.0, 2.0)
    """
    batches = data if isinstance(data, Batches) else open_batches(data, inputs_of(plan.model))
    groups = None if memory_budget is None else tensor_groups(plan, batches, memory_budget)
    with open_workspace(executor, work_directory, None) as workspace:
        return calibrate_groups(plan, batches, groups, observer, progress, resume_file, workspace=workspace)


def calibrate_groups(
    plan: GraphPlan,
    batches: Batches,
    groups: Sequence[Sequence[str]] | None,
    observer: ObserverLike | None,
    progress: Progress,
    resume_file: str | PathLike[str] | None,
    samples: tuple[Feed, ...] | None = None,
    workspace: Workspace | None = None,
    survey: Survey | None = None,
) -> Calibration:
    """Observe tensors with one pass over the data per group; ``groups=None`` observes all tensors in one pass.

    ``samples`` are the result of ``choose_samples``; None chooses them in the first pass. With a workspace, workers run
    the model. ``survey`` has the facts about ``batches``, if they were surveyed before.
    """
    placements = plan.placements()
    specs = _observer_specs(plan, placements, observer)
    observers = {name: spec.make() for name, spec in specs.items()}
    groups = [list(observers)] if groups is None else groups
    check_passes(groups, resume_file)
    group_of = {each.tensor: each.group for each in placements}
    scaled = {each.tensor: (group_of[each.source_tensor], each.factor) for each in placements if each.source_tensor}
    if workspace is None:
        sampled = _observe_here(plan, batches, groups, observers, progress, resume_file, samples)
        chosen = samples or sampled.samples
        return Calibration(observers, chosen, sampled.count, batches.fingerprint(), scaled, sampled.summary)
    model = workspace.add_model(plan.model)
    if survey is None:
        batches = workspace.in_files(batches)
        survey = survey_data(workspace, model, batches)
    for names in groups:
        part, texts = {name: observers[name] for name in names}, {name: str(specs[name]) for name in names}
        observe_on_executor(workspace, model, batches, survey, part, texts, progress, resume_file)
    chosen = samples or choose_surveyed(plan.model, batches, survey.facts)
    return Calibration(observers, chosen, len(survey.facts), survey.fingerprint, scaled, survey.summary)


def _observe_here(
    plan: GraphPlan,
    batches: Batches,
    groups: Sequence[Sequence[str]],
    observers: Mapping[str, Observer],
    progress: Progress,
    resume_file: str | PathLike[str] | None,
    samples: tuple[Feed, ...] | None,
) -> "_SampledBatches":
    """Observe tensors in this process; return the batches that were read."""
    sampled = _SampledBatches(batches, None if samples else SampleChooser(plan.model, batches.inputs))
    for number, names in enumerate(groups):
        part = {name: observers[name] for name in names}
        source: Iterable[Feed] = sampled if not number else batches
        stream = TensorStream(plan.model, list(names), source, part, batches.count)
        core.calibrate(
            iter(stream) if batches.count is None else stream, part, progress=progress, resume_file=resume_file
        )
    if not sampled.count:
        raise NotCalibratedError("got no calibration batches, expected at least one: pass batches as data")
    return sampled


def check_passes(groups: Sequence[Sequence[str]], resume_file: str | PathLike[str] | None) -> None:
    """Reject a resume file if calibration needs several passes over the data."""
    if resume_file is not None and len(groups) > 1:
        raise SpecError(
            f"resume_file needs a single pass over the data, but memory_budget needs {len(groups)} passes: omit one of "
            "these arguments"
        )


def _observer_specs(
    plan: GraphPlan, placements: Sequence[QuantizerPlacement], observer: ObserverLike | None
) -> dict[str, ObserverSpec]:
    default = get_observer_spec("mse" if observer is None else observer)
    by_group = observers_of_rules(plan, placements)
    return {each.tensor: by_group.get(each.group, default) for each in placements if not each.source_tensor}


def observers_of_rules(plan: GraphPlan, placements: Iterable[QuantizerPlacement]) -> dict[str, ObserverSpec]:
    """Map groups to the observers that rules name; if several layers read a group, the first with a rule decides."""
    groups_of: dict[str, list[str]] = defaultdict(list)
    for each in placements:
        groups_of[each.tensor].append(each.group)
    by_group: dict[str, ObserverSpec] = {}
    for layer in plan.quantized:
        if layer.observer is not None and layer.input is not None:
            for tensor in plan.layers_by_name[layer.name].activations:
                for group in groups_of[tensor]:
                    by_group.setdefault(group, layer.observer)
    return by_group


class _SampledBatches:
    """Iterable over all batches, which counts them, and chooses samples unless ``chooser`` is None."""

    def __init__(self, batches: Batches, chooser: SampleChooser | None) -> None:
        self.batches, self.chooser, self.count, self.summary = batches, chooser, 0, DataSummary()

    @property
    def samples(self) -> tuple[Feed, ...]:
        return () if self.chooser is None else self.chooser.samples

    def __iter__(self) -> Iterator[Feed]:
        for feed in self.batches.hashed():
            self.count += 1
            self.summary.add(feed)
            if self.chooser is not None:
                self.chooser.add(feed)
            yield feed


def observed_tensors(plan: GraphPlan) -> list[str]:
    """List the tensors that calibration observes, in graph order."""
    return [each.tensor for each in plan.placements() if not each.source_tensor]


def tensor_groups(plan: GraphPlan, batches: Batches, budget: int) -> list[list[str]]:
    """Split the observed tensors of a plan into groups that each fit ``budget`` bytes, measured on the first batch.

    A tensor that is larger than the budget is a group of its own.
    """
    groups = split_by_bytes(plan.model, observed_tensors(plan), batches.check_first(), budget)
    if len(groups) > 1 and not batches.is_repeatable:
        raise SpecError(
            f"memory_budget={budget:,} needs {len(groups)} passes over the data, but data is a one-shot iterator: "
            "pass a list, a file or a directory"
        )
    return groups


def activation_params(placement: QuantizerPlacement, calibration: Calibration, *, clipped: bool) -> QuantParams:
    """Compute the parameters of a tensor from its clipping range if ``clipped``, otherwise from its min-max range.

    Results are cached, because the search for a clipping range is slow.
    """
    key = placement, clipped
    if key not in calibration._params:
        with at("tensor", placement.tensor):
            calibration._params[key] = _activation_params(placement, calibration, clipped=clipped)
    return calibration._params[key]


def _activation_params(placement: QuantizerPlacement, calibration: Calibration, *, clipped: bool) -> QuantParams:
    name, factor = calibration.source(placement.group)
    observer = calibration.observers.get(name)
    if observer is None:
        raise NotCalibratedError(
            f"tensor {placement.group!r} was not observed: call qo.calibrate with the same plan as qo.insert"
        )
    if not clipped:
        return range_params(placement, calibration, Observer.range(observer))
    params = observer.params(placement.spec)
    return _bounded(params if factor == 1 else scaled(params, factor), placement)


def range_params(
    placement: QuantizerPlacement, calibration: Calibration, bounds: tuple[ArrayLike, ArrayLike]
) -> QuantParams:
    """Compute the parameters of a group from a range of the tensor that was observed for the group."""
    _, factor = calibration.source(placement.group)
    params = QuantParams.from_range(placement.spec, *bounds, dtype="float32")
    return _bounded(params if factor == 1 else scaled(params, factor), placement)


def choose_params(
    placements: Iterable[QuantizerPlacement], calibration: Calibration, clipped: Collection[str] | None = None
) -> dict[str, QuantParams]:
    """Compute the parameters of all groups.

    Groups in ``clipped`` use their clipping range, and other groups their min-max range. None means that all groups use
    their clipping range.
    """
    return {
        each.group: activation_params(each, calibration, clipped=clipped is None or each.group in clipped)
        for each in placements
        if each.tensor == each.group and not each.source_tensor
    }


def range_decisions(
    params: Mapping[str, QuantParams], calibration: Calibration | None, clipped: Collection[str] | None = None
) -> dict[str, RangeDecision]:
    """Convert the chosen parameters of each group to a ``RangeDecision``."""
    observed = {} if calibration is None else calibration.ranges
    return {
        group: RangeDecision(
            float(each.scale), int(each.zero_point), clipped is None or group in clipped, observed.get(group)
        )
        for group, each in params.items()
    }


def _bounded(params: QuantParams, placement: QuantizerPlacement) -> QuantParams:
    """Shrink the scale until the value of the largest code is at most the upper bound of the Clip before the tensor.

    The Clip is then redundant.
    """
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
    max_noise: float = MAX_REMAINING_NOISE,
) -> set[str]:
    """Choose the groups that get the clipping range of their observer instead of the min-max range.

    ``max_noise`` limits the noise at the layers that read a group, relative to the noise with the min-max range.
    """
    layers = plan.layers_by_name
    leaving = _reaching_output(
        plan.graph,
        [layers[line.name].node.output[0] for line in plan.quantized if not layers[line.name].is_weight_only],
    )
    group_of = {each.tensor: each.group for each in placements if not each.source_tensor}
    readers = defaultdict(list)  # layers that read the codes of a group, by group
    of_matmuls = set[str]()  # groups that a matmul of two activations reads, which keep their min-max range
    for line in plan.quantized:
        data = layers[line.name].data
        if line.weight is None:
            of_matmuls.update(group_of[each] for each in layers[line.name].activations if each in group_of)
        elif line.input is not None and data in group_of:
            readers[group_of[data]].append(line.name)
    first_of_group = [each for each in placements if each.group == each.tensor and not each.source_tensor]
    clippable = [
        each
        for each in first_of_group
        if each.tensor not in leaving
        and each.group not in of_matmuls
        and not isinstance(calibration.observers[calibration.source(each.group)[0]], MinMax)
    ]
    unread = {each.group for each in clippable if not readers[each.tensor]}
    compared = [each for each in clippable if readers[each.tensor]]
    return unread | _better_clipped(plan, calibration, compared, readers, isolated, max_noise)


def _better_clipped(
    plan: GraphPlan,
    calibration: Calibration,
    placements: list[QuantizerPlacement],
    readers: dict[str, list[str]],
    isolated: IsolatedLayers,
    max_noise: float,
) -> set[str]:
    """Choose the groups whose readers have a smaller output error with the clipping range."""
    candidates = {
        each.tensor: [activation_params(each, calibration, clipped=clipped) for clipped in (False, True)]
        for each in placements
    }
    names = {name for tensor in candidates for name in readers[tensor]}
    weights = {name: plan.graph.array(plan.layers_by_name[name].weight) for name in names}
    powers: dict[str, float] = defaultdict(float)  # power of each layer's output
    noises: dict[tuple[str, str], Array] = defaultdict(lambda: np.zeros(2))  # with min-max and clipping range
    for sample in range(isolated.count if candidates else 0):
        inputs = isolated.inputs(sample)
        for tensor, params in candidates.items():
            for name in readers[tensor]:
                with at("layer", name):
                    x, weight = inputs[name], weights[name]
                    reference = isolated.run(name, x, weight)
                    powers[name] += power(reference)
                    both = [noise(reference, isolated.run(name, fake_quantize(x, each), weight)) for each in params]
                    noises[tensor, name] += both
    errors = {tensor: np.zeros(2) for tensor in candidates}
    for (tensor, name), each_range in noises.items():
        errors[tensor] += each_range / max(powers[name], 1e-30)
    return {tensor for tensor, (full, clipped) in errors.items() if clipped < max_noise * full}


def _reaching_output(graph: Graph, layer_results: Iterable[str]) -> set[str]:
    """Find the tensors that reach a model output without passing through a quantized layer."""
    stops, leaving = set(layer_results), set(graph.outputs)
    for node in reversed(graph.nodes):
        if leaving & set(node.output) and not stops & set(node.output) and node.op_type != "Shape":
            leaving.update(reads(node))
    return leaving
