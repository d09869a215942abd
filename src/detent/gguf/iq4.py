"""IQ4_NL and IQ4_XS: 4-bit codes that select one of 16 unevenly spaced levels.

====== ============================================================== ==========================
iq4_nl 32 elements: d; 16 bytes: code j in the low bits, j + 16 above  value d * level
iq4_xs 256 elements: d; high 2 bits and low 4 bits of 8 scales; codes  value (d * (s - 32)) * level
====== ============================================================== ==========================
"""

import numpy as np
from numpy.typing import NDArray

from detent.gguf.layout import block_format, half, pick, place, read_half
from detent.gguf.searches import NEGLIGIBLE, first_largest, nearest, ordered_sum

__all__ = ["iq4_nl", "iq4_xs"]

Floats = NDArray[np.float32]
Ints = NDArray[np.int32]
Bytes = NDArray[np.uint8]
F32 = np.float32
PART = 32
LEVELS: Floats = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.float32)
MIDDLES: Floats = (LEVELS[1:] + LEVELS[:-1]) / F32(2)
TRIES = 7


def _code(t: Floats) -> Ints:
    """Return the index of the nearest level; of two at the same distance, the higher. NaN gives 15."""
    return np.where(np.isnan(t), 15, np.searchsorted(MIDDLES, t, side="right")).astype(np.int32)


def _scales(x: Floats, weights: Floats) -> Floats:
    """Search the scale of each block with the least weighted error."""
    largest = first_largest(x)

    def sums(inverse: Floats) -> tuple[Floats, Floats]:
        values = LEVELS[_code(inverse * x)]
        return ordered_sum(weights * values * x), ordered_sum(weights * values * values)

    products, squares = sums(F32(1) / (-largest / LEVELS[0]))
    scale = np.where(squares > 0, products / squares, F32(0))
    best = scale * products
    for i in range(-TRIES, TRIES + 1):
        products, squares = sums((F32(i) + LEVELS[0]) / largest)
        better = (squares > 0) & (products * products > best * squares)
        scale = np.where(better, products / squares, scale)
        best = np.where(better, scale * products, best)
    return np.where(np.abs(largest) < NEGLIGIBLE, F32(0), scale)


def _weights(x: Floats, importance: Floats | None) -> Floats:
    if importance is None:
        return x * x
    return importance * np.sqrt(ordered_sum(x * x) * (F32(2) / F32(len(x))) + x * x)


def _reciprocal(x: Floats) -> Floats:
    return np.where(x != 0, F32(1) / x, F32(0))


def _encode_nl(x: Floats, importance: Floats | None, means: Floats) -> Bytes:  # noqa: ARG001 - not needed
    scale = _scales(x, _weights(x, importance))
    codes = _code(_reciprocal(scale) * x)
    return np.hstack([half(scale), place(codes.T.reshape(-1, 2, 16), 4)])


def _unpack_nl(blocks: Bytes) -> Bytes:
    return pick(blocks[:, 2:], 4, 2).reshape(-1, PART)


def _encode_xs(x: Floats, importance: Floats | None, means: Floats) -> Bytes:  # noqa: ARG001 - not needed
    count = len(x) // PART
    parts, weights = (
        np.ascontiguousarray(each.reshape(count, PART, -1).transpose(1, 0, 2).reshape(PART, -1))
        for each in (x, _weights(x, importance))
    )
    scale = _scales(parts, weights).reshape(count, -1)
    d = -first_largest(scale) / F32(32)
    scale_codes = np.clip(nearest(_reciprocal(d) * scale), -32, 31)
    codes = _code(np.repeat(_reciprocal(d * scale_codes.astype(np.float32)), PART, axis=0) * x).T
    stored = (scale_codes + 32).T
    high = place((stored >> 4).reshape(-1, 2, 4).transpose(0, 2, 1), 2)
    low = place((stored & 15).reshape(-1, 4, 2).transpose(0, 2, 1), 4)
    return np.hstack([half(d), high, low, place(codes.reshape(-1, 2, 16), 4).reshape(-1, 128)])


def _unpack_xs(blocks: Bytes) -> Bytes:
    return pick(blocks[:, 8:].reshape(-1, 16), 4, 2).reshape(-1, 256)


def _decode_xs(blocks: Bytes) -> Floats:
    high = pick(blocks[:, 2:4], 2, 4).transpose(0, 2, 1).reshape(-1, 8)
    low = pick(blocks[:, 4:8], 4, 2).transpose(0, 2, 1).reshape(-1, 8)
    d = read_half(blocks, 0) * ((low | high << np.uint8(4)).astype(np.float32) - F32(32))
    values: Floats = np.repeat(d, PART, axis=1) * LEVELS[_unpack_xs(blocks)]
    return values


iq4_nl = block_format(
    "iq4_nl",
    20,
    4,
    (PART, 18),
    (0,),
    _encode_nl,
    lambda blocks: read_half(blocks, 0) * LEVELS[_unpack_nl(blocks)],
    _unpack_nl,
)
iq4_xs = block_format(
    "iq4_xs",
    23,
    4,
    (256, 136),
    (0,),
    _encode_xs,
    _decode_xs,
    _unpack_xs,
    fallback="iq4_nl",
)
