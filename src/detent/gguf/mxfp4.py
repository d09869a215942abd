"""MXFP4 as GGUF files have it: blocks of 32 elements, codes of float4_e2m1fn, and a power of two as scale.

A block is one byte e, the exponent plus 127, and 16 bytes with code j in the low bits, j + 16 above. Codes 0 to 7 are
0, 0.5, 1, 1.5, 2, 3, 4 and 6, codes 8 to 15 their negatives: value 2^(e - 127) * level.

The spec ``dt.mxfp4`` has the same levels and scales, but rounds ties to even. ggml takes the first of the nearest
codes, which has the smaller magnitude, and computes e from log2 in float32: just below some powers of two, log2 rounds
up to the next integer. So the bytes differ, and this format has a name of its own: "gguf.mxfp4".
"""

import numpy as np
from numpy.typing import NDArray

from detent.gguf.layout import block_format, pick, place

__all__ = ["mxfp4"]

Floats = NDArray[np.float32]
Bytes = NDArray[np.uint8]
SIZE, WIDTH = 32, 17
BIAS = 127
LEVELS: Floats = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.float32)  # twice the values


def _halves(exponents: Bytes) -> Floats:
    """Return 2^(e - 128), half the scales, because the levels are twice the values."""
    return np.ldexp(np.float32(1), exponents.astype(np.int32) - (BIAS + 1)).astype(np.float32)


def _encode(x: Floats, importance: Floats | None, means: Floats) -> Bytes:  # noqa: ARG001 - not weighted
    largest = np.abs(x).max(axis=0)
    logs = np.floor(np.log2(largest.astype(np.float64)).astype(np.float32))
    exponents = np.where(largest > 0, logs - 2 + BIAS, 0).astype(np.int32).astype(np.uint8)  # keeps the lowest 8 bits
    scale = _halves(exponents)
    codes, best = np.zeros(x.shape, np.int32), np.abs(x)
    for code in range(1, len(LEVELS)):
        error = np.abs(LEVELS[code] * scale - x)
        codes[error < best] = code
        best = np.minimum(best, error)
    return np.hstack([exponents[:, None], place(codes.T.reshape(-1, 2, 16), 4)])


def _unpack(blocks: Bytes) -> Bytes:
    return pick(blocks[:, 1:], 4, 2).reshape(-1, SIZE)


mxfp4 = block_format(
    "gguf.mxfp4",
    39,
    4,
    (SIZE, WIDTH),
    (),
    _encode,
    lambda blocks: LEVELS[_unpack(blocks)] * _halves(blocks[:, :1]),
    _unpack,
    uses_importance=False,
)
