"""Scale search: for each parameter set, find the scale and zero point with the least squared quantization error.

A candidate is measured with the scale as it is stored: ``error = sum((x - y)^2)``, with the quantized values y in the
compute type. Position p is the scale ``start * 2^(-p/1024)``, rounded to the scale's dtype. Position 0 is the min-max
scale.

For fixed codes, the error is a parabola in the scale. Let v be the values that the codes of a candidate represent at
scale 1::

    fitted   = sum(x v) / sum(v v)                                 the lowest point of the parabola
    estimate = error - (s sum(v v) - sum(x v))^2 / sum(v v)        the error at this point

A fitted scale counts only if it lies between the smallest allowed scale and the min-max scale; otherwise the estimate
is the measured error. The search has four steps:

1. The descent measures every 64th position, down to scales of about ``start / 2^20``. It ends where the clipping error
   alone exceeds the least error, because every smaller scale clips more. An affine spec tries up to 9 zero points per
   scale, evenly spaced over an interval. The interval spans three zero points: the zero point of the min-max range, the
   zero point that maps the largest value to the last code, and the zero point that maps the smallest value to the first
   code.
2. The first round measures at distance 16 and 32 from the positions of the 4 lowest estimates. The second round
   measures at distance 4 and 8 from the positions of the 4 lowest estimates so far. In sets of more than 128 values, a
   third round measures at distance 1 and 2.
3. For an affine spec, the fitted scale of the lowest estimate is measured with other zero points, at distances that
   halve down to 1.
4. The fitted scale of the lowest estimate is measured, up to three times: each measurement may give a lower estimate.

If errors are equal, the first candidate wins. The first candidate has the min-max parameters, so the result is never
worse than them. Scales that are powers of two need only step 1, with one position per octave. Every sum has 8 partial
sums, which are added up by halves: term i belongs to partial sum ``i % 8``.
"""

from collections.abc import Callable, Iterator
from itertools import accumulate, repeat
from math import sqrt
from operator import mul
from typing import Any

import numpy as np
from array_api_compat import numpy
from numpy.typing import NDArray

from detent.checks import compute_dtype
from detent.granularity import Tiling
from detent.kernels.reference.elements import code_values
from detent.kernels.reference.sets import counts
from detent.spec import QuantSpec

__all__ = ["COARSE", "FACTORS", "PER_OCTAVE", "best_scales"]

Array = NDArray[Any]
Pair = tuple[Array, Array]
Float64 = NDArray[np.float64]
Indices = NDArray[np.intp]
PER_OCTAVE, OCTAVES, COARSE = 1024, 20, 64  # positions per octave; octaves; distance of positions in the descent
CENTERS, ZERO_POINTS, FITS, LANES = 4, 9, 3, 8
OFFSETS = ((-32, -16, 16, 32), (-8, -4, 4, 8), (-2, -1, 1, 2))  # per round: distances from the lowest estimates
FEW_VALUES = 128  # with so few values in a set, the last round rarely changes a code
BLOCK = 1 << 16  # elements at a time, which bounds the memory; a multiple of LANES


def _factors() -> Float64:
    """Return the scale of every position relative to position 0; all math libraries give the same bits."""
    ratio = 0.5
    for _ in range(10):  # 2^(-1/1024)
        ratio = sqrt(ratio)
    octave = tuple(accumulate(repeat(ratio, PER_OCTAVE - 1), mul, initial=1.0))
    return np.array([factor * 2.0**-each for each in range(OCTAVES) for factor in octave])


FACTORS = _factors()


@np.errstate(all="ignore")
def best_scales(
    x: Array, tiling: Tiling, spec: QuantSpec, bounds: Pair, start: Pair, least: float
) -> tuple[Array, Array, Float64]:
    """Search for each parameter set's scale and zero point with the least squared error; return both and the error.

    ``bounds`` are the smallest and the largest value of each set. ``start`` are the min-max scale and zero point of
    each set. All four arrays have the scale's shape and the compute type of x. No scale is below ``least``.
    """
    best_scale, best_zero, errors = start[0].copy(), start[1].copy(), np.zeros(start[0].shape)
    for sets, rows in _rows(x, tiling):
        lo, hi, scale, zero = (each.reshape(-1)[sets].astype(np.float64) for each in (*bounds, *start))
        search = _Search(spec, rows.astype(compute_dtype(x.dtype)), (lo, hi), (scale, zero), least)
        search.run()
        best_scale.reshape(-1)[sets] = search.scale
        best_zero.reshape(-1)[sets] = search.zero
        errors.reshape(-1)[sets] = search.error
    return best_scale, best_zero, errors


