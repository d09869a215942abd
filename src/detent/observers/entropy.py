"""Entropy: the range whose quantized distribution says most about the data's (Kullback-Leibler divergence).

The histogram is spread over 2048 even bins. For every window of them around zero, p is what falls into the window, with
the mass outside added to its end bins, and q is p without that, quantized: merged into as many parts as the spec has
codes and spread again over the bins of each part that are not empty. The window with the least ``KL(p || q)`` is the
range. Running sums of counts and of ``c log c`` give all windows at once.

A window holds at least nine tenths of the mass. Zeros are left out: they are quantized without an error, and as the
spike that they are after a ReLU they would count as spread over a part. Windows of symmetric specs are symmetric, those
of affine ones have the data's own proportions.
"""

import numpy as np
from numpy.typing import NDArray

from detent.observers.histogram import Bins, SearchObserver
from detent.spec import QuantSpec

__all__ = ["Entropy", "least_divergence"]

Float64 = NDArray[np.float64]
BINS = 2048
NOTHING = 1e-4  # the mass that q has where p has mass and q has none
TINY = 2.0**-126  # what the bins around zero end at
MOST = 0.9  # the least share of the mass in a window
NOISE = 1e-9  # a share of the mass that is not told from nothing


class Entropy(SearchObserver):
    """The range of each set with the least divergence between the data and what quantization makes of them.

    >>> import detent as dt, numpy as np
    >>> x = np.random.default_rng(0).normal(size=100_000).astype(np.float32)
    >>> found = dt.observers.Entropy().observe(x).range("int8")
    >>> bool(2.5 < found.hi < 4.5)
    True
    """

    def _search(self, spec: QuantSpec, bins: Bins) -> tuple[Float64, Float64]:
        ends = np.array([_best_range(spec, _one(bins, i)) for i in range(len(bins.lo))])
        return ends[:, 0], ends[:, 1]


def _one(bins: Bins, i: int) -> Bins:
    """What one set holds, without zeros."""
    full = (bins.mass[i] > 0) & (np.maximum(np.abs(bins.lower), np.abs(bins.upper)) > TINY)
    return Bins(bins.lower[full], bins.upper[full], bins.mass[i][full], bins.lo[i], bins.hi[i])


def _best_range(spec: QuantSpec, bins: Bins) -> tuple[float, float]:
    lo, hi = float(bins.lo), float(bins.hi)
    below, above = min(lo, 0.0), max(hi, 0.0)
    codes = spec.num_levels
    if spec.symmetric:
        if below and above:
            below, above = -max(-below, above), max(-below, above)
        else:
            codes = (codes + 1) // 2  # the other half of them has nothing to do
    if not bins.mass.size:
        return lo, hi
    zero = min(max(round(BINS * -below / (above - below)), int(below < 0)), BINS - int(above > 0))
    largest = max(-below, above)
    left, right = np.linspace(below / largest, 0, zero + 1), np.linspace(0, above / largest, BINS - zero + 1)
    lower, upper = np.maximum(bins.lower, lo) / largest, np.minimum(bins.upper, hi) / largest
    share = least_divergence(_spread(lower, upper, bins.mass, np.concatenate((left[:-1], right))), codes, zero)
    return min(max(lo, share * below), hi), max(min(hi, share * above), lo)


def _spread(lower: Float64, upper: Float64, mass: Float64, edges: Float64) -> Float64:
    """The mass in even bins."""
    after = np.cumsum(mass)
    points = np.stack((lower, np.maximum(upper, np.nextafter(lower, np.inf))), axis=1).ravel()
    sums = np.stack((after - mass, after), axis=1).ravel()
    at = np.interp(edges, points, sums)
    at[-1] = after[-1]  # a point at the very end
    even = np.diff(at)
    return np.where(even < NOISE * after[-1], 0.0, even)


def least_divergence(counts: Float64, codes: int, zero: int | None = None) -> float:
    """The part of the bins on either side of zero whose divergence is least."""
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
    # What lies outside fills an end bin that may have been empty.
    held[:, 0] += (counts[first] == 0) & (low_mass > 0)
    held[:, -1] += (counts[last - 1] == 0) & (high_mass > 0)
    with np.errstate(all="ignore"):
        q = np.where(parts > 0, parts / held, NOTHING)
        log_q = np.log(q)
        p_log_q = (parts * log_q).sum(axis=1) + low_mass * log_q[:, 0] + high_mass * log_q[:, -1]
        p_log_p = log_sums[last] - log_sums[first]
        for end, outside in ((first, low_mass), (last - 1, high_mass)):
            whole = counts[end] + outside
            p_log_p += np.where(whole > 0, whole * np.log(whole), 0.0) - logs[end]
        divergence = (p_log_p - p_log_q) / total + np.log(inside / total)
    # A window that holds next to nothing resembles itself; one that holds most of the mass is asked for.
    best = int(np.argmin(np.where(np.isfinite(divergence) & (inside >= MOST * total), divergence, np.inf)))
    return float(shares[best])
