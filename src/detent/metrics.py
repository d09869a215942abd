"""Metrics: quantization error, and how many of the codes are used.

Sums have a fixed accumulation order in float64 (docs/numerics.md, section 5), so a metric is equal on every machine.
For empty data, sums are 0 and ``sqnr_db`` is infinite. ``SignalNoise`` and ``OutputComparison`` sum over batches
in the order in which the batches are added.
"""

from collections.abc import Mapping, Sequence
from math import frexp, inf, isinf, isnan, log, log10, nan, sqrt
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from detent.checks import float_array
from detent.errors import DtypeError, ShapeError
from detent.kernels import error_sum, largest_error, power_of_two, tree_sum
from detent.output_measures import (
    EQUAL_SHARE,
    RELATIVE_ERROR,
    TOP1,
    Measure,
    OutputScore,
    choose_measure,
    have_probabilities,
    mask_threshold,
    rows_depend_on_data,
)
from detent.params import QuantParams
from detent.plan import Plan, check_is_params
from detent.tensor import QuantizedTensor

__all__ = ["clip_fraction", "code_usage", "cosine", "entropy_bits", "mae", "max_error", "mse", "sqnr_db"]

Array = NDArray[Any]
NORMAL_95 = 1.96  # half the width of a 95 % interval, in standard errors
# One-sided quantiles of 95 %, in standard errors: of Student's t distribution for 2 to 16 values (with one degree of
# freedom less), and of the normal distribution.
T_ONE_SIDED = (
    *(6.314, 2.920, 2.353, 2.132, 2.015, 1.943, 1.895, 1.860),
    *(1.833, 1.812, 1.796, 1.782, 1.771, 1.761, 1.753),
)
NORMAL_ONE_SIDED = 1.645
MEASURE_BATCHES, MEASURE_BYTES = 8, 64 << 20  # first batches whose float outputs choose a measure, and their limit
ROW_TOLERANCE = 1e-3  # relative to the largest output; kernels may add in another order if the batch size differs


def mse(x: ArrayLike, y: ArrayLike) -> float:
    """Return the mean squared error.

    >>> mse([1.0, 2.0], [1.0, 4.0])
    2.0
    """
    a, b = _pair(x, y)
    return error_sum("squared_error", a, b) / max(a.size, 1)


def mae(x: ArrayLike, y: ArrayLike) -> float:
    """Return the mean absolute error.

    >>> mae([1.0, 2.0], [1.0, 4.0])
    1.0
    """
    a, b = _pair(x, y)
    return error_sum("absolute_error", a, b) / max(a.size, 1)


def max_error(x: ArrayLike, y: ArrayLike) -> float:
    """Return the largest absolute error.

    >>> max_error([1.0, 2.0], [1.0, 4.0])
    2.0
    """
    a, b = _pair(x, y)
    return largest_error("absolute_error", a, b)


def sqnr_db(x: ArrayLike, y: ArrayLike) -> float:
    """Return the SQNR (signal-to-quantization-noise ratio) in dB, ``10 log10(sum x^2 / sum (x - y)^2)``.

    It is inf for zero noise, and -inf for a zero signal or infinite noise. It is NaN if x or y contains NaN, or
    if signal and noise are both infinite.

    >>> round(sqnr_db([10.0, 0.0], [9.0, 0.0]), 6)
    20.0
    """
    a, b = _pair(x, y)
    factor = _to_one(max(largest_error("value", a, a), largest_error("absolute_error", a, b)))
    return _decibels(error_sum("square", a, a, factor), error_sum("squared_error", a, b, factor))


def _decibels(signal: float, noise: float) -> float:
    if noise == 0:
        return inf
    if isnan(signal) or isnan(noise) or (isinf(signal) and isinf(noise)):
        return nan
    ratio = signal / noise
    return 10 * log10(ratio) if ratio else -inf


def sqnr_of(noise: float) -> float:
    """Return the SQNR in dB for a noise power that is given relative to the signal power."""
    return -10 * log10(noise) if noise > 0 else inf


