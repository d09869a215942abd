"""Native sums, largest errors and metrics equal the reference bit for bit, because the accumulation order is fixed."""

from itertools import product
from math import isnan
from struct import pack

import ml_dtypes
import numpy as np
import pytest

import detent as dt
from detent.errors import UnsupportedError
from detent.kernels import error_sum, largest_error, power_of_two, tree_sum

from .layouts import LAYOUTS
from .pairwise import pairwise
from .twins import DTYPES, LEVELS, at, dtype_of

TERMS = ("value", "square", "squared_error", "absolute_error", "product")
SIZES = ("value", "absolute_error")  # the terms of largest_error
LENGTHS = (*range(131), 1023, 1024, 1025, 2047, 2048, 2049, 5000, 100_003)
EXPONENTS = (-1024, -5, 0, 7, 1000, 1073)
METRICS = ("mse", "mae", "max_error", "sqnr_db", "cosine")


def spread_out(rng, size, dtype):
    """Numbers of very different magnitudes, so that a different accumulation order gives different bits."""
    reach = {"float16": 4, "bfloat16": 30, "float32": 30, "float64": 140}[dtype]
    with np.errstate(all="ignore"):
        return (rng.normal(size=size) * 10.0 ** rng.uniform(-reach, reach, size=size)).astype(dtype_of(dtype))


def alike(rng, size, dtype):
    return rng.normal(size=size).astype(dtype_of(dtype))


def subnormal(rng, size, dtype):
    smallest = float(ml_dtypes.finfo(dtype_of(dtype)).smallest_subnormal)
    return (rng.integers(-9, 10, size=size) * smallest).astype(dtype_of(dtype))


def extreme(rng, size, dtype):
    largest = float(ml_dtypes.finfo(dtype_of(dtype)).max)
    return (rng.uniform(-1, 1, size=size) * largest).astype(dtype_of(dtype))


def specials(*values):
    """Numbers of similar magnitude, with these values at some positions."""

    def make(rng, size, dtype):
        odd = rng.choice(np.array(values), size=size)
        return np.where(rng.random(size) < 0.01, odd, rng.normal(size=size)).astype(dtype_of(dtype))

    return make


DATA = {
    "spread out": spread_out,
    "alike": alike,
    "subnormal": subnormal,
    "extreme": extreme,
    "infinite": specials(np.inf),
    "infinite both ways": specials(np.inf, -np.inf),
    "NaN": specials(np.nan, np.inf),
    "negative zeros": lambda rng, size, dtype: np.full(size, -0.0).astype(dtype_of(dtype)),
}
SAMPLE = pairwise(
    {
        "dtype": DTYPES,
        "second": DTYPES,
        "data": tuple(DATA),
        "other": tuple(DATA),
        "exponent": EXPONENTS,
        "second_exponent": EXPONENTS,
        "length": (1, 3, 31, 130, 1023, 1024, 1025, 2047, 2048, 2049, 5000, 32_768, 40_001),
        "level": LEVELS,
        "threads": (1, 2, 3),
    }
)


def bits(number):
    """Return the bits of a float; all NaNs are equal."""
    assert isinstance(number, float)
    return "nan" if isnan(number) else pack("<d", number).hex()


def both(function, *args):
    """The two results as bits, native first."""
    results = []
    for kernels in ("native", "reference"):
        with dt.use_kernels(kernels), np.errstate(all="ignore"):
            results.append(bits(function(*args)))
    return results


def assert_equal(function, *args, about=None):
    actual, expected = both(function, *args)
    assert actual == expected, (function.__name__, args[0], about)


def assert_sums_equal(x, y, *factors, about=None):
    for term in TERMS:
        assert_equal(error_sum, term, x, y, *factors, about=about)
    for term in SIZES:
        assert_equal(largest_error, term, x, y, about=about)


@pytest.mark.parametrize("number", range(len(SAMPLE)))
def test_sample(number):
    row, rng = SAMPLE[number], np.random.default_rng(number)
    x, y = DATA[row["data"]](rng, row["length"], row["dtype"]), DATA[row["other"]](rng, row["length"], row["second"])
    with at(row["level"], row["threads"]):
        assert_sums_equal(x, y, power_of_two(row["exponent"]), power_of_two(row["second_exponent"]), about=row)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_length(dtype, level):
    rng = np.random.default_rng(0)
    x, y = spread_out(rng, LENGTHS[-1], dtype), alike(rng, LENGTHS[-1], dtype)
    with at(level, threads=2):
        for length in LENGTHS:
            assert_sums_equal(x[:length], y[:length], about=length)


