"""BlockFormat: a format whose blocks contain codes and scales, and whose quantization derives the scales itself.

A block format divides each row (the last axis of an array) into blocks of ``block_size`` elements, and stores each
block in ``block_bytes`` bytes: codes, scales and minima side by side. There are no ``QuantParams``: the search for
scales is part of the format, and the bytes are the result. So a block format can be passed instead of a spec, but it is
not a ``QuantSpec``.

A format is one value: its name, its layout and the two functions of its reference kernel. The kernel defines every bit
of the result: float32 arithmetic, one rounding per operation, sums from left to right inside a block.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from detent.errors import ShapeError

__all__ = ["BlockFormat"]

Floats = NDArray[np.float32]
Bytes = NDArray[np.uint8]


@dataclass(frozen=True, repr=False)
class BlockFormat:
    """Format of blocks that contain their own scales.

    Attributes:
        name: text for specs and recipes, such as "q4_k"; "gguf.mxfp4", because "mxfp4" is a spec.
        gguf_type: number of the tensor type in GGUF files.
        bits: bit width of a code.
        block_size: number of elements in a block.
        block_bytes: number of bytes of a block.
        scale_offsets: positions of the float16 scales and minima in a block, in bytes; () if the scale is the byte at
            0, an exponent plus 127.
        uses_importance: whether the search for scales can weight columns.
        encode: reference kernel; maps rows of float32 (n, K), and None or one weight per column (K,), to bytes
            (n, K / block_size * block_bytes).
        decode: reference kernel; maps blocks (n, block_bytes) to float32 values (n, block_size).
        unpack: maps blocks (n, block_bytes) to the codes (n, block_size).
        fallback: name of the format that llama.cpp uses if ``block_size`` does not divide the rows, or "".

    >>> import detent as dt
    >>> dt.gguf.q4_k, dt.gguf.q4_k.block_size, dt.gguf.q4_k.bits_per_weight
    (dt.gguf.q4_k, 256, 4.5)
    """

    name: str
    gguf_type: int
    bits: int
    block_size: int
    block_bytes: int
    scale_offsets: tuple[int, ...]
    uses_importance: bool
    encode: Callable[[Floats, Floats | None], Bytes] = field(compare=False)
    decode: Callable[[Bytes], Floats] = field(compare=False)
    unpack: Callable[[Bytes], NDArray[Any]] = field(compare=False)
    fallback: str = ""

    def __str__(self) -> str:
        return self.name

    def __repr__(self) -> str:
        return f"dt.gguf.{self.name.removeprefix('gguf.')}"

    def __reduce__(self) -> tuple[object, tuple[str]]:
        """Pickle the name only."""
        from detent.gguf import get_block_format  # noqa: PLC0415 - the table of formats imports this module

        return get_block_format, (self.name,)

    @property
    def type_name(self) -> str:
        """The name of the tensor type in llama.cpp, such as "Q4_K"."""
        return self.name.removeprefix("gguf.").upper()

    @property
    def bits_per_weight(self) -> float:
        """The number of stored bits per element, including scales."""
        return self.block_bytes * 8 / self.block_size

    def fits(self, shape: tuple[int, ...]) -> bool:
        """Return whether the last axis consists of complete blocks."""
        return len(shape) > 0 and shape[-1] % self.block_size == 0

    def check_shape(self, shape: tuple[int, ...]) -> None:
        """Raise ShapeError unless the last axis consists of complete blocks.

        >>> import detent as dt
        >>> dt.gguf.q4_k.check_shape((8, 320))
        Traceback (most recent call last):
        ...
        detent.errors.ShapeError: got data of shape (8, 320) for q4_k, expected a last axis that is a multiple of \
256, the block size: use q5_0 (block size 32), as llama.cpp does, or pad the last axis
        """
        if self.fits(shape):
            return
        raise ShapeError(
            f"got data of shape {shape} for {self.name}, expected a last axis that is a multiple of "
            f"{self.block_size}, the block size: {self._repair(shape)}"
        )

    def _repair(self, shape: tuple[int, ...]) -> str:
        other = self.fallback_for(shape)
        if other is None:
            return "pad the last axis, or keep the data in float"
        return f"use {other} (block size {other.block_size}), as llama.cpp does, or pad the last axis"

    def fallback_for(self, shape: tuple[int, ...]) -> "BlockFormat | None":
        """Return this format if it fits the shape, else the fallback that does, or None if none fits."""
        from detent.gguf import BLOCK_FORMATS  # noqa: PLC0415 - the table of formats imports this module

        form: BlockFormat | None = self
        while form is not None and not form.fits(shape):
            form = BLOCK_FORMATS.get(form.fallback)
        return form

    def row_bytes(self, columns: int) -> int:
        """Return the number of bytes of a row with so many elements."""
        return columns // self.block_size * self.block_bytes

    def nbytes(self, shape: tuple[int, ...]) -> int:
        """Return the number of bytes of an array of this shape.

        >>> import detent as dt
        >>> dt.gguf.q8_0.nbytes((4, 64))
        272
        """
        self.check_shape(shape)
        return prod(shape) // self.block_size * self.block_bytes
