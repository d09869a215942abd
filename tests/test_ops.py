"""Operators: accepted inputs, types of results, NaN, and that inputs are not changed."""

import ml_dtypes
import numpy as np
import pytest

import detent as dt

P = dt.QuantParams("uint8", 0.5, 10)
NAN = float("nan")


@pytest.mark.parametrize(
    ("policy", "code", "value"), [("zero_point", 10, 0.0), ("qmin", 0, -5.0)], ids=["zero_point", "qmin"]
)
def test_nan_policies(policy, code, value):
    x = np.array([1.0, NAN, -1.0], np.float32)
    assert dt.quantize(x, P, nan=policy).codes.tolist() == [12, code, 8]
    assert dt.fake_quantize(x, P, nan=policy).tolist() == [1.0, value, -1.0]


@pytest.mark.parametrize("name", ["float8_e4m3fn", "float4_e2m1fn", "nf4"])
def test_nan_policies_of_other_formats(name):
    x, params = np.array([NAN], np.float32), dt.QuantParams(name, 0.5)
    assert dt.quantize(x, params, nan="zero_point").dequantize().tolist() == [0.0]
    assert dt.quantize(x, params, nan="qmin").dequantize().tolist() == [params.spec.qmin * 0.5]


@pytest.mark.parametrize("name", ["uint8", "float8_e4m3fn", "nf4"])
def test_nan_propagates_through_fake_quantize(name):
    x = np.array([1.0, NAN, np.inf], np.float32)
    y = dt.fake_quantize(x, dt.QuantParams(name, 0.5))
    assert np.isnan(y).tolist() == [False, True, False]


def test_infinities_saturate_and_are_no_nan():
    x = np.array([np.inf, -np.inf], np.float32)
    assert dt.quantize(x, P).codes.tolist() == [255, 0]
    assert dt.fake_quantize(x, P, nan="raise").tolist() == [122.5, -5.0]


@pytest.mark.parametrize("dtype", ["float16", ml_dtypes.bfloat16, "float32", "float64"])
def test_results_have_the_datas_dtype(dtype):
    x = np.array([1.0, 300.0]).astype(dtype)
    g = np.ones_like(x)
    results = [
        dt.fake_quantize(x, P),
        dt.quantize(x, P).dequantize(),
        dt.fake_quantize_backward(g, x, P),
        dt.quantize_backward(g, x, P),
        dt.dequantize_backward(g, P),
        dt.fake_quantize_learned_backward(g, x, P)[0],
    ]
    assert [r.dtype for r in results] == [np.dtype(dtype)] * 6
    scale_dtype = "float64" if np.dtype(dtype) == np.float64 else "float32"
    assert [r.dtype for r in dt.fake_quantize_learned_backward(g, x, P)[1:]] == [np.dtype(scale_dtype)] * 2


def test_lists_and_scalars_are_float64():
    assert dt.fake_quantize([0.3, 0.9], P).dtype == np.float64
    assert dt.fake_quantize(0.3, P).shape == ()


@pytest.mark.parametrize(
    ("convention", "multiplies"), [("onnx", False), ("torch", True), ("baracuda", True), ("rlx", False)]
)
def test_division_or_reciprocal(convention, multiplies):
    """Next to ties, division and reciprocal give different codes for many elements; elsewhere for almost none."""
    scale = np.float32(0.0123)
    ties = (np.arange(-120, 120, dtype=np.float32) + np.float32(0.5)) * scale
    x = np.concatenate([ties, np.nextafter(ties, np.float32(np.inf)), np.nextafter(ties, np.float32(-np.inf))])
    divided, multiplied = x / scale, x * (np.float32(1) / scale)
    assert np.count_nonzero(np.round(divided) != np.round(multiplied)) > 50
    spec = dt.QuantSpec("int8", convention=convention, rounding="half_even")
    codes = dt.quantize(x, dt.QuantParams(spec, scale)).codes
    assert np.array_equal(codes, np.round(multiplied if multiplies else divided))


def test_raw_gradients():
    x, g = np.array([0.0, 500.0]), np.array([3.0, 3.0])
    assert dt.quantize_backward(g, x, P).tolist() == [6.0, 0.0]
    assert dt.dequantize_backward(g, P).tolist() == [1.5, 1.5]


def test_learned_gradients_by_hand():
    x, g = np.array([0.6, 500.0, -100.0]), np.array([1.0, 2.0, 4.0])  # t = 1.2; code 255; code 0
    gx, gs, gz = dt.fake_quantize_learned_backward(g, x, P, grad_scale=1.0)
    assert gx.tolist() == [1.0, 0.0, 0.0]
    assert gs == pytest.approx((1 - 1.2) * 1.0 + 245 * 2.0 - 10 * 4.0)
    assert gz == -0.5 * (2.0 + 4.0)
    _, scaled, _ = dt.fake_quantize_learned_backward(g, x, P)
    assert scaled == pytest.approx(gs / (3 * 255) ** 0.5)


def test_a_float64_scale_serves_narrower_data_as_float32():
    wide, narrow = dt.QuantParams("int8", np.float64(0.1)), dt.QuantParams("int8", np.float32(0.1))
    x = np.linspace(-1, 1, 99, dtype=np.float32)
    assert np.array_equal(dt.fake_quantize(x, wide), dt.fake_quantize(x, narrow))


