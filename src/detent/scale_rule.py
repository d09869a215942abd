"""Scale rules: from a range ``[lo, hi]`` to a scale and zero point (docs/numerics.md, sections 4 and 7).

All arithmetic is in float64; the scale is rounded once, to its dtype. Zero points use the *rounded* scale::

    symmetric   a = max(|lo|, |hi|)
      "qmax"       s = a / (qmax - z)
      "half_span"  s = a / ((qmax - qmin) / 2)
      "tight"      s = max(lo / (qmin - z), hi / (qmax - z), 0), without terms whose divisor is 0
    affine      s = hi / n - lo / n,  n = qmax - qmin,  z = clamp(round(qmin - lo / s), qmin, qmax)
    e8m0        s = 2^(floor(log2 a) - emax)                                          OCP MX v1.0
    e4m3        s = e4m3(a / qmax / s_t) * s_t,  s_t = (largest a) / (448 * qmax)        NVFP4
"""

from dataclasses import dataclass
from typing import Any, TypeAlias

import ml_dtypes
import numpy as np
from array_api_compat import numpy
from numpy.typing import NDArray

from detent import kernels
from detent.errors import RangeError
from detent.formats import float8_e4m3fn
from detent.kernels.reference.elements import encode, round_with
from detent.rounding import half_away, half_even
from detent.spec import QuantSpec

__all__ = ["Parameters", "derive", "float_parameters", "least_scale", "whole_zero_point"]

Float64 = NDArray[np.float64]
Array: TypeAlias = Any  # an array of any library; xp is the library's namespace
Namespace: TypeAlias = Any
MX_EXPONENTS = (-126, 127)  # exponents of e8m0 scales that are normal float32 numbers


@dataclass(frozen=True)
class Parameters:
    """Scales and zero points in the shape of the bounds; for NVFP4, also block scales and a tensor scale."""

    scale: NDArray[np.floating]
    zero_point: NDArray[np.int32]
    block_scale: NDArray[np.generic] | None = None
    tensor_scale: NDArray[np.floating] | None = None


def derive(spec: QuantSpec, lo: Float64, hi: Float64, dtype: np.dtype) -> Parameters:
    """Derive a scale and a zero point for each range. lo and hi must be finite, of equal shape, and lo <= hi."""
    derived = kernels.derive(spec, lo, hi, dtype)
    if derived is not None:
        return Parameters(derived[0], derived[1].astype(np.int32))
    return _derive(spec, lo, hi, dtype)  # if there is no native kernel, or to raise an error


def least_scale(spec: QuantSpec, dtype: np.dtype) -> float:
    """Return the smallest scale that the spec allows."""
    if spec.scale_format == "float" and spec.convention.zero_range.kind in {"eps", "width"}:
        return float(derive(spec, np.zeros(1), np.zeros(1), dtype).scale[0])
    return float(np.finfo(dtype).smallest_normal)


@np.errstate(all="ignore")
def _derive(spec: QuantSpec, lo: Float64, hi: Float64, dtype: np.dtype) -> Parameters:
    if spec.scale_format == "e8m0":
        return _symmetric_parameters(spec, _power_of_two(spec, lo, hi))
    if spec.scale_format == "e4m3":
        return _two_level(spec, lo, hi)
    # Reshape 0-d arrays to 1-d, because NumPy turns 0-d results into scalars.
    scale, zero_point, empty = float_parameters(numpy, spec, np.reshape(lo, -1), np.reshape(hi, -1), dtype)
    if spec.convention.zero_range.kind == "error" and empty.any():
        raise RangeError(
            f"{int(empty.sum())} of {empty.size} ranges have width zero, which convention "
            f"{spec.convention.name!r} rejects: remove constant data, or use a convention with a different zero_range"
        )
    if not np.isfinite(scale).all():
        raise RangeError(
            f"the scale of [{lo.min()}, {hi.max()}] overflows {dtype}: use dtype='float64', or rescale the data"
        )
    return Parameters(scale.reshape(lo.shape), zero_point.reshape(lo.shape))


def _symmetric_parameters(spec: QuantSpec, scale: NDArray[np.floating]) -> Parameters:
    return Parameters(scale, np.full(scale.shape, spec.symmetric_zero_point, np.int32))


def _largest(lo: Float64, hi: Float64) -> Float64:
    return np.maximum(np.abs(lo), np.abs(hi))


def float_parameters(xp: Namespace, spec: QuantSpec, lo: Array, hi: Array, dtype: object) -> tuple[Array, Array, Array]:
    """Return float scales in ``dtype``, zero points in int32, and the mask of ranges of width zero.

    Works with any array namespace ``xp``. Nothing is checked: a scale may be infinite, and a range of width zero gets
    scale 1 even if the convention rejects such ranges.
    """
    exact, divisor = _symmetric(xp, spec, lo, hi) if spec.symmetric else _affine(xp, spec, lo, hi)
    exact, empty = _zero_range(xp, spec, exact, divisor)
    scale = _at_least(xp, xp.astype(exact, dtype), float(xp.finfo(dtype).smallest_normal))
    if not spec.symmetric:
        return scale, _zero_point(xp, spec, lo, scale, empty), empty
    return scale, xp.full(scale.shape, spec.symmetric_zero_point, dtype=xp.int32, device=scale.device), empty


