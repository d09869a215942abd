"""Evaluation of a quantized file: accuracy, speed, verification and the most sensitive layers.

``quantize_and_evaluate`` does the work of ``detent quantize``: ``qo.quantize``, then ``evaluate_result``. Models and
data are loaded once. If a check such as timing cannot run, the evaluation gets a warning and raises no exception,
because the file is already written.
"""

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from os import PathLike
from typing import Any, NamedTuple

from numpy.typing import ArrayLike

import detent.onnx as qo
from detent import sensitivity as qs
from detent.errors import DetentError, NotCalibratedError
from detent.evaluate.accuracy import Accuracy, Split, check_metric, measure_accuracy, split_batches
from detent.evaluate.speed import Timing, random_inputs, time_models
from detent.evaluate.speed_advice import SpeedAdvice, advise
from detent.metrics import worst_output
from detent.model_metric import AUTO, MetricLike
from detent.onnx.pipeline import QuantizeReport
from detent.onnx.quality_warnings import (
    DataSummary,
    QuantizeWarning,
    few_samples,
    float_layers_text,
    layer_shares,
)
from detent.onnx_model.batches import BatchSource
from detent.onnx_model.files import LoadedModel, ModelSource, load_model
from detent.onnx_model.provenance import Provenance
from detent.onnx_model.targets import has_vnni, mismatch, vnni_hint
from detent.recipe import Recipe
from detent.tables import bytes_text, counted, html_table
from detent.verification import VerifyReport, verify

__all__ = ["Checks", "Evaluation", "SensitiveLayer", "evaluate_result", "quantize_and_evaluate"]

_log = logging.getLogger(__name__)

VERIFY_BATCHES = TIMING_BATCHES = 2
TIMING_SECONDS = 1.0
RANKING_SAMPLES = 4  # with fewer samples, the ranking of layers depends too much on the samples
MIN_RANKING_SECONDS = 20.0  # time limit for measuring sensitivity, unless quantization took longer
MAX_LAYERS_NAMED = 3
MEASURED_AGAIN = ("low-sqnr", "low-agreement", "few-samples")  # codes of warnings that the evaluation replaces
MAX_OUTPUTS_SHOWN = 4
TOLERANCE = 1e-9  # of the drop of a metric
StageProgress = Callable[[str, int, int | None], None]


class Checks(NamedTuple):
    """Checks that ``evaluate_result`` runs besides accuracy."""

    verify: bool = True  # run ``dt.verify`` at levels 1 and 3
    time: bool = True  # measure the run time of both models
    sensitivity: bool = True  # measure the output noise with one layer quantized at a time


class SensitiveLayer(NamedTuple):
    """A layer, and its share of the sum of all layers' noise.

    The noise of a layer is the noise at the outputs if only this layer is quantized.
    """

    name: str
    noise_share: float


