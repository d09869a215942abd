"""Factors of SmoothQuant."""

import ml_dtypes
import numpy as np
import pytest

from detent.onnx.decisions import SMOOTHED_FACTORS
from detent.onnx.smoothquant import STRENGTHS, _factors


@pytest.mark.parametrize("strength", STRENGTHS)
def test_factors_are_bfloat16_numbers_within_the_limits(strength):
    rng = np.random.default_rng(0)
    factors = _factors(rng.lognormal(sigma=9.0, size=500), rng.lognormal(size=500), strength)
    assert factors.dtype == np.float32
    assert (factors == factors.astype(ml_dtypes.bfloat16)).all()
    assert factors.min() >= SMOOTHED_FACTORS[0]
    assert factors.max() <= SMOOTHED_FACTORS[1]
