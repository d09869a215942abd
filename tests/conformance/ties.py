"""Tie-adjacent data: x = (k + 1/2) * s and its nearest floats, where different rules give different codes.

Random data hits a tie about once in 2^20 elements, so it cannot distinguish `x / s` from `x * (1 / s)`, or half-even
from half-away. All equality tests in this directory use these points.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

__all__ = ["SCALES", "around_ties", "many_scales", "neighbors", "special_values", "zero_points"]

SCALES = (0.0123, 0.3, 0.017, 1 / 3, 2.0**-10, 1e-30, 7e20)
"""Scales that are awkward in binary, tiny, huge, and one power of two, where ties are exact."""


def neighbors(x: NDArray, reach: int = 1) -> NDArray:
    """Return x and its `reach` next floats on either side, in a new last axis of length 2 * reach + 1."""
    up, down, columns = x, x, [x]
    with np.errstate(over="ignore", under="ignore"):
        for _ in range(reach):
            up, down = np.nextafter(up, x.dtype.type(np.inf)), np.nextafter(down, x.dtype.type(-np.inf))
            columns = [down, *columns, up]
    return np.stack(columns, axis=-1)


def around_ties(scale: ArrayLike, k: ArrayLike, reach: int = 1, dtype: str = "float32") -> NDArray:
    """Return (k + 1/2) * scale, rounded to dtype, with its neighbors; `scale` and `k` broadcast."""
    with np.errstate(over="ignore"):
        center = ((np.asarray(k, np.float64) + 0.5) * np.asarray(scale, np.float64)).astype(dtype)
    return neighbors(center, reach)


def special_values(dtype: str = "float32") -> NDArray:
    """Infinities, zeros of both signs, subnormals, and the extremes of a NumPy float type."""
    info = np.finfo(dtype)
    positive = [
        np.inf,
        0.0,
        float(info.smallest_subnormal),
        float(info.tiny) / 2,
        float(info.tiny),
        float(info.max),
        1.0,
    ]
    return np.array([sign * v for v in positive for sign in (1.0, -1.0)], dtype=np.float64).astype(dtype)


def zero_points(qmin: int, qmax: int) -> list[int]:
    """qmin, qmax, and even and odd zero points in the middle of the range, without duplicates."""
    middle = (qmin + qmax + 1) // 2
    candidates = [qmin, qmax, middle, middle + 1, middle - 1]
    return sorted({z for z in candidates if qmin <= z <= qmax})


def many_scales(count: int, seed: int) -> NDArray[np.float32]:
    """Return the awkward scales, then log-uniform random ones in 2^-20..2^4, as float32."""
    random = np.exp2(np.random.default_rng(seed).uniform(-20, 4, size=max(count - len(SCALES), 0)))
    return np.concatenate([np.array(SCALES), random])[:count].astype(np.float32)
