"""Helpers for tests of the PyTorch frontend: tensors next to ties, and comparison by bits."""

from __future__ import annotations

import zlib
from typing import NamedTuple

import ml_dtypes
import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

import detent as dt

__all__ = [
    "BFLOAT16",
    "WEIGHT_AND_INPUT_BY_ROUNDING",
    "Case",
    "array",
    "assert_same",
    "bits",
    "bits_differ",
    "make_case",
    "spread",
    "tensor",
]

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
SCALES = (0.0123, 0.3, 0.017)
WEIGHT_AND_INPUT_BY_ROUNDING = {
    "half_even": ("int4/axis0", "uint8"),
    "stochastic": (
        dt.QuantSpec("int4", "axis0", rounding="stochastic(1)"),
        dt.QuantSpec("uint8", rounding="stochastic(2)"),
    ),
}


def tensor(a: ArrayLike) -> torch.Tensor:
    """A copy of the array as a tensor."""
    a = np.array(a, order="C")
    return torch.from_numpy(a.view(np.int16)).view(torch.bfloat16) if a.dtype == BFLOAT16 else torch.from_numpy(a)


def array(t: torch.Tensor) -> NDArray:
    """A copy of the tensor as an array, in C order."""
    t = t.detach().clone(memory_format=torch.contiguous_format)
    return t.view(torch.int16).numpy().view(BFLOAT16) if t.dtype == torch.bfloat16 else t.numpy()


def bits(value: torch.Tensor | NDArray) -> tuple[str, tuple[int, ...], bytes]:
    """A key of dtype, shape and bits."""
    a = np.ascontiguousarray(array(value) if isinstance(value, torch.Tensor) else value)
    return str(a.dtype), a.shape, a.tobytes()


def assert_same(got: torch.Tensor, expected: torch.Tensor | NDArray, what: object = "") -> None:
    """Check that dtype, shape and bits are equal; NaNs may differ in their bits."""
    ours = array(expected) if isinstance(expected, torch.Tensor) else np.asarray(expected)
    theirs = array(got)
    assert (theirs.dtype, theirs.shape) == (ours.dtype, ours.shape), what
    nan = np.isnan(ours.astype(np.float64))
    assert np.array_equal(nan, np.isnan(theirs.astype(np.float64))), what
    kind = f"u{ours.dtype.itemsize}"
    bad = (theirs.view(kind) != np.array(ours, order="C").view(kind)) & ~nan
    assert not bad.any(), f"{what}: {int(bad.sum())} of {bad.size} differ, {theirs[bad][:4]} for {ours[bad][:4]}"


def bits_differ(got: torch.Tensor, expected: NDArray) -> int:
    """Count the elements with different bits; NaNs may differ in their bits. Dtype and shape must be equal."""
    ours, theirs = array(got), np.array(expected, order="C")
    assert (ours.dtype, ours.shape) == (theirs.dtype, theirs.shape)
    kind = f"u{ours.dtype.itemsize}"
    different = ours.view(kind) != theirs.view(kind)
    if different.any():
        different &= ~(np.isnan(ours.astype(np.float64)) & np.isnan(theirs.astype(np.float64)))
    return int(different.sum())


class Case(NamedTuple):
    """Parameters with data and a gradient."""

    params: dt.QuantParams
    x: NDArray
    g: NDArray


def make_case(spec: dt.QuantSpec, shape: tuple[int, ...], dtype: str = "float32", *, nasty: bool = True) -> Case:
    """Data at ties, next to ties and out of range; `nasty` adds NaN, infinities, zeros and subnormals in front."""
    rng = np.random.default_rng(zlib.crc32(f"{spec} {shape} {dtype}".encode()))
    tiling = spec.granularity.tiling(shape)
    scale = np.asarray(rng.choice(SCALES, size=tiling.scale_shape)).astype("float64" if dtype == "float64" else "f4")
    zero = np.full(tiling.scale_shape, spec.symmetric_zero_point if spec.symmetric else 0, np.int32)
    if not spec.symmetric:
        zero = np.asarray(rng.integers(spec.qmin, spec.qmax, size=tiling.scale_shape, endpoint=True), np.int32)
    wide_scale, wide_zero = spread(scale, tiling), spread(zero, tiling)
    if spec.format.is_integer:
        reach = min(spec.qmax - spec.qmin, 300)
        ties = rng.integers(-reach, reach, size=shape) + 0.5 - (wide_zero if spec.bits < 16 else 0)
    else:
        levels = np.array(spec.format.finite_levels)
        ties = rng.choice([*((levels[1:] + levels[:-1]) / 2), 2 * spec.qmax], size=shape)
    with np.errstate(all="ignore"):
        x = np.asarray((ties * wide_scale.astype(np.float64)).astype(dtype))
        towards = np.asarray(rng.choice([-np.inf, 0.0, np.inf], size=shape)).astype(dtype)
        x = np.where(towards == 0, x, np.nextafter(x, towards))
    g = np.asarray(rng.normal(size=shape).astype(dtype))
    if nasty and x.size:
        info = ml_dtypes.finfo(dtype)
        special = [np.nan, np.inf, -np.inf, 0.0, -0.0, float(info.smallest_subnormal), float(info.max), -1e-3]
        x.reshape(-1)[: len(special)] = np.array(special[: x.size]).astype(dtype)
        g.reshape(-1)[-2:] = np.array([np.inf, -0.0]).astype(dtype)[: g.size]
    return Case(dt.QuantParams(spec, scale, zero), x, g)


def spread(values: NDArray, tiling: dt.granularity.Tiling) -> NDArray:
    """The value of each element's parameter set."""
    values = values.reshape(tiling.grid)
    for axis, (size, block) in enumerate(zip(tiling.shape, tiling.block, strict=True)):
        values = np.repeat(values, block, axis=axis).take(range(size), axis=axis)
    return values
