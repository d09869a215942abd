"""Properties of quantize, dequantize and fake quantization that hold for all data."""

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import detent as dt

from .cases import (
    DTYPES,
    INTEGERS,
    NEAREST,
    OTHERS,
    PRESETS,
    TILINGS,
    all_specs,
    cases,
    edge_data,
    make_params,
    same_bits,
)

ROUNDINGS = (None, *NEAREST, "floor", "stochastic(7)")


@given(cases(roundings=NEAREST))
def test_idempotent(case):
    once = dt.fake_quantize(case.x, case.params)
    assert same_bits(dt.fake_quantize(once, case.params), once)


@given(cases(roundings=(None, *NEAREST, "floor")))
def test_monotone(case):
    y = dt.fake_quantize(np.sort(case.x), case.params)
    assert (y[:-1] <= y[1:]).all()


@given(cases(formats=INTEGERS, roundings=ROUNDINGS), st.sampled_from([0.0, -0.0]))
def test_zero_is_exact_in_integer_formats(case, zero):
    x = np.full(3, zero, case.x.dtype)
    assert same_bits(dt.quantize(x, case.params).dequantize(), np.zeros_like(x))


@given(st.sampled_from(PRESETS), st.sampled_from(INTEGERS[2:]), st.floats(-8.0, 0.0), st.floats(0.0, 8.0))
def test_zero_is_exact_when_the_range_holds_it(convention, name, lo, hi):
    params = dt.QuantParams.from_range(dt.QuantSpec(name, convention=convention), lo, hi)
    zero = np.zeros(1, np.float32)
    assert same_bits(dt.quantize(zero, params).dequantize(), zero)


@given(cases(formats=OTHERS))
def test_zero_is_exact_in_other_formats(case):
    assert not dt.fake_quantize(np.zeros(2, case.x.dtype), case.params).any()


@given(cases(formats=INTEGERS, dtypes=("float32", "float64"), roundings=NEAREST))
def test_error_inside_the_range_is_half_a_step(case):
    spec, s, z = case.spec, Fraction(case.params.scale.item()), case.params.zero_point.item()
    bound = s / 2 * (1 + Fraction(spec.qmax - spec.qmin, 2**22))
    x = case.x[np.isfinite(case.x)]
    pairs = zip(x.tolist(), dt.fake_quantize(x, case.params).tolist(), strict=True)
    inside = [(v, y) for v, y in pairs if (spec.qmin - z) * s <= Fraction(v) <= (spec.qmax - z) * s]
    assert [(v, y) for v, y in inside if abs(Fraction(v) - Fraction(y)) > bound] == []


@given(st.data(), st.sampled_from(PRESETS), st.sampled_from([n for n in INTEGERS if n.startswith("int")][1:]))
def test_sign_symmetry_of_the_narrow_range(data, convention, name):
    rounding = data.draw(st.sampled_from(NEAREST))
    case = data.draw(cases(formats=(name,), conventions=(convention,), roundings=(rounding,)))
    spec = dt.QuantSpec(
        name, symmetric=True, convention=convention, rounding=rounding, qmin=-dt.formats.FORMATS[name].qmax
    )
    params = dt.QuantParams(spec, case.params.scale)
    assert np.array_equal(dt.fake_quantize(-case.x, params), -dt.fake_quantize(case.x, params))


@given(cases(formats=("float8_e4m3fn", "float8_e5m2", "float4_e2m1fn")))
def test_small_floats_keep_every_sign(case):
    y, mirrored = dt.fake_quantize(case.x, case.params), dt.fake_quantize(-case.x, case.params)
    assert same_bits(mirrored, -y)
    assert np.array_equal(np.signbit(y), np.signbit(case.x))


@given(cases(formats=(*INTEGERS, "nf4"), roundings=ROUNDINGS))
def test_integers_and_nf4_never_give_a_negative_zero(case):
    for y in (dt.fake_quantize(case.x, case.params), dt.quantize(case.x, case.params).dequantize()):
        assert not np.signbit(y[y == 0].astype(np.float64)).any()


