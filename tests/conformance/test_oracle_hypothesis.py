"""Codes and values compared with the exact oracle on inputs from Hypothesis.

Checked here: for any float32 or float64 number, any normal scale and any zero point, every convention and
rounding gives the oracle's code and value.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

import detent as dt

from . import oracle
from .exact import FORMATS as FLOATS
from .grid import BITS, ROUNDINGS, Cell, Sets, assert_same
from .ranges import code_range


@st.composite
def _cells(draw: st.DrawFn, convention: str, rounding: str) -> Cell:
    dtype = draw(st.sampled_from(["float32", "float64"]))
    width = 32 if dtype == "float32" else 64
    smallest = FLOATS[dtype].smallest_normal
    scale = draw(
        st.one_of(st.floats(2.0**-30, 2.0**30, width=width), st.floats(smallest, width=width, allow_infinity=False))
    )
    steps = st.builds(lambda k, half: (k + half) * scale, st.integers(-70000, 70000), st.sampled_from([0.0, 0.5, 0.25]))
    anything = st.floats(allow_nan=False, width=width)
    values = draw(st.lists(st.one_of(anything, steps), min_size=1, max_size=12))
    nudge = draw(st.sampled_from([None, math.inf, -math.inf]))
    with np.errstate(over="ignore", under="ignore"):
        x = np.array(values, dtype=np.float64).astype(dtype)
        x = x if nudge is None else np.nextafter(x, np.array(nudge, dtype))
    signed = draw(st.booleans())
    bits = draw(st.sampled_from(BITS))
    symmetric = draw(st.booleans())
    row = oracle.ROWS[convention]
    qmin, qmax = code_range(bits, signed, symmetric, row.narrow)
    middle = 0 if signed else (qmin + qmax + 1) // 2
    zero = middle if symmetric else draw(st.integers(qmin, qmax))
    rule = f"stochastic({draw(st.integers(0, 2**64 - 1))})" if rounding == "stochastic" else rounding
    spec = dt.QuantSpec(f"{'' if signed else 'u'}int{bits}", symmetric=symmetric, convention=convention, rounding=rule)
    sets = Sets(x.shape, dt.PerTensor(), (), ("tensor",))
    step = draw(st.integers(0, 2**32 - 1))
    return Cell(spec, row, sets, x, np.array(scale, dtype), np.array(zero, np.int32), step)


@pytest.mark.parametrize("rounding", ROUNDINGS)
@pytest.mark.parametrize("convention", oracle.ROWS)
def test_codes_and_values_of_anything(convention: str, rounding: str) -> None:
    @settings(max_examples=60, phases=[Phase.generate], database=None)
    @given(cell=_cells(convention, rounding))
    def check(cell: Cell) -> None:
        params = cell.params
        codes = dt.quantize(cell.x, params, step=cell.step).codes
        assert_same(codes, cell.codes, cell)
        assert_same(dt.fake_quantize(cell.x, params, step=cell.step), cell.values, cell)

    check()
