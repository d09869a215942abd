"""Bits: codes of few bits side by side in bytes, element 0 in the lowest bits; the last byte is padded with zeros."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from detent.formats import BYTE, MAX_BITS
from detent.kernels import native
from detent.kernels.choice import current_kernels

__all__ = ["pack_bits", "unpack_bits"]

Bytes = NDArray[np.uint8]
Codes = NDArray[Any]
CHUNK = 1 << 18  # codes at a time, which bounds the scratch memory


def pack_bits(codes: Codes, bits: int) -> Bytes:
    """The low ``bits`` of each of a 1-D array of one- or two-byte integers.

    >>> import numpy as np
    >>> pack_bits(np.array([1, -2, 3], np.int8), 4).tobytes().hex()
    'e103'
    """
    if codes.dtype.itemsize == 1 and current_kernels() != "reference":
        packed = native.pack(codes, bits)
        if packed is not None:
            return packed
    if bits in {BYTE, MAX_BITS}:
        return codes.astype("<u2" if bits == MAX_BITS else np.uint8).view(np.uint8)
    words: NDArray[np.uint16] = codes.astype(np.uint16) & np.uint16((1 << bits) - 1)
    parts = [_pack_part(words[start : start + CHUNK], bits) for start in range(0, words.size, CHUNK)]
    return np.concatenate(parts) if parts else np.zeros(0, np.uint8)


def _pack_part(words: NDArray[np.uint16], bits: int) -> Bytes:
    planes = (words[:, None] >> np.arange(bits, dtype=np.uint16)) & 1
    return np.packbits(planes.astype(np.uint8).reshape(-1), bitorder="little")


def unpack_bits(packed: Bytes, bits: int, count: int, *, signed: bool) -> Codes:
    """The ``count`` codes of a byte string of the right size: int8 or uint8 up to 8 bits, int16 or uint16 above.

    >>> import numpy as np
    >>> unpack_bits(np.array([0xE1, 0x03], np.uint8), 4, 3, signed=True)
    array([ 1, -2,  3], dtype=int8)
    """
    if bits <= BYTE and current_kernels() != "reference":
        found = native.unpack(packed, bits, count, signed=signed)
        if found is not None:
            return found
    starts = range(0, count, CHUNK)
    parts = [_unpack_part(packed[start * bits // BYTE :], min(CHUNK, count - start), bits) for start in starts]
    codes = (np.concatenate(parts) if parts else np.zeros(0, np.uint16)).astype(np.int32)
    if signed:
        codes -= (codes >> (bits - 1)) << bits
    return codes.astype(f"{'' if signed else 'u'}int{BYTE if bits <= BYTE else MAX_BITS}")


def _unpack_part(data: Bytes, count: int, bits: int) -> NDArray[np.uint16]:
    planes = np.unpackbits(data[: -(-count * bits // BYTE)], bitorder="little", count=count * bits)
    return planes.reshape(count, bits) @ (1 << np.arange(bits, dtype=np.uint16))