@dataclass(frozen=True)
class Evaluation:
    """Evaluation of a quantized model; ``str()`` returns a summary, and notebooks show a table.

    Attributes:
        source: the float model.
        quantized: the quantized model, read from its file.
        result: the report of ``qo.quantize``.
        split: calibration and evaluation batches; None without data.
        accuracy: accuracy on the evaluation batches; None without data.
        timing: run times of both models; None if timing was not requested or could not run.
        verification: report of ``dt.verify`` on the first evaluation batches; None if it was not requested or could
            not run.
        sensitivity: output noise with one layer quantized at a time; None if it was not requested, could not run, or
            would take too long.
        hints: options that make the quantized model faster, if it is about as fast as the float model, and a target
            that stores more bits on this CPU.
        warnings: warnings about accuracy on the evaluation batches, a slower quantized model, a target for another CPU,
            and checks that could not run. Warnings of ``result`` that the evaluation does not replace are included.
    """

    source: LoadedModel
    quantized: LoadedModel
    result: QuantizeReport
    split: Split | None = None
    accuracy: Accuracy | None = None
    timing: Timing | None = None
    verification: VerifyReport | None = None
    sensitivity: qs.Sensitivity | None = None
    hints: tuple[str, ...] = ()
    warnings: tuple[QuantizeWarning, ...] = ()

    @property
    def sensitive_layers(self) -> tuple[SensitiveLayer, ...]:
        """At most three layers with the largest noise, in the order of decreasing noise."""
        if self.sensitivity is None:
            return ()
        total = sum(layer.worst for layer in self.sensitivity.layers) or 1.0
        layers = [layer for layer in self.sensitivity.ranked() if layer.worst > 0][:MAX_LAYERS_NAMED]
        return tuple(SensitiveLayer(layer.name, layer.worst / total) for layer in layers)

    def missed_limits(self, min_sqnr_db: float | None = None, min_agreement: float | None = None) -> list[str]:
        """Return one message for each limit that is not met, max_drop included, and one for a failed verification."""
        accuracy = Accuracy({}, None, 0) if self.accuracy is None else self.accuracy
        sqnr_db, agreement, missed = accuracy.sqnr_db, accuracy.agreement, list[str]()
        if min_sqnr_db is not None:
            limit = f"the limit of {min_sqnr_db:g} dB"
            if sqnr_db is None:
                missed.append(
                    f"the SQNR was not measured, so {limit} is not met: an SQNR needs data and a float output"
                )
            elif not sqnr_db >= min_sqnr_db:  # True for NaN
                missed.append(f"the SQNR of output {accuracy.worst_output} is {sqnr_db:.1f} dB, below {limit}")
        if min_agreement is not None:
            limit = f"the limit of {min_agreement:g}"
            if agreement is None:
                missed.append(
                    f"the top-1 agreement was not measured, so {limit} is not met: agreement needs data, and class "
                    "scores or labels in the first output"
                )
            elif agreement < min_agreement:
                missed.append(f"the top-1 agreement is {agreement:.4g}, below {limit}")
        drop = _missed_drop(self.result, self.accuracy)
        if drop:
            missed.append(drop)
        if self.verification is not None and not self.verification.ok:
            missed.append("the quantized model failed verification: for details, run detent verify")
        return missed

    @property
    def time_text(self) -> str:
        """Both run times as text; they are measured in ONNX Runtime, also for other targets. "" without times."""
        if self.timing is None:
            return ""
        is_other = self.result.plan.target.runtime != "onnxruntime"
        return f"{self.timing}{', in ONNX Runtime, not OpenVINO' if is_other else ''}"

    @property
    def no_gain(self) -> str:
        """Why the file is neither smaller nor faster than the float model, or "" if it is one of both.

        The text lists the slow layers, and the layers in float with their reasons.
        """
        before, after = self.result.nbytes_before, self.result.nbytes_after
        slower = next((each.text for each in self.warnings if each.code == "slower"), "")
        if after < before or not slower:
            return ""
        others = self._float_layers()
        in_float = f". Layers on float kernels: {'; '.join(others)}" if others else ""
        return f"the file is not smaller ({bytes_text(before)} -> {bytes_text(after)}), and {slower}{in_float}"

    def facts(self) -> list[tuple[str, str]]:
        """Return the summary as pairs of label and text: size, accuracy, time, layers on integer kernels."""
        before, after = self.result.nbytes_before, self.result.nbytes_after
        size = f"{bytes_text(before)} -> {bytes_text(after)} ({100 * after / max(1, before):.1f} %)"
        accuracy = [("outputs", "not compared: no data")] if self.accuracy is None else self._accuracy_facts()
        timing = [("time", self.time_text)] if self.time_text else []
        return [("size", size), *accuracy, *timing, *self._kernel_facts()]

    def _accuracy_facts(self) -> list[tuple[str, str]]:
        if self.accuracy is None:
            return []
        where, values, worst = f", on {self.split}", self.accuracy.outputs_sqnr_db, self.accuracy.worst_output
        names = sorted(values, key=lambda name: name != worst)  # limits apply to the worst output, so it comes first
        facts = [
            ("SQNR" if len(values) == 1 else f"SQNR of {name}", f"{values[name]:.1f} dB{where if i == 0 else ''}")
            for i, name in enumerate(names[:MAX_OUTPUTS_SHOWN])
        ]
        if len(values) > MAX_OUTPUTS_SHOWN:
            facts.append(
                ("SQNR of others", f"{counted(len(values) - MAX_OUTPUTS_SHOWN, 'more output', ',')}, see --json")
            )
        if self.accuracy.agreement is not None:
            facts.append(("top-1 agreement", f"{100 * self.accuracy.agreement:.2f} %{where}"))
        if self.accuracy.metric is not None:
            facts.append((self.accuracy.metric.name, str(self.accuracy.metric)))
        facts += self._drop_facts()
        scores = self.accuracy.labeled_scores
        facts += scores[:MAX_OUTPUTS_SHOWN]
        if len(scores) > MAX_OUTPUTS_SHOWN:
            facts.append(("other outputs", f"{len(scores) - MAX_OUTPUTS_SHOWN:,} more, see --json"))
        skipped = list(self.accuracy.not_compared.items())[:MAX_OUTPUTS_SHOWN]
        return [*facts, *((f"output {name}", f"not compared: {reason}") for name, reason in skipped)]

    def _drop_facts(self) -> list[tuple[str, str]]:
        search = self.result.search
        if search is None:
            return []
        met = "not met" if _missed_drop(self.result, self.accuracy) else "met"
        if met == "met" and not search.is_met:
            met = "met on the evaluation samples, but not by the search with its margin"
        sizes = f"weights {bytes_text(search.nbytes_before)} -> {bytes_text(search.nbytes_after)}"
        change = f"{counted(len(search.steps), 'step')}, {sizes}" if search.steps else "without a change"
        return [("max_drop", f"{search.max_drop:g} {met}, {change}")]

    def _kernel_facts(self) -> list[tuple[str, str]]:
        layers = self.result.layers
        if self._is_weight_only:
            count = sum(not layer.reason for layer in layers)
            facts = [("quantized", f"{count:,} of {len(layers):,} layers")]
        else:
            count = sum(layer.runs_on_integer_kernel for layer in layers)
            facts = [("integer kernels", f"{count:,} of {len(layers):,} layers")]
        return [*facts, *(("float kernel", text) for text in self._float_layers())]

    @property
    def _is_weight_only(self) -> bool:
        """Whether no layer is meant to run on an integer kernel."""
        return not any(layer.input for layer in self.result.layers)

    def _float_layers(self) -> list[str]:
        """Name the largest layers on float kernels with their reasons; for weight-only recipes, those in float."""
        layers = self.result.layers
        others = [each for each in layers if (each.reason if self._is_weight_only else not each.runs_on_integer_kernel)]
        return float_layers_text(others, layer_shares(self.result.plan, self.result.multiplications))

    def __str__(self) -> str:
        facts = (f"  {label + ':':<18} {text}" for label, text in self.facts())
        return "\n".join([str(self.result.output), *facts, *self._notes()])

    def __repr__(self) -> str:
        facts = ", ".join(f"{label} {text}" for label, text in self.facts() if label in {"size", "time"})
        sqnr_db = None if self.accuracy is None else self.accuracy.sqnr_db
        accuracy = "" if sqnr_db is None else f", SQNR {sqnr_db:.1f} dB"
        return f"<Evaluation of {self.result.output}: {facts}{accuracy}>"

    def _repr_html_(self) -> str:
        return html_table([("", str(self.result.output)), *self.facts()], notes=self._notes())

    def _notes(self) -> list[str]:
        verified = [] if self.verification is None else [f"verified: {self.verification.headline}"]
        sensitive = [f"most sensitive: {name}, {share:.0%} of the noise" for name, share in self.sensitive_layers]
        return [*verified, *sensitive, *(f"warning: {each}" for each in self.warnings)]

    def to_dict(self) -> dict[str, Any]:
        """Return the report of ``qo.quantize`` and the evaluation as one dict; numbers may be infinite or NaN."""
        accuracy, timing, codes = self.accuracy, self.timing, self.verification
        provenance = Provenance.read(self.quantized.proto)
        document = self.result.to_dict()
        calibration_sqnr = document.pop("outputs_sqnr_db")
        if not calibration_sqnr and accuracy is not None and self.split is not None and not self.split.is_held_out:
            calibration_sqnr = dict(accuracy.outputs_sqnr_db)  # evaluation used calibration batches
        del document["output_sqnr_db"]  # SQNR on calibration batches; the key sqnr_db replaces it
        return {
            **document,
            "hints": [*self.result.hints, *self.hints],
            "calibration_sqnr_db": calibration_sqnr.get(worst_output(calibration_sqnr)),
            "calibration_sqnr_db_by_output": calibration_sqnr,
            "integer_kernel_layers": sum(layer.runs_on_integer_kernel for layer in self.result.layers),
            "data_sha256": None if provenance is None else provenance.data or None,
            "written_by": None if provenance is None else provenance.made_by,
            "calibration_batches": None if self.split is None else self.split.calibration.count,
            "evaluation_batches": None if accuracy is None else accuracy.batches,
            "evaluated_on_held_out": None if self.split is None else self.split.is_held_out,
            "sqnr_db": None if accuracy is None else accuracy.sqnr_db,
            "sqnr_db_output": None if accuracy is None else accuracy.worst_output or None,
            "sqnr_db_by_output": None if accuracy is None else dict(accuracy.outputs_sqnr_db),
            "agreement": None if accuracy is None else accuracy.agreement,
            "score_by_output": None
            if accuracy is None
            else {name: {"measure": each.measure, "value": each.value} for name, each in accuracy.scores.items()},
            "metric": None if accuracy is None or accuracy.metric is None else accuracy.metric.to_dict(),
            "max_drop": None if self.result.search is None else self.result.search.max_drop,
            "equal_share_by_output": None if accuracy is None else dict(accuracy.outputs_equal),
            "outputs_not_compared": None if accuracy is None else dict(accuracy.not_compared),
            "evaluation_samples": None if accuracy is None else accuracy.samples,
            "sqnr_db_interval": None if accuracy is None else accuracy.sqnr_interval_db,
            "agreement_interval": None if accuracy is None else accuracy.agreement_interval,
            "ms_float": None if timing is None else timing.first_ms,
            "ms_quantized": None if timing is None else timing.second_ms,
            "timing_spread": None if timing is None else timing.spread,
            "compared_codes": None if codes is None else codes.compared_codes,
            "differing_codes": None if codes is None else codes.differing_codes,
            "verified": None if codes is None else codes.ok,
            "sensitive_layers": [
                {"layer": layer.name, "noise_share": layer.noise_share} for layer in self.sensitive_layers
            ],
            "warnings": [each._asdict() for each in self.warnings],
        }


