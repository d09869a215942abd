"""Gradient masks of the straight-through estimators compared with the exact oracle.

Checked here: the clipped masks (on codes and on values, bounds inclusive and exclusive) of every convention,
rounding and granularity select exactly the oracle's elements; each convention's default estimator is its
own row of the table; masks select instead of multiplying, so infinite gradients give no NaN; `HardTanh` rounds
each operation once; the raw `quantize` and `dequantize` gradients are g / s and g * s.
"""

from __future__ import annotations

from fractions import Fraction
from itertools import product

import numpy as np
import pytest

import detent as dt

from . import oracle
from .exact import FLOAT32, FORMATS
from .grid import GRANULARITIES, ROUNDINGS, Cell, assert_same, cells

MASKS = [(on, bounds) for on in ("code", "value") for bounds in ("inclusive", "exclusive")]


def _gradient(cell: Cell) -> np.ndarray:
    """Non-zero gradients with many significant bits, some of them infinite."""
    g = np.random.default_rng(3).normal(size=cell.x.shape)
    g[np.abs(g) < 0.05] = np.inf
    return g.astype(cell.x.dtype)


def _masked(cell: Cell, g: np.ndarray, passes: np.ndarray) -> np.ndarray:
    return np.where(passes, g, np.zeros_like(g))


@pytest.mark.parametrize("rounding", ROUNDINGS)
@pytest.mark.parametrize(("on", "bounds"), MASKS)
@pytest.mark.parametrize("convention", oracle.ROWS)
def test_clipped(convention: str, on: str, bounds: str, rounding: str) -> None:
    for granularity, fmt in product(GRANULARITIES, ("int3", "uint8")):
        for cell in cells(convention, rounding, granularity, fmt):
            g = _gradient(cell)
            ste = dt.ste.Clipped(on=on, bounds=bounds)
            got = dt.fake_quantize_backward(g, cell.x, cell.params, ste=ste, step=cell.step)
            assert_same(got, _masked(cell, g, cell.mask(on, bounds)), cell)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64"])
@pytest.mark.parametrize(("on", "bounds"), MASKS)
@pytest.mark.parametrize("convention", oracle.ROWS)
def test_clipped_of_other_dtypes(convention: str, on: str, bounds: str, dtype: str) -> None:
    for cell in cells(convention, "half_even", "axis-1", "int4", dtype=dtype):
        g = _gradient(cell)
        got = dt.fake_quantize_backward(
            g, cell.x, cell.params, ste=dt.ste.Clipped(on=on, bounds=bounds), step=cell.step
        )
        assert_same(got, _masked(cell, g, cell.mask(on, bounds)), cell)


@pytest.mark.parametrize("convention", oracle.ROWS)
def test_the_default_estimator_is_the_conventions(convention: str) -> None:
    row = oracle.ROWS[convention]
    for fmt in ("int4", "uint4", "int8"):
        for cell in cells(convention, row.rounding, "axis0", fmt):
            g = _gradient(cell)
            passes = np.ones(g.shape, dtype=bool) if row.mask is None else cell.mask(*row.mask)
            got = dt.fake_quantize_backward(g, cell.x, cell.params, step=cell.step)
            assert_same(got, _masked(cell, g, passes), cell)


@pytest.mark.parametrize("convention", oracle.ROWS)
def test_the_gradient_of_nan_is_zero_but_for_identity(convention: str) -> None:
    x = np.array([np.nan, 0.0], dtype=np.float32)
    g = np.array([2.0, 3.0], dtype=np.float32)
    params = dt.QuantParams(dt.QuantSpec("int8", convention=convention), scale=np.float32(0.1))
    for ste in (dt.ste.Clipped(), dt.ste.Clipped(on="value"), dt.ste.HardTanh(), dt.ste.Tanh()):
        assert dt.fake_quantize_backward(g, x, params, ste=ste)[0] == 0.0
    assert dt.fake_quantize_backward(g, x, params, ste=dt.ste.Identity()).tolist() == [2.0, 3.0]


@pytest.mark.parametrize("granularity", ["tensor", "token", "block_ragged"])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "float64"])
@pytest.mark.parametrize("fmt", ["int4", "uint8"])
def test_hard_tanh(fmt: str, dtype: str, granularity: str) -> None:
    for cell in cells("onnx", "half_even", granularity, fmt, dtype=dtype):
        finite = np.isfinite(cell.x.astype(np.float64))
        g = np.random.default_rng(4).normal(size=cell.x.shape).astype(dtype)
        low, high, out = int(cell.spec.qmin), int(cell.spec.qmax), FORMATS[dtype]
        expected = [
            oracle.hard_tanh(float(gi), x, s, z, low, high, cell.fl, out) if ok else 0.0
            for gi, ok, (x, s, z, _) in zip(g.ravel(), finite.ravel(), cell.elements(), strict=True)
        ]
        got = dt.fake_quantize_backward(g, cell.x, cell.params, ste=dt.ste.HardTanh())
        assert np.array_equal(got.astype(np.float64).ravel(), expected)


@pytest.mark.parametrize("convention", ["onnx", "torch", "baracuda_token"])
def test_raw_quantize_has_the_gradient_over_the_scale_under_the_mask(convention: str) -> None:
    mask = oracle.ROWS[convention].mask
    assert mask is not None
    for cell in cells(convention, "half_even", "axis0", "uint4"):
        g = np.random.default_rng(5).normal(size=cell.x.shape).astype(np.float32)
        quotients = [
            FLOAT32.round(Fraction(float(gi)) / Fraction(s))
            for gi, (_, s, _, _) in zip(g.ravel(), cell.elements(), strict=True)
        ]
        expected = _masked(cell, np.array(quotients).astype(np.float32).reshape(g.shape), cell.mask(*mask))
        assert_same(dt.quantize_backward(g, cell.x, cell.params), expected, cell)


def test_raw_dequantize_has_the_gradient_times_the_scale() -> None:
    for cell in cells("onnx", "half_even", "group_ragged", "uint4"):
        g = np.random.default_rng(6).normal(size=cell.x.shape).astype(np.float32)
        products = [
            FLOAT32.round(Fraction(float(gi)) * Fraction(s))
            for gi, (_, s, _, _) in zip(g.ravel(), cell.elements(), strict=True)
        ]
        expected = np.array(products).astype(np.float32).reshape(g.shape)
        assert_same(dt.dequantize_backward(g, cell.params), expected, cell)
