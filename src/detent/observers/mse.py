"""MSE: the range with the least quantization error, searched on a histogram of the data.

The error is computed with the spec's format, the scale rule of its convention, and the scale as it is stored. The error
includes clipping and rounding, integrated over the bins. The search varies the scale and, for affine specs, the zero
point::

    1. a coarse search from the min-max scale downward, in half octaves; it stops where the clipping error exceeds the
       least error so far, because smaller scales clip even more
    2. a fine search over the remaining scales, 32 per octave, which is finer than the bins
    3. two more searches around the lowest local minima, each with an eighth of the previous step

All parameter sets are searched at once. The work does not depend on the number of observed elements.

``best_params`` searches on the values of one array instead, such as a weight. It is more accurate for small parameter
sets and needs no memory for histograms; ``detent.kernels.reference.scale_search`` describes the search.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import product

import numpy as np
from numpy.typing import ArrayLike, NDArray

from detent.checks import as_number, compute_dtype, float_array
from detent.errors import RangeError, UnsupportedError
from detent.formats import Format
from detent.granularity import Granularity, PerTensor
from detent.kernels import best_scales, grid_errors
from detent.observers.histogram import Bins, SearchObserver
from detent.params import QuantParams
from detent.rounding import half_even
from detent.scale_rule import Parameters, derive, least_scale
from detent.spec import QuantSpec, get_spec

__all__ = ["MSE", "HistogramObserver", "best_params"]

Float64 = NDArray[np.float64]
COARSE_SCALES, COARSE_STEP = 41, 0.5  # 41 scales, half an octave apart, down to 20 octaves below min-max
FINE_PER_OCTAVE, AFFINE_PER_OCTAVE = 32, 16  # scales per octave; affine specs also search the zero point
MAX_MINIMA = 4  # number of local minima that are refined, because several may be similarly low
NEIGHBORS = 9  # scales on each side of a minimum, including the minimum itself
ZERO_POINTS = 33  # zero points in the first affine search: for 256 codes, every eighth
SETS_AT_ONCE = 256  # parameter sets searched at a time, which bounds the memory
CLIPPING_LEVELS = 2.0**15  # levels on each side of zero; rounding errors are negligible with so many


@dataclass(frozen=True)
class Grid:
    """The values that a spec represents at scale 1, and the error of quantizing to these values."""

    spec: QuantSpec
    norm: float
    dtype: np.dtype

    @property
    def bounds(self) -> tuple[float, float]:
        return float(self.spec.qmin), float(self.spec.qmax)

    def errors(self, bins: Bins, scale: Float64, zero: Float64) -> Float64:
        """Return the error of each candidate (scale and zero point) for each parameter set."""
        levels = np.empty(0)
        if not self.spec.format.is_integer:
            low, high = self.bounds
            levels = np.unique([level for level in self.spec.format.levels if low <= level <= high])
        return grid_errors(self.norm, self.bounds, levels, tuple(bins), scale, zero)

    def range_errors(self, bins: Bins, lo: Float64, hi: Float64) -> tuple[Float64, Float64, Float64]:
        """Return the error, the scale and the zero point of each candidate range."""
        derived = derive(self.spec, lo, hi, self.dtype)
        scale, zero = derived.scale.astype(np.float64), derived.zero_point.astype(np.float64)
        return self.errors(bins, scale, zero), scale, zero

    def clipping_errors(self, bins: Bins, limit: Float64) -> Float64:
        """Return the error of clipping to [-limit, limit], without rounding."""
        zero, bounds = np.zeros_like(limit), (-CLIPPING_LEVELS, CLIPPING_LEVELS)
        return grid_errors(self.norm, bounds, np.empty(0), tuple(bins), limit / CLIPPING_LEVELS, zero)


def least_error(spec: QuantSpec, bins: Bins, norm: float, dtype: str) -> tuple[Float64, Float64]:
    """For each parameter set, search for the range with the least error."""
    _refuse_two_levels(spec)
    grid = Grid(spec, norm, np.dtype(dtype))
    search = _symmetric if spec.symmetric else _affine
    lo, hi = bins.lo.copy(), bins.hi.copy()
    nonzero = np.flatnonzero((lo != 0) | (hi != 0))  # nothing to search where all values are zero
    for start in range(0, nonzero.size, SETS_AT_ONCE):
        part = nonzero[start : start + SETS_AT_ONCE]
        own = Bins(bins.lower, bins.upper, bins.mass[part], bins.lo[part], bins.hi[part])
        lo[part], hi[part] = search(grid, own)
    return lo, hi


def _refuse_two_levels(spec: QuantSpec) -> None:
    if spec.scale_format == "e4m3":
        raise UnsupportedError(f"MSE does not support the two-level scales of {spec}: use MinMax")


def _symmetric(grid: Grid, bins: Bins) -> tuple[Float64, Float64]:
    """Search for the scale of a symmetric spec."""
    largest = np.maximum(np.abs(bins.lo), np.abs(bins.hi))[:, None]

    def ranges(octaves: Float64) -> tuple[Float64, Float64]:
        limit = largest * np.exp2(-octaves)
        return np.clip(bins.lo[:, None], -limit, limit), np.clip(bins.hi[:, None], -limit, limit)

    def errors_at(octaves: Float64) -> Float64:
        return grid.range_errors(bins, *ranges(octaves))[0]

    coarse = np.broadcast_to(np.arange(COARSE_SCALES) * COARSE_STEP, (len(largest), COARSE_SCALES))
    errors, scale, zero = grid.range_errors(bins, *ranges(coarse))
    low, high = grid.bounds
    limit = scale * np.maximum(np.abs(low - zero), np.abs(high - zero))
    depth = _depth(grid.clipping_errors(bins, limit), errors)
    best = _descend(errors_at, depth, FINE_PER_OCTAVE)
    lo, hi = ranges(best[:, None])
    return lo[:, 0], hi[:, 0]


def _depth(clipping: Float64, errors: Float64) -> Float64:
    """Return, for each parameter set, how many octaves below the min-max scale the fine search has to cover."""
    possible = clipping <= errors.min(axis=1, keepdims=True)
    last = errors.shape[1] - 1 - np.argmax(possible[:, ::-1], axis=1)
    return np.asarray((last + 1) * COARSE_STEP)


def _descend(errors_at: Callable[[Float64], Float64], depth: Float64, per_octave: int) -> Float64:
    """Return, for each parameter set, how many octaves below the min-max scale the error is smallest."""
    # All parameter sets have the same step, so a set's result does not depend on the sets searched with it.
    step = np.full((len(depth), 1), 1 / per_octave)
    octaves: Float64 = step * np.arange(np.ceil(depth.max() * per_octave) + 1.0)
    errors = errors_at(octaves)
    least, best = _least(errors, octaves)
    around = np.linspace(-1, 1, 2 * NEIGHBORS - 1)
    centers = np.take_along_axis(octaves, _minima(errors), axis=1)
    for _ in range(2):
        octaves = np.maximum((centers[:, :, None] + step[:, :, None] * around).reshape(len(depth), -1), 0)
        errors = errors_at(octaves)
        error, octave = _least(errors, octaves)
        best, least = np.where(error < least, octave, best), np.minimum(error, least)
        parts = errors.reshape(len(depth), centers.shape[1], -1)
        inside = np.argmin(parts, axis=2)[:, :, None]
        centers = np.take_along_axis(octaves.reshape(parts.shape), inside, axis=2)[:, :, 0]
        step = step / (NEIGHBORS - 1)
    return best


def _least(errors: Float64, *candidates: Float64) -> list[Float64]:
    """Return the least error of each parameter set, and its candidate; on ties, the first (the largest scale)."""
    index = np.argmin(errors, axis=1)[:, None]
    return [np.take_along_axis(each, index, axis=1)[:, 0] for each in (errors, *candidates)]


def _minima(errors: Float64) -> NDArray[np.intp]:
    """Return the indices of the lowest local minima of each row."""
    padded = np.pad(errors, ((0, 0), (1, 1)), constant_values=np.inf)
    inner = padded[:, 1:-1]
    lowest = np.where((inner <= padded[:, :-2]) & (inner <= padded[:, 2:]), inner, np.inf)
    return np.argsort(lowest, axis=1, kind="stable")[:, :MAX_MINIMA]


def _affine(grid: Grid, bins: Bins) -> tuple[Float64, Float64]:
    """Search for scale and zero point of an affine spec.

    At most 33 evenly spaced zero points are tried. Then the search repeats around the best zero point, each time with
    half the spacing.
    """
    low, high = grid.bounds
    lo, hi = np.minimum(bins.lo, 0.0)[:, None], np.maximum(bins.hi, 0.0)[:, None]
    coarse = np.arange(COARSE_SCALES) * COARSE_STEP
    errors, scale, zero = grid.range_errors(bins, lo * np.exp2(-coarse), hi * np.exp2(-coarse))
    widest, middle = scale[:, :1], zero[:, :1]
    depth = _depth(grid.clipping_errors(bins, scale * (high - low)), errors)
    sets, zero_points = len(lo), np.unique(np.rint(np.linspace(low, high, min(ZERO_POINTS, int(high - low) + 1))))

    def errors_at(octaves: Float64, zero: Float64) -> Float64:
        stored = (widest * np.exp2(-octaves)).astype(grid.dtype).astype(np.float64)
        return grid.errors(bins, stored, zero)

    count = int(np.ceil(depth.max() * AFFINE_PER_OCTAVE)) + 1
    step = np.full((sets, 1), 1 / AFFINE_PER_OCTAVE)
    octaves: Float64 = np.tile(step * np.arange(float(count)), (1, zero_points.size + 1))
    first_zeros = np.concatenate((middle, np.broadcast_to(zero_points, (sets, zero_points.size))), axis=1)
    zeros = np.repeat(first_zeros, count, axis=1)
    errors = errors_at(octaves, zeros)
    parts = errors.reshape(sets, zero_points.size + 1, count)
    best_scales = np.argmin(parts, axis=2)
    order = np.argsort(np.min(parts, axis=2), axis=1, kind="stable")[:, :MAX_MINIMA]
    at = order * count + np.take_along_axis(best_scales, order, axis=1)
    least, best_octave, best_zero = _least(errors, octaves, zeros)
    centers, center_zeros = (np.take_along_axis(each, at, axis=1) for each in (octaves, zeros))
    gap = float(zero_points[1] - zero_points[0]) if zero_points.size > 1 else 1.0
    around = np.linspace(-1, 1, NEIGHBORS)
    for _ in range(8):
        gap = max(np.floor(gap / 2), 0.0)
        moves = np.array(list(product((-2, -1, 0, 1, 2) if gap else (0,), around)))
        octaves = np.maximum((centers[:, :, None] + step[:, :, None] * moves[:, 1]).reshape(sets, -1), 0)
        zeros = np.clip((center_zeros[:, :, None] + gap * moves[:, 0]).reshape(sets, -1), low, high)
        errors = errors_at(octaves, zeros)
        error, octave, zero = _least(errors, octaves, zeros)
        better = error < least
        best_octave, best_zero = np.where(better, octave, best_octave), np.where(better, zero, best_zero)
        least = np.minimum(error, least)
        parts = errors.reshape(sets, centers.shape[1], -1)
        inside = np.argmin(parts, axis=2)[:, :, None]
        centers, center_zeros = (
            np.take_along_axis(each.reshape(parts.shape), inside, axis=2)[:, :, 0] for each in (octaves, zeros)
        )
        step = step / 2
    scale = (widest[:, 0] * np.exp2(-best_octave)).astype(grid.dtype).astype(np.float64)
    return (low - best_zero) * scale, (high - best_zero) * scale


class MSE(SearchObserver):
    """Range with the least mean ``|x - quantized x|^norm``; also named ``HistogramObserver``.

    The error includes clipping and rounding, so the range depends on the spec. Use ``MSE`` for parameter sets of some
    hundred values or more. For fewer values, use a higher ``precision``, or ``best_params`` if all data are one array.
    Weights multiply the errors of elements. Weights are rounded to multiples of 2^-24, so that observers with weights
    merge exactly.

    >>> import detent as dt, numpy as np
    >>> x = np.random.default_rng(0).normal(size=100_000).astype(np.float32)
    >>> observer = dt.observers.MSE().observe(x)
    >>> [float(observer.range(name).hi.round(1)) for name in ("int2", "int4", "int8")]
    [1.2, 2.5, 3.9]
    """

    def __init__(self, norm: float = 2.0, granularity: Granularity | str = PerTensor(), precision: int = 5) -> None:
        self.norm = as_number("norm", norm)
        if not 0 < self.norm < np.inf:
            raise RangeError(f"norm must be a positive number, got {norm!r}")
        super().__init__(granularity, precision)

    def _search(self, spec: QuantSpec, bins: Bins) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        return least_error(spec, bins, self.norm, self._scale_dtype)

    def _settings(self) -> dict[str, object]:
        return {"norm": self.norm, **super()._settings()}


HistogramObserver = MSE


def best_params(x: ArrayLike, spec: QuantSpec | Format | str) -> QuantParams:
    """Return the parameters with the least squared error of quantizing x, searched on the values of each parameter set.

    The error is computed with the spec's own rounding, or with ``half_even`` if that rounding is stochastic. No scale
    is larger than the min-max scale, and no error is larger than with the min-max parameters.

    Raises:
        RangeError: x is empty or contains NaN or infinities.
        UnsupportedError: the spec has two-level scales (NVFP4).

    >>> import detent as dt, numpy as np
    >>> x = np.random.default_rng(0).normal(size=(100, 32)).astype(np.float32)
    >>> minmax, best = dt.QuantParams.from_data("int3/axis0", x), dt.observers.best_params(x, "int3/axis0")
    >>> [round(dt.metrics.mse(x, dt.fake_quantize(x, params)), 3) for params in (minmax, best)]
    [0.051, 0.037]
    """
    spec, data = get_spec(spec), float_array(x)
    _refuse_two_levels(spec)
    minmax = QuantParams.from_data(spec, data)
    dtype = compute_dtype(data.dtype)
    rounded = replace(spec, rounding=half_even) if spec.rounding.kind == "stochastic" else spec
    lo, hi = minmax.min_val, minmax.max_val
    bounds = np.asarray(lo, dtype), np.asarray(hi, dtype)
    start = minmax.scale.astype(dtype), minmax.zero_point.astype(dtype)
    tiling, least = spec.granularity.tiling(data.shape), least_scale(spec, minmax.scale.dtype)
    scale, zero, _ = best_scales(data, tiling, rounded, bounds, start, least)
    stored = Parameters(scale.astype(minmax.scale.dtype), zero.astype(np.int32))
    ends = [(code - zero.astype(np.float64)) * scale for code in (spec.qmin, spec.qmax)]
    clipped = [np.clip(np.asarray(bound), *ends) for bound in (lo, hi)]
    return QuantParams.trusted(spec, stored, *clipped)
