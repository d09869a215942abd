"""Post-training quantization of a live module: ``qt.quantize``.

::

    prepare  ->  observe data  ->  equalize        ->  choose ranges          ->  correct biases
    in place     once              channel factors     margins, clipped ranges    mean errors

Each step after the first two is kept only where it lowers the noise at the outputs, on samples to which nothing was
fitted. The result is a prepared model with Fixed scales: it can be exported, verified, or trained on. If anything
fails, the model is a float model with its old parameters again.
"""

import logging
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from detent.errors import NotCalibratedError, SpecError, StateError, UnsupportedError
from detent.metrics import OutputComparison, worst_output
from detent.recipe import Recipe, get_recipe
from detent.rule import ObserverLike, ObserverSpec, Rule, get_observer_spec
from detent.scale_mode import Fixed
from detent.subset_search import search_subset
from detent.tables import counted
from detent.torch import channel_equalization
from detent.torch.activation_ranges import ActivationRanges, Part, RangeChoice, check_seen, search_ranges
from detent.torch.arrays import process_count
from detent.torch.bias_shift import correct, mean_errors
from detent.torch.calibration import initialize_weights, passing, warn_unseen
from detent.torch.channel_equalization import Between, Equalized, channel_axes, choose_factors, find_between
from detent.torch.model_plan import RecipeLike
from detent.torch.parameter_changes import ParameterChanges
from detent.torch.preparation import evaluating, plan_of, prepare, prepared_state, unprepare
from detent.torch.ptq_samples import BatchRunner, Forward, Sample, join, read_samples
from detent.torch.weight_scales import MINMAX_BITS

__all__ = ["PtqReport", "ptq_report", "quantize"]

_log = logging.getLogger(__name__)

Array = NDArray[Any]
MAX_NAMES_SHOWN = 3
MAX_REMAINING_NOISE = 0.98  # a step must remove at least 2 % of the noise


@dataclass(frozen=True)
class PtqReport:
    """Report of ``qt.quantize``; ``qt.ptq_report(model)`` returns it.

    Attributes:
        batches: number of batches, or of parts of batches, that were observed.
        held_out: how many of them were held out; the outputs are compared on samples from them.
        outputs_sqnr_db: SQNR of each float output in dB; empty without data or float outputs.
        plain_sqnr_db: the same for ``qt.prepare`` and ``qt.calibrating`` alone.
        steps: what each step did, or why it did nothing.
        seconds: wall time.
    """

    batches: int = 0
    held_out: int = 0
    outputs_sqnr_db: Mapping[str, float] = field(default_factory=dict)
    plain_sqnr_db: Mapping[str, float] = field(default_factory=dict)
    steps: tuple[str, ...] = ()
    seconds: float = 0.0

    @property
    def output_sqnr_db(self) -> float | None:
        """The lowest SQNR of all outputs in dB, or None if none was compared."""
        return self.outputs_sqnr_db.get(worst_output(self.outputs_sqnr_db))

    def __str__(self) -> str:
        return "\n".join([*self.steps, self._summary()])

    def _summary(self) -> str:
        if self.output_sqnr_db is None:
            return f"outputs not compared, {self.seconds:.1f} s"
        name = worst_output(self.outputs_sqnr_db)
        where = "held-out samples" if self.held_out else "the calibration samples (none held out)"
        return (
            f"SQNR {self.output_sqnr_db:.1f} dB on {where}, {self.plain_sqnr_db[name]:.1f} dB by calibration alone, "
            f"{self.seconds:.1f} s"
        )


