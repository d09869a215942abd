"""GGUF files, single or split: metadata and tensors, checked before anything is allocated or mapped.

Layout, in little endian: ``GGUF``, version, number of tensors, number of metadata entries, the entries, the tensor
infos, padding to the alignment, and the data. Every count and length is compared with the number of bytes that remain
in the file. Tensors must start at multiples of the alignment, end inside the file, and not overlap.

A large model may be split into files ``name-00001-of-00003.gguf``. Opening any of them opens all of them.
"""

import hashlib
import re
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from mmap import ACCESS_READ, mmap
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from detent.checkpoint_files.gguf_types import ARRAY_TYPE, VALUE_TYPES, types_by_number
from detent.checkpoint_files.tensor_source import StoredTensor, TensorSource
from detent.codec import MAX_CHARS_SHOWN, reading
from detent.errors import FileFormatError, UnsupportedError
from detent.storage import ELEMENT_LIMIT

__all__ = ["GgufFile", "MetadataEntry", "is_gguf", "open_gguf", "part_count", "read_gguf"]

MAGIC = b"GGUF"
VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32
MAX_ALIGNMENT = 1 << 20
MAX_DIMENSIONS = 4
MAX_KEY_BYTES = 1 << 16
MAX_STRINGS = 1 << 22  # of all metadata together; vocabularies have less than a million tokens and merges
MAX_TENSORS = 1 << 20
MIN_ENTRY_BYTES = 8 + 4 + 1  # an empty key, a type, and a value of one byte
MIN_INFO_BYTES = 8 + 4 + 4 + 8  # an empty name, no dimensions, a type, and an offset
MAX_PARTS = 1 << 12
_PART = re.compile(r"(.+)-([0-9]{5})-of-([0-9]{5})\.gguf", re.DOTALL)
_TYPE_NAMES = {number: name for name, (number, _) in VALUE_TYPES.items()}
MetadataEntry: TypeAlias = tuple[str, str, Any]  # key, type such as "uint32" or "array:string", value


@dataclass(frozen=True)
class GgufFile:
    """One GGUF file: metadata in file order, tensors in file order, and the position of the data."""

    path: Path
    version: int
    alignment: int
    entries: tuple[MetadataEntry, ...]
    tensors: tuple[StoredTensor, ...]
    data_start: int
    header_digest: str

    @property
    def metadata(self) -> dict[str, Any]:
        """The metadata by key."""
        return {key: value for key, _, value in self.entries}


def is_gguf(path: Path) -> bool:
    """Return whether a file starts like a GGUF file."""
    with path.open("rb") as file:
        return file.read(len(MAGIC)) == MAGIC


def open_gguf(path: Path) -> TensorSource:
    """Open a GGUF file, and all other parts if it is split.

    Raises:
        FileFormatError: a damaged file, or a missing part.
        UnsupportedError: a version or byte order that is not supported.
    """
    files = _parts(path)
    tensors: dict[str, StoredTensor] = {}
    for file in files:
        for tensor in file.tensors:
            if tensor.name in tensors:
                raise FileFormatError(
                    f"tensor {tensor.name[:MAX_CHARS_SHOWN]!r} is in {tensors[tensor.name].path.name} and in "
                    f"{file.path.name}, expected it in one part"
                )
            tensors[tensor.name] = tensor
    metadata = {key: value for file in reversed(files) for key, value in file.metadata.items()}
    expected = metadata.get("split.tensors.count")
    if len(files) > 1 and expected != len(tensors):
        raise FileFormatError(f"{path}: the parts have {len(tensors)} tensors, expected {expected}")
    digest = hashlib.sha256("".join(file.header_digest for file in files).encode()).hexdigest()
    return TensorSource(
        tensors,
        path=path,
        files=tuple(file.path for file in files),
        metadata=metadata,
        metadata_types={key: name for file in reversed(files) for key, name, _ in file.entries},
        digest=digest,
    )


def part_count(file: GgufFile) -> int:
    """Return the number of parts of a split file, and 0 or 1 for a single file."""
    count = file.metadata.get("split.count", 0)
    return count if isinstance(count, int) else 0


def _parts(path: Path) -> list[GgufFile]:
    first = read_gguf(path)
    count = part_count(first)
    if count <= 1:
        return [first]
    match = _PART.fullmatch(path.name)
    if match is None or int(match[3]) != count or count > MAX_PARTS:
        raise FileFormatError(
            f"{path} is one of {count} parts, expected a name such as model-00001-of-{count:05}.gguf: restore the "
            "original names"
        )
    files = []
    for number in range(count):
        name = path.with_name(f"{match[1]}-{number + 1:05}-of-{match[3]}.gguf")
        if not name.is_file():
            raise FileFormatError(f"{path} is one of {count} parts, but {name.name} does not exist: download it")
        file = first if name == path else read_gguf(name)
        given = file.metadata.get("split.count"), file.metadata.get("split.no")
        if given != (count, number):
            raise FileFormatError(f"{name} has split.count and split.no {given}, expected {(count, number)}")
        files.append(file)
    return files


