"""A million tie-adjacent points to compare with another library, in shapes that it supports.

A `Batch` is one call of a quantizer: an array, the scales and zero points of its parameter sets, and the granularity. A
million points need many per-tensor batches, because a small format has few ties per scale; other batches have many
scales. Zero points are even, odd, qmin and qmax; every point is at most `REACH` floats away from a tie of its set.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

import detent as dt

from .ties import around_ties, many_scales, zero_points

__all__ = ["MILLION", "REACH", "Batch", "axis_batch", "group_batch", "tensor_batches"]

MILLION = 1_000_000
REACH = {4: 15, 8: 5, 16: 1}
"""Floats on either side of a tie, by bit width: small formats have fewer ties, so they need more points per tie."""


@dataclass(frozen=True)
class Batch:
    """An array of tie-adjacent points, with its parameters."""

    x: NDArray[np.float32]
    scale: NDArray[np.float32]
    zero_point: NDArray[np.int32]
    granularity: dt.granularity.Granularity

    def params(self, spec: dt.QuantSpec) -> dt.QuantParams:
        """Parameters of the batch under a spec with its granularity."""
        return dt.QuantParams(spec, scale=self.scale, zero_point=self.zero_point)


def _rows(qmin: int, qmax: int) -> tuple[NDArray[np.float32], NDArray[np.float32], NDArray[np.int32]]:
    """A row of points per (scale, zero point) pair: ties from two codes below the range to two above."""
    reach = REACH[(qmax - qmin).bit_length()]
    row_length = (qmax - qmin + 4) * (2 * reach + 1)
    count = -(-MILLION // row_length)
    choices = np.array(zero_points(qmin, qmax), dtype=np.int32)
    scale, zero = many_scales(count, seed=qmax), choices[np.arange(count) % len(choices)]
    k = np.arange(qmin - 2, qmax + 2) - zero[:, None].astype(np.int64)
    return around_ties(scale[:, None], k, reach).reshape(count, -1), scale, zero


def tensor_batches(qmin: int, qmax: int) -> Iterator[Batch]:
    """One batch per scale."""
    for x, s, z in zip(*_rows(qmin, qmax), strict=True):
        yield Batch(x, np.asarray(s), np.asarray(z), dt.PerTensor())


def axis_batch(qmin: int, qmax: int, axis: int = 0) -> Batch:
    """One batch with one scale per index of the first or the last of two axes."""
    x, scale, zero = _rows(qmin, qmax)
    return Batch(x if axis == 0 else np.ascontiguousarray(x.T), scale, zero, dt.PerAxis(axis))


def group_batch(qmin: int, qmax: int, size: int = 32, axis: int = 1) -> Batch:
    """One batch of 1000 x 1010 points in groups along one axis, the last group of each line incomplete."""
    rng = np.random.default_rng(qmax)
    groups = -(-1010 // size)
    scale = rng.permutation(many_scales(1000 * groups, seed=qmax)).reshape(1000, groups)
    zero = rng.choice(np.array(zero_points(qmin, qmax), dtype=np.int32), size=(1000, groups))
    s, z = (np.repeat(a, size, axis=1)[:, :1010] for a in (scale, zero))
    k = rng.integers(qmin - 2, qmax + 2, size=(1000, 1010)) - z
    center = around_ties(s, k, reach=0)[..., 0]
    reach = REACH[(qmax - qmin).bit_length()]
    x = center + np.spacing(center) * rng.integers(-reach, reach, size=center.shape, endpoint=True).astype(np.float32)
    if axis == 0:
        x, scale, zero = (np.ascontiguousarray(a.T) for a in (x, scale, zero))
    return Batch(x, scale, zero, dt.PerGroup(size, axis=axis))
