"""Checks shared by all public functions: integers, numbers, shapes, arrays, float types, NaN.

Only this module defines the four float types that data can have, and the compute type for each.
"""

import operator
from collections.abc import Iterable, Mapping, Sized
from contextlib import suppress
from math import inf, isfinite
from types import MappingProxyType
from typing import Any, SupportsFloat

import ml_dtypes
import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray

from detent.errors import DetentError, DtypeError, NaNError, ShapeError, SpecError

__all__ = ["FLOATS", "compute_dtype", "float_array", "float_dtype"]

SIZE_LIMIT = 1 << 62  # elements per axis; leaves room for sums in int64
RANK_LIMIT = 64  # the largest number of axes in NumPy


def as_integer(
    what: str,
    value: object,
    *,
    at_least: int | None = None,
    at_most: int | None = None,
    error: type[DetentError] = SpecError,
) -> int:
    """Convert a value to a Python integer and check its bounds; accept NumPy integers, reject booleans."""
    bounds = "" if at_least is None else f" of at least {at_least}"
    if at_least is not None and at_most is not None:
        bounds = f" in {at_least}..{at_most if at_most < 1 << 31 else f'2**{at_most.bit_length()}-1'}"
    try:
        number = operator.index(value)  # type: ignore[arg-type]  # other types raise TypeError
    except TypeError:
        number = None
    if number is None or isinstance(value, bool | np.bool_):
        raise error(f"{what} must be an integer{bounds}, got {value!r}")
    if (at_least is not None and number < at_least) or (at_most is not None and number > at_most):
        raise error(f"{what} must be an integer{bounds}, got {number}")
    return number


def as_number(what: str, value: object, error: type[DetentError] = SpecError) -> float:
    """Convert a value to a finite Python float; reject booleans and strings."""
    if isinstance(value, bool | np.bool_ | str) or not isinstance(value, SupportsFloat):
        raise error(f"{what} must be a number, got {value!r}")
    try:
        number = float(value)
    except OverflowError:  # an integer above the largest float
        number = inf
    if not isfinite(number):
        raise error(f"{what} must be a finite number, got {value!r}")
    return number


def as_shape(shape: object, what: str = "shape", error: type[DetentError] = ShapeError) -> tuple[int, ...]:
    """Convert a shape to a tuple of Python integers."""
    if type(shape) is tuple and all(type(size) is int and 0 <= size < SIZE_LIMIT for size in shape):
        return shape
    if isinstance(shape, str | bytes) or not isinstance(shape, Iterable):
        raise error(f"{what} must be a tuple of sizes such as (64, 256), got {shape!r}")
    sizes = tuple(shape)
    if len(sizes) > RANK_LIMIT:
        raise error(f"{what} has {len(sizes)} axes, but NumPy supports at most {RANK_LIMIT}: merge some axes")
    return tuple(
        as_integer(f"each size in {what}", size, at_least=0, at_most=SIZE_LIMIT - 1, error=error) for size in sizes
    )


def are_sizes(values: object) -> bool:
    """Return whether the value is a list that can be the shape of an array."""
    is_short = isinstance(values, list) and len(values) <= RANK_LIMIT
    return is_short and all(type(value) is int and 0 <= value < SIZE_LIMIT for value in values)  # type: ignore[attr-defined]


def as_array(what: str, value: ArrayLike) -> NDArray[Any]:
    """Convert a value to a NumPy array; reject ragged lists and masked arrays."""
    if isinstance(value, np.ma.MaskedArray):
        raise DtypeError(
            f"{what} is a masked array, but masks are not supported: fill the array first, for example with filled(0)"
        )
    try:
        return np.asarray(value)
    except (TypeError, ValueError) as fault:
        raise DtypeError(
            f"{what} is not an array of numbers ({fault}): pass a NumPy array, or nested lists of equal lengths"
        ) from fault


def known_length(values: object) -> int | None:
    """Return the number of values, or None if it is unknown; loaders of iterable datasets raise TypeError.

    >>> known_length([1, 2]), known_length(iter([1, 2]))
    (2, None)
    """
    try:
        return len(values) if isinstance(values, Sized) else None
    except TypeError:
        return None