class SignalNoise:
    """Signal power and noise power, summed over batches."""

    def __init__(self) -> None:
        self.signal = 0.0
        self.noise = 0.0

    def add(self, x: Array, y: Array) -> None:
        if not x.size:
            return
        self.signal += mse(x, np.zeros_like(x)) * x.size
        self.noise += mse(x, y) * x.size

    @property
    def sqnr_db(self) -> float:
        return _decibels(self.signal, self.noise)


class OutputComparison:
    """Comparison of two models' outputs, output by output.

    Float outputs are compared by SQNR. Integer and boolean outputs, such as labels, are compared by the share of equal
    elements. Each output also has the measure that fits its shape and values (``output_measures``); class scores have
    the top-1 agreement.

    The shape of an output may depend on the data, as after NonMaxSuppression. An output is not compared on a batch if
    its two shapes differ or if it has no elements; ``not_compared`` lists such outputs.

    >>> comparison = OutputComparison(["scores", "boxes"])
    >>> scores, boxes = np.float32([[1, 2, 3]]), np.zeros((3, 4), np.float32)
    >>> comparison.add([scores, boxes], [scores, boxes[:2]])
    >>> comparison.sqnr_db, comparison.agreement, comparison.not_compared
    ({'scores': inf}, 1.0, {'boxes': 'shape (3, 4) in float, (2, 4) quantized'})
    """

    def __init__(self, names: Sequence[str], where: tuple[str, str] = ("in float", "quantized")) -> None:
        self._names, self._where = list(names), where
        self._powers: dict[str, SignalNoise] = {}
        self._equal: dict[str, tuple[int, int]] = {}  # number of equal elements, number of all elements
        self._skipped: dict[str, list[str]] = {}  # reasons, one per batch
        self._measured: dict[str, _MeasuredOutput] = {}
        self._reshaped = set[str]()  # outputs whose shapes differ on some batch
        self._rows: dict[str, set[tuple[int, int]]] = {}  # number of rows and of samples, by batch
        self._compared: dict[str, int] = {}  # number of samples that were compared
        self.batches = self.samples = 0
        self._sample_powers: dict[str, list[tuple[Array, Array]]] = {}  # one (signal, noise) pair per batch

    def add(self, expected: Sequence[Array], got: Sequence[Array], samples: int = 1) -> None:
        """Add the outputs of the first model (``expected``) and of the second (``got``) for one batch.

        ``samples`` is the number of samples in the batch.
        """
        self.batches += 1
        self.samples += samples
        for name, x, y in zip(self._names, expected, got, strict=True):
            if isinstance(x, np.ndarray) and x.ndim:
                self._rows.setdefault(name, set()).add((len(x), samples))
            reason = self._problem(x, y)
            if reason:
                self._skipped.setdefault(name, []).append(reason)
                if getattr(x, "shape", None) != getattr(y, "shape", None):
                    self._reshaped.add(name)
                continue
            self._compared[name] = self._compared.get(name, 0) + samples
            if x.dtype.kind == "f":
                floats = x.astype(np.float32), y.astype(np.float32)
                self._powers.setdefault(name, SignalNoise()).add(*floats)
                self._sample_powers.setdefault(name, []).append(_sample_powers(*floats, samples))
            else:
                equal, total = self._equal.get(name, (0, 0))
                self._equal[name] = equal + int(np.count_nonzero(x == y)), total + x.size
            self._measured.setdefault(name, _MeasuredOutput()).add(x, y, samples)

    def compared_samples(self, name: str) -> int:
        """Return the number of samples on which an output was compared."""
        return self._compared.get(name, 0)

    def has_varying_rows(self, name: str) -> bool:
        """Return whether the rows of an output are objects whose number depends on the data; they may change places."""
        if name in self._reshaped:
            return True
        measured = self._measured.get(name)
        is_by_step = measured is not None and measured.has_probabilities
        return not is_by_step and rows_depend_on_data(self._rows.get(name, ()))

    def _problem(self, x: Array, y: Array) -> str:
        """Return why two outputs cannot be compared, or "" if they can be compared."""
        if not isinstance(x, np.ndarray) or not isinstance(y, np.ndarray):
            return "not an array"  # for example a sequence of tensors
        if x.dtype.kind not in "fiub" or (x.dtype.kind == "f") != (y.dtype.kind == "f"):
            return (
                f"type {x.dtype} is not supported"
                if x.dtype == y.dtype
                else f"type {x.dtype} {self._where[0]}, {y.dtype} {self._where[1]}"
            )
        if x.shape != y.shape:
            return f"shape {x.shape} {self._where[0]}, {y.shape} {self._where[1]}"
        return "" if x.size else "no elements"

    @property
    def sqnr_db(self) -> dict[str, float]:
        """The SQNR of each float output."""
        return {name: powers.sqnr_db for name, powers in self._powers.items()}

    @property
    def equal_shares(self) -> dict[str, float]:
        """For each output of integers or booleans, the share of elements that are equal in both models."""
        return {name: equal / total for name, (equal, total) in self._equal.items()}

    @property
    def scores(self) -> dict[str, OutputScore]:
        """For each output, the measure that fits it, and the value of this measure."""
        return {name: each.score for name, each in self._measured.items()}

    @property
    def agreement(self) -> float | None:
        """The share of samples for which both models predict the same class.

        It is None if the first output has neither class scores nor labels. It is also None if the number of rows
        depends on the data, because then a row is not a sample, except for probabilities, for example of each step.
        """
        equal, total = self.agreement_counts
        return equal / total if total else None

    @property
    def agreement_counts(self) -> tuple[int, int]:
        """The number of samples with equal classes, and the number of all samples; (0, 0) if ``agreement`` is None."""
        first = self._measured.get(self._names[0]) if self._names else None
        if first is None or self._names[0] in self._skipped or self.has_varying_rows(self._names[0]):
            return 0, 0
        return first.class_counts

    @property
    def agreement_interval(self) -> tuple[float, float] | None:
        """The Wilson interval of the agreement, with 95 % confidence, or None if ``agreement`` is None."""
        equal, total = self.agreement_counts
        return wilson_interval(equal, total) if total else None

    def sqnr_interval_db(self, name: str) -> tuple[float, float] | None:
        """Return the 95 % confidence interval of an output's SQNR, or None with fewer than two samples.

        For N samples with signal power s and noise power n each, the ratio R = sum n / sum s has the relative standard
        error ``sqrt(N / (N - 1) * sum (n - R s)^2) / sum n``.
        """
        powers = self._sample_powers.get(name, [])
        signal, noise = (np.concatenate([each[i] for each in powers] or [np.zeros(0)]) for i in (0, 1))
        if len(noise) < 2 or not 0 < noise.sum() < inf or not 0 < signal.sum() < inf:
            return None
        ratio = float(noise.sum() / signal.sum())
        residual = float(np.square(noise - ratio * signal).sum()) * len(noise) / (len(noise) - 1)
        margin = NORMAL_95 * 10 / log(10) * sqrt(residual) / float(noise.sum())
        return -10 * log10(ratio) - margin, -10 * log10(ratio) + margin

    @property
    def not_compared(self) -> dict[str, str]:
        """For each output that was not compared on some batches, the reason on the first of these batches."""
        texts = {}
        for name, reasons in self._skipped.items():
            part = "" if len(reasons) == self.batches else f", on {len(reasons)} of {self.batches} batches"
            texts[name] = f"{reasons[0]}{part}"
        return texts

    @property
    def notes(self) -> dict[str, None]:
        """One message for each output in ``not_compared``."""
        return {f"output {name!r} not compared: {text}": None for name, text in self.not_compared.items()}


