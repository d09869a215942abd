"""Histograms whose bins are the leading bits of a float, and quantization errors computed on such histograms.

A bin is a sign, an exponent and the leading bits of a mantissa::

    key = sign | exponent (8 bits, as in float32) | mantissa (bits)          row = key >> bits

Exponent 0 contains zero and all magnitudes below the smallest normal float32, in bins of equal width. Exponent 255
contains infinities and NaN. A row consists of the 2^bits bins of one sign and exponent. The bins are the same for all
dtypes.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from detent.granularity import Tiling

__all__ = ["bin_edges", "grid_errors", "histogram"]

Array = NDArray[Any]
Float64 = NDArray[np.float64]
ROWS, NONFINITE, LANES = 512, 255, 8
NARROW = 2.0**-900  # a bin of at most this width is treated as a point, because its density could overflow float64
_BIAS, _SMALLEST = 127, -126


def find_keys(x: Array, bits: int) -> tuple[NDArray[np.int64], bool]:
    """Return the bin of each element, and whether all finite elements are in the range of float32."""
    wide = np.asarray(x, np.float64) + 0.0  # turns -0.0 into +0.0
    size = np.abs(wide)
    mantissa, exponent = np.frexp(size)  # size = mantissa * 2^exponent, mantissa in [0.5, 1)
    biased = exponent - 1 + _BIAS
    finite = np.isfinite(wide)
    tiny = size < np.ldexp(1.0, _SMALLEST)
    with np.errstate(invalid="ignore"):
        normal = (biased << bits) + np.floor(np.ldexp(mantissa * 2 - 1, bits)).astype(np.int64)
        low = np.floor(np.where(tiny, np.ldexp(size, bits - _SMALLEST), 0)).astype(np.int64)
    held = finite & (tiny | (biased < NONFINITE))
    key = np.where(held, np.where(tiny, low, normal), NONFINITE << bits)
    good = bool((held | ~finite).all())
    return key + (np.signbit(wide).astype(np.int64) << (8 + bits)), good


def histogram(
    x: Array, tiling: Tiling, bits: int, rows: NDArray[np.int16], weights: NDArray[np.int64] | None, counts: Array
) -> tuple[NDArray[np.uint8], bool]:
    """For each element, add 1 or the element's weight to ``counts[row, set, bin]``.

    A row is a sign and an exponent. A set is a parameter set: elements that share one scale. ``rows`` maps each row to
    the row's index in ``counts``, or to -1 if the row is not stored. Returns a mask of the rows that occur in ``x`` but
    are not stored, and whether all finite elements are in the range of float32. The mask leaves out exponent 255.
    """
    keys, good = find_keys(x, bits)
    sets = np.broadcast_to(tiling.spread(np.arange(counts.shape[1])), tiling.shape)
    row = rows[keys >> bits]
    has_row = row >= 0
    index = (row[has_row], sets[has_row], keys[has_row] & ((1 << bits) - 1))
    np.add.at(counts, index, 1 if weights is None else weights[has_row])
    missed = np.zeros(ROWS, np.uint8)
    missed[keys[~has_row] >> bits] = 1
    missed[[NONFINITE, NONFINITE + 256]] = 0
    return missed, good


def bin_edges(rows: NDArray[np.int64], bits: int) -> tuple[Float64, Float64]:
    """Return the lower and upper edges of the bins in each row, in the order of the bins' keys."""
    exponent = (rows % 256)[:, None]
    steps = np.arange(2**bits + 1) / 2**bits
    unit = np.ldexp(1.0, np.maximum(exponent - _BIAS, _SMALLEST))
    edges = unit * np.where(exponent > 0, 1 + steps, steps)
    inner, outer = edges[:, :-1], edges[:, 1:]
    negative = (rows >= ROWS // 2)[:, None]
    return np.where(negative, -outer, inner), np.where(negative, -inner, outer)


@np.errstate(all="ignore")  # divisions by subnormal widths and scales may overflow
def grid_errors(
    norm: float,
    code_range: tuple[float, float],
    levels: Float64,
    bins: tuple[Float64, ...],
    scale: Float64,
    zero: Float64,
) -> Float64:
    """Return the quantization error of each candidate: the sum over bins of the integral of ``|x - level|^norm``.

    ``bins`` are five arrays: lower and upper edges, the mass of each parameter set and bin, and the lower and upper
    bound of each parameter set. The bounds cut the outermost bins. ``scale`` and ``zero`` have a row of candidates for
    each parameter set. If ``levels`` is empty, the levels are the integers from ``code_range[0] - zero`` to
    ``code_range[1] - zero``.
    """
    lower, upper, mass, lo, hi = bins
    errors = np.empty(scale.shape)
    whole = whole_cells(levels, norm)
    for i in range(len(scale)):
        a, b, full = np.maximum(lower, lo[i]), np.minimum(upper, hi[i]), mass[i] > 0
        wide, point = full & (b - a > NARROW), full & (b - a <= NARROW)
        low, high, density = a[wide], b[wide], mass[i][wide] / (b - a)[wide]
        for j in range(scale.shape[1]):
            step, inverse = scale[i, j], 1.0 / scale[i, j]
            nearest = _nearest(code_range, levels, zero[i, j])
            parts = (_integral(t * inverse, nearest, whole, norm) for t in (high, low))
            error = _lane_sum(density * np.subtract(*parts)) * _raised(step, norm)
            for x, weight in zip(a[point], mass[i][point], strict=True):
                t = x * inverse
                distance = (t - nearest(t)[0]) * step
                error += weight * (distance * distance if norm == 2 else np.abs(distance) ** norm)
            errors[i, j] = error
    return errors


def _raised(step: float, norm: float) -> float:
    return step * step * step if norm == 2 else step * step if norm == 1 else step ** (norm + 1)


def _nearest(code_range: tuple[float, float], levels: Float64, zero: float) -> Any:
    """Make a function that returns the level nearest to t, and this level's index in ``levels`` (None for integers)."""
    if not levels.size:
        return lambda t: (np.clip(np.rint(t), code_range[0] - zero, code_range[1] - zero), None)
    middles = (levels[1:] + levels[:-1]) / 2

    def uneven(t: Any) -> tuple[Any, Any]:
        index = np.searchsorted(middles, t, side="left")
        return levels[index], index

    return uneven


def whole_cells(levels: Float64, norm: float) -> Float64:
    """Return the integral of the error from the first level to each level; empty if ``levels`` is empty."""
    halves = np.diff(levels) / 2
    return np.concatenate(([0.0], np.cumsum(2 * _beyond(halves, norm)))) if levels.size else levels


def _beyond(distance: Any, norm: float) -> Any:
    if norm == 2:
        return distance * distance * distance * (1.0 / 3.0)
    if norm == 1:
        return np.copysign(distance * distance * 0.5, distance)
    return np.copysign(np.abs(distance) ** (norm + 1) / (norm + 1), distance)


def _integral(t: Float64, nearest: Any, whole: Float64, norm: float) -> Any:
    level, index = nearest(t)
    if index is not None:
        return whole[index] + _beyond(t - level, norm)
    cell = 1.0 / 12.0 if norm == 2 else 0.25 if norm == 1 else 2 * 0.5 ** (norm + 1) / (norm + 1)
    return level * cell + _beyond(t - level, norm)


def _lane_sum(terms: Float64) -> float:
    """Sum in the native kernel's order: term i goes to partial sum i % 8, and the 8 sums are added by halves."""
    padded = np.concatenate((terms, np.zeros(-terms.size % LANES))).reshape(-1, LANES)
    sums = np.zeros(LANES)
    for row in padded:
        sums += row
    while sums.size > 1:
        sums = sums[: sums.size // 2] + sums[sums.size // 2 :]
    return float(sums[0])