def plain(value: object) -> Any:  # noqa: ANN401 - any element
    """Convert a NumPy scalar or 0-d array to a Python value; NumPy files store a single value as a 0-d array."""
    is_scalar = isinstance(value, np.generic) or (isinstance(value, np.ndarray) and not value.ndim)
    return value.item() if is_scalar else value  # type: ignore[attr-defined]  # both types have item


def read_only(values: NDArray[Any]) -> NDArray[Any]:
    """Return a C-contiguous, read-only copy."""
    copy = np.array(values, order="C", copy=True)
    copy.setflags(write=False)
    return copy


def first_index(mask: NDArray[np.bool_]) -> tuple[int, ...]:
    """Return the index of the first True in C order."""
    return tuple(int(i) for i in np.unravel_index(int(np.argmax(mask)), mask.shape))


def first_nonfinite(values: NDArray[Any]) -> tuple[int, ...]:
    """Return the index of the first NaN or infinity in C order."""
    with np.errstate(all="ignore"):  # some dtypes of ml_dtypes warn about signaling NaN
        return first_index(~np.isfinite(values))


def refuse_nan(
    name: str, x: NDArray[Any], repair: str = "replace NaN in the data, or pass nan='zero_point' or nan='qmin'"
) -> None:
    """Raise if x contains NaN; the message counts the NaN, has the index of the first, and ends with ``repair``."""
    with np.errstate(all="ignore"):  # some dtypes of ml_dtypes warn about signaling NaN
        missing = np.isnan(x)
    count = int(np.count_nonzero(missing))
    if count:
        first = first_index(missing)
        raise NaNError(f"{name} contains {count} NaN in {x.size} elements, first at {first}: {repair}", count, first)


FLOATS: Mapping[str, np.dtype[Any]] = MappingProxyType(
    {
        "float16": np.dtype("float16"),
        "bfloat16": np.dtype(ml_dtypes.bfloat16),
        "float32": np.dtype("float32"),
        "float64": np.dtype("float64"),
    }
)
_DTYPES = frozenset(FLOATS.values())


def float_dtype(dtype: DTypeLike, name: str = "x") -> np.dtype[Any]:
    """Check that the dtype is one of ``FLOATS``; ``name`` is the argument's name in the error message."""
    if isinstance(dtype, np.dtype) and dtype in _DTYPES:
        return dtype
    checked = FLOATS.get(dtype) if isinstance(dtype, str) else None
    if checked is None and isinstance(dtype, np.dtype | type):
        with suppress(TypeError):
            checked = np.dtype(dtype)
    if checked is None or checked not in _DTYPES:
        raise DtypeError(
            f"{name} has dtype {dtype if checked is None else checked}, expected float16, bfloat16, float32 or "
            "float64: use one of these dtypes, for example x.astype('float32') for an array"
        )
    return checked


def float_array(value: ArrayLike, name: str = "x") -> NDArray[Any]:
    """Convert a value to a float array in native byte order; reject arrays of other libraries."""
    if type(value) is np.ndarray and value.dtype in _DTYPES:
        return value
    if not isinstance(value, np.ndarray | np.generic | list | tuple | float | int):
        raise DtypeError(f"{name} must be a NumPy array, got {type(value).__name__}: convert it with np.asarray")
    array = as_array(name, value)
    dtype = float_dtype(array.dtype.newbyteorder("="), name)
    return array if array.dtype == dtype else array.astype(dtype)


def compute_type(dtype: Any, xp: Any) -> Any:  # noqa: ANN401 - types of the array library xp
    """Return the type that arithmetic and scales use for data of this dtype: float64 for float64, else float32."""
    return xp.float64 if dtype == xp.float64 else xp.float32


def compute_dtype(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Return ``compute_type`` as a NumPy dtype, because dtypes compare faster than NumPy's scalar classes."""
    return FLOATS["float64"] if dtype == FLOATS["float64"] else FLOATS["float32"]
