"""Native equals reference for every float16 and bfloat16 number, and for difficult float32 and float64 numbers."""

import numpy as np
import pytest

import detent as dt
from detent.errors import NaNError

from .twins import (
    CONVENTIONS,
    DTYPES,
    ESTIMATORS,
    LEVELS,
    Trial,
    at,
    difference,
    dtype_of,
    native_result,
    reference_result,
)

ALL_16_BITS = np.arange(1 << 16, dtype=np.uint16)
HALVES = ("float16", "bfloat16")
SCALES = (0.0123, 0.3, 1 / 3, 2.0**-10, 1e-30, 7e20)
ON_X = ("quantize", "fake_quantize")
WITH_GRADIENT = ("quantize_backward", "fake_quantize_backward")


def params_of(convention, scale, zero_point=3, form="int8", dtype="float32"):
    spec = dt.QuantSpec(form, symmetric=False, convention=convention)
    return dt.QuantParams(spec, np.array(scale, np.float64 if dtype == "float64" else np.float32), zero_point)


def both(operation, arrays, params, ste=None, nan=None):
    """The difference between the two kernels, or None."""
    options = {} if ste is None else {"ste": ste}
    options |= {} if nan is None else {"nan": nan}
    results = []
    for kernels in ("native", "reference"):
        with dt.use_kernels(kernels):
            plan = dt.Plan.select(operation, shape=arrays[0].shape, dtype=arrays[0].dtype, spec=params.spec, **options)
            results.append(plan.run(*arrays, params))
    return difference(*results)


def ties(dtype, scale):
    """Codes and ties of an 8-bit format and their adjacent numbers, where conventions differ."""
    steps = np.arange(-300, 300) / 2
    with np.errstate(all="ignore"):
        x = (steps * np.float64(scale)).astype(dtype_of(dtype))
        infinity = x.dtype.type(np.inf)
        return np.concatenate([x, np.nextafter(x, infinity), np.nextafter(x, -infinity)])


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("convention", ["onnx", "torch", "compressed_tensors", "oxicuda"])
@pytest.mark.parametrize("operation", ON_X)
def test_all_16_bit_floats(operation, convention, dtype, level):
    x = ALL_16_BITS.view(dtype_of(dtype))
    with at(level):
        for scale in SCALES[:3]:
            params = params_of(convention, scale)
            assert both(operation, [x], params, nan="zero_point") is None, scale
            assert both(operation, [x], params, nan="qmin") is None, scale


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("ste", ESTIMATORS)
@pytest.mark.parametrize("operation", WITH_GRADIENT)
def test_all_16_bit_floats_and_gradients(operation, ste, dtype, level):
    x = ALL_16_BITS.view(dtype_of(dtype))
    g = np.random.default_rng(0).permutation(x)
    with at(level):
        for convention in ("onnx", "oxicuda"):
            assert both(operation, [g, x], params_of(convention, 0.3), ste=ESTIMATORS[ste]) is None, convention


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("scale", SCALES)
def test_all_16_bit_gradients_of_values(scale, dtype, level):
    g = ALL_16_BITS.view(dtype_of(dtype))
    with at(level):
        assert both("dequantize_backward", [g], params_of("onnx", scale)) is None


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("form", ["int16", "uint16"])
def test_all_16_bit_codes(form, dtype, level):
    trial = Trial("dequantize", dtype, format=form, shape=(1 << 16,))
    codes = ALL_16_BITS.view(form)
    with at(level):
        for scale in SCALES:
            params = params_of("onnx", scale, zero_point=77, form=form)
            with dt.use_kernels("native"):
                plan = dt.Plan.select("dequantize", shape=codes.shape, dtype=dtype_of(dtype), spec=params.spec)
                result = plan.run(codes, params)
            with dt.use_kernels("reference"):
                plan = dt.Plan.select("dequantize", shape=codes.shape, dtype=dtype_of(dtype), spec=params.spec)
                expected = plan.run(codes, params)
            assert difference(result, expected) is None, (scale, trial)


@pytest.mark.slow
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("rounding", ["half_even", "half_away", "floor"])
@pytest.mark.parametrize("convention", CONVENTIONS)
def test_all_16_bit_floats_by_every_rule(convention, rounding, dtype, level):
    x = ALL_16_BITS.view(dtype_of(dtype))
    g = np.random.default_rng(0).permutation(x)
    with at(level):
        for scale in SCALES:
            for form, zero_point in (("int8", -5), ("uint4", 9), ("uint16", 40000)):
                spec = dt.QuantSpec(form, symmetric=False, convention=convention, rounding=rounding)
                params = dt.QuantParams(spec, np.float32(scale), zero_point)
                for operation in ON_X:
                    assert both(operation, [x], params, nan="zero_point") is None, (operation, scale, form)
                for operation in WITH_GRADIENT:
                    assert both(operation, [g, x], params) is None, (operation, scale, form)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("convention", CONVENTIONS)
@pytest.mark.parametrize("level", LEVELS)
def test_beside_ties(level, convention, dtype):
    with at(level):
        for scale in SCALES:
            x, params = ties(dtype, scale), params_of(convention, scale, dtype=dtype)
            for operation in ON_X:
                assert both(operation, [x], params) is None, (operation, scale)
            for operation in WITH_GRADIENT:
                assert both(operation, [x[::-1].copy(), x], params) is None, (operation, scale)


@pytest.mark.parametrize(
    ("convention", "scale", "dtype"),
    [
        *((convention, 2.0**-10, dtype) for convention in ("compressed_tensors", "rlx") for dtype in DTYPES),
        *(("torch", 0.0123, dtype) for dtype in ("float32", "float64")),
    ],
)
def test_the_data_tell_rules_apart(convention, scale, dtype):
    """Different rules give different codes next to ties, so the data reveal a wrong rule."""
    x = ties(dtype, scale)
    ours, theirs = (dt.quantize(x, params_of(name, scale, dtype=dtype)).codes for name in ("onnx", convention))
    assert (ours != theirs).any()


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("operation", ON_X)
@pytest.mark.parametrize("where", [0, 6, 63, 64, 1023, 1024, 4095, 4096, 39999])
def test_nan_is_found_anywhere(where, operation, dtype, level):
    x = np.zeros(40000, dtype_of(dtype))
    x[where] = np.nan
    with at(level, threads=2), dt.use_kernels("native"):
        plan = dt.Plan.select(operation, shape=x.shape, dtype=x.dtype, spec="int8", nan="raise")
        with pytest.raises(NaNError, match=rf"\b{where}\b"):
            plan.run(x, dt.QuantParams.int8_symmetric())


@pytest.mark.parametrize("operation", ON_X)
def test_the_message_about_nan_is_the_same(operation):
    trial = Trial(operation, nan="raise", shape=(5, 9))
    x = np.zeros((5, 9), np.float32)
    x[2, 3:7] = np.nan
    messages = []
    for run in (native_result, reference_result):
        with pytest.raises(NaNError) as caught:
            run(trial, [x])
        messages.append(str(caught.value))
    assert messages[0] == messages[1]
