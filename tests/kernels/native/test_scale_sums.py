"""Kernels of integer products equal their reference bit for bit: scaled sums, codes of sums, scales, masks."""

import numpy as np
import pytest

import detent as dt
from detent.kernels import Problem, minmax, observe, quantize_masked, requantize, scale_sums

SHAPES = ((1, 1), (3, 7), (64, 16), (501, 33), (2, 40000))
EDGE = np.array([2**24, -(2**24), 2**24 - 1, 2**31 - 128, -(2**31)], np.float32)


def drawn(shape, dtype, seed=0):
    rng = np.random.default_rng(seed)
    sums = rng.integers(-(2**23), 2**23, size=shape).astype(dtype)
    offset = rng.integers(-(2**30), 2**30, size=shape[1]).astype(np.int32)
    return sums, offset, rng.normal(size=shape[1]).astype(np.float32), rng.normal(size=shape[1]).astype(np.float32)


def run(kernels, sums, offset, scale, bias):
    out = np.empty(sums.shape, np.float32)
    with dt.use_kernels(kernels):
        return scale_sums(sums, offset, scale, bias, out), out


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("dtype", [np.int32, np.float32])
@pytest.mark.parametrize("shape", SHAPES)
def test_scaled_sums(shape, dtype, biased):
    sums, offset, scale, bias = drawn(shape, dtype)
    bias = bias if biased else None
    exact, y = run("auto", sums, offset, scale, bias)
    expected = (sums.astype(np.int64) + offset).astype(np.int32).astype(np.float32) * scale
    assert exact
    assert np.array_equal(y, expected if bias is None else expected + bias)
    assert np.array_equal(run("reference", sums, offset, scale, bias)[1], y)


@pytest.mark.parametrize("value", EDGE)
def test_large_float_sums_are_reported(value):
    sums, offset, scale, _ = drawn((3, 5), np.float32)
    sums[1, 2] = value
    offset[2] = 0
    exact, y = run("auto", sums, offset, scale, None)
    expected, reference = run("reference", sums, offset, scale, None)
    assert exact == expected == (abs(value) < 2**24)
    assert np.array_equal(y, reference)


def test_result_may_overwrite_the_sums():
    sums, offset, scale, _ = drawn((40, 300), np.int32)
    expected = run("auto", sums, offset, scale, None)[1]
    assert scale_sums(sums, offset, scale, None, sums.view(np.float32))
    assert np.array_equal(sums.view(np.float32), expected)


@pytest.mark.parametrize("spec", ["int8/axis0", "int4/axis0", "uint8/tensor/affine", "int8"])
@pytest.mark.parametrize("shape", [(4, 9), (64, 300), (7, 40000)])
def test_observe_writes_codes(shape, spec):
    parsed = dt.QuantSpec.parse(spec)
    x = np.random.default_rng(1).normal(size=shape).astype(np.float32)
    tiling = parsed.granularity.tiling(shape)
    codes = np.empty(shape, np.int8 if parsed.format.signed else np.uint8)
    problem = Problem("fake_quantize", tiling, "float32", parsed, None, "propagate")
    lo, hi, scale, zero_point, nonfinite = observe(problem, x, codes, to_codes=True)
    low, high, _ = minmax(x, tiling)
    params = dt.QuantParams.from_range(parsed, low, high)
    assert (np.array_equal(lo, low), np.array_equal(hi, high), nonfinite) == (True, True, 0)
    assert np.array_equal(scale, params.scale)
    assert np.array_equal(zero_point, params.zero_point)
    assert np.array_equal(codes, dt.quantize(x, params).codes)


@pytest.mark.parametrize("ste", [dt.ste.Clipped(), dt.ste.Clipped(on="value"), dt.ste.Identity()])
@pytest.mark.parametrize("spec", ["uint8/tensor/affine", "uint4/tensor/affine", "int8/axis0"])
@pytest.mark.parametrize("shape", [(3, 5), (31, 77), (2, 50001)])
def test_codes_with_masks(shape, spec, ste):
    parsed = dt.QuantSpec.parse(spec)
    x = np.random.default_rng(2).normal(size=shape).astype(np.float32)
    params = dt.QuantParams.from_data(parsed, x / 2)  # some elements are clipped
    codes, mask = np.empty(shape, np.int8 if parsed.format.signed else np.uint8), np.empty(-(-x.size // 8), np.uint8)
    problem = Problem("fake_quantize_masked", parsed.granularity.tiling(shape), "float32", parsed, ste, "propagate")
    arrays = params.compute_arrays("float32")
    assert quantize_masked(problem, x, *arrays, codes, mask) is False
    assert np.array_equal(codes, dt.quantize(x, params).codes)
    with dt.use_kernels("reference"):
        assert np.array_equal(mask, dt.fake_quantize_masked(x, params, ste=ste)[1])
        assert quantize_masked(problem, x, *arrays, codes, mask) is None
    x[0, 0] = np.nan
    assert quantize_masked(problem, x, *arrays, codes, mask) is True


@pytest.mark.parametrize("dtype", [np.uint8, np.int8, np.float32])
@pytest.mark.parametrize("run_length", [1, 3, 200])
@pytest.mark.parametrize("channels", [1, 7, 64])
def test_requantized_sums(dtype, run_length, channels):
    rng = np.random.default_rng(1)
    units = (rng.normal(size=channels) * 1e-3).astype(np.float32)
    of_element = units[np.arange(3 * channels * run_length) // run_length % channels]
    sums = rng.integers(-(2**21), 2**21, of_element.size).astype(np.float32)
    sums[::5] += 0.25
    x = sums * of_element
    x[1::11] = rng.choice(np.float32([np.nan, np.inf, -np.inf, 0]), x[1::11].size)
    low, high = (-128, 127) if dtype == np.int8 else (0, 255)
    results = []
    for kernels in ("auto", "reference"):
        out = np.full(x.shape, 77, dtype)
        with dt.use_kernels(kernels):
            requantize(x, units, run_length, out, scale=31.7, zero_point=20, qmin=low, qmax=high)
        results.append(out)
    assert np.array_equal(*results)
    codes = np.clip(np.rint(sums * (of_element / np.float32(31.7))) + 20, low, high)
    whole = (sums * of_element == x) & (sums == np.rint(sums))
    expected = codes if dtype != np.float32 else (codes.astype(np.float32) - 20) * np.float32(31.7)
    assert np.array_equal(results[0][whole], expected[whole].astype(dtype))
