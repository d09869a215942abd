"""What makes a scale, a zero point and a range valid; the input checks of ``detent.params``."""

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray

from detent._checks import as_array, first_index
from detent.dtypes import FLOATS, float_dtype
from detent.errors import DtypeError, ParamsError, RangeError, ShapeError
from detent.granularity import Granularity, PerAxis, PerBlock, PerGroup, PerTensor
from detent.spec import QuantSpec

INT32_LIMIT = 1 << 31
POWER_OF_TWO = 0.5  # the mantissa that frexp gives one


def numbers(name: str, value: ArrayLike) -> NDArray[Any]:
    """The value as an array of real numbers."""
    array = as_array(name, value)
    if array.dtype.kind not in "fiu" and array.dtype not in FLOATS.values():
        raise DtypeError(f"{name} must hold numbers, got {value!r}")
    return array


def as_scale(name: str, value: ArrayLike) -> NDArray[np.floating]:
    """The scale as float64 where it was a float64 array, as float32 otherwise."""
    is_double = isinstance(value, np.ndarray | np.generic) and value.dtype == np.float64
    with np.errstate(all="ignore"):
        return numbers(name, value).astype(np.float64 if is_double else np.float32)


def as_zero_point(spec: QuantSpec, value: ArrayLike | None, shape: tuple[int, ...]) -> NDArray[np.int32]:
    """The zero point as int32 in the scale's shape; None is the spec's own."""
    if value is None:
        affine = int(np.clip(0, spec.qmin, spec.qmax)) if spec.format.is_integer else 0
        return np.full(shape, spec.symmetric_zero_point if spec.symmetric else affine, np.int32)
    array = numbers("zero_point", value)
    if not (array == np.trunc(array)).all() or not (np.abs(array.astype(np.float64)) < INT32_LIMIT).all():
        raise ParamsError(f"zero_point must hold int32 integers, got {brief(array)}: round it first")
    return broadcast("zero_point", array.astype(np.int32), shape)


def broadcast(name: str, values: NDArray[Any], shape: tuple[int, ...]) -> NDArray[Any]:
    """The values in that shape; one value fits every shape."""
    if values.shape == shape:
        return values
    if values.size == 1:
        values = values.reshape(())
    try:
        return np.broadcast_to(values, shape)
    except ValueError:
        raise ShapeError(f"{name} has shape {values.shape}, expected the scale's shape {shape}") from None


