"""Elements: the elementwise arithmetic of quantization (docs/numerics.md, sections 2, 3 and 7).

Arguments are arrays of the compute type: ``x``, ``s`` (scale) and ``z`` (zero point as a float). ``s`` and ``z`` are
broadcast to the shape of ``x``.

::

    t = fl(x / s)  or  fl(x * fl(1 / s))        ratio
    u = round(t) + z  or  round(fl(t + z))      unclamped
    q = min(max(u, qmin), qmax)                 as a float, exactly an integer

Float formats and codebooks use tables: a code is the number of rounding boundaries below ``t``, and its value is
``levels[code]``.

Stochastic rounding uses counter-based random words of Philox4x32-10 (Salmon et al., SC 2011). Not every array library
has uint64, so the words are computed in int64: products of 32-bit words are split at 16 bits, and stay below 2**49.
"""

from itertools import pairwise
from math import prod
from typing import Any

import numpy as np

from detent.formats import FORMATS, Format
from detent.rounding import Rounding
from detent.spec import QuantSpec

__all__ = []

_WORD = 0xFFFFFFFF
_HALF = 0xFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10


def random_words(xp: Any, index: Any, seed: int, step: int) -> Any:
    """Return the first Philox word of each int64 ``index``; key = seed, counter = (index low, index high, step, 0)."""
    zero = xp.zeros_like(index)
    counter = (index & _WORD, index >> 32, zero + step, zero)
    key = (seed & _WORD, seed >> 32)
    for _ in range(_ROUNDS):
        high0, low0 = _multiply(counter[0], _MULTIPLIERS[0])
        high1, low1 = _multiply(counter[2], _MULTIPLIERS[1])
        counter = (high1 ^ counter[1] ^ key[0], low1, high0 ^ counter[3] ^ key[1], low0)
        key = ((key[0] + _WEYL[0]) & _WORD, (key[1] + _WEYL[1]) & _WORD)
    return counter[0]


def _multiply(word: Any, factor: int) -> tuple[Any, Any]:
    """Return the high and low words of a 32 x 32 bit product."""
    low = (word & _HALF) * factor
    high = (word >> 16) * factor + (low >> 16)
    return high >> 16, ((high & _HALF) << 16) | (low & _HALF)


def ratio(xp: Any, spec: QuantSpec, x: Any, s: Any) -> Any:
    """Return ``t``: x divided by the scale. Only integer formats may multiply by the reciprocal instead."""
    if spec.format.is_integer and spec.convention.division == "reciprocal":
        return xp.multiply(x, xp.divide(xp.ones_like(s), s))
    return xp.divide(x, s)


def round_with(xp: Any, rounding: Rounding, t: Any, step: int) -> Any:
    """Round to integers, which are returned as floats; infinities and NaN stay unchanged."""
    if rounding.kind == "half_even":
        return xp.round(t)
    if rounding.kind == "floor":
        return xp.floor(t)
    magnitude = xp.abs(t)
    whole = xp.floor(magnitude)
    fraction = magnitude - whole  # exact, because both are multiples of the magnitude's ulp
    if rounding.kind == "half_away":
        nearest = whole + xp.astype(fraction >= 0.5, t.dtype)
        return xp.where(t < 0, -nearest, nearest)
    threshold = xp.reshape(_thresholds(xp, t, rounding.seed, step), t.shape)
    # Round up from floor(t) where threshold < t - floor(t). For t < 0, the right side is 1 - fraction, which may be
    # inexact. Therefore, compare fraction < 1 - threshold, which is exact.
    up = xp.where(t < 0, (fraction > 0) & (fraction < 1.0 - threshold), threshold < fraction)
    return xp.floor(t) + xp.astype(up, t.dtype)


def _thresholds(xp: Any, t: Any, seed: int, step: int) -> Any:
    """Return a 24-bit random fraction in [0, 1) for each element, from the element's position in C order."""
    index = xp.arange(prod(t.shape), dtype=xp.int64, device=t.device)
    words = random_words(xp, index, seed, step) >> 8
    return xp.astype(words, t.dtype) * 2.0**-24


