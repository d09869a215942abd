"""Scale rules: from a range ``[lo, hi]`` to a scale and zero point (docs/numerics.md, sections 4 and 7).

All arithmetic is in float64 and rounded once to the scale's dtype; zero points use the *stored* scale::

    symmetric   a = max(|lo|, |hi|)
      "qmax"       s = a / (qmax - z)
      "half_span"  s = a / ((qmax - qmin) / 2)
      "tight"      s = max(lo / (qmin - z), hi / (qmax - z)), a term with divisor 0 left out
    affine      s = hi / n - lo / n,  n = qmax - qmin,  z = clamp(round(qmin - lo / s), qmin, qmax)
    e8m0        s = 2^(floor(log2 a) - emax)                                          OCP MX v1.0
    e4m3        s = e4m3(a / max / s_t) * s_t,  s_t = max over sets of a / (448 * max)   NVFP4
"""

from dataclasses import dataclass

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from detent import kernels
from detent.errors import RangeError
from detent.formats import float8_e4m3fn
from detent.kernels.reference.elements import encode, round_with
from detent.rounding import half_away, half_even
from detent.spec import QuantSpec

__all__ = ["Parameters", "derive"]

Float64 = NDArray[np.float64]
MX_EXPONENTS = (-126, 127)


@dataclass(frozen=True)
class Parameters:
    """The numbers a range gives: arrays of the range's shape, and the two levels of NVFP4 where they exist.

    >>> from detent.spec import QuantSpec
    >>> derive(QuantSpec("int8"), np.float64(-2.0), np.float64(2.0), np.dtype("float32")).zero_point
    array(0, dtype=int32)
    """

    scale: NDArray[np.floating]
    zero_point: NDArray[np.int32]
    block_scale: NDArray[np.generic] | None = None
    tensor_scale: NDArray[np.floating] | None = None


def derive(spec: QuantSpec, lo: Float64, hi: Float64, dtype: np.dtype) -> Parameters:
    """Scale and zero point of each range; lo and hi are finite float64 arrays of one shape with lo <= hi.

    Raises:
        RangeError: a scale beyond the dtype, or a zero range under the convention "error".

    >>> from detent.spec import QuantSpec
    >>> derive(QuantSpec("uint8"), np.float64(-1.0), np.float64(4.0), np.dtype("float32")).zero_point
    array(51, dtype=int32)
    """
    found = kernels.derive(spec, lo, hi, dtype)
    if found is not None:
        return Parameters(found[0], found[1].astype(np.int32))
    with np.errstate(all="ignore"):  # other scale formats, and whatever raises
        return _derive(spec, lo, hi, dtype)


def _derive(spec: QuantSpec, lo: Float64, hi: Float64, dtype: np.dtype) -> Parameters:
    if spec.scale_format == "e8m0":
        return _symmetric_parameters(spec, _power_of_two(spec, lo, hi))
    if spec.scale_format == "e4m3":
        return _two_level(spec, lo, hi)
    exact, degenerate = _zero_range(spec, *(_symmetric(spec, lo, hi) if spec.symmetric else _affine(spec, lo, hi)))
    scale = _store(exact, dtype, lo, hi)
    if spec.symmetric:
        return _symmetric_parameters(spec, scale)
    return Parameters(scale, _zero_point(spec, lo, scale, degenerate))


def _symmetric_parameters(spec: QuantSpec, scale: NDArray[np.floating]) -> Parameters:
    return Parameters(scale, np.full(scale.shape, spec.symmetric_zero_point, np.int32))


def _largest(lo: Float64, hi: Float64) -> Float64:
    return np.maximum(np.abs(lo), np.abs(hi))


def _symmetric(spec: QuantSpec, lo: Float64, hi: Float64) -> tuple[Float64, float]:
    """The exact scale, and the divisor that turns a floored width into a floored scale."""
    below, above = spec.qmin - spec.symmetric_zero_point, spec.qmax - spec.symmetric_zero_point
    if spec.convention.symmetric_scale == "tight":
        ends = np.maximum(lo / below, hi / above) if below else hi / above
        return np.maximum(ends, 0.0), above
    divisor = above if spec.convention.symmetric_scale == "qmax" else (spec.qmax - spec.qmin) / 2
    return _largest(lo, hi) / divisor, divisor