class _MeasuredOutput:
    """The measure of one output, summed over batches; the first batches are kept until they have chosen the measure."""

    def __init__(self) -> None:
        self._first: list[tuple[Array, Array]] = []
        self._measure: Measure | None = None
        self._threshold, self._has_probabilities = 0.0, False
        self._sums = np.zeros(2)
        self._has_labels = True  # one integer per sample so far
        self._rows = set[tuple[int, int]]()  # number of rows and of samples, by batch

    def add(self, x: Array, y: Array, samples: int) -> None:
        self._rows.add((len(x) if x.ndim else 1, samples))
        self._has_labels = self._has_labels and x.dtype.kind != "f" and x.ndim > 0 and x.size == len(x)
        if self._measure is not None:
            self._sums += self._measure.sums(x, y, self._threshold)
            return
        self._first.append((x, y))
        if len(self._first) == MEASURE_BATCHES or sum(each.nbytes for each, _ in self._first) >= MEASURE_BYTES:
            self._chosen()

    def _chosen(self) -> Measure:
        """Choose the measure if that is not done yet, and add the batches that were kept."""
        if self._measure is None:
            expected = [x for x, _ in self._first]
            self._measure, self._threshold = choose_measure(expected), mask_threshold(expected)
            self._has_probabilities = have_probabilities(expected)
            if self._measure is TOP1 and not self._has_probabilities and rows_depend_on_data(self._rows):
                self._measure = RELATIVE_ERROR  # rows are objects such as boxes, not samples
            for x, y in self._first:
                self._sums += self._measure.sums(x, y, self._threshold)
            self._first.clear()
        return self._measure

    @property
    def has_probabilities(self) -> bool:
        """Whether the float output is probabilities or log-probabilities of classes."""
        self._chosen()
        return self._has_probabilities

    @property
    def score(self) -> OutputScore:
        measure = self._chosen()
        return OutputScore(measure.name, measure.value(*map(float, self._sums)))

    @property
    def class_counts(self) -> tuple[int, int]:
        """Number of samples with equal classes and of all samples; (0, 0) without class scores or labels."""
        is_class = self._chosen() is TOP1 or (self._measure is EQUAL_SHARE and self._has_labels)
        return (int(self._sums[0]), int(self._sums[1])) if is_class else (0, 0)