def quantize(
    model: nn.Module,
    data: Iterable[Any] | None = None,
    recipe: RecipeLike = "w8a8",
    *,
    forward: Forward | None = None,
    observer: ObserverLike | None = None,
    equalize: bool = True,
    bias_correction: bool = True,
) -> nn.Module:
    """Quantize a trained model after training (PTQ), in place, and return the model.

    The model is prepared as by ``qt.prepare``, but with Fixed scales, which are set from the data. It is ready for
    ``qt.export_onnx``, ``dt.verify``, and training. Layers whose rules set a mode keep this mode: with
    ``dt.Recipe.preset("w4a8", mode=dt.Learned())``, training continues from the chosen scales.

    Equalization and bias correction change weights, biases and batch norms; a missing bias is created. Both are kept
    only where they lower the noise at the outputs, on samples to which they were not fitted. So are margins around
    ranges, and clipped ranges. ``qt.ptq_report`` says what was done. If an error is raised, the model is unchanged.

    Args:
        model: a trained float model, in one process.
        data: batches of the kind the model will see, 32 samples or more: an iterable of tensors, tuples or lists of
            arguments, or dicts of arguments by name. Arguments that the model's forward does not accept are dropped,
            such as labels after the inputs. Weight-only recipes need no data.
        recipe: a ``dt.Recipe``, the name of a preset, or the path of a .toml or .json file.
        forward: function f(model, batch) that calls the model, for batches of another form.
        observer: observer for quantizers whose rule sets none; None chooses min-max or MSE-optimal ranges.
        equalize: apply cross-layer equalization where it helps.
        bias_correction: change biases to cancel the mean error of each output channel.

    Raises:
        NotCalibratedError: the recipe quantizes activations, and ``data`` is None or reaches no quantizer.
        NaNError: a batch or an activation contains NaN; the message names it.
        SpecError, DtypeError: an argument has a wrong value or type, or data has no batches.
        UnsupportedError: the model fails on a batch, or ``torch.distributed`` runs with several processes.

    >>> import detent.torch as qt
    >>> torch.manual_seed(0)  # doctest: +ELLIPSIS
    <torch...
    >>> model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    >>> model = qt.quantize(model, [torch.randn(32, 8) for _ in range(4)])
    >>> model[0].input_quantizer.mode, qt.ptq_report(model).output_sqnr_db > 30
    (Fixed(), True)
    """
    start = time.perf_counter()
    if not isinstance(model, nn.Module):
        raise SpecError(f"got {type(model).__name__} for model, expected a torch.nn.Module")
    if process_count() > 1:
        raise UnsupportedError(
            "qt.quantize does not support several processes: quantize in one process, and load its state_dict in all"
        )
    observer_spec = None if observer is None else get_observer_spec(observer)
    with_modes = _with_fixed_scales(get_recipe(recipe))
    if data is None and any(rule.input is not None or rule.output is not None for rule in with_modes.rules):
        raise NotCalibratedError(
            f"recipe {with_modes.name or with_modes!r} quantizes activations and needs calibration data: pass data, or "
            "use a weight-only recipe such as 'w8a16' or 'w4a16'"
        )
    tensors, steps = _equalizable(model, observer_spec) if equalize and data is not None else ((), [])
    job = _Job(model, BatchRunner(model, forward), observer_spec)
    prepare(model, with_modes)
    try:
        with torch.no_grad(), evaluating(model):
            initialize_weights(model, observer_spec)
            report = PtqReport() if data is None else job.run(data, tensors, bias_correction=bias_correction)
    except BaseException:
        job.undo()
        unprepare(model)
        raise
    report = replace(report, steps=(*steps, *report.steps), seconds=time.perf_counter() - start)
    prepared_state(model).report = report
    for line in str(report).splitlines():
        _log.info("%s", line)
    return model


def ptq_report(model: nn.Module) -> PtqReport:
    """Return the report of a model that ``qt.quantize`` quantized.

    Raises:
        StateError: the model is not prepared, or was not quantized by ``qt.quantize``.

    >>> import detent.torch as qt
    >>> print(qt.ptq_report(qt.quantize(nn.Sequential(nn.Linear(4, 2)), recipe="w8a16")).outputs_sqnr_db)
    {}
    """
    plan_of(model)
    report = prepared_state(model).report
    if not isinstance(report, PtqReport):
        raise StateError("the model was prepared by qt.prepare, but qt.ptq_report needs a model from qt.quantize")
    return report


