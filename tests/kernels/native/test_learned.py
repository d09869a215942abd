"""Native gradients of learned parameters equal the reference bit for bit, because the accumulation order is fixed."""

from itertools import product

import numpy as np
import pytest

import detent as dt
from detent.kernels import Problem, native

from .twins import CONVENTIONS, DTYPES, ESTIMATORS, GRANULARITIES, LEVELS, Trial, at, difference

OPERATION = "fake_quantize_learned_backward"
NAMES = ("gradient of x", "gradient of the scale", "gradient of the zero point")
WHY_NOT = native.refusal(
    Problem(OPERATION, dt.PerTensor().tiling((4,)), "float32", dt.QuantSpec("int8"), dt.ste.Clipped(), "propagate")
)
pytestmark = pytest.mark.skipif(WHY_NOT is not None, reason=str(WHY_NOT))


def gradients(kernels, trial, ste=None, grad_scale=None, finite=True):
    """The three gradients; g is finite, because infinities would hide a wrong accumulation order."""
    g = np.random.default_rng(trial.seed).normal(size=trial.shape).astype(trial.x.dtype) if finite else trial.g
    with dt.use_kernels(kernels):
        plan = dt.Plan.select(OPERATION, shape=trial.shape, dtype=trial.x.dtype, spec=trial.params.spec, ste=ste)
        assert plan.kernel.backend == kernels
        return plan.run(g, trial.x, trial.params, grad_scale=grad_scale)


def compare(results, expected):
    """Return the mismatches between native and reference gradients, by name."""
    mismatches = {name: difference(*pair) for name, *pair in zip(NAMES, results, expected, strict=True)}
    return {name: each for name, each in mismatches.items() if each is not None}


def differences(trial, **options):
    return compare(gradients("native", trial, **options), gradients("reference", trial, **options))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", GRANULARITIES)
def test_every_granularity(name, dtype):
    granularity, shape = GRANULARITIES[name]
    trial = Trial("fake_quantize", dtype, granularity, shape, format="int4")
    expected = gradients("reference", trial)
    for level, threads in product(LEVELS, (1, 2, 3)):
        with at(level, threads):
            assert compare(gradients("native", trial), expected) == {}, (level, threads)


@pytest.mark.parametrize("convention", CONVENTIONS)
@pytest.mark.parametrize("form", ["int8", "uint8", "int4", "uint1", "int16"])
def test_every_convention(form, convention):
    trial = Trial("fake_quantize", "float32", dt.PerAxis(0), (5, 1300), convention, form)
    assert differences(trial) == {}


@pytest.mark.parametrize("ste", ESTIMATORS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_estimator(dtype, ste):
    trial = Trial("fake_quantize", dtype, dt.PerGroup(100), (7, 333))
    assert differences(trial, ste=ESTIMATORS[ste], grad_scale=0.37) == {}


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_length(dtype, level):
    with at(level):
        for size in (*range(131), 1023, 1024, 1025, 2047, 2049, 3072, 3073, 5121):
            assert differences(Trial("fake_quantize", dtype, shape=(size,), seed=size)) == {}, size


@pytest.mark.parametrize("dtype", DTYPES)
def test_gradients_that_are_not_finite(dtype):
    trial = Trial("fake_quantize", dtype, dt.PerToken(), (60, 11))
    assert differences(trial, finite=False) == {}


@pytest.mark.parametrize("dtype", DTYPES)
def test_zero_dimensions(dtype):
    assert differences(Trial("fake_quantize", dtype, shape=())) == {}