def read_gguf(path: Path) -> GgufFile:
    """Read the header of one file; check all positions of tensors."""
    size = path.stat().st_size
    if size < len(MAGIC) + 4 + 8 + 8:
        raise FileFormatError(f"{path} has {size} bytes, expected at least 24: not a GGUF file, or truncated")
    with path.open("rb") as file, mmap(file.fileno(), 0, access=ACCESS_READ) as data:
        try:
            with reading("the header is damaged", keep=(FileFormatError, UnsupportedError)):  # type: ignore[arg-type]
                return _Header(path.absolute(), data, size).read()
        except (FileFormatError, UnsupportedError) as error:
            raise type(error)(f"{path}: {error}") from error


class _Header:
    """Reader of a header: a position in the file, and functions that check what remains before they read."""

    def __init__(self, path: Path, data: mmap, size: int) -> None:
        self._path, self._data, self._size = path, data, size
        self._position, self._strings = 0, 0

    def read(self) -> GgufFile:
        if self._take(4, "the magic number") != MAGIC:
            raise FileFormatError("the file does not start with 'GGUF': not a GGUF file")
        version = self._number("<u4")
        if version not in VERSIONS:
            swapped = int.from_bytes(version.to_bytes(4, "little"), "big")
            what = "a big-endian file" if swapped in VERSIONS else f"version {version}"
            raise UnsupportedError(f"got {what}, expected GGUF version 2 or 3 in little endian: convert the file")
        num_tensors, num_entries = self._number("<u8"), self._number("<u8")
        self._check_count(num_entries, MIN_ENTRY_BYTES, "metadata entries")
        entries = self._entries(num_entries)
        alignment = _alignment(entries)
        self._check_count(num_tensors, MIN_INFO_BYTES, "tensors", limit=MAX_TENSORS)
        infos = [self._info() for _ in range(num_tensors)]
        start = -(-self._position // alignment) * alignment
        digest = hashlib.sha256(self._data[: self._position]).hexdigest()
        tensors = tuple(self._placed(info, start, alignment) for info in infos)
        _check_positions(tensors)
        return GgufFile(self._path, version, alignment, entries, tensors, start, digest)

    def _take(self, count: int, what: str) -> bytes:
        if count > self._size - self._position:
            raise FileFormatError(
                f"{what} needs {count} bytes at byte {self._position}, but the file ends at byte {self._size}: it is "
                "truncated or damaged"
            )
        self._position += count
        return self._data[self._position - count : self._position]

    def _number(self, code: str) -> int:
        return int.from_bytes(self._take(int(code[2]), "a number"), "little", signed=code[1] == "i")

    def _string(self, what: str, limit: int | None = None) -> str:
        length = self._number("<u8")
        if limit is not None and length > limit:
            raise FileFormatError(f"{what} has {length} bytes, expected at most {limit}")
        self._strings += 1
        if self._strings > MAX_STRINGS:
            raise FileFormatError(f"the file has more than {MAX_STRINGS} strings: it is damaged")
        return self._take(length, what).decode("utf-8", errors="surrogateescape")

    def _check_count(self, count: int, least: int, what: str, limit: int | None = None) -> None:
        """Check a count before its items are read: each of them has at least so many bytes."""
        if count * least > self._size - self._position or (limit is not None and count > limit):
            raise FileFormatError(
                f"the file has {count} {what} according to byte {self._position}, but only "
                f"{self._size - self._position} more bytes: it is truncated or damaged"
            )

    def _entries(self, count: int) -> tuple[MetadataEntry, ...]:
        entries: dict[str, MetadataEntry] = {}
        for _ in range(count):
            key = self._string("a metadata key", MAX_KEY_BYTES)
            if key in entries:
                raise FileFormatError(f"metadata key {key[:MAX_CHARS_SHOWN]!r} occurs twice")
            number = self._number("<u4")
            if number == ARRAY_TYPE:
                name, value = self._array(key)
            else:
                name = _type_name(number, key)
                value = self._value(name, key)
            entries[key] = (key, name, value)
        return tuple(entries.values())

    def _value(self, name: str, key: str) -> Any:  # noqa: ANN401 - a number, bool or string
        dtype = VALUE_TYPES[name][1]
        if dtype is None:
            return self._string(f"the value of {key[:MAX_CHARS_SHOWN]!r}")
        value = np.frombuffer(self._take(dtype.itemsize, "a value"), dtype)[0].item()
        return _checked_bool(value, key) if name == "bool" else value

    def _array(self, key: str) -> tuple[str, Any]:
        number, count = self._number("<u4"), self._number("<u8")
        if number == ARRAY_TYPE:
            raise UnsupportedError(f"metadata key {key[:MAX_CHARS_SHOWN]!r} has an array of arrays")
        name = _type_name(number, key)
        dtype = VALUE_TYPES[name][1]
        if dtype is None:
            self._check_count(count, 8, f"strings of {key[:MAX_CHARS_SHOWN]!r}", limit=MAX_STRINGS)
            return "array:string", [self._string("a string") for _ in range(count)]
        self._check_count(count, dtype.itemsize, f"values of {key[:MAX_CHARS_SHOWN]!r}")
        array = np.frombuffer(self._take(count * dtype.itemsize, "an array"), dtype)
        if name == "bool":
            if array.size and array.max() > 1:
                raise FileFormatError(f"metadata key {key[:MAX_CHARS_SHOWN]!r} has a bool that is neither 0 nor 1")
            array = array.astype(bool)
        return f"array:{name}", array

    def _info(self) -> tuple[str, tuple[int, ...], int, int]:
        """Return name, shape in NumPy order, type number and offset of a tensor."""
        name = self._string("a tensor name", MAX_KEY_BYTES)
        rank = self._number("<u4")
        if rank > MAX_DIMENSIONS:
            raise FileFormatError(f"tensor {name[:MAX_CHARS_SHOWN]!r} has {rank} dimensions, expected at most 4")
        shape = tuple(self._number("<u8") for _ in range(rank))[::-1]
        if prod(max(size, 1) for size in shape) >= ELEMENT_LIMIT:
            raise FileFormatError(f"tensor {name[:MAX_CHARS_SHOWN]!r} has shape {shape}, which is too large")
        return name, shape, self._number("<u4"), self._number("<u8")

    def _placed(self, info: tuple[str, tuple[int, ...], int, int], start: int, alignment: int) -> StoredTensor:
        name, shape, number, offset = info
        label = f"tensor {name[:MAX_CHARS_SHOWN]!r}"
        kind = types_by_number().get(number)
        if kind is None:
            raise UnsupportedError(f"{label} has type number {number}, which this version of gguf does not know")
        if kind.block_size > 1 and (not shape or shape[-1] % kind.block_size):
            raise FileFormatError(
                f"{label} of type {kind.name} has shape {shape}, expected a last axis that is a multiple of "
                f"{kind.block_size}"
            )
        nbytes = kind.nbytes(shape)
        if offset % alignment:
            raise FileFormatError(f"{label} starts at offset {offset}, expected a multiple of {alignment}")
        if start + offset + nbytes > self._size:
            raise FileFormatError(
                f"{label} ends at byte {start + offset + nbytes}, but the file ends at byte {self._size}: it is "
                "truncated"
            )
        return StoredTensor(name, shape, kind.dtype, self._path, start + offset, nbytes, file_size=self._size)


def _type_name(number: int, key: str) -> str:
    name = _TYPE_NAMES.get(number)
    if name is None:
        raise FileFormatError(f"metadata key {key[:MAX_CHARS_SHOWN]!r} has a value of unknown type {number}")
    return name


def _checked_bool(value: int, key: str) -> bool:
    if value > 1:
        raise FileFormatError(f"metadata key {key[:MAX_CHARS_SHOWN]!r} has the bool {value}, expected 0 or 1")
    return bool(value)


def _alignment(entries: tuple[MetadataEntry, ...]) -> int:
    value = next((value for key, _, value in entries if key == "general.alignment"), DEFAULT_ALIGNMENT)
    if type(value) is not int or not 0 < value <= MAX_ALIGNMENT or value & (value - 1):
        raise FileFormatError(f"general.alignment is {value!r}, expected a power of two up to {MAX_ALIGNMENT}")
    return value


def _check_positions(tensors: tuple[StoredTensor, ...]) -> None:
    names: set[str] = set()
    for tensor in tensors:
        if tensor.name in names:
            raise FileFormatError(f"tensor {tensor.name[:MAX_CHARS_SHOWN]!r} occurs twice")
        names.add(tensor.name)
    ordered = sorted((tensor for tensor in tensors if tensor.nbytes), key=lambda tensor: tensor.offset)
    for tensor, following in pairwise(ordered):
        if tensor.offset + tensor.nbytes > following.offset:
            raise FileFormatError(
                f"tensors {tensor.name[:MAX_CHARS_SHOWN]!r} and {following.name[:MAX_CHARS_SHOWN]!r} overlap"
            )
