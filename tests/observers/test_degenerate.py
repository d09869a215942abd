"""Degenerate data: every observer gives valid parameters, or raises an error that says why not."""

from itertools import product

import ml_dtypes
import numpy as np
import pytest

import detent as dt
from detent.observers import MSE, EMAMinMax, Entropy, MinMax, Percentile

HISTOGRAMS = {
    "Percentile": lambda granularity="tensor": Percentile(granularity=granularity),
    "MSE": lambda granularity="tensor": MSE(granularity=granularity),
    "MSE of norm 1": lambda granularity="tensor": MSE(1.0, granularity),
    "MSE of norm 2.4": lambda granularity="tensor": MSE(2.4, granularity),
    "Entropy": Entropy,
}
KINDS = {
    "MinMax": MinMax,
    "EMAMinMax": lambda granularity="tensor": EMAMinMax(granularity=granularity),
    **HISTOGRAMS,
}
every_kind = pytest.mark.parametrize("kind", KINDS)
every_histogram = pytest.mark.parametrize("kind", HISTOGRAMS)

NORMAL = np.random.default_rng(0).normal(size=2000).astype(np.float32)
DATA = {
    "constant": np.full(100, 3.7, np.float32),
    "constant and negative": np.full(100, -0.3, np.float32),
    "zero": np.zeros(100, np.float32),
    "zeros of both signs": np.array([0.0, -0.0] * 20, np.float32),
    "positive": np.abs(NORMAL) + np.float32(0.5),
    "negative": -np.abs(NORMAL) - np.float32(0.5),
    "two values": np.array([-1.0, 1.0] * 50, np.float32),
    "zero and one": np.array([0.0] * 99 + [1.0], np.float32),
    "an outlier": np.append(NORMAL, np.float32(1e30)),
    "a negative outlier": np.append(NORMAL, np.float32(-1e30)),
    "subnormal": NORMAL * np.float32(1e-40),
    "the smallest": np.full(10, 1e-45, np.float32),
    "very large": np.array([1e38, -1e38, 1.0], np.float32),
    "float16": NORMAL.astype(np.float16),
    "float16, subnormal": (NORMAL * np.float32(1e-6)).astype(np.float16),
    "bfloat16": NORMAL.astype(ml_dtypes.bfloat16),
    "float64": NORMAL.astype(np.float64),
    "float64, below float32": NORMAL.astype(np.float64) * 1e-60,
    "float64, one above another": np.array([1.0, 1.0 + 2**-52]),
    "float64, subnormal": np.array([5e-324, 1e-323, 5e-323]),
    "one element": np.array([-2.5], np.float32),
    "no dimensions": np.array(2.5, np.float32),
    "one finite": np.array([np.nan, np.inf, 0.7, -np.inf], np.float32),
}
SPECS = [
    *(dt.QuantSpec(name, symmetric=True) for name in ("int2", "int8", "uint4")),
    *(dt.QuantSpec(name, symmetric=False) for name in ("int4", "uint2", "uint8")),
]


def cases(slow=()):
    """All pairs of observer and data; some are slow."""
    params = []
    for kind, name in product(KINDS, DATA):
        marks = [pytest.mark.slow] if kind in slow else []
        params.append(pytest.param(kind, name, marks=marks))
    return params


@pytest.mark.parametrize(("kind", "name"), cases(slow=("MSE of norm 1", "MSE of norm 2.4")))
def test_params_are_valid_for_any_data(kind, name):
    x = DATA[name]
    observer = KINDS[kind]().observe(x)
    finite = np.where(np.isfinite(x), x, 0).astype(x.dtype)
    for spec in SPECS:
        params = observer.params(spec)
        assert np.isfinite(params.scale).all(), spec
        assert (params.scale > 0).all(), spec
        assert spec.qmin <= params.zero_point <= spec.qmax, spec
        assert np.isfinite(dt.fake_quantize(finite, params)).all(), spec


