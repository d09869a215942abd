"""Q2_K to Q6_K: blocks of 256 elements, divided into 8 or 16 sub-blocks with scales of 4 to 8 bits.

====== ========================================================= =============================
q2_k   16 scales and minima of 4 bits; codes; d; dmin            value (d * s) * q - (dmin * m)
q3_k   highest bits of codes; codes; 16 scales of 6 bits; d      value (d * (s - 32)) * (q - 4)
q4_k   d; dmin; 8 scales and minima of 6 bits; codes             value (d * s) * q - (dmin * m)
q5_k   d; dmin; 8 scales and minima; highest bits; codes         value (d * s) * q - (dmin * m)
q6_k   low 4 bits of codes; high 2 bits; 16 signed scales; d     value (d * s) * (q - 32)
====== ========================================================= =============================

A search finds the scale of each sub-block; then the scales are quantized, and the codes are computed anew with the
stored scales. Where a stored scale is 0, the codes of the search stay.
"""

import numpy as np
from numpy.typing import NDArray

from detent.gguf.layout import block_format, half, pick, place, read_half
from detent.gguf.searches import (
    NEGLIGIBLE,
    affine,
    first_largest,
    nearest,
    ordered_sum,
    positive,
    refined,
    signed,
)

__all__ = ["q2_k", "q3_k", "q4_k", "q5_k", "q6_k"]

Floats = NDArray[np.float32]
Ints = NDArray[np.int32]
Bytes = NDArray[np.uint8]
SIZE = 256
F32 = np.float32


def _split(x: NDArray[np.float32], count: int) -> Floats:
    """Divide blocks (256, n) into ``count`` sub-blocks each: (256 / count, count * n), sub-block by sub-block."""
    size = SIZE // count
    return np.ascontiguousarray(x.reshape(count, size, -1).transpose(1, 0, 2).reshape(size, -1))


