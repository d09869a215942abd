"""Importance: how much each column of a weight matters, and the two forms of files in which llama.cpp stores it.

For each weight, the squares of its inputs are summed over all tokens, column by column; the importance of a column is
the sum divided by the number of tokens. Weights of experts have one sum per expert, over the tokens that the router
sent there; an expert without tokens gets ones.

- GGUF: per weight two tensors, ``<name>.in_sum2`` (matrices, columns) and ``<name>.counts`` (matrices, 1).
- legacy (``.dat``): per weight the name, the number of calls n, and the values importance * n, all experts in a row;
  then the number of chunks and the name of the text.

Sums are float64 here and float32 in files, so importance that is collected in parts is merged before it is written.
"""

import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from os import PathLike, fspath
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from detent.checkpoint_files.gguf_reader import is_gguf, open_gguf
from detent.checkpoint_files.gguf_writer import gguf_layout
from detent.checkpoint_files.tensor_source import TensorSource
from detent.errors import FileFormatError, RangeError, ShapeError, SpecError
from detent.storage import write_atomic

__all__ = ["ColumnSums", "Importance", "fit_importance", "read_importance", "write_importance"]

MAX_ENTRIES, MAX_NAME_BYTES = 1 << 20, 1 << 12
SUMS, COUNTS = ".in_sum2", ".counts"
DATASETS, CHUNKS, CHUNK_SIZE = "imatrix.datasets", "imatrix.chunk_count", "imatrix.chunk_size"
ORIGIN = "detent.collection"  # llama.cpp ignores it


@dataclass(frozen=True)
class ColumnSums:
    """Sums of squared inputs of one weight.

    Attributes:
        sums: float64, (matrices, columns); one matrix, or one per expert.
        counts: float64, (matrices,): the number of tokens.
    """

    sums: NDArray[Any]
    counts: NDArray[Any]

    def __post_init__(self) -> None:
        with np.errstate(all="ignore"):  # a signaling NaN warns; it is rejected below
            sums, counts = np.asarray(self.sums, np.float64), np.asarray(self.counts, np.float64)
        if sums.ndim != 2 or counts.shape != sums.shape[:1] or not sums.size:
            raise ShapeError(
                f"got sums of shape {sums.shape} and counts of shape {counts.shape}, expected (matrices, columns) and "
                "(matrices,)"
            )
        for name, values in (("sums", sums), ("counts", counts)):
            if not (np.isfinite(values) & (values >= 0)).all():
                raise RangeError(f"the {name} of squared inputs must be finite and at least 0")
        object.__setattr__(self, "sums", sums)
        object.__setattr__(self, "counts", counts)
        if not np.isfinite(self.weights()).all():
            raise RangeError("float32 cannot represent the importance, sums divided by counts, as finite numbers")

    def merged(self, other: "ColumnSums") -> "ColumnSums":
        """Return the sums over the tokens of both."""
        if self.sums.shape != other.sums.shape:
            raise ShapeError(f"got sums of shapes {self.sums.shape} and {other.sums.shape}, expected equal shapes")
        return ColumnSums(self.sums + other.sums, self.counts + other.counts)

    def weights(self) -> NDArray[np.float32]:
        """Return the importance of each column, (matrices, columns); ones for a matrix without tokens."""
        with np.errstate(all="ignore"):
            counts = self.counts.astype(np.float32)[:, None]
            return np.where(counts > 0, self.sums.astype(np.float32) / counts, np.float32(1))