def _with_fixed_scales(recipe: Recipe) -> Recipe:
    """Return the recipe with mode Fixed for layers whose rules set no mode."""
    if all(rule.mode is None for rule in recipe.rules):
        return Recipe([replace(rule, mode=Fixed()) for rule in recipe.rules], recipe.name)
    return Recipe([Rule(mode=Fixed()), *recipe.rules], recipe.name)


def _equalizable(model: nn.Module, observer: ObserverSpec | None) -> tuple[tuple[Between, ...], list[str]]:
    """Find the tensors that can be equalized; if equalization is skipped, return a step that says why."""
    if observer is not None:
        return (), [f"equalization: skipped, because observer {observer} sets the ranges"]
    try:
        return find_between(model), []
    except Exception as error:  # noqa: BLE001 - tracing runs the model's code, which may raise anything
        cause = next(iter(str(error).splitlines()), type(error).__name__)
        return (), [f"equalization: skipped, because torch.fx cannot trace the model ({cause})"]


class _OutputNoise:
    """Measures the noise at the float outputs of a model, relative to the outputs before quantization."""

    def __init__(self, runner: BatchRunner, samples: Sequence[Sample]) -> None:
        self._runner, self._samples = runner, samples
        self._expected = [runner.run(sample.kept, sample.label) for sample in samples]

    def noise(self) -> float:
        """Return the noise power of each output relative to its signal power, summed over the outputs."""
        count = len(self._expected[0])
        noise, signal = np.zeros(count), np.zeros(count)
        for sample, outputs in zip(self._samples, self._expected, strict=True):
            for i, (x, y) in enumerate(zip(outputs, self._runner.run(sample.kept, sample.label), strict=True)):
                if x.shape != y.shape:
                    continue
                finite = np.isfinite(x)
                x64, y64 = x[finite].astype(np.float64), y[finite].astype(np.float64)
                noise[i] += np.square(x64 - y64).sum()
                signal[i] += np.square(x64).sum()
        total = float((noise[signal > 0] / signal[signal > 0]).sum())
        return total if np.isfinite(total) else inf

    def sqnr_db(self) -> dict[str, float]:
        """Return the SQNR of each output."""
        count = len(self._expected[0])
        comparison = OutputComparison(["output"] if count == 1 else [f"output {i}" for i in range(count)])
        for sample, outputs in zip(self._samples, self._expected, strict=True):
            comparison.add(outputs, self._runner.run(sample.kept, sample.label))
        return comparison.sqnr_db


