"""Checkup: is quantization-aware training going well, quantizer by quantizer, and what to do where it is not.

=============  =====================================================================================================
clip           share of elements whose code is clamped
codes          share of the spec's codes that occur
drift          the scale now over the first one, calibrated or observed; of many, the one that has moved most
oscillation    share of weights whose code goes back and forth (see ``watching``)
saturated      share of elements whose gradient the estimator stops
=============  =====================================================================================================

Weights are examined whole, as they are shipped. Activations are examined in the batches given, whole, or else in what
``qt.watch`` has sampled lately. Nothing of the model's state is changed beyond what an evaluation changes.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from detent.errors import DtypeError, SpecError, closest
from detent.granularity import PerTensor
from detent.metrics import code_usage
from detent.params import QuantParams
from detent.scale_mode import Learned, PerBatch
from detent.spec import QuantSpec
from detent.tables import table_lines
from detent.tensor import QuantizedTensor
from detent.torch.arrays import on_cpu, to_array
from detent.torch.preparation import plan_of, quantizers_of, weight_layers
from detent.torch.quantizer import FakeQuantize
from detent.torch.watching import Measure, Watcher, measure, params_of

__all__ = ["HealthReport", "QuantizerHealth", "health"]

CLIP_LIMITS = {6: 0.02, 4: 0.06, 1: 0.2}
"""The clip fraction that draws a warning, by the least number of bits: the fewer, the more is best clipped."""
USAGE_LIMIT = 0.5
"""The code usage below which there is a warning, given data enough."""
ELEMENTS_PER_CODE = 16
"""How many elements there must be for each code before unused ones mean anything."""
DRIFT_LIMIT = 4.0
"""The factor by which a scale may have grown or shrunk without a warning."""
OSCILLATION_LIMIT = 0.1
"""The share of oscillating weights that draws a warning."""
SATURATION_LIMIT = 0.2
"""The share of stopped gradients that draws a warning, where clipping has not drawn one."""

Batch = Tensor | tuple[Any, ...] | list[Any] | Mapping[str, Any]


@dataclass(frozen=True)
class QuantizerHealth:
    """How one quantizer is; figures are None where there is nothing to tell them from.

    Attributes:
        name: its full name.
        spec, mode: as short text.
        source: what was examined: "weight", "batches", "watch", or "" for nothing.
        elements: how many elements were examined.
        clip_fraction, code_usage, drift, oscillation, saturated: as above.
        note: why there is nothing, or "".
        warnings: what a user should know, and can do.

    >>> QuantizerHealth("fc.input_quantizer", "int8", "EMA(decay=0.99)").clip_fraction is None
    True
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


@dataclass(frozen=True)
class HealthReport:
    """How every quantizer of a model is; ``str`` is a table with the warnings below it.

    >>> report = HealthReport((QuantizerHealth("fc.weight_quantizer", "int8", "PerBatch()", "weight", 8, 0.0, 0.5),))
    >>> print(report)
    quantizer            data      clip  codes   drift  oscillation  saturated
    fc.weight_quantizer  weight  0.00 %   50 %       -            -          -
    no warnings
    >>> report["fc.weight_quantizer"].code_usage, report.warnings
    (0.5, ())
    """

    quantizers: tuple[QuantizerHealth, ...]

    @property
    def warnings(self) -> tuple[str, ...]:
        """The warnings of all quantizers."""
        return tuple(text for each in self.quantizers for text in each.warnings)

    def __getitem__(self, name: str) -> QuantizerHealth:
        """The quantizer of that full name."""
        found = {each.name: each for each in self.quantizers}
        if name not in found:
            raise SpecError(f"no quantizer is named {name!r}{closest(str(name), found)} expected one of {list(found)}")
        return found[name]

    def __str__(self) -> str:
        lines = table_lines([HEAD, *(_row(each) for each in self.quantizers)], right=range(2, len(HEAD)))
        lines += [f"! {text}" for text in self.warnings] or ["no warnings"]
        return "\n".join(lines)

    def to_json(self) -> str:
        """Every figure, and the warnings, as JSON.

        >>> HealthReport(()).to_json()
        '{"version": 1, "quantizers": []}'
        """
        return json.dumps({"version": 1, "quantizers": [asdict(each) for each in self.quantizers]})


HEAD = ("quantizer", "data", "clip", "codes", "drift", "oscillation", "saturated")


def _row(each: QuantizerHealth) -> tuple[str, ...]:
    drift = "-" if each.drift is None else f"{each.drift:.3g}x"
    shares = (_share(each.clip_fraction, 2), _share(each.code_usage), drift)
    return each.name, each.source or each.note or "-", *shares, _share(each.oscillation, 1), _share(each.saturated, 2)


def _share(value: float | None, digits: int = 0) -> str:
    return "-" if value is None else f"{100 * value:.{digits}f} %"


