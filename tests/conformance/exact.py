"""Binary floating-point formats and one correct rounding of a rational number to each of them.

`Binary.round(v)` is the contract's `fl(v)`: the nearest representable number, ties to the even significand,
gradual underflow (no flush to zero), overflow to infinity. Only integer arithmetic is used, so the result
is exact by construction; `test_exact.py` compares it with the hardware anyway. Results are Python floats,
which hold every value of every format here without loss.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction

__all__ = ["BFLOAT16", "E2M1", "E4M3", "E5M2", "FLOAT16", "FLOAT32", "FLOAT64", "FORMATS", "Binary"]


@dataclass(frozen=True)
class Binary:
    """A binary format: `precision` significand bits (the hidden one included), exponents `emin..emax`."""

    name: str
    precision: int
    emin: int
    emax: int

    @property
    def smallest_normal(self) -> float:
        """The smallest positive number with a full significand."""
        return math.ldexp(1.0, self.emin)

    @property
    def largest(self) -> float:
        """The largest finite number, if the top exponent has all its significands."""
        return math.ldexp(2.0 - math.ldexp(1.0, 1 - self.precision), self.emax)

    def round(self, value: Fraction | float) -> float:
        """Round once to this format, half to even; infinite floats and NaN are returned as they are."""
        if isinstance(value, float):
            if not math.isfinite(value) or value == 0.0:
                return value
            value = Fraction(value)
        numerator, denominator = value.numerator, value.denominator
        if numerator == 0:
            return 0.0
        sign = -1.0 if numerator < 0 else 1.0
        numerator = abs(numerator)
        ulp = max(_exponent(numerator, denominator), self.emin) - (self.precision - 1)
        if ulp < 0:
            numerator <<= -ulp
        else:
            denominator <<= ulp
        significand, rest = divmod(numerator, denominator)
        if 2 * rest > denominator or (2 * rest == denominator and significand & 1):
            significand += 1
        if significand.bit_length() + ulp - 1 > self.emax:
            return sign * math.inf
        return sign * math.ldexp(significand, ulp)


def _exponent(numerator: int, denominator: int) -> int:
    """Return e with 2^e <= numerator/denominator < 2^(e+1)."""
    e = numerator.bit_length() - denominator.bit_length()
    below = (numerator << -e) < denominator if e < 0 else numerator < (denominator << e)
    return e - 1 if below else e


FLOAT16 = Binary("float16", 11, -14, 15)
BFLOAT16 = Binary("bfloat16", 8, -126, 127)
FLOAT32 = Binary("float32", 24, -126, 127)
FLOAT64 = Binary("float64", 53, -1022, 1023)
E4M3 = Binary("float8_e4m3fn", 4, -6, 8)
E5M2 = Binary("float8_e5m2", 3, -14, 15)
E2M1 = Binary("float4_e2m1fn", 2, 0, 2)

FORMATS = {f.name: f for f in (FLOAT16, BFLOAT16, FLOAT32, FLOAT64, E4M3, E5M2, E2M1)}