def _affine(spec: QuantSpec, lo: Float64, hi: Float64) -> tuple[Float64, float]:
    lo, hi = _widened(spec, lo, hi)
    steps = spec.qmax - spec.qmin
    return hi / steps - lo / steps, steps


def _widened(spec: QuantSpec, lo: Float64, hi: Float64) -> tuple[Float64, Float64]:
    if not spec.convention.include_zero:
        return lo, hi
    return np.minimum(lo, 0.0), np.maximum(hi, 0.0)


def _zero_range(spec: QuantSpec, scale: Float64, divisor: float) -> tuple[Float64, NDArray[np.bool_]]:
    """The scale after the convention's zero-range rule, and where that rule also decides the zero point."""
    rule = spec.convention.zero_range
    nothing = np.zeros(scale.shape, np.bool_)
    if rule.kind == "eps":
        return np.maximum(scale, rule.value), nothing
    if rule.kind == "width":
        return np.maximum(scale, rule.value / divisor), nothing
    empty = scale == 0
    if rule.kind == "error" and empty.any():
        raise RangeError(
            f"convention {spec.convention.name!r} refuses a range without width, {int(empty.sum())} of {empty.size} "
            "sets have one: leave them out or choose another zero_range"
        )
    return np.where(empty, 1.0, scale), empty


def _store(exact: Float64, dtype: np.dtype, lo: Float64, hi: Float64) -> NDArray[np.floating]:
    """The exact scale rounded to its dtype, at least the dtype's smallest normal number."""
    scale: NDArray[np.floating] = np.asarray(np.maximum(exact.astype(dtype), np.finfo(dtype).smallest_normal))
    if not np.isfinite(scale).all():
        raise RangeError(
            f"the range [{lo.min()}, {hi.max()}] needs a scale beyond {dtype}: use dtype='float64' or rescale the data"
        )
    return scale


def _zero_point(
    spec: QuantSpec, lo: Float64, scale: NDArray[np.floating], degenerate: NDArray[np.bool_]
) -> NDArray[np.int32]:
    low, _ = _widened(spec, lo, lo)
    rounding = half_away if spec.convention.rounding == half_away else half_even
    exact = spec.qmin - low / scale.astype(np.float64)
    nearest = np.clip(round_with(np, rounding, exact, 0), spec.qmin, spec.qmax)
    at_zero = spec.qmin if spec.convention.zero_range.kind == "unit_at_qmin" else np.clip(0, spec.qmin, spec.qmax)
    return np.asarray(np.where(degenerate, at_zero, nearest), np.int32)


def _power_of_two(spec: QuantSpec, lo: Float64, hi: Float64) -> NDArray[np.float32]:
    """The OCP MX scale of each set: the power of two that brings the largest magnitude to the format's top binade."""
    largest = _largest(lo, hi)
    top = int(np.frexp(spec.qmax)[1]) - 1
    exponent = np.clip(np.frexp(largest)[1] - 1 - top, *MX_EXPONENTS)
    return np.asarray(np.where(largest == 0, 1.0, np.ldexp(1.0, exponent)), np.float32)


def _two_level(spec: QuantSpec, lo: Float64, hi: Float64) -> Parameters:
    """The NVFP4 scales: one float32 for the tensor, one float8 per set, and their product.

    The tensor's scale is floored so that its product with the smallest float8 is still a normal number.
    """
    block_max, block_min = float8_e4m3fn.qmax, 2.0**-6
    largest = _largest(lo, hi)
    total = float(largest.max())
    floor = float(np.finfo(np.float32).smallest_normal) / block_min
    tensor = np.float32(max(total / (block_max * spec.qmax), floor) if total else 1.0)
    if not np.isfinite(tensor):
        raise RangeError(f"the largest magnitude {total} needs a tensor scale beyond float32: rescale the data")
    block = np.clip((largest / spec.qmax / np.float64(tensor)).astype(np.float32), block_min, block_max)
    stored = np.asarray(encode(np, float8_e4m3fn, block), np.uint8).view(ml_dtypes.float8_e4m3fn)
    effective = np.asarray(stored.astype(np.float32) * tensor)
    levels = _symmetric_parameters(spec, effective)
    return Parameters(levels.scale, levels.zero_point, stored, np.asarray(tensor))
