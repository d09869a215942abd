"""MSE: the range whose quantization error on a histogram of the data is least.

The error is that of the spec itself: its format, its convention's scale rule with the scale as it is stored, clipping
and rounding both, integrated over the bins. What is searched is the scale, and for affine specs the zero point too::

    1. a coarse look from the whole range downwards, and with it a bound: once clipping alone costs more than the best
       error so far, every smaller scale costs more still
    2. a fine look over what is left, 32 scales per octave, finer than the bins can tell apart
    3. the lowest valleys of that, twice more at an eighth of the distance

All sets at once, and the work does not depend on how many elements were observed.
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import product

import numpy as np
from numpy.typing import NDArray

from detent.checks import as_number
from detent.errors import RangeError, UnsupportedError
from detent.granularity import Granularity, PerTensor
from detent.kernels import grid_errors
from detent.observers.histogram import Bins, SearchObserver
from detent.scale_rule import derive
from detent.spec import QuantSpec

__all__ = ["MSE"]

Float64 = NDArray[np.float64]
COARSE, COARSE_STEP = 41, 0.5  # scales, and octaves from one to the next
FINE_PER_OCTAVE, AFFINE_PER_OCTAVE = 32, 16
VALLEYS, AROUND = 4, 9
ZERO_POINTS = 33
SETS_AT_ONCE = 256
FINEST = 2.0**15


@dataclass(frozen=True)
class Grid:
    """The levels that a spec has at scale 1, and how far values are from them."""

    spec: QuantSpec
    norm: float
    dtype: np.dtype

    @property
    def ends(self) -> tuple[float, float]:
        return float(self.spec.qmin), float(self.spec.qmax)

    def errors(self, bins: Bins, scale: Float64, zero: Float64) -> Float64:
        """The error of each set with each of its candidates."""
        levels = np.empty(0)
        if not self.spec.format.is_integer:
            low, high = self.ends
            levels = np.unique([level for level in self.spec.format.levels if low <= level <= high])
        return grid_errors(self.norm, self.ends, levels, tuple(bins), scale, zero)

    def of_ranges(self, bins: Bins, lo: Float64, hi: Float64) -> tuple[Float64, Float64, Float64]:
        """The error of each range, and its scale and zero point."""
        derived = derive(self.spec, lo, hi, self.dtype)
        scale, zero = derived.scale.astype(np.float64), derived.zero_point.astype(np.float64)
        return self.errors(bins, scale, zero), scale, zero

    def least_clipping(self, bins: Bins, reach: Float64) -> Float64:
        """What clipping at ``-reach`` and ``reach`` costs, however fine the levels between are."""
        zero = np.zeros_like(reach)
        return grid_errors(self.norm, (-FINEST, FINEST), np.empty(0), tuple(bins), reach / FINEST, zero)


def least_error(spec: QuantSpec, bins: Bins, norm: float, dtype: str) -> tuple[Float64, Float64]:
    """The range of each set with the least error."""
    if spec.scale_format == "e4m3":
        raise UnsupportedError(f"the scales of {spec} share a scale of their own and cannot be searched: use MinMax")
    grid = Grid(spec, norm, np.dtype(dtype))
    search = _symmetric if spec.symmetric else _affine
    lo, hi = bins.lo.copy(), bins.hi.copy()
    some = np.flatnonzero((lo != 0) | (hi != 0))  # all zero: nothing to search
    for start in range(0, some.size, SETS_AT_ONCE):
        part = some[start : start + SETS_AT_ONCE]
        own = Bins(bins.lower, bins.upper, bins.mass[part], bins.lo[part], bins.hi[part])
        lo[part], hi[part] = search(grid, own)
    return lo, hi


def _symmetric(grid: Grid, bins: Bins) -> tuple[Float64, Float64]:
    largest = np.maximum(np.abs(bins.lo), np.abs(bins.hi))[:, None]

    def ranges(octaves: Float64) -> tuple[Float64, Float64]:
        reach = largest * np.exp2(-octaves)
        return np.clip(bins.lo[:, None], -reach, reach), np.clip(bins.hi[:, None], -reach, reach)

    def errors(octaves: Float64) -> Float64:
        return grid.of_ranges(bins, *ranges(octaves))[0]

    coarse = np.broadcast_to(np.arange(COARSE) * COARSE_STEP, (len(largest), COARSE))
    seen, scale, zero = grid.of_ranges(bins, *ranges(coarse))
    low, high = grid.ends
    reach = scale * np.maximum(np.abs(low - zero), np.abs(high - zero))
    depth = _depth(grid.least_clipping(bins, reach), seen)
    best = _descend(errors, depth, FINE_PER_OCTAVE)
    lo, hi = ranges(best[:, None])
    return lo[:, 0], hi[:, 0]


def _depth(clipping: Float64, seen: Float64) -> Float64:
    """How many octaves below the whole range the best scale can lie."""
    possible = clipping <= seen.min(axis=1, keepdims=True)
    last = seen.shape[1] - 1 - np.argmax(possible[:, ::-1], axis=1)
    return np.asarray((last + 1) * COARSE_STEP)


def _descend(errors: Callable[[Float64], Float64], depth: Float64, per_octave: int) -> Float64:
    """The octaves below the whole range where the error is least."""
    # Steps of one size: what a set gets does not depend on the sets that it is searched with.
    step = np.full((len(depth), 1), 1 / per_octave)
    tried: Float64 = step * np.arange(np.ceil(depth.max() * per_octave) + 1.0)
    seen = errors(tried)
    least, best = _least(seen, tried)
    around = np.linspace(-1, 1, 2 * AROUND - 1)
    centers = np.take_along_axis(tried, _valleys(seen), axis=1)
    for _ in range(2):
        tried = np.maximum((centers[:, :, None] + step[:, :, None] * around).reshape(len(depth), -1), 0)
        seen = errors(tried)
        error, octave = _least(seen, tried)
        best, least = np.where(error < least, octave, best), np.minimum(error, least)
        parts = seen.reshape(len(depth), centers.shape[1], -1)
        inside = np.argmin(parts, axis=2)[:, :, None]
        centers = np.take_along_axis(tried.reshape(parts.shape), inside, axis=2)[:, :, 0]
        step = step / (AROUND - 1)
    return best


def _least(seen: Float64, *tried: Float64) -> list[Float64]:
    """The first of the least errors of each set, which is that of the largest scale, and what was tried there."""
    place = np.argmin(seen, axis=1)[:, None]
    return [np.take_along_axis(each, place, axis=1)[:, 0] for each in (seen, *tried)]


def _valleys(seen: Float64) -> NDArray[np.intp]:
    """Where the lowest local minima of each row are."""
    walled = np.pad(seen, ((0, 0), (1, 1)), constant_values=np.inf)
    inner = walled[:, 1:-1]
    lowest = np.where((inner <= walled[:, :-2]) & (inner <= walled[:, 2:]), inner, np.inf)
    return np.argsort(lowest, axis=1, kind="stable")[:, :VALLEYS]


def _affine(grid: Grid, bins: Bins) -> tuple[Float64, Float64]:
    """Scales times zero points: every zero point of few codes, every eighth of 256, and then those in between."""
    low, high = grid.ends
    lo, hi = np.minimum(bins.lo, 0.0)[:, None], np.maximum(bins.hi, 0.0)[:, None]
    steps = np.arange(COARSE) * COARSE_STEP
    seen, scale, zero = grid.of_ranges(bins, lo * np.exp2(-steps), hi * np.exp2(-steps))
    widest, middle = scale[:, :1], zero[:, :1]
    depth = _depth(grid.least_clipping(bins, scale * (high - low)), seen)
    sets, places = len(lo), np.unique(np.rint(np.linspace(low, high, min(ZERO_POINTS, int(high - low) + 1))))

    def errors(octaves: Float64, zero: Float64) -> Float64:
        stored = (widest * np.exp2(-octaves)).astype(grid.dtype).astype(np.float64)
        return grid.errors(bins, stored, zero)

    count = int(np.ceil(depth.max() * AFFINE_PER_OCTAVE)) + 1
    step = np.full((sets, 1), 1 / AFFINE_PER_OCTAVE)
    octaves: Float64 = np.tile(step * np.arange(float(count)), (1, places.size + 1))
    zeros = np.repeat(np.concatenate((middle, np.broadcast_to(places, (sets, places.size))), axis=1), count, axis=1)
    seen = errors(octaves, zeros)
    parts = seen.reshape(sets, places.size + 1, count)
    per_place = np.argmin(parts, axis=2)
    order = np.argsort(np.min(parts, axis=2), axis=1, kind="stable")[:, :VALLEYS]
    at = order * count + np.take_along_axis(per_place, order, axis=1)
    least, best_octave, best_zero = _least(seen, octaves, zeros)
    center, place = (np.take_along_axis(each, at, axis=1) for each in (octaves, zeros))
    gap = float(places[1] - places[0]) if places.size > 1 else 1.0
    around = np.linspace(-1, 1, AROUND)
    for _ in range(8):
        gap = max(np.floor(gap / 2), 0.0)
        moves = np.array(list(product((-2, -1, 0, 1, 2) if gap else (0,), around)))
        octaves = np.maximum((center[:, :, None] + step[:, :, None] * moves[:, 1]).reshape(sets, -1), 0)
        zeros = np.clip((place[:, :, None] + gap * moves[:, 0]).reshape(sets, -1), low, high)
        seen = errors(octaves, zeros)
        error, octave, zero = _least(seen, octaves, zeros)
        better = error < least
        best_octave, best_zero = np.where(better, octave, best_octave), np.where(better, zero, best_zero)
        least = np.minimum(error, least)
        parts = seen.reshape(sets, center.shape[1], -1)
        inside = np.argmin(parts, axis=2)[:, :, None]
        center, place = (
            np.take_along_axis(each.reshape(parts.shape), inside, axis=2)[:, :, 0] for each in (octaves, zeros)
        )
        step = step / 2
    scale = (widest[:, 0] * np.exp2(-best_octave)).astype(grid.dtype).astype(np.float64)
    return (low - best_zero) * scale, (high - best_zero) * scale


class MSE(SearchObserver):
    """The range of each set with the least mean ``|x - quantized x|^norm``, clipping and rounding both.

    For sets with hundreds of values or more; with fewer, a higher ``precision`` or ``MinMax`` does better. The search
    depends on the spec. Weights say how much an element's error matters; they are rounded to multiples of 2^-24, so
    weighted observers merge exactly too.

    >>> import detent as dt, numpy as np
    >>> x = np.random.default_rng(0).normal(size=100_000).astype(np.float32)
    >>> observer = dt.observers.MSE().observe(x)
    >>> [float(observer.range(name).hi.round(1)) for name in ("int2", "int4", "int8")]
    [1.2, 2.5, 3.9]
    """

    def __init__(self, norm: float = 2.0, granularity: Granularity | str = PerTensor(), precision: int = 5) -> None:
        self.norm = as_number("norm", norm)
        if not 0 < self.norm < np.inf:
            raise RangeError(f"a norm is a positive number, got {norm!r}")
        super().__init__(granularity, precision)

    def _search(self, spec: QuantSpec, bins: Bins) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        return least_error(spec, bins, self.norm, self._scale_dtype)

    def _settings(self) -> dict[str, object]:
        return {"norm": self.norm, **super()._settings()}

    def __repr__(self) -> str:
        return self._described(f"norm={self.norm}")
