"""Search for layers to keep in float, so that a metric of the model drops by at most ``max_drop``.

The search starts from the normal result, with the layers that float fallback keeps in float:

1. Forward, if the drop is above the limit: one layer after the other is kept in float. Candidates are the 8 layers that
   lower the noise at the outputs the most per byte. The one that lowers the drop the most per byte is taken. If no
   candidate lowers the drop by more than its standard error, it is the one that lowers the noise the most per byte,
   because a metric such as an accuracy is flat between two of its values, and random below its error. Whenever a
   candidate meets the limit, it is compared with the smallest set so far that does, and steps end when no candidate
   can be smaller.
2. Backward: layers whose float weights are not needed are quantized again, those with the most bytes first; this
   includes the layers of float fallback, because with a limit, the metric decides.
3. Swaps: one or two layers in float are replaced by one or two layers with fewer bytes, those with the least noise
   first, if the limit is still met. Then step 2 runs again.

Each candidate is a complete model, which ONNX Runtime runs on all search samples with its own kernels. The limit is met
if the upper end of the drop's 95 % confidence interval is within the limit (``MetricResult.largest_drop``), because
the search stops as soon as a limit is met: without a margin, about half of all results would exceed the limit on new
samples. At least one layer stays quantized, so the search can fail. It then ends with the fewest bytes among all sets
measured so far that reach at least nine tenths of the largest decrease of the drop.
"""

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import combinations, product
from typing import Any, NamedTuple, Protocol

from numpy.typing import NDArray
from onnx import ModelProto, TensorProto

from detent.array_store import ArrayStore
from detent.error_places import at
from detent.errors import SpecError
from detent.model_metric import BUILT_IN, MetricComparison, MetricLike, MetricResult
from detent.onnx.decisions import Decisions
from detent.onnx.float_fallback import NoiseByLayer
from detent.onnx.graph_plan import GraphPlan
from detent.onnx.output_items import BatchOutputs, RemoteOutputs
from detent.onnx_model.batches import Batches, samples_in
from detent.onnx_model.files import LoadedModel, ModelSource
from detent.onnx_model.graph import Graph
from detent.onnx_model.sessions import array_outputs, make_session, ort_errors
from detent.onnx_model.workspace import Workspace
from detent.tables import bytes_text

__all__ = [
    "CollectedOutputs",
    "MetricGoal",
    "MetricSearch",
    "ModelOutputs",
    "ModelTrials",
    "SearchStep",
    "Trials",
    "class_labels",
    "collect_outputs",
    "search_float_layers",
]

_log = logging.getLogger(__name__)

Array = NDArray[Any]
Feed = dict[str, Array]
Layers = frozenset[str]
Names = tuple[str, ...]

WITHOUT_CLASSES = ("cosine", "iou")  # metrics whose labels are not classes
MAX_DROP_REASON = "kept in float to meet max_drop"
MAX_CANDIDATES = 8  # layers whose metric is measured in one step of the forward search
MAX_SWAPS = 32  # swaps whose metric is measured
MIN_DECREASE = 0.9  # of the largest decrease of the drop, for the result of a failed search
TOLERANCE = 1e-9
MAX_OUTPUT_BYTES = 4 << 30  # outputs of one model on all samples
METRIC_PARTS = 5  # batches, and outputs of two models, twice; each gets this part of the memory budget
MAX_KEPT_BYTES = 1 << 30  # batches up to this size are read once; larger data are read for each candidate


class SearchStep(NamedTuple):
    """A step of the search.

    Attributes:
        layer: name of the layer.
        in_float: True if the layer is kept in float, False if it is quantized again.
        value: metric after the step.
        drop: drop of the metric after the step.
        nbytes: bytes of all weights after the step.
    """

    layer: str
    in_float: bool
    value: float
    drop: float
    nbytes: int

    def __str__(self) -> str:
        action = f"kept {self.layer} in float" if self.in_float else f"quantized {self.layer} again"
        return f"max_drop: {action}: metric {self.value:.4f}, drop {self.drop:.4f}, weights {bytes_text(self.nbytes)}"


