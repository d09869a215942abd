"""Codes of `quantize`, and values, compared with the exact oracle, for every combination in docs/numerics.md.

Checked here, on inputs next to ties and on special values (infinities, zeros of both signs, subnormals, the
largest floats): every convention x rounding x granularity x signedness x {2, 3, 4, 8, 16} bits, symmetric
and affine, gives the oracle's codes, and `fake_quantize` and `dequantize` give its floats bit for bit; so do
float16, bfloat16 and float64 inputs; and stochastic rounding compares its random word with the exact fraction.
"""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

import detent as dt

from . import exact, oracle
from .grid import FORMATS, GRANULARITIES, ROUNDINGS, STORAGE, Cell, Sets, assert_same, cells
from .philox import word
from .ties import around_ties, neighbors


def _check(cell: Cell) -> None:
    codes = dt.quantize(cell.x, cell.params, step=cell.step).codes
    assert_same(codes, cell.codes, cell)


@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("rounding", ROUNDINGS)
@pytest.mark.parametrize("convention", oracle.ROWS)
def test_codes_and_values(convention: str, rounding: str, granularity: str) -> None:
    """All formats in one test: codes, fake-quantized and dequantized values of a cell share the oracle's results."""
    for fmt in FORMATS:
        for cell in cells(convention, rounding, granularity, fmt):
            _check(cell)
            assert_same(dt.fake_quantize(cell.x, cell.params, step=cell.step), cell.values, cell)
            if rounding == "half_even":
                assert_same(dt.dequantize(cell.codes.astype(STORAGE[fmt]), cell.params), cell.values, cell)


@pytest.mark.slow
@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("rounding", ROUNDINGS)
@pytest.mark.parametrize("convention", oracle.ROWS)
def test_codes_on_many_more_points(convention: str, rounding: str, fmt: str) -> None:
    for granularity in GRANULARITIES:
        for cell in cells(convention, rounding, granularity, fmt, draws=12):
            _check(cell)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64"])
@pytest.mark.parametrize("rounding", ROUNDINGS)
@pytest.mark.parametrize("convention", oracle.ROWS)
def test_codes_and_values_of_other_dtypes(convention: str, rounding: str, dtype: str) -> None:
    for granularity, fmt in product(["tensor", "axis-1", "group_ragged"], ["int4", "uint8", "int16"]):
        for cell in cells(convention, rounding, granularity, fmt, dtype=dtype):
            _check(cell)
            if rounding == oracle.ROWS[convention].rounding:
                assert_same(dt.fake_quantize(cell.x, cell.params, step=cell.step), cell.values, cell)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("convention", oracle.ROWS)
def test_codes_of_narrow_inputs_whose_scale_makes_a_tie(convention: str, dtype: str) -> None:
    """Few float16 numbers are next to a tie of a given scale, so the scale is chosen for the number."""
    rng = np.random.default_rng(11)
    x = rng.normal(size=300).astype(dtype)
    k = rng.integers(-130, 130, size=300)
    scale = neighbors(np.abs(x.astype(np.float64) / (k + 0.5)).astype(np.float32)).ravel()
    x = np.repeat(x, 3)
    sets = Sets(x.shape, dt.PerAxis(0), x.shape, ("axis", 0))
    spec = dt.QuantSpec("int8", sets.granularity, symmetric=False, convention=convention)
    zero = rng.choice([-128, -3, 0, 2, 127], size=x.shape).astype(np.int32)
    _check(Cell(spec, oracle.ROWS[convention], sets, x, scale, zero, step=0))