def test_a_value_too_small_for_its_output_type_becomes_positive_zero():
    """-1e-10 is code -1, but float16 cannot represent the value."""
    params = dt.QuantParams("int8", 1e-10)
    y = dt.QuantizedTensor.from_codes([-1, 1], params, "float16").dequantize()
    assert same_bits(y, np.zeros(2, np.float16))


@given(cases(roundings=ROUNDINGS), st.integers(0, 2**32 - 1))
def test_fake_quantize_is_dequantize_of_quantize(case, step):
    fake = dt.fake_quantize(case.x, case.params, step=step)
    assert same_bits(fake, dt.quantize(case.x, case.params, step=step).dequantize())


def _differences(rng, spec, shape, dtype):
    """Yield the NaN policies under which fake quantization differs from dequantize of quantize."""
    params = make_params(rng, spec, shape)
    x = edge_data(rng, params, shape, dtype, nan=True)
    for policy in ("zero_point", "qmin"):
        fake = dt.fake_quantize(x, params, nan=policy)
        if not same_bits(fake, dt.quantize(x, params, nan=policy).dequantize()):
            yield f"{spec!r} nan={policy}"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("convention", PRESETS)
def test_fake_quantize_is_dequantize_of_quantize_in_every_format(convention, dtype):
    rng = np.random.default_rng(1)
    differences = [d for spec in all_specs(convention) for d in _differences(rng, spec, (40,), dtype)]
    assert not differences, differences[:3]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("granularity", "shape"), TILINGS, ids=str)
def test_fake_quantize_is_dequantize_of_quantize_in_every_granularity(granularity, shape, dtype):
    rng = np.random.default_rng(2)
    few = {"int4", "uint8", "int16", "float8_e4m3fn", "float4_e2m1fn", "nf4"}
    specs = [s for name in PRESETS for s in all_specs(name, granularity) if s.format.name in few]
    differences = [d for spec in specs for d in _differences(rng, spec, shape, dtype)]
    assert not differences, differences[:3]


@given(cases(roundings=ROUNDINGS))
def test_codes_lie_in_the_range_and_infinities_reach_its_ends(case):
    ends = np.array([-np.inf, np.inf], case.x.dtype)
    codes = dt.quantize(np.concatenate([case.x, ends]), case.params).codes
    if case.spec.format.kind == "codebook":
        assert codes[-2:].tolist() == [0, 15]
        return
    values = codes.astype(np.float64)
    assert (values.min(), values.max()) == (case.spec.qmin, case.spec.qmax) == (values[-2], values[-1])


@given(cases(formats=INTEGERS), st.integers(0, 2**64 - 1), st.integers(0, 2**32 - 1))
def test_stochastic_rounding_takes_one_of_the_two_neighbors(case, seed, step):
    random = dt.QuantParams(
        case.spec.replace(rounding=dt.rounding.stochastic(seed)), case.params.scale, case.params.zero_point
    )
    down = dt.QuantParams(case.spec.replace(rounding="floor"), case.params.scale, case.params.zero_point)
    gap = dt.quantize(case.x, random, step=step).codes.astype(int) - dt.quantize(case.x, down).codes.astype(int)
    assert set(gap.tolist()) <= {0, 1}
    assert same_bits(dt.quantize(case.x, random, step=step).codes, dt.quantize(case.x, random, step=step).codes)


def test_stochastic_rounding_is_right_on_average():
    spec = dt.QuantSpec(dt.int8, rounding=dt.rounding.stochastic(3))
    x = np.full(20_000, 5.3, np.float32)
    codes = dt.quantize(x, dt.QuantParams(spec, 1.0)).codes
    assert abs(codes.mean() - 5.3) < 4 * (0.3 * 0.7 / x.size) ** 0.5
