"""Dtypes: which NumPy types data and codes may have."""

from collections.abc import Mapping
from contextlib import suppress
from types import MappingProxyType
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray

from detent._checks import as_array
from detent.errors import DtypeError
from detent.spec import QuantSpec

__all__ = ["FLOATS", "code_dtype", "compute_dtype", "float_array", "float_dtype"]

FLOATS: Mapping[str, np.dtype[Any]] = MappingProxyType(
    {
        "float16": np.dtype("float16"),
        "bfloat16": np.dtype(ml_dtypes.bfloat16),
        "float32": np.dtype("float32"),
        "float64": np.dtype("float64"),
    }
)
_KNOWN = frozenset(FLOATS.values())


def float_dtype(dtype: DTypeLike, name: str = "x") -> np.dtype[Any]:
    """The dtype if it is one that data may have; ``name`` says whose it is in the error.

    >>> float_dtype("bfloat16").itemsize
    2
    """
    if isinstance(dtype, np.dtype) and dtype in _KNOWN:
        return dtype
    found = FLOATS.get(dtype) if isinstance(dtype, str) else None
    if found is None and isinstance(dtype, np.dtype | type) and not isinstance(dtype, str):
        with suppress(TypeError):
            found = np.dtype(dtype)
    if found is None or found not in _KNOWN:
        given = dtype if found is None else found
        raise DtypeError(
            f"{name} has dtype {given}, expected float16, bfloat16, float32 or float64: convert it first, "
            f"for example {name}.astype('float32')"
        )
    return found


def float_array(value: ArrayLike, name: str = "x") -> NDArray[Any]:
    """The value as a float array in the machine's byte order; arrays of other libraries are refused, not copied.

    >>> float_array([0.5, 1.0])
    array([0.5, 1. ])
    """
    if type(value) is np.ndarray and value.dtype in _KNOWN:
        return value
    if not isinstance(value, np.ndarray | np.generic | list | tuple | float | int):
        raise DtypeError(f"{name} must be a NumPy array, got {type(value).__name__}: convert it with np.asarray")
    array = as_array(name, value)
    dtype = float_dtype(array.dtype.newbyteorder("="), name)
    return array if array.dtype == dtype else array.astype(dtype)


def compute_dtype(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """The dtype in which data of that dtype are computed: float64 for float64, float32 for the rest.

    >>> compute_dtype(FLOATS["bfloat16"])
    dtype('float32')
    """
    return FLOATS["float64" if dtype == np.float64 else "float32"]


def code_dtype(spec: QuantSpec) -> np.dtype[Any]:
    """The dtype of an unpacked code.

    >>> code_dtype(QuantSpec("int4")), code_dtype(QuantSpec("float8_e5m2"))
    (dtype('int8'), dtype(float8_e5m2))
    """
    if spec.format.kind == "float":
        small: np.dtype[Any] = np.dtype(getattr(ml_dtypes, spec.format.storage))
        return small
    return np.dtype(spec.format.storage)
