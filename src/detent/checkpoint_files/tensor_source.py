"""TensorSource: the tensors of a checkpoint by name, read only when they are asked for.

Every reader of a file format returns a ``TensorSource``. Its values follow ``SourceTensor``: a shape, a type, and two
functions for rows. ``read`` returns them as stored, ``dequantize`` as float32. ``StoredTensor`` is a tensor in a file,
``ArrayTensor`` one in memory, for example the weight of a trained module.

A stored tensor is a path, an offset and a shape, so it can be pickled: a worker process maps the file itself. It holds
no open file. A file that was truncated after it was opened is detected before its memory is touched.
"""

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from math import prod
from mmap import ACCESS_READ, mmap
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol, runtime_checkable

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from detent.block_format import BlockFormat
from detent.checks import FLOATS, first_nonfinite
from detent.errors import FileFormatError, ShapeError, UnsupportedError
from detent.gguf import find_block_format
from detent.kernels import decode_blocks

__all__ = ["ELEMENT_TYPES", "ArrayTensor", "SourceTensor", "StoredTensor", "TensorSource", "as_elements", "float_rows"]

Array = NDArray[Any]
Floats = NDArray[np.float32]

# The types of tensors that are arrays of plain elements; all are stored in little endian.
ELEMENT_TYPES: Mapping[str, np.dtype[Any]] = MappingProxyType(
    {
        "float64": np.dtype("<f8"),
        "float32": np.dtype("<f4"),
        "float16": np.dtype("<f2"),
        "bfloat16": FLOATS["bfloat16"],
        "float8_e4m3fn": np.dtype(ml_dtypes.float8_e4m3fn),
        "float8_e5m2": np.dtype(ml_dtypes.float8_e5m2),
        "int64": np.dtype("<i8"),
        "int32": np.dtype("<i4"),
        "int16": np.dtype("<i2"),
        "int8": np.dtype("i1"),
        "uint64": np.dtype("<u8"),
        "uint32": np.dtype("<u4"),
        "uint16": np.dtype("<u2"),
        "uint8": np.dtype("u1"),
        "bool": np.dtype("?"),
    }
)


