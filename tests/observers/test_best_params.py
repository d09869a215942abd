"""Best params: the least squared error on the values of each parameter set."""

from dataclasses import replace

import numpy as np
import pytest

import detent as dt
from detent.observers import MSE, best_params

SPECS = ("int4", "int3", "int2", "uint4", "uint3", "uint1", "int8", "uint8", "nf4", "float4_e2m1fn", "float8_e4m3fn")


def errors(x, params):
    """The squared error of each row."""
    return np.square(x.astype(np.float64) - dt.fake_quantize(x, params)).sum(axis=1)


def rows(count=40, size=32, seed=0, dtype=np.float32):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(count, size)) * np.exp(rng.normal(size=(count, 1)))
    x[count // 2 :] += rng.exponential(size=(count - count // 2, size))  # skewed
    return x.astype(dtype)


def least_of_many(x, spec, scales=400):
    """The least error of each row over a grid of scales below the min-max scale, and all zero points."""
    spec = dt.QuantSpec.parse(f"{spec}/axis0")
    minmax = dt.QuantParams.from_data(spec, x)
    zeros = [minmax.zero_point] if spec.symmetric else range(spec.qmin, spec.qmax + 1)
    least = np.full(len(x), np.inf)
    for factor in np.exp2(-np.linspace(0, 4, scales)):
        for zero in zeros:
            scale = minmax.scale * np.float32(factor)
            least = np.minimum(least, errors(x, dt.QuantParams(spec, scale, np.broadcast_to(zero, scale.shape))))
    return least


@pytest.mark.parametrize("spec", SPECS)
def test_never_worse_than_min_max_and_never_a_larger_scale(spec):
    for x in (rows(), rows(7, 301, seed=1), rows(3, 1, seed=2), rows(5, 33, dtype=np.float64)):
        minmax, best = dt.QuantParams.from_data(f"{spec}/axis0", x), best_params(x, f"{spec}/axis0")
        assert (errors(x, best) <= errors(x, minmax)).all()
        assert (best.scale <= minmax.scale).all()
        assert best.scale.dtype == minmax.scale.dtype


@pytest.mark.parametrize("spec", ["int4", "int3", "int2", "uint3", "nf4", "float4_e2m1fn"])
def test_close_to_the_least_error_of_many_scales(spec):
    x = rows(24)
    found, least = errors(x, best_params(x, f"{spec}/axis0")), least_of_many(x, spec)
    assert (found <= least * 1.001).all()
    assert found.sum() < least.sum()


@pytest.mark.parametrize("spec", ["int4", "int2"])
def test_better_than_a_histogram(spec):
    x = rows(60, 32, seed=3)
    histogram = errors(x, MSE(granularity="axis0").observe(x).params(f"{spec}/axis0"))
    found = errors(x, best_params(x, f"{spec}/axis0"))
    assert (found <= histogram * (1 + 1e-6)).all()
    assert found.sum() < histogram.sum()


def test_the_scale_of_values_on_a_grid_is_found_exactly():
    rng = np.random.default_rng(0)
    codes = rng.integers(-7, 8, size=(20, 64))
    codes[:, 0] = 7
    scale = np.exp2(rng.integers(-8, 8, size=20)).astype(np.float32)
    x = (codes * scale[:, None]).astype(np.float32)
    assert np.array_equal(best_params(x, "int4/axis0").scale, scale)
    x[:, 0] = 8 * scale  # the min-max scale has no such codes
    best = best_params(x, "int4/axis0")
    assert (errors(x, best) <= np.square(scale)).all()


def test_an_outlier_moves_the_zero_point():
    x = np.linspace(-1, 3, 1001, dtype=np.float32)[None]
    x[0, 0] = -2.5
    minmax, best = dt.QuantParams.from_data("uint4/axis0", x), best_params(x, "uint4/axis0")
    assert best.zero_point[0] < minmax.zero_point[0]
    assert errors(x, best)[0] <= least_of_many(x, "uint4", 100)[0] * 1.001


def test_many_codes_have_a_zero_point_between_those_of_the_first_search():
    x = np.concatenate((np.linspace(-1, 3, 2000), [-40.0])).astype(np.float32)[None]
    best = best_params(x, "uint8/axis0")
    moved = [replace(best, zero_point=best.zero_point + step) for step in (-1, 1)]
    assert all(errors(x, best)[0] <= errors(x, each)[0] for each in moved)


def test_nothing_to_search():
    x = np.zeros((4, 8), np.float32)
    x[1] = 2.0
    x[2, 3] = -0.5
    for spec in ("int4/axis0", "uint4/axis0", "nf4/axis0"):
        best = best_params(x, spec)
        assert best.scale[0] == best.scale[3] == 1
        assert not errors(x, best).any()
    assert best_params(x, "int4/axis0") == dt.QuantParams.from_data("int4/axis0", x)


@pytest.mark.parametrize("value", [1e-45, 1e-39, 3.4e38])
def test_extreme_magnitudes(value):
    x = rows(4) / np.abs(rows(4)).max() * np.float32(value)
    minmax, best = dt.QuantParams.from_data("int4/axis0", x), best_params(x, "int4/axis0")
    assert (errors(x, best) <= errors(x, minmax)).all()


def test_the_range_is_that_of_the_codes_and_of_the_data():
    x = rows(6)
    best = best_params(x, "int4/axis0")
    assert np.array_equal(best.max_val, np.minimum(x.max(axis=1), 7 * best.scale.astype(np.float64)))
    assert np.array_equal(best.min_val, np.maximum(x.min(axis=1), -7 * best.scale.astype(np.float64)))


@pytest.mark.parametrize("convention", ["torch", "oxicuda", "rlx"])
def test_scales_respect_the_floor_of_the_convention(convention):
    floor = dt.convention.PRESETS[convention].zero_range.value
    best = best_params(rows(4) * np.float32(1e-13), f"int4/axis0/{convention}")
    assert (best.scale >= np.float32(floor / 8)).all()
    assert best.scale.min() == best.scale.max()


def test_powers_of_two_stay_powers_of_two():
    x = np.full((2, 32), 0.25, np.float32)  # not a value of mxfp4 at the min-max scale, which is 1
    x[:, 0] = 4.01
    x[1, 1:] = 0.5
    minmax, best = dt.QuantParams.from_data(dt.mxfp4, x), best_params(x, dt.mxfp4)
    assert minmax.scale.tolist() == [[1], [1]]
    assert best.scale.tolist() == [[0.5], [1]]


def test_stochastic_rounding_is_searched_as_half_even():
    x = rows(5)
    spec = dt.QuantSpec("int4", granularity="axis0")
    best = best_params(x, replace(spec, rounding=dt.rounding.stochastic(3)))
    assert np.array_equal(best.scale, best_params(x, spec).scale)
    assert best.spec.rounding == dt.rounding.stochastic(3)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_values_that_are_not_finite_are_refused(bad):
    x = rows(3)
    x[1, 4] = bad
    with pytest.raises(dt.errors.RangeError, match=r"not finite in 1 of 96 elements, the first at index \(1, 4\)"):
        best_params(x, "int4/axis0")


def test_nothing_and_two_levels_are_refused():
    with pytest.raises(dt.errors.RangeError, match="empty"):
        best_params(np.empty((0, 4), np.float32), "int4")
    with pytest.raises(dt.errors.UnsupportedError, match="two-level scales"):
        best_params(rows(4), dt.nvfp4)


def test_float16_is_searched_in_float32():
    x = rows(6, dtype=np.float16)
    assert best_params(x, "int4/axis0") == best_params(x.astype(np.float32), "int4/axis0")
