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


@pytest.mark.parametrize("granularity", [dt.PerTensor(), dt.PerAxis(0)])
@pytest.mark.parametrize(
    "shape", [(3, 5, 7, 9), (2, 16, 32, 32), (2, 40, 5, 5), (64, 3, 3, 3), (1, 33, 1025), (2, 80, 40, 40), (5, 2, 1)]
)
def test_channels_last_arrays_have_the_sums_of_c_order(shape, granularity):
    trial = Trial("fake_quantize", "float32", granularity, shape, format="uint4")
    g = np.random.default_rng(1).normal(size=shape).astype(np.float32)
    axes = (0, *range(2, len(shape)), 1)
    laid_g, laid_x = (np.ascontiguousarray(each.transpose(axes)) for each in (g, trial.x))
    images, scales = (int(np.prod(shape[2:])), shape[1]), trial.params.compute_arrays("float32")
    with dt.use_kernels("native"):
        expected = dt.Plan.select(OPERATION, shape=shape, dtype="float32", spec=trial.params.spec).run(
            g, trial.x, trial.params
        )
        for level, threads in product(LEVELS, (1, 2, 3)):
            with at(level, threads):
                plan = dt.Plan.select(OPERATION, shape=laid_x.shape, dtype="float32", spec=trial.params.spec)
                gx, *sums = plan.kernel.run_channels_last([laid_g, laid_x], *scales, images)
            results = gx.transpose(np.argsort(axes)), *sums
            assert compare(results, expected) == {}, (level, threads)


@pytest.mark.parametrize("images", [(5, 4), (3, 7), (-1, 8), (8, 10**18)])
def test_images_that_do_not_fit_are_refused(images):
    spec, x = dt.QuantSpec("int8"), np.zeros((2, 8, 3), np.float32)
    plan = dt.Plan.select(OPERATION, shape=x.shape, dtype="float32", spec=spec)
    scales = np.ones((), np.float32), np.zeros((), np.float32)
    with pytest.raises(ValueError, match="do not fit the plan"):
        plan.kernel.run_channels_last([x, x], *scales, images)
    grouped = dt.Plan.select(OPERATION, shape=x.shape, dtype="float32", spec=dt.QuantSpec("int8", dt.PerAxis(2)))
    by_column = np.ones((1, 1, 3), np.float32), np.zeros((1, 1, 3), np.float32)
    with pytest.raises(ValueError, match="do not fit the plan"):
        grouped.kernel.run_channels_last([x, x], *by_column, (8, 3))
