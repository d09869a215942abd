"""Metrics of a model: one number for all evaluation samples, higher is better.

A metric is a function ``f(outputs)`` or ``f(outputs, labels)``. ``outputs`` maps the name of each output to its values
for all samples, joined along the first axis; an output whose other axes vary is a list with one array per batch.
``labels`` is an array with one entry per sample, or None. The text "module:function" names a function to import, which
executes the code of the module. These metrics are built in, and use the first output:

====== ============================================================ =============================
name   with labels                                                  without labels, compared with
====== ============================================================ =============================
top1   share of samples, positions or pixels with the right class   the classes of the float model
cosine mean cosine of the output's vectors and the labels           the vectors of the float model
iou    intersection over union of the output and the labels' masks  the masks of the float model
====== ============================================================ =============================

The metric "auto" is top1 with labels. Without labels, it is the measure that fits the first output
(``output_measures``); for the relative error, it is 1 minus the error. If the number of rows of the first
output depends on the data, as for boxes after NonMaxSuppression, "auto" is an error, except for probabilities.

The drop of a quantized model is the float model's metric minus its own. Its standard error comes from parts of the
batches: with drops d_1 .. d_K of K parts, it is the standard deviation of the d_k, divided by sqrt(K). Few parts
estimate it badly, so confidence intervals use the quantiles of Student's t distribution with K - 1 degrees of freedom.
"""

import importlib
import inspect
import sys
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from math import sqrt
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from detent.array_store import concatenate, copies
from detent.checks import as_number
from detent.errors import DetentError, DtypeError, RangeError, ShapeError, SpecError, closest
from detent.metrics import MEASURE_BATCHES, one_sided_95
from detent.output_measures import (
    COSINE,
    EQUAL_SHARE,
    IOU,
    RELATIVE_ERROR,
    Measure,
    choose_measure,
    have_probabilities,
    mask_threshold,
    predicted_classes,
    rows_depend_on_data,
)

__all__ = [
    "AUTO",
    "BUILT_IN",
    "Metric",
    "MetricComparison",
    "MetricLike",
    "MetricResult",
    "get_metric",
    "parse_drop",
    "split_labels",
]

Array = NDArray[Any]
Output = Array | list[Array]
Outputs = Mapping[str, Output]
MetricLike = str | Callable[..., float]

AUTO = "auto"
MAX_PARTS, MIN_PART_SAMPLES, MIN_PARTS = 10, 8, 2  # parts of the batches that give the standard error
MAX_ERROR_CHARS = 200


@dataclass(frozen=True)
class Metric:
    """A metric with its name; ``function`` gets the outputs, those of the float model, and labels or None."""

    name: str
    function: Callable[[Outputs, Outputs, Array | None], float]

    def score(self, outputs: Outputs, float_outputs: Outputs, labels: Array | None) -> float:
        """Compute the metric.

        Raises:
            SpecError: the function raised an exception, or did not return a finite number.
        """
        try:
            value = self.function(outputs, float_outputs, labels)
        except DetentError:
            raise
        except Exception as error:
            text = f"{type(error).__name__}: {error}"[:MAX_ERROR_CHARS]
            raise SpecError(f"metric {self.name} raised {text}; repair the function, or check the labels") from error
        try:
            number = as_number("metric", value.item() if isinstance(value, np.generic | np.ndarray) else value)
        except (DetentError, ValueError) as error:
            raise SpecError(f"metric {self.name} returned {value!r:.60}, expected a finite number") from error
        return number