def _rows(x: Array, tiling: Tiling) -> Iterator[tuple[Indices, Array]]:
    """Yield the indices of some parameter sets of equal size, and their elements as an array with one row per set."""
    numbers = np.broadcast_to(tiling.spread(np.arange(tiling.sets)), tiling.shape).reshape(-1)
    order, sizes, flat = np.argsort(numbers, kind="stable"), np.array(counts(tiling)), x.reshape(-1)
    starts = np.cumsum(sizes) - sizes
    for size in np.unique(sizes):
        sets = np.flatnonzero(sizes == size)
        for part in np.array_split(sets, -(-sets.size * int(size) // BLOCK)):
            if part.size:
                yield part, flat[order[starts[part][:, None] + np.arange(size)]]


class _Search:
    """Search for the scales of parameter sets of equal size; a row of x has the elements of one set."""

    def __init__(self, spec: QuantSpec, x: Array, bounds: Pair, start: Pair, least: float) -> None:
        self.spec, self.x, self.least = spec, x, least
        (self.lo, self.hi), (self.start, self.start_zero) = bounds, start
        self.low, self.high = float(spec.qmin), float(spec.qmax)
        none, grid = np.full(len(x), np.inf), (len(x), CENTERS)
        self.error, self.scale, self.zero = none, start[0].copy(), start[1].copy()
        # For each set, guide has the lowest estimate with its scale, zero point and position; centers has the 4 lowest
        # estimates with their zero points and positions.
        self.guide: tuple[Array, ...] = (none.copy(), start[0].copy(), start[1].copy(), np.zeros(len(x), np.int64))
        self.centers: tuple[Array, ...] = (np.full(grid, np.inf), np.zeros(grid), np.zeros(grid, np.int64))

    def run(self) -> None:
        exponents_only = self.spec.scale_format == "e8m0"
        self._descend(PER_OCTAVE if exponents_only else COARSE)
        rest = np.flatnonzero(self.error > 0)
        if rest.size and not exponents_only:
            self._refine(rest)

    def _descend(self, coarse: int) -> None:
        sets = np.arange(len(self.x))
        for position in range(0, FACTORS.size, coarse):
            positions = np.full(sets.size, position)
            scale = self._scale_at(sets, positions)
            if position == 0 or self.spec.symmetric:
                self._consider(sets, scale, self.start_zero[sets], positions)
            for part, zero in () if self.spec.symmetric else self._zero_points(sets, scale):
                self._consider(sets[part], scale[part], zero, positions[part])
            ended = (self.error[sets] == 0) | (scale <= self.least) | (self._bound(sets, scale) > self.error[sets])
            sets = sets[~ended]
            if not sets.size:
                return

    def _zero_points(self, sets: Indices, scale: Float64) -> Iterator[tuple[Indices, Float64]]:
        """Yield 9 pairs: indices into ``sets``, which may be empty, and a zero point to try for each of these sets."""
        start = self.start_zero[sets]
        at_high = np.clip(np.rint(self.high - self.hi[sets] / scale), self.low, self.high)
        at_low = np.clip(np.rint(self.low - self.lo[sets] / scale), self.low, self.high)
        first, last = np.minimum(np.minimum(at_high, at_low), start), np.maximum(np.maximum(at_high, at_low), start)
        few = last - first < ZERO_POINTS
        for i in range(ZERO_POINTS):
            zero = np.where(few, first + i, np.rint(first + (last - first) * i / (ZERO_POINTS - 1)))
            part = np.flatnonzero(~few | (zero <= last))
            yield part, zero[part]

    def _bound(self, sets: Indices, scale: Float64) -> Float64:
        """Return the error of clipping alone, a lower bound of the error of every smaller scale.

        The range of an affine spec includes zero, so its bounds are at most ``steps * scale`` from zero.
        """
        steps, start = self.high - self.low, self.start_zero[sets]
        farthest = np.maximum(np.abs(self.low - start), np.abs(self.high - start))
        reach = ((farthest if self.spec.symmetric else steps) * scale)[:, None]

        def squares(columns: slice) -> tuple[Float64, ...]:
            clipped = np.maximum(np.abs(self.x[sets, columns].astype(np.float64)) - reach, 0.0)
            return (clipped * clipped,)

        (clipped,) = self._sums(squares)
        excess = np.maximum(self.hi[sets] - self.lo[sets] - steps * scale, 0.0)
        return clipped if self.spec.symmetric else np.maximum(clipped, excess * excess * 0.5)

    def _refine(self, sets: Indices) -> None:
        for offsets in OFFSETS if self.x.shape[1] > FEW_VALUES else OFFSETS[:-1]:
            estimates, zeros, positions = (each.copy() for each in self.centers)
            for i in range(CENTERS):
                for offset in offsets:
                    position = positions[:, i] + offset
                    inside = (estimates[:, i] < np.inf) & (position >= 0) & (position < FACTORS.size)
                    some = sets[inside[sets]]
                    self._consider(some, self._scale_at(some, position[some]), zeros[some, i], position[some])
        step = 0 if self.spec.symmetric else 1
        while step and step * 32 <= self.high - self.low:
            step *= 2
        while step:
            scale, zero, position = (each[sets] for each in self.guide[1:])
            for moved in (zero - step, zero + step):
                self._take(sets, self._stored(scale), np.clip(moved, self.low, self.high), position)
            step //= 2
        for _ in range(FITS):
            scale, zero, position = (each[sets] for each in self.guide[1:])
            self._take(sets, self._stored(scale), zero, position)

    def _consider(self, sets: Indices, scale: Float64, zero: Float64, position: NDArray[np.int64]) -> None:
        """Measure one candidate per set; add it to ``centers`` if it is new and its estimate is among the lowest."""
        estimate = self._take(sets, scale, zero, position)
        estimates, zeros, positions = (each[sets] for each in self.centers)
        repeated = (estimates < np.inf) & (zeros == zero[:, None]) & (positions == position[:, None])
        added = np.where(repeated.any(axis=1), np.inf, estimate), zero, position
        order = np.argsort(np.concatenate((estimates, added[0][:, None]), 1), axis=1, kind="stable")[:, :CENTERS]
        for center, old, new in zip(self.centers, (estimates, zeros, positions), added, strict=True):
            center[sets] = np.take_along_axis(np.concatenate((old, new[:, None]), 1), order, axis=1)

    def _take(self, sets: Indices, scale: Float64, zero: Float64, position: NDArray[np.int64]) -> Float64:
        """Measure one candidate per set, update the best parameters and ``guide``, and return the estimates."""
        error, product, power = self._measure(sets, scale, zero)
        fitted, slope = product / power, scale * power - product
        usable = (fitted >= self.least) & (fitted <= self.start[sets])
        estimate = np.where(usable, error - slope * slope / power, error)
        better = error < self.error[sets]
        for best, each in ((self.error, error), (self.scale, scale), (self.zero, zero)):
            best[sets[better]] = each[better]
        better = estimate < self.guide[0][sets]
        values = estimate, np.where(usable, fitted, scale), zero, position
        for best, each in zip(self.guide, values, strict=True):
            best[sets[better]] = each[better]
        return estimate

    def _measure(self, sets: Indices, scale: Float64, zero: Float64) -> list[Float64]:
        """Return the sums of ``(x - y)^2``, ``x v`` and ``v v`` for one candidate per set."""
        s, z = (each.astype(self.x.dtype)[:, None] for each in (scale, zero))

        def terms(columns: slice) -> tuple[Float64, ...]:
            x = self.x[sets, columns]
            value = code_values(numpy, self.spec, x, s, z, 0)
            wide, v = x.astype(np.float64), value.astype(np.float64)
            distance = wide - (value * s).astype(np.float64)
            return distance * distance, wide * v, v * v

        return self._sums(terms)

    def _sums(self, terms: Callable[[slice], tuple[Float64, ...]]) -> list[Float64]:
        """Sum terms over the columns of x, in the order of the native kernel."""
        lanes: list[Float64] = []
        for start in range(0, self.x.shape[1], BLOCK):
            parts = [_by_lane(each) for each in terms(slice(start, start + BLOCK))]
            lanes = lanes or [np.zeros((len(each), LANES)) for each in parts]
            pairs = zip(lanes, parts, strict=True)
            lanes = [np.add.accumulate(np.concatenate((lane[:, None], part), 1), axis=1)[:, -1] for lane, part in pairs]
        return [_by_halves(each) for each in lanes]

    def _scale_at(self, sets: Indices, position: NDArray[np.int64]) -> Float64:
        return np.maximum(self._stored(self.start[sets] * FACTORS[position]), self.least)

    def _stored(self, scale: Float64) -> Float64:
        return scale.astype(self.x.dtype).astype(np.float64)


def _by_lane(terms: Float64) -> Float64:
    sets, columns = terms.shape
    padded = np.concatenate((terms, np.zeros((sets, -columns % LANES))), 1) if columns % LANES else terms
    return padded.reshape(sets, padded.shape[1] // LANES, LANES)


def _by_halves(lanes: Float64) -> Float64:
    while lanes.shape[1] > 1:
        half = lanes.shape[1] // 2
        lanes = lanes[:, :half] + lanes[:, half:]
    return lanes[:, 0]