@dataclass(frozen=True)
class MetricSearch:
    """Result of the search.

    Attributes:
        max_drop: the limit.
        before: metric of the normal result, on the search samples.
        after: metric of the final result, on the search samples.
        steps: the steps, in their order.
        layers: the layers in float, those of float fallback included.
        nbytes_before: bytes of all weights in the normal result.
        nbytes_after: bytes of all weights in the final result.
        trials: number of models whose metric was measured.
    """

    max_drop: float
    before: MetricResult
    after: MetricResult
    steps: tuple[SearchStep, ...]
    layers: tuple[str, ...]
    nbytes_before: int
    nbytes_after: int
    trials: int

    @property
    def is_met(self) -> bool:
        """Whether the limit is met on the search samples, with a confidence of 95 %."""
        return _meets(self.after, self.max_drop)

    def to_dict(self) -> dict[str, Any]:
        """Return the search as plain values."""
        results = {"before": self.before.to_dict(), "after": self.after.to_dict(), "is_met": self.is_met}
        return {**asdict(self), **results, "steps": [each._asdict() for each in self.steps]}


class MetricGoal(NamedTuple):
    """A metric, compared with the float model on some batches, and the limit of its drop; None without a limit.

    ``outputs`` computes the outputs that the metric gets.
    """

    comparison: MetricComparison
    outputs: "ModelOutputs"
    max_drop: float | None

    @classmethod
    def of(
        cls,
        model: LoadedModel,
        batches: Batches,
        metric: MetricLike | None,
        labels: Array | None,
        max_drop: float | None,
        workspace: Workspace | None = None,
        memory_budget: int | None = None,
    ) -> "MetricGoal":
        """Run the float model on all batches; fail early if the metric or the labels do not fit its outputs.

        Without ``labels``, those of ``class_labels`` are used. With a workspace, workers run the models. Batches and
        outputs above the memory budget are read again, or kept in a temporary file.
        """
        labels = class_labels(model, batches, metric) if labels is None else labels
        names = array_outputs(model.proto)
        if metric is None or (isinstance(metric, str) and metric in BUILT_IN):
            names = names[:1]  # the only output that built-in metrics read
        budget = None if memory_budget is None else memory_budget // METRIC_PARTS
        outputs = ModelOutputs(names, batches, None if _has_texts(model) else workspace, budget)
        (floats,) = outputs.run([model.proto])
        return cls(MetricComparison(metric, *floats, labels, budget), outputs, max_drop)

    def measure_all(self, models: Iterable[ModelProto]) -> Iterator[MetricResult]:
        """Measure the metric of quantized models."""
        return (self.comparison.measure(collected.outputs) for collected in self.outputs.run(models))

    def measure(self, model: ModelProto) -> MetricResult:
        """Measure the metric of a quantized model."""
        (result,) = self.measure_all([model])
        return result


def _has_texts(model: LoadedModel) -> bool:
    """Return whether an output is an array of texts."""
    return any(value.type.tensor_type.elem_type == TensorProto.STRING for value in model.proto.graph.output)


def class_labels(model: LoadedModel, batches: Batches, metric: MetricLike | None) -> Array | None:
    """Return the labels of a directory whose sub-directories are classes; None if they cannot be used.

    They are used if the first output has shape (N, C) with one column per sub-directory, and the metric is "top1" or
    "auto" or a function. A note in the batches says which labels are used, or why there are none.
    """
    if not batches.classes or metric in WITHOUT_CLASSES:
        return None
    graph, names = Graph(model.proto), array_outputs(model.proto)
    shape = graph.shape(names[0]) if names else None
    columns = shape[1] if shape is not None and len(shape) == 2 else None
    directories = f"{len(batches.classes)} sub-directories"
    if columns != len(batches.classes):
        classes = "no known number of classes" if columns is None else f"{columns} classes"
        batches.add_note(f"labels: none (--labels), because the data have {directories}, but the model {classes}")
        return None
    first, last = batches.classes[0], batches.classes[-1]
    batches.add_note(f"labels: {directories} in sorted order, from 0 ({first}) to {columns - 1} ({last})")
    return batches.labels


class Trials(Protocol):
    """Measurements that the search makes of a set of layers in float."""

    def result(self, layers: Layers) -> MetricResult:
        """Measure the metric."""

    def nbytes(self, layers: Layers) -> int:
        """Return the bytes of all weights."""

    def noise(self, layers: Layers) -> float:
        """Return the noise at the outputs."""

    def is_quantized(self, layers: Layers) -> bool:
        """Return whether another layer remains quantized."""

    def prepare(self, candidates: Sequence[Layers]) -> None:
        """Measure the metric of several sets, in parallel if possible; ``result`` then returns it at once."""


