"""Histograms and what is read from them: percentiles, the least error and the least divergence."""

import numpy as np
import pytest

import detent as dt
from detent.observers import MSE, BinnedObserver, Entropy, MinMax, Percentile

NORMAL = np.random.default_rng(0).normal(size=20_000).astype(np.float32)
HISTOGRAMS = (Percentile, MSE, Entropy)
every_histogram = pytest.mark.parametrize("make", HISTOGRAMS)


def error_of(x, params, norm=2):
    return np.mean(np.abs(x - dt.fake_quantize(x, params)).astype(np.float64) ** norm)


@every_histogram
def test_histograms_are_one_kind(make):
    assert isinstance(make(), BinnedObserver)
    assert make().precision == 5


@pytest.mark.parametrize("precision", [0, 11, -1, 2.5, "5", True])
@every_histogram
def test_precision_is_1_to_10_bits(make, precision):
    with pytest.raises(dt.SpecError, match=r"precision must be an integer in 1\.\.10"):
        make(precision=precision)


@pytest.mark.parametrize("precision", [1, 5, 10])
@every_histogram
def test_bins_hold_what_lies_between_their_edges(make, precision):
    x = NORMAL[:3000, None]
    bins = make(precision=precision).observe(x).bins()
    assert (bins.lower < bins.upper).all()
    assert (bins.upper[:-1] <= bins.lower[1:]).all()
    positive, negative = (bins.lower <= x) & (x < bins.upper), (bins.lower < x) & (x <= bins.upper)
    assert bins.mass[0].tolist() == np.where(bins.lower < 0, negative, positive).sum(axis=0).tolist()


@pytest.mark.parametrize("precision", [1, 5, 10])
def test_bins_are_as_wide_as_the_precision(precision):
    bins = Entropy(precision=precision).observe(np.array([1.0, 1.999, 3.0, -3.0])).bins()
    assert sorted(bins.upper - bins.lower) == [2.0**-precision] * 2 + [2.0 ** (1 - precision)] * 2


def test_bins_of_each_set():
    bins = Entropy("axis0").observe(np.array([[1.0, 1.0, -4.0], [2.0, np.nan, -4.0]])).bins()
    assert bins.lower.tolist() == [-4.125, 1.0, 2.0]
    assert bins.mass.tolist() == [[1, 2, 0], [1, 0, 1]]
    assert (bins.lo.tolist(), bins.hi.tolist()) == ([-4.0, -4.0], [1.0, 2.0])


def test_weights_are_the_mass_of_bins():
    bins = Entropy().observe(np.array([1.0, 2.0, 2.0]), [0.5, 0.25, 3.0]).observe(np.array([1.0])).bins()
    assert bins.mass.tolist() == [[1.5, 3.25]]


def test_weights_are_multiples_of_2_to_the_minus_24():
    bins = Entropy().observe(np.array([1.0, 2.0]), [2.0**-24, 1 + 2.0**-26]).bins()
    assert bins.mass.tolist() == [[2.0**-24, 1.0]]


@pytest.mark.parametrize(("lower", "upper"), [(0, 100), (0.1, 99.9), (1, 99), (25, 75), (0, 50), (49, 51)])
@pytest.mark.parametrize("size", [1, 2, 3, 10, 1000, 20_000])
def test_percentiles_are_those_of_numpy_to_within_a_bin(size, lower, upper):
    x = NORMAL[:size]
    bounds = np.array(Percentile(lower, upper).observe(x).range())
    expected = np.percentile(x.astype(np.float64), [lower, upper])
    np.testing.assert_allclose(bounds, expected, rtol=0.035, atol=0.001)


@pytest.mark.parametrize("precision", [3, 5, 8, 10])
def test_more_precision_gives_closer_percentiles(precision):
    bounds = np.array(Percentile(1, 99, precision=precision).observe(NORMAL).range())
    np.testing.assert_allclose(bounds, np.percentile(NORMAL.astype(np.float64), [1, 99]), rtol=2.0**-precision)


def test_percentiles_of_each_set():
    x = NORMAL.reshape(4, -1) * np.array([[1], [10], [0.1], [1e-3]], np.float32)
    bounds = Percentile(1, 99, "axis0").observe(x).range()
    np.testing.assert_allclose(bounds.lo, np.percentile(x.astype(np.float64), 1, axis=1), rtol=0.035)
    np.testing.assert_allclose(bounds.hi, np.percentile(x.astype(np.float64), 99, axis=1), rtol=0.035)


@pytest.mark.parametrize(("lower", "upper"), [(-1, 99), (1, 101), (50, 50), (99, 1)])
def test_percentiles_in_order(lower, upper):
    with pytest.raises(dt.RangeError, match="0 <= lower < upper <= 100"):
        Percentile(lower, upper)


@pytest.mark.parametrize("lower", ["1", None, np.nan, True])
def test_percentiles_are_numbers(lower):
    with pytest.raises(dt.SpecError, match="lower must be a"):
        Percentile(lower, 99)


