"""The native minimum and maximum equal the reference, for every instruction set and any number of threads."""

from itertools import product

import numpy as np
import pytest

import detent as dt
from detent.kernels import minmax

from .twins import DTYPES, GRANULARITIES, LEVELS, Trial, at, difference, dtype_of

SIZES = (*range(1, 131), 1023, 1025, 4095, 4097, 32767, 32769)


def differences(x, granularity):
    """Return the mismatches between native and reference: lows, highs and non-finite counts."""
    tiling = granularity.tiling(x.shape)
    with dt.use_kernels("native"):
        low, high, odd = minmax(x, tiling)
    with dt.use_kernels("reference"):
        expected = minmax(x, tiling)
    mismatches = [difference(low, expected[0]), difference(high, expected[1]), odd - expected[2] or None]
    return [each for each in mismatches if each is not None]


def data(dtype, shape, seed=0, granularity=dt.PerTensor()):
    """Data with infinities, NaN, subnormals and zeros of both signs."""
    return Trial("fake_quantize", dtype, granularity, shape, seed=seed).x


@pytest.mark.parametrize("name", GRANULARITIES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_granularity(dtype, name):
    granularity, shape = GRANULARITIES[name]
    x = data(dtype, shape, granularity=granularity)
    for level, threads in product(LEVELS, (1, 2, 3)):
        with at(level, threads):
            assert differences(x, granularity) == [], (level, threads)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_length(dtype, level):
    with at(level, threads=3):
        for size in SIZES:
            assert differences(data(dtype, (size,), size), dt.PerTensor()) == [], size


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("granularity", [dt.PerAxis(0), dt.PerAxis(1), dt.PerGroup(5), dt.PerBlock(2, 3)], ids=str)
def test_every_length_of_rows(granularity, level):
    with at(level):
        for size in range(1, 131):
            x = data(DTYPES[size % 4], (3, size), size, granularity)
            assert differences(x, granularity) == [], size


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("where", [0, 31, 32, 1023, 1024, 4096, 39999])
@pytest.mark.parametrize("value", [-9.0, 9.0, np.inf, -np.inf, np.nan])
def test_one_odd_element_anywhere(value, where, dtype):
    x = np.full(40000, 2.0).astype(dtype_of(dtype))
    x[where] = value
    with at(threads=2):
        assert differences(x, dt.PerTensor()) == []


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("values", [(0.0, -0.0), (-0.0, 0.0), (-0.0, -0.0)])
def test_zeros_of_both_signs(values, dtype):
    x = np.array(values * 20).astype(dtype_of(dtype))
    assert differences(x, dt.PerTensor()) == []


@pytest.mark.parametrize("dtype", DTYPES)
def test_nothing_finite(dtype):
    x = np.array([np.nan, np.inf, -np.inf] * 11).astype(dtype_of(dtype))
    assert differences(x, dt.PerTensor()) == []


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("level", LEVELS)
def test_all_16_bit_floats_one_by_one(level, dtype):
    x = np.arange(1 << 16, dtype=np.uint16).view(dtype_of(dtype)).reshape(-1, 1)
    with at(level), np.errstate(invalid="ignore"):  # ml_dtypes warns of signalling NaN
        assert differences(x, dt.PerToken()) == []


@pytest.mark.parametrize(
    "view", [lambda a: a[::-1, ::-1], lambda a: a[:, ::2], lambda a: a.T, lambda a: a[1:, 3:]], ids=range(4)
)
def test_strides(view):
    assert differences(view(data("float32", (40, 52))), dt.PerAxis(0)) == []


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
    assert differences(np.ones(shape, np.float32), granularity) == []