def search_float_layers(
    candidates: Sequence[str], start: Iterable[str], trials: Trials, max_drop: float
) -> MetricSearch:
    """Search for a small set of layers to keep in float; see the module docstring.

    Args:
        candidates: all layers that can be quantized, in the order of the graph.
        start: layers that the normal result keeps in float.
        trials: measures the metric, bytes and noise of a set of layers in float.
        max_drop: the limit.
    """
    search = _Search(candidates, frozenset(start), trials, max_drop)
    before, nbytes_before = trials.result(search.layers), trials.nbytes(search.layers)
    search.forward()
    if search.is_met(search.layers):
        search.backward()
        while search.swap():
            search.backward()
    layers = tuple(name for name in candidates if name in search.layers)
    result, nbytes = trials.result(search.layers), trials.nbytes(search.layers)
    return MetricSearch(max_drop, before, result, tuple(search.steps), layers, nbytes_before, nbytes, search.count)


class _Search:
    """State of the search: the layers in float, and the steps so far."""

    def __init__(self, candidates: Sequence[str], start: Layers, trials: Trials, max_drop: float) -> None:
        self.layers, self.steps = start, list[SearchStep]()
        self._candidates, self._trials, self._max_drop = list(candidates), trials, max_drop
        self._measured = {start}
        self._swaps = 0

    @property
    def count(self) -> int:
        """Number of sets of layers whose metric was measured."""
        return len(self._measured)

    def is_met(self, layers: Layers) -> bool:
        return _meets(self._result(layers), self._max_drop)

    def _result(self, layers: Layers) -> MetricResult:
        self._measured.add(layers)
        return self._trials.result(layers)

    def forward(self) -> None:
        """Keep one layer after the other in float, and end with the smallest set that meets the limit.

        If no set meets the limit, end with a small set that comes close to the smallest drop.
        """
        if self.is_met(self.layers):
            return
        best: tuple[list[str], int] | None = None  # added layers, and bytes
        layers, path = self.layers, list[str]()
        while best is None or best[0] != path:
            names = [name for name in self._promising(layers) if best is None or self._size(layers, name) < best[1]]
            self._trials.prepare([layers | {name} for name in names])
            meeting = [name for name in names if self._is_met_with(layers, name)]
            if meeting:
                name = min(meeting, key=lambda each: self._size(layers, each))
                best = [*path, name], self._size(layers, name)
            names = [name for name in names if name not in meeting]
            if not names:
                break
            name = self._densest(layers, names)
            layers, path = layers | {name}, [*path, name]
        for name in self._closest() if best is None else best[0]:
            self._change(name)

    def _closest(self) -> list[str]:
        """Return the layers to keep in float if the search fails; see the module docstring."""
        start = self._result(self.layers).largest_drop
        drops = {layers: self._trials.result(layers).largest_drop for layers in self._measured}
        limit = start - MIN_DECREASE * (start - min(drops.values())) + TOLERANCE
        chosen = min(
            (layers for layers, drop in drops.items() if drop <= limit),
            key=lambda layers: (self._trials.nbytes(layers), drops[layers], sorted(layers)),
        )
        return [name for name in self._candidates if name in chosen - self.layers]

    def _densest(self, layers: Layers, names: Sequence[str]) -> str:
        """Return the layer that lowers the drop the most per byte, or the first if no layer clearly lowers it."""
        result, size = self._result(layers), self._trials.nbytes(layers)
        gains = {name: result.largest_drop - self._result(layers | {name}).largest_drop for name in names}
        clear = [name for name in names if gains[name] > max(TOLERANCE, result.standard_error or 0.0)]
        return max(clear or names[:1], key=lambda name: gains[name] / max(1, self._size(layers, name) - size))

    def _promising(self, layers: Layers) -> list[str]:
        """Return the candidates that lower the noise the most per byte, the best first."""
        noise, size = self._trials.noise(layers), self._trials.nbytes(layers)
        names = [each for each in self._candidates if each not in layers]
        names = [each for each in names if self._trials.is_quantized(layers | {each})]
        gains: dict[str, float] = {}
        for each in names:
            with at("layer", each):
                gains[each] = noise - self._trials.noise(layers | {each})
        return sorted(names, key=lambda each: -gains[each] / max(1, self._size(layers, each) - size))[:MAX_CANDIDATES]

    def _is_met_with(self, layers: Layers, name: str) -> bool:
        with at("layer", name):
            return self.is_met(layers | {name})

    def _size(self, layers: Layers, name: str) -> int:
        return self._trials.nbytes(layers | {name})

    def backward(self) -> None:
        """Quantize layers again that are no longer needed, those with the most bytes first."""
        names = sorted(self.layers, key=lambda name: (self._trials.nbytes(self.layers - {name}), name))
        for name in names:
            with at("layer", name):
                if self._saves(self.layers - {name}) and self.is_met(self.layers - {name}):
                    self._change(name)

    def swap(self) -> bool:
        """Replace one or two layers in float by at most two cheaper ones; return whether there was such a swap."""
        for old, new in self._possible_swaps():
            if self._swaps == MAX_SWAPS:
                return False
            self._swaps += 1
            if self.is_met((self.layers - set(old)) | set(new)):
                for name in (*new, *old):
                    self._change(name)
                return True
        return False

    def _possible_swaps(self) -> list[tuple[Names, Names]]:
        """Return swaps that save bytes, in the order of their noise, estimated as if noises added up."""
        noise, outside = self._trials.noise(self.layers), self._promising(self.layers)
        gains = {name: noise - self._trials.noise(self.layers | {name}) for name in outside}
        losses = {name: self._trials.noise(self.layers - {name}) - noise for name in sorted(self.layers)}
        pairs = list(product(_up_to_two(losses), _up_to_two(gains)))
        pairs = [(old, new) for old, new in pairs if self._saves((self.layers - set(old)) | set(new))]
        return sorted(
            pairs, key=lambda pair: sum(losses[name] for name in pair[0]) - sum(gains[name] for name in pair[1])
        )

    def _saves(self, layers: Layers) -> bool:
        return self._trials.nbytes(layers) < self._trials.nbytes(self.layers)

    def _change(self, name: str) -> None:
        """Keep a layer in float, or quantize it again."""
        is_added = name not in self.layers
        self.layers = self.layers | {name} if is_added else self.layers - {name}
        result = self._result(self.layers)
        step = SearchStep(name, is_added, result.value, result.drop, self._trials.nbytes(self.layers))
        _log.info("%s", step)
        self.steps.append(step)