@runtime_checkable
class SourceTensor(Protocol):
    """One tensor of a checkpoint."""

    @property
    def name(self) -> str:
        """The name of the tensor in its checkpoint."""
        ...

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape, in the order of NumPy and PyTorch."""
        ...

    @property
    def dtype(self) -> str:
        """An element type such as "float32" or "bfloat16", or the name of a block format, such as "q4_k"."""
        ...

    @property
    def nbytes(self) -> int:
        """The number of stored bytes."""
        ...

    def read(self, start: int = 0, stop: int | None = None) -> Array:
        """Return rows of the first axis as stored; data of a block format are bytes, (..., bytes per row)."""
        ...

    def dequantize(self, start: int = 0, stop: int | None = None) -> Floats:
        """Return rows of the first axis as float32."""
        ...


class TensorSource(Mapping[str, SourceTensor]):
    """Tensors of a checkpoint by name; nothing is read before it is asked for.

    Args:
        tensors: the tensors, in the order of the checkpoint.
        path: directory or file that was opened.
        files: all files that contain tensors.
        metadata: metadata of the files.
        metadata_types: types of the metadata of a GGUF file, such as "uint32" or "array:string".
        config: content of ``config.json``, or None.
        digest: SHA-256 of the names, types, shapes, positions and metadata; tensor data are not part of it.

    >>> import numpy as np
    >>> source = TensorSource([ArrayTensor("w", np.ones((2, 3), np.float32))])
    >>> source["w"].shape, source["w"].read(1).tolist()
    ((2, 3), [[1.0, 1.0, 1.0]])
    """

    def __init__(
        self,
        tensors: "Mapping[str, SourceTensor] | list[SourceTensor] | tuple[SourceTensor, ...]",
        *,
        path: Path | None = None,
        files: tuple[Path, ...] = (),
        metadata: Mapping[str, Any] | None = None,
        metadata_types: Mapping[str, str] | None = None,
        config: Mapping[str, Any] | None = None,
        digest: str = "",
    ) -> None:
        values = tensors.values() if isinstance(tensors, Mapping) else tensors
        self._tensors = {tensor.name: tensor for tensor in values}
        self.path, self.files = path, files
        self.metadata: dict[str, Any] = dict(metadata or {})
        self.metadata_types: dict[str, str] = dict(metadata_types or {})
        self.config: dict[str, Any] | None = None if config is None else dict(config)
        self.digest = digest

    def __getitem__(self, name: str) -> SourceTensor:
        return self._tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    @property
    def nbytes(self) -> int:
        """The number of stored bytes of all tensors."""
        return sum(tensor.nbytes for tensor in self._tensors.values())

    def __repr__(self) -> str:
        where = "" if self.path is None else f"{os.fspath(self.path)!r}, "
        return f"TensorSource({where}{len(self)} tensors, {self.nbytes:,} bytes)"


@dataclass(frozen=True)
class ArrayTensor:
    """A tensor in memory.

    >>> import numpy as np
    >>> ArrayTensor("bias", np.zeros(4, np.float16)).dtype
    'float16'
    """

    name: str
    array: Array = field(compare=False, repr=False)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the array."""
        return self.array.shape

    @property
    def dtype(self) -> str:
        """The name of the array's dtype."""
        return self.array.dtype.name

    @property
    def nbytes(self) -> int:
        """The number of bytes of the array."""
        return self.array.nbytes

    def read(self, start: int = 0, stop: int | None = None) -> Array:
        """Return rows of the first axis."""
        return self.array[slice(*checked_rows(self.name, self.shape, start, stop))] if self.shape else self.array

    def dequantize(self, start: int = 0, stop: int | None = None) -> Floats:
        """Return rows of the first axis as float32."""
        return float_rows(self.name, self.read(start, stop))


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a file: nothing is read before ``read`` or ``dequantize`` is called.

    Attributes:
        name: name of the tensor in its checkpoint.
        shape: shape in the order of NumPy and PyTorch.
        dtype: name of an element type or of a block format.
        path: file that contains the tensor.
        offset: position of the first byte in the file.
        nbytes: number of bytes in the file.
        scale: tensor with the scales of a float8 tensor, or None.
        file_size: size that the file had when it was opened, or None; workers may see another file under its path.
        scale_block: rows and columns that share a scale; () if one scale applies to the tensor.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    path: Path
    offset: int
    nbytes: int
    scale: "StoredTensor | None" = None
    scale_block: tuple[int, ...] = ()
    file_size: int | None = None

    @property
    def block_format(self) -> BlockFormat | None:
        """The block format of the data, or None."""
        return find_block_format(self.dtype)

    def read(self, start: int = 0, stop: int | None = None) -> Array:
        """Return rows of the first axis as stored: a read-only view of the file; block formats are bytes.

        Raises:
            FileFormatError: the file was changed after it was opened.
        """
        start, stop = checked_rows(self.name, self.shape, start, stop)
        rows = self.shape[0] if self.shape else 1
        row_bytes = self.nbytes // max(rows, 1)
        data = _file_bytes(self.path, self.offset + start * row_bytes, (stop - start) * row_bytes, self.file_size)
        element = ELEMENT_TYPES.get(self.dtype)
        if element is not None:
            return data.view(element).reshape((stop - start, *self.shape[1:]) if self.shape else ())
        leading = (stop - start, *self.shape[1:-1]) if self.shape[1:] else ()
        return data.reshape(*leading, -1) if data.size else data.reshape(*leading, 0)

    def dequantize(self, start: int = 0, stop: int | None = None) -> Floats:
        """Return rows of the first axis as float32.

        Raises:
            FileFormatError: the file was changed after it was opened.
            UnsupportedError: the type cannot be dequantized.
        """
        form = self.block_format
        if form is not None:
            return _decoded(self, form, start, stop)
        if self.dtype not in ELEMENT_TYPES:
            raise UnsupportedError(
                f"tensor {self.name!r} has type {self.dtype}, which detent cannot dequantize: use a checkpoint in "
                "float32, bfloat16, float16, float8, or one of the block formats of dt.gguf"
            )
        values = float_rows(self.name, self.read(start, stop))
        return values if self.scale is None else _scaled(self, values, start)


