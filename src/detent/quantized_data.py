"""QuantizedData: what all quantized tensors have in common, whatever their bytes mean.

A quantized tensor is read-only and has a shape, the float type of the data that it was made from, and a size in bytes.
It is indexed by slices, compared with ``==``, and has a hash, unless its memory belongs to an array of the caller.
"""

from math import prod
from types import EllipsisType
from typing import Any, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from detent.errors import DtypeError, ShapeError

__all__ = ["Index", "QuantizedData", "Slices", "complete_slices", "read_only"]

Slices = tuple[slice, ...]
Index: TypeAlias = slice | EllipsisType | tuple[slice | EllipsisType, ...]
Element = TypeVar("Element", bound=np.generic)


class QuantizedData:
    """Shape, dtype and size of quantized data; subclasses define ``nbytes`` and ``_identity``."""

    __slots__ = ("_dtype", "_shape", "_shared")
    _shape: tuple[int, ...]
    _dtype: np.dtype[Any]
    _shared: bool  # whether the codes are in an array of the caller, and may change

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the data."""
        return self._shape

    @property
    def dtype(self) -> np.dtype[Any]:
        """The float type of the data that the tensor was made from; the default dtype of ``dequantize()``."""
        return self._dtype

    @property
    def size(self) -> int:
        """The number of elements."""
        return prod(self._shape)

    @property
    def nbytes(self) -> int:
        """The size of the stored tensor in bytes."""
        raise NotImplementedError

    @property
    def _compression(self) -> float:
        """The size of the data in their float type, divided by ``nbytes``."""
        return self.size * self._dtype.itemsize / max(self.nbytes, 1)

    def _identity(self) -> tuple[object, ...]:
        """Return what makes two tensors of one shape and dtype equal: the codes, and what they mean."""
        raise NotImplementedError

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, type(self)):
            return NotImplemented
        is_alike = self._shape == other._shape and self._dtype == other._dtype
        return is_alike and self._identity() == other._identity()

    def __hash__(self) -> int:
        if self._shared:
            raise DtypeError(
                "this tensor has no hash, because its codes are in the array passed as out=: call quantize without out="
            )
        return hash((self._shape, self._dtype, *self._identity()))

    __iter__ = None  # not iterable, because an index must be a slice

    def __array__(self, *args: object, **options: object) -> NDArray[Any]:
        """Raise an error, because the caller must choose between codes and values."""
        raise DtypeError(
            f"a {type(self).__name__} is not an array: use q.dequantize() for its values, or q.codes for its codes"
        )

    def __len__(self) -> int:
        if not self._shape:
            raise ShapeError(f"a 0-d {type(self).__name__} has no length: use its attribute size")
        return int(self._shape[0])


def read_only(array: NDArray[Element]) -> NDArray[Element]:
    """Return a view of an array that cannot be written to."""
    view = array.view()
    view.setflags(write=False)
    return view


def complete_slices(index: Index, shape: tuple[int, ...]) -> Slices:
    """Expand an index to one slice per axis; an ellipsis and missing slices select whole axes."""
    parts = list(index) if isinstance(index, tuple) else [index]
    ellipses = [i for i, part in enumerate(parts) if isinstance(part, EllipsisType)]
    missing = len(shape) - (len(parts) - len(ellipses))
    if len(ellipses) > 1 or missing < 0:
        raise ShapeError(
            f"index {index!r} has too many parts for shape {shape}, expected at most one slice per axis and one "
            "ellipsis"
        )
    at = ellipses[0] if ellipses else len(parts)
    parts[at : at + 1] = [slice(None)] * missing
    slices = tuple(part for part in parts if isinstance(part, slice))
    if len(slices) != len(parts):
        raise ShapeError(f"got index {index!r}, expected slices: use i:i+1 instead of i")
    try:
        for part in slices:
            part.indices(1)
    except (TypeError, ValueError) as fault:
        raise ShapeError(f"cannot index quantized data with {index!r}: {fault}") from fault
    return slices
