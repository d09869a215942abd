"""Percentile: the range between two percentiles of the data."""

import numpy as np
from numpy.typing import NDArray

from detent.checks import as_number
from detent.errors import RangeError
from detent.granularity import Granularity, PerTensor
from detent.observers.histogram import BinnedObserver, Bins
from detent.observers.observer import Observer, Range, exclusive

__all__ = ["Percentile"]

WHOLE = 100.0


class Percentile(BinnedObserver):
    """Range from the ``lower`` to the ``upper`` percentile of each parameter set.

    The result differs from ``numpy.percentile`` by at most the width of a bin. With weights, the p-th percentile is the
    value with p percent of the weight below it.

    Attributes:
        lower: percentile of the lower bound, from 0 to 100.
        upper: percentile of the upper bound, from 0 to 100.

    >>> import detent as dt, numpy as np
    >>> lo, hi = dt.observers.Percentile(1, 99).observe(np.linspace(-1, 1, 100_001)).range()
    >>> lo.round(3), hi.round(3)
    (np.float64(-0.98), np.float64(0.98))
    """

    def __init__(
        self, lower: float = 0.1, upper: float = 99.9, granularity: Granularity | str = PerTensor(), precision: int = 5
    ) -> None:
        self.lower, self.upper = as_number("lower", lower), as_number("upper", upper)
        if not 0 <= self.lower < self.upper <= WHOLE:
            raise RangeError(f"got percentiles {lower!r} and {upper!r}, expected 0 <= lower < upper <= 100")
        super().__init__(granularity, precision)

    @exclusive
    def range(self) -> Range:
        """Return both percentiles of each parameter set.

        Raises:
            NotCalibratedError: nothing was observed, or some parameter set has no finite value.
        """
        bins, shape = self.bins(), Observer.range(self).lo.shape
        find = _weighted_percentiles if self.weighted else _percentiles
        return Range(*(find(bins, percent).reshape(shape) for percent in (self.lower, self.upper)))

    def _settings(self) -> dict[str, object]:
        return {"lower": self.lower, "upper": self.upper, **super()._settings()}


def _percentiles(bins: Bins, percent: float) -> NDArray[np.float64]:
    """Interpolate between the two elements next to the percentile's rank, as ``numpy.percentile`` does."""
    total = bins.mass.sum(axis=1)
    rank = percent / WHOLE * np.maximum(total - 1, 0)
    below = np.floor(rank)
    first, second = _elements(bins, below, total), _elements(bins, below + 1, total)
    part = rank - below
    # Rounding errors must not move a percentile out of the observed range.
    return np.clip(np.where(part > 0, first * (1 - part) + second * part, first), bins.lo, bins.hi)


def _weighted_percentiles(bins: Bins, percent: float) -> NDArray[np.float64]:
    """Return, for each parameter set, the value that has ``percent`` percent of the weight below it."""
    values = np.empty(len(bins.mass))
    for i, mass in enumerate(bins.mass):
        after = np.cumsum(mass)
        target = percent / WHOLE * after[-1]
        bin_index = min(int(np.searchsorted(after, target, side="left")), len(mass) - 1)
        inside = (target - (after[bin_index] - mass[bin_index])) / mass[bin_index] if mass[bin_index] else 0.0
        values[i] = _inside_bin(bins, i, bin_index, min(max(inside, 0.0), 1.0))
    return np.clip(values, bins.lo, bins.hi)


def _elements(bins: Bins, rank: NDArray[np.float64], total: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the element at a rank in each parameter set; elements are treated as evenly spread over their bin."""
    values = np.empty(len(bins.mass))
    for i, mass in enumerate(bins.mass):
        after = np.cumsum(mass)
        bin_index = min(int(np.searchsorted(after, min(rank[i], total[i] - 1), side="right")), len(mass) - 1)
        inside = max(rank[i] - (after[bin_index] - mass[bin_index]) + 0.5, 0.0) / max(mass[bin_index], 1e-300)
        values[i] = _inside_bin(bins, i, bin_index, min(inside, 1.0))
    values = np.where(rank <= 0, bins.lo, values)
    return np.where(rank >= total - 1, bins.hi, values)


def _inside_bin(bins: Bins, i: int, bin_index: int, fraction: float) -> float:
    """Return the value at a fraction of a bin's width; the outermost bins end at the bounds of parameter set ``i``."""
    low, high = max(bins.lower[bin_index], bins.lo[i]), min(bins.upper[bin_index], bins.hi[i])
    return float(low + (high - low) * fraction)
