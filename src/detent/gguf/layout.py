"""Layout: rows divided into blocks, bits of codes placed in bytes, and float16 scales in blocks."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from detent.block_format import BlockFormat

__all__ = ["block_format", "columns", "half", "pick", "place", "read_half", "tiles"]

Floats = NDArray[np.float32]
Bytes = NDArray[np.uint8]
EncodeBlocks = Callable[[Floats, Floats | None, Floats], Bytes]
MAX_ELEMENTS = 1 << 20  # elements that are encoded at once, to bound the memory of the search


def block_format(  # noqa: PLR0913 - the fields of a format
    name: str,
    gguf_type: int,
    bits: int,
    shape: tuple[int, int],
    scale_offsets: tuple[int, ...],
    encode: EncodeBlocks,
    decode: Callable[[Bytes], Floats],
    unpack: Callable[[Bytes], NDArray[Any]],
    *,
    uses_importance: bool = True,
    fallback: str = "",
) -> BlockFormat:
    """Make a format from functions for many blocks; ``shape`` is the number of elements and of bytes of a block.

    ``encode`` receives the elements (size, blocks), their importance or None, and the mean square of the row that each
    block belongs to, which is computed only if there is an importance.
    """
    size, width = shape

    def encode_rows(x: Floats, importance: Floats | None) -> Bytes:
        return _by_blocks(x, importance if uses_importance else None, size, width, encode)

    return BlockFormat(
        name, gguf_type, bits, size, width, scale_offsets, uses_importance, encode_rows, decode, unpack, fallback
    )


def tiles(x: Floats) -> Iterator[tuple[int, Floats]]:
    """Divide rows into groups of about ``MAX_ELEMENTS`` elements; yield the first row's index and the rows."""
    count = max(1, MAX_ELEMENTS // max(x.shape[1], 1))
    for start in range(0, x.shape[0], count):
        yield start, x[start : start + count]


def _by_blocks(x: Floats, importance: Floats | None, size: int, width: int, encode: EncodeBlocks) -> Bytes:
    """Encode rows (n, K) block by block to bytes (n, K / size * width)."""
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