OPERATIONS = {
    "quantize": lambda g, x, p: dt.quantize(x, p),
    "fake_quantize": lambda g, x, p: dt.fake_quantize(x, p),
    "quantize_backward": dt.quantize_backward,
    "dequantize_backward": lambda g, x, p: dt.dequantize_backward(g, p),
    "fake_quantize_backward": dt.fake_quantize_backward,
    "identity": lambda g, x, p: dt.fake_quantize_backward(g, x, p, ste="identity"),
    "fake_quantize_learned_backward": dt.fake_quantize_learned_backward,
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_inputs_stay_and_results_are_new(name):
    rng = np.random.default_rng(0)
    g, x = (rng.normal(size=20).astype(np.float32) for _ in range(2))
    before = g.copy(), x.copy()
    result = OPERATIONS[name](g, x, P)
    arrays = result if isinstance(result, tuple) else (result.codes if name == "quantize" else result,)
    assert np.array_equal(g, before[0])
    assert np.array_equal(x, before[1])
    assert not any(np.shares_memory(a, b) for a in arrays for b in (g, x))


@pytest.mark.parametrize("bits", [1, 3, 4, 5, 8, 12])
def test_packed_out(bits):
    params = dt.QuantParams(f"uint{bits}", 0.25)
    x = np.random.default_rng(bits).normal(size=(3, 7)).astype(np.float32)
    packed = np.full(-(-21 * bits // 8), 0xAA, np.uint8)
    q = dt.quantize(x, params, out=packed)
    assert np.array_equal(packed, dt.quantize(x, params).packed)
    assert q == dt.quantize(x, params)


def test_step_is_part_of_the_random_numbers():
    params = dt.QuantParams(dt.QuantSpec("int8", rounding=dt.rounding.stochastic(1)), 1.0)
    x = np.full(100, 0.5, np.float32)
    assert not np.array_equal(dt.fake_quantize(x, params), dt.fake_quantize(x, params, step=1))
    assert np.array_equal(dt.fake_quantize(x, params, step=7), dt.quantize(x, params, step=7).dequantize())
    edge = np.full(100, 127.5, np.float32)
    ones = np.ones_like(edge)
    for step in (0, 1):
        passed = dt.fake_quantize_backward(ones, edge, params, step=step)
        unclamped = dt.quantize(edge - 100, params, step=step).codes.astype(int) + 100
        assert np.array_equal(passed, unclamped <= 127)


WITH_DATA = {
    "quantize": lambda g, x, params: dt.quantize(x, params),
    "fake_quantize": lambda g, x, params: dt.fake_quantize(x, params),
    "fake_quantize_masked": lambda g, x, params: dt.fake_quantize_masked(x, params),
    "fake_quantize_backward": dt.fake_quantize_backward,
    "quantize_backward": dt.quantize_backward,
    "fake_quantize_learned_backward": dt.fake_quantize_learned_backward,
}


@pytest.mark.parametrize("spec", ["int8/axis0", "int4/group32", "uint8", "int8/token/torch", "nvfp4", "float8_e4m3fn"])
@pytest.mark.parametrize("name", WITH_DATA)
def test_a_spec_takes_the_range_of_the_data(name, spec):
    rng = np.random.default_rng(3)
    g, x = (rng.normal(size=(6, 64)).astype(np.float32) for _ in range(2))
    params = dt.QuantParams.from_data(spec, x)
    expected = WITH_DATA[name](g, x, params)
    for short in (spec, dt.QuantSpec.parse(spec)):
        result = WITH_DATA[name](g, x, short)
        if name == "quantize":
            assert result == expected
            assert result.params == params
        else:
            pairs = zip(result, expected, strict=True) if isinstance(expected, tuple) else [(result, expected)]
            assert all(np.array_equal(ours, theirs) for ours, theirs in pairs)


def test_a_format_is_a_spec_too():
    x = np.linspace(-1, 1, 7)
    assert np.array_equal(dt.fake_quantize(x, dt.int4), dt.fake_quantize(x, "int4"))


@pytest.mark.parametrize("name", ["quantize", "fake_quantize"])
@pytest.mark.parametrize("x", [np.array([1.0, NAN]), np.array([np.inf]), np.zeros(0)], ids=["nan", "inf", "empty"])
def test_a_spec_needs_a_range(name, x):
    with pytest.raises(dt.RangeError, match="x"):
        getattr(dt, name)(x, "int8")


@pytest.mark.parametrize("spec", ["int8", dt.QuantSpec("int8"), dt.int8], ids=["text", "spec", "format"])
def test_codes_need_params(spec):
    with pytest.raises(dt.DtypeError, match=r"spec '.*int8.*' as params.*quantize\(x, spec\)\.params"):
        dt.dequantize(np.array([1, 2], np.int8), spec)
    for call in (
        lambda: dt.QuantizedTensor.from_codes([1, 2], spec),
        lambda: dt.dequantize_backward(np.ones(2), spec),
        lambda: dt.fake_quantize_masked_backward(np.ones(2), np.array([3], np.uint8), spec),
    ):
        with pytest.raises(dt.DtypeError, match=r"must be a QuantParams.*from_data"):
            call()