def quantize_and_evaluate(  # noqa: PLR0913 - all parts of the job
    model: ModelSource,
    output: str | PathLike[str],
    data: BatchSource | None = None,
    recipe: Recipe | str | PathLike[str] = "w8a8",
    *,
    batch_size: int | None = None,
    checks: Checks = Checks(),  # noqa: B008 - a frozen value
    progress: StageProgress | None = None,
    metric: MetricLike | None = None,
    max_drop: float | str | None = None,
    eval_data: BatchSource | None = None,
    labels: ArrayLike | None = None,
    **options: Any,
) -> Evaluation:
    """Quantize a model with the calibration part of the data, and evaluate the file on the held-out part.

    Args:
        model: the float model, as for ``qo.quantize``.
        output: path of the quantized file, as for ``qo.quantize``.
        data: batches. None is possible for weight-only recipes; the quantized model is then not compared with the float
            model.
        recipe: as for ``qo.quantize``.
        batch_size: samples per batch of files; see ``split_batches``.
        checks: the checks to run besides accuracy.
        progress: callback f(stage, done, total) with the name of the stage; total is None if unknown.
        metric: a metric of both models on the evaluation data, as for ``qo.quantize``.
        max_drop: largest accepted drop of the metric, as for ``qo.quantize``. The search and the evaluation use
            different batches; ``split_batches`` says which.
        eval_data: batches for the evaluation, and for the search with ``max_drop``; all of ``data`` are then used for
            calibration.
        labels: one label per sample of ``eval_data``, or of ``data`` without ``eval_data``; by default, the classes of
            its sub-directories, if the model has as many.
        options: further arguments of ``qo.quantize``.

    Raises:
        DetentError: ``qo.quantize`` or ``split_batches`` raised it.

    >>> import tempfile, numpy as np
    >>> from onnx import parser
    >>> model = parser.parse_model('''<ir_version: 8, opset_import: ["" : 17]>
    ...     g (float[N,2] x) => (float[N,1] y) <float[2,1] w = {3.0, 1.0}> { [fc] y = MatMul(x, w) }''')
    >>> data = [np.float32([[i, 0.3]]) for i in range(40)]
    >>> with tempfile.TemporaryDirectory() as directory:
    ...     evaluation = quantize_and_evaluate(model, f"{directory}/small.onnx", data)
    >>> evaluation.split.is_held_out, evaluation.verification.ok, evaluation.missed_limits(min_sqnr_db=30)
    (True, True, [])
    """
    source = load_model(model)
    split = None
    if data is not None:
        is_searched = max_drop is not None
        split = split_batches(
            source, data, batch_size, eval_data=eval_data, labels=labels, metric=metric, search=is_searched
        )
    elif any(each is not None for each in (metric, max_drop, eval_data, labels)):
        raise NotCalibratedError("metric=, max_drop=, eval_data= and labels= need data, also for weight-only recipes")
    if split is not None:
        split.check()
    calibration = None if split is None else split.calibration
    stage = None if progress is None else partial(progress, "calibrating")
    # If nothing is held out, qo.quantize need not compare outputs: evaluation does so on the same batches.
    options.setdefault("compare", split is not None and split.is_held_out)
    if split is not None:
        check_metric(source, split, metric)
        options |= split.search_arguments(metric, max_drop)
    result = qo.quantize(source, output, calibration, recipe, progress=stage, **options)
    return evaluate_result(source, result, split, checks=checks, progress=progress, metric=metric)


