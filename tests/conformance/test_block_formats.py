"""Block formats: the scale rules of mxfp4, mxfp8, mxfp8_e5m2 (OCP Microscaling v1.0) and nvfp4.

Checked here, against a second implementation in rational arithmetic: MX scales are 2^(floor(log2 amax) -
emax) with the exponent from frexp, clamped to [2^-126, 2^127], 1 for a block of zeros, and ml_dtypes'
float8_e8m0fnu holds them; nvfp4's tensor, block and effective scales are rounded where the rule rounds;
codes and values use the effective scale.
"""

from __future__ import annotations

import math
from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

import detent as dt

from .exact import E2M1, E4M3, E5M2, FLOAT32, FLOAT64, Binary

MX: dict[str, tuple[dt.QuantSpec, int, Binary, float]] = {
    "mxfp4": (dt.mxfp4, 2, E2M1, 6.0),
    "mxfp8": (dt.mxfp8, 8, E4M3, 448.0),
    "mxfp8_e5m2": (dt.mxfp8_e5m2, 15, E5M2, 57344.0),
}
"""Name: the spec, the exponent of the element's largest number, the element, that number."""


def _blocks(x: NDArray, size: int) -> list[list[float]]:
    """Blocks of a 2-D array along its last axis; the last block of each row is incomplete."""
    rows = x.astype(np.float64).tolist()
    return [row[i : i + size] for row in rows for i in range(0, len(row), size)]


def _data(seed: int, width: int) -> NDArray[np.float32]:
    """Blocks of very different sizes, some at powers of two, some zero, some subnormal, some huge."""
    rng = np.random.default_rng(seed)
    size = np.ldexp(1.0, rng.integers(-149, 120, size=(64, 1)))
    x = rng.normal(size=(64, width)) * size
    x[3] = 0.0
    x[4] = np.sign(x[4]) * size[4]
    x[5] = np.nextafter(np.float32(2.0), np.float32(0.0))
    x[6, 0] = np.finfo(np.float32).max
    x[7] = 2.0**-149
    return x.astype(np.float32)


def _mx_scale(block: list[float], emax: int) -> float:
    amax = max(abs(v) for v in block)
    if amax == 0:
        return 1.0
    exponent = math.frexp(amax)[1] - 1
    return math.ldexp(1.0, min(max(exponent - emax, -126), 127))


@pytest.mark.parametrize("name", MX)
def test_mx_scales_are_powers_of_two_from_the_largest_exponent(name: str) -> None:
    spec, emax, _, _ = MX[name]
    x = _data(1, 80)
    params = dt.QuantParams.from_data(spec, x)
    assert params.scale.shape == (64, 3)
    assert params.scale.dtype == np.float32
    assert params.scale.ravel().tolist() == [_mx_scale(block, emax) for block in _blocks(x, 32)]


@pytest.mark.parametrize("name", MX)
def test_mx_scales_of_float64_data_use_the_float64_exponent(name: str) -> None:
    """The float64 just below 2 rounds to 2 in float32, which has a larger exponent."""
    spec, emax, _, _ = MX[name]
    x = np.full((1, 32), np.nextafter(2.0, 0.0))
    assert float(dt.QuantParams.from_data(spec, x).scale[0, 0]) == 2.0**-emax


@pytest.mark.parametrize("name", MX)
def test_mx_scales_are_e8m0_numbers(name: str) -> None:
    scale = dt.QuantParams.from_data(MX[name][0], _data(2, 64)).scale
    assert np.array_equal(scale.astype(ml_dtypes.float8_e8m0fnu).astype(scale.dtype), scale)


