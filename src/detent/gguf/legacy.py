"""Q4_0, Q4_1, Q5_0, Q5_1 and Q8_0: blocks of 32 elements with a float16 scale, and in some a float16 minimum.

====== ===================================================== ======================
q4_0   d; 16 bytes: code j in the low bits, j + 16 above     value (q - 8) * d
q4_1   d, m; 16 bytes                                        value q * d + m
q5_0   d; 32 bits, bit j is the highest of code j; 16 bytes  value (q - 16) * d
q5_1   d, m; 32 bits; 16 bytes                               value q * d + m
q8_0   d; 32 signed bytes                                    value q * d
====== ===================================================== ======================

Codes are computed with the scale before it is rounded to float16. The element of largest magnitude gets the lowest code
of q4_0 and q5_0, so their scale may be negative.
"""

import numpy as np
from numpy.typing import NDArray

from detent.block_format import BlockFormat
from detent.gguf.layout import block_format, half, pick, place, read_half
from detent.gguf.searches import affine, extremes, first_largest, signed

__all__ = ["q4_0", "q4_1", "q5_0", "q5_1", "q8_0"]

Floats = NDArray[np.float32]
Bytes = NDArray[np.uint8]
SIZE = 32
F32 = np.float32


def _truncated(x: Floats) -> NDArray[np.int32]:
    """Convert to a byte as C does: truncate, and keep the lowest 8 bits."""
    return np.nan_to_num(x, nan=0, posinf=0, neginf=0).astype(np.int32)


def _weighted(x: Floats, importance: Floats, means: Floats) -> Floats:
    return importance * np.sqrt(means + x * x)


def _symmetric(bits: int, name: str, gguf_type: int) -> BlockFormat:
    """Make q4_0 or q5_0."""
    middle = 1 << (bits - 1)

    def encode_blocks(x: Floats, importance: Floats | None, means: Floats) -> Bytes:
        if importance is None:
            scale = first_largest(x) / F32(-middle)
            inverse = np.where(scale != 0, F32(1) / scale, F32(0))
            codes = np.minimum(_truncated(x * inverse + F32(middle + 0.5)) & 0xFF, 2 * middle - 1)
        else:
            scale, codes = signed(x, _weighted(x, importance, means), middle)
        return np.hstack([half(scale), _pack(codes, bits)])

    def decode(blocks: Bytes) -> Floats:
        return (unpack(blocks).astype(np.float32) - F32(middle)) * read_half(blocks, 0)

    def unpack(blocks: Bytes) -> Bytes:
        return _unpack(blocks[:, 2:], bits)

    width = 2 + SIZE * bits // 8
    return block_format(name, gguf_type, bits, (SIZE, width), (0,), encode_blocks, decode, unpack)


def _affine(bits: int, name: str, gguf_type: int) -> BlockFormat:
    """Make q4_1 or q5_1."""
    top = (1 << bits) - 1

    def encode_blocks(x: Floats, importance: Floats | None, means: Floats) -> Bytes:
        if importance is None:
            low, high = extremes(x)
            scale = (high - low) / F32(top)
            inverse = np.where(scale != 0, F32(1) / scale, F32(0))
            codes = _truncated((x - low) * inverse + F32(0.5)) & 0xFF
            if bits == 4:
                codes = np.minimum(codes, top)
        else:
            search = affine(x, _weighted(x, importance, means), top, first=-0.9, step=0.05, count=36, narrow=True)
            scale, low, codes = search.scale, -search.least, search.codes
        return np.hstack([half(scale), half(low), _pack(codes, bits)])

    def decode(blocks: Bytes) -> Floats:
        return unpack(blocks).astype(np.float32) * read_half(blocks, 0) + read_half(blocks, 2)

    def unpack(blocks: Bytes) -> Bytes:
        return _unpack(blocks[:, 4:], bits)

    width = 4 + SIZE * bits // 8
    return block_format(name, gguf_type, bits, (SIZE, width), (0, 2), encode_blocks, decode, unpack)


def _pack(codes: NDArray[np.int32], bits: int) -> Bytes:
    """Pack codes (32, n): the highest bits of 5-bit codes first, then the low four bits."""
    rows = codes.T
    low = place((rows & 15).reshape(-1, 2, 16), 4)
    if bits == 4:
        return low
    high = np.packbits((rows >> 4).astype(np.uint8) & np.uint8(1), axis=1, bitorder="little")
    return np.hstack([high, low])


def _unpack(packed: Bytes, bits: int) -> Bytes:
    low = pick(packed[:, -16:], 4, 2).reshape(-1, SIZE)
    if bits == 4:
        return low
    return low | np.unpackbits(packed[:, :4], axis=1, bitorder="little") << np.uint8(4)


def _encode_q8_0(x: Floats, importance: Floats | None, means: Floats) -> Bytes:  # noqa: ARG001 - not weighted
    scale = np.abs(x).max(axis=0) / F32(127)
    inverse = np.where(scale != 0, F32(1) / scale, F32(0))
    t = x * inverse
    rounded = np.trunc(t)
    rounded += np.copysign((np.abs(t - rounded) >= F32(0.5)).astype(np.float32), t)  # half away from zero
    return np.hstack([half(scale), _truncated(rounded).astype(np.int8).T.view(np.uint8)])


def _codes_q8_0(blocks: Bytes) -> NDArray[np.int8]:
    return np.ascontiguousarray(blocks[:, 2:]).view(np.int8)


q4_0 = _symmetric(4, "q4_0", 2)
q4_1 = _affine(4, "q4_1", 3)
q5_0 = _symmetric(5, "q5_0", 6)
q5_1 = _affine(5, "q5_1", 7)
q8_0 = block_format(
    "q8_0",
    8,
    8,
    (SIZE, 34),
    (0,),
    _encode_q8_0,
    lambda blocks: _codes_q8_0(blocks).astype(np.float32) * read_half(blocks, 0),
    _codes_q8_0,
    uses_importance=False,
)