@pytest.mark.parametrize(("kind", "name"), cases())
def test_ranges_are_finite_and_in_order(kind, name):
    lo, hi = KINDS[kind]().observe(DATA[name]).range()
    assert np.isfinite(lo)
    assert np.isfinite(hi)
    assert lo <= hi


@pytest.mark.parametrize("spec", ["float8_e4m3fn", "float8_e5m2", "float4_e2m1fn", "nf4"])
@pytest.mark.parametrize("name", ["constant", "zero", "positive", "an outlier", "subnormal", "float16", "one element"])
@every_kind
def test_params_of_other_formats(kind, name, spec):
    params = KINDS[kind]().observe(DATA[name]).params(spec)
    assert np.isfinite(params.scale)
    assert np.isfinite(dt.fake_quantize(DATA[name], params)).all()


@pytest.mark.parametrize("granularity", ["axis0", "axis1", "group16", "block2x16"])
@every_kind
def test_sets_that_differ_by_orders_of_magnitude(kind, granularity):
    x = (NORMAL[:160].reshape(4, 40) * np.array([[1e-40], [1.0], [1e30], [0.0]])).astype(np.float32)
    params = KINDS[kind](granularity).observe(x).params(f"int8/{granularity}")
    assert np.isfinite(params.scale).all()
    assert np.isfinite(dt.fake_quantize(x, params)).all()


@pytest.mark.parametrize("value", [3.7, -0.3, 1e-3])
@every_kind
def test_a_constant_is_kept(kind, value):
    x = np.full(50, value, np.float32)
    for spec in (dt.QuantSpec("int8", symmetric=True), dt.QuantSpec("uint8", symmetric=False)):
        quantized = dt.fake_quantize(x, KINDS[kind]().observe(x).params(spec))
        assert np.abs(quantized - x).max() <= abs(value) / 250, spec


@pytest.mark.parametrize("name", ["an outlier", "a negative outlier"])
def test_percentiles_do_not_follow_an_outlier(name):
    bounds = Percentile(0.1, 99.9).observe(DATA[name]).range()
    assert max(np.abs(bounds)) < 4
    np.testing.assert_allclose(bounds, np.percentile(DATA[name].astype(np.float64), [0.1, 99.9]), atol=0.07)


@every_kind
def test_nothing_observed(kind):
    with pytest.raises(dt.NotCalibratedError, match="has observed nothing: call observe"):
        KINDS[kind]().range()
    with pytest.raises(dt.NotCalibratedError, match="has observed nothing"):
        KINDS[kind]().params("int8")


@every_kind
def test_nothing_finite(kind):
    observer = KINDS[kind]().observe(np.array([np.nan, np.inf, -np.inf], np.float32))
    for ask in (observer.range, lambda: observer.params("int8")):
        with pytest.raises(
            dt.NotCalibratedError, match=r"no finite value in 1 of 1 parameter sets.*3 non-finite values in total"
        ):
            ask()


@every_kind
def test_sets_without_finite_values(kind):
    x = np.ones((3, 2), np.float32)
    x[1] = np.nan
    observer = KINDS[kind]("axis0").observe(x)
    for ask in (observer.range, lambda: observer.params("int8/axis0")):
        with pytest.raises(
            dt.NotCalibratedError, match=r"no finite value in 1 of 3 parameter sets, first at index \(1,\)"
        ):
            ask()
    assert observer.observe(np.ones((3, 2), np.float32)).range().lo.shape == (3,)


@every_kind
def test_batches_without_elements(kind):
    with pytest.raises(dt.NotCalibratedError):
        KINDS[kind]().observe(np.empty(0, np.float32)).range()


@pytest.mark.parametrize("value", [2.0**128, -1e39, 1e300])
@pytest.mark.parametrize("kind", ["EMAMinMax", *HISTOGRAMS])
def test_numbers_beyond_float32_are_rejected(kind, value):
    observer = KINDS[kind]("axis0").observe(np.ones((2, 3), np.float32))
    before = observer.to_bytes()
    with pytest.raises(dt.RangeError, match="use MinMax"):
        observer.observe(np.array([[1.0, 2.0], [value, np.nan]]))
    assert observer.to_bytes() == before


