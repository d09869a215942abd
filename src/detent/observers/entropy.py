"""Entropy: the range for which quantization changes the distribution of the data least, by Kullback-Leibler divergence.

The histogram is resampled to 2048 equal bins. Each window of bins around zero is a candidate range, for which two
distributions are compared. Distribution p is the mass inside the window; the mass outside is added to the first and
last bin. Distribution q is the quantized mass inside the window. The mass is merged into as many parts as the spec has
codes. Then the mass of each part is spread evenly over the part's non-empty bins. The result is the window with the
least ``KL(p || q)``. Cumulative sums of counts ``c`` and of ``c log c`` give the divergence of all windows at once.

A window must contain at least nine tenths of the mass. Zeros are left out, because quantization does not change zeros.
Otherwise, q would spread the many zeros after a ReLU over a whole part. For symmetric specs, windows are symmetric. For
affine specs, windows have the same ratio of lower to upper bound as the data.
"""

import numpy as np
from numpy.typing import NDArray

from detent.observers.histogram import Bins, SearchObserver
from detent.spec import QuantSpec

__all__ = ["Entropy"]

Float64 = NDArray[np.float64]
BINS = 2048
EMPTY_BIN_MASS = 1e-4  # mass of an empty bin of q, which keeps KL finite
ZERO_BIN_END = 2.0**-126  # smallest normal float32; smaller magnitudes count as zeros
MIN_WINDOW_MASS = 0.9  # minimum share of the mass in a window; with less, any window has a small KL
NEGLIGIBLE_MASS = 1e-9  # a bin with a smaller share of the mass counts as empty


class Entropy(SearchObserver):
    """Range with the least divergence between the distributions before and after quantization.

    >>> import detent as dt, numpy as np
    >>> x = np.random.default_rng(0).normal(size=100_000).astype(np.float32)
    >>> bool(2.5 < dt.observers.Entropy().observe(x).range("int8").hi < 4.5)
    True
    """

    def _search(self, spec: QuantSpec, bins: Bins) -> tuple[Float64, Float64]:
        bounds = np.array([_best_range(spec, _one(bins, i)) for i in range(len(bins.lo))])
        return bounds[:, 0], bounds[:, 1]


def _one(bins: Bins, i: int) -> Bins:
    """Return the histogram of one parameter set, without zeros."""
    full = (bins.mass[i] > 0) & (np.maximum(np.abs(bins.lower), np.abs(bins.upper)) > ZERO_BIN_END)
    return Bins(bins.lower[full], bins.upper[full], bins.mass[i][full], bins.lo[i], bins.hi[i])


def _best_range(spec: QuantSpec, bins: Bins) -> tuple[float, float]:
    lo, hi = float(bins.lo), float(bins.hi)
    below, above = min(lo, 0.0), max(hi, 0.0)
    codes = spec.num_levels
    if spec.symmetric:
        if below and above:
            below, above = -max(-below, above), max(-below, above)
        else:
            codes = (codes + 1) // 2  # with a symmetric spec, data of one sign use only half of the codes
    if not bins.mass.size:
        return lo, hi
    zero = min(max(round(BINS * -below / (above - below)), int(below < 0)), BINS - int(above > 0))
    largest = max(-below, above)
    left, right = np.linspace(below / largest, 0, zero + 1), np.linspace(0, above / largest, BINS - zero + 1)
    lower, upper = np.maximum(bins.lower, lo) / largest, np.minimum(bins.upper, hi) / largest
    share = least_divergence(_spread(lower, upper, bins.mass, np.concatenate((left[:-1], right))), codes, zero)
    return min(max(lo, share * below), hi), max(min(hi, share * above), lo)


def _spread(lower: Float64, upper: Float64, mass: Float64, edges: Float64) -> Float64:
    """Resample the histogram to equal bins."""
    after = np.cumsum(mass)
    points = np.stack((lower, np.maximum(upper, np.nextafter(lower, np.inf))), axis=1).ravel()
    sums = np.stack((after - mass, after), axis=1).ravel()
    at = np.interp(edges, points, sums)
    at[-1] = after[-1]  # include a bin of width zero at the upper end
    even = np.diff(at)
    return np.where(even < NEGLIGIBLE_MASS * after[-1], 0.0, even)


def least_divergence(counts: Float64, codes: int, zero: int | None = None) -> float:
    """Find the window with the least divergence; return its share of the bins, which is the same on each side of zero.

    ``zero`` is the number of bins below zero; None means half of all bins.
    """
    bins = counts.size
    left = bins // 2 if zero is None else zero
    right = bins - left
    shares = np.arange(1, max(left, right) + 1) / max(left, right)
    first, last = left - np.rint(left * shares).astype(int), left + np.rint(right * shares).astype(int)
    wide = last - first >= codes
    if not wide.any():
        return 1.0
    shares, first, last = shares[wide], first[wide], last[wide]
    size = last - first
    mass = np.concatenate(([0.0], np.cumsum(counts)))
    with np.errstate(all="ignore"):
        logs = np.where(counts > 0, counts * np.log(counts), 0.0)
    log_sums = np.concatenate(([0.0], np.cumsum(logs)))
    filled = np.concatenate(([0], np.cumsum(counts > 0)))
    total, inside = mass[-1], mass[last] - mass[first]
    low_mass, high_mass = mass[first], total - mass[last]

    cuts = first[:, None] + np.arange(codes + 1) * size[:, None] // codes
    parts = np.diff(mass[cuts], axis=1)
    held = np.diff(filled[cuts], axis=1).astype(np.float64)
    # The mass outside the window is added to the first or last bin, which may have been empty.
    held[:, 0] += (counts[first] == 0) & (low_mass > 0)
    held[:, -1] += (counts[last - 1] == 0) & (high_mass > 0)
    with np.errstate(all="ignore"):
        q = np.where(parts > 0, parts / held, EMPTY_BIN_MASS)
        log_q = np.log(q)
        p_log_q = (parts * log_q).sum(axis=1) + low_mass * log_q[:, 0] + high_mass * log_q[:, -1]
        p_log_p = log_sums[last] - log_sums[first]
        for end, outside in ((first, low_mass), (last - 1, high_mass)):
            whole = counts[end] + outside
            p_log_p += np.where(whole > 0, whole * np.log(whole), 0.0) - logs[end]
        divergence = (p_log_p - p_log_q) / total + np.log(inside / total)
    # With little mass inside the window, p and q are always close, so only windows with most of the mass are valid.
    valid = np.isfinite(divergence) & (inside >= MIN_WINDOW_MASS * total)
    return float(shares[int(np.argmin(np.where(valid, divergence, np.inf)))])
