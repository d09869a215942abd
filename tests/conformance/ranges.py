"""The exact oracle of scales and zero points: docs/numerics.md, section 4, step by step.

The contract computes in float64 and stores in the scale's type, so every operation here is exact and
followed by one rounding to float64 (`_f64`), and the result is rounded once more to the stored type. The
zero point uses the stored scale.
"""

from __future__ import annotations

from fractions import Fraction

from .exact import FLOAT64, Binary
from .oracle import Row, round_int

__all__ = ["code_range", "scale_and_zero_point"]


def code_range(bits: int, signed: bool, symmetric: bool, narrow: bool) -> tuple[int, int]:
    """(qmin, qmax) of an integer format; only signed symmetric formats have the narrow range."""
    if not signed:
        return 0, 2**bits - 1
    top = 2 ** (bits - 1) - 1
    return (-top if symmetric and narrow else -top - 1), top


def _f64(value: Fraction) -> Fraction:
    return Fraction(FLOAT64.round(value))


def _stored(scale: Fraction, to: Binary) -> float:
    return max(to.round(scale), to.smallest_normal)


def scale_and_zero_point(
    lo: float, hi: float, qmin: int, qmax: int, *, signed: bool, symmetric: bool, row: Row, to: Binary
) -> tuple[float, int]:
    """(s, z) of the finite range lo <= hi, s in the type `to`."""
    low, high = Fraction(lo), Fraction(hi)
    rule, epsilon = row.zero_range
    floor = Fraction(epsilon)
    if symmetric:
        z = 0 if signed else (qmin + qmax + 1) // 2
        s = _symmetric(low, high, qmin, qmax, z, row, floor if rule == "floor" else Fraction(0))
    else:
        if row.include_zero:
            low, high = min(low, Fraction(0)), max(high, Fraction(0))
        n = qmax - qmin
        s = _f64(_f64(high / n) - _f64(low / n))
        if rule == "floor":
            s = max(s, _f64(floor / n))
    if rule == "eps":
        s = max(s, floor)
    if s == 0:
        unit_zero = {"unit": min(max(0, qmin), qmax), "unit_qmin": qmin}[rule]
        return 1.0, z if symmetric else unit_zero
    stored = _stored(s, to)
    if not symmetric:
        exact = _f64(qmin - _f64(low / Fraction(stored)))
        nearest = round_int(float(exact), "half_away" if row.rounding == "half_away" else "half_even")
        z = int(min(max(nearest, qmin), qmax))
    return stored, z


def _symmetric(low: Fraction, high: Fraction, qmin: int, qmax: int, z: int, row: Row, floor: Fraction) -> Fraction:
    a = max(abs(low), abs(high), floor)
    match row.symmetric_scale:
        case "qmax":
            return _f64(a / (qmax - z))
        case "half_span":
            return _f64(a / Fraction(qmax - qmin, 2))
        case "tight":
            terms = [_f64(end / d) for end, d in ((low, qmin - z), (high, qmax - z)) if d != 0]
            return max(*terms, Fraction(0))
    raise ValueError(row.symmetric_scale)