def bounds(lo: ArrayLike, hi: ArrayLike) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Lo and hi as checked float64 arrays of one shape."""
    arrays = [numbers(name, value).astype(np.float64) for name, value in (("lo", lo), ("hi", hi))]
    try:
        low, high = np.broadcast_arrays(*arrays)
    except ValueError:
        raise ShapeError(f"lo has shape {arrays[0].shape} and hi {arrays[1].shape}: expected one shape") from None
    check_bounds(low, high)
    return low, high


def check_bounds(low: NDArray[np.float64], high: NDArray[np.float64]) -> None:
    """Raise unless all bounds are finite and in order."""
    bad = ~(np.isfinite(low) & np.isfinite(high))
    if bad.any():
        at = int(np.argmax(bad))
        raise RangeError(f"bounds must be finite, got lo {low.flat[at]} and hi {high.flat[at]}{_where(bad)}")
    bad = low > high
    if bad.any():
        at = int(np.argmax(bad))
        raise RangeError(
            f"lo must not exceed hi, got lo {low.flat[at]} > hi {high.flat[at]}{_where(bad)}; "
            "swap them if they were exchanged"
        )


def _where(bad: NDArray[np.bool_]) -> str:
    return f" in set {first_index(bad)} ({int(bad.sum())} of {bad.size} sets)" if bad.ndim else ""


def check_scale_shape(granularity: Granularity, shape: tuple[int, ...], name: str) -> None:
    """Raise unless the granularity can have scales of that shape."""
    fits, wanted = True, ""
    if isinstance(granularity, PerTensor):
        fits, wanted = shape == (), "()"
    elif isinstance(granularity, PerAxis):
        fits, wanted = len(shape) == 1, "(n,), one value per index of the axis"
    elif isinstance(granularity, PerGroup):
        fits, wanted = len(shape) >= 1, "the data's shape with the grouped axis divided by the group size"
    elif isinstance(granularity, PerBlock):
        fits, wanted = len(shape) >= len(granularity.sizes), f"at least {len(granularity.sizes)} axes"
    if not fits:
        raise ShapeError(
            f"{name} of granularity {granularity} must have shape {wanted}, got {shape}"
            + ("" if shape else "; give an array, or from_range(..., shape=x.shape)")
        )


def check_scale_values(name: str, scale: NDArray[np.floating]) -> None:
    """Raise unless every scale is a positive normal number."""
    normal = np.finfo(scale.dtype).smallest_normal
    for bad, wanted in (
        (np.isnan(scale), "a number"),
        (np.isinf(scale), "finite"),
        (scale <= 0, "positive"),
        (scale < normal, f"a normal number of at least {normal}"),
    ):
        if bad.any():
            raise ParamsError(f"{name} must be {wanted}, got {scale.flat[int(np.argmax(bad))]}{_where(bad)}")


def check_zero_points(spec: QuantSpec, zero_point: NDArray[np.int32]) -> None:
    """Raise unless every zero point is a code, and the symmetric one where the spec is."""
    low, high = (int(spec.qmin), int(spec.qmax)) if spec.format.is_integer else (0, 0)
    if spec.symmetric:
        low = high = spec.symmetric_zero_point
    outside = (zero_point < low) | (zero_point > high)
    if outside.any():
        wanted = f"{low} (the spec is symmetric)" if spec.symmetric else f"in [{low}, {high}]"
        raise ParamsError(
            f"a zero point of {spec} must be {wanted}, got {int(zero_point[outside].flat[0])} in "
            f"{int(outside.sum())} of {outside.size} sets"
        )


def brief(values: NDArray[Any]) -> str:
    """The values in a few words, for a repr."""
    if values.ndim == 0:
        return str(values.item()) if values.dtype == np.int32 else str(values)
    if values.size and (values == values.flat[0]).all():
        return f"full({values.shape}, {values.flat[0]})"
    return f"array of {values.shape} in [{values.min()}, {values.max()}]" if values.size else f"empty{values.shape}"


def check_levels(
    spec: QuantSpec,
    scale: NDArray[np.floating],
    block_scale: NDArray[np.generic] | None,
    tensor_scale: NDArray[np.floating] | None,
) -> None:
    """Raise unless the scale is made the way its scale format says."""
    two_level = spec.scale_format == "e4m3"
    given = block_scale is not None, tensor_scale is not None
    if given != (two_level, two_level):
        raise ParamsError(
            f"block_scale and tensor_scale belong to scale_format 'e4m3' and are needed there, got {given} for "
            f"{spec.scale_format!r}: use from_range or from_data"
        )
    if block_scale is not None and tensor_scale is not None:
        with np.errstate(all="ignore"):
            product = block_scale.astype(np.float32) * tensor_scale
        if product.shape != scale.shape or not np.array_equal(product, scale):
            raise ParamsError("scale must equal block_scale * tensor_scale in float32: use from_range or from_data")
    if spec.scale_format == "e8m0" and not (np.frexp(scale)[0] == POWER_OF_TWO).all():
        raise ParamsError(f"an e8m0 scale is a power of two, got {brief(scale)}: use from_range or from_data")


def scale_dtype(dtype: DTypeLike) -> np.dtype[Any]:
    """The dtype if scales may have it."""
    found = float_dtype(dtype, "the scale")
    if found.itemsize < np.dtype(np.float32).itemsize:
        raise DtypeError(f"a scale's dtype is float32 or float64, got {found}")
    return found


def forbid_writing(array: NDArray[Any] | None) -> None:
    """Make an array read-only, and the arrays that it is a view of."""
    part: object = array
    while isinstance(part, np.ndarray):
        part.setflags(write=False)
        part = part.base