@dataclass(frozen=True, eq=False)
class Importance(Mapping[str, NDArray[np.float32]]):
    """Importance of the columns of a model's weights: a mapping of tensor names to weights (matrices, columns).

    Attributes:
        columns: sums by name of the tensor in GGUF files, such as "blk.0.attn_q.weight".
        datasets: names of the texts.
        chunk_count: number of chunks of text.
        chunk_size: tokens per chunk.
        origin: digest of what the importance was measured with, or ""; only GGUF files have it.

    >>> sums = ColumnSums(np.array([[2.0, 8.0]]), np.array([4.0]))
    >>> importance = Importance({"blk.0.attn_q.weight": sums})
    >>> importance.weights("blk.0.attn_q.weight", (16, 2)).tolist()
    [[0.5, 2.0]]
    """

    columns: Mapping[str, ColumnSums]
    datasets: tuple[str, ...] = ()
    chunk_count: int = 0
    chunk_size: int = 0
    origin: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "columns", MappingProxyType(dict(self.columns)))

    def __getitem__(self, name: str) -> NDArray[np.float32]:
        return self.columns[name].weights()

    def __iter__(self) -> Iterator[str]:
        return iter(self.columns)

    def __len__(self) -> int:
        return len(self.columns)

    __eq__, __hash__ = object.__eq__, object.__hash__  # arrays have no truth value

    def weights(self, name: str, shape: tuple[int, ...]) -> NDArray[np.float32] | None:
        """Return the importance for a tensor, (matrices, columns), or None if the file lacks it.

        Raises:
            ShapeError: the importance belongs to a tensor of another shape.
        """
        return fit_importance(name, self[name], shape) if name in self else None

    def merged(self, other: "Importance") -> "Importance":
        """Return the importance over the texts of both, as if they had been collected at once."""
        columns = dict(self.columns)
        for name, sums in other.columns.items():
            columns[name] = columns[name].merged(sums) if name in columns else sums
        if self.chunk_size and other.chunk_size and self.chunk_size != other.chunk_size:
            raise SpecError(f"got chunks of {self.chunk_size} and {other.chunk_size} tokens, expected equal sizes")
        datasets = (*self.datasets, *(each for each in other.datasets if each not in self.datasets))
        size = self.chunk_size or other.chunk_size
        return Importance(columns, datasets, self.chunk_count + other.chunk_count, size)

    def save(self, path: str | PathLike[str]) -> None:
        """Write the file; see ``write_importance``."""
        write_importance(self, path)


def fit_importance(name: str, weights: NDArray[np.float32], shape: tuple[int, ...]) -> NDArray[np.float32]:
    """Return importance for a tensor as (matrices, columns); one row of weights is that of all matrices.

    Raises:
        ShapeError: the importance belongs to a tensor of another shape.
    """
    columns, matrices = shape[-1], prod(shape[:-2])
    if weights.size == matrices * columns:  # legacy files do not have the number of experts
        return weights.reshape(matrices, columns)
    if weights.shape not in {(columns,), (1, columns)}:
        raise ShapeError(
            f"the importance of {name} has shape {weights.shape}, expected ({columns},) or ({matrices}, {columns}): it "
            "was collected with another model"
        )
    return np.broadcast_to(weights, (matrices, columns))


def read_importance(path: str | PathLike[str]) -> Importance:
    """Read an importance file in GGUF or legacy form.

    Raises:
        FileFormatError: the file is damaged, or not an importance file.
        UnsupportedError: a GGUF version that is not supported.
    """
    file = Path(path)
    if not file.is_file():
        raise FileFormatError(f"{file}: there is no such file")
    try:
        if is_gguf(file):
            return _from_gguf(open_gguf(file), fspath(file))
        return _from_legacy(file.read_bytes(), fspath(file))
    except (ShapeError, RangeError) as error:
        raise FileFormatError(f"{file}: {error}") from error


def write_importance(importance: Importance, path: str | PathLike[str]) -> None:
    """Write an importance file, atomically: legacy form for names that end in ".dat", otherwise GGUF."""
    write_atomic(path, _legacy_bytes(importance) if Path(path).suffix == ".dat" else _gguf_bytes(importance))


def _from_gguf(source: TensorSource, path: str) -> Importance:
    if source.metadata.get("general.type") != "imatrix":
        raise FileFormatError(f"{path} is not an importance file: general.type is not 'imatrix'")
    columns = {}
    for name in source:
        if not name.endswith(SUMS):
            continue
        weight = name.removesuffix(SUMS)
        counts = source.get(weight + COUNTS)
        if counts is None:
            raise FileFormatError(f"{path} has {name[:100]!r}, but not {weight[:100] + COUNTS!r}")
        if source[name].dtype != "float32" or counts.dtype != "float32":
            raise FileFormatError(f"{path}: {name[:100]!r} and its counts must be float32")
        sums = source[name].read()
        number = counts.read().reshape(-1)
        columns[weight] = ColumnSums(sums.reshape(len(number), -1), number)
    datasets = source.metadata.get(DATASETS, ())
    if isinstance(datasets, str) or not all(isinstance(each, str) for each in datasets):
        raise FileFormatError(f"{path}: {DATASETS} must be a list of strings")
    chunks, size = _count(source, CHUNKS, path), _count(source, CHUNK_SIZE, path)
    origin = source.metadata.get(ORIGIN, "")
    return Importance(columns, tuple(datasets), chunks, size, origin if isinstance(origin, str) else "")