@pytest.mark.parametrize("kernels", ["auto", "reference"])
@every_histogram
def test_the_largest_float32_is_observed_as_float64(kind, kernels):
    with dt.use_kernels(kernels):
        observer = HISTOGRAMS[kind]().observe(np.array([3.4028234663852886e38, -np.inf, 1.0]))
    assert (observer.count, observer.nonfinite) == (2, 1)


@pytest.mark.parametrize("weight", [-1.0, [1.0, -1e-9], np.nan, np.inf, [1.0, np.nan], 2.0**38, 1e300])
@every_histogram
def test_weights_that_are_rejected(kind, weight):
    observer = HISTOGRAMS[kind]().observe(np.ones(3, np.float32))
    before = observer.to_bytes()
    with pytest.raises(dt.RangeError, match="weight"):
        observer.observe(np.array([1.0, 2.0], np.float32), weight)
    assert observer.to_bytes() == before


@every_histogram
def test_weights_whose_sum_is_rejected(kind):
    observer = HISTOGRAMS[kind]().observe(np.ones(3, np.float32))
    before = observer.to_bytes()
    with pytest.raises(dt.RangeError, match="the weights of the elements sum to"):
        observer.observe(np.ones(10, np.float32), 2.0**36)
    assert observer.to_bytes() == before


@every_histogram
def test_merging_beyond_what_fits_is_rejected(kind):
    full, other = (HISTOGRAMS[kind]().observe(np.ones(2, np.float32), 2.0**36.9) for _ in range(2))
    before = full.to_bytes()
    with pytest.raises(dt.RangeError, match="the weights of the elements sum to"):
        full.merge(other)
    assert full.to_bytes() == before


@pytest.mark.parametrize("weight", [[1.0, 2.0, 3.0], np.ones((2, 2)), []])
@every_histogram
def test_weights_that_do_not_broadcast(kind, weight):
    observer = HISTOGRAMS[kind]()
    with pytest.raises(dt.ShapeError, match="do not broadcast to x of shape"):
        observer.observe(np.ones(2, np.float32), weight)
    assert observer.to_bytes() == HISTOGRAMS[kind]().to_bytes()


@pytest.mark.parametrize("kind", ["MinMax", "EMAMinMax"])
def test_observers_of_bounds_take_no_weights(kind):
    observer = KINDS[kind]()
    with pytest.raises(dt.UnsupportedError, match="does not support weight=: use MSE, Percentile"):
        observer.observe(np.ones(2, np.float32), 1.0)
    assert observer.to_bytes() == KINDS[kind]().to_bytes()


@every_histogram
def test_weights_of_elements_that_are_not_finite_do_not_count(kind):
    x = np.array([1.0, np.nan, 2.0], np.float32)
    mass = HISTOGRAMS[kind]().observe(x, [1.0, 50.0, 3.0]).bins().mass
    assert mass.tolist() == [[1.0, 3.0]]


@pytest.mark.parametrize("kind", HISTOGRAMS)
def test_weights_of_zero_give_a_range_or_an_error(kind):
    observer = HISTOGRAMS[kind]().observe(np.array([1.0, 5.0], np.float32), 0.0)
    try:
        params = observer.params("int8")
    except dt.NotCalibratedError:
        return
    assert np.isfinite(params.scale)


@pytest.mark.parametrize(
    "kind",
    [
        "MSE",
        "Entropy",
        "Percentile",
    ],
)
def test_the_unit_of_weights_changes_no_range(kind):
    x = NORMAL[:1000]
    weighted = [HISTOGRAMS[kind]().observe(x, unit).range() for unit in (1.0, 2.0**-10)]
    np.testing.assert_allclose(weighted[1], weighted[0], rtol=0.05)
