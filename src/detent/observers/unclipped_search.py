"""Search for scales with the least squared error among those that clip nothing.

``best_params`` clips the largest values of a parameter set if that lowers the error of all others. Errors of clipping
are not random, however: they make the largest weights smaller, and so the outputs of every layer. In a deep network,
such errors add up, while errors of rounding cancel out. So for small groups, where clipping gains little, the search of
this module allows no error above half a step.

With n + 1 codes, the range of a parameter set may then be up to ``(n + 1) s`` wide, because its bounds may round by
half a step, too. So the search tries the scales from the min-max scale ``s_0`` down to ``s_0 n / (n + 1)``. An affine
spec tries three zero points for each of them: that of the min-max range, and its two neighbors. The candidate with the
least squared error wins; if errors are equal, the first one. The first candidate has the min-max parameters.
"""

import numpy as np
from numpy.typing import ArrayLike, NDArray

from detent.checks import float_array
from detent.errors import UnsupportedError
from detent.formats import Format
from detent.granularity import Tiling
from detent.kernels.reference.scale_search import FACTORS
from detent.ops import fake_quantize
from detent.params import QuantParams
from detent.scale_rule import least_scale
from detent.spec import QuantSpec, get_spec

__all__ = ["unclipped_params"]

Float64 = NDArray[np.float64]
STEP = 8  # distance of candidates, in positions of ``scale_search``: a factor of 0.9946
HALF = 0.5 + 2.0**-16  # largest error, in steps; the excess is for the rounding of float32


def unclipped_params(x: ArrayLike, spec: QuantSpec | Format | str) -> QuantParams:
    """Return the parameters with the least squared error of quantizing x, among those with no error above half a step.

    No scale is larger than the min-max scale, and no error is larger than with the min-max parameters.

    Raises:
        RangeError: x is empty or contains NaN or infinities.
        UnsupportedError: the spec has no integer format, or rounds stochastically.

    >>> import detent as dt, numpy as np
    >>> x = np.random.default_rng(0).normal(size=(100, 128)).astype(np.float32)
    >>> found = [search(x, "int4/axis0") for search in (dt.observers.unclipped_params, dt.observers.best_params)]
    >>> [float(np.max(abs(x - dt.fake_quantize(x, params)) / params.scale[:, None]).round(1)) for params in found]
    [0.5, 2.5]
    """
    spec, data = get_spec(spec), float_array(x)
    if not spec.format.is_integer or spec.scale_format != "float" or spec.rounding.kind == "stochastic":
        raise UnsupportedError(f"expected an integer format, float scales and no stochastic rounding, got {spec}")
    minmax = QuantParams.from_data(spec, data)
    tiling = spec.granularity.tiling(data.shape)
    scale, zero = minmax.scale.copy(), minmax.zero_point.copy()
    best = _errors(data, minmax, tiling)[0]
    least = least_scale(spec, minmax.scale.dtype)
    codes = spec.qmax - spec.qmin
    positions = np.flatnonzero(codes / (codes + 1) <= FACTORS)[::STEP]
    for factor in FACTORS[positions]:
        smaller = np.maximum((minmax.scale * factor).astype(minmax.scale.dtype), least)
        for offset in (0,) if spec.symmetric else (0, -1, 1):
            moved = np.clip(minmax.zero_point + offset, spec.qmin, spec.qmax).astype(np.int32)
            error, largest = _errors(data, QuantParams(spec, smaller, moved), tiling)
            better = (error < best) & (largest <= HALF * smaller)
            best, scale = np.where(better, error, best), np.where(better, smaller, scale)
            zero = np.where(better, moved, zero)
    return QuantParams(spec, scale, zero)


def _errors(x: NDArray[np.floating], params: QuantParams, tiling: Tiling) -> tuple[Float64, Float64]:
    """Return the squared error and the largest error of each parameter set."""
    distances = np.abs(x - fake_quantize(x, params))
    return _reduced(np.add, distances * distances, tiling), _reduced(np.maximum, distances, tiling)


def _reduced(ufunc: np.ufunc, values: NDArray[np.floating], tiling: Tiling) -> Float64:
    for axis, (size, block) in enumerate(zip(tiling.shape, tiling.block, strict=True)):
        if block > 1:
            values = ufunc.reduceat(values, np.arange(0, size, block), axis=axis, dtype=np.float64)
    return np.asarray(values.reshape(tiling.scale_shape), np.float64)
