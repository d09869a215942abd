"""Factors of cross-layer equalization."""

import ml_dtypes
import numpy as np
import pytest

from detent.channel_factors import MAX_FACTOR_RATIO, STRENGTHS, equalization_factors, rounded_factors


@pytest.mark.parametrize("strength", STRENGTHS)
def test_the_largest_channel_keeps_its_values(strength):
    factors = equalization_factors(np.array([0.5, 8.0, 2.0]), strength)
    assert factors.dtype == np.float32
    assert factors[1] == 1.0
    assert (factors <= 1.0).all()


def test_strength_one_gives_all_channels_the_same_range():
    largest = np.array([0.5, 8.0, 2.0])
    np.testing.assert_allclose(largest / equalization_factors(largest, 1.0), 8.0)  # bfloat16 represents the factors


def test_channels_of_zeros_are_not_changed():
    assert equalization_factors(np.array([0.0, 4.0]), 1.0).tolist() == [1.0, 1.0]
    assert equalization_factors(np.zeros(3), 1.0).tolist() == [1.0] * 3


def test_the_ratio_of_factors_is_limited():
    factors = equalization_factors(np.array([1e-9, 1.0]), 1.0)
    assert 1 / MAX_FACTOR_RATIO <= factors[0] < 1.01 / MAX_FACTOR_RATIO


def is_bfloat16(values):
    return values.dtype == np.float32 and bool((values == values.astype(ml_dtypes.bfloat16)).all())


@pytest.mark.parametrize("strength", STRENGTHS)
def test_factors_are_bfloat16_numbers_within_the_limits(strength):
    largest = np.random.default_rng(0).lognormal(sigma=4.0, size=1000)
    factors = equalization_factors(largest, strength)
    assert is_bfloat16(factors)
    assert factors.min() >= np.float32(1 / MAX_FACTOR_RATIO)
    assert factors.max() == 1.0


@pytest.mark.parametrize("limits", [(1e-3, 1.0), (1e-4, 1e4), (0.3, 0.7)])
def test_rounding_stays_within_the_limits(limits):
    least, most = (np.float32(each) for each in limits)
    inside = np.array([np.nextafter(least, most), least, np.nextafter(most, least), most])
    factors = rounded_factors(np.concatenate([inside, [0.0, 1e30]]), *limits)
    assert is_bfloat16(factors)
    assert ((factors >= least) & (factors <= most)).all()
    np.testing.assert_allclose(factors[:4], inside, rtol=2**-7)


def test_ties_are_rounded_to_even():
    step = 2.0**-7  # of bfloat16 between 1 and 2
    factors = rounded_factors(1 + step * np.array([0.5, 1.5, 2.5, 0.51]), 1e-3, 2.0)
    assert ((factors - 1) / step).tolist() == [0.0, 2.0, 2.0, 1.0]
