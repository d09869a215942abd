"""Native histograms and grid errors equal the reference; the reference is close to numerical integration."""

from itertools import product

import numpy as np
import pytest

import detent as dt
from detent.kernels import bin_edges, grid_errors, histogram, minmax

from .layouts import LAYOUTS
from .twins import DTYPES, LEVELS, at, difference, dtype_of

# All except the last have more than 2^15 elements, so that kernels use several threads.
GRANULARITIES = {
    "tensor": (dt.PerTensor(), (3, 11003)),
    "axis 0": (dt.PerAxis(0), (9, 37, 101)),
    "axis 1": (dt.PerAxis(1), (5, 7, 1030)),
    "axis last": (dt.PerAxis(-1), (4, 90, 101)),
    "token": (dt.PerToken(), (4, 17, 491)),
    "group, ragged": (dt.PerGroup(128), (17, 2011)),
    "block, ragged": (dt.PerBlock(2, 130), (33, 1001)),
    "block, ragged, small": (dt.PerBlock(2, 3), (2, 5, 8)),
}
SPECIAL = (0.0, -0.0, np.inf, -np.inf, np.nan, 1e-45, -3e-39, 1.2e-38, 5e-324, -1e-310, 6e-8, -65504.0, 3e38, -3.4e38)
SOME_ROWS = (0, 112, 126, 127, 128, 256, 382, 383)
FINITE_ROWS = tuple(row for row in range(512) if row % 256 != 255)
BITS = (1, 5, 10)