def _symmetric(xp: Namespace, spec: QuantSpec, lo: Array, hi: Array) -> tuple[Array, float]:
    """Return the scale before rounding, and the divisor that converts the ``width`` of ZeroRange to a scale."""
    below, above = spec.qmin - spec.symmetric_zero_point, spec.qmax - spec.symmetric_zero_point
    if spec.convention.symmetric_scale == "tight":
        scale = _divide(xp, hi, above)
        scale = xp.maximum(_divide(xp, lo, below), scale) if below else scale
        return _at_least(xp, scale, 0.0), above
    divisor = above if spec.convention.symmetric_scale == "qmax" else (spec.qmax - spec.qmin) / 2
    return _divide(xp, xp.maximum(xp.abs(lo), xp.abs(hi)), divisor), divisor


def _affine(xp: Namespace, spec: QuantSpec, lo: Array, hi: Array) -> tuple[Array, float]:
    steps = spec.qmax - spec.qmin
    if spec.convention.include_zero:
        lo, hi = _at_most(xp, lo, 0.0), _at_least(xp, hi, 0.0)
    return _divide(xp, hi, steps) - _divide(xp, lo, steps), steps


def _zero_range(xp: Namespace, spec: QuantSpec, scale: Array, divisor: float) -> tuple[Array, Array]:
    """Return the scale after the convention's zero-range rule, and a mask where the rule sets the zero point."""
    rule = spec.convention.zero_range
    if rule.kind in {"eps", "width"}:
        floor = rule.value if rule.kind == "eps" else rule.value / divisor
        return _at_least(xp, scale, floor), xp.zeros(scale.shape, dtype=xp.bool, device=scale.device)
    empty = scale == 0
    return xp.where(empty, xp.ones_like(scale), scale), empty


def _zero_point(xp: Namespace, spec: QuantSpec, lo: Array, scale: Array, empty: Array) -> Array:
    low = _at_most(xp, lo, 0.0) if spec.convention.include_zero else lo
    rounding = half_away if spec.convention.rounding.kind == "half_away" else half_even
    nearest = round_with(xp, rounding, spec.qmin - xp.divide(low, xp.astype(scale, xp.float64)), 0)
    nearest = _at_most(xp, _at_least(xp, nearest, spec.qmin), spec.qmax)
    at_zero = min(max(0, spec.qmin), spec.qmax)
    if spec.convention.zero_range.kind == "unit_at_qmin":
        at_zero = spec.qmin
    return xp.astype(xp.where(empty, xp.full_like(nearest, at_zero), nearest), xp.int32)


def whole_zero_point(xp: Namespace, spec: QuantSpec, learned: Array) -> Array:
    """Return learned zero points as int32, rounded half to even and clamped, as the forward pass uses them."""
    return xp.astype(xp.clip(xp.round(learned), spec.qmin, spec.qmax), xp.int32)


def _divide(xp: Namespace, values: Array, divisor: float) -> Array:
    """Divide by an array, because some libraries replace division by a scalar with a multiplication."""
    return xp.divide(values, xp.full_like(values, divisor))


def _at_least(xp: Namespace, values: Array, bound: float) -> Array:
    return xp.maximum(values, xp.full_like(values, bound))


def _at_most(xp: Namespace, values: Array, bound: float) -> Array:
    return xp.minimum(values, xp.full_like(values, bound))


def _power_of_two(spec: QuantSpec, lo: Float64, hi: Float64) -> NDArray[np.float32]:
    """Return the OCP MX scales: powers of two that map the largest magnitude of a parameter set to the top binade."""
    largest = _largest(lo, hi)
    top = int(np.frexp(spec.qmax)[1]) - 1
    exponent = np.clip(np.frexp(largest)[1] - 1 - top, *MX_EXPONENTS)
    return np.asarray(np.where(largest == 0, 1.0, np.ldexp(1.0, exponent)), np.float32)


def _two_level(spec: QuantSpec, lo: Float64, hi: Float64) -> Parameters:
    """Return the NVFP4 scales: one float32 per tensor, one float8 per parameter set, and their product.

    The tensor scale has a lower bound, so that its product with the smallest float8 is a normal number.
    """
    block_max, block_min = float8_e4m3fn.qmax, 2.0**-6
    largest = _largest(lo, hi)
    total = float(largest.max())
    floor = float(np.finfo(np.float32).smallest_normal) / block_min
    tensor = np.float32(max(total / (block_max * spec.qmax), floor) if total else 1.0)
    if not np.isfinite(tensor):
        raise RangeError(f"the tensor scale for the largest magnitude {total} overflows float32: rescale the data")
    block = np.clip((largest / spec.qmax / np.float64(tensor)).astype(np.float32), block_min, block_max)
    stored = np.asarray(encode(np, float8_e4m3fn, block), np.uint8).view(ml_dtypes.float8_e4m3fn)
    effective = np.asarray(stored.astype(np.float32) * tensor)
    levels = _symmetric_parameters(spec, effective)
    return Parameters(levels.scale, levels.zero_point, stored, np.asarray(tensor))
