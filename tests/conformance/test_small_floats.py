"""Small floats: float8_e4m3fn, float8_e5m2 and float4_e2m1fn against ml_dtypes and the exact oracle.

Checked here: all 256 or 16 codes decode as ml_dtypes decodes them; encoding equals ml_dtypes on every
float16 number in range (the sign of zero included), on float32 numbers around every midpoint, and saturates
outside, never to NaN or infinity; float64 input is rounded once, where ml_dtypes rounds twice; with a
scale, x / s is rounded to the compute type first; the gradient mask is |x / s| <= max.
"""

from __future__ import annotations

from fractions import Fraction
from itertools import pairwise

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

import detent as dt

from . import oracle
from .exact import E2M1, E4M3, E5M2, FLOAT32, FLOAT64, Binary
from .ties import neighbors, special_values

FORMATS: dict[str, tuple[Binary, float, int]] = {
    "float8_e4m3fn": (E4M3, 448.0, 256),
    "float8_e5m2": (E5M2, 57344.0, 256),
    "float4_e2m1fn": (E2M1, 6.0, 16),
}
"""Name: the exact format, its largest number, the number of codes."""


def _params(fmt: str, scale: float = 1.0, dtype: str = "float32") -> dt.QuantParams:
    return dt.QuantParams(dt.QuantSpec(fmt), scale=np.array(scale, dtype=dtype))


def _type(fmt: str) -> np.dtype:
    return np.dtype(getattr(ml_dtypes, fmt))


def _bits(codes: NDArray) -> NDArray[np.uint8]:
    return np.asarray(codes).view(np.uint8)


def _all_codes(fmt: str) -> NDArray:
    return np.arange(FORMATS[fmt][2], dtype=np.uint8).view(_type(fmt))


def _magnitudes(fmt: str) -> list[float]:
    """Every finite magnitude of a format, ascending."""
    values = np.abs(_all_codes(fmt).astype(np.float64))
    return sorted(set(values[np.isfinite(values)].tolist()))


def _oracle_bits(values: NDArray, fmt: str) -> NDArray[np.uint8]:
    """Clamp, then one rounding, in rational arithmetic; ml_dtypes only names the bits of an exact value."""
    form, largest, _ = FORMATS[fmt]
    rounded = [form.round(min(max(float(v), -largest), largest)) for v in values]
    return _bits(np.array(rounded, dtype=np.float32).astype(_type(fmt)))


def _midpoints(fmt: str) -> list[float]:
    magnitudes = _magnitudes(fmt)
    return [(low + high) / 2 for low, high in pairwise(magnitudes)]


@pytest.mark.parametrize("fmt", FORMATS)
def test_every_code_decodes_as_ml_dtypes(fmt: str) -> None:
    codes = _all_codes(fmt)
    got, expected = dt.dequantize(codes, _params(fmt)), codes.astype(np.float32)
    numbers = ~np.isnan(expected)
    assert np.array_equal(np.isnan(got), ~numbers)
    assert got[numbers].tobytes() == expected[numbers].tobytes()


@pytest.mark.parametrize("fmt", FORMATS)
def test_every_finite_code_survives_a_round_trip(fmt: str) -> None:
    codes = _all_codes(fmt)
    codes = codes[np.isfinite(codes.astype(np.float32))]
    again = dt.quantize(dt.dequantize(codes, _params(fmt)), _params(fmt)).codes
    assert again.dtype == _type(fmt)
    assert _bits(again).tobytes() == _bits(codes).tobytes()


@pytest.mark.parametrize("fmt", FORMATS)
def test_every_float16_in_range_encodes_as_ml_dtypes(fmt: str) -> None:
    largest = FORMATS[fmt][1]
    x = np.arange(1 << 16, dtype=np.uint16).view(np.float16)
    x = x[np.abs(x.astype(np.float32)) <= largest]
    got = dt.quantize(x, _params(fmt)).codes
    assert _bits(got).tobytes() == _bits(x.astype(_type(fmt))).tobytes()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
@pytest.mark.parametrize("fmt", FORMATS)
def test_numbers_out_of_range_saturate(fmt: str, dtype: str) -> None:
    largest = FORMATS[fmt][1]
    info = ml_dtypes.finfo(dtype)
    beyond = [v for v in (largest * 1.01, largest * 1.04, largest * 1.2, largest * 3) if v < float(info.max)]
    x = np.array([*beyond, float(info.max), np.inf], dtype=dtype)
    for sign in (1, -1):
        got = dt.fake_quantize(x * x.dtype.type(sign), _params(fmt))
        assert got.astype(np.float64).tolist() == [sign * largest] * len(x)