def _up_to_two(names: Iterable[str]) -> list[Names]:
    return [each for count in (1, 2) for each in combinations(names, count)]


def _meets(result: MetricResult, max_drop: float) -> bool:
    return result.largest_drop <= max_drop + TOLERANCE


class CollectedOutputs(NamedTuple):
    """Outputs of a model on some batches: one dict and one number of samples per batch."""

    outputs: Sequence[Mapping[str, Array]]
    sizes: list[int]


class _StoredBatches(Sequence[Feed]):
    """Dicts of arrays; those above the memory budget are in a temporary file."""

    def __init__(self, memory_budget: int | None) -> None:
        self._arrays, self._names = ArrayStore(memory_budget), list[tuple[str, ...]]()

    def append(self, batch: Mapping[str, Array]) -> None:
        self._arrays[len(self._names)] = list(batch.values())
        self._names.append(tuple(batch))

    def __len__(self) -> int:
        return len(self._names)

    def __getitem__(self, index: Any) -> Any:  # noqa: ANN401 - a batch; slices are not needed
        return dict(zip(self._names[index], self._arrays[index], strict=True))


def collect_outputs(model: ModelSource, names: Sequence[str], feeds: Iterable[Feed]) -> CollectedOutputs:
    """Run a model on all batches, and keep the named outputs.

    Raises:
        SpecError: the outputs take more than 4 GiB.
    """
    return _collected(names, _local_outputs(model, names, feeds), None)


def _local_outputs(model: ModelSource, names: Sequence[str], feeds: Iterable[Feed]) -> Iterator[BatchOutputs]:
    session = make_session(model)
    for feed in feeds:
        with ort_errors():
            yield BatchOutputs(session.run(list(names), feed) if names else [], samples_in(feed))