@pytest.mark.parametrize("second", DTYPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_pair_of_types(dtype, second):
    rng = np.random.default_rng(0)
    x, y = spread_out(rng, 3333, dtype), alike(rng, 3333, second)
    for level, exponent in product(LEVELS, EXPONENTS):
        with at(level):
            assert_sums_equal(x, y, power_of_two(exponent), power_of_two(-5), about=(level, exponent))


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_sign_of_a_sum_of_zeros(dtype, level):
    with at(level):
        for length in (0, 1, 2, 7, 8, 1023, 1024, 1025, 2047, 2048, 2049, 3072, 4096, 5120):
            x = np.full(length, -0.0).astype(dtype_of(dtype))
            assert_equal(error_sum, "value", x, x, about=length)
            x[length // 2 : length // 2 + 1] = 0.0
            assert_equal(error_sum, "value", x, x, about=length)
            assert_sums_equal(x, -x, about=length)


def test_a_negative_zero_comes_from_whole_blocks_alone():
    for kernels in ("native", "reference"):
        with dt.use_kernels(kernels):
            sums = {size: bits(tree_sum(np.full(size, -0.0))) for size in (0, 1, 1023, 1024, 1025, 2048, 3072)}
        assert {size for size, sum_ in sums.items() if sum_ == bits(-0.0)} == {1024, 2048}


@pytest.mark.parametrize("threads", [1, 2, 3, 7])
@pytest.mark.parametrize("size", [32_767, 32_768, 32_769, 36_865, 100_003])
def test_threads(size, threads):
    rng = np.random.default_rng(0)
    x, y = spread_out(rng, size, "float64"), alike(rng, size, "float32")
    with at(threads=threads):
        assert_sums_equal(x, y)


@pytest.mark.parametrize("where", [0, 1, 1023, 1024, 1030, 39_999])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, -9.0])
@pytest.mark.parametrize("dtype", DTYPES)
def test_one_odd_element_anywhere(dtype, value, where):
    x, y = np.ones(40_000, dtype_of(dtype)), np.zeros(40_000, dtype_of(dtype))
    x[where] = value
    with at(threads=2):
        assert_sums_equal(x, y)
        assert_sums_equal(y, x)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_layouts(dtype, layout):
    rng = np.random.default_rng(0)
    x, y = (LAYOUTS[layout](spread_out(rng, (41, 53), dtype)) for _ in range(2))
    assert_sums_equal(x, y)


@pytest.mark.parametrize("dtype", DTYPES)
def test_zero_dimensions_and_empty_arrays(dtype):
    for shape in ((), (0,), (3, 0), (1, 1)):
        x = np.full(shape, -1.5).astype(dtype_of(dtype))
        assert_sums_equal(x, -x, about=shape)


@pytest.mark.parametrize("level", LEVELS)
def test_tree_sum(level):
    rng = np.random.default_rng(0)
    with at(level):
        for size in LENGTHS:
            assert_equal(tree_sum, spread_out(rng, size, "float64"), about=size)


def test_data_that_only_the_reference_takes():
    x = np.ones(3, ml_dtypes.float8_e4m3fn)
    with dt.use_kernels("native"):
        for function in (error_sum, largest_error):
            with pytest.raises(UnsupportedError, match="no native kernel"):
                function("value", x, x)
    with dt.use_kernels("auto"):
        assert error_sum("value", x, x) == 3.0
        assert largest_error("value", x, x) == 1.0


@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("kind", DATA)
@pytest.mark.parametrize("dtype", DTYPES)
def test_metrics(dtype, kind, metric):
    rng = np.random.default_rng(0)
    function = getattr(dt.metrics, metric)
    for size in (0, 1, 7, 1025, 40_001):
        x, y = DATA[kind](rng, size, dtype), DATA[kind](rng, size, dtype)
        for other in (y, x, np.zeros_like(x), alike(rng, size, "float32")):
            assert_equal(function, x, other, about=size)
            assert_equal(function, other, x, about=size)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("form", ["int8", "uint4", "nf4", "float8_e4m3fn"])
def test_metrics_of_codes(form, dtype):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(33, 1001)).astype(dtype_of(dtype))
    params = dt.QuantParams.from_data(dt.QuantSpec(form, dt.PerToken()), x)
    assert_equal(dt.metrics.clip_fraction, 2 * x, params)
    assert_equal(dt.metrics.code_usage, dt.quantize(x, params))
    assert_equal(dt.metrics.entropy_bits, dt.quantize(x, params))
