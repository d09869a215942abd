"""Array store: arrays in memory up to a limit, and all further arrays in an unnamed temporary file.

The arrays that are read have the same bits in both cases. The file is in the directory for temporary files (``TMPDIR``)
and is removed with the store, or when the process ends. Arrays of Python objects, such as texts, stay in memory.
"""

import tempfile
import weakref
from collections.abc import Hashable, Iterable, Iterator, Sequence
from itertools import chain
from threading import Lock
from typing import IO, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

__all__ = ["ArrayStore", "concatenate", "copies"]

Array = NDArray[Any]
ALIGNMENT = 64  # bytes


class _Stored(NamedTuple):
    """Type and shape of an array in a file, and its first byte."""

    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    start: int

    @property
    def nbytes(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64)) * self.dtype.itemsize


class ArrayStore:
    """Lists of arrays, by key; arrays in a file are read again each time.

    Args:
        memory_budget: limit on the bytes in memory; None for no limit.

    >>> store = ArrayStore(memory_budget=0)
    >>> store["a"] = [np.float32([1, 2]), np.int8([3])]
    >>> store["a"], store.nbytes_in_file
    ([array([1., 2.], dtype=float32), array([3], dtype=int8)], 65)
    """

    def __init__(self, memory_budget: int | None = None) -> None:
        self._budget, self._nbytes = memory_budget, 0
        self._kept: dict[Hashable, list[Array]] = {}
        self._stored: dict[Hashable, list[_Stored]] = {}
        self._free: dict[tuple[np.dtype[Any], tuple[int, ...]], list[int]] = {}  # unused places in the file
        self._file: IO[bytes] | None = None
        self._lock = Lock()  # workers may be threads
        self.nbytes_in_file = 0

    def __contains__(self, key: object) -> bool:
        with self._lock:
            return key in self._kept or key in self._stored

    def __setitem__(self, key: Hashable, arrays: Sequence[Array]) -> None:
        nbytes = sum(array.nbytes for array in arrays)
        has_objects = any(array.dtype.hasobject for array in arrays)
        with self._lock:
            self._drop(key)
            if self._budget is None or self._nbytes + nbytes <= self._budget or has_objects or not nbytes:
                self._kept[key] = list(arrays)
                self._nbytes += nbytes
            else:
                self._stored[key] = self._write(arrays)

    def __getitem__(self, key: Hashable) -> list[Array]:
        with self._lock:  # also for the read: the place in the file is used again when the key is replaced
            if key in self._kept:
                return self._kept[key]
            arrays, file = list[Array](), self._opened()
            for each in self._stored[key]:
                arrays.append(np.empty(each.shape, each.dtype))
                file.seek(each.start)
                file.readinto(_bytes_of(arrays[-1]))  # type: ignore[attr-defined]  # a buffered file
        return arrays

    def __delitem__(self, key: Hashable) -> None:
        """Free arrays; their bytes in the file are used again by arrays of the same type and shape."""
        with self._lock:
            self._drop(key)

    def mapped(self, key: Hashable) -> list[Array]:
        """Return arrays that are read from the file as needed; they can be used after the store is freed.

        The operating system can drop their pages from memory. They are read-only, and change if the key is deleted.
        """
        with self._lock:
            if key in self._kept:
                return self._kept[key]
            stored = self._stored[key]
            not_empty = [each for each in stored if each.nbytes]  # an empty array can be after the end of the file
            first, end = min(each.start for each in not_empty), max(each.start + each.nbytes for each in not_empty)
            data = np.asarray(np.memmap(self._opened(), np.uint8, "r", first, (end - first,)))
        return [
            _view(data, each._replace(start=each.start - first)) if each.nbytes else np.empty(each.shape, each.dtype)
            for each in stored
        ]

    def _drop(self, key: Hashable) -> None:
        self._nbytes -= sum(array.nbytes for array in self._kept.pop(key, ()))
        for each in self._stored.pop(key, ()):
            self._free.setdefault((each.dtype, each.shape), []).append(each.start)

    def _opened(self) -> IO[bytes]:
        if self._file is None:
            self._file = tempfile.TemporaryFile(prefix="detent-")  # noqa: SIM115 - closed when the store is freed
            weakref.finalize(self, self._file.close)
        return self._file

    def _write(self, arrays: Iterable[Array]) -> list[_Stored]:
        file, stored = self._opened(), list[_Stored]()
        for array in arrays:
            free = self._free.get((array.dtype, array.shape))
            start = free.pop() if free else -(-self.nbytes_in_file // ALIGNMENT) * ALIGNMENT
            file.seek(start)
            file.write(_bytes_of(np.ascontiguousarray(array)))
            stored.append(_Stored(array.dtype, array.shape, start))
            self.nbytes_in_file = max(self.nbytes_in_file, start + array.nbytes)
        file.flush()
        return stored


def concatenate(parts: Iterable[Array], memory_budget: int | None = None) -> Array:
    """Join arrays along the first axis; an array above the budget is in an unnamed temporary file.

    The caller may write to the result. ``parts`` are read one after the other.

    >>> concatenate([np.float32([1]), np.float32([2, 3])], 4)
    array([1., 2., 3.], dtype=float32)
    """
    first, rest = _split(parts, memory_budget)
    if rest is None:
        return np.concatenate(first)
    data, stored = _in_file(chain(first, rest))
    if len({each.dtype for each in stored}) > 1:
        return np.concatenate([_view(data, each) for each in stored])
    result: Array = data.view(stored[0].dtype).reshape(-1, *stored[0].shape[1:])
    return result


def copies(parts: Iterable[Array], memory_budget: int | None = None) -> list[Array]:
    """Copy arrays; if they are above the budget together, the copies are in an unnamed temporary file.

    The caller may write to the copies. ``parts`` are read one after the other.
    """
    first, rest = _split(parts, memory_budget)
    if rest is None:
        return [each.copy() for each in first]
    data, stored = _in_file(chain(first, rest))
    return [_view(data, each) for each in stored]


def _split(parts: Iterable[Array], memory_budget: int | None) -> tuple[list[Array], Iterator[Array] | None]:
    """Read arrays until they are above the budget; return them and the rest, or all arrays and None."""
    rest, first, nbytes = iter(parts), list[Array](), 0
    for part in rest:
        first.append(part)
        nbytes += part.nbytes
        if memory_budget is not None and nbytes > memory_budget and not part.dtype.hasobject:
            return first, rest
    return first, None


def _in_file(parts: Iterable[Array]) -> tuple[NDArray[np.uint8], list[_Stored]]:
    """Write arrays to an unnamed temporary file; return its bytes, which are copied when they are changed."""
    stored, start = list[_Stored](), 0
    with tempfile.TemporaryFile(prefix="detent-") as file:
        for part in parts:
            file.write(_bytes_of(np.ascontiguousarray(part)))
            stored.append(_Stored(part.dtype, part.shape, start))
            start += part.nbytes
        file.flush()
        return np.asarray(np.memmap(file, np.uint8, "c", shape=(start,))), stored


def _bytes_of(array: Array) -> memoryview:
    return array.reshape(-1).view(np.uint8).data


def _view(data: Array, stored: _Stored) -> Array:
    view: Array = data[stored.start : stored.start + stored.nbytes].view(stored.dtype).reshape(stored.shape)
    return view
