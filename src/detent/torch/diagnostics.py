"""Diagnostics: the health of each quantizer in quantization-aware training, with advice.

=============  =======================================================================================================
clip           share of elements whose code is clamped
codes          share of the spec's codes that are in use
drift          current scale divided by the first calibrated or observed scale, for the scale that changed most
oscillation    share of weights whose code goes back and forth
saturated      share of gradients that the straight-through estimator (STE) stops
=============  =======================================================================================================

All elements of exported weights are measured. Activations are measured on the batches passed to ``qt.health``, or on
the latest samples of ``qt.watch``. A watched forward pass samples about ``MAX_SAMPLE`` elements of a tensor, at equal
distances, so that every index of every axis occurs. Weights are sampled after each change, and activations every
few calls. Models that are not watched have no overhead.

The code of a weight *reverses* if it changes against the direction of its last change. The frequency f of reversals is
an exponential average over steps (Nagel et al. 2022, "Overcoming oscillations in quantization-aware training")::

    f = MOMENTUM * reversed + (1 - MOMENTUM) * f              the weight oscillates if f > MAX_FREQUENCY

Compiled forward passes cannot be watched, because watchers are Python code. Pass batches to ``qt.health`` instead.
"""

import json
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from math import gcd
from typing import TYPE_CHECKING, Any, Literal, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from detent.checks import as_integer
from detent.errors import DtypeError, SpecError, closest
from detent.granularity import Granularity, PerAxis, PerTensor
from detent.metrics import clip_fraction, code_usage
from detent.ops import fake_quantize_backward, quantize
from detent.params import QuantParams
from detent.plots import bar_axes
from detent.scale_mode import Learned, PerBatch
from detent.scale_rule import Parameters
from detent.spec import QuantSpec
from detent.ste import Clipped, Custom, Estimator, Identity
from detent.tables import counted, html_table, short_repr, table_lines
from detent.tensor import QuantizedTensor
from detent.torch.arrays import call_with, on_cpu, to_array
from detent.torch.integer_probe import integer_kernels
from detent.torch.preparation import evaluating, plan_of, quantizers_of, weight_layers
from detent.torch.quantized_layer import QuantizedMatmul
from detent.torch.quantizer import FakeQuantize

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = [
    "HealthReport",
    "Measure",
    "Oscillation",
    "QuantizerHealth",
    "Watch",
    "Watcher",
    "health",
    "measure",
    "sample",
    "watch",
]

MAX_SAMPLE = 4096  # elements per tensor and forward pass; enough to measure shares of 0.1 %
KEPT_SAMPLES = 16  # latest samples kept per activation; older samples were computed with older weights
MOMENTUM = 0.01  # weight of a new step in the average frequency of reversals, as in the paper
MAX_FREQUENCY = 0.005  # a weight with more reversals per step oscillates, as in the paper
SATURATED_GAIN = 0.01  # a gradient counts as saturated if the STE multiplies it by less than this

# ``qt.health`` warns if a metric is beyond its limit.
CLIP_LIMITS = {6: 0.02, 4: 0.06, 1: 0.2}  # number of bits -> maximum clip fraction for this many bits or more
USAGE_LIMIT = 0.5  # minimum share of codes in use
ELEMENTS_PER_CODE = 16  # if there are fewer elements per code, unused codes are normal
DRIFT_LIMIT = 4.0  # largest factor by which a scale may have grown or shrunk
OSCILLATION_LIMIT = 0.1  # maximum share of oscillating weights
SATURATION_LIMIT = 0.2  # maximum share of saturated gradients; not checked if there is a warning about clipping

HEAD = ("quantizer", "data", "clip", "codes", "drift", "oscillation", "saturated")
METRIC_COLUMNS = range(2, len(HEAD))
Metric = Literal["clip_fraction", "code_usage", "drift", "oscillation", "saturated"]
METRIC_LABELS: Mapping[str, str] = {
    "clip_fraction": "clipped elements in %",
    "code_usage": "codes in use in %",
    "drift": "current scale / first scale",
    "oscillation": "oscillating weights in %",
    "saturated": "stopped gradients in %",
}
Array = NDArray[Any]
Batch = Tensor | tuple[Any, ...] | list[Any] | Mapping[str, Any]