@dataclass(frozen=True)
class MetricResult:
    """Metric of a quantized model and of its float model, on the same samples.

    Attributes:
        name: name of the metric.
        value: metric of the quantized model.
        float_value: metric of the float model.
        standard_error: standard error of the drop; None if there are too few batches or samples, or if the metric is
            not defined on parts of the data.
        samples: number of samples.
        parts: number of parts of the batches from which the standard error was computed; 0 if it is unknown.

    >>> result = MetricResult("top1", 0.975, 0.98, 0.002, 400, 10)
    >>> round(result.drop, 6), round(result.largest_drop, 6), str(result)
    (0.005, 0.008666, '0.9750 (float 0.9800, drop 0.0050 ± 0.0020)')
    """

    name: str
    value: float
    float_value: float
    standard_error: float | None = None
    samples: int = 0
    parts: int = 0

    @property
    def drop(self) -> float:
        """Metric of the float model minus metric of the quantized model; negative if the quantized model is better."""
        return self.float_value - self.value

    @property
    def largest_drop(self) -> float:
        """Upper end of the one-sided 95 % confidence interval of the drop; the drop itself without a standard error.

        A negative drop counts as 0: it is luck, because quantization does not improve a model.
        """
        if not self.standard_error:
            return max(self.drop, 0.0)
        return max(self.drop, 0.0) + one_sided_95(self.parts) * self.standard_error

    def __str__(self) -> str:
        error = "" if self.standard_error is None else f" ± {self.standard_error:.4f}"
        return f"{self.value:.4f} (float {self.float_value:.4f}, drop {self.drop:.4f}{error})"

    def to_dict(self) -> dict[str, Any]:
        """Return all values, and the drop, as a dict."""
        return {**vars(self), "drop": self.drop}