@pytest.mark.parametrize("scale", [2.0**-126, 2.0**-125.5, 3e38, 2.0**126, 1.0], ids=str)
@pytest.mark.parametrize("convention", ["onnx", "torch", "oxicuda", "baracuda_token"])
def test_codes_with_extreme_scales(convention: str, scale: float) -> None:
    """The reciprocal of a huge scale is subnormal and must not be flushed to zero; tiny scales overflow x / s."""
    stored = np.float32(scale)
    info = np.finfo(np.float32)
    ties = around_ties(stored, np.arange(-9, 9)).ravel()
    tiny = np.ldexp(np.float32(1), np.arange(-149, -100)).astype(np.float32)
    x = np.concatenate([ties[np.isfinite(ties)], tiny, -tiny, [info.max, info.min, np.inf, -np.inf]]).astype(np.float32)
    sets = Sets(x.shape, dt.PerTensor(), (), ("tensor",))
    for zero in (-8, 0, 5):
        spec = dt.QuantSpec("int4", symmetric=False, convention=convention)
        _check(Cell(spec, oracle.ROWS[convention], sets, x, np.array(stored), np.array(zero, np.int32), step=0))


def test_a_float64_scale_is_rounded_to_float32_for_float32_data() -> None:
    scale = np.array(0.0123, dtype=np.float64)
    x = around_ties(np.float32(scale), np.arange(-128, 128)).ravel()
    sets = Sets(x.shape, dt.PerTensor(), (), ("tensor",))
    spec = dt.QuantSpec("int8", symmetric=False)
    _check(Cell(spec, oracle.ROWS["onnx"], sets, x, scale, np.array(1, np.int32), step=0))


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("convention", ["onnx", "torch", "oxicuda"])
def test_stochastic_rounding_compares_with_the_exact_fraction(convention: str, dtype: str) -> None:
    """Points where the fraction of t equals the random word, and their neighbors.

    Just below zero, t's type cannot represent the fraction 1 - |t|: a rounded difference gives wrong codes.
    """
    seed, size = 5, 600
    w = np.array([word(seed, i, 0) for i in range(size)], dtype=np.float64)
    steps = np.where(np.arange(size) % 2 == 0, 0, -1) + w * 2.0**-24
    steps[::5] = -(2.0**-24) * (1 + np.arange(size)[::5] % 8)
    x = neighbors((steps * 2.0**-10).astype(dtype))[np.arange(size), np.arange(size) % 3]
    sets = Sets(x.shape, dt.PerTensor(), (), ("tensor",))
    spec = dt.QuantSpec("int8", symmetric=False, convention=convention, rounding=dt.rounding.stochastic(seed))
    scale = np.array(2.0**-10, dtype=dtype)
    _check(Cell(spec, oracle.ROWS[convention], sets, x, scale, np.array(0, np.int32), step=0))


def test_a_fraction_that_float32_cannot_hold_still_rounds_exactly() -> None:
    """An even word w and a t with the fraction (w + 1/2) * 2^-24: above w, but its fl() ties to w itself."""
    index, w = next((i, word(0, i, 0)) for i in range(100) if word(0, i, 0) % 2 == 0 and word(0, i, 0) > 1 << 23)
    t = (w + 0.5) * 2.0**-24 - 1.0
    assert exact.FLOAT32.round(t) == t
    assert exact.FLOAT32.round(t + 1.0) == w * 2.0**-24
    spec = dt.QuantSpec("int8", symmetric=False, rounding=dt.rounding.stochastic(0))
    params = dt.QuantParams(spec, scale=np.float32(1), zero_point=0)
    assert dt.quantize(np.full(index + 1, t, dtype=np.float32), params).codes[index] == 0


@pytest.mark.parametrize("rounding", ROUNDINGS)
@pytest.mark.parametrize("convention", oracle.ROWS)
def test_infinities_and_the_largest_floats_saturate_to_their_own_end(convention: str, rounding: str) -> None:
    top = np.finfo(np.float32).max
    x = np.array([np.inf, top, -np.inf, -top], dtype=np.float32)
    rule = "stochastic(1)" if rounding == "stochastic" else rounding
    spec = dt.QuantSpec("int16", symmetric=False, convention=convention, rounding=rule)
    for zero in (-32768, -1, 0, 32767):
        codes = dt.quantize(x, dt.QuantParams(spec, scale=1e-3, zero_point=zero)).codes
        assert codes.tolist() == [32767, 32767, -32768, -32768]
