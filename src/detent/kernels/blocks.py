"""Blocks: rows of float32 encoded to the bytes of a block format, and decoded again."""

import numpy as np
from numpy.typing import NDArray

from detent.block_format import BlockFormat
from detent.errors import UnsupportedError
from detent.kernels import native
from detent.kernels.settings import current_kernels

__all__ = ["decode_blocks", "encode_blocks"]

Floats = NDArray[np.float32]
Bytes = NDArray[np.uint8]


def encode_blocks(form: BlockFormat, x: Floats, importance: Floats | None, out: Bytes) -> bool:
    """Encode rows (n, K) to ``out``, n rows of bytes; return whether x is finite. If not, ``out`` is undefined."""
    if not x.size:
        return True
    weights = importance if form.uses_importance else None
    if _runs_natively(form):
        return native.encode_blocks(form.gguf_type, x, weights, out)
    if not np.isfinite(x).all():
        return False
    out[...] = form.encode(x, weights)
    return True


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