def checked_rows(name: str, shape: tuple[int, ...], start: int, stop: int | None) -> tuple[int, int]:
    """Check a range of rows; ``stop`` None is the end. A tensor without axes counts as one row."""
    rows = shape[0] if shape else 1
    stop = rows if stop is None else stop
    if not 0 <= start <= stop <= rows:
        raise ShapeError(f"got rows {start} to {stop} of tensor {name!r}, expected a range within its {rows} rows")
    return start, stop


def as_elements(rows: Floats, dtype: str) -> tuple[Array, tuple[int, ...] | None]:
    """Return rows as elements of a type, and the index of the first that is not finite, or None."""
    with np.errstate(all="ignore"):
        values = np.ascontiguousarray(rows, ELEMENT_TYPES[dtype])
    return values, None if np.isfinite(values).all() else first_nonfinite(values)


def float_rows(name: str, rows: Array) -> Floats:
    """Convert stored elements to float32; float64 and integers must be exact or are rounded to nearest."""
    if rows.dtype.kind in "?b" or rows.dtype.name == "bool":
        raise UnsupportedError(f"tensor {name!r} has type bool, expected numbers")
    if rows.dtype == np.float32:
        return rows
    with np.errstate(all="ignore"):  # some dtypes of ml_dtypes warn about signaling NaN
        return rows.astype(np.float32)


def _decoded(tensor: StoredTensor, form: BlockFormat, start: int, stop: int | None) -> Floats:
    blocks = tensor.read(start, stop).reshape(-1, form.block_bytes)
    values = np.empty((len(blocks), form.block_size), np.float32)
    decode_blocks(form, blocks, values)
    start, stop = checked_rows(tensor.name, tensor.shape, start, stop)
    return values.reshape(stop - start, *tensor.shape[1:]) if tensor.shape[1:] else values.reshape(-1)


def _scaled(tensor: StoredTensor, values: Floats, start: int) -> Floats:
    """Multiply rows of a float8 tensor by its scales: one per tensor, per row, or per block of rows and columns."""
    if tensor.scale is None:
        return values
    scale = tensor.scale.dequantize()
    if not tensor.scale_block:
        return values * scale.reshape(())
    index = [np.arange(start, start + len(values)) // tensor.scale_block[0]]
    index += [np.arange(full) // size for full, size in zip(tensor.shape[1:], tensor.scale_block[1:], strict=True)]
    return values * scale[np.ix_(*index)]


def _file_bytes(path: Path, offset: int, count: int, size: int | None) -> NDArray[np.uint8]:
    """Return a read-only view of bytes of a file; check first that the file still has them."""
    if not count:
        return np.empty(0, np.uint8)
    status = path.stat()
    if offset + count > status.st_size:
        raise FileFormatError(
            f"{path} has {status.st_size} bytes, but a tensor needs bytes up to {offset + count}: the file was "
            "truncated after it was opened"
        )
    if size is not None and status.st_size != size:
        raise FileFormatError(f"{path} has {status.st_size} bytes, expected {size}: the file was changed or replaced")
    mapped = _mapped(path, status.st_ino, status.st_size, status.st_mtime_ns)
    return np.frombuffer(mapped, np.uint8, count, offset)


@lru_cache(maxsize=64)
def _mapped(path: Path, _inode: int, _size: int, _mtime: int) -> mmap:
    """Map a file read-only; a changed file is mapped again. The cache bounds the number of mapped files."""
    with path.open("rb") as file:
        return mmap(file.fileno(), 0, access=ACCESS_READ)


def element_bytes(dtype: str, shape: tuple[int, ...]) -> int:
    """Return the number of bytes of an array with elements of a type in ``ELEMENT_TYPES``."""
    return prod(shape) * ELEMENT_TYPES[dtype].itemsize
