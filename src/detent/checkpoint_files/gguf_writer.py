"""GGUF layout: the bytes of the header, and the position of every tensor, before any data exist.

Types and shapes determine the whole file except the data. So the size is known in advance, and tensors can be written
at their positions in any order, by any number of processes. Equal input gives equal bytes: gaps are zeros.
"""

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from detent.checkpoint_files.gguf_reader import (
    DEFAULT_ALIGNMENT,
    MAGIC,
    MAX_DIMENSIONS,
    MAX_KEY_BYTES,
    MAX_TENSORS,
    MetadataEntry,
)
from detent.checkpoint_files.gguf_types import ARRAY_TYPE, VALUE_TYPES, TensorType, tensor_types
from detent.errors import DtypeError, ShapeError, SpecError, closest

__all__ = ["GgufLayout", "PlacedTensor", "entry_bytes", "gguf_layout", "tensor_type"]

VERSION = 3
ARRAY = "array:"


@dataclass(frozen=True)
class PlacedTensor:
    """A tensor of a file that is to be written: its type, and its position in the file in bytes."""

    name: str
    shape: tuple[int, ...]
    type: TensorType
    offset: int
    nbytes: int

    @property
    def rows(self) -> int:
        """The number of rows: runs of the last axis."""
        return prod(self.shape[:-1])

    @property
    def row_bytes(self) -> int:
        """The number of bytes of a row."""
        return self.type.nbytes(self.shape[-1:]) if self.shape else self.nbytes


@dataclass(frozen=True)
class GgufLayout:
    """Layout of a GGUF file: its first bytes, the positions of its tensors, and its size."""

    header: bytes
    tensors: tuple[PlacedTensor, ...]
    nbytes: int

    @property
    def digest(self) -> str:
        """The SHA-256 of the header, which determines the layout."""
        return hashlib.sha256(self.header).hexdigest()


def tensor_type(name: str) -> TensorType:
    """Return the tensor type of this name.

    >>> tensor_type("Q4_K").bits_per_weight
    4.5
    """
    kind = tensor_types().get(name)
    if kind is None:
        raise SpecError(f"unknown tensor type {name!r}{closest(name, tensor_types())} expected F32, BF16, Q4_K, ...")
    return kind


def gguf_layout(
    entries: Iterable[MetadataEntry],
    tensors: Iterable[tuple[str, tuple[int, ...], str]],
    *,
    alignment: int = DEFAULT_ALIGNMENT,
) -> GgufLayout:
    """Compute the layout of a file.

    Args:
        entries: metadata, (key, type, value); a type is "uint32", "string", "array:float32", ...
        tensors: (name, shape in NumPy order, type such as "Q4_K"), in the order of the file.
        alignment: alignment of tensors in bytes; the metadata must contain it if it is not 32.

    Raises:
        SpecError: a duplicate key or name, or an unknown type.
        ShapeError: a shape that the type or the format cannot store.
        DtypeError: a value that its type cannot represent.

    >>> layout = gguf_layout([("general.architecture", "string", "llama")], [("w", (2, 32), "Q8_0")])
    >>> layout.nbytes, layout.tensors[0].offset, layout.tensors[0].nbytes
    (224, 128, 68)
    """
    entries, infos = list(entries), list(tensors)
    _check_unique("metadata key", [key for key, _, _ in entries])
    _check_unique("tensor", [name for name, _, _ in infos])
    if len(infos) > MAX_TENSORS:
        raise SpecError(f"got {len(infos)} tensors, expected at most {MAX_TENSORS}")
    parts = [MAGIC, _number(VERSION, 4), _number(len(infos), 8), _number(len(entries), 8)]
    parts += [entry_bytes(entry) for entry in entries]
    position, placed = 0, []
    for name, shape, type_name in infos:
        kind = tensor_type(type_name)
        _check_shape(name, shape, kind)
        nbytes = kind.nbytes(shape)
        placed.append((name, shape, kind, position, nbytes))
        parts += [_string(name), _number(len(shape), 4), *(_number(size, 8) for size in reversed(shape))]
        parts += [_number(kind.number, 4), _number(position, 8)]
        position += -(-nbytes // alignment) * alignment
    header = b"".join(parts)
    header += bytes(-len(header) % alignment)
    places = tuple(
        PlacedTensor(name, shape, kind, len(header) + offset, nbytes) for name, shape, kind, offset, nbytes in placed
    )
    return GgufLayout(header, places, len(header) + position)


def _check_unique(what: str, names: Sequence[str]) -> None:
    for first, second in pairwise(sorted(names)):
        if first == second:
            raise SpecError(f"{what} {first!r} occurs twice")
    for name in names:
        if not name or len(name.encode("utf-8", errors="surrogateescape")) >= MAX_KEY_BYTES:
            raise SpecError(f"{what} {name[:20]!r} has a name of {len(name)} characters, expected 1 to 65,535 bytes")


def _check_shape(name: str, shape: tuple[int, ...], kind: TensorType) -> None:
    if not 0 < len(shape) <= MAX_DIMENSIONS or not all(shape):
        raise ShapeError(f"tensor {name!r} has shape {shape}, expected one to four axes that are not empty")
    if shape[-1] % kind.block_size:
        raise ShapeError(
            f"tensor {name!r} of type {kind.name} has shape {shape}, expected a last axis that is a multiple of "
            f"{kind.block_size}"
        )


def _number(value: int, nbytes: int) -> bytes:
    return value.to_bytes(nbytes, "little")


def _string(text: str) -> bytes:
    data = text.encode("utf-8", errors="surrogateescape")
    return _number(len(data), 8) + data


def entry_bytes(entry: MetadataEntry) -> bytes:
    """Return the bytes of a metadata entry."""
    key, name, value = entry
    is_array = name.startswith(ARRAY)
    kind = VALUE_TYPES.get(name.removeprefix(ARRAY))
    if kind is None:
        raise SpecError(
            f"metadata key {key!r} has type {name!r}, expected one of {', '.join(VALUE_TYPES)}, or array:NAME"
        )
    number, dtype = kind
    values = list(value) if is_array and dtype is None else value
    if dtype is None:
        texts = values if is_array else [values]
        if not all(isinstance(text, str) for text in texts):
            raise DtypeError(f"metadata key {key!r} has type {name}, but a value is not a string")
        data = b"".join(map(_string, texts))
        count = len(texts)
    else:
        array = _numbers(key, name, value, dtype, is_array=is_array)
        data, count = array.tobytes(), array.size
    if not is_array:
        return _string(key) + _number(number, 4) + data
    return _string(key) + _number(ARRAY_TYPE, 4) + _number(number, 4) + _number(count, 8) + data


def _numbers(key: str, name: str, value: object, dtype: np.dtype[Any], *, is_array: bool) -> NDArray[Any]:
    """Convert metadata values to their type; integers must be exact, floats are rounded."""
    given = np.asarray(value)
    is_empty = is_array and not given.size
    has_type = given.ndim == is_array and given.dtype.kind in ("b" if name.endswith("bool") else "iuf")
    if not has_type and not is_empty:
        raise DtypeError(f"metadata key {key!r} has type {name}, got {value!r:.80}")
    with np.errstate(all="ignore"):
        array = given.astype(dtype)
    if dtype.kind in "iu" and not np.array_equal(array.astype(object), given.astype(object)):
        raise DtypeError(f"metadata key {key!r} has type {name}, which cannot represent {value!r:.80}")
    return array