def data(dtype, shape, seed=0):
    """Numbers around 1; one in four is a special value."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=shape) * 2.0 ** rng.integers(-4, 4, size=shape)
    with np.errstate(all="ignore"):
        return np.where(rng.random(shape) < 0.25, rng.choice(SPECIAL, size=shape), x).astype(dtype_of(dtype))


def weights_of(shape, seed=0):
    """Integers of up to 40 bits, and zeros."""
    rng = np.random.default_rng(seed)
    return rng.integers(0, 2**40, size=shape) * (rng.random(shape) < 0.8)


def places(rows):
    """The index of each of these rows, and -1 for all other rows."""
    table = np.full(512, -1, np.int16)
    table[list(rows)] = np.arange(len(rows))
    return table


def result(kernels, x, granularity, bits, rows=SOME_ROWS, weights=None):
    """The results of a histogram whose counts start at 7."""
    tiling = granularity.tiling(x.shape)
    counts = np.full((len(rows), tiling.sets, 2**bits), 7, np.int64)
    with dt.use_kernels(kernels), np.errstate(all="ignore"):
        missed, good, (low, high, odd) = histogram(x, tiling, bits, places(rows), counts, weights)
    return missed, np.array(good), low, high, np.array(odd), counts


def differences(x, granularity, bits, rows=SOME_ROWS, weights=None):
    return difference(*(result(kernels, x, granularity, bits, rows, weights) for kernels in ("native", "reference")))


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("bits", [pytest.param(1, marks=pytest.mark.slow), 5, 10])
@pytest.mark.parametrize("name", GRANULARITIES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_granularity(dtype, name, bits, weighted):
    granularity, shape = GRANULARITIES[name]
    x, weights = data(dtype, shape), weights_of(shape) if weighted else None
    expected = result("reference", x, granularity, bits, weights=weights)
    for level, threads in product(LEVELS, (1, 2, 3)):
        with at(level, threads):
            actual = result("native", x, granularity, bits, weights=weights)
            assert difference(actual, expected) is None, (level, threads)


@pytest.mark.parametrize("rows", [(), (127,), FINITE_ROWS], ids=["none", "one", "all"])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("granularity", [dt.PerTensor(), dt.PerAxis(0), dt.PerAxis(1)], ids=str)
def test_however_many_rows_are_known(granularity, weighted, rows):
    x, weights = data("float32", (3, 200)), weights_of((3, 200)) if weighted else None
    for level in LEVELS:
        with at(level):
            assert differences(x, granularity, 5, rows, weights) is None, level


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_length(dtype, level):
    with at(level, threads=3):
        for size in (*range(131), 1023, 1025, 4095, 4097):
            assert differences(data(dtype, (size,), size), dt.PerTensor(), 5) is None, size


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("granularity", [dt.PerAxis(0), dt.PerAxis(1), dt.PerGroup(5), dt.PerBlock(2, 3)], ids=str)
def test_every_length_of_rows(granularity, level):
    with at(level):
        for size in range(131):
            x, weights = data(DTYPES[size % 4], (3, size), size), weights_of((3, size)) if size % 3 else None
            assert differences(x, granularity, 5, weights=weights) is None, size


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("granularity", [dt.PerTensor(), dt.PerAxis(0), dt.PerAxis(1)], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_in_memory(layout, granularity, weighted):
    x, weights = (LAYOUTS[layout](array) for array in (data("float32", (40, 52)), weights_of((40, 52))))
    assert differences(x, granularity, 5, weights=weights if weighted else None) is None


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("level", LEVELS)
def test_all_16_bit_floats(level, dtype, bits):
    x = np.arange(1 << 16, dtype=np.uint16).view(dtype_of(dtype))
    with at(level), np.errstate(invalid="ignore"):  # ml_dtypes warns of signalling NaN
        actual = result("native", x, dt.PerTensor(), bits, FINITE_ROWS)
        wide = x.astype(np.float32) + np.float32(0)
        assert differences(x, dt.PerTensor(), bits, FINITE_ROWS) is None
    keys = wide.view(np.uint32) >> (23 - bits)
    expected = np.bincount(keys, minlength=512 << bits).reshape(512, 1, 1 << bits)[list(FINITE_ROWS)] + 7
    assert difference(actual[-1], expected) is None


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kernels", ["native", "reference"])
def test_elements_lie_between_the_edges_of_their_bin(kernels, dtype):
    lower, upper = bin_edges(np.array(FINITE_ROWS), 5)
    for x in data(dtype, (300,)):
        if np.isfinite(x):
            counts = result(kernels, np.atleast_1d(x), dt.PerTensor(), 5, FINITE_ROWS)[-1]
            row, _, place = np.argwhere(counts == 8)[0]
            wide = float(x) + 0.0
            assert lower[row, place] <= wide <= upper[row, place]
            assert abs(wide) < max(abs(lower[row, place]), abs(upper[row, place]))


@pytest.mark.parametrize("dtype", DTYPES)
def test_zero_has_one_bin(dtype):
    x = np.array([0.0, -0.0] * 20).astype(dtype_of(dtype))
    actual = result("native", x, dt.PerTensor(), 5, (0, 256))[-1]
    assert actual[0, 0, 0] == 47
    assert (actual.ravel()[1:] == 7).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_nothing_finite(dtype):
    x = np.array([np.nan, np.inf, -np.inf] * 11).astype(dtype_of(dtype))
    assert differences(x, dt.PerTensor(), 5) is None
    missed, _, _, _, odd, counts = result("native", x, dt.PerTensor(), 5)
    assert (not missed.any(), odd, (counts == 7).all()) == (True, 33, True)


@pytest.mark.parametrize("granularity", [dt.PerTensor(), dt.PerAxis(0), dt.PerAxis(1)], ids=str)
def test_bounds_are_those_of_minmax(granularity):
    x = data("float32", (7, 300))
    with dt.use_kernels("native"):
        expected = minmax(x, granularity.tiling(x.shape))
    actual = result("native", x, granularity, 5)
    assert difference(actual[2:4], expected[:2]) is None
    assert actual[4] == expected[2]


@pytest.mark.parametrize(
    ("granularity", "shape"),
    [
        (dt.PerTensor(), ()),
        (dt.PerTensor(), (0,)),
        (dt.PerAxis(0), (3, 0)),
        (dt.PerAxis(0), (0, 3)),
        (dt.PerGroup(2), (3, 0)),
    ],
    ids=str,
)
def test_zero_dimensions_and_empty_arrays(granularity, shape):
    assert differences(np.ones(shape, np.float32), granularity, 5) is None


def beyond(x):
    """Whether both kernels find all finite elements in the range of float32; the reference kernel runs first."""
    return [bool(result(kernels, x, dt.PerAxis(0), 5)[1]) for kernels in ("reference", "native")]


def test_the_largest_float32_is_good():
    x = np.array([[3.4028234663852886e38, 1.0], [-3.4028234663852886e38, np.inf]])
    assert beyond(x) == [True, True]


@pytest.mark.parametrize(
    "value",
    [2.0**128, -(2.0**128), 1e39, -1e40, 1e300, -1e300, 1.7e308],
)
@pytest.mark.parametrize("sets", [1, 2])
def test_numbers_beyond_float32_are_told(sets, value):
    x = np.ones((sets, 70))
    x[-1, 33] = value
    assert beyond(x) == [False, False]


@pytest.mark.parametrize("granularity", [dt.PerTensor(), dt.PerAxis(0), dt.PerAxis(1)], ids=str)
def test_elements_that_weigh_nothing_are_missed_all_the_same(granularity):
    x, weights = np.array([[1.0, 5.0], [1.0, 1.0]]), np.array([[3, 0], [1, 2]])
    assert differences(x, granularity, 5, (127,), weights) is None


LEVELS_OF = {
    name: np.unique(dt.QuantSpec(name).format.finite_levels) for name in ("float4_e2m1fn", "nf4", "float8_e4m3fn")
}
GRIDS = {
    "int4": ((-7.0, 7.0), np.empty(0)),
    "int8": ((-128.0, 127.0), np.empty(0)),
    "uint8": ((0.0, 255.0), np.empty(0)),
    "uint1": ((0.0, 1.0), np.empty(0)),
    **{name: ((levels[0], levels[-1]), levels) for name, levels in LEVELS_OF.items()},
}


def some_bins(count, sets=3, seed=0):
    """Adjacent bins around zero, some of them empty. Bounds cut the outermost bins of each set; one set is a point."""
    rng = np.random.default_rng(seed)
    edges = np.sort(rng.normal(size=count + 1)) * 4
    mass = rng.integers(0, 50, size=(sets, count)) * (rng.random((sets, count)) < 0.8)
    lo, hi = np.full(sets, edges[0] + 0.1), np.full(sets, edges[-1] - 0.1)
    lo[-1] = hi[-1] = (edges[0] + edges[-1]) / 2
    return edges[:-1], edges[1:], mass.astype(np.float64), lo, np.maximum(lo, hi)


def candidates(grid, count, sets=3, seed=0):
    """Scales that clip and scales that do not, and zero points for integer formats."""
    rng = np.random.default_rng(seed)
    (low, high), levels = GRIDS[grid]
    scale = 2.0 ** rng.uniform(-2, 2, size=(sets, count)) * 8 / (high - low)
    zero = np.zeros(scale.shape) if levels.size else rng.integers(int(low), int(high) + 1, size=scale.shape)
    return scale, zero.astype(np.float64)


def errors(kernels, norm, grid, bins, scale, zero):
    ends, levels = GRIDS[grid]
    with dt.use_kernels(kernels):
        return grid_errors(norm, ends, levels, bins, scale, zero)


@pytest.mark.parametrize("norm", [1, 2])
@pytest.mark.parametrize("grid", GRIDS)
def test_grid_errors_of_many_bins(grid, norm):
    for count in (0, 1, 2, 7, 8, 9, 15, 16, 17, 100):
        bins, tried = some_bins(count, seed=count), candidates(grid, 5, seed=count)
        expected = errors("reference", norm, grid, bins, *tried)
        for level, threads in product(LEVELS, (1, 2, 3)):
            with at(level, threads):
                actual = errors("native", norm, grid, bins, *tried)
                assert difference(actual, expected) is None, (count, level, threads)


@pytest.mark.parametrize("norm", [1, 2])
def test_grid_errors_on_several_threads(norm):
    bins, tried = some_bins(64, sets=40), candidates("int8", 20, sets=40)
    expected = errors("reference", norm, "int8", bins, *tried)
    for threads in (1, 2, 3):
        with at(threads=threads):
            assert difference(errors("native", norm, "int8", bins, *tried), expected) is None, threads


@pytest.mark.parametrize("kernels", ["native", "reference"])
@pytest.mark.parametrize(("sets", "count"), [(3, 0), (0, 4), (0, 0)])
def test_grid_errors_of_no_candidates_or_no_sets(sets, count, kernels):
    bins = some_bins(5)
    bins = (*bins[:2], bins[2][:sets], bins[3][:sets], bins[4][:sets])
    actual = errors(kernels, 2, "int4", bins, np.ones((sets, count)), np.zeros((sets, count)))
    assert actual.shape == (sets, count)


@pytest.mark.parametrize("kernels", ["native", "reference"])
@pytest.mark.parametrize("grid", GRIDS)
def test_grid_errors_of_a_point(grid, kernels):
    x, scale = 1.25, 0.375
    bins = tuple(np.array(part) for part in ([1.0], [1.5], [[3.0]], [x], [x]))
    (low, high), levels = GRIDS[grid]
    all_levels = (levels if levels.size else np.arange(low, high + 1)) * scale
    distance = np.abs(all_levels - x).min()
    for norm in (1, 2):
        actual = errors(kernels, norm, grid, bins, np.array([[scale]]), np.zeros((1, 1)))
        assert actual.item() == pytest.approx(3 * distance**norm, rel=1e-12)


def integrated(norm, grid, bins, scale, zero):
    """Compute the errors by the midpoint rule, slowly."""
    (low, high), levels = GRIDS[grid]
    total = 0.0
    for lower, upper, mass, lo, hi in bins:
        a, b = max(lower, lo), min(upper, hi)
        x = a + (b - a) * (np.arange(20_000) + 0.5) / 20_000 if a < b else np.array([a])
        at_scale = (levels if levels.size else np.arange(low, high + 1) - zero) * scale
        middles = (at_scale[1:] + at_scale[:-1]) / 2
        nearest = at_scale[np.searchsorted(middles, x)]
        total += mass * np.mean(np.abs(x - nearest) ** norm)
    return total


@pytest.mark.parametrize("norm", [1, 2, 2.4])
@pytest.mark.parametrize("grid", GRIDS)
def test_grid_errors_are_integrals(grid, norm):
    lower, upper, mass, lo, hi = bins = some_bins(9, seed=5)
    scale, zero = candidates(grid, 3, seed=5)
    actual = errors("auto", norm, grid, bins, scale, zero)
    for i, j in np.ndindex(scale.shape):
        own = [(*ends, lo[i], hi[i]) for ends in zip(lower, upper, mass[i], strict=True)]
        assert actual[i, j] == pytest.approx(integrated(norm, grid, own, scale[i, j], zero[i, j]), rel=1e-4), (i, j)
