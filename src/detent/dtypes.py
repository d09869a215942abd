"""Dtypes: which NumPy types data and codes may have."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray

from detent.errors import DtypeError
from detent.spec import QuantSpec

__all__ = ["FLOATS", "code_dtype", "float_array", "float_dtype"]

FLOATS: Mapping[str, np.dtype[Any]] = MappingProxyType(
    {
        "float16": np.dtype("float16"),
        "bfloat16": np.dtype(ml_dtypes.bfloat16),
        "float32": np.dtype("float32"),
        "float64": np.dtype("float64"),
    }
)


def float_dtype(dtype: DTypeLike, name: str = "x") -> np.dtype[Any]:
    """The dtype if it is one that data may have; ``name`` says whose it is in the error.

    >>> float_dtype("bfloat16").itemsize
    2
    """
    if isinstance(dtype, str) and dtype in FLOATS:
        return FLOATS[dtype]
    try:
        found = np.dtype(dtype)
    except TypeError:
        raise DtypeError(f"{dtype!r} is no dtype: expected {', '.join(FLOATS)}") from None
    if found not in FLOATS.values():
        raise DtypeError(
            f"{name} has dtype {found}, expected float16, bfloat16, float32 or float64: convert it first, "
            f"for example {name}.astype('float32')"
        )
    return found


def float_array(value: ArrayLike, name: str = "x") -> NDArray[Any]:
    """The value as a float array in the machine's byte order; arrays of other libraries are refused, not copied.

    >>> float_array([0.5, 1.0])
    array([0.5, 1. ])
    """
    if not isinstance(value, np.ndarray | np.generic | list | tuple | float | int):
        raise DtypeError(f"{name} must be a NumPy array, got {type(value).__name__}: convert it with np.asarray")
    array = np.asarray(value)
    dtype = float_dtype(array.dtype.newbyteorder("="), name)
    return array if array.dtype == dtype else array.astype(dtype)


def code_dtype(spec: QuantSpec) -> np.dtype[Any]:
    """The dtype of an unpacked code.

    >>> code_dtype(QuantSpec("int4")), code_dtype(QuantSpec("float8_e5m2"))
    (dtype('int8'), dtype(float8_e5m2))
    """
    if spec.format.kind == "float":
        small: np.dtype[Any] = np.dtype(getattr(ml_dtypes, spec.format.storage))
        return small
    return np.dtype(spec.format.storage)