def test_whole_weights_count_elements_so_often():
    x, often = NORMAL[:500], np.random.default_rng(1).integers(0, 5, size=500)
    repeated = np.repeat(x, often)
    bounds = Percentile(5, 95, precision=10).observe(x, often).range()
    np.testing.assert_allclose(bounds, np.percentile(repeated.astype(np.float64), [5, 95]), rtol=0.01)


@pytest.mark.parametrize("norm", [0, -1])
def test_norms_are_positive(norm):
    with pytest.raises(dt.RangeError, match="norm must be a positive number"):
        MSE(norm)


@pytest.mark.parametrize("norm", [1, 2])
@pytest.mark.parametrize("name", ["int2", "int4", "int8", "float4_e2m1fn", "nf4", "float8_e4m3fn"])
def test_no_symmetric_scale_loses_much_less(name, norm):
    error = error_of(NORMAL, MSE(norm).observe(NORMAL).params(name), norm)
    largest = float(np.abs(NORMAL).max())
    tried = [
        error_of(NORMAL, dt.QuantParams.from_range(name, -reach, reach, dtype="float32"), norm)
        for reach in largest * np.geomspace(0.05, 1, 200)
    ]
    assert error <= 1.02 * min(tried)


@pytest.mark.parametrize("name", ["uint2", "uint4", "uint8"])
@pytest.mark.parametrize("offset", [0.0, 1.0, -3.0])
def test_no_affine_range_loses_much_less(offset, name):
    x = NORMAL[:4000] + np.float32(offset)
    spec = dt.QuantSpec(name, symmetric=False)
    error = error_of(x, MSE().observe(x).params(spec))
    lo, hi = min(float(x.min()), 0.0), max(float(x.max()), 0.0)
    tried = [
        error_of(x, dt.QuantParams.from_range(spec, lo * below, hi * above, dtype="float32"))
        for below in np.linspace(0.3, 1, 20)
        for above in np.linspace(0.3, 1, 20)
    ]
    assert error <= 1.03 * min(tried)


@pytest.mark.parametrize("make", [MSE, Entropy])
def test_fewer_codes_have_a_smaller_range(make):
    observer = make().observe(NORMAL)
    reach = [float(observer.range(name).hi) for name in ("int2", "int4", "int8")]
    assert reach == sorted(reach)
    assert reach[0] < reach[-1] <= NORMAL.max()


@pytest.mark.parametrize("make", [MSE, Entropy])
def test_params_are_those_of_the_range_of_the_spec(make):
    observer = make().observe(NORMAL)
    for name in ("int4", "uint8"):
        lo, hi = observer.range(name)
        assert observer.params(name) == dt.QuantParams.from_range(name, lo, hi, dtype="float32")


@pytest.mark.parametrize("make", [MSE, Entropy])
def test_each_parameter_set_is_searched_separately(make):
    x = NORMAL.reshape(5, -1) * np.array([[1], [10], [0.1], [1e-3], [0]], np.float32)
    together = make(granularity="axis0").observe(x).range("int4")
    for i, row in enumerate(x):
        alone = make().observe(row).range("int4")
        np.testing.assert_allclose(
            [together.lo[i], together.hi[i]], alone, rtol=1e-3
        )  # searched alone, the steps differ


@pytest.mark.parametrize("make", [MSE, Entropy])
def test_kernels_give_the_same_params(make):
    observer = make().observe(NORMAL[:500])
    params = observer.params("int4")
    with dt.use_kernels("reference"):
        assert observer.params("int4") == params


def test_more_weight_means_less_error():
    x = NORMAL[:5000]
    large = np.abs(x) > 2
    plain, heavy = MSE().observe(x).params("int4"), MSE().observe(x, np.where(large, 100.0, 1.0)).params("int4")
    assert error_of(x[large], heavy) < error_of(x[large], plain)
    assert error_of(x, heavy) > error_of(x, plain)


def test_mse_is_at_least_as_good_as_min_max():
    x = np.random.default_rng(3).standard_t(3, size=5000).astype(np.float32)
    for name in ("int2", "int4", "uint4", "int8"):
        assert error_of(x, MSE().observe(x).params(name)) <= 1.001 * error_of(x, MinMax().observe(x).params(name))


def test_scales_that_depend_on_one_another_are_not_searched():
    x = NORMAL[:64].reshape(2, 32)
    spec = dt.QuantSpec.parse("nvfp4")
    with pytest.raises(dt.UnsupportedError, match="use MinMax"):
        MSE(granularity=spec.granularity).observe(x).params(spec)


@every_histogram
def test_the_spec_has_the_granularity_of_the_observer(make):
    with pytest.raises(dt.ShapeError, match="use the same granularity for both"):
        make(granularity="axis0").observe(NORMAL.reshape(4, -1)).params("int8")


@every_histogram
def test_ranges_do_not_follow_the_observer(make):
    observer = make().observe(NORMAL[:100])
    before = [end.copy() for end in observer.range()]
    bounds = observer.range()
    observer.observe(NORMAL * 100)
    np.testing.assert_equal(list(bounds), before)