@pytest.mark.parametrize("name", MX)
def test_mx_elements_are_divided_clamped_and_rounded_once(name: str) -> None:
    spec, emax, form, largest = MX[name]
    x = _data(3, 80)
    params = dt.QuantParams.from_data(spec, x)
    expected = []
    for block in _blocks(x, 32):
        s = _mx_scale(block, emax)
        ratios = [FLOAT32.round(Fraction(v) / Fraction(s)) for v in block]
        expected += [FLOAT32.round(Fraction(form.round(min(max(t, -largest), largest))) * Fraction(s)) for t in ratios]
    got = dt.fake_quantize(x, params)
    assert np.array_equal(got.ravel(), np.array(expected, dtype=np.float32))
    assert got.tobytes() == dt.quantize(x, params).dequantize().tobytes()


def _nvfp4_scales(x: NDArray) -> tuple[float, list[float], list[float]]:
    """(tensor scale, block scales, effective scales) by the rule."""
    blocks = _blocks(x, 16)
    amax = max(abs(v) for block in blocks for v in block)
    tensor = FLOAT32.round(FLOAT64.round(Fraction(amax) / (448 * 6)))
    scales = []
    for block in blocks:
        top = max(abs(v) for v in block)
        sixth = FLOAT64.round(Fraction(top) / 6)
        ratio = FLOAT32.round(FLOAT64.round(Fraction(sixth) / Fraction(tensor)))
        scales.append(max(E4M3.round(min(ratio, 448.0)), E4M3.smallest_normal))
    return tensor, scales, [FLOAT32.round(Fraction(s) * Fraction(tensor)) for s in scales]


def _nvfp4_data() -> NDArray[np.float32]:
    rng = np.random.default_rng(4)
    x = rng.normal(size=(40, 40)) * np.exp2(rng.uniform(-14, 6, size=(40, 1)))
    x[2] = 0.0
    return x.astype(np.float32)


def test_nvfp4_scales() -> None:
    x = _nvfp4_data()
    params = dt.QuantParams.from_data(dt.nvfp4, x)
    tensor, blocks, effective = _nvfp4_scales(x)
    assert params.tensor_scale is not None
    assert params.block_scale is not None
    assert params.scale.shape == (40, 3)
    assert float(params.tensor_scale) == tensor
    assert params.block_scale.astype(np.float64).ravel().tolist() == blocks
    assert params.scale.ravel().tolist() == effective


def test_nvfp4_block_scales_are_never_below_the_smallest_normal() -> None:
    blocks = dt.QuantParams.from_data(dt.nvfp4, _nvfp4_data()).block_scale
    assert blocks is not None
    assert float(blocks.astype(np.float32).min()) == E4M3.smallest_normal == 2.0**-6


def test_nvfp4_elements_use_the_effective_scale_in_both_directions() -> None:
    x = _nvfp4_data()
    params = dt.QuantParams.from_data(dt.nvfp4, x)
    expected = []
    for block, s in zip(_blocks(x, 16), _nvfp4_scales(x)[2], strict=True):
        ratios = [FLOAT32.round(Fraction(v) / Fraction(s)) for v in block]
        expected += [FLOAT32.round(Fraction(E2M1.round(min(max(t, -6.0), 6.0))) * Fraction(s)) for t in ratios]
    got = dt.fake_quantize(x, params)
    assert np.array_equal(got.ravel(), np.array(expected, dtype=np.float32))
    assert got.tobytes() == dt.quantize(x, params).dequantize().tobytes()


def test_nvfp4_zeros_stay_zeros() -> None:
    x = np.zeros((2, 32), dtype=np.float32)
    params = dt.QuantParams.from_data(dt.nvfp4, x)
    assert np.all(params.scale >= np.finfo(np.float32).tiny)
    assert dt.fake_quantize(x, params).tobytes() == x.tobytes()


@pytest.mark.parametrize("amax", [1e-37, 1e-30, 3e38])
def test_nvfp4_scales_of_extreme_tensors_stay_normal(amax: float) -> None:
    x = np.full((1, 16), amax, dtype=np.float32)
    params = dt.QuantParams.from_data(dt.nvfp4, x)
    assert np.all(np.isfinite(params.scale))
    assert np.all(params.scale >= np.finfo(np.float32).tiny)
    assert np.all(np.isfinite(dt.fake_quantize(x, params)))
