"""Packing: codes of 1 to 16 bits, stored without gaps in bytes.

Element ``i`` of a ``b``-bit array occupies bits ``i*b .. i*b + b - 1`` of the byte string, the lowest bit of a byte
first. Signed codes are two's complement, and the last byte is padded with zeros. ONNX uses this order for 2 and 4 bits.

A layout permutes the elements inside blocks of fixed size before packing. ``high_first`` stores the first of two 4-bit
codes in the high half of a byte. ``split_half`` stores elements j and j + 16 of a block of 32 in one byte (GGUF).
Incomplete blocks are padded with zeros.
"""

from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from detent.checks import as_array, as_integer
from detent.errors import DtypeError, FileFormatError, ParamsError, ShapeError, SpecError, closest
from detent.formats import BYTE, MAX_BITS
from detent.kernels import pack_bits, unpack_bits
from detent.tables import counted

__all__ = ["LAYOUTS", "Layout", "pack", "packed_size", "unpack"]

Bytes = NDArray[np.uint8]


@dataclass(frozen=True)
class Layout:
    """Order of elements in a block: position ``i`` of the packed block contains element ``order[i]``."""

    name: str
    order: tuple[int, ...] = (0,)
    bits: int | None = None  # None means any bit width


LAYOUTS: MappingProxyType[str, Layout] = MappingProxyType(
    {
        layout.name: layout
        for layout in (
            Layout("low_first"),
            Layout("high_first", (1, 0), bits=4),
            Layout("split_half", tuple(half + j for j in range(16) for half in (0, 16)), bits=4),
        )
    }
)


def packed_size(count: int, bits: int, layout: str | Layout = "low_first") -> int:
    """Return the number of bytes of ``count`` packed codes.

    >>> packed_size(5, 3), packed_size(5, 4, "split_half")
    (2, 16)
    """
    block = len(_get_layout(layout, bits).order)
    whole = as_integer("the number of codes", count, at_least=0)
    return -(-(-(-whole // block) * block * int(bits)) // BYTE)


def pack(codes: ArrayLike, bits: int, layout: str | Layout = "low_first") -> Bytes:
    """Pack codes into bytes, in C order.

    Args:
        codes: integers that fit ``bits`` bits, signed or unsigned; or floats of at most 8 bits, whose bit patterns are
            packed.
        bits: bit width of a code, 1 to 16.
        layout: order of elements inside a block.

    Raises:
        ParamsError: a code does not fit ``bits`` bits.

    >>> import numpy as np
    >>> pack(np.array([1, -2, 3], np.int8), bits=4).tobytes().hex()
    'e103'
    """
    order, bits = _get_layout(layout, bits).order, int(bits)
    flat = _checked(codes, bits)
    if len(order) > 1:
        flat = np.pad(flat, (0, -flat.size % len(order))).reshape(-1, len(order))[:, list(order)].reshape(-1)
    return pack_bits(flat, bits)


def _checked(codes: ArrayLike, bits: int) -> NDArray[Any]:
    """Convert codes to one- or two-byte integers in C order; all must fit ``bits`` bits, signed or unsigned."""
    array = as_array("codes", codes)
    flat = np.ascontiguousarray(array).reshape(-1)
    if flat.dtype.kind not in "iu":
        if flat.dtype.itemsize != 1 or flat.dtype.kind == "b":
            raise DtypeError(
                f"got codes of dtype {array.dtype}, expected integers or one-byte floats: convert the codes with astype"
            )
        flat = flat.view(np.uint8)
    if flat.size and not (-(1 << (bits - 1)) <= int(flat.min()) and int(flat.max()) < 1 << bits):
        raise ParamsError(
            f"got codes in [{flat.min()}, {flat.max()}], expected codes that fit {bits} bits: clamp the codes"
        )
    itemsize = 1 if bits <= BYTE else 2
    return flat if flat.dtype.itemsize == itemsize else flat.astype(np.int64).astype(f"u{itemsize}")


def unpack(
    packed: Bytes, bits: int, count: int, *, signed: bool = False, layout: str | Layout = "low_first"
) -> NDArray[Any]:
    """Unpack ``count`` codes from bytes. The result is int8 or uint8 for up to 8 bits, otherwise int16 or uint16.

    Raises:
        FileFormatError: the data have the wrong size, or the padding is not zero.

    >>> import numpy as np
    >>> unpack(np.array([0xE1, 0x03], np.uint8), bits=4, count=3, signed=True)
    array([ 1, -2,  3], dtype=int8)
    """
    order, bits = _get_layout(layout, bits).order, int(bits)
    count = as_integer("the number of codes", count, at_least=0)
    expected = packed_size(count, bits, layout)
    data = np.ascontiguousarray(as_array("packed", packed))
    if data.dtype != np.uint8 or data.shape != (expected,):
        raise FileFormatError(
            f"got packed codes of dtype {data.dtype} and shape {data.shape}, expected uint8 of shape "
            f"({expected},) for bits={bits} and count={count}: check bits, count and layout"
        )
    padded = -(-count // len(order)) * len(order)
    if padded * bits % BYTE and data[-1] >> padded * bits % BYTE:
        raise FileFormatError(
            f"the {counted(-padded * bits % BYTE, 'padding bit')} after the last code must be zero: the "
            "bytes are damaged, or bits, count or layout is wrong"
        )
    codes = unpack_bits(data, bits, padded, signed=signed)
    if len(order) == 1:
        return codes
    ordered = codes.reshape(-1, len(order))[:, np.argsort(order)].reshape(-1)
    if ordered[count:].any():
        raise FileFormatError(
            f"the {counted(padded - count, 'padding code')} of the last block must be zero: the bytes "
            "are damaged, or bits, count or layout is wrong"
        )
    return ordered[:count]


def _get_layout(layout: str | Layout, bits: int) -> Layout:
    as_integer("the bit width", bits, at_least=1, at_most=MAX_BITS)
    row = LAYOUTS.get(layout) if isinstance(layout, str) else layout
    if not isinstance(row, Layout):
        raise SpecError(f"unknown layout {layout!r}{closest(str(layout), LAYOUTS)} expected {', '.join(LAYOUTS)}")
    if row.bits not in {None, bits}:
        raise ShapeError(f"got {bits} bits for layout {row.name!r}, expected {row.bits} bits: use layout 'low_first'")
    return row