def _join(x: NDArray[np.int32], count: int) -> Ints:
    """Invert ``_split``."""
    return x.reshape(SIZE // count, count, -1).transpose(1, 0, 2).reshape(SIZE, -1)


def _weights(x: Floats, importance: Floats, factor: int) -> Floats:
    """Return the weights of elements: the importance times the square root of x^2 plus ``factor`` times its mean."""
    return importance * np.sqrt(F32(factor) * ordered_sum(x * x) / F32(SIZE) + x * x)


def _stored(x: Floats) -> Floats:
    return x.astype(np.float16).astype(np.float32)


def _affine_codes(x: Floats, codes: Ints, d: Floats, least: Floats, top: int) -> Ints:
    """Compute codes (256, n) with the stored scales and minima (sub-blocks, n)."""
    size = SIZE // len(d)
    wide, offset = np.repeat(d, size, axis=0), np.repeat(least, size, axis=0)
    return np.where(wide != 0, np.clip(nearest((x + offset) / wide), 0, top), codes)


def _signed_codes(x: Floats, codes: Ints, d: Floats, top: int) -> Ints:
    wide = np.repeat(d, SIZE // len(d), axis=0)
    return np.where(wide != 0, np.clip(nearest(x / wide), -top, top - 1) + top, codes)


def _inverse(top: float, high: Floats) -> Floats:
    return np.where(high > 0, F32(top) / high, F32(0))


# Q2_K


def _encode_q2_k(x: Floats, importance: Floats | None, means: Floats) -> Bytes:  # noqa: ARG001 - the mean of 256
    parts = _split(x, 16)
    if importance is None:
        search = affine(parts, np.abs(parts), 3, first=-0.5, step=0.1, count=15, absolute=True)
        scale, least = search.scale.reshape(16, -1), search.least.reshape(16, -1)
        tops = [np.maximum(each.max(axis=0), F32(0)) for each in (scale, least)]
        codes = [nearest(_inverse(15, top) * each) for top, each in zip(tops, (scale, least), strict=True)]
        packed = (codes[0] | codes[1] << 4).astype(np.uint8)
        halves = [np.where(top > 0, top / F32(15), F32(0)) for top in tops]
    else:
        weights = _split(_weights(x, importance, 1), 16)
        search = affine(parts, weights, 3, first=-0.9, step=0.05, count=36, narrow=True)
        sums = ordered_sum(weights).reshape(16, -1)
        d, scale_codes = positive(search.scale.reshape(16, -1), sums, 15)
        dmin, least_codes = positive(search.least.reshape(16, -1), sums, 15)
        packed, halves = scale_codes | least_codes << np.uint8(4), [d, dmin]
    d, dmin = (_stored(each) for each in halves)
    q = _affine_codes(x, _join(search.codes, 16), d * (packed & 15), dmin * (packed >> 4), 3)
    quarters = place(q.T.reshape(-1, 4, 32), 2).reshape(-1, 64)
    return np.hstack([packed.T, quarters, half(halves[0]), half(halves[1])])


def _unpack_q2_k(blocks: Bytes) -> Bytes:
    return pick(blocks[:, 16:80].reshape(-1, 32), 2, 4).reshape(-1, SIZE)


def _decode_q2_k(blocks: Bytes) -> Floats:
    d = read_half(blocks, 80) * (blocks[:, :16] & 15).astype(np.float32)
    least = read_half(blocks, 82) * (blocks[:, :16] >> 4).astype(np.float32)
    return np.repeat(d, 16, axis=1) * _unpack_q2_k(blocks).astype(np.float32) - np.repeat(least, 16, axis=1)


# Q3_K


def _encode_q3_k(x: Floats, importance: Floats | None, means: Floats) -> Bytes:  # noqa: ARG001 - the mean of 256
    parts = _split(x, 16)
    if importance is None:
        flat, codes = refined(parts, 4)
        scale = flat.reshape(16, -1)
        largest = first_largest(scale)
        inverse = F32(-32) / largest
        scale_codes = np.clip(nearest(inverse * scale), -32, 31) + 32
        scale_codes = np.where(largest != 0, scale_codes, 0)
        d = np.where(largest != 0, F32(1) / inverse, F32(0))
    else:
        weights = _split(_weights(x, importance, 2), 16)
        flat, codes = signed(parts, weights, 4)
        d, scale_codes = signed(flat.reshape(16, -1), ordered_sum(weights).reshape(16, -1), 32)
    q = _signed_codes(x, _join(codes, 16), _stored(d) * (scale_codes - 32).astype(np.float32), 4).T
    high = place((q >> 2).reshape(-1, 8, 32), 1)
    low = place((q & 3).reshape(-1, 4, 32), 2).reshape(-1, 64)
    rows = scale_codes.T
    nibbles = place((rows & 15).reshape(-1, 2, 8), 4)
    tops = place((rows >> 4).reshape(-1, 4, 4), 2)
    return np.hstack([high, low, nibbles, tops, half(d)])


def _unpack_q3_k(blocks: Bytes) -> Bytes:
    low = pick(blocks[:, 32:96].reshape(-1, 32), 2, 4).reshape(-1, SIZE)
    return low | pick(blocks[:, :32], 1, 8).reshape(-1, SIZE) << np.uint8(2)


def _decode_q3_k(blocks: Bytes) -> Floats:
    scale_codes = pick(blocks[:, 96:104], 4, 2).reshape(-1, 16)
    scale_codes |= pick(blocks[:, 104:108], 2, 4).reshape(-1, 16) << np.uint8(4)
    d = read_half(blocks, 108) * (scale_codes.astype(np.float32) - F32(32))
    values: Floats = np.repeat(d, 16, axis=1) * (_unpack_q3_k(blocks).astype(np.float32) - F32(4))
    return values


# Q4_K and Q5_K


def _encode_q4_q5(x: Floats, importance: Floats | None, bits: int) -> Bytes:
    parts, top = _split(x, 8), (1 << bits) - 1
    if importance is None:
        weights = np.sqrt(ordered_sum(parts * parts) / F32(32)) + np.abs(parts)
        first, count = (-1.0, 20) if bits == 4 else (-0.5, 15)
        search = affine(parts, weights, top, first=first, step=0.1, count=count)
        scale, least = search.scale.reshape(8, -1), search.least.reshape(8, -1)
        tops = [np.maximum(each.max(axis=0), F32(0)) for each in (scale, least)]
        scale_codes, least_codes = (
            np.minimum(nearest(_inverse(63, high) * each).astype(np.uint8), np.uint8(63))
            for high, each in zip(tops, (scale, least), strict=True)
        )
        halves = [high / F32(63) for high in tops]
    else:
        weights = _split(_weights(x, importance, 2), 8)
        search = affine(parts, weights, top, first=-0.9, step=0.05, count=36, narrow=True)
        sums = ordered_sum(weights).reshape(8, -1)
        d, scale_codes = positive(search.scale.reshape(8, -1), sums, 63)
        dmin, least_codes = positive(search.least.reshape(8, -1), sums, 63)
        halves = [d, dmin]
    packed = _pack_pairs(scale_codes.T, least_codes.T)
    scale_codes, least_codes = (each.T for each in _unpack_pairs(packed))
    d, dmin = (_stored(each) for each in halves)
    q = _affine_codes(x, _join(search.codes, 8), d * scale_codes, dmin * least_codes, top).T
    low = place((q & 15).reshape(-1, 2, 32), 4).reshape(-1, 128)
    fields = [half(halves[0]), half(halves[1]), packed]
    if bits == 5:
        fields.append(place((q >> 4).reshape(-1, 8, 32), 1))
    return np.hstack([*fields, low])


def _pack_pairs(scales: Bytes, minima: Bytes) -> Bytes:
    """Pack 8 scales and 8 minima of 6 bits into 12 bytes."""
    packed = np.empty((len(scales), 12), np.uint8)
    packed[:, :4] = scales[:, :4] | scales[:, 4:] >> np.uint8(4) << np.uint8(6)
    packed[:, 4:8] = minima[:, :4] | minima[:, 4:] >> np.uint8(4) << np.uint8(6)
    packed[:, 8:] = scales[:, 4:] & np.uint8(15) | minima[:, 4:] << np.uint8(4)
    return packed


def _unpack_pairs(packed: Bytes) -> tuple[Bytes, Bytes]:
    first, second, third = packed[:, :4], packed[:, 4:8], packed[:, 8:12]
    scales = np.hstack([first & 63, third & 15 | first >> np.uint8(6) << np.uint8(4)])
    minima = np.hstack([second & 63, third >> np.uint8(4) | second >> np.uint8(6) << np.uint8(4)])
    return scales, minima


def _unpack_q4_k(blocks: Bytes) -> Bytes:
    return pick(blocks[:, -128:].reshape(-1, 32), 4, 2).reshape(-1, SIZE)


def _unpack_q5_k(blocks: Bytes) -> Bytes:
    return _unpack_q4_k(blocks) | pick(blocks[:, 16:48], 1, 8).reshape(-1, SIZE) << np.uint8(4)


def _decode_affine(blocks: Bytes, codes: Bytes) -> Floats:
    scale_codes, least_codes = _unpack_pairs(blocks[:, 4:16])
    d, least = read_half(blocks, 0) * scale_codes, read_half(blocks, 2) * least_codes
    return np.repeat(d, 32, axis=1) * codes.astype(np.float32) - np.repeat(least, 32, axis=1)


# Q6_K


def _encode_q6_k(x: Floats, importance: Floats | None, means: Floats) -> Bytes:  # noqa: ARG001 - not needed
    parts = _split(x, 16)
    weights = parts * parts if importance is None else _split(importance, 16)
    flat, codes = signed(parts, weights, 32)
    scale = flat.reshape(16, -1)
    largest = first_largest(scale)
    inverse = F32(-128) / largest
    d = F32(1) / inverse
    scale_codes = np.minimum(nearest(inverse * scale), 127).astype(np.int8)
    q = _signed_codes(x, _join(codes, 16), _stored(d) * scale_codes, 32).T
    halves = (q & 15).reshape(-1, 2, 64)
    low = place(halves.reshape(-1, 2, 64), 4).reshape(-1, 128)
    high = place((q >> 4).reshape(-1, 4, 32), 2).reshape(-1, 64)
    blocks = np.hstack([low, high, scale_codes.T.view(np.uint8), half(d)])
    blocks[np.abs(largest) < NEGLIGIBLE] = 0
    return blocks


def _unpack_q6_k(blocks: Bytes) -> Bytes:
    low = pick(blocks[:, :128].reshape(-1, 64), 4, 2).reshape(-1, SIZE)
    return low | pick(blocks[:, 128:192].reshape(-1, 32), 2, 4).reshape(-1, SIZE) << np.uint8(4)


def _decode_q6_k(blocks: Bytes) -> Floats:
    scale_codes = np.ascontiguousarray(blocks[:, 192:208]).view(np.int8)
    d = read_half(blocks, 208) * scale_codes.astype(np.float32)
    return np.repeat(d, 16, axis=1) * (_unpack_q6_k(blocks).astype(np.float32) - F32(32))


q2_k = block_format(
    "q2_k",
    10,
    2,
    (SIZE, 84),
    (80, 82),
    _encode_q2_k,
    _decode_q2_k,
    _unpack_q2_k,
    fallback="q4_0",
)
q3_k = block_format(
    "q3_k",
    11,
    3,
    (SIZE, 110),
    (108,),
    _encode_q3_k,
    _decode_q3_k,
    _unpack_q3_k,
    fallback="q4_0",
)
q4_k = block_format(
    "q4_k",
    12,
    4,
    (SIZE, 144),
    (0, 2),
    lambda x, weights, _: _encode_q4_q5(x, weights, 4),
    lambda blocks: _decode_affine(blocks, _unpack_q4_k(blocks)),
    _unpack_q4_k,
    fallback="q5_0",
)
q5_k = block_format(
    "q5_k",
    13,
    5,
    (SIZE, 176),
    (0, 2),
    lambda x, weights, _: _encode_q4_q5(x, weights, 5),
    lambda blocks: _decode_affine(blocks, _unpack_q5_k(blocks)),
    _unpack_q5_k,
    fallback="q5_1",
)
q6_k = block_format(
    "q6_k",
    14,
    6,
    (SIZE, 210),
    (208,),
    _encode_q6_k,
    _decode_q6_k,
    _unpack_q6_k,
    fallback="q8_0",
)