@torch.no_grad()
def health(model: nn.Module, batches: Iterable[Batch] | None = None) -> HealthReport:
    """How the quantizers of a model are: clipping, unused codes, drift, oscillation, stopped gradients.

    Args:
        model: a prepared model, calibrated or in training.
        batches: inputs to run through the model, in evaluation mode: tensors, tuples of arguments, or dicts of named
            ones. Without any, activations are known only where ``qt.watch(model)`` is on.

    Raises:
        StateError: the model is not prepared.
        DtypeError: batches that are no inputs.
        SpecError: no batch in ``batches``.

    >>> import detent.torch as qt
    >>> model = qt.prepare(nn.Sequential(nn.Linear(4, 2)), "w8a8")
    >>> with qt.calibrating(model):
    ...     _ = model(torch.linspace(0, 1, 400).reshape(100, 4))
    >>> report = qt.health(model, [torch.linspace(0, 2, 4000).reshape(1000, 4)])
    >>> print(*report.warnings)
    0.input_quantizer clips 49.9 % of its input: calibrate with more data, or with observer='minmax'
    """
    if not isinstance(model, nn.Module):
        raise DtypeError(f"health takes a prepared model, got {type(model).__name__}")
    plan_of(model)
    seen = {} if batches is None else _run(model, batches)
    weights = {quantizer: layer.source(name) for _, layer, name, quantizer in weight_layers(model)}
    rows = (_examine(name, each, weights.get(each), seen) for name, each in quantizers_of(model).items())
    return HealthReport(tuple(rows))


def _run(model: nn.Module, batches: Iterable[Batch]) -> dict[FakeQuantize, Measure]:
    """What the activations' quantizers do to the batches."""
    if isinstance(batches, Tensor | Mapping | str) or not isinstance(batches, Iterable):
        raise DtypeError(
            f"batches must be an iterable of inputs, got {type(batches).__name__}: put one batch in a list"
        )
    weights = {quantizer for *_, quantizer in weight_layers(model)}
    parts: dict[FakeQuantize, list[Measure]] = {}

    def look(quantizer: FakeQuantize, x: Tensor, params: QuantParams | None) -> None:
        if quantizer not in weights:
            found = params_of(quantizer, x) if params is None else params
            parts.setdefault(quantizer, []).append(measure(to_array(on_cpu(x)), found, quantizer.ste))

    count = 0
    with _evaluating(model, look):
        for batch in batches:
            _feed(model, batch)
            count += 1
    if not count:
        raise SpecError("batches holds no batch: give at least one, or leave it out")
    return {quantizer: Measure.merge(found) for quantizer, found in parts.items()}


@contextmanager
def _evaluating(model: nn.Module, look: Callable[[FakeQuantize, Tensor, QuantParams | None], None]) -> Iterator[None]:
    """Evaluation mode, with ``look`` in every quantizer; everything as before on leaving."""
    training = {module: module.training for module in model.modules()}
    watchers = {quantizer: quantizer.watcher for quantizer in quantizers_of(model).values()}
    try:
        model.eval()
        for quantizer in watchers:
            quantizer.watcher = look
        yield
    finally:
        for quantizer, watcher in watchers.items():
            quantizer.watcher = watcher
        for module, was in training.items():
            module.training = was


def _feed(model: nn.Module, batch: Batch) -> None:
    if isinstance(batch, Tensor):
        model(batch)
    elif isinstance(batch, Mapping):
        model(**batch)
    elif isinstance(batch, tuple | list):
        model(*batch)
    else:
        raise DtypeError(f"a batch must be a tensor, a tuple or a dict of inputs, got {type(batch).__name__}")


def _examine(
    name: str, quantizer: FakeQuantize, weight: Tensor | None, seen: Mapping[FakeQuantize, Measure]
) -> QuantizerHealth:
    row = QuantizerHealth(name, str(quantizer.spec), str(quantizer.mode))
    if not quantizer.enabled:
        return replace(row, note="disabled")
    dynamic = isinstance(quantizer.mode, PerBatch)
    if not dynamic and not quantizer.is_initialized:
        unready = f"{name} has no parameters yet: calibrate, `with qt.calibrating(model): ...`, or train"
        return replace(row, note="not calibrated", warnings=(unready,))
    if weight is not None and not bool(torch.isfinite(weight).all()):
        lost = f"{name}: its weight holds NaN or infinity: go back to a checkpoint, and lower the learning rate"
        return replace(row, note="not finite", warnings=(lost,))
    watcher = quantizer.watcher if isinstance(quantizer.watcher, Watcher) else None
    params = (
        None if dynamic and weight is None else quantizer.params if weight is None else params_of(quantizer, weight)
    )
    found, source = _measured(quantizer, weight, params, seen, watcher)
    row = replace(
        row,
        source=source,
        note="" if source else "delayed" if quantizer.delayed else "no data",
        drift=None if params is None else _drift(_first_scale(quantizer, watcher), params.scale),
        oscillation=None if watcher is None or watcher.oscillation is None else watcher.oscillation.rate,
    )
    if found is not None:
        row = replace(
            row,
            elements=found.size,
            clip_fraction=found.clipped / found.size,
            code_usage=_usage(found, quantizer.spec),
            saturated=None if found.saturated is None else found.saturated / found.size,
        )
    return replace(row, warnings=tuple(_warnings(row, quantizer, found, is_weight=weight is not None)))


