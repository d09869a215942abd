"""NumPy files as data: an .npz or .npy file, or a directory of such files.

=================== ===========================================================================================
data                batches
=================== ===========================================================================================
an .npz, an .npy    one array per input, with samples along the first axis; each array is cut into batches
a directory of .npz one file per batch, in the order of the file names
a directory of .npy one file per batch, for a model with one input
=================== ===========================================================================================

If arrays have the default names of ``numpy.savez`` (arr_0, arr_1, ...), arr_0 is the model's first input, and so on.

Files are untrusted: the sizes in headers are compared with the size of the file before memory is allocated, and nothing
is unpickled or evaluated. Arrays are read slice by slice along their first axis. A subset of the batches reads only
the slices of these batches.
"""

import re
import zlib
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from math import prod
from os import PathLike, fspath
from pathlib import Path
from typing import IO, Any
from zipfile import ZIP_DEFLATED, ZIP_STORED, BadZipFile, ZipFile, ZipInfo

import numpy as np

from detent.errors import FileFormatError, ShapeError, SpecError
from detent.onnx_model.data_files import DataFiles, DataListing, FileBatches, batch_size_of
from detent.onnx_model.model_inputs import Array, Feed, InputInfo, check_input_names

__all__ = ["SUFFIXES", "ArrayFile", "open_arrays"]

SUFFIXES = frozenset({".npz", ".npy"})
MAGIC = b"\x93NUMPY"
LENGTH_BYTES = {1: 2, 2: 4, 3: 4}  # maps the major version of the .npy format to the bytes of the length field
HEADER_LIMIT = 10_000  # bytes; numpy.load has the same limit
RANK_LIMIT = 32
MAX_CHARS_SHOWN = 200  # longer names are cut in messages
RATIO_LIMIT = 1000  # a larger compression ratio is taken for a zip bomb
ALWAYS_UNPACKED = 1 << 20  # bytes; members up to this size are unpacked at any ratio
ENCRYPTED = 1  # flag bit of a zip member
_DTYPE = re.compile(r"""['"]descr['"]\s*:\s*['"]([<>|=])([biuf])([1248])['"]""")
_ORDER = re.compile(r"""['"]fortran_order['"]\s*:\s*(True|False)""")
_SHAPE = re.compile(r"""['"]shape['"]\s*:\s*\(([\d\s,]{0,999})\)""")
_DAMAGE = (BadZipFile, zlib.error, EOFError, OSError, NotImplementedError, RuntimeError, ValueError, OverflowError)


@dataclass(frozen=True)
class _ArrayHeader:
    dtype: np.dtype[Any]  # in the file's byte order
    shape: tuple[int, ...]
    is_fortran: bool  # the first axis varies fastest


