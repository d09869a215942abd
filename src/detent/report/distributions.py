"""Distributions: histograms of data whose range is not known before all of it was seen.

Bins are ``[k w, (k + 1) w)`` for integers k and a width w that is a power of two. Where data need more bins than there
are, w doubles and pairs of bins become one: no count is lost, and the order of batches does not matter to the bins.
"""

from math import ceil, floor, frexp, isfinite
from typing import Any

import numpy as np
from numpy.typing import NDArray

from detent.report.parts import BINS, Histogram

__all__ = ["Distribution", "code_histogram", "short"]

Array = NDArray[Any]
FINE = 2048  # bins that are kept; what is shown has fewer, each made of whole ones
DIGITS = 6


def short(value: float) -> float:
    """A number with as many digits as a report shows at most.

    >>> short(1 / 3)
    0.333333
    """
    return float(f"{value:.{DIGITS}g}")


class Distribution:
    """Values, counted batch by batch.

    >>> seen = Distribution()
    >>> seen.add(np.float32([0.0, 1.0, 1.0, 3.0, np.nan]))
    >>> seen.add(np.float32([-4.0]))
    >>> seen.minimum, seen.maximum, seen.count, seen.not_finite
    (-4.0, 3.0, 5, 1)
    >>> sum(seen.histogram(8).counts)
    5
    """

    def __init__(self) -> None:
        self.minimum, self.maximum = np.inf, -np.inf
        self.count = self.not_finite = 0
        self._exponent: int | None = None
        self._first = 0
        self._counts = np.zeros(0, np.int64)

    def add(self, values: Array) -> None:
        """Count a batch; what is not finite is counted apart."""
        flat = np.asarray(values).ravel()
        finite = np.isfinite(flat)
        if not finite.all():
            self.not_finite += int(flat.size - np.count_nonzero(finite))
            flat = flat[finite]
        if not flat.size:
            return
        self.count += flat.size
        low, high = float(flat.min()), float(flat.max())
        self.minimum, self.maximum = min(self.minimum, low), max(self.maximum, high)
        self._widen()
        width = self._width()
        # Powers of two scale float32 without error, unless the quotient is subnormal, which belongs to bin 0 or -1.
        places = np.floor(flat.astype(np.float64) / width).astype(np.int64)
        first, last = floor(self.minimum / width), floor(self.maximum / width)
        counts = np.zeros(last - first + 1, np.int64)
        if self._counts.size:
            counts[self._first - first : self._first - first + self._counts.size] = self._counts
        counts += np.bincount(places - first, minlength=counts.size)
        self._first, self._counts = first, counts

    def _width(self) -> float:
        return float(2.0 ** (self._exponent or 0))

    def _widen(self) -> None:
        reach = max(self.maximum - self.minimum, abs(self.maximum) * 1e-6, abs(self.minimum) * 1e-6, 1e-30)
        needed = max(frexp(min(reach, 1e300) / (FINE - 2))[1], -100)
        if self._exponent is None:
            self._exponent = needed
        while self._exponent < needed:
            self._exponent += 1
            odd = self._first % 2
            padded = np.pad(self._counts, (odd, (self._counts.size + odd) % 2))
            self._counts = padded.reshape(-1, 2).sum(axis=1)
            self._first = (self._first - odd) // 2

    def histogram(self, bins: int = 48) -> Histogram | None:
        """At most so many bins; None where nothing was counted."""
        if not self._counts.size:
            return None
        per_bin = max(1, ceil(self._counts.size / bins))
        padded = np.pad(self._counts, (0, -self._counts.size % per_bin))
        counts = padded.reshape(-1, per_bin).sum(axis=1)
        width = self._width()
        low = self._first * width
        return Histogram(low, width * per_bin, tuple(counts.tolist())) if isfinite(low) else None


def code_histogram(counts: Array, low: float) -> Histogram | None:
    """Counts of codes, the first of which is ``low``, in at most 64 bins of whole codes.

    >>> code_histogram(np.array([1, 0, 2]), -1)
    Histogram(low=-1.5, width=1.0, counts=(1, 0, 2), of='codes')
    """
    if not counts.size:
        return None
    per_bin = max(1, ceil(counts.size / BINS))
    padded = np.pad(counts, (0, -counts.size % per_bin))
    merged = padded.reshape(-1, per_bin).sum(axis=1)
    return Histogram(low - 0.5, float(per_bin), tuple(merged.tolist()), "codes")