def _measured(
    quantizer: FakeQuantize,
    weight: Tensor | None,
    params: QuantParams | None,
    seen: Mapping[FakeQuantize, Measure],
    watcher: Watcher | None,
) -> tuple[Measure | None, str]:
    """What there is to know of a quantizer's data, and where it comes from."""
    if weight is not None and params is not None:
        return (measure(to_array(on_cpu(weight)), params, quantizer.ste), "weight") if weight.numel() else (None, "")
    if quantizer in seen:
        return seen[quantizer], "batches"
    found = None if watcher is None else watcher.measured()
    return found, "" if found is None else "watch"


def _usage(found: Measure, spec: QuantSpec) -> float:
    plain = spec.replace(granularity=PerTensor(), scale_format="float")
    return code_usage(QuantizedTensor(found.codes, QuantParams(plain, 1.0)))


def _first_scale(quantizer: FakeQuantize, watcher: Watcher | None) -> NDArray[Any] | None:
    if isinstance(quantizer.mode, Learned):
        return to_array(on_cpu(quantizer.initial_scale))
    return None if watcher is None else watcher.first


def _drift(first: NDArray[Any] | None, now: NDArray[Any]) -> float | None:
    """The ratio of the scale that has moved most; None where the sets are not the same ones."""
    if first is None or first.size != now.size or not now.size:
        return None
    ratio = now.reshape(-1).astype(np.float64) / first.reshape(-1)
    return float(ratio[np.argmax(np.abs(np.log(ratio)))])


def _warnings(
    row: QuantizerHealth, quantizer: FakeQuantize, found: Measure | None, *, is_weight: bool
) -> Iterator[str]:
    name, what = row.name, "weight" if is_weight else "input"
    limit = next(share for bits, share in CLIP_LIMITS.items() if quantizer.spec.bits >= bits)
    clips = row.clip_fraction is not None and row.clip_fraction > limit
    if found is not None and found.codes.size == 1 and found.size > 1:
        cause = "its range is too narrow" if clips else f"its {what} is constant, or its scale far too large"
        yield (
            f"{name} is dead: all {found.size} codes of its {what} are equal; {cause}: look at the layers before it, "
            "and calibrate again"
        )
        return
    if clips:
        advice = _against_clipping(quantizer, is_weight=is_weight)
        yield f"{name} clips {_share(row.clip_fraction, 1)} of its {what}: {advice}"
    enough = row.elements >= ELEMENTS_PER_CODE * quantizer.spec.num_levels
    if row.code_usage is not None and found is not None and row.code_usage < USAGE_LIMIT and enough:
        advice = _against_waste(quantizer, found, is_weight=is_weight)
        yield f"{name} leaves {_share(1 - row.code_usage)} of its codes unused: {advice}"
    if row.drift is not None and not 1 / DRIFT_LIMIT < row.drift < DRIFT_LIMIT:
        yield (
            f"{name}: its scale is {row.drift:.3g}x what it was at first: lower the learning rate, or calibrate anew "
            "and freeze scales earlier, qt.Schedule(model, freeze_scales=...)"
        )
    if row.oscillation is not None and row.oscillation > OSCILLATION_LIMIT:
        yield (
            f"{name}: {_share(row.oscillation)} of its weights oscillate between two codes: lower the learning rate, "
            "or freeze scales and batch-norm statistics, qt.Schedule(model, freeze_norms=..., freeze_scales=...)"
        )
    if row.saturated is not None and row.saturated > SATURATION_LIMIT and not clips:
        yield (
            f"{name}: its estimator {quantizer.ste} stops the gradient of {_share(row.saturated, 1)} of its {what}: "
            "widen the range (observer='minmax'), or use ste='clipped' or 'identity'"
        )


def _against_clipping(quantizer: FakeQuantize, *, is_weight: bool) -> str:
    if isinstance(quantizer.mode, Learned):
        return "its learned range is too narrow; calibrate again, with observer='minmax', or lower the learning rate"
    return "calibrate again" if is_weight else "calibrate with more data, or with observer='minmax'"


def _against_waste(quantizer: FakeQuantize, found: Measure, *, is_weight: bool) -> str:
    spec = quantizer.spec
    if (
        spec.symmetric
        and spec.format.is_integer
        and spec.qmin < 0
        and (found.codes.min() >= 0 or found.codes.max() <= 0)
    ):
        return "all of it has one sign; use an unsigned or asymmetric spec"
    if is_weight:
        return "a few large weights stretch the range; use a finer granularity, or calibrate with observer='mse'"
    return "a few outliers stretch the range; calibrate with observer='mse' or 'percentile(0.1, 99.9)'"
