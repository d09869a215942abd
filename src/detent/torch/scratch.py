"""Scratch memory: for results that are used at once and then forgotten.

Memory for a large tensor comes fresh from the system, which clears it page by page: that takes longer than quantizing
into it. Quantized copies that only a product reads go into a buffer of the thread's own instead, one for inputs and one
for weights, as large as the largest so far.
"""

import threading
from typing import Literal

import torch
from torch import Tensor

__all__ = ["Slot", "borrow", "release"]

Slot = Literal["input", "weight"]
SMALLEST, LARGEST = 1 << 17, 1 << 28  # bytes: what the allocator keeps at hand anyway, and what nobody should sit on


MOST_VIEWS = 256


class _Buffers(threading.local):
    def __init__(self) -> None:
        self.known: dict[str, Tensor] = {}
        self.views: dict[object, Tensor] = {}  # of known ones, as they were asked for


_buffers = _Buffers()


def borrow(slot: Slot | None, like: Tensor) -> Tensor:
    """A C-contiguous tensor of that shape and type, whatever is in it; valid until the slot is borrowed again.

    >>> a, b = borrow("input", torch.zeros(1 << 18)), borrow("input", torch.zeros(1 << 17))
    >>> a.data_ptr() == b.data_ptr(), borrow(None, b).data_ptr() == b.data_ptr()
    (True, False)
    """
    size = like.numel() * like.element_size()
    if slot is None or not SMALLEST <= size <= LARGEST:
        return torch.empty_like(like, memory_format=torch.contiguous_format, requires_grad=False)
    key = (slot, like.dtype, like.shape)
    found = _buffers.views.get(key)
    if found is None:
        buffer = _buffers.known.get(slot)
        if buffer is None or buffer.numel() < size:
            release()
            buffer = torch.empty(size, dtype=torch.uint8)
            _buffers.known[slot] = buffer
        found = buffer[:size].view(like.dtype).view(like.shape)
        if len(_buffers.views) >= MOST_VIEWS:
            _buffers.views.clear()
        _buffers.views[key] = found
    return found


def release() -> None:
    """Give the calling thread's buffers back.

    >>> release()
    """
    _buffers.known.clear()
    _buffers.views.clear()