def _sample_powers(x: Array, y: Array, samples: int) -> tuple[Array, Array]:
    """Return the signal and noise power of each sample, or of the whole batch if rows are not samples."""
    rows = samples if x.ndim and len(x) == samples else 1
    with np.errstate(over="ignore", invalid="ignore"):  # outputs may be infinite
        signal, noise = x.reshape(rows, -1), (x - y).reshape(rows, -1)
        powers = [np.einsum("ij,ij->i", each, each, dtype=np.float64) for each in (signal, noise)]
    return powers[0], powers[1]


def wilson_interval(count: int, total: int) -> tuple[float, float]:
    """Return the Wilson score interval of a share ``count / total``, with 95 % confidence.

    >>> [round(each, 3) for each in wilson_interval(9, 10)]
    [0.596, 0.982]
    """
    share, z2 = count / total, NORMAL_95**2
    center = (share + z2 / (2 * total)) / (1 + z2 / total)
    margin = NORMAL_95 * sqrt(share * (1 - share) / total + z2 / (4 * total**2)) / (1 + z2 / total)
    return max(0.0, center - margin), min(1.0, center + margin)


def one_sided_95(count: int) -> float:
    """Return the width of the one-sided 95 % interval of a mean of ``count`` values, in standard errors.

    A ``count`` that is unknown is 0.

    >>> one_sided_95(2), one_sided_95(16), one_sided_95(1000)
    (6.314, 1.753, 1.645)
    """
    is_few = 2 <= count < 2 + len(T_ONE_SIDED)
    return T_ONE_SIDED[count - 2] if is_few else NORMAL_ONE_SIDED


def has_first_rows(whole: Array, part: Array, rows: int, count: int) -> bool:
    """Return whether ``part`` has the first ``rows`` of ``count`` rows of ``whole``, except for rounding.

    >>> has_first_rows(np.float32([[1.0], [2.0]]), np.float32([[1.0]]), 1, 2)
    True
    """
    if part.shape != (rows, *whole.shape[1:]) or whole.shape[:1] != (count,):
        return False
    start = whole[:rows]
    if part.dtype.kind != "f":
        return bool((part == start).all())
    largest = float(np.abs(whole[np.isfinite(whole)]).max(initial=0.0))
    return bool(np.allclose(part, start, rtol=ROW_TOLERANCE, atol=ROW_TOLERANCE * largest, equal_nan=True))