@dataclass(frozen=True)
class Measure:
    """Counts over quantized data: elements, clipped elements, saturated gradients, and the codes in use."""

    size: int
    clipped: int
    saturated: int | None  # None if the STE is a callable
    codes: Array  # the distinct codes, in the format's storage type

    @staticmethod
    def merge(parts: Sequence["Measure"]) -> "Measure":
        """Add up the counts of several parts of the data."""
        saturated = [part.saturated for part in parts if part.saturated is not None]
        return Measure(
            sum(part.size for part in parts),
            sum(part.clipped for part in parts),
            sum(saturated) if len(saturated) == len(parts) else None,
            _distinct(np.concatenate([part.codes for part in parts])),
        )


def measure(x: Array, params: QuantParams, ste: Estimator) -> Measure:
    """Count the clipped elements and saturated gradients of x, and collect the codes in use."""
    clipped = round(clip_fraction(x, params) * x.size)
    saturated: int | None
    if isinstance(ste, Custom):
        saturated = None
    elif isinstance(ste, Identity):
        saturated = 0
    elif ste == Clipped():  # this STE stops exactly the gradients of clipped elements
        saturated = clipped
    else:
        gradient = fake_quantize_backward(np.ones_like(x), x, params, ste=ste)
        saturated = int(np.count_nonzero(~(np.abs(gradient) >= SATURATED_GAIN)))
    return Measure(x.size, clipped, saturated, _distinct(quantize(x, params, nan="zero_point").codes))


def _distinct(codes: Array) -> Array:
    if codes.dtype.kind in "iu":
        return np.unique(codes)
    return np.unique(codes.view(np.uint8)).view(codes.dtype)  # compare float8 and narrower formats by their bits


def sample(x: Tensor, params: QuantParams) -> tuple[Array, QuantParams]:
    """Return about ``MAX_SAMPLE`` elements of x as a vector, and the parameters of these elements."""
    step = _distance(x.numel())
    data = to_array(x.detach().reshape(-1)[::step].cpu()).copy()  # a copy, because callers may keep it
    if isinstance(params.spec.granularity, PerTensor):
        return data, params
    sets = _sets(params.spec.granularity, tuple(x.shape))
    scale, zero_point = params.scale.reshape(-1)[sets], params.zero_point.reshape(-1)[sets]
    return data, QuantParams.trusted(_each(params.spec), Parameters(scale, zero_point), scale, scale)