def _count(source: TensorSource, key: str, path: str) -> int:
    value = source.metadata.get(key, 0)
    if not isinstance(value, int) or value < 0:
        raise FileFormatError(f"{path}: {key} is {value!r}, expected a count")
    return value


def _gguf_bytes(importance: Importance) -> bytes:
    entries: list[tuple[str, str, Any]] = [
        ("general.type", "string", "imatrix"),
        (DATASETS, "array:string", importance.datasets),
        (CHUNKS, "uint32", importance.chunk_count),
        (CHUNK_SIZE, "uint32", importance.chunk_size),
    ]
    if importance.origin:
        entries.append((ORIGIN, "string", importance.origin))
    arrays: dict[str, NDArray[np.float32]] = {}
    for name, column in sorted(importance.columns.items()):
        arrays[name + SUMS] = column.sums.astype("<f4")
        arrays[name + COUNTS] = column.counts.astype("<f4")[:, None]
    layout = gguf_layout(entries, [(name, array.shape, "F32") for name, array in arrays.items()])
    out = bytearray(layout.nbytes)
    out[: len(layout.header)] = layout.header
    for tensor in layout.tensors:
        out[tensor.offset : tensor.offset + tensor.nbytes] = arrays[tensor.name].tobytes()
    return bytes(out)


def _from_legacy(data: bytes, path: str) -> Importance:
    reader = _LegacyReader(data, path)
    count = reader.integer("number of entries", MAX_ENTRIES)
    if not count:
        raise FileFormatError(f"{path} is not an importance file: it has no entries")
    columns = {}
    calls = 0
    for _ in range(count):
        name = reader.text(reader.integer("length of a name", MAX_NAME_BYTES))
        calls = reader.integer("number of calls", (1 << 31) - 1)
        values = reader.floats(reader.integer("number of values", (1 << 31) - 1))
        if not values.size:
            raise FileFormatError(f"{path}: {name[:100]!r} has no values")
        columns[name] = ColumnSums(values[None], np.array([calls]))
    if reader.at == len(data):
        return Importance(columns)
    chunks = reader.integer("number of chunks", (1 << 31) - 1)
    datasets = (reader.text(reader.integer("length of the text's name", MAX_NAME_BYTES)),)
    if reader.left:
        raise FileFormatError(f"{path} has {reader.left} unexpected bytes at its end")
    return Importance(columns, datasets, chunks)


class _LegacyReader:
    """Reads the fields of a legacy file; sizes are checked before anything is read."""

    def __init__(self, data: bytes, path: str) -> None:
        self.data, self.path, self.at = data, path, 0

    @property
    def left(self) -> int:
        return len(self.data) - self.at

    def _take(self, count: int, what: str) -> bytes:
        if count > self.left:
            raise FileFormatError(
                f"{self.path} is not an importance file, or truncated: {what} at byte {self.at} needs {count} bytes, "
                f"but {self.left} are left"
            )
        self.at += count
        return self.data[self.at - count : self.at]

    def integer(self, what: str, limit: int) -> int:
        value = int(struct.unpack("<i", self._take(4, what))[0])
        if not 0 <= value <= limit:
            raise FileFormatError(
                f"{self.path} is not an importance file: the {what} is {value}, expected 0 to {limit}"
            )
        return value

    def text(self, size: int) -> str:
        try:
            return self._take(size, "a name").decode("utf-8")
        except UnicodeDecodeError as error:
            raise FileFormatError(f"{self.path} is not an importance file: a name is not UTF-8") from error

    def floats(self, count: int) -> NDArray[np.float32]:
        return np.frombuffer(self._take(4 * count, "values"), "<f4")


def _legacy_bytes(importance: Importance) -> bytes:
    """Return the legacy form: values are importance times the number of calls, which is the number of chunks."""
    calls = max(importance.chunk_count, 1)
    parts = [struct.pack("<i", len(importance.columns))]
    for name, column in sorted(importance.columns.items()):
        encoded = name.encode()
        values = (column.weights().astype(np.float64) * calls).astype("<f4").reshape(-1)
        parts += [struct.pack("<i", len(encoded)), encoded, struct.pack("<ii", calls, values.size), values.tobytes()]
    text = (importance.datasets[0] if importance.datasets else "").encode()
    parts += [struct.pack("<ii", importance.chunk_count, len(text)), text]
    return b"".join(parts)
