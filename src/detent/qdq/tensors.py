"""Tensors: arrays as ONNX initializers, and back.

====== =============== ===========================================
bits   type            in memory
====== =============== ===========================================
2..4   INT4, UINT4     two codes per byte, the first in the low half
5..8   INT8, UINT8
9..16  INT16, UINT16
fp8    FLOAT8E4M3FN..  their bytes
====== =============== ===========================================
"""

from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from detent.errors import FileFormatError, UnsupportedError
from detent.formats import Format
from detent.packing import pack

__all__ = ["BITS", "array_of", "element_range", "element_type", "make_tensor"]

Array = NDArray[Any]
_SMALL: dict[int, int] = {
    TensorProto.INT4: 4,
    TensorProto.UINT4: 4,
    TensorProto.FLOAT4E2M1: 4,
    TensorProto.INT2: 2,
    TensorProto.UINT2: 2,
}


def _bits(kind: int) -> int:
    return _SMALL.get(kind) or helper.tensor_dtype_to_np_dtype(kind).itemsize * 8


BITS = {
    kind: _bits(kind)
    for kind in TensorProto.DataType.values()
    if kind not in {TensorProto.UNDEFINED, TensorProto.STRING}
}
_INTEGERS = {
    (4, True): TensorProto.INT4,
    (4, False): TensorProto.UINT4,
    (8, True): TensorProto.INT8,
    (8, False): TensorProto.UINT8,
    (16, True): TensorProto.INT16,
    (16, False): TensorProto.UINT16,
}
_NARROW = {TensorProto.INT4: ml_dtypes.int4, TensorProto.UINT4: ml_dtypes.uint4}


def element_type(format: Format, least: int = 4) -> int:
    """The smallest ONNX type that holds the codes of a format.

    Args:
        format: of the codes.
        least: bits; 8 keeps codes of few bits out of the 4-bit types, which some kernels do not take.

    Raises:
        UnsupportedError: ONNX has no such type.

    >>> from detent.formats import get_format
    >>> names = ("int2", "uint8", "int12", "float8_e5m2")
    >>> [TensorProto.DataType.Name(element_type(get_format(name))) for name in names]
    ['INT4', 'UINT8', 'INT16', 'FLOAT8E5M2']
    """
    if format.is_integer:
        width = next((bits for bits in (4, 8, 16) if bits >= max(format.bits, least)), None)
        if width is not None:
            return _INTEGERS[width, format.signed]
    elif format.onnx:
        return int(TensorProto.DataType.Value(format.onnx))
    raise UnsupportedError(f"ONNX has no type for the codes of {format.name}")


def element_range(kind: int) -> tuple[int, int]:
    """The smallest and largest value of an integer type.

    >>> element_range(TensorProto.INT4)
    (-8, 7)
    """
    bits, signed = BITS[kind], TensorProto.DataType.Name(kind).startswith("INT")
    return (-(1 << (bits - 1)), (1 << (bits - 1)) - 1) if signed else (0, (1 << bits) - 1)


def make_tensor(name: str, values: Array, kind: int | None = None) -> TensorProto:
    """An initializer.

    Args:
        name: its name.
        values: numbers; those of integer types must fit.
        kind: the ONNX type, None that of the array.

    >>> make_tensor("w", np.array([1, -2, 3]), TensorProto.INT4).raw_data.hex()
    'e103'
    """
    given = np.asarray(values)
    if kind is None:
        return numpy_helper.from_array(np.ascontiguousarray(given).reshape(given.shape), name)
    tensor = TensorProto(name=name, data_type=kind, dims=given.shape)
    if TensorProto.DataType.Name(kind).lstrip("U").startswith("INT") and given.size:
        low, high = element_range(kind)
        if given.min() < low or given.max() > high:
            raise FileFormatError(f"{name}: codes from {given.min()} to {given.max()} do not fit {low}..{high}")
    if kind in _NARROW:
        tensor.raw_data = pack(given.ravel().astype(np.uint8) & 0xF, 4).tobytes()
        return tensor
    dtype = helper.tensor_dtype_to_np_dtype(kind)
    tensor.raw_data = np.ascontiguousarray(given, dtype).tobytes()
    return tensor


def array_of(tensor: TensorProto) -> Array:
    """The values of a tensor; 4-bit ones as int8 and uint8.

    >>> array_of(make_tensor("w", np.array([1, -2, 3]), TensorProto.INT4))
    array([ 1, -2,  3], dtype=int8)
    """
    try:
        found: Array = numpy_helper.to_array(tensor)
    except (TypeError, ValueError) as error:
        raise FileFormatError(f"tensor {tensor.name!r} cannot be read: {error}") from error
    if tensor.data_type in _SMALL and tensor.data_type != TensorProto.FLOAT4E2M1:
        return found.astype(np.int8 if TensorProto.DataType.Name(tensor.data_type).startswith("INT") else np.uint8)
    return found
