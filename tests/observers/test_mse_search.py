"""Searched ranges, compared with exhaustive search, with NumPy, and with simple implementations."""

from itertools import pairwise

import numpy as np
import pytest

import detent as dt
from detent.observers import MSE, Entropy, MinMax, Percentile
from detent.observers.entropy import least_divergence
from detent.observers.mse import Grid


def distribution(name: str, size: int) -> np.ndarray:
    rng = np.random.default_rng(3)
    half = size // 2
    makers = {
        "normal": lambda: rng.normal(size=size),
        "laplace": lambda: rng.laplace(size=size),
        "uniform": lambda: rng.uniform(-0.9, 0.9, size),
        "bimodal": lambda: np.concatenate((rng.normal(-1.0, 0.25, half), rng.normal(1.3, 0.15, size - half))),
        "one-sided": lambda: np.abs(rng.normal(size=size)),
        "heavy-tailed": lambda: rng.standard_t(2.5, size),
        "relu": lambda: np.maximum(rng.normal(size=size), 0),
        "negative": lambda: -rng.gamma(2.0, size=size),
    }
    return makers[name]().astype(np.float32)


NAMES = ("normal", "laplace", "uniform", "bimodal", "one-sided", "heavy-tailed", "relu", "negative")


def candidates(spec: dt.QuantSpec, lo: float, hi: float, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Candidate ranges for an exhaustive search: scales, or pairs of bounds."""
    if spec.symmetric:
        reach = max(-lo, hi) * np.linspace(1, 0, count, endpoint=False)
        return np.maximum(lo, -reach), np.minimum(hi, reach)
    shares = np.linspace(1, 0, int(count**0.5), endpoint=False)
    below, above = np.meshgrid(min(lo, 0) * shares, max(hi, 0) * shares)
    return below.ravel(), above.ravel()


def searched_and_best(observer: MSE, spec: dt.QuantSpec, count: int) -> tuple[float, float]:
    """Errors of the searched range and of the best candidate range, on the same histogram."""
    grid, bins, params = Grid(spec, observer.norm, np.dtype("float32")), observer.bins(), observer.params(spec)
    own = grid.errors(bins, np.atleast_2d(params.scale.astype(float)), np.atleast_2d(params.zero_point.astype(float)))
    low, high = candidates(spec, float(bins.lo[0]), float(bins.hi[0]), count)
    return float(own[0, 0]), float(grid.range_errors(bins, low[None], high[None])[0].min())


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("name", NAMES)
def test_no_range_on_the_histogram_is_better(name, bits, symmetric):
    observer = MSE().observe(distribution(name, 100_000))
    searched, best = searched_and_best(observer, dt.QuantSpec(f"int{bits}", symmetric=symmetric), 10_000)
    assert searched <= best * 1.001


@pytest.mark.parametrize("norm", [1.0, 2.4, 4.0])
def test_other_norms(norm):
    observer = MSE(norm).observe(distribution("laplace", 20_000))
    searched, best = searched_and_best(observer, dt.QuantSpec("int4"), 1000)
    assert searched <= best * 1.001


@pytest.mark.parametrize("name", ["float8_e4m3fn", "float4_e2m1fn", "nf4", "uint4", "int16"])
def test_other_formats(name):
    observer = MSE().observe(distribution("laplace", 50_000))
    searched, best = searched_and_best(observer, dt.QuantSpec(name), 2500)
    assert searched <= best * 1.001


@pytest.mark.parametrize("convention", ["torch", "oxicuda", "entrenar", "torsh", "rlx", "compressed_tensors"])
@pytest.mark.parametrize("symmetric", [True, False])
def test_the_error_is_that_of_the_convention(convention, symmetric):
    try:
        spec = dt.QuantSpec("int4", symmetric=symmetric, convention=convention)
    except dt.SpecError:
        pytest.skip("the convention has no such spec")
    searched, best = searched_and_best(MSE().observe(distribution("normal", 50_000)), spec, 2500)
    assert searched <= best * 1.001


def mse(x: np.ndarray, params: dt.QuantParams) -> float:
    return dt.metrics.mse(x, dt.fake_quantize(x, params))


@pytest.mark.slow
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("name", NAMES)
def test_no_range_on_the_data_is_better(name, bits, symmetric):
    x = distribution(name, 10**6)
    spec = dt.QuantSpec(f"int{bits}", symmetric=symmetric)
    observer = MSE().observe(x)
    own, bins = mse(x, observer.params(spec)), observer.bins()
    grid = Grid(spec, 2.0, np.dtype("float32"))
    low, high = candidates(spec, float(bins.lo[0]), float(bins.hi[0]), 10_000)
    errors = grid.range_errors(bins, low[None], high[None])[0][0]
    near = np.flatnonzero(errors <= errors.min() * 1.02)  # the error of the histogram is far smaller
    best = min(mse(x, dt.QuantParams.from_range(spec, low[i], high[i])) for i in near[:: max(1, near.size // 150)])
    assert own <= best * (1.001 if bits < 8 else 1.005)


def test_parameter_sets_are_searched_independently():
    x = np.stack([distribution(name, 4000) for name in NAMES])
    for spec in ("int4/axis0", "uint8/axis0/affine"):
        together = MSE(granularity="axis0").observe(x).params(spec)
        alone = [MSE().observe(row).params(spec.replace("axis0", "tensor")) for row in x]
        for i, params in enumerate(alone):
            ratio = mse(x[i], dt.QuantParams(params.spec, together.scale[i], together.zero_point[i])) / mse(
                x[i], params
            )
            assert ratio == pytest.approx(1, abs=2e-3)


def test_importance_moves_the_range():
    x = distribution("laplace", 50_000)
    outer = MSE().observe(x, np.where(np.abs(x) > 3, 100.0, 1.0)).range("int4").hi
    inner = MSE().observe(x, np.where(np.abs(x) > 3, 0.0, 1.0)).range("int4").hi
    assert inner < MSE().observe(x).range("int4").hi < outer


def test_weights_count_as_repetitions():
    x = distribution("normal", 5000)
    times = np.random.default_rng(0).integers(0, 4, x.size)
    weighted, repeated = MSE().observe(x, times).bins(), MSE().observe(np.repeat(x, times)).bins()
    kept = weighted.mass[0] > 0
    assert np.array_equal(weighted.mass[0][kept], repeated.mass[0])


@pytest.mark.parametrize("precision", [3, 5, 8])
@pytest.mark.parametrize("name", NAMES)
def test_percentiles_are_numpys_within_a_bin(name, precision):
    x = distribution(name, 20_001)
    for lower, upper in ((0, 100), (0.1, 99.9), (1, 99), (25, 75), (0, 50)):
        bounds = Percentile(lower, upper, precision=precision).observe(x).range()
        for mine, exact in zip(bounds, np.percentile(x, (lower, upper)), strict=True):
            assert abs(float(mine) - exact) <= abs(exact) * 2.0**-precision + 1e-30


def test_percentiles_of_few_values():
    x = np.array([3.0, -1.0, 2.0])
    assert Percentile(0, 100).observe(x).range() == (-1.0, 3.0)
    assert Percentile(0, 50).observe(x).range().hi == pytest.approx(2.0, rel=2**-5)


def test_entropy_keeps_the_bulk_and_clips_the_tail():
    x = distribution("normal", 200_000)
    bounds = Entropy().observe(np.append(x, [40.0, -40.0]).astype(np.float32)).range("int8")
    assert 2 < bounds.hi < 12
    assert bounds.lo == -bounds.hi


def test_entropy_is_slow_and_simple_entropy():
    counts = np.random.default_rng(0).integers(0, 50, 64).astype(float)
    codes, best, least = 8, None, np.inf
    for half in range(codes // 2, 33):
        inside = slice(32 - half, 32 + half)
        p = counts[inside].copy()
        p[0] += counts[: inside.start].sum()
        p[-1] += counts[inside.stop :].sum()
        cuts = [j * 2 * half // codes for j in range(codes + 1)]
        q = np.zeros_like(p)
        for a, b in pairwise(cuts):
            held = np.count_nonzero(p[a:b])
            q[a:b] = np.where(p[a:b] > 0, counts[inside][a:b].sum() / max(held, 1), 0)
        full = p > 0
        divergence = (p[full] / p.sum() * np.log(p[full] / p.sum() / (q[full] / q.sum()))).sum()
        if divergence < least:
            best, least = 2 * half / 64, divergence
    assert least_divergence(counts, codes) == best


def test_more_codes_than_bins_need_no_entropy():
    x = distribution("normal", 1000)
    assert Entropy().observe(x).range("int16") == MinMax().observe(x).range()


def test_two_level_scales_are_rejected():
    observer = MSE(granularity=dt.nvfp4.granularity).observe(np.ones((2, 32), np.float32))
    with pytest.raises(dt.UnsupportedError, match="MinMax"):
        observer.params(dt.nvfp4)


def test_block_formats_are_searched_over_their_scales():
    x = distribution("laplace", 4096).reshape(64, 64)
    params = MSE(granularity=dt.mxfp4.granularity).observe(x).params(dt.mxfp4)
    assert mse(x, params) <= mse(x, dt.QuantParams.from_data(dt.mxfp4, x))
    assert np.array_equal(np.exp2(np.rint(np.log2(params.scale))), params.scale)


@pytest.mark.parametrize("spec", ["int4", "uint8", "int2", "uint4/tensor/affine", "float8_e4m3fn"])
@pytest.mark.parametrize("data", [(10.0, 10.0001), (-3.0, -2.9999), (1e-3, 1.1e-3), (5.0, 5.0)])
def test_narrow_data_far_from_zero(data, spec):
    x = np.array(data, np.float32)
    for observer in (MSE(), MSE(1.0), Entropy(), Percentile()):
        bounds = observer.observe(x).range()
        assert bounds.lo <= bounds.hi
        assert mse(x, observer.params(spec)) <= 0.02 * np.square(x).max()


@pytest.mark.parametrize("spec", ["uint8/tensor/affine", "int8"])
def test_zeros_do_not_move_the_entropy_range(spec):
    x = np.abs(distribution("normal", 50_000))
    without = Entropy().observe(x).range(spec).hi
    assert Entropy().observe(np.append(x, np.zeros(50_000, np.float32))).range(spec).hi == without


def test_entropy_of_affine_specs_has_the_proportions_of_the_data():
    x = np.append(distribution("one-sided", 50_000), np.float32(-4e-6))
    bounds = Entropy().observe(x).range("uint8/tensor/affine")
    assert bounds.hi == pytest.approx(float(Entropy().observe(np.abs(x)).range("uint8/tensor/affine").hi), rel=0.05)


def test_already_quantized_data_with_more_precision():
    x = dt.fake_quantize(distribution("normal", 50_000), dt.QuantParams(dt.QuantSpec("int8"), scale=np.float32(0.03)))
    assert mse(x, MSE(precision=10).observe(x).params("int8")) < 1e-6