class ArrayFile:
    """An .npy or .npz file; ``headers`` maps the name of each array to its checked header.

    The array of an .npy file has the name "".
    """

    def __init__(self, path: str | PathLike[str]) -> None:
        self.path = Path(path)
        if not self.path.is_file():
            raise FileFormatError(f"{fspath(self.path)}: there is no such file")
        with self._open() as parts:
            self.headers = {name: header for name, (header, _) in parts.items()}

    @contextmanager
    def _open(self) -> Iterator[dict[str, tuple[_ArrayHeader, IO[bytes]]]]:
        """Open the file; yield a dict from array names to pairs of a header and a stream at the first element."""
        with ExitStack() as stack:
            try:
                yield {name: (_read_header(name, size, file), file) for name, size, file in self._streams(stack)}
            except FileFormatError as error:
                raise FileFormatError(f"{fspath(self.path)}: {error}") from error
            except _DAMAGE as error:
                raise FileFormatError(f"{fspath(self.path)} is damaged, or not a NumPy file: {error}") from error

    def _streams(self, stack: ExitStack) -> Iterator[tuple[str, int, IO[bytes]]]:
        size = self.path.stat().st_size
        if self.path.suffix == ".npy":
            yield "", size, stack.enter_context(self.path.open("rb"))
            return
        archive = stack.enter_context(ZipFile(self.path))
        members = archive.infolist()
        _check_members(members, size)
        for member in members:
            yield member.filename.removesuffix(".npy"), member.file_size, stack.enter_context(archive.open(member))

    def read(self) -> dict[str, Array]:
        """Read all arrays; return a dict from names to arrays."""
        with self._open() as parts:
            return {name: _read(file, header, header.shape) for name, (header, file) in parts.items()}

    def slices(self, step: int, numbers: Sequence[int] | None = None) -> Iterator[dict[str, Array]]:
        """Cut all arrays along their first axis into slices of length ``step``; yield dicts from names to slices.

        The last slice may be shorter. ``numbers`` are the indices of the slices to read, in ascending order; None reads
        all slices.
        """
        with self._open() as parts:
            if {name: header for name, (header, _) in parts.items()} != self.headers:
                raise FileFormatError(
                    "the file was changed after it was opened: read it again, and do not change it until it is read"
                )
            fortran = {name: _read(file, head, head.shape) for name, (head, file) in parts.items() if head.is_fortran}
            starts = {name: file.tell() for name, (_, file) in parts.items()}
            length = min(header.shape[0] for header in self.headers.values())
            for number in range(-(-length // step)) if numbers is None else numbers:
                begin, end = number * step, min((number + 1) * step, length)
                arrays = {}
                for name, (header, file) in parts.items():
                    if header.is_fortran:
                        arrays[name] = fortran[name][begin:end]
                    else:
                        row_bytes = prod(header.shape[1:]) * header.dtype.itemsize
                        file.seek(starts[name] + begin * row_bytes)
                        arrays[name] = _read(file, header, (end - begin, *header.shape[1:]))
                yield arrays


def _check_members(members: list[ZipInfo], size: int) -> None:
    names = [member.filename for member in members]
    if len({*names}) != len(names):
        raise FileFormatError("two arrays in the file have the same name: write the file again with numpy.savez")
    if sum(member.compress_size for member in members) > size:
        raise FileFormatError(
            f"the file has {size} bytes, fewer than its zip directory claims: write the file again with numpy.savez"
        )
    for member in members:
        name = repr(member.filename[:MAX_CHARS_SHOWN])
        if not member.filename.endswith(".npy"):
            raise FileFormatError(f"zip member {name} is not an .npy array: write the file again with numpy.savez")
        if member.flag_bits & ENCRYPTED or member.compress_type not in {ZIP_STORED, ZIP_DEFLATED}:
            raise FileFormatError(
                f"zip member {name} is encrypted, or NumPy cannot unpack it: write the file again with numpy.savez"
            )
        if member.file_size > max(ALWAYS_UNPACKED, RATIO_LIMIT * member.compress_size):
            raise FileFormatError(
                f"zip member {name} grows from {member.compress_size} to {member.file_size} bytes when unpacked, more "
                f"than {RATIO_LIMIT} times: write the file again without compression, with numpy.savez"
            )


def _read_header(name: str, size: int, file: IO[bytes]) -> _ArrayHeader:
    """Read the header of an array, and check that the array has exactly the bytes that type and shape need."""
    what = f"array {name[:MAX_CHARS_SHOWN]!r}" if name else "the array"
    start = file.read(len(MAGIC) + 2)
    width = LENGTH_BYTES.get(start[-2]) if len(start) == len(MAGIC) + 2 else None  # major version
    if not start.startswith(MAGIC) or width is None:
        raise FileFormatError(
            f"{what} does not begin like an .npy file: save the array again with numpy.save or numpy.savez"
        )
    length = int.from_bytes(file.read(width), "little")
    if length > HEADER_LIMIT:
        raise FileFormatError(
            f"{what} has a header of {length} bytes, expected at most {HEADER_LIMIT}: save the array again with "
            "numpy.save"
        )
    text = file.read(length).decode("latin-1")
    dtype, order, shape = (pattern.search(text) for pattern in (_DTYPE, _ORDER, _SHAPE))
    if dtype is None or order is None or shape is None or len(text) != length:
        raise FileFormatError(
            f"{what} has the header {text[:MAX_CHARS_SHOWN].strip()!r}, expected the header of an array of numbers: "
            "convert the array, for example with x.astype('float32'), and save it again"
        )
    try:
        kind = np.dtype("?" if dtype[2] == "b" else "".join(dtype.groups()))
    except TypeError as error:
        raise FileFormatError(
            f"{what} has the unknown type {''.join(dtype.groups())!r}, expected a type such as '<f4': save the array "
            "again with numpy.save"
        ) from error
    sizes = tuple(int(part) for part in shape[1].split(",") if part.strip())
    nbytes, stored = prod(sizes) * kind.itemsize, size - len(start) - width - length
    if len(sizes) > RANK_LIMIT or nbytes != stored:
        raise FileFormatError(
            f"{what} of type {kind} and shape {sizes} needs {nbytes} bytes, but the file holds {stored}: "
            "save the array again with numpy.save"
        )
    return _ArrayHeader(kind, sizes, order[1] == "True")


def _read(file: IO[bytes], header: _ArrayHeader, shape: tuple[int, ...]) -> Array:
    """Read the next elements of an array, and convert them to the byte order of this machine."""
    expected = prod(shape) * header.dtype.itemsize
    data = file.read(expected)
    if len(data) != expected:
        raise FileFormatError(
            f"the file is truncated: expected {expected} more bytes, got {len(data)}: copy or save the file again"
        )
    flat = np.frombuffer(data, header.dtype).astype(header.dtype.newbyteorder("="), copy=False)
    return flat.reshape(shape, order="F" if header.is_fortran else "C")


def open_arrays(files: DataFiles, listing: DataListing, inputs: Sequence[InputInfo]) -> FileBatches:
    """Open an .npz or .npy file, or a directory of such files; check the headers of all arrays."""
    files.reject_unused("arrays")
    if listing.root.is_dir():
        return _open_directory(listing, inputs)
    return _open_file(ArrayFile(listing.root), inputs, files.batch_size)


def _open_directory(listing: DataListing, inputs: Sequence[InputInfo]) -> FileBatches:
    if len({path.suffix for path in listing.paths}) != 1:
        raise SpecError(
            f"{fspath(listing.root)} holds {len(listing.paths)} .npz and .npy files: expected only .npz or only .npy "
            "files, one per batch"
        )
    files = [ArrayFile(path) for path in listing.paths]
    for file in files:
        names = _names_in(file, inputs)
        for info in inputs:
            header = file.headers[names[info.name]]
            info.check(header.dtype.newbyteorder("="), header.shape, fspath(file.path))

    def read(numbers: Sequence[int] | None) -> Iterator[Feed]:
        for file in files if numbers is None else (files[number] for number in numbers):
            arrays, names = file.read(), _names_in(file, inputs)
            yield {info.name: arrays[names[info.name]] for info in inputs}

    return FileBatches(fspath(listing.root), len(files), read)


def _open_file(file: ArrayFile, inputs: Sequence[InputInfo], batch_size: int | None) -> FileBatches:
    where = fspath(file.path)
    names = _names_in(file, inputs)
    headers = {info.name: file.headers[names[info.name]] for info in inputs}
    lengths = {name: header.shape[0] if header.shape else 0 for name, header in headers.items()}
    length = min(lengths.values(), default=0)
    if not length or max(lengths.values()) != length:
        raise ShapeError(
            f"{where}: the arrays hold {lengths} samples, expected the same number of samples in each array, and at "
            "least 1; if the inputs share no batch axis, pass a directory with one .npz per batch"
        )
    size, is_fixed = batch_size_of(inputs, batch_size, where)
    if is_fixed and length % size:
        raise ShapeError(
            f"{where}: the number of samples, {length}, must be a multiple of the model's batch size, {size}: "
            f"remove {length % size} of the samples, or add {size - length % size}"
        )
    for info in inputs:
        header = headers[info.name]
        info.check(header.dtype.newbyteorder("="), (size, *header.shape[1:]), where)

    def read(numbers: Sequence[int] | None) -> Iterator[Feed]:
        for part in file.slices(size, numbers):
            yield {info.name: part[names[info.name]] for info in inputs}

    return FileBatches(where, -(-length // size), read)


def _names_in(file: ArrayFile, inputs: Sequence[InputInfo]) -> dict[str, str]:
    """Map each input to the name of its array in a file."""
    names, stored, where = [info.name for info in inputs], list(file.headers), fspath(file.path)
    unnamed = [""] if file.path.suffix == ".npy" else [f"arr_{i}" for i in range(len(names))]
    if {*stored} != {*names} and sorted(stored) == sorted(unnamed) and len(stored) == len(names):
        return dict(zip(names, unnamed, strict=True))
    if stored == [""]:
        raise FileFormatError(f"{where} holds one array, but the model's inputs are {', '.join(names)}: use .npz files")
    check_input_names(stored, names, where)
    return dict(zip(names, names, strict=True))