@pytest.mark.parametrize("fmt", FORMATS)
def test_float32_around_every_midpoint_encodes_as_ml_dtypes(fmt: str) -> None:
    center = np.array([*_midpoints(fmt), *_magnitudes(fmt)], dtype=np.float32)
    x = neighbors(np.concatenate([center, -center]), reach=3).ravel()
    x = x[np.abs(x) <= FORMATS[fmt][1]]
    assert _bits(dt.quantize(x, _params(fmt)).codes).tobytes() == _bits(x.astype(_type(fmt))).tobytes()


@pytest.mark.parametrize("fmt", FORMATS)
def test_float64_is_rounded_once(fmt: str) -> None:
    """Numbers too near a midpoint for float32: rounding there first would make them ties."""
    middle = np.array(_midpoints(fmt))
    x = np.concatenate([neighbors(middle).ravel(), middle * (1 + 2.0**-30), middle * (1 - 2.0**-30)])
    x = np.concatenate([x, -x])
    assert np.array_equal(x.astype(np.float32).astype(np.float64)[: 3 * len(middle)], np.repeat(middle, 3))
    got = _bits(dt.quantize(x, _params(fmt, dtype="float64")).codes)
    assert got.tobytes() == _oracle_bits(x, fmt).tobytes()


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("scale", [0.0123, 0.3, 1 / 3, 2.0**-10, 1e-30, 7e20], ids=str)
@pytest.mark.parametrize("fmt", FORMATS)
def test_a_scaled_number_is_divided_then_rounded(fmt: str, scale: float, dtype: str) -> None:
    """Midpoints times the scale, their neighbors, special values; a value is its code's times the scale."""
    fl = FLOAT64 if dtype == "float64" else FLOAT32
    params = _params(fmt, scale, dtype)
    s = float(params.scale)
    x = neighbors((np.array([*_midpoints(fmt), 2 * FORMATS[fmt][1]]) * s).astype(dtype)).ravel()
    x = np.concatenate([x, -x, special_values(dtype)])
    t = np.array([oracle.ratio(v, s, "divide", fl) for v in x.tolist()])
    t = np.where(t == 0, np.copysign(0.0, x.astype(np.float64)), t)
    codes = dt.quantize(x, params).codes
    assert _bits(codes).tobytes() == _oracle_bits(t, fmt).tobytes()
    levels = codes.astype(np.float64).tolist()
    values = [np.copysign(fl.round(Fraction(v) * Fraction(s)), v) for v in levels]
    expected = np.array(values, dtype=np.float64).astype(dtype).tobytes()
    assert dt.fake_quantize(x, params).tobytes() == expected
    assert dt.quantize(x, params).dequantize().tobytes() == expected


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
@pytest.mark.parametrize("fmt", FORMATS)
def test_the_sign_of_zero_is_kept_in_code_and_value(fmt: str, dtype: str) -> None:
    x = np.array([0.0, -0.0], dtype=dtype)
    codes = dt.quantize(x, _params(fmt, 0.3)).codes
    assert np.signbit(codes.astype(np.float32)).tolist() == [False, True]
    assert np.signbit(dt.fake_quantize(x, _params(fmt, 0.3)).astype(np.float64)).tolist() == [False, True]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
@pytest.mark.parametrize("fmt", FORMATS)
def test_fake_quantize_is_dequantize_of_quantize(fmt: str, dtype: str) -> None:
    x = (np.random.default_rng(2).normal(size=999) * FORMATS[fmt][1] / 4).astype(dtype)
    params = _params(fmt, 0.7, "float64" if dtype == "float64" else "float32")
    assert dt.fake_quantize(x, params).tobytes() == dt.quantize(x, params).dequantize().tobytes()


@pytest.mark.parametrize("fmt", FORMATS)
def test_gradients_pass_up_to_the_largest_number(fmt: str) -> None:
    largest, scale = FORMATS[fmt][1], np.float32(0.25)
    edge = neighbors(np.array([largest, -largest], np.float32) * scale).ravel()
    x = np.concatenate([edge, np.array([0.0, np.inf, -np.inf, np.nan], np.float32)])
    g = np.arange(1, x.size + 1, dtype=np.float32)
    expected = np.where(np.abs(x / scale) <= largest, g, 0)
    assert np.array_equal(dt.fake_quantize_backward(g, x, _params(fmt, 0.25)), expected)


@pytest.mark.parametrize("fmt", FORMATS)
def test_the_scale_from_data_puts_the_largest_magnitude_at_the_largest_number(fmt: str) -> None:
    x = np.array([0.1, -3.0, 2.0], dtype=np.float32)
    params = dt.QuantParams.from_data(dt.QuantSpec(fmt), x)
    assert float(params.scale) == FLOAT32.round(FLOAT64.round(Fraction(3) / Fraction(FORMATS[fmt][1])))
    assert int(params.zero_point) == 0
