"""The checksum of an array depends on every bit and every position, for every instruction set."""

from __future__ import annotations

import numpy as np
import pytest

from detent.kernels import checksum, native

LEVELS = [name for name, runs in native.levels().items() if runs]
SIZES = (65, 128, 4096, 70_000)


@pytest.fixture(params=LEVELS, autouse=True)
def level(request):
    before = list(native.levels())[native._Level.index]
    native.set_level(request.param)
    yield
    native.set_level(before)


def bits_of(size: int) -> np.ndarray:
    return np.random.default_rng(size).standard_normal(size).astype(np.float32).view(np.uint32)


@pytest.mark.parametrize("size", SIZES)
def test_signs_count(size):
    """The highest bit of a word, flipped an even number of times in one lane."""
    bits, sign = bits_of(size), np.uint32(1 << 31)
    first = checksum(bits)
    assert checksum(bits ^ sign) != first
    for start, stop, stride in ((0, 2, 1), (0, 65, 64), (1, size, 64), (0, size - size % 2, 1)):
        flipped = bits.copy()
        flipped[start:stop:stride] ^= sign
        assert checksum(flipped) != first, (start, stop, stride)


@pytest.mark.parametrize("size", SIZES)
def test_no_two_flipped_bits_cancel(size):
    bits, first = bits_of(size), checksum(bits_of(size))
    rng = np.random.default_rng(0)
    for trial in range(500):
        flipped = bits.copy()
        i = rng.integers(size)
        j = rng.integers(size) if trial % 2 else (i + 64 * rng.integers(4)) % size  # usually the same lane
        for at in (i, j):
            flipped[at] ^= np.uint32(1) << np.uint32(rng.integers(32))
        assert (checksum(flipped) == first) == np.array_equal(flipped, bits)


@pytest.mark.parametrize("size", SIZES)
def test_positions_count(size):
    bits, first = bits_of(size), checksum(bits_of(size))
    rng = np.random.default_rng(1)
    for _ in range(200):
        i, j = rng.choice(size, 2, replace=False)
        swapped = bits.copy()
        swapped[[i, j]] = swapped[[j, i]]
        assert checksum(swapped) != first, (i, j)
