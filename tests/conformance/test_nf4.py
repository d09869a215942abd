"""nf4, the normal-float codebook of QLoRA (Dettmers et al. 2023), against an independent midpoint count.

Checked here: the levels are QLoRA's float32 numbers; a code is the number of midpoints, exact in float64,
that lie strictly below x / s; all 16 codes decode to level * s rounded once; zero is +0.0 in every dtype;
the scale is the largest magnitude.
"""

from __future__ import annotations

from fractions import Fraction
from itertools import pairwise

import numpy as np
import pytest
from numpy.typing import NDArray

import detent as dt

from . import oracle
from .exact import FLOAT32, FLOAT64, FORMATS, Binary
from .ties import neighbors, special_values

LEVELS = np.array(
    [
        -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453,
        -0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0,
        0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
        0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
    ],
    dtype=np.float32,
)  # fmt: skip
MIDPOINTS = [(Fraction(float(a)) + Fraction(float(b))) / 2 for a, b in pairwise(LEVELS)]


def _params(scale: float, dtype: str = "float32") -> dt.QuantParams:
    return dt.QuantParams(dt.QuantSpec("nf4"), scale=np.array(scale, dtype=dtype))


def _codes(x: NDArray, s: float, fl: Binary) -> list[int]:
    """The count of midpoints below x / s, in rational arithmetic."""
    ratios = [oracle.ratio(v, s, "divide", fl) for v in x.astype(np.float64).tolist()]
    return [sum(t == np.inf or (t != -np.inf and m < Fraction(t)) for m in MIDPOINTS) for t in ratios]


def _data(scale: float, dtype: str) -> NDArray:
    with np.errstate(over="ignore"):
        center = np.array([*(float(m) for m in MIDPOINTS), *LEVELS.astype(np.float64), 1.5, -1.5]) * scale
        x = neighbors(center.astype(dtype), reach=2).ravel()
    return np.concatenate([x, special_values("float32" if dtype == "bfloat16" else dtype).astype(dtype)])


def test_midpoints_are_exact_in_float64() -> None:
    assert all(Fraction(float(m)) == m for m in MIDPOINTS)


def test_levels_are_qloras() -> None:
    assert np.array(dt.nf4.levels, dtype=np.float32).tobytes() == LEVELS.tobytes()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
@pytest.mark.parametrize("scale", [1.0, 0.0123, 0.3, 1 / 3, 1e-30, 7e20], ids=str)
def test_a_code_is_the_number_of_midpoints_below(scale: float, dtype: str) -> None:
    params = _params(scale, "float64" if dtype == "float64" else "float32")
    x = _data(float(params.scale), dtype)
    codes = dt.quantize(x, params).codes
    assert codes.dtype == np.uint8
    assert codes.tolist() == _codes(x, float(params.scale), oracle.compute_type(dtype))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
@pytest.mark.parametrize("scale", [1.0, 0.0123, 1 / 3, 1e-30], ids=str)
def test_every_code_decodes_to_its_level_times_the_scale(scale: float, dtype: str) -> None:
    params = _params(scale, "float64" if dtype == "float64" else "float32")
    fl, out = oracle.compute_type(dtype), FORMATS[dtype]
    exact = [fl.round(Fraction(float(level)) * Fraction(float(params.scale))) for level in LEVELS]
    expected = np.array([out.round(v) + 0.0 for v in exact], dtype=np.float64).astype(dtype)
    got = dt.dequantize(np.arange(16, dtype=np.uint8), params, dtype=dtype)
    assert got.tobytes() == expected.tobytes()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_fake_quantize_is_dequantize_of_quantize(dtype: str) -> None:
    for scale in (0.3, 1e-30):
        params = _params(scale)
        x = _data(scale, dtype)
        y = dt.fake_quantize(x, params)
        assert y.tobytes() == dt.quantize(x, params).dequantize().tobytes()
        assert not np.any((y == 0) & np.signbit(y))


@pytest.mark.parametrize("granularity", [dt.PerTensor(), dt.PerGroup(64), dt.PerAxis(0)], ids=str)
def test_the_scale_is_the_largest_magnitude(granularity: dt.granularity.Granularity) -> None:
    x = np.random.default_rng(1).normal(size=(4, 128)).astype(np.float32)
    params = dt.QuantParams.from_data(dt.QuantSpec("nf4", granularity), x)
    blocks = {"tensor": x.reshape(1, -1), "group64": x.reshape(8, 64), "axis0": x}[str(granularity)]
    assert np.array_equal(params.scale.ravel(), np.abs(blocks).max(axis=1))


def test_gradients_pass_between_minus_one_and_one() -> None:
    x = neighbors(np.array([0.3, -0.3, 0.0], np.float32)).ravel()
    g = np.arange(1, x.size + 1, dtype=np.float32)
    inside = [abs(oracle.ratio(float(v), FLOAT32.round(0.3), "divide", FLOAT32)) <= 1 for v in x]
    assert np.array_equal(dt.fake_quantize_backward(g, x, _params(0.3)), np.where(inside, g, 0))


def test_float64_ratios_are_compared_in_float64() -> None:
    """The float64 next above a midpoint belongs to the upper code; float32 cannot tell the two apart."""
    x = np.array([np.nextafter(float(m), np.inf) for m in MIDPOINTS])
    assert dt.quantize(x, _params(1.0, "float64")).codes.tolist() == list(range(1, 16))
    assert _codes(x, 1.0, FLOAT64) == list(range(1, 16))
