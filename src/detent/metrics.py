"""Metrics: quantization error, and how many of the codes are used.

Sums have a fixed accumulation order in float64 (docs/numerics.md, section 5), so a metric is equal on every machine.
Empty data have no error: sums are 0, ``sqnr_db`` is infinite. ``SignalNoise`` and ``OutputComparison`` sum over batches
in the order in which the batches are added.
"""

from collections.abc import Mapping, Sequence
from math import frexp, inf, isinf, isnan, log10, nan, sqrt
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from detent.checks import float_array
from detent.errors import DtypeError, ShapeError
from detent.kernels import error_sum, largest_error, power_of_two, tree_sum
from detent.params import QuantParams
from detent.plan import Plan, check_is_params
from detent.tensor import QuantizedTensor

__all__ = ["clip_fraction", "code_usage", "cosine", "entropy_bits", "mae", "max_error", "mse", "sqnr_db"]

Array = NDArray[Any]
MAX_CLASSES = 10_000  # an output with more columns is not treated as class scores


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

    It is inf if there is no noise, and -inf if there is no signal or the noise is infinite. It is NaN if x or y
    contains NaN, or if signal and noise are both infinite.

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
    """Comparison of two models' outputs: SQNR of each float output, and top-1 agreement of the first output."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names = list(names)
        self._powers: dict[str, SignalNoise] = {}
        self._agreeing = self._samples = 0
        self.notes: dict[str, None] = {}

    def add(self, expected: Sequence[Array], got: Sequence[Array]) -> None:
        """Add a batch; outputs that are not float arrays, or whose shapes differ, are not compared."""
        for i, (name, x, y) in enumerate(zip(self._names, expected, got, strict=True)):
            if not all(isinstance(each, np.ndarray) and each.dtype.kind == "f" for each in (x, y)):
                continue  # for example a sequence of tensors
            if x.shape != y.shape:
                self.notes[f"output {name!r} has shape {y.shape}, but {x.shape} in the source: not compared"] = None
                continue
            self._powers.setdefault(name, SignalNoise()).add(x.astype(np.float32), y.astype(np.float32))
            if i == 0 and x.ndim == 2 and 2 <= x.shape[1] <= MAX_CLASSES:
                self._samples += len(x)
                self._agreeing += int(np.count_nonzero(np.argmax(x, axis=1) == np.argmax(y, axis=1)))

    @property
    def sqnr_db(self) -> dict[str, float]:
        return {name: powers.sqnr_db for name, powers in self._powers.items()}

    @property
    def agreement(self) -> float | None:
        """The top-1 agreement as a share of samples; None if the first output has no class scores."""
        return self._agreeing / self._samples if self._samples else None


def worst_output(sqnr_db: Mapping[str, float]) -> str:
    """Return the name of the output with the lowest SQNR (NaN is lowest); "" if there are no outputs."""
    return min(sqnr_db, key=lambda name: -inf if isnan(sqnr_db[name]) else sqnr_db[name], default="")


def cosine(x: ArrayLike, y: ArrayLike) -> float:
    """Return the cosine similarity of x and y; 1 if both are all zeros, 0 if only one of them is.

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
    """Return the counts of all codes that occur in q, in the order of their bits, without NaN and infinities."""
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
        raise ShapeError(f"got x of shape {a.shape} and y of shape {b.shape}, expected equal shapes")
    return a, b


def _to_one(largest: float) -> tuple[float, float]:
    """Return the power of two that scales the largest magnitude to about 1, so squares do not over- or underflow."""
    return power_of_two(-frexp(largest)[1] if 0.0 < largest < inf else 0)
