"""The exact oracle: quantize, dequantize and the gradient masks of one number, in rational arithmetic.

    t = fl(x / s)  or  fl(x * fl(1 / s))          `fl` is `Binary.round` of the compute type
    u = round(t) + z  or  round(fl(t + z))
    q = min(max(u, qmin), qmax)
    y = fl((q - z) * s), then once more if the output is narrower; zero is +0.0

Everything between two `fl` is exact (docs/numerics.md, sections 2, 3 and 5). Numbers are Python floats,
which hold float16, bfloat16, float32 and float64 values without loss; codes are Python integers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache

from .exact import BFLOAT16, FLOAT16, FLOAT32, FLOAT64, Binary

__all__ = [
    "ROWS",
    "Row",
    "compute_type",
    "dequantize",
    "hard_tanh",
    "mask",
    "quantize",
    "ratio",
    "round_int",
    "unclamped",
]


@dataclass(frozen=True)
class Row:
    """One row of the table of conventions, copied by hand from docs/numerics.md."""

    division: str
    rounding: str
    zero_point: str
    symmetric_scale: str
    narrow: bool
    include_zero: bool
    zero_range: tuple[str, float]
    mask: tuple[str, str] | None


_CODE, _STRICT, _VALUE = ("code", "inclusive"), ("code", "exclusive"), ("value", "inclusive")
_UNIT, _UNIT_QMIN, _TORCH_EPS = ("unit", 0.0), ("unit_qmin", 0.0), ("eps", 2.0**-23)

ROWS: dict[str, Row] = {
    "onnx": Row("divide", "half_even", "after", "qmax", True, True, _UNIT, _CODE),
    "torch": Row("reciprocal", "half_even", "after", "half_span", False, True, _TORCH_EPS, _CODE),
    "torch_fused": Row("reciprocal", "half_even", "after", "tight", False, True, _TORCH_EPS, _CODE),
    "compressed_tensors": Row("divide", "half_even", "before", "half_span", False, True, _TORCH_EPS, None),
    "oxicuda": Row("divide", "half_away", "before", "qmax", False, False, ("floor", 1e-8), _VALUE),
    "entrenar": Row("divide", "half_away", "before", "qmax", True, False, ("eps", 1e-10), None),
    "torsh": Row("divide", "half_away", "after", "half_span", False, False, _UNIT_QMIN, None),
    "rlx": Row("divide", "half_away", "after", "qmax", True, True, ("eps", 1e-12), None),
    "baracuda": Row("reciprocal", "half_even", "after", "qmax", False, True, _UNIT, _CODE),
    "baracuda_channel": Row("divide", "half_even", "after", "qmax", False, True, _UNIT, _CODE),
    "baracuda_token": Row("divide", "half_even", "before", "qmax", False, True, _UNIT, _STRICT),
}


def compute_type(dtype: str) -> Binary:
    """Compute type: float64 for float64 data, float32 for narrower data."""
    return FLOAT64 if dtype == "float64" else FLOAT32


@lru_cache(maxsize=1 << 18)
def ratio(x: float, s: float, division: str, fl: Binary) -> float:
    """t: the number of steps in x, rounded once (divide) or twice (reciprocal)."""
    if math.isinf(x):
        return x
    if division == "divide":
        return fl.round(Fraction(x) / Fraction(s))
    r = fl.round(1 / Fraction(s))
    return fl.round(Fraction(x) * Fraction(r))


def round_int(t: float, rounding: str, word: int = 0) -> int | float:
    """Round to an integer; infinities pass. `word` is the 24-bit random word of stochastic rounding."""
    if math.isinf(t):
        return t
    exact = Fraction(t)
    floor = exact.numerator // exact.denominator
    rest = exact - floor
    half = Fraction(1, 2)
    match rounding:
        case "floor":
            up = False
        case "stochastic":
            up = Fraction(word, 1 << 24) < rest
        case "half_even":
            up = rest > half or (rest == half and floor % 2 == 1)
        case "half_away":
            up = rest > half or (rest == half and floor >= 0)
        case _:
            raise ValueError(rounding)
    return floor + up


def unclamped(x: float, s: float, z: int, row: Row, rounding: str, fl: Binary, word: int = 0) -> int | float:
    """u: the code before the clamp, an integer or an infinity."""
    t = ratio(x, s, row.division, fl)
    if math.isinf(t):
        return t
    if row.zero_point == "before":
        return round_int(fl.round(Fraction(t) + z), rounding, word)
    return round_int(t, rounding, word) + z


def quantize(
    x: float, s: float, z: int, qmin: int, qmax: int, row: Row, rounding: str, fl: Binary, word: int = 0
) -> int:
    """q: the code of one finite or infinite number."""
    return int(min(max(unclamped(x, s, z, row, rounding, fl, word), qmin), qmax))


@lru_cache(maxsize=1 << 18)
def dequantize(steps: int, s: float, fl: Binary, out: Binary) -> float:
    """y of q - z = `steps`, rounded to the compute type and then to the output type; never -0.0."""
    y = fl.round(steps * Fraction(s))
    if out in (FLOAT16, BFLOAT16):
        y = out.round(y)
    return y + 0.0


def mask(
    x: float,
    s: float,
    z: int,
    qmin: int,
    qmax: int,
    row: Row,
    rounding: str,
    fl: Binary,
    on: str,
    bounds: str,
    word: int = 0,
) -> bool:
    """Whether the clipped straight-through estimator passes the gradient of x; False for NaN."""
    if math.isnan(x):
        return False
    value: int | float
    if on == "code":
        value, low, high = unclamped(x, s, z, row, rounding, fl, word), float(qmin), float(qmax)
    else:
        value, low, high = x, fl.round((qmin - z) * Fraction(s)), fl.round((qmax - z) * Fraction(s))
    return low <= value <= high if bounds == "inclusive" else low < value < high


def hard_tanh(g: float, x: float, s: float, z: int, qmin: int, qmax: int, fl: Binary, out: Binary) -> float:
    """g * max(0, 1 - |v|), v = (x - c) / h, each operation rounded once; for finite x and g."""
    c = fl.round(FLOAT64.round(Fraction(qmin + qmax - 2 * z, 2) * Fraction(s)))
    h = fl.round(FLOAT64.round(Fraction(qmax - qmin, 2) * Fraction(s)))
    v = ratio(fl.round(Fraction(x) - Fraction(c)), h, "divide", fl)
    if math.isinf(v):
        return 0.0
    slope = max(0.0, fl.round(1 - abs(Fraction(v))))
    return out.round(fl.round(Fraction(g) * Fraction(slope)))
