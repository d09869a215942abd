"""Data next to rounding boundaries for every spec, and comparison of each GPU operation with its CPU kernel."""

from __future__ import annotations

from collections import Counter

import ml_dtypes
import numpy as np
from numpy.typing import NDArray
from torch_bits import Case, bits_differ, spread, tensor

import detent as dt
from detent import kernels
from detent.kernels.reference.elements import random_words
from detent.kernels.reference.operators import gradient_factor
from detent.torch import traced_namespace as xp
from detent.torch.gpu import launch

__all__ = ["MAGNITUDES", "differences", "every_value", "tie_points"]

ULPS = 2  # the largest distance from a boundary
END_SHARE = 0.125  # of the points are next to the ends of the range
# powers of two of the scales; tiny: next to the smallest normal number, so that data are subnormal; huge: data overflow
MAGNITUDES = {"ordinary": (-9, 1), "tiny": (-126, -118), "huge": (98, 112)}
MAGNITUDES_OF = {
    "float16": MAGNITUDES | {"tiny": (-24, -16), "huge": (6, 16)},
    "float64": MAGNITUDES | {"tiny": (-1022, -1010), "huge": (980, 1010)},
}


def tie_points(
    spec: dt.QuantSpec, shape: tuple[int, ...], dtype: str, magnitude: str, seed: int, step: int = 0
) -> Case:
    """Make values within two ulps of a rounding boundary; one of 32 is subnormal, and the first few are special."""
    rng = np.random.default_rng(seed)
    params = _parameters(rng, spec, shape, dtype, magnitude)
    tiling = spec.granularity.tiling(shape)
    bounds = _boundaries(rng, spec, shape, spread(params.zero_point, tiling), step)
    info = ml_dtypes.finfo(dtype)
    smallest = float(info.smallest_subnormal)
    with np.errstate(all="ignore"):
        x = np.asarray((bounds * spread(params.scale, tiling).astype(np.float64)).astype(dtype))
        signed = f"i{x.itemsize}"
        ulps = rng.integers(-ULPS, ULPS, size=shape, dtype=signed, endpoint=True)
        x = np.where(np.isfinite(x), (x.view(signed) + ulps).view(x.dtype), x)
        subnormal = (rng.integers(-7, 7, size=x[..., ::32].shape, endpoint=True) * smallest).astype(dtype)
        x[..., ::32] = subnormal
        special = np.array([np.nan, np.inf, -np.inf, 0.0, -0.0, smallest, -smallest, info.max, -info.max]).astype(dtype)
        x.reshape(-1)[: len(special)] = special
        return Case(params, x, rng.normal(size=shape).astype(dtype))


def every_value(spec: dt.QuantSpec, sets: int, dtype: str, magnitude: str, seed: int) -> Case:
    """Make every value of a 16-bit type for each of some scales; the spec must be per-channel along axis 0."""
    rng = np.random.default_rng(seed)
    values = np.arange(65536, dtype=np.uint16).view("float16" if dtype == "float16" else ml_dtypes.bfloat16)
    x = np.tile(values, (sets, 1))
    return Case(_parameters(rng, spec, x.shape, dtype, magnitude), x, rng.normal(size=x.shape).astype(x.dtype))


def _parameters(
    rng: np.random.Generator, spec: dt.QuantSpec, shape: tuple[int, ...], dtype: str, magnitude: str
) -> dt.QuantParams:
    size = spec.granularity.tiling(shape).scale_shape
    powers = rng.integers(*MAGNITUDES_OF.get(dtype, MAGNITUDES)[magnitude], size=size)
    scale = np.asarray(np.ldexp(rng.uniform(1, 2, size=size), powers), "f8" if dtype == "float64" else "f4")
    if spec.symmetric:
        zero = np.full(size, spec.symmetric_zero_point, np.int32)
    else:
        zero = np.asarray(rng.integers(spec.qmin, spec.qmax, size=size, endpoint=True), np.int32)
    return dt.QuantParams(spec, scale, zero)


def _boundaries(
    rng: np.random.Generator, spec: dt.QuantSpec, shape: tuple[int, ...], zero_point: NDArray, step: int
) -> NDArray:
    """Draw values of x / s at which the code of an element changes; a few are out of range."""
    if not spec.format.is_integer:
        levels = np.unique(spec.format.finite_levels)
        return rng.choice([*((levels[1:] + levels[:-1]) / 2), 2 * spec.qmax], size=shape)
    ends = [spec.qmin - 0.5, spec.qmin, spec.qmax, spec.qmax + 0.5]  # masks change here
    if spec.rounding.kind == "floor":
        offsets: NDArray | float = 0.0
    elif spec.rounding.kind == "stochastic":
        words = random_words(np, np.arange(zero_point.size, dtype=np.int64).reshape(shape), spec.rounding.seed, step)
        offsets = (words >> 8) * 2.0**-24
    else:
        offsets = 0.5
    ties = rng.integers(spec.qmin - 3, spec.qmax + 3, size=shape, endpoint=True) + offsets
    return np.where(rng.random(shape) < END_SHARE, rng.choice(ends, size=shape), ties) - zero_point


def differences(spec: dt.QuantSpec, case: Case, ste: dt.ste.Estimator, step: int = 0) -> Counter[str]:
    """Count the elements with different bits in the result of each operation; NaNs may have different bits."""
    params = case.params
    x, g, s, z = map(tensor, (case.x, case.g, params.scale, params.zero_point))
    tiling = spec.granularity.tiling(case.x.shape)
    value = dt.fake_quantize(case.x, params, step=step)
    quantized = dt.quantize(case.x, params, nan="qmin", step=step)
    gradient = dt.fake_quantize_backward(case.g, case.x, params, ste=ste, step=step)
    _, mask = dt.fake_quantize_masked(case.x, params, ste=ste, step=step)
    codes = launch.quantize(x, s, z, spec, "qmin", step)
    y, mask_bits, order = launch.fake_quantize_masked(x, s, z, spec, ste, step)
    factor = gradient_factor(xp, spec, tiling, None, s)
    pairs = [
        ("codes", codes, _storage(quantized.codes)),
        ("outputs", launch.fake_quantize(x, s, z, spec, step), value),
        ("masked outputs", y, value),
        ("values of codes", launch.dequantize(codes, s, z, spec, x.dtype), quantized.dequantize()),
        ("mask bytes", mask_bits, mask),
        ("gradients", launch.fake_quantize_backward(g, x, s, z, spec, ste, step), gradient),
        ("gradients by mask", launch.masked_backward(g, mask_bits, order), gradient),
    ]
    lower_upper = zip(("minima", "maxima"), launch.minmax(x, spec), kernels.minmax(case.x, tiling), strict=False)
    learned = zip(
        ("learned gradients", "gradients of scales", "gradients of zero points"),
        launch.fake_quantize_learned_backward(g, x, s, z, spec, ste, factor, step),
        dt.fake_quantize_learned_backward(case.g, case.x, params, ste=ste, step=step),
        strict=True,
    )
    counts = Counter({name: bits_differ(ours, theirs) for name, ours, theirs in (*pairs, *lower_upper, *learned)})
    return +counts


def _storage(codes: NDArray) -> NDArray:
    return codes if codes.dtype.kind in "iu" else codes.view(np.uint8)
