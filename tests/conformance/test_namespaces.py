"""The reference kernels on other array libraries: the same bits from NumPy, array_api_strict and torch.

Checked here: every function of `detent.kernels.reference` uses only what the array API standard offers
(array_api_strict has nothing else) and gives NumPy's bits there and on torch CPU tensors: codes, values,
gradients, learned gradients with their sums, and ranges; for every rounding, granularity, kind of format
and input dtype.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

import detent as dt
from detent.kernels import reference

from .grid import GRANULARITIES, ROUNDINGS, Sets
from .ties import SCALES, neighbors, special_values

array_api_strict = pytest.importorskip("array_api_strict")
torch = pytest.importorskip("torch")

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
FORMATS = ("int4", "uint8", "int16", "uint16", "float8_e4m3fn", "float8_e5m2", "float4_e2m1fn", "nf4")
ESTIMATORS = {
    "identity": dt.ste.Identity(),
    "clipped": dt.ste.Clipped(),
    "clipped_value": dt.ste.Clipped(on="value", bounds="exclusive"),
    "hard_tanh": dt.ste.HardTanh(),
}


@dataclass(frozen=True)
class Library:
    """An array library: how arrays go in and come out, and which dtypes it has."""

    name: str
    put: Callable[[NDArray], object]
    get: Callable[[object], NDArray]
    dtypes: tuple[str, ...]
    dtype: Callable[[str], object]


def _to_torch(a: NDArray) -> object:
    if a.dtype == BFLOAT16:
        return torch.from_numpy(np.asarray(a).view(np.int16).copy()).view(torch.bfloat16)
    return torch.from_numpy(np.array(a))


def _from_torch(a: object) -> NDArray:
    if a.dtype == torch.bfloat16:
        return a.view(torch.int16).numpy().view(BFLOAT16)
    return a.numpy()


LIBRARIES = {
    "array_api_strict": Library(
        "array_api_strict",
        array_api_strict.asarray,
        np.asarray,
        ("float32", "float64"),
        lambda name: getattr(array_api_strict, name),
    ),
    "torch": Library(
        "torch",
        _to_torch,
        _from_torch,
        ("float16", "bfloat16", "float32", "float64"),
        lambda name: getattr(torch, name),
    ),
}
CASES = [(library, dtype) for library in LIBRARIES for dtype in LIBRARIES[library].dtypes]


@dataclass(frozen=True)
class Input:
    """One call's arguments as NumPy arrays."""

    spec: dt.QuantSpec
    tiling: dt.granularity.Tiling
    x: NDArray
    g: NDArray
    scale: NDArray
    zero_point: NDArray[np.int32]


def _input(fmt: str, sets: Sets, dtype: str, rounding: str = "half_even", convention: str = "onnx") -> Input:
    """Tie-adjacent data with some special values; an affine spec where the format has zero points."""
    rng = np.random.default_rng(21)
    form = dt.formats.FORMATS[fmt]
    integer = form.kind == "integer"
    spec = dt.QuantSpec(
        fmt,
        sets.granularity,
        symmetric=not integer,
        convention=convention,
        rounding=rounding if integer else None,
    )
    scale = np.asarray(rng.choice(SCALES[:5], size=sets.scale_shape))
    zero = np.asarray(rng.integers(int(spec.qmin), int(spec.qmax), size=sets.scale_shape, endpoint=True))
    zero = zero if integer else np.zeros_like(zero)
    owner = np.reshape(sets.flat, sets.shape)
    k = rng.integers(-20, 20, size=sets.shape)
    with np.errstate(over="ignore"):
        near = neighbors(((k + 0.5) * scale.ravel()[owner]).astype(dtype))
        x = np.take_along_axis(near, (1 + k % 2)[..., None], axis=-1)[..., 0]
        special = special_values("float32" if dtype == "bfloat16" else dtype).astype(dtype)
    x.reshape(-1)[: special.size] = special
    g = rng.normal(size=sets.shape).astype(dtype)
    stored = "float64" if dtype == "float64" else "float32"
    tiling = sets.granularity.tiling(sets.shape)
    return Input(spec, tiling, x, g, scale.astype(stored), zero.astype(np.int32))


def _same_bits(ours: NDArray, theirs: NDArray) -> None:
    assert theirs.dtype == ours.dtype
    assert theirs.shape == ours.shape
    nan = np.isnan(ours.astype(np.float64))
    assert np.array_equal(nan, np.isnan(theirs.astype(np.float64)))
    assert np.ascontiguousarray(theirs)[~nan].tobytes() == np.ascontiguousarray(ours)[~nan].tobytes()


def _compare(library: Library, call: Callable[..., object], *arrays: NDArray) -> None:
    """Run one kernel on NumPy and on the other library; compare every array it returns."""
    with np.errstate(all="ignore"):
        ours, theirs = call(*arrays), call(*(library.put(a) for a in arrays))
    if not isinstance(ours, tuple):
        ours, theirs = (ours,), (theirs,)
    for a, b in zip(ours, theirs, strict=True):
        _same_bits(np.asarray(a), library.get(b))