class MetricComparison:
    """Compares quantized models with their float model by a metric, on the same batches.

    Args:
        metric: a built-in name, "module:function", or a function; None stands for "auto".
        float_outputs: outputs of the float model, one dict per batch.
        sizes: number of samples of each batch.
        labels: one entry per sample, or None.
        memory_budget: limit on the bytes of the outputs that a metric gets; larger ones are in a temporary file, and
            are read as needed. None for no limit.

    Raises:
        SpecError: the metric does not exist, or fails on the outputs of the float model.
        ShapeError, DtypeError, RangeError: the labels do not fit.

    >>> scores = [{"y": np.float32([[0, 1], [2, 1]])}]
    >>> comparison = MetricComparison("top1", scores, [2], np.array([1, 1]))
    >>> comparison.float_value, comparison.measure([{"y": np.float32([[0, 1], [1, 2]])}]).drop
    (0.5, -0.5)
    """

    def __init__(
        self,
        metric: MetricLike | None,
        float_outputs: Sequence[Mapping[str, Array]],
        sizes: Sequence[int],
        labels: Array | None = None,
        memory_budget: int | None = None,
    ) -> None:
        self._floats, self._sizes, self._budget = float_outputs, list(sizes), memory_budget
        self._labels = None if labels is None else split_labels(labels, sizes)
        self.metric = self._chosen(metric)
        self._everything = range(len(self._floats))
        self.float_value = self._score(self._floats, self._everything)
        self._parts = self._make_parts()
        self._float_parts = self._part_scores(self._floats)

    def _chosen(self, metric: MetricLike | None) -> Metric:
        if metric is not None and metric != AUTO:
            chosen = get_metric(metric)
            is_relative = chosen is BUILT_IN["top1"] and self._labels is None
            return replace(chosen, name="top1 agreement with float") if is_relative else chosen
        self._check_rows()
        return (
            BUILT_IN["top1"]
            if self._labels is not None
            else _fitting(_first(_joined(self._floats, None, self._budget)))
        )

    def _check_rows(self) -> None:
        """Reject a first output whose rows depend on the data: its rows are objects such as boxes, not samples."""
        name = next(iter(_names(self._floats)), "")
        batches = zip(self._floats, self._sizes, strict=True) if name else ()
        rows = [(len(x), size) for outputs, size in batches if (x := outputs[name]).ndim]  # may be read from a file
        first = (outputs[name] for outputs, _ in zip(self._floats, range(MEASURE_BATCHES), strict=False))
        if rows_depend_on_data(rows) and not have_probabilities([*first]):
            raise SpecError(
                f"the number of rows of output {name!r} depends on the data, so metric 'auto' cannot tell what a row "
                "is: pass a function (--metric module:function), which gets all outputs, or 'top1' if each row has "
                "the class scores of one prediction"
            )

    def measure(self, outputs: Sequence[Mapping[str, Array]]) -> MetricResult:
        """Measure a quantized model by its outputs, one dict per batch."""
        value = self._score(outputs, self._everything)
        scores = self._part_scores(outputs)
        error = self._error(scores)
        parts = 0 if error is None else len(scores)
        return MetricResult(self.metric.name, value, self.float_value, error, sum(self._sizes), parts)

    def _error(self, scores: list[float]) -> float | None:
        if len(scores) < MIN_PARTS or len(scores) != len(self._float_parts):
            return None
        drops = np.subtract(self._float_parts, scores)
        return float(drops.std(ddof=1)) / sqrt(len(drops))

    def _make_parts(self) -> list[range]:
        count = min(MAX_PARTS, len(self._floats), sum(self._sizes) // MIN_PART_SAMPLES)
        return [range(i, len(self._floats), count) for i in range(count)] if count >= MIN_PARTS else []

    def _part_scores(self, outputs: Sequence[Mapping[str, Array]]) -> list[float]:
        """Return the metric of each part; empty if it is not defined on a part, as some metrics are not."""
        try:
            return [self._score(outputs, part) for part in self._parts]
        except SpecError:
            return []

    def _score(self, outputs: Sequence[Mapping[str, Array]], numbers: Sequence[int]) -> float:
        labels = None if self._labels is None else np.concatenate([self._labels[i] for i in numbers])
        chosen, floats = (_Part(each, numbers) for each in (outputs, self._floats))
        separate = _varying(chosen) | _varying(floats)  # lists for both models, if one model's outputs vary
        outputs_of_part = _joined(chosen, separate, self._budget)
        return self.metric.score(outputs_of_part, _joined(floats, separate, self._budget), labels)


class _Part(Sequence[Mapping[str, Array]]):
    """Some batches; their outputs may be in a file, and are read when a batch is accessed."""

    def __init__(self, batches: Sequence[Mapping[str, Array]], numbers: Sequence[int]) -> None:
        self._batches, self._numbers = batches, numbers

    def __len__(self) -> int:
        return len(self._numbers)

    def __getitem__(self, index: Any) -> Any:  # noqa: ANN401 - a batch; slices are not needed
        return self._batches[self._numbers[index]]


def split_labels(labels: Array, sizes: Sequence[int]) -> list[Array]:
    """Split labels by batch.

    Raises:
        ShapeError: the number of labels is not the number of samples.
    """
    if labels.ndim == 0 or len(labels) != sum(sizes):
        count = "a single value" if labels.ndim == 0 else f"{len(labels):,} labels"
        raise ShapeError(f"got {count} for {sum(sizes):,} samples: pass one label per sample, in the order of the data")
    return np.split(labels, np.cumsum(sizes)[:-1])


def _varying(batches: Sequence[Mapping[str, Array]]) -> set[str]:
    """Return the names of outputs that cannot be joined along the first axis, because their other axes vary."""
    shapes: dict[str, set[tuple[int, ...] | None]] = {}
    for batch in batches:
        for name, each in batch.items():
            shapes.setdefault(name, set()).add(each.shape[1:] if each.ndim else None)
    return {name for name, each in shapes.items() if len(each) > 1 or None in each}


def _joined(
    batches: Sequence[Mapping[str, Array]], separate: Set[str] | None = None, memory_budget: int | None = None
) -> dict[str, Output]:
    """Join the outputs of batches along the first axis; those in ``separate``, by default ``_varying``, become lists.

    Lists have copies, so that a metric that works in place does not change the stored outputs.
    """
    separate = _varying(batches) if separate is None else separate
    joined: dict[str, Output] = {}
    for name in _names(batches):
        parts = (each[name] for each in batches)
        is_list = name in separate
        joined[name] = output = copies(parts, memory_budget) if is_list else concatenate(parts, memory_budget)
        if memory_budget is not None:
            nbytes = sum(each.nbytes for each in output) if isinstance(output, list) else output.nbytes
            memory_budget = max(0, memory_budget - nbytes)
    return joined


def _names(batches: Sequence[Mapping[str, Array]]) -> list[str]:
    return list(batches[0]) if batches else []


def get_metric(metric: MetricLike) -> Metric:
    """Return the metric of a built-in name, of "module:function", or of a function.

    Raises:
        SpecError: the metric is unknown.

    >>> get_metric("top1").name, get_metric("statistics:mean").name, get_metric(len).name
    ('top1', 'statistics:mean', 'len')
    """
    if isinstance(metric, str):
        if metric in BUILT_IN:
            return BUILT_IN[metric]
        return _user_metric(_imported(metric), metric)
    if not callable(metric):
        raise SpecError(f"metric must be a function, a name or 'module:function', got {metric!r:.60}")
    return _user_metric(metric, getattr(metric, "__name__", type(metric).__name__))


def parse_drop(value: float | str, what: str = "max_drop") -> float:
    """Return a drop of a metric as a number; "0.5%" is 0.005.

    >>> parse_drop("0.5%"), parse_drop("0.005"), parse_drop(0)
    (0.005, 0.005, 0.0)
    """
    text = value.strip() if isinstance(value, str) else value
    try:
        number = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1) if isinstance(text, str) else text
        number = as_number(what, number)
    except (ValueError, DetentError) as error:
        raise SpecError(f"{what} must be a number such as 0.005 or '0.5%', got {value!r:.60}") from error
    if number < 0:
        raise SpecError(f"{what} must not be negative, got {value!r}: use 0 to allow no drop")
    return number