def evaluate_result(
    source: ModelSource,
    result: QuantizeReport,
    split: Split | None = None,
    *,
    checks: Checks = Checks(),  # noqa: B008 - a frozen value
    progress: StageProgress | None = None,
    metric: MetricLike | None = None,
) -> Evaluation:
    """Compare the file that ``qo.quantize`` wrote with its float model.

    Args:
        source: the float model.
        result: the report of ``qo.quantize``.
        split: calibration and evaluation batches, from ``split_batches``; if None, only run times are measured.
        checks: the checks to run besides accuracy.
        progress: callback f(stage, done, total) with the name of the stage; total is None if unknown.
        metric: a metric of both models on the evaluation batches, with the labels of ``split``.

    Raises:
        FileFormatError: the file is missing or malformed.
        UnsupportedError: ONNX Runtime cannot run one of the models.
    """
    return _Evaluator(load_model(source), result, split, progress, metric).run(checks)


def _missed_drop(result: QuantizeReport, accuracy: Accuracy | None) -> str:
    """Return a message if the metric drops by more than ``max_drop`` on the evaluation samples, or ""."""
    if result.search is None:
        return ""
    limit, measured = f"the limit of {result.search.max_drop:g}", None if accuracy is None else accuracy.metric
    if measured is None:
        return f"the metric was not measured, so {limit} is not met: pass data"
    if measured.drop <= result.search.max_drop + TOLERANCE:
        return ""
    error, count = measured.standard_error, counted(measured.samples, "sample", ",")
    margin = "" if error is None else f" ± {error:.4f}"
    return (
        f"{measured.name} drops by {measured.drop:.4f}{margin} on {count}, above {limit}: pass more evaluation data, "
        "or use a recipe with more bits"
    )


