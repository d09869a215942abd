"""Scales and zero points of `QuantParams.from_range` and `from_data` compared with the exact oracle.

Checked here: for every convention, and so for every symmetric rule, zero-range rule and rounding of the zero
point, scales equal the oracle's bit for bit in float32 and float64, and zero points are equal; on ordinary,
one-sided, zero, tiny and huge ranges and on ranges whose zero point is a tie.
"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

import detent as dt

from . import oracle
from .exact import FORMATS as FLOATS
from .grid import FORMATS, GRANULARITIES
from .ranges import code_range, scale_and_zero_point

DTYPES = ("float32", "float64")
ENDS = st.floats(-(2.0**127), 2.0**127, width=32)
BIT_WIDTHS = {name: FORMATS[name] for name in ("int2", "uint2", "int4", "uint4", "int8", "uint8", "int16", "uint16")}

RANGES = [
    (-1.0, 1.0), (-1.0, 2.0), (-0.3, 0.7), (0.0, 5.0), (-5.0, 0.0), (5.0, 10.0), (-10.0, -5.0),
    (0.0, 0.0), (5.0, 5.0), (-5.0, -5.0), (0.0, 1e-45), (-1e-45, 1e-45), (-1e-40, 1e-39),
    (-3e38, 3e38), (0.0, 3.4e38), (-1e-9, 1e-9), (0.0, 1e-8), (0.0, 9e-9), (-1e-12, 1e-11), (-1e-7, 1e-7),
    (-127.5, 127.5), (-0.5, 254.5), (-1.5, 253.5), (-2.5, 252.5), (-7.5, 7.5),
]  # fmt: skip
"""Ordinary, one-sided, degenerate and extreme ranges; those that end in .5 make zero points ties."""


def _compare(lo: float, hi: float, fmt: str, symmetric: bool, convention: str, dtype: str) -> None:
    bits, signed = FORMATS[fmt]
    row = oracle.ROWS[convention]
    qmin, qmax = code_range(bits, signed, symmetric, row.narrow)
    spec = dt.QuantSpec(fmt, symmetric=symmetric, convention=convention)
    params = dt.QuantParams.from_range(spec, lo, hi, dtype=dtype)
    scale, zero = scale_and_zero_point(
        lo, hi, qmin, qmax, signed=signed, symmetric=symmetric, row=row, to=FLOATS[dtype]
    )
    assert params.scale.dtype == dtype
    assert (float(params.scale).hex(), int(params.zero_point)) == (scale.hex(), zero)


@pytest.mark.parametrize("fmt", BIT_WIDTHS)
@pytest.mark.parametrize("symmetric", [True, False], ids=["symmetric", "affine"])
@pytest.mark.parametrize("convention", oracle.ROWS)
def test_scale_and_zero_point_of_named_ranges(convention: str, symmetric: bool, fmt: str) -> None:
    for lo, hi in RANGES:
        for dtype in DTYPES:
            _compare(lo, hi, fmt, symmetric, convention, dtype)


@pytest.mark.parametrize("convention", oracle.ROWS)
@settings(max_examples=150, deadline=None)
@given(
    lo=ENDS,
    hi=ENDS,
    fmt=st.sampled_from(list(BIT_WIDTHS)),
    symmetric=st.booleans(),
    dtype=st.sampled_from(DTYPES),
)
def test_scale_and_zero_point_of_any_range(
    convention: str, lo: float, hi: float, fmt: str, symmetric: bool, dtype: str
) -> None:
    assume(lo <= hi)
    _compare(lo, hi, fmt, symmetric, convention, dtype)


@pytest.mark.parametrize("convention", ["onnx", "torch", "oxicuda", "torsh", "rlx"])
@settings(max_examples=200, deadline=None)
@given(steps=st.integers(-260, 20), exponent=st.integers(-20, 20))
@example(steps=-255, exponent=0)
def test_zero_points_that_are_ties(convention: str, steps: int, exponent: int) -> None:
    """lo = (steps + 1/2) * s for a power-of-two scale s: half-even and half-away zero points differ here."""
    s = 2.0**exponent
    lo = (steps + 0.5) * s
    for fmt in ("uint8", "int8"):
        _compare(lo, lo + 255 * s, fmt, False, convention, "float32")


@pytest.mark.parametrize(("qmin", "qmax"), [(-100, 50), (-128, 127), (-64, 64), (-1, 1), (0, 127), (-5, 100)])
@pytest.mark.parametrize("convention", oracle.ROWS)
def test_custom_code_ranges(convention: str, qmin: int, qmax: int) -> None:
    row = oracle.ROWS[convention]
    for symmetric in (True, False):
        spec = dt.QuantSpec("int8", symmetric=symmetric, convention=convention, qmin=qmin, qmax=qmax)
        for lo, hi in ((-1.0, 0.3), (-0.25, 4.0), (0.0, 1.0), (-7.0, 0.0), (-7.0, -2.0), (-3.0, -3.0), (2.0, 7.0)):
            params = dt.QuantParams.from_range(spec, lo, hi)
            expected = scale_and_zero_point(
                lo, hi, qmin, qmax, signed=True, symmetric=symmetric, row=row, to=FLOATS["float32"]
            )
            assert (float(params.scale), int(params.zero_point)) == expected


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("convention", ["onnx", "torch", "torch_fused", "oxicuda", "torsh"])
def test_from_data_takes_the_range_of_each_set(convention: str, granularity: str, dtype: str) -> None:
    sets, row = GRANULARITIES[granularity], oracle.ROWS[convention]
    rng = np.random.default_rng(8)
    x = (rng.normal(size=sets.shape) * 2.0 ** rng.integers(-8, 8, size=sets.shape)).astype(dtype)
    members: list[list[float]] = [[] for _ in range(sets.count)]
    for value, owner in zip(x.astype(np.float64).ravel().tolist(), sets.flat, strict=True):
        members[owner].append(value)
    stored = "float64" if dtype == "float64" else "float32"
    for fmt in ("int4", "uint8"):
        bits, signed = FORMATS[fmt]
        symmetric = signed
        qmin, qmax = code_range(bits, signed, symmetric, row.narrow)
        params = dt.QuantParams.from_data(dt.QuantSpec(fmt, sets.granularity, convention=convention), x)
        expected = [
            scale_and_zero_point(
                min(m), max(m), qmin, qmax, signed=signed, symmetric=symmetric, row=row, to=FLOATS[stored]
            )
            for m in members
        ]
        assert params.scale.shape == params.zero_point.shape == sets.scale_shape
        assert params.scale.dtype == stored
        assert list(zip(params.scale.ravel().tolist(), params.zero_point.ravel().tolist(), strict=True)) == expected
