"""Factors of cross-layer equalization."""

import numpy as np
import pytest

from detent.channel_factors import MAX_FACTOR_RATIO, STRENGTHS, equalization_factors


@pytest.mark.parametrize("strength", STRENGTHS)
def test_the_largest_channel_keeps_its_values(strength):
    factors = equalization_factors(np.array([0.5, 8.0, 2.0]), strength)
    assert factors.dtype == np.float32
    assert factors[1] == 1.0
    assert (factors <= 1.0).all()


def test_strength_one_gives_all_channels_the_same_range():
    largest = np.array([0.5, 8.0, 2.0])
    np.testing.assert_allclose(largest / equalization_factors(largest, 1.0), 8.0)


def test_channels_of_zeros_are_not_changed():
    assert equalization_factors(np.array([0.0, 4.0]), 1.0).tolist() == [1.0, 1.0]
    assert equalization_factors(np.zeros(3), 1.0).tolist() == [1.0] * 3


def test_the_ratio_of_factors_is_limited():
    factors = equalization_factors(np.array([1e-9, 1.0]), 1.0)
    assert factors[0] == np.float32(1 / MAX_FACTOR_RATIO)
