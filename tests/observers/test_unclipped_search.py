"""Unclipped search: the least squared error among scales with no error above half a step."""

import numpy as np
import pytest

import detent as dt
from detent.observers import best_params, unclipped_params

SPECS = ("int4/group32", "uint4/group32/affine", "int5/group16", "int4/axis0", "uint4/axis0/affine", "int4/tensor")


def rows(seed=0, shape=(6, 96)):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def by_set(reduce, x, params):
    """Reduce the errors of each parameter set, with one loop over the sets."""
    errors = np.abs(x.astype(np.float64) - dt.fake_quantize(x, params))
    tiling = params.spec.granularity.tiling(x.shape)
    numbers = np.broadcast_to(tiling.spread(np.arange(tiling.sets)), x.shape)
    return np.array([reduce(errors[numbers == i]) for i in range(tiling.sets)]).reshape(params.scale.shape)


def squares(errors):
    return np.sum(errors * errors)


@pytest.mark.parametrize("spec", SPECS)
def test_no_error_is_above_half_a_step(spec):
    x = rows()
    params = unclipped_params(x, spec)
    assert (by_set(np.max, x, params) <= 0.5001 * params.scale).all()


@pytest.mark.parametrize("spec", SPECS)
def test_error_is_between_those_of_the_clipping_search_and_of_min_max(spec):
    x = rows(1)
    minmax, unclipped, best = dt.QuantParams.from_data(spec, x), unclipped_params(x, spec), best_params(x, spec)
    assert (unclipped.scale <= minmax.scale).all()
    assert (by_set(squares, x, unclipped) <= by_set(squares, x, minmax)).all()
    assert by_set(squares, x, best).sum() < by_set(squares, x, unclipped).sum() < by_set(squares, x, minmax).sum()


def test_search_finds_the_least_error_of_a_fine_grid():
    x = rows(2, (4, 64))
    found, minmax = unclipped_params(x, "int4/axis0"), dt.QuantParams.from_data("int4/axis0", x)
    least = np.full(4, np.inf)
    for factor in np.linspace(14 / 15, 1, 400):
        params = dt.QuantParams(minmax.spec, (minmax.scale * factor).astype(np.float32), minmax.zero_point)
        error, largest = by_set(squares, x, params), by_set(np.max, x, params)
        least = np.where(largest <= 0.5 * params.scale, np.minimum(least, error), least)
    assert (by_set(squares, x, found) <= 1.03 * least).all()


def test_last_group_may_be_short():
    x = rows(3, (3, 40))
    params, tail = unclipped_params(x, "int4/group32"), unclipped_params(x[:, 32:], "int4/axis0")
    assert params.scale.shape == (3, 2)
    assert np.array_equal(params.scale[:, 1], tail.scale)


def test_groups_along_the_first_axis_equal_those_of_the_transposed_array():
    x, spec = rows(4, (96, 6)), dt.QuantSpec("uint4", granularity=dt.PerGroup(32, axis=0), symmetric=False)
    params, turned = unclipped_params(x, spec), unclipped_params(x.T, "uint4/group32/affine")
    assert np.array_equal(params.scale, turned.scale.T)
    assert np.array_equal(params.zero_point, turned.zero_point.T)


def test_zeros_keep_the_parameters_of_their_range():
    x = np.zeros((2, 8), np.float32)
    assert np.array_equal(unclipped_params(x, "int4/group4").scale, dt.QuantParams.from_data("int4/group4", x).scale)


def test_wrong_arguments_are_errors():
    with pytest.raises(dt.UnsupportedError, match="expected an integer format"):
        unclipped_params(rows(), "nf4/group32")
    with pytest.raises(dt.RangeError):
        unclipped_params(np.array([np.nan], np.float32), "int4")