class _TooLongError(Exception):
    """Measuring sensitivity would take longer than its time limit."""


class _Evaluator:
    """Runner of the checks of one evaluation, which also collects warnings."""

    def __init__(
        self,
        source: LoadedModel,
        result: QuantizeReport,
        split: Split | None,
        progress: StageProgress | None,
        metric: MetricLike | None,
    ) -> None:
        self.source, self.result, self.split = source, result, split
        self.metric = AUTO if metric is None and result.search is not None else metric
        self.quantized = load_model(result.output)
        self.warnings: list[QuantizeWarning] = []
        self.progress: StageProgress = (lambda *_: None) if progress is None else progress

    def run(self, checks: Checks) -> Evaluation:
        timing, advice = self._time() if checks.time else (None, SpeedAdvice())
        accuracy: Accuracy | None = None
        verification: VerifyReport | None = None
        sensitivity: qs.Sensitivity | None = None
        if self.split is not None:
            batches = self.split.evaluation.counted(partial(self.progress, "evaluating"))
            labels = self.split.labels
            accuracy = measure_accuracy(self.source, self.quantized, batches, metric=self.metric, labels=labels)
            if checks.verify:
                verification = self._verify(self.split)
            if checks.sensitivity:
                sensitivity = self._measure_sensitivity(self.split)
        return Evaluation(
            self.source,
            self.quantized,
            self.result,
            self.split,
            accuracy,
            timing,
            verification,
            sensitivity,
            (*advice.hints, *filter(None, [vnni_hint(self.result.plan.target.name, has_vnni())])),
            (*self._result_warnings(accuracy), *advice.warnings, *self._target_warnings(), *self.warnings),
        )

    def _result_warnings(self, accuracy: Accuracy | None) -> Iterator[QuantizeWarning]:
        """Yield the evaluation's warnings about accuracy and samples, and all other warnings of ``qo.quantize``."""
        if accuracy is None or self.split is None:
            yield from self.result.warnings
            return
        yield from accuracy.warnings
        missed = _missed_drop(self.result, accuracy)
        if missed:
            yield QuantizeWarning("max-drop", missed)
        if any(line.input for line in self.result.layers):
            yield from few_samples(*self._sample_counts(self.split, accuracy))
        replaced = (*MEASURED_AGAIN, *(["max-drop"] if missed else []))
        yield from (each for each in self.result.warnings if each.code not in replaced)

    def _sample_counts(self, split: Split, accuracy: Accuracy) -> tuple[int, int]:
        """Return the number of all samples and of distinct samples, of calibration and evaluation together."""
        count, data = self.result.samples + accuracy.samples * split.is_held_out, self.result.data
        if data is None:
            return count, count
        summary = DataSummary()
        summary.merge(data)
        summary.samples = count
        for feed in split.evaluation if split.is_held_out and not summary.has_enough else ():
            summary.add_digests(feed)
            if summary.has_enough:
                break
        return count, summary.distinct

    def _target_warnings(self) -> Iterator[QuantizeWarning]:
        """Yield a warning if the target does not suit this CPU."""
        text = mismatch(self.result.plan.target.name, has_vnni())
        if text:
            yield QuantizeWarning("target", text)

    def _warn(self, text: str) -> None:
        _log.warning("%s", text)
        self.warnings.append(QuantizeWarning("not-run", text))

    def _time(self) -> tuple[Timing | None, SpeedAdvice]:
        """Time both models, and advise if the quantized model is not faster."""
        try:
            split, progress = self.split, partial(self.progress, "timing")
            feeds = [random_inputs(self.source)] if split is None else list(split.evaluation.first(TIMING_BATCHES))

            def measure(quantized: ModelSource) -> Timing:
                return time_models(self.source, quantized, feeds, seconds=TIMING_SECONDS, progress=progress)

            timing = measure(self.quantized)
            return timing, advise(self.source, self.quantized, self.result, timing, feeds, measure)
        except DetentError as error:
            self._warn(f"the models were not timed: {error}")
            return None, SpeedAdvice()

    def _verify(self, split: Split) -> VerifyReport | None:
        batches = split.evaluation.first(VERIFY_BATCHES).counted(partial(self.progress, "verifying"))
        try:
            return verify(self.source, self.quantized, batches, levels=(1, 3))
        except DetentError as error:
            self._warn(f"the quantized model was not verified: {error}")
            return None

    def _measure_sensitivity(self, split: Split) -> qs.Sensitivity | None:
        """Measure the sensitivity of each layer with the quantization parameters of the file."""
        decisions, error_text = self.result.decisions, ""
        if decisions is None:
            return None
        limit = max(MIN_RANKING_SECONDS, self.result.seconds)

        def check_cost(cost: qs.Cost) -> None:
            if cost.seconds_estimate > limit:
                raise _TooLongError(
                    f"the measurement would take too long ({cost}): to run it anyway, use detent sensitivity"
                )

        for samples in (RANKING_SAMPLES, 1):
            try:
                return qs.measure(
                    self.source,
                    split.calibration.first(samples),
                    decisions,
                    samples=samples,
                    progress=partial(self.progress, "measuring sensitivity"),
                    announce=check_cost,
                )
            except (_TooLongError, DetentError) as error:
                error_text = str(error)
        self._warn(f"the sensitivity of layers was not measured: {error_text}")
        return None