def _user_metric(function: Callable[..., Any], name: str) -> Metric:
    takes_labels = _parameter_count(function) != 1

    def score(outputs: Outputs, _floats: Outputs, labels: Array | None) -> Any:  # noqa: ANN401 - checked by Metric
        return function(dict(outputs), labels) if takes_labels else function(dict(outputs))

    return Metric(name, score)


def _parameter_count(function: Callable[..., Any]) -> int:
    """Return the number of positional parameters, 2 if it is unknown or unlimited."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (ValueError, TypeError):  # some built-in functions have no signature
        return 2
    if any(each.kind is each.VAR_POSITIONAL for each in parameters):
        return 2
    return sum(each.kind in {each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD} for each in parameters)


def _imported(text: str) -> Callable[..., Any]:
    """Import a function; modules in the current directory can be imported, too."""
    module_name, colon, name = text.partition(":")
    if not colon or not module_name or not name:
        hint = closest(text, BUILT_IN)
        raise SpecError(f"there is no metric {text!r}{hint} use {', '.join(BUILT_IN)} or 'module:function'")
    directory = str(Path.cwd())
    sys.path.insert(0, directory)
    try:
        module = importlib.import_module(module_name)
    except Exception as error:
        text = f"{type(error).__name__}: {error}"[:MAX_ERROR_CHARS]
        raise SpecError(f"module {module_name!r} of the metric cannot be imported: {text}") from error
    finally:
        sys.path.remove(directory)
    function = getattr(module, name, None)
    if not callable(function):
        problem = "is not a function" if hasattr(module, name) else "does not exist"
        raise SpecError(f"{name!r} in module {module_name!r} {problem}: pass --metric module:function")
    return function  # type: ignore[no-any-return]  # any callable


# Built-in metrics


def _first(outputs: Outputs) -> list[Array]:
    """Return the first output as a list of arrays."""
    if not outputs:
        raise SpecError("the model has no output that is an array: a metric needs one")
    first = next(iter(outputs.values()))
    return first if isinstance(first, list) else [first]


def _fitting(float_parts: list[Array]) -> Metric:
    """Return the measure that fits the first output as a metric."""
    measure, threshold = choose_measure(float_parts), mask_threshold(float_parts)

    def score(outputs: Outputs, floats: Outputs, _labels: Array | None) -> float:
        pairs = zip(_first(floats), _first(outputs), strict=True)
        sums = np.sum([_sums(measure, x, y, threshold) for x, y in pairs], axis=0)
        value = measure.value(*map(float, sums))
        return 1 - value if measure is RELATIVE_ERROR else value

    return Metric(measure.name if measure is not RELATIVE_ERROR else "1 - relative error", score)


def _sums(measure: Measure, x: Array, y: Array, threshold: float) -> tuple[float, float]:
    """Return the sums of a measure; an output with another shape than in float counts as wrong in all elements."""
    if x.shape == y.shape:
        return measure.sums(x, y, threshold)
    if measure is RELATIVE_ERROR:
        return measure.sums(x, np.zeros_like(x), threshold)  # as much noise as signal
    return 0.0, float(x.size)


def _auto(outputs: Outputs, floats: Outputs, labels: Array | None) -> float:
    return (
        _top1(outputs, floats, labels)
        if labels is not None
        else _fitting(_first(floats)).function(outputs, floats, None)
    )


def _top1(outputs: Outputs, floats: Outputs, labels: Array | None) -> float:
    parts, classes = _first(outputs), [_classes(each) for each in _first(outputs)]
    references = (
        [_classes(each) for each in _first(floats)] if labels is None else _class_labels(labels, parts, classes)
    )
    pairs = zip(references, classes, strict=True)
    sums = [EQUAL_SHARE.sums(x, y, 0.0) if x.shape == y.shape else (0.0, x.size) for x, y in pairs]
    return EQUAL_SHARE.value(*map(float, np.sum(sums, axis=0)))


def _classes(output: Array) -> Array:
    if output.dtype.kind in "iu":
        return output
    if output.dtype.kind != "f" or output.ndim < 2 or output.shape[-1 if output.ndim == 3 else 1] < 2:
        raise ShapeError(
            f"top1 needs class scores of shape (N, C), (N, T, C) or (N, C, H, W), got a first output of {output.dtype} "
            f"and shape {output.shape}: pass a function as metric"
        )
    return predicted_classes(output)


def _class_labels(labels: Array, parts: list[Array], classes: list[Array]) -> list[Array]:
    if labels.dtype.kind not in "iub":
        raise DtypeError(f"top1 needs integer labels, got {labels.dtype}: convert them, or pass a function as metric")
    if labels.ndim == 2 and labels.shape[1] == 1 and classes[0].ndim == 1:
        labels = labels[:, 0]
    by_part = split_labels(labels, [len(each) for each in classes])
    for part, expected, given in zip(parts, classes, by_part, strict=True):
        if expected.shape != given.shape:
            raise ShapeError(
                f"labels of shape {given.shape} do not fit an output of shape {part.shape}: expected {expected.shape}"
            )
        count = part.shape[-1 if part.ndim == 3 else 1] if part.dtype.kind == "f" else None
        if given.size and (given.min() < 0 or (count is not None and given.max() >= count)):
            limit = "at least 0" if count is None else f"from 0 to {count - 1}"
            raise RangeError(
                f"labels are from {given.min()} to {given.max()}, but classes are {limit}: check the labels"
            )
    return by_part


def _cosine(outputs: Outputs, floats: Outputs, labels: Array | None) -> float:
    parts = _first(outputs)
    if any(each.ndim < 2 or each.dtype.kind != "f" for each in parts):
        raise ShapeError(f"cosine needs vectors of shape (N, ..., D), got {parts[0].dtype} of shape {parts[0].shape}")
    references = _first(floats) if labels is None else _array_labels(labels, parts, "cosine")
    return COSINE.value(
        *map(float, np.sum([COSINE.sums(*pair, 0.0) for pair in zip(references, parts, strict=True)], axis=0))
    )


def _iou(outputs: Outputs, floats: Outputs, labels: Array | None) -> float:
    parts, threshold = _first(outputs), mask_threshold(_first(floats))
    if labels is None:
        masks = [each > threshold for each in _first(floats)]
    else:
        masks = [each > 0.5 for each in _array_labels(labels, parts, "iou")]
    pairs = zip(masks, parts, strict=True)
    return IOU.value(*map(float, np.sum([IOU.sums(x, y > threshold, 0.5) for x, y in pairs], axis=0)))


def _array_labels(labels: Array, parts: list[Array], name: str) -> list[Array]:
    """Return labels that have the shape of the output; an axis of size 1 may be missing."""
    by_part = split_labels(labels, [len(each) for each in parts])
    for i, (part, given) in enumerate(zip(parts, by_part, strict=True)):
        if given.size != part.size or given.dtype.kind not in "fiub":
            raise ShapeError(
                f"{name} needs labels like the output, of shape {part.shape}, got {given.dtype} of shape {given.shape}"
            )
        by_part[i] = given.reshape(part.shape)
    return by_part


BUILT_IN: Mapping[str, Metric] = {
    AUTO: Metric(AUTO, _auto),
    "top1": Metric("top1", _top1),
    "cosine": Metric("cosine", _cosine),
    "iou": Metric("iou", _iou),
}