@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize(("name", "dtype"), CASES)
def test_quantize(name: str, dtype: str, fmt: str, granularity: str) -> None:
    i = _input(fmt, GRANULARITIES[granularity], dtype)
    _compare(
        LIBRARIES[name],
        lambda x, s, z: reference.quantize(x, s, z, spec=i.spec, tiling=i.tiling),
        i.x, i.scale, i.zero_point,
    )  # fmt: skip


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize(("name", "dtype"), CASES)
def test_dequantize(name: str, dtype: str, fmt: str) -> None:
    i, library = _input(fmt, GRANULARITIES["block_ragged"], dtype), LIBRARIES[name]
    numpy_dtype = BFLOAT16 if dtype == "bfloat16" else np.dtype(dtype)
    options = {"spec": i.spec, "tiling": i.tiling}
    with np.errstate(all="ignore"):
        codes = reference.quantize(i.x, i.scale, i.zero_point, **options)
        ours = reference.dequantize(codes, i.scale, i.zero_point, dtype=numpy_dtype, **options)
    put = [library.put(a) for a in (codes, i.scale, i.zero_point)]
    theirs = reference.dequantize(*put, dtype=library.dtype(dtype), **options)
    _same_bits(ours, library.get(theirs))


@pytest.mark.parametrize("convention", ["onnx", "torch", "oxicuda", "baracuda_token"])
@pytest.mark.parametrize("rounding", ROUNDINGS)
@pytest.mark.parametrize(("name", "dtype"), CASES)
def test_fake_quantize_with_every_rounding(name: str, dtype: str, rounding: str, convention: str) -> None:
    rule = "stochastic(123456789012345)" if rounding == "stochastic" else rounding
    i = _input("int8" if convention == "torch" else "uint4", GRANULARITIES["group_ragged"], dtype, rule, convention)
    _compare(
        LIBRARIES[name],
        lambda x, s, z: reference.fake_quantize(x, s, z, spec=i.spec, tiling=i.tiling, step=9),
        i.x, i.scale, i.zero_point,
    )  # fmt: skip


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize(("name", "dtype"), CASES)
def test_fake_quantize_keeps_nan(name: str, dtype: str, fmt: str) -> None:
    i = _input(fmt, GRANULARITIES["axis-1"], dtype)
    i.x[0, 0, 0] = np.nan
    for fill in (None, "zero_point", "qmin"):
        _compare(
            LIBRARIES[name],
            lambda x, s, z, fill=fill: reference.fake_quantize(
                x, s, z, spec=i.spec, tiling=i.tiling, fill=fill
            ),
            i.x, i.scale, i.zero_point,
        )  # fmt: skip


@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize("fmt", ["int4", "uint8", "float8_e4m3fn"])
@pytest.mark.parametrize(("name", "dtype"), CASES)
def test_fake_quantize_backward(name: str, dtype: str, fmt: str, estimator: str) -> None:
    i = _input(fmt, GRANULARITIES["token"], dtype)
    _compare(
        LIBRARIES[name],
        lambda g, x, s, z: reference.fake_quantize_backward(
            g, x, s, z, spec=i.spec, tiling=i.tiling, ste=ESTIMATORS[estimator]
        ),
        i.g, i.x, i.scale, i.zero_point,
    )  # fmt: skip


@pytest.mark.parametrize(("name", "dtype"), CASES)
def test_raw_backwards(name: str, dtype: str) -> None:
    i = _input("int8", GRANULARITIES["axis0"], dtype)
    _compare(
        LIBRARIES[name],
        lambda g, x, s, z: reference.quantize_backward(
            g, x, s, z, spec=i.spec, tiling=i.tiling, ste=dt.ste.Clipped()
        ),
        i.g, i.x, i.scale, i.zero_point,
    )  # fmt: skip
    _compare(
        LIBRARIES[name],
        lambda g, s: reference.dequantize_backward(g, s, tiling=i.tiling),
        i.g, i.scale,
    )  # fmt: skip


@pytest.mark.parametrize("fmt", ["int4", "uint8", "nf4"])
@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize(("name", "dtype"), CASES)
def test_learned_backward(name: str, dtype: str, granularity: str, fmt: str) -> None:
    i = _input(fmt, GRANULARITIES[granularity], dtype)
    x = np.where(np.isfinite(i.x.astype(np.float64)), i.x, i.x.dtype.type(1))
    _compare(
        LIBRARIES[name],
        lambda g, x, s, z: reference.fake_quantize_learned_backward(
            g, x, s, z, spec=i.spec, tiling=i.tiling, ste=dt.ste.Clipped()
        ),
        i.g, x, i.scale, i.zero_point,
    )  # fmt: skip


@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize(("name", "dtype"), CASES)
def test_minmax(name: str, dtype: str, granularity: str) -> None:
    i = _input("int8", GRANULARITIES[granularity], dtype)
    _compare(LIBRARIES[name], lambda x: reference.minmax(x, i.tiling), i.x)


@pytest.mark.parametrize("shape", [(0,), (), (3, 0, 2)], ids=str)
@pytest.mark.parametrize("name", LIBRARIES)
def test_empty_and_scalar_arrays(name: str, shape: tuple[int, ...]) -> None:
    spec = dt.QuantSpec("int8")
    x, s, z = np.full(shape, 0.7, np.float32), np.array(0.1, np.float32), np.array(0, np.int32)
    tiling = spec.granularity.tiling(shape)
    for kernel in (reference.quantize, reference.fake_quantize):
        _compare(LIBRARIES[name], lambda x, s, z, kernel=kernel: kernel(x, s, z, spec=spec, tiling=tiling), x, s, z)
