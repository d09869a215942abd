"""Blocks: rows of float32 encoded to the bytes of a block format, and decoded again."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from detent.block_format import BlockFormat
from detent.errors import UnsupportedError
from detent.kernels import native
from detent.kernels.settings import current_kernels

__all__ = ["decode_blocks", "encode_blocks"]

Floats = NDArray[np.float32]
Bytes = NDArray[np.uint8]


class EncodedBlocks(NamedTuple):
    """Whether the data are finite, and whether scales of a block may be infinite or 0, so that they must be checked."""

    is_finite: bool
    needs_check: bool


def encode_blocks(form: BlockFormat, x: Floats, importance: Floats | None, out: Bytes) -> EncodedBlocks:
    """Encode rows (n, K) to ``out``, n rows of bytes. If x is not finite, ``out`` is undefined."""
    if not x.size:
        return EncodedBlocks(is_finite=True, needs_check=False)
    weights = importance if form.uses_importance else None
    if _runs_natively(form):
        return EncodedBlocks(*native.encode_blocks(form.gguf_type, x, weights, out))
    is_finite = bool(np.isfinite(x).all())
    if is_finite:
        out[...] = form.encode(x, weights)
    return EncodedBlocks(is_finite, needs_check=True)


def decode_blocks(form: BlockFormat, blocks: Bytes, out: Floats) -> None:
    """Decode blocks (n, block_bytes) to ``out`` of shape (n, block_size)."""
    if not blocks.size:
        return
    if _runs_natively(form):
        native.decode_blocks(form.gguf_type, blocks, out)
        return
    with np.errstate(all="ignore"):
        out[...] = form.decode(blocks)


def _runs_natively(form: BlockFormat) -> bool:
    choice = current_kernels()
    if choice == "reference":
        return False
    why_not = native.WHY_NOT
    if why_not is None and form.gguf_type not in native.BLOCK_TYPES:
        why_not = f"the block format {form} has no native kernel"
    if why_not is not None and choice == "native":
        raise UnsupportedError(f"{why_not}: use_kernels('auto') runs the reference kernel instead")
    return why_not is None