@lru_cache(maxsize=1024)
def _distance(size: int) -> int:
    """Return the distance between samples: coprime to the size, so that every index of every axis is sampled."""
    step = max(1, -(-size // MAX_SAMPLE))
    while gcd(step, size) > 1:
        step += 1
    return step


@lru_cache(maxsize=256)
def _sets(granularity: Granularity, shape: tuple[int, ...]) -> NDArray[np.intp]:
    """Return the index of the parameter set of each sampled element."""
    tiling = granularity.tiling(shape)
    size = int(np.prod(shape))
    indices = np.unravel_index(np.arange(0, size, _distance(size)), shape)
    blocks = tuple(index // block for index, block in zip(indices, tiling.block, strict=True))
    return np.ravel_multi_index(blocks, tiling.grid)


@lru_cache(maxsize=256)
def _each(spec: QuantSpec) -> QuantSpec:
    """Return the spec for a vector with one float scale per element."""
    return spec.replace(granularity=PerAxis(0), scale_format="float")


class Oscillation:
    """Average frequency at which the codes of a weight reverse their direction."""

    def __init__(self) -> None:
        self.steps = 0
        self._data: Array | None = None
        self._levels: Array | None = None
        self._direction: Array = np.zeros(())
        self._frequency: Array = np.zeros(())

    @property
    def rate(self) -> float | None:
        """The share of weights that oscillate, or None before the second step."""
        return float(np.mean(self._frequency > MAX_FREQUENCY)) if self.steps else None

    def update(self, data: Array, params: QuantParams) -> None:
        """Count the codes that reversed since the last update; a call with unchanged weights is not a step."""
        if self._data is not None and np.array_equal(self._data, data):
            return
        levels = _levels(quantize(data, params, nan="zero_point"))
        if self._levels is None or self._levels.shape != levels.shape:
            self.__init__()  # type: ignore[misc]  # the weight was replaced: restart the average
            self._direction, self._frequency = np.zeros((2, *levels.shape), np.float32)
        else:
            moved = np.sign(levels - self._levels)
            is_reversed = moved * self._direction < 0
            self._direction = np.where(moved != 0, moved, self._direction)
            self._frequency = MOMENTUM * is_reversed + (1 - MOMENTUM) * self._frequency
            self.steps += 1
        self._data, self._levels = data, levels


def _levels(q: QuantizedTensor) -> Array:
    """Return numbers that sort like the dequantized codes."""
    if q.spec.format.kind == "float":
        return np.asarray(q.spec.format.levels, np.float32)[q.codes.view(np.uint8)]
    return q.codes.astype(np.float32)


class Watcher:
    """Sampler of the data of one quantizer in training.

    The quantizer calls its watcher in each forward pass that quantizes.
    """

    def __init__(self, quantizer: FakeQuantize, *, is_weight: bool, every: int = 1) -> None:
        has_scale = quantizer.is_initialized and not isinstance(quantizer.mode, PerBatch)
        self.first: Array | None = quantizer.params.scale if has_scale else None  # the scale that drift refers to
        self.oscillation = Oscillation() if is_weight else None
        self._recent: deque[Measure] = deque(maxlen=KEPT_SAMPLES)
        self._every, self._calls = every, 0

    def __call__(self, quantizer: FakeQuantize, x: Tensor, params: QuantParams | None) -> None:
        """Sample x: a weight at each call, an activation every few calls; compute ``params`` if it is None."""
        if not quantizer.training or torch._C._are_functorch_transforms_active() or not x.numel():
            return
        self._calls += 1
        if self.oscillation is None and (self._calls - 1) % self._every:
            return
        params = quantizer.params_for(x) if params is None else params
        self.first = params.scale if self.first is None else self.first
        data, data_params = sample(x, params)
        if self.oscillation is None:
            self._recent.append(measure(data, data_params, quantizer.ste))
        else:
            self.oscillation.update(data, data_params)

    def measured(self) -> Measure | None:
        """Return the counts over the latest samples of an activation, or None if there are no samples."""
        return Measure.merge(self._recent) if self._recent else None


class Watch:
    """A watched model, as ``qt.watch`` returns it; used as a context manager, it stops watching on exit.

    >>> import detent.torch as qt
    >>> with qt.watch(qt.prepare(nn.Sequential(nn.Linear(4, 2)), "w8a8")) as watched:
    ...     print(watched)
    Watch(2 quantizers, activations every 16 calls)
    """

    def __init__(self, model: nn.Module, every: int) -> None:
        weights = {id(quantizer) for *_, quantizer in weight_layers(model)}
        self.every = every
        self._watched: dict[FakeQuantize, Watcher] = {}
        for quantizer in quantizers_of(model).values():
            quantizer.watcher = watcher = Watcher(quantizer, is_weight=id(quantizer) in weights, every=every)
            self._watched[quantizer] = watcher

    def stop(self) -> None:
        """Stop watching and forget all samples."""
        for quantizer, watcher in self._watched.items():
            if quantizer.watcher is watcher:
                quantizer.watcher = None
        self._watched.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def __repr__(self) -> str:
        return f"Watch({counted(len(self._watched), 'quantizer')}, activations every {counted(self.every, 'call')})"


def watch(model: nn.Module, *, every: int = 16) -> Watch:
    """Sample a model while it trains, for ``qt.health``.

    Call ``qt.watch`` after calibration, because drift is measured relative to the scales at the time of the call. In
    training mode, weights are sampled after each optimizer step, and activations every few calls of their quantizers.
    Compiled forward passes are not sampled. A second call on the same model discards the samples of the first call.

    Args:
        model: a prepared model.
        every: an activation is sampled once per this many calls of its quantizer.

    Raises:
        StateError: the model is not prepared.
        SpecError: ``every`` is not a positive integer.

    >>> import detent.torch as qt
    >>> model = qt.prepare(nn.Sequential(nn.Linear(4, 2)), "w8a8")
    >>> with qt.watch(model):
    ...     _ = model(torch.ones(3, 4))
    ...     print(qt.health(model)["0.input_quantizer"].code_usage == 1 / 256)
    True
    """
    if not isinstance(model, nn.Module):
        raise DtypeError(
            f"got {type(model).__name__} for model, expected a module prepared by qt.prepare: call qt.prepare first"
        )
    plan_of(model)
    return Watch(model, as_integer("every", every, at_least=1))


@dataclass(frozen=True)
class QuantizerHealth:
    """The health of one quantizer; metrics that could not be measured are None.

    Attributes:
        name: full name of the quantizer in the model.
        spec: spec of the quantizer, as text.
        mode: scale mode of the quantizer, as text.
        source: origin of the measured data: "weight", "batches" or "watch", or "" if nothing was measured.
        elements: number of measured elements.
        clip_fraction: share of elements whose code is clamped.
        code_usage: share of the spec's codes that are in use.
        drift: current scale divided by the first scale, for the scale that changed most.
        oscillation: share of weights whose code goes back and forth.
        saturated: share of gradients that the straight-through estimator stops.
        note: why nothing was measured, or "" if something was measured.
        warnings: one text per problem, with advice.
    """

    name: str
    spec: str
    mode: str
    source: str = ""
    elements: int = 0
    clip_fraction: float | None = None
    code_usage: float | None = None
    drift: float | None = None
    oscillation: float | None = None
    saturated: float | None = None
    note: str = ""
    warnings: tuple[str, ...] = ()

    def __repr__(self) -> str:
        return short_repr(self)


@dataclass(frozen=True)
class HealthReport:
    """The health of every quantizer of a model.

    ``str`` returns a table with the warnings below it; notebooks show the report as HTML. ``arithmetic`` says which
    kernels multiply codes in how many layers; it is empty if all layers multiply floats.

    >>> report = HealthReport((QuantizerHealth("fc.weight_quantizer", "int8", "PerBatch()", "weight", 8, 0.0, 0.5),))
    >>> report
    <HealthReport: 1 quantizer, 0 warnings>
    >>> print(report)
    quantizer            data      clip  codes   drift  oscillation  saturated
    fc.weight_quantizer  weight  0.00 %   50 %       -            -          -
    no warnings
    >>> report["fc.weight_quantizer"].code_usage, report.warnings
    (0.5, ())
    """

    quantizers: tuple[QuantizerHealth, ...]
    arithmetic: str = ""

    @property
    def warnings(self) -> tuple[str, ...]:
        """The warnings of all quantizers."""
        return tuple(text for each in self.quantizers for text in each.warnings)

    def __getitem__(self, name: str) -> QuantizerHealth:
        """Return the health of the quantizer with the full name ``name``."""
        rows = {each.name: each for each in self.quantizers}
        if name not in rows:
            raise SpecError(f"unknown quantizer {name!r}{closest(str(name), rows)} expected one of {list(rows)}")
        return rows[name]

    def __str__(self) -> str:
        return "\n".join([*table_lines(self._rows(), right=METRIC_COLUMNS), *self._notes()])

    def __repr__(self) -> str:
        return f"<HealthReport: {counted(len(self.quantizers), 'quantizer')}, {counted(len(self.warnings), 'warning')}>"

    def _repr_html_(self) -> str:
        return html_table(self._rows(), right=METRIC_COLUMNS, notes=self._notes())

    def _rows(self) -> list[tuple[str, ...]]:
        return [HEAD, *map(_row, self.quantizers)]

    def _notes(self) -> list[str]:
        notes = [f"! {text}" for text in self.warnings] or ["no warnings"]
        return [*notes, self.arithmetic] if self.arithmetic else notes

    def plot(self, metric: Metric = "clip_fraction", ax: "Axes | None" = None) -> "Axes":
        """Plot a metric of each quantizer as bars; quantizers with warnings are red.

        Args:
            metric: the attribute of ``QuantizerHealth`` to plot.
            ax: matplotlib Axes to draw on; None creates new Axes.

        Returns:
            The Axes.

        Raises:
            SpecError: the metric is unknown.
            UnsupportedError: ``ax`` is None and matplotlib is not installed.
        """
        if metric not in METRIC_LABELS:
            raise SpecError(
                f"unknown metric {metric!r}{closest(str(metric), METRIC_LABELS)} expected one of {list(METRIC_LABELS)}"
            )
        ax = bar_axes(ax, [each.name for each in self.quantizers])
        factor = 1 if metric == "drift" else 100
        values: list[float | None] = [getattr(each, metric) for each in self.quantizers]
        colors = ["tab:red" if each.warnings else "tab:blue" for each in self.quantizers]
        ax.barh(range(len(values)), [factor * (value or 0.0) for value in values], color=colors)
        for row, value in enumerate(values):
            if value is None:
                ax.text(0, row, " no data", va="center", color="gray")
        ax.set_xlabel(METRIC_LABELS[metric])
        ax.set_title(counted(len(self.warnings), "warning"))
        return ax

    def to_json(self) -> str:
        """Return all metrics and warnings as JSON."""
        rows = [asdict(each) for each in self.quantizers]
        return json.dumps({"version": 1, "quantizers": rows, "arithmetic": self.arithmetic})


def _row(each: QuantizerHealth) -> tuple[str, ...]:
    drift = "-" if each.drift is None else f"{each.drift:.3g}x"
    shares = (_share(each.clip_fraction, 2), _share(each.code_usage), drift)
    return each.name, each.source or each.note or "-", *shares, _share(each.oscillation, 1), _share(each.saturated, 2)


def _share(value: float | None, digits: int = 0) -> str:
    return "-" if value is None else f"{100 * value:.{digits}f} %"


@torch.no_grad()
def health(model: nn.Module, batches: Iterable[Batch] | None = None) -> HealthReport:
    """Measure each quantizer: clipping, unused codes, drift of scales, oscillation of weights, stopped gradients.

    Args:
        model: a prepared model, calibrated or in training.
        batches: model inputs, which run in evaluation mode: tensors, tuples of arguments, or dicts of arguments. If
            None, activations are measured only if ``qt.watch(model)`` is active.

    Returns:
        A report to print, plot or query; each warning says what to do.

    Raises:
        StateError: the model is not prepared.
        DtypeError: ``batches`` is not an iterable of model inputs.
        SpecError: ``batches`` is empty.

    >>> import detent.torch as qt
    >>> model = qt.prepare(nn.Sequential(nn.Linear(4, 2)), "w8a8")
    >>> with qt.calibrating(model):
    ...     _ = model(torch.linspace(0, 1, 400).reshape(100, 4))
    >>> report = qt.health(model, [torch.linspace(0, 2, 4000).reshape(1000, 4)])
    >>> print(*report.warnings)
    0.input_quantizer clips 49.9 % of its input: calibrate with more data, or with observer='minmax'
    """
    if not isinstance(model, nn.Module):
        raise DtypeError(
            f"got {type(model).__name__} for model, expected a module prepared by qt.prepare: call qt.prepare first"
        )
    plan_of(model)
    activations = {} if batches is None else _run(model, batches)
    weights = {quantizer: layer.float_weight(name) for _, layer, name, quantizer in weight_layers(model)}
    rows = (
        _examine(name, each, weights.get(each), activations.get(each)) for name, each in quantizers_of(model).items()
    )
    return HealthReport(tuple(rows), _arithmetic_text(model))


def _arithmetic_text(model: nn.Module) -> str:
    """Say how many layers multiply codes, and with which kernels; "" if no layer does."""
    layers = [each for each in model.modules() if isinstance(each, QuantizedMatmul)]
    count = sum(each.arithmetic == "integer" for each in layers)
    return f"integer products in {count} of {counted(len(layers), 'layer')}: {integer_kernels().note}" if count else ""


def _run(model: nn.Module, batches: Iterable[Batch]) -> dict[FakeQuantize, Measure]:
    """Run all batches, and return the counts of each activation quantizer."""
    if isinstance(batches, Tensor | Mapping | str) or not isinstance(batches, Iterable):
        raise DtypeError(
            f"got {type(batches).__name__} for batches, expected an iterable of inputs: put a single batch in a list"
        )
    weights = {quantizer for *_, quantizer in weight_layers(model)}
    parts: dict[FakeQuantize, list[Measure]] = {}

    def count_codes(quantizer: FakeQuantize, x: Tensor, params: QuantParams | None) -> None:
        if quantizer not in weights:
            params = quantizer.params_for(x) if params is None else params
            parts.setdefault(quantizer, []).append(measure(to_array(on_cpu(x)), params, quantizer.ste))

    count = 0
    with evaluating(model, count_codes):
        for batch in batches:
            call_with(model, batch)
            count += 1
    if not count:
        raise SpecError("got no batches, expected at least one: pass model inputs, or omit batches=")
    return {quantizer: Measure.merge(measures) for quantizer, measures in parts.items()}


def _examine(name: str, quantizer: FakeQuantize, weight: Tensor | None, on_batches: Measure | None) -> QuantizerHealth:
    """Return the health of a weight quantizer if ``weight`` is given, otherwise of an activation quantizer."""
    row = QuantizerHealth(name, str(quantizer.spec), str(quantizer.mode))
    unmeasured = _unmeasured(row, quantizer, weight)
    if unmeasured is not None:
        return unmeasured
    watcher = quantizer.watcher if isinstance(quantizer.watcher, Watcher) else None
    dynamic = isinstance(quantizer.mode, PerBatch)
    params = quantizer.params_for(weight) if weight is not None else None if dynamic else quantizer.params
    result, source = _measured(quantizer, weight, params, on_batches, watcher)
    row = replace(
        row,
        source=source,
        note="" if source else "delayed" if quantizer.delayed else "no data",
        drift=None if params is None else _drift(_first_scale(quantizer, watcher), params.scale),
        oscillation=None if watcher is None or watcher.oscillation is None else watcher.oscillation.rate,
    )
    if result is not None:
        plain = quantizer.spec.replace(granularity=PerTensor(), scale_format="float")
        row = replace(
            row,
            elements=result.size,
            clip_fraction=result.clipped / result.size,
            code_usage=code_usage(QuantizedTensor(result.codes, QuantParams(plain, 1.0))),
            saturated=None if result.saturated is None else result.saturated / result.size,
        )
    return replace(row, warnings=tuple(_warnings(row, quantizer, result, is_weight=weight is not None)))


def _unmeasured(row: QuantizerHealth, quantizer: FakeQuantize, weight: Tensor | None) -> QuantizerHealth | None:
    """Return the health of a quantizer that cannot be measured, or None if the quantizer can be measured."""
    if not quantizer.enabled:
        return replace(row, note="disabled")
    if not isinstance(quantizer.mode, PerBatch) and not quantizer.is_initialized:
        warning = f"{row.name} has no parameters yet: calibrate (`with qt.calibrating(model): ...`) or train"
        return replace(row, note="not calibrated", warnings=(warning,))
    if weight is not None and not bool(torch.isfinite(weight).all()):
        warning = (
            f"{row.name}: the weight contains NaN or infinity: go back to a checkpoint, and lower the learning rate"
        )
        return replace(row, note="not finite", warnings=(warning,))
    return None


def _measured(
    quantizer: FakeQuantize,
    weight: Tensor | None,
    params: QuantParams | None,
    on_batches: Measure | None,
    watcher: Watcher | None,
) -> tuple[Measure | None, str]:
    """Return the counts over a quantizer's data, and the name of the data source."""
    if weight is not None and params is not None:
        return (measure(to_array(on_cpu(weight)), params, quantizer.ste), "weight") if weight.numel() else (None, "")
    if on_batches is not None:
        return on_batches, "batches"
    watched = None if watcher is None else watcher.measured()
    return watched, "" if watched is None else "watch"


def _first_scale(quantizer: FakeQuantize, watcher: Watcher | None) -> NDArray[Any] | None:
    if isinstance(quantizer.mode, Learned):
        return to_array(on_cpu(quantizer.initial_scale))
    return None if watcher is None else watcher.first


def _drift(first: NDArray[Any] | None, now: NDArray[Any]) -> float | None:
    """Return current / first scale for the scale that changed most, or None if there are no matching first scales."""
    if first is None or first.size != now.size or not now.size:
        return None
    ratio = now.reshape(-1).astype(np.float64) / first.reshape(-1)
    return float(ratio[np.argmax(np.abs(np.log(ratio)))])


def _warnings(
    row: QuantizerHealth, quantizer: FakeQuantize, result: Measure | None, *, is_weight: bool
) -> Iterator[str]:
    name, data = row.name, "weight" if is_weight else "input"
    limit = next(share for bits, share in CLIP_LIMITS.items() if quantizer.spec.bits >= bits)
    clips = row.clip_fraction is not None and row.clip_fraction > limit
    if result is not None and result.codes.size == 1 and result.size > 1:
        cause = "its range is too narrow" if clips else f"its {data} is constant or its scale is far too large"
        yield (
            f"{name} is dead: all {result.size} codes of its {data} are equal, because {cause}: check the layers "
            "before this quantizer, and calibrate again"
        )
        return
    if clips:
        advice = _clipping_advice(quantizer, is_weight=is_weight)
        yield f"{name} clips {_share(row.clip_fraction, 1)} of its {data}: {advice}"
    enough = row.elements >= ELEMENTS_PER_CODE * quantizer.spec.num_levels
    if row.code_usage is not None and result is not None and row.code_usage < USAGE_LIMIT and enough:
        advice = _usage_advice(quantizer, result, is_weight=is_weight)
        yield f"{name} leaves {_share(1 - row.code_usage)} of its codes unused, because {advice}"
    if row.drift is not None and not 1 / DRIFT_LIMIT < row.drift < DRIFT_LIMIT:
        yield (
            f"{name}: the scale is {row.drift:.3g}x its first value: lower the learning rate, or calibrate again and "
            "freeze scales earlier with qt.Schedule(model, freeze_scales=...)"
        )
    if row.oscillation is not None and row.oscillation > OSCILLATION_LIMIT:
        yield (
            f"{name}: {_share(row.oscillation)} of its weights oscillate between two codes: lower the learning rate, "
            "or freeze scales and batch norm statistics with qt.Schedule(model, freeze_norms=..., freeze_scales=...)"
        )
    if row.saturated is not None and row.saturated > SATURATION_LIMIT and not clips:
        yield (
            f"{name}: the straight-through estimator {quantizer.ste} stops the gradients of "
            f"{_share(row.saturated, 1)} of its {data}: widen the range (observer='minmax'), or use ste='clipped' or "
            "'identity'"
        )


def _clipping_advice(quantizer: FakeQuantize, *, is_weight: bool) -> str:
    if isinstance(quantizer.mode, Learned):
        return "calibrate again with observer='minmax' to widen the learned range, or lower the learning rate"
    return "calibrate again" if is_weight else "calibrate with more data, or with observer='minmax'"


def _usage_advice(quantizer: FakeQuantize, result: Measure, *, is_weight: bool) -> str:
    spec = quantizer.spec
    one_sign = spec.format.is_integer and (result.codes.min() >= 0 or result.codes.max() <= 0)
    if spec.symmetric and spec.qmin < 0 and one_sign:
        return "all of its data have one sign: use an unsigned or asymmetric spec"
    if is_weight:
        return "a few large weights stretch the range: use a finer granularity, or calibrate with observer='mse'"
    return "a few outliers stretch the range: calibrate with observer='mse' or 'percentile(0.1, 99.9)'"
