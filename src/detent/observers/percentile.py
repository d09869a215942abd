"""Percentile: the range that holds all but the outermost parts of the data."""

import numpy as np
from numpy.typing import NDArray

from detent.checks import as_number
from detent.errors import RangeError
from detent.granularity import Granularity, PerTensor
from detent.observers.histogram import Bins, HistogramObserver
from detent.observers.observer import Observer, Range, exclusive

__all__ = ["Percentile"]

WHOLE = 100.0


class Percentile(HistogramObserver):
    """From the ``lower`` to the ``upper`` percentile of each set, as ``numpy.percentile`` has them, to within a bin.

    With weights, a percentile is the value that has that share of the weight below it.

    Attributes:
        lower, upper: in percent.

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
            raise RangeError(f"percentiles are 0 <= lower < upper <= 100, got {lower!r} and {upper!r}")
        super().__init__(granularity, precision)

    @exclusive
    def range(self) -> Range:
        """The percentiles of each set.

        Raises:
            NotCalibratedError: nothing observed, or a set without finite values.
        """
        bins, shape = self.bins(), Observer.range(self).lo.shape
        find = _weighted_percentiles if self.weighted else _percentiles
        return Range(*(find(bins, share).reshape(shape) for share in (self.lower, self.upper)))

    def _settings(self) -> dict[str, object]:
        return {"lower": self.lower, "upper": self.upper, **super()._settings()}

    def __repr__(self) -> str:
        return self._described(f"{self.lower}", f"{self.upper}")


def _percentiles(bins: Bins, share: float) -> NDArray[np.float64]:
    """The percentile of each set: between the two elements next to its rank, each at its place in its bin."""
    total = bins.mass.sum(axis=1)
    rank = share / WHOLE * np.maximum(total - 1, 0)
    below = np.floor(rank)
    first, second = _elements(bins, below, total), _elements(bins, below + 1, total)
    part = rank - below
    # Rounding must not leave the range.
    return np.clip(np.where(part > 0, first * (1 - part) + second * part, first), bins.lo, bins.hi)


def _weighted_percentiles(bins: Bins, share: float) -> NDArray[np.float64]:
    """The value of each set that has that share of the mass below it."""
    values = np.empty(len(bins.mass))
    for i, mass in enumerate(bins.mass):
        after = np.cumsum(mass)
        target = share / WHOLE * after[-1]
        place = min(int(np.searchsorted(after, target, side="left")), len(mass) - 1)
        inside = (target - (after[place] - mass[place])) / mass[place] if mass[place] else 0.0
        values[i] = _inside_bin(bins, i, place, min(max(inside, 0.0), 1.0))
    return np.clip(values, bins.lo, bins.hi)


def _elements(bins: Bins, rank: NDArray[np.float64], total: NDArray[np.float64]) -> NDArray[np.float64]:
    """The element of each set's rank; the elements of a bin are evenly distributed over it."""
    values = np.empty(len(bins.mass))
    for i, mass in enumerate(bins.mass):
        after = np.cumsum(mass)
        place = min(int(np.searchsorted(after, min(rank[i], total[i] - 1), side="right")), len(mass) - 1)
        inside = max(rank[i] - (after[place] - mass[place]) + 0.5, 0.0) / max(mass[place], 1e-300)
        values[i] = _inside_bin(bins, i, place, min(inside, 1.0))
    values = np.where(rank <= 0, bins.lo, values)
    return np.where(rank >= total - 1, bins.hi, values)


def _inside_bin(bins: Bins, i: int, place: int, share: float) -> float:
    """The value at that share of a bin, which is cut at the bounds of set ``i``."""
    low, high = max(bins.lower[place], bins.lo[i]), min(bins.upper[place], bins.hi[i])
    return float(low + (high - low) * share)