def _collected(names: Sequence[str], batches: Iterable[BatchOutputs], memory_budget: int | None) -> CollectedOutputs:
    stored, sizes, total = _StoredBatches(memory_budget), list[int](), 0
    for arrays, samples in batches:
        total += sum(getattr(each, "nbytes", 0) for each in arrays)
        if total > MAX_OUTPUT_BYTES:
            raise SpecError(
                f"the outputs of all evaluation samples take more than {bytes_text(MAX_OUTPUT_BYTES)}, which a metric "
                "needs at once: pass fewer evaluation samples"
            )
        stored.append(dict(zip(names, arrays, strict=True)))
        sizes.append(samples)
    return CollectedOutputs(stored, sizes)


class ModelOutputs:
    """Runs models on all batches of the evaluation data; with a workspace, its workers run them."""

    def __init__(
        self, names: Sequence[str], batches: Batches, workspace: Workspace | None, memory_budget: int | None = None
    ) -> None:
        self._names, self._workspace = list(names), workspace if names else None
        self._batches, self._budget = batches, memory_budget
        self._feeds: Iterable[Feed] = () if self._workspace is not None else _kept(batches, memory_budget)

    def run(self, models: Iterable[ModelProto]) -> Iterator[CollectedOutputs]:
        """Yield the outputs of each model."""
        if self._workspace is None:
            for model in models:
                yield _collected(self._names, _local_outputs(model, self._names, self._feeds), self._budget)
            return
        for batches in RemoteOutputs(self._workspace, self._names, self._batches).run(models):
            yield _collected(self._names, batches, self._budget)


class ModelTrials:
    """Measures sets of layers in float with complete models, in ONNX Runtime.

    ``replan`` returns the plan with some layers in float, ``decisions_of`` the decisions of a plan, and ``rewritten``
    the quantized model. ``noise`` measures the noise at the outputs of a plan.
    """

    def __init__(
        self,
        goal: MetricGoal,
        replan: Callable[[Layers], GraphPlan],
        decisions_of: Callable[[GraphPlan], Decisions],
        rewritten: Callable[[Decisions], ModelProto],
        noise: NoiseByLayer,
    ) -> None:
        self._replan, self._decisions_of, self._rewritten, self._noise = replan, decisions_of, rewritten, noise
        self._goal = goal
        self._plans: dict[Layers, GraphPlan] = {}
        self._results: dict[Layers, MetricResult] = {}
        self._noises: dict[Layers, float] = {}

    def plan(self, layers: Layers) -> GraphPlan:
        """Return the plan with some layers in float."""
        if layers not in self._plans:
            self._plans[layers] = self._replan(layers)
        return self._plans[layers]

    def result(self, layers: Layers) -> MetricResult:
        """Measure the metric of the quantized model with some layers in float."""
        if layers not in self._results:
            self.measure(layers, self._decisions_of(self.plan(layers)))
        return self._results[layers]

    def prepare(self, candidates: Sequence[Layers]) -> None:
        """Measure the metric of several sets of layers in float; workers run the models in parallel."""
        missing = [layers for layers in candidates if layers not in self._results]
        models = (self._rewritten(self._decisions_of(self.plan(layers))) for layers in missing)
        self._results |= zip(missing, self._goal.measure_all(models), strict=True)

    def measure(self, layers: Layers, decisions: Decisions) -> MetricResult:
        """Measure the metric of the model with these decisions, and use it as the result of ``layers``."""
        self._results[layers] = self._goal.measure(self._rewritten(decisions))
        return self._results[layers]

    def nbytes(self, layers: Layers) -> int:
        """Return the bytes of all weights."""
        return self.plan(layers).nbytes_after

    def noise(self, layers: Layers) -> float:
        """Return the noise at the outputs."""
        if layers not in self._noises:
            self._noises[layers] = self._noise.noise_of(self.plan(layers))
        return self._noises[layers]

    def is_quantized(self, layers: Layers) -> bool:
        """Return whether a layer remains quantized."""
        return bool(self.plan(layers).quantized)


def _kept(batches: Batches, memory_budget: int | None) -> Iterable[Feed]:
    """Return the batches as a sequence, or as they are if they are large and can be read again."""
    feeds, total = _StoredBatches(memory_budget), 0
    limit = MAX_KEPT_BYTES if memory_budget is None else min(memory_budget, MAX_KEPT_BYTES)
    for feed in batches:
        feeds.append(feed)
        total += sum(array.nbytes for array in feed.values())
        if total > limit and batches.is_repeatable:
            return batches
    return feeds
