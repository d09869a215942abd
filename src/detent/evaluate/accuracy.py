"""Accuracy of a quantized model relative to its float model, on held-out batches.

======================= =========================== ================= ==========================================
data                    calibration                 search (max_drop) evaluation
======================= =========================== ================= ==========================================
20 batches or more      nine of ten                                   every tenth
fewer than 20 batches   all                                           the first eight; nothing is held out
eval_data               all of data                                   all of eval_data
max_drop                half of the batches         a quarter         a quarter
max_drop and eval_data  all of data                 half of eval_data the other half of eval_data
======================= =========================== ================= ==========================================

With ``max_drop``, batches are assigned at random with a fixed seed, so that an order such as 0, 1, 2, ..., 0, 1, 2, ...
of classes does no harm. The search for layers to keep in float never sees the batches of the evaluation: on the samples
that it chose the layers by, the drop is too optimistic.

SQNR = 10 log10(sum x^2 / sum (x - y)^2) in dB, over all batches. x is an output of the float model, and y is the same
output of the quantized model. Only outputs of a float type have an SQNR. Each output also has the measure that fits
its shape and values (``detent.output_measures``), such as the IoU of masks. Top-1 agreement is the share of samples for
which both models predict the same class. It needs a first output with one row of class scores, or one label, per
sample. An output is not compared on batches for which the two models return different shapes;
``Accuracy.not_compared`` lists such outputs.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from detent.checks import as_array
from detent.errors import SpecError
from detent.metrics import OutputComparison, worst_output
from detent.model_metric import MetricComparison, MetricLike, MetricResult, split_labels
from detent.onnx.metric_search import class_labels, collect_outputs
from detent.onnx.pipeline import compare_outputs
from detent.onnx.quality_warnings import QuantizeWarning, accuracy_warnings
from detent.onnx_model.batches import Batches, BatchSource, open_batches, samples_in
from detent.onnx_model.files import LoadedModel, ModelSource, load_model
from detent.onnx_model.model_inputs import Feed
from detent.onnx_model.sessions import array_outputs, make_session, ort_errors
from detent.output_measures import RELATIVE_ERROR, OutputScore
from detent.tables import counted

__all__ = ["Accuracy", "Split", "check_metric", "check_supports_agreement", "measure_accuracy", "split_batches"]

Array = NDArray[Any]

MIN_BATCHES_TO_HOLD_OUT = 20  # with fewer batches, calibration needs all of them
HELD_OUT_EVERY = 10
EVALUATION_BATCHES = 8  # calibration batches to evaluate on if nothing is held out
MIN_BATCHES_TO_SEARCH = 4  # for max_drop, without eval_data; 2 batches of eval_data
SPLIT_SEED = 0


@dataclass(frozen=True)
class Split:
    """Batches for calibration, for evaluation and for a search with ``max_drop``, from ``split_batches``.

    ``labels`` and ``search_labels`` have one entry per sample of ``evaluation`` and ``search``; None without labels.
    """

    calibration: Batches
    evaluation: Batches
    is_held_out: bool  # True if no evaluation batch is used for calibration
    search: Batches | None = None
    labels: Array | None = None
    search_labels: Array | None = None

    def check(self) -> Feed:
        """Read the held-out batches and the first calibration batch, and return this one.

        A damaged file among the held-out batches is then an error before anything is written.
        """
        if self.is_held_out:
            for _ in self.evaluation:
                pass
        return self.calibration.check_first()

    def __str__(self) -> str:
        if self.is_held_out:
            return f"{self.evaluation.count:,} held-out {'batch' if self.evaluation.count == 1 else 'batches'}"
        return f"{counted(self.evaluation.count or 0, 'calibration batch', ',')} (nothing held out)"

    def search_arguments(self, metric: MetricLike | None, max_drop: float | str | None) -> dict[str, Any]:
        """Return the arguments of ``qo.quantize`` for a search with ``max_drop``; none without a limit."""
        if max_drop is None:
            return {}
        return {"metric": metric, "max_drop": max_drop, "eval_data": self.search, "labels": self.search_labels}


def split_batches(
    model: ModelSource,
    data: BatchSource,
    batch_size: int | None = None,
    *,
    eval_data: BatchSource | None = None,
    labels: ArrayLike | None = None,
    metric: MetricLike | None = None,
    search: bool = False,
) -> Split:
    """Split data into calibration and held-out batches; without labels, the data are not read.

    Only data without a length, such as a callable, are read once to count the batches.

    Args:
        model: the model that will run on the data.
        data: batches, a file or a directory; see ``qo.quantize``. An iterator cannot be split.
        batch_size: samples per batch of files; None uses the model's fixed batch size, or 1 if the batch axis is
            dynamic.
        eval_data: batches for the evaluation; then all of ``data`` are for calibration.
        labels: one label per sample of ``eval_data``, or of ``data`` without ``eval_data``. Without labels, the
            sub-directories of a directory are the classes, if the model has as many.
        metric: the metric that the labels are for, as for ``qo.quantize``.
        search: also set batches aside for a search with ``max_drop``; see the table in this module.

    Raises:
        SpecError: the number of batches is too small for a search, or the data can be read only once.
        ShapeError: the number of labels is not the number of samples.
        FileFormatError, ShapeError, DtypeError: the data are malformed, or do not fit the model.

    >>> import numpy as np
    >>> from onnx import parser
    >>> model = parser.parse_model(
    ...     '<ir_version: 8, opset_import: ["" : 17]> g (float[N, 2] x) => (float[N, 2] y) { y = Abs(x) }')
    >>> split = split_batches(model, [np.zeros((1, 2), np.float32)] * 30)
    >>> split.calibration.count, list(split.evaluation.numbers), str(split)
    (27, [9, 19, 29], '3 held-out batches')
    >>> split = split_batches(model, [np.zeros((1, 2), np.float32)] * 8, search=True)
    >>> split.calibration.count, split.search.count, split.evaluation.count
    (4, 2, 2)
    """
    loaded = load_model(model)
    inputs = loaded.inputs
    batches = open_batches(data, inputs, batch_size).with_count()
    others = None if eval_data is None else open_batches(eval_data, inputs, batch_size).with_count()
    source, count = batches if others is None else others, (batches if others is None else others).count or 0
    if search:
        calibration, searched, evaluated = _random_parts(count, has_eval_data=others is not None)
    else:
        searched, evaluated = [], list(range(count))
        is_held_out = others is not None or count >= MIN_BATCHES_TO_HOLD_OUT
        if others is None and is_held_out:
            evaluated = evaluated[HELD_OUT_EVERY - 1 :: HELD_OUT_EVERY]
        elif others is None:
            evaluated = evaluated[:EVALUATION_BATCHES]
        calibration = [i for i in range(count) if i not in set(evaluated)] if is_held_out else list(range(count))
    evaluation = source if len(evaluated) == count else source.subset(evaluated)
    searching = source.subset(searched) if searched else None
    chosen: list[Array | None] = [None, None]
    if labels is not None:
        arrays = _labels_by_batch(labels, source)
        chosen = [np.concatenate([arrays[i] for i in part]) if part else None for part in (evaluated, searched)]
    elif class_labels(loaded, source, metric) is not None:
        chosen = [None if part is None else part.labels for part in (evaluation, searching)]
    return Split(
        batches if others is not None or len(calibration) == count else batches.subset(calibration),
        evaluation,
        others is not None or len(calibration) < count,
        searching,
        *chosen,
    )


def _random_parts(count: int, *, has_eval_data: bool) -> tuple[list[int], list[int], list[int]]:
    """Return the indices of the batches for calibration, search and evaluation."""
    least = 2 if has_eval_data else MIN_BATCHES_TO_SEARCH
    if count < least:
        raise SpecError(
            f"max_drop needs at least {least} batches to search on some and evaluate on others, got {count}: pass more "
            "data or a smaller batch_size (--batch-size)"
        )
    order = np.random.default_rng(SPLIT_SEED).permutation(count).tolist()
    first = 0 if has_eval_data else count // 2
    middle = first + (count - first) // 2
    return sorted(order[:first]), sorted(order[first:middle]), sorted(order[middle:])


def _labels_by_batch(labels: ArrayLike, batches: Batches) -> list[Array]:
    return split_labels(as_array("labels", labels), [samples_in(feed) for feed in batches])


@dataclass(frozen=True)
class Accuracy:
    """Accuracy of a quantized model relative to its float model.

    Attributes:
        outputs_sqnr_db: maps the name of each float output to its SQNR over all batches.
        agreement: top-1 agreement, from 0 to 1; None if the first output has neither class scores nor labels.
        batches: number of batches that were compared.
        outputs_equal: maps the name of each output of integers or booleans to its share of equal elements.
        not_compared: maps the name of each output that was not compared on some batches to the reason.
        samples: number of samples that were compared.
        sqnr_interval_db: 95 % confidence interval of the lowest SQNR, from the standard error over samples; None with
            fewer than two samples.
        agreement_interval: 95 % confidence interval (Wilson) of the top-1 agreement; None if ``agreement`` is None.
        warnings: warnings about a low SQNR or a low top-1 agreement.
        scores: maps the name of each output to the measure that fits it, such as "IoU", and its value.
        metric: the metric that was passed, of both models; None without a metric.

    >>> accuracy = Accuracy({"y": 41.0, "z": 30.5}, 1.0, 3)
    >>> accuracy.worst_output, accuracy.sqnr_db
    ('z', 30.5)
    """

    outputs_sqnr_db: Mapping[str, float]
    agreement: float | None
    batches: int
    outputs_equal: Mapping[str, float] = field(default_factory=dict)
    not_compared: Mapping[str, str] = field(default_factory=dict)
    samples: int = 0
    sqnr_interval_db: tuple[float, float] | None = None
    agreement_interval: tuple[float, float] | None = None
    warnings: tuple[QuantizeWarning, ...] = ()
    scores: Mapping[str, OutputScore] = field(default_factory=dict)
    metric: MetricResult | None = None

    @property
    def worst_output(self) -> str:
        """Name of the output with the lowest SQNR, or "" if no output has a float type."""
        return worst_output(self.outputs_sqnr_db)

    @property
    def sqnr_db(self) -> float | None:
        """Lowest SQNR of all outputs, or None if no output has a float type."""
        return self.outputs_sqnr_db.get(self.worst_output)

    @property
    def labeled_scores(self) -> list[tuple[str, str]]:
        """Pairs of label and text for the measures of outputs.

        The first output is left out if its measure is ``agreement``. Relative errors are left out if the SQNR is
        measured, because it says the same.
        """
        others = list(self.scores.items())[1 if self.agreement is not None else 0 :]
        shown = [
            (name, score)
            for name, score in others
            if score.measure != RELATIVE_ERROR.name or name not in self.outputs_sqnr_db
        ]
        names = {name: f" of {name}" if len(self.scores) > 1 else "" for name in self.scores}
        return [(f"{score.measure}{names[name]}", str(score)) for name, score in shown]


def measure_accuracy(
    source: ModelSource,
    artifact: ModelSource,
    data: BatchSource,
    *,
    metric: MetricLike | None = None,
    labels: ArrayLike | None = None,
) -> Accuracy:
    """Run a float model and its quantized model on the same batches, and compare their outputs.

    Args:
        source: the float model.
        artifact: the quantized model.
        data: batches, as for ``qo.quantize``.
        metric: a metric of both models, as for ``qo.quantize``; with labels, the default is top1.
        labels: one label per sample of ``data``; by default, the classes of its sub-directories, if the model has as
            many.

    Raises:
        UnsupportedError: ONNX Runtime cannot run one of the models.
        SpecError, ShapeError, DtypeError: the data do not fit the model.
        SpecError, ShapeError, DtypeError, RangeError: the metric fails, or the labels do not fit.

    >>> import numpy as np
    >>> from onnx import parser
    >>> text = '<ir_version: 8, opset_import: ["" : 17]> g (float[1,2] x) => (float[1,2] y) { y = OP(x) }'
    >>> models = [parser.parse_model(text.replace("OP", name)) for name in ("Identity", "Round")]
    >>> accuracy = measure_accuracy(*models, [np.float32([[1.1, 2.0]])], labels=[1])
    >>> round(accuracy.sqnr_db, 1), accuracy.agreement, accuracy.metric.value
    (27.2, 1.0, 1.0)
    """
    float_model, quantized = load_model(source), load_model(artifact)
    names, float_names = array_outputs(quantized.proto), array_outputs(float_model.proto)
    if not set(names) <= set(float_names):
        raise SpecError(
            f"the quantized model has outputs {names}, but the float model {float_names}: pass two models that were "
            "exported with the same names, or the float model from which the file was quantized"
        )
    batches = open_batches(data, float_model.inputs)
    result: MetricResult | None = None
    checked = class_labels(float_model, batches, metric) if labels is None else as_array("labels", labels)
    if metric is None and checked is None:
        comparison = compare_outputs(float_model, quantized, names, batches)
    else:
        comparison, result = _compare_by_metric(float_model, quantized, names, batches, metric, checked)
    return Accuracy(
        comparison.sqnr_db,
        comparison.agreement,
        comparison.batches,
        comparison.equal_shares,
        comparison.not_compared,
        comparison.samples,
        comparison.sqnr_interval_db(worst_output(comparison.sqnr_db)),
        comparison.agreement_interval,
        tuple(accuracy_warnings(comparison)),
        comparison.scores,
        result,
    )


def _compare_by_metric(
    float_model: LoadedModel,
    quantized: LoadedModel,
    names: Sequence[str],
    batches: Batches,
    metric: MetricLike | None,
    labels: Array | None,
) -> tuple[OutputComparison, MetricResult]:
    """Compare the outputs of both models, and measure a metric of both."""
    feeds = list(batches) if not batches.is_repeatable else batches
    floats = collect_outputs(float_model, names, feeds)
    by_metric = MetricComparison(metric, *floats, labels)
    outputs = collect_outputs(quantized, names, feeds).outputs
    comparison = OutputComparison(names)
    for expected, got, size in zip(floats.outputs, outputs, floats.sizes, strict=True):
        comparison.add(list(expected.values()), list(got.values()), size)
    return comparison, by_metric.measure(outputs)


def check_metric(source: ModelSource, split: Split, metric: MetricLike | None) -> None:
    """Run the float model on the evaluation batches, and check that the metric and the labels fit its outputs.

    The check runs before quantization, so that nothing is written if it fails. Without metric and labels, it does
    nothing.

    Raises:
        SpecError, ShapeError, DtypeError, RangeError: the metric fails or does not exist, or the labels do not fit.
    """
    if metric is None and split.labels is None:
        return
    model = load_model(source)
    MetricComparison(metric, *collect_outputs(model, array_outputs(model.proto), split.evaluation), split.labels)


def check_supports_agreement(source: ModelSource, feed: Feed) -> None:
    """Run the float model on one batch, and check that top-1 agreement can be computed from the first output.

    The check runs before quantization. So a command with a limit on the agreement fails early if there is no agreement.

    Raises:
        SpecError: the first output has neither one row of class scores nor one label per sample.
    """
    model = load_model(source)
    names = array_outputs(model.proto)[:1]
    session, comparison = make_session(model), OutputComparison(names)
    with ort_errors():
        outputs = session.run(names, feed) if names else []
    comparison.add(outputs, outputs)
    if comparison.agreement is None:
        problem = f"the first output has shape {outputs[0].shape}" if outputs else "no output is an array"
        raise SpecError(
            f"{problem}, but top-1 agreement needs class scores or a label per sample: set a limit for the SQNR instead"
        )