def worst_output(sqnr_db: Mapping[str, float]) -> str:
    """Return the name of the output with the lowest SQNR (NaN is lowest), or "" if there are no outputs."""
    return min(sqnr_db, key=lambda name: -inf if isnan(sqnr_db[name]) else sqnr_db[name], default="")


def cosine(x: ArrayLike, y: ArrayLike) -> float:
    """Return the cosine similarity of x and y; 1 if both are all zeros, 0 if only one is all zeros.

    >>> round(cosine([1.0, 1.0], [2.0, 2.0]), 6)
    1.0
    """
    a, b = _pair(x, y)
    first, second = _to_one(largest_error("value", a, a)), _to_one(largest_error("value", b, b))
    length = sqrt(error_sum("square", a, a, first)) * sqrt(error_sum("square", b, b, second))
    if length:
        return error_sum("product", a, b, first, second) / length
    return 1.0 if not a.any() and not b.any() else 0.0


def clip_fraction(x: ArrayLike, params: QuantParams) -> float:
    """Return the share of elements whose code is clamped; NaN counts as clamped.

    >>> import detent as dt, numpy as np
    >>> clip_fraction(np.array([1.0, 127.4, 128.0, 900.0], np.float32), dt.QuantParams.int8_symmetric())
    0.5
    """
    data = float_array(x)
    check_is_params(params)
    plan = Plan.select("fake_quantize_backward", shape=data.shape, dtype=data.dtype, spec=params.spec, ste="clipped")
    ones = np.ones_like(data)
    plan.check(ones, data, params)
    passed = np.count_nonzero(plan.run(ones, data, params))
    return (data.size - int(passed)) / max(data.size, 1)


def code_usage(q: QuantizedTensor) -> float:
    """Return the share of the spec's codes that occur in q.

    >>> import detent as dt, numpy as np
    >>> code_usage(dt.quantize(np.arange(-7.0, 8.0), dt.QuantParams.int4_symmetric()))
    1.0
    """
    return _histogram(q).size / q.spec.num_levels


def entropy_bits(q: QuantizedTensor) -> float:
    """Return the entropy of the codes in bits per element: the lower bound for any entropy coder.

    >>> import detent as dt, numpy as np
    >>> entropy_bits(dt.quantize(np.array([0.0, 1.0, 2.0, 3.0]), dt.QuantParams.int4_symmetric()))
    2.0
    """
    counts = _histogram(q)
    share = counts / max(int(counts.sum()), 1)
    return tree_sum(-share * np.log2(share)) + 0.0


def _histogram(q: QuantizedTensor) -> NDArray[np.int64]:
    """Return the number of occurrences of each code in q; codes of NaN and infinities are not counted."""
    if not isinstance(q, QuantizedTensor):
        raise DtypeError(f"got {type(q).__name__}, expected a QuantizedTensor: make one with dt.quantize")
    if q.spec.format.kind != "float":
        return np.unique(q.codes, return_counts=True)[1].astype(np.int64)
    codes, counts = np.unique(q.codes.view(np.uint8), return_counts=True)
    finite: NDArray[np.int64] = counts[np.isfinite(np.asarray(q.spec.format.levels)[codes])]
    return finite


def _pair(x: ArrayLike, y: ArrayLike) -> tuple[Array, Array]:
    a, b = float_array(x, "x"), float_array(y, "y")
    if a.shape != b.shape:
        raise ShapeError(
            f"got x of shape {a.shape} and y of shape {b.shape}, expected equal shapes: pass arrays of equal shape"
        )
    return a, b


def _to_one(largest: float) -> tuple[float, float]:
    """Return the power of two that scales the largest magnitude to about 1, so squares do not over- or underflow."""
    return power_of_two(-frexp(largest)[1] if 0.0 < largest < inf else 0)