def unclamped(xp: Any, spec: QuantSpec, x: Any, s: Any, z: Any, step: int) -> Any:
    """Return ``u``: the integer code before clamping, as a float."""
    t = ratio(xp, spec, x, s)
    if spec.convention.zero_point == "before_round":
        return round_with(xp, spec.rounding, t + z, step)
    return round_with(xp, spec.rounding, t, step) + z


def in_range(spec: QuantSpec, value: Any, *, exclusive: bool = False) -> Any:
    """Return a mask of the values in range; values are unclamped codes (integer formats) or ratios (other formats)."""
    if exclusive:
        return (value > spec.qmin) & (value < spec.qmax)
    return (value >= spec.qmin) & (value <= spec.qmax)


def boundaries(form: Format, dtype: str) -> tuple[float, ...]:
    """Return the rounding boundaries; the code of a number t of this dtype is the number of boundaries below t.

    Codebooks round a midpoint down. Float formats round it to the even code, so above an odd code the boundary is the
    number just below the midpoint. A midpoint that the dtype cannot represent is replaced by the next lower number.
    """
    cached = _BOUNDARIES.get((form.name, dtype))
    return _find_boundaries(form, dtype) if cached is None else cached


def _find_boundaries(form: Format, dtype: str) -> tuple[float, ...]:
    bounds = []
    for code, (low, high) in enumerate(pairwise(form.finite_levels)):
        middle = (low + high) / 2
        bound = np.dtype(dtype).type(middle)
        above = float(bound) > middle
        ties_up = form.kind == "float" and code % 2 == 1
        bounds.append(float(np.nextafter(bound, bound.dtype.type(-np.inf))) if above or ties_up else float(bound))
    return tuple(bounds)


# Tables for encoding and decoding, computed once.
_TABULATED = tuple(form for form in FORMATS.values() if not form.is_integer)
_BOUNDARIES = {
    (form.name, dtype): _find_boundaries(form, dtype) for form in _TABULATED for dtype in ("float32", "float64")
}
_LEVELS = {form.name: form.levels for form in _TABULATED}


def encode(xp: Any, form: Format, t: Any) -> Any:
    """Return the int64 code of each ratio, including a sign bit; large ratios saturate, NaN gives an arbitrary code."""
    is_float = form.kind == "float"
    bounds = boundaries(form, "float64" if t.dtype == xp.float64 else "float32")
    flat = xp.reshape(xp.abs(t) if is_float else t, (-1,))
    code = xp.searchsorted(xp.asarray(bounds, dtype=t.dtype, device=t.device), flat, side="left")
    code = xp.reshape(xp.astype(code, xp.int64), t.shape)
    if not is_float:
        return code
    return code + xp.astype(xp.signbit(t), xp.int64) * (1 << (form.bits - 1))


def level_values(xp: Any, form: Format, code: Any, dtype: Any) -> Any:
    """Return the value that each code represents at scale 1, in a float or codebook format."""
    levels = xp.asarray(_LEVELS.get(form.name) or form.levels, dtype=dtype, device=code.device)
    flat = xp.reshape(xp.astype(code, xp.int64), (-1,))
    return xp.reshape(xp.take(levels, flat, axis=0), code.shape)


def code_values(xp: Any, spec: QuantSpec, x: Any, s: Any, z: Any, step: int) -> Any:
    """Return each element's quantized value at scale 1 (for integers, code minus zero point); NaN stays NaN."""
    if spec.format.is_integer:
        u = unclamped(xp, spec, x, s, z, step)
        return xp.minimum(xp.maximum(u, xp.full_like(u, spec.qmin)), xp.full_like(u, spec.qmax)) - z
    t = ratio(xp, spec, x, s)
    values = level_values(xp, spec.format, encode(xp, spec.format, xp.where(xp.isnan(t), xp.zeros_like(t), t)), t.dtype)
    return xp.where(xp.isnan(t), t, values)
