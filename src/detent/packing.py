"""Packing: codes of few bits side by side in bytes.

Element ``i`` of a ``b``-bit array occupies bits ``i*b .. i*b + b - 1`` of the byte string, the lowest bit of a byte
first; signed codes are two's complement, the last byte is padded with zeros. That is ONNX's order for 2 and 4 bits.

A layout is a permutation inside fixed blocks, applied before that: ``high_first`` puts the first of two nibbles high,
``split_half`` pairs element j with j + 16 of a block of 32 (GGUF). Blocks that the data does not fill are padded.
"""

from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from detent._checks import as_array, as_integer
from detent.errors import DtypeError, FileFormatError, ParamsError, ShapeError, SpecError, closest
from detent.formats import BYTE, MAX_BITS

__all__ = ["LAYOUTS", "Layout", "pack", "packed_size", "unpack"]

Bytes = NDArray[np.uint8]
CHUNK = 1 << 18  # codes at a time, which bounds the scratch memory


@dataclass(frozen=True)
class Layout:
    """The order of elements in a block: position ``i`` of the packed block holds element ``order[i]``.

    ``bits`` names the width the layout belongs to; None means any.

    >>> LAYOUTS["high_first"].order
    (1, 0)
    """

    name: str
    order: tuple[int, ...] = (0,)
    bits: int | None = None


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
    """How many bytes ``count`` codes take.

    >>> packed_size(5, 3), packed_size(5, 4, "split_half")
    (2, 16)
    """
    block = len(_get_layout(layout, bits).order)
    whole = as_integer("the number of codes", count, at_least=0)
    return -(-(-(-whole // block) * block * bits) // BYTE)


def pack(codes: ArrayLike, bits: int, layout: str | Layout = "low_first") -> Bytes:
    """The codes as bytes, in C order.

    Args:
        codes: integers that fit ``bits`` bits, signed or unsigned, or small floats (their bit patterns are packed).
        bits: 1 to 16.
        layout: the order inside a block.

    Raises:
        ParamsError: a code that does not fit.

    >>> import numpy as np
    >>> pack(np.array([1, -2, 3], np.int8), bits=4).tobytes().hex()
    'e103'
    """
    order = _get_layout(layout, bits).order
    words = _as_words(codes, bits)
    words = np.pad(words, (0, -words.size % len(order))).reshape(-1, len(order))[:, list(order)].reshape(-1)
    if bits == BYTE:
        return words.astype(np.uint8)
    if bits == MAX_BITS:
        return words.view(np.uint8)
    parts = [_pack_part(words[start : start + CHUNK], bits) for start in range(0, words.size, CHUNK)]
    return np.concatenate(parts) if parts else np.zeros(0, np.uint8)


def _as_words(codes: ArrayLike, bits: int) -> NDArray[np.uint16]:
    """The low bits of each code, in C order; every code must fit, read as signed or as unsigned."""
    array = as_array("codes", codes)
    flat = np.ascontiguousarray(array).reshape(-1)
    if flat.dtype.kind not in "iu":
        if flat.dtype.itemsize != 1 or flat.dtype.kind == "b":
            raise DtypeError(f"codes are integers or one-byte floats, got {array.dtype}")
        flat = flat.view(np.uint8)
    if flat.size and not (-(1 << (bits - 1)) <= int(flat.min()) and int(flat.max()) < 1 << bits):
        raise ParamsError(f"codes in [{flat.min()}, {flat.max()}] do not fit {bits} bits: use more bits or clamp them")
    return (flat.astype(np.int32) & ((1 << bits) - 1)).astype("<u2")


def _pack_part(words: NDArray[np.uint16], bits: int) -> Bytes:
    planes = (words[:, None] >> np.arange(bits, dtype=np.uint16)) & 1
    return np.packbits(planes.astype(np.uint8).reshape(-1), bitorder="little")


def unpack(
    packed: Bytes, bits: int, count: int, *, signed: bool = False, layout: str | Layout = "low_first"
) -> NDArray[Any]:
    """The ``count`` codes of a byte string: int8 or uint8 up to 8 bits, int16 or uint16 above.

    Raises:
        FileFormatError: the byte string does not have the size that count and bits make, or ends in bits of no code.

    >>> import numpy as np
    >>> unpack(np.array([0xE1, 0x03], np.uint8), bits=4, count=3, signed=True)
    array([ 1, -2,  3], dtype=int8)
    """
    order = _get_layout(layout, bits).order
    expected = packed_size(count, bits, layout)
    data = np.ascontiguousarray(as_array("packed", packed))
    if data.dtype != np.uint8 or data.shape != (expected,):
        raise FileFormatError(
            f"{count} codes of {bits} bits take {expected} bytes of uint8, got {data.dtype} of shape {data.shape}"
        )
    padded = -(-count // len(order)) * len(order)
    starts = range(0, padded, CHUNK)
    parts = [_unpack_part(data[start * bits // BYTE :], min(CHUNK, padded - start), bits) for start in starts]
    words = np.concatenate(parts) if parts else np.zeros(0, np.uint16)
    if padded * bits % BYTE and data[-1] >> padded * bits % BYTE:
        raise FileFormatError(f"the {-padded * bits % BYTE} bits after the last code are not zero")
    inverse = np.argsort(order)
    ordered = words.reshape(-1, len(order))[:, inverse].reshape(-1)
    if ordered[count:].any():
        raise FileFormatError(f"the {padded - count} codes that fill the last block are not zero")
    codes = ordered[:count].astype(np.int32)
    if signed:
        codes -= (codes >> (bits - 1)) << bits
    return codes.astype(f"{'' if signed else 'u'}int{BYTE if bits <= BYTE else MAX_BITS}")


def _unpack_part(data: Bytes, count: int, bits: int) -> NDArray[np.uint16]:
    planes = np.unpackbits(data[: -(-count * bits // BYTE)], bitorder="little", count=count * bits)
    return planes.reshape(count, bits) @ (1 << np.arange(bits, dtype=np.uint16))


def _get_layout(layout: str | Layout, bits: int) -> Layout:
    as_integer("the bits of a code", bits, at_least=1, at_most=MAX_BITS)
    found = LAYOUTS.get(layout) if isinstance(layout, str) else layout
    if not isinstance(found, Layout):
        raise SpecError(f"unknown layout {layout!r}{closest(str(layout), LAYOUTS)} expected {', '.join(LAYOUTS)}")
    if found.bits not in {None, bits}:
        raise ShapeError(f"layout {found.name!r} is for {found.bits}-bit codes, got {bits} bits: use 'low_first'")
    return found
