"""Layout: rows divided into blocks, bits of codes placed in bytes, and float16 scales in blocks."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["by_blocks", "columns", "half", "pick", "place", "read_half", "tiles"]

Floats = NDArray[np.float32]
Bytes = NDArray[np.uint8]
MAX_ELEMENTS = 1 << 20  # elements that are encoded at once, to bound the memory of the search


def tiles(x: Floats) -> Iterator[tuple[int, Floats]]:
    """Divide rows into groups of about ``MAX_ELEMENTS`` elements; yield the first row's index and the rows."""
    count = max(1, MAX_ELEMENTS // max(x.shape[1], 1))
    for start in range(0, x.shape[0], count):
        yield start, x[start : start + count]


def by_blocks(
    x: Floats,
    importance: Floats | None,
    size: int,
    width: int,
    encode: Callable[[Floats, Floats | None, Floats], Bytes],
) -> Bytes:
    """Encode rows (n, K) block by block to bytes (n, K / size * width).

    ``encode`` receives the elements of many blocks (size, blocks), their importance or None, and the mean square of the
    row that each block belongs to, which is computed only if there is an importance.
    """
    out = np.empty((x.shape[0], x.shape[1] // size * width), np.uint8)
    per_row = x.shape[1] // size
    for start, rows in tiles(x):
        weights = None
        means = np.zeros(len(rows) * per_row, np.float32)
        if importance is not None:
            weights = np.ascontiguousarray(np.tile(importance.reshape(per_row, size).T, len(rows)))
            total = np.zeros(len(rows), np.float32)
            for column in rows.T:
                total += column * column
            means = np.repeat(total / np.float32(x.shape[1]), per_row)
        with np.errstate(all="ignore"):
            blocks = encode(columns(rows, size), weights, means)
        out[start : start + len(rows)] = blocks.reshape(len(rows), -1)
    return out


def columns(rows: NDArray[Any], size: int) -> NDArray[Any]:
    """Turn rows (n, K) into an array (size, n * K / size) with one column per block."""
    return np.ascontiguousarray(rows.reshape(-1, size).T)


def half(x: Floats) -> Bytes:
    """Return numbers (n,) as the bytes of float16 (n, 2)."""
    return x.astype("<f2").reshape(-1, 1).view(np.uint8)


def read_half(blocks: Bytes, offset: int) -> Floats:
    """Read the float16 at this offset of each block, as a column (n, 1) of float32."""
    return np.ascontiguousarray(blocks[:, offset : offset + 2]).view("<f2").astype(np.float32)


def place(codes: NDArray[Any], bits: int) -> Bytes:
    """Combine codes (n, parts, m) to bytes (n, m): part i is shifted left by ``i * bits``."""
    result = np.zeros((codes.shape[0], codes.shape[2]), np.uint8)
    for i in range(codes.shape[1]):
        result |= codes[:, i].astype(np.uint8) << np.uint8(i * bits)
    return result


def pick(packed: Bytes, bits: int, parts: int) -> Bytes:
    """Divide bytes (n, m) into codes (n, parts, m); the inverse of ``place``."""
    shifts = np.arange(parts, dtype=np.uint8)[:, None] * np.uint8(bits)
    return (packed[:, None, :] >> shifts) & np.uint8((1 << bits) - 1)
