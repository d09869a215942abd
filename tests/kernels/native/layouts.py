"""Layouts: the same elements with different memory layouts."""

import numpy as np

__all__ = ["LAYOUTS"]


def _offset(array, count):
    roomy = np.empty(array.size + count, array.dtype)
    roomy[count:] = array.reshape(-1)
    return roomy[count:].reshape(array.shape)


def _read_only(array):
    copy = array.copy()
    copy.flags.writeable = False
    return copy


def _unaligned(array):
    """Return the elements at an odd address."""
    buffer = bytearray(1) + array.tobytes()
    return np.frombuffer(buffer, np.uint8)[1:].view(array.dtype).reshape(array.shape)


LAYOUTS = {
    "offset by one": lambda a: _offset(a, 1),
    "offset by three": lambda a: _offset(a, 3),
    "every second": lambda a: np.repeat(a, 2, axis=-1)[..., ::2],
    "backwards": lambda a: a[..., ::-1].copy()[..., ::-1],
    "backwards along both axes": lambda a: a[::-1, ::-1].copy()[::-1, ::-1],
    "transposed": lambda a: a.T.copy().T,
    "broadcast": lambda a: np.broadcast_to(a[:1], a.shape),
    "read-only": _read_only,
    "not aligned": _unaligned,
}