class _Job:
    """The steps of ``qt.quantize`` on a prepared model."""

    def __init__(self, model: nn.Module, runner: BatchRunner, observer: ObserverSpec | None) -> None:
        self._model, self._runner, self._observer = model, runner, observer
        self._changes = ParameterChanges(), ParameterChanges()  # of equalization, and of bias correction

    def undo(self) -> None:
        """Restore the parameters of the float model."""
        for changes in reversed(self._changes):
            changes.undo()

    def run(self, data: Iterable[Any], tensors: Sequence[Between], *, bias_correction: bool) -> PtqReport:
        """Run all steps, and return the report without its time."""
        model, runner = self._model, self._runner
        self._ranges = ranges = ActivationRanges(model, self._observer, channel_axes(model, tensors))
        batches, *parts = self._read(data)
        with passing(model):
            self._fitted, held_out = (join(part, runner) for part in parts)
            fitted_meter = _OutputNoise(runner, self._fitted)
            self._meter = _OutputNoise(runner, held_out) if held_out else fitted_meter
        low_bits = [name for name in ranges.searched if ranges.quantizers[name].spec.bits < MINMAX_BITS]
        plain = RangeChoice(clipped=frozenset(low_bits))
        ranges.set_params(plain)
        plain_sqnr_db = self._meter.sqnr_db()
        factors, steps = self._equalize(tensors, plain)
        meters: dict[Part, _OutputNoise] = {"held-out": self._meter, "fitted": fitted_meter}
        choice, range_steps = search_ranges(ranges, lambda part: meters[part].noise(), factors)
        ranges.set_params(choice)
        steps += range_steps
        if bias_correction:
            steps += self._correct_biases()
        warn_unseen(ranges.unseen, stacklevel=4)
        steps += [runner.dropped] if runner.dropped else []
        return PtqReport(batches, len(parts[1]), self._meter.sqnr_db(), plain_sqnr_db, tuple(steps))

    def _read(self, data: Iterable[Any]) -> tuple[int, list[Sample], list[Sample]]:
        """Observe all data; return the number of batches, and the samples that stay in memory."""
        with passing(self._model):
            samples = read_samples(data, self._runner)
        batches, fitted, held_out = 0, list[Sample](), list[Sample]()
        with self._ranges.observing() as choose_part:
            for sample in samples:
                choose_part(sample.is_held_out)
                self._runner.run(sample.batch, sample.label)
                batches += 1
                if sample.kept is not None:
                    (held_out if sample.is_held_out else fitted).append(sample._replace(batch=None))
        check_seen(self._ranges)
        return batches, fitted, held_out

    def _run_fitted(self) -> None:
        for sample in self._fitted:
            self._runner.run(sample.kept, sample.label)

    def _equalize(self, tensors: Sequence[Between], plain: RangeChoice) -> tuple[dict[str, Array], list[str]]:
        """Equalize the tensors for which it lowers the noise; return the factors by quantizer, and the step."""
        if not tensors:
            return {}, []
        candidates = choose_factors(self._model, tensors, self._ranges, self._run_fitted, self._observer)
        by_name = {str(each.between): each for each in candidates}
        changed: set[nn.Module] = set()

        def apply(names: Collection[str]) -> dict[str, Array]:
            self._changes[0].undo()
            chosen = [by_name[name] for name in by_name if name in names]
            changed.update(channel_equalization.apply(self._model, chosen, self._changes[0]))
            initialize_weights(self._model, self._observer, changed)
            factors = _factors_by_quantizer(chosen)
            self._ranges.set_params(plain._replace(factors=factors))
            return factors

        def measure(names: Collection[str]) -> float:
            apply(names)
            return self._meter.noise()

        chosen = _worthwhile(list(by_name), measure, self._meter.noise())
        return apply(chosen), [_step("equalization", chosen, len(tensors), "tensor")]

    def _correct_biases(self) -> list[str]:
        """Correct the biases of all layers, if it lowers the noise.

        A search for the best layers would fit the held-out samples: on a SqueezeNet with 4-bit weights, the chosen
        layers had over 4 dB more noise on other data than all layers.
        """
        plain, errors = self._meter.noise(), mean_errors(self._model, self._run_fitted)
        correct(self._model, errors, self._changes[1])
        is_better = self._meter.noise() <= MAX_REMAINING_NOISE * plain
        if not is_better:
            self._changes[1].undo()
        return [_step("bias correction", list(errors) if is_better else [], len(errors), "layer")] if errors else []


def _factors_by_quantizer(equalized: Iterable[Equalized]) -> dict[str, Array]:
    return {
        f"{reader}.{channel_equalization.INPUT}": each.factors for each in equalized for reader in each.between.readers
    }


def _worthwhile(names: Sequence[str], measure: Callable[[Collection[str]], float], plain: float) -> list[str]:
    """Return the names of the changes that lower the noise together, in their order."""
    if not names or not plain:
        return []
    chosen, remaining = search_subset(names, lambda changes, _: measure(changes), plain)
    return [name for name in names if name in chosen] if remaining <= MAX_REMAINING_NOISE * plain else []


def _step(name: str, chosen: Sequence[str], total: int, noun: str) -> str:
    if not chosen:
        return f"{name}: not applied, because it does not lower the noise at the outputs"
    shown = "; ".join(chosen[:MAX_NAMES_SHOWN]) + ("; ..." if len(chosen) > MAX_NAMES_SHOWN else "")
    return f"{name}: {len(chosen)} of {counted(total, noun)} ({shown})"
