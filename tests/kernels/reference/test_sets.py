"""Sets: sums and ranges of each set, compared with simple implementations that process one element at a time."""

import numpy as np
import pytest

import detent as dt
from detent.kernels.reference.sets import minmax, sum_sets, tree_sum

TILINGS = [
    (dt.PerTensor(), (3, 700)),
    (dt.PerAxis(0), (3, 1100)),
    (dt.PerAxis(1), (1100, 2)),
    (dt.PerToken(), (2, 3, 1030)),
    (dt.PerGroup(1500), (2, 3200)),
    (dt.PerGroup(3, axis=0), (8, 3)),
    (dt.PerBlock(40, 50), (90, 120)),
]


def slow_sum(terms):
    """Sum block by block (1024 elements), each by adding its halves."""
    sums = []
    for start in range(0, len(terms), 1024):
        block = list(terms[start : start + 1024])
        block += [0.0] * (1024 - len(block))
        while len(block) > 1:
            block = [a + b for a, b in zip(block[: len(block) // 2], block[len(block) // 2 :], strict=True)]
        sums += block
    size = 1
    while size < len(sums):
        size *= 2
    sums += [0.0] * (size - len(sums))
    while len(sums) > 1:
        sums = [a + b for a, b in zip(sums[: len(sums) // 2], sums[len(sums) // 2 :], strict=True)]
    return sums[0]


def members(granularity, shape):
    """The elements of each set in C order, as flat positions."""
    tiling = granularity.tiling(shape)
    positions = {}
    for position, index in enumerate(np.ndindex(shape)):
        tile = tuple(min(i // b, n - 1) for i, b, n in zip(index, tiling.block, tiling.grid, strict=True))
        positions.setdefault(tile, []).append(position)
    return tiling, [positions[tile] for tile in np.ndindex(tiling.grid)]


def terms(shape):
    rng = np.random.default_rng(1)
    return rng.normal(size=shape) * 10.0 ** rng.integers(-9, 9, size=shape)


@pytest.mark.parametrize("size", [0, 1, 1023, 1024, 1025, 2048, 3 * 1024 + 1])
def test_tree_sum(size):
    values = terms(size)
    assert float(tree_sum(values)) == (slow_sum(values.tolist()) if size else 0.0)


@pytest.mark.parametrize(("granularity", "shape"), TILINGS, ids=str)
def test_sum_of_each_set(granularity, shape):
    values = terms(shape)
    tiling, sets = members(granularity, shape)
    expected = [slow_sum(values.ravel()[positions].tolist()) for positions in sets]
    got = sum_sets(np, values, tiling)
    assert got.shape == tiling.scale_shape
    assert np.ravel(got).tolist() == expected


@pytest.mark.parametrize(("granularity", "shape"), TILINGS, ids=str)
def test_range_of_each_set(granularity, shape):
    values = terms(shape)
    values.flat[::7] = np.nan
    values.flat[3::11] = np.inf
    tiling, sets = members(granularity, shape)
    lo, hi = minmax(values, tiling)
    finite = [[v for v in values.ravel()[positions].tolist() if np.isfinite(v)] for positions in sets]
    assert np.ravel(lo).tolist() == [min(part, default=np.inf) for part in finite]
    assert np.ravel(hi).tolist() == [max(part, default=-np.inf) for part in finite]
