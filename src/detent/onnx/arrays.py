"""Arrays: .npy and .npz files, read as if they were hostile.

What a header claims is compared with the bytes that are there before anything is allocated; nothing is unpickled or
evaluated. Arrays are read slice by slice along their first axis, so that memory does not grow with the file.
"""

import re
import zlib
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from math import prod
from os import PathLike, fspath
from pathlib import Path
from typing import IO, Any
from zipfile import ZIP_DEFLATED, ZIP_STORED, BadZipFile, ZipFile, ZipInfo

import numpy as np
from numpy.typing import NDArray

from detent.errors import FileFormatError

__all__ = ["ArrayFile", "ArrayHeader"]

Array = NDArray[Any]
MAGIC = b"\x93NUMPY"
LENGTHS = {1: 2, 2: 4, 3: 4}  # bytes of the length field by version
HEADER_LIMIT = 10_000
RANK_LIMIT = 32
NAMES_SHOWN = 200
RATIO_LIMIT, SMALL = 1000, 1 << 20  # what a compressed member may claim: so many times its bytes, or that much
ENCRYPTED = 1
_DTYPE = re.compile(r"""['"]descr['"]\s*:\s*['"]([<>|=])([biuf])([1248])['"]""")
_ORDER = re.compile(r"""['"]fortran_order['"]\s*:\s*(True|False)""")
_SHAPE = re.compile(r"""['"]shape['"]\s*:\s*\(([\d\s,]{0,999})\)""")
_DAMAGE = (BadZipFile, zlib.error, EOFError, OSError, NotImplementedError, RuntimeError, ValueError, OverflowError)


@dataclass(frozen=True)
class ArrayHeader:
    """What a file says of an array.

    Attributes:
        dtype: of its elements, in the file's byte order.
        shape: its sizes.
        is_fortran: whether the first axis varies fastest.
        nbytes: the bytes of its elements.

    >>> ArrayHeader(np.dtype("float32"), (2, 3), False).nbytes
    24
    """

    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    is_fortran: bool

    @property
    def nbytes(self) -> int:
        """The bytes of the elements."""
        return prod(self.shape) * self.dtype.itemsize


class ArrayFile:
    """An .npy or .npz file whose claims were checked.

    Attributes:
        path: where it is.
        headers: of its arrays by name; that of an .npy file is called "".

    Raises:
        FileFormatError: no such file, or damaged, or with contents that are no plain numbers.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     np.savez(Path(folder, "a.npz"), x=np.arange(6).reshape(3, 2))
    ...     file = ArrayFile(Path(folder, "a.npz"))
    ...     file.headers["x"].shape, file.read()["x"][2], [part["x"].shape for part in file.slices(2)]
    ((3, 2), array([4, 5]), [(2, 2), (1, 2)])
    """

    def __init__(self, path: str | PathLike[str]) -> None:
        self.path = Path(path)
        if not self.path.is_file():
            raise FileFormatError(f"{fspath(self.path)}: there is no such file")
        with self._open() as parts:
            self.headers = {name: header for name, (header, _) in parts.items()}

    @contextmanager
    def _open(self) -> Iterator[dict[str, tuple[ArrayHeader, IO[bytes]]]]:
        """The headers, and streams that stand at the first element of each array."""
        with ExitStack() as stack:
            try:
                yield {name: (_read_header(name, size, file), file) for name, size, file in self._streams(stack)}
            except FileFormatError as error:
                raise FileFormatError(f"{fspath(self.path)}: {error}") from error
            except _DAMAGE as error:
                raise FileFormatError(f"{fspath(self.path)} is damaged, or no NumPy file: {error}") from error

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
        """All arrays by name."""
        with self._open() as parts:
            return {name: _read(file, header, header.shape) for name, (header, file) in parts.items()}

    def slices(self, step: int) -> Iterator[dict[str, Array]]:
        """Arrays of so many elements along the first axis, which all have in common; the last ones may be shorter."""
        with self._open() as parts:
            if {name: header for name, (header, _) in parts.items()} != self.headers:
                raise FileFormatError("its arrays are others than before: it was changed while it was read")
            whole = {name: _read(file, head, head.shape) for name, (head, file) in parts.items() if head.is_fortran}
            length = min(header.shape[0] for header in self.headers.values())
            for begin in range(0, length, step):
                size = min(step, length - begin)
                yield {
                    name: whole[name][begin : begin + size]
                    if header.is_fortran
                    else _read(file, header, (size, *header.shape[1:]))
                    for name, (header, file) in parts.items()
                }


def _check_members(members: list[ZipInfo], size: int) -> None:
    names = [member.filename for member in members]
    if len({*names}) != len(names):
        raise FileFormatError("two of its members have one name")
    if sum(member.compress_size for member in members) > size:
        raise FileFormatError(f"its members claim more than the {size} bytes of the file")
    for member in members:
        name = repr(member.filename[:NAMES_SHOWN])
        if not member.filename.endswith(".npy"):
            raise FileFormatError(f"its member {name} is no array: expected what numpy.savez writes")
        if member.flag_bits & ENCRYPTED or member.compress_type not in {ZIP_STORED, ZIP_DEFLATED}:
            raise FileFormatError(f"its member {name} is encrypted or compressed in a way that NumPy does not read")
        if member.file_size > max(SMALL, RATIO_LIMIT * member.compress_size):
            raise FileFormatError(
                f"its member {name} has {member.compress_size} bytes and claims to unpack to {member.file_size}, at "
                f"most {RATIO_LIMIT} times as many are unpacked: store it uncompressed, by numpy.savez"
            )


def _read_header(name: str, size: int, file: IO[bytes]) -> ArrayHeader:
    """Check the header of an array against the bytes that its file or member has."""
    what = f"array {name[:NAMES_SHOWN]!r}" if name else "the array"
    start = file.read(len(MAGIC) + 2)
    width = LENGTHS.get(start[-2]) if len(start) == len(MAGIC) + 2 else None
    if not start.startswith(MAGIC) or width is None:
        raise FileFormatError(f"{what} does not begin as NumPy's files do")
    length = int.from_bytes(file.read(width), "little")
    if length > HEADER_LIMIT:
        raise FileFormatError(f"{what} has a header of {length} bytes, at most {HEADER_LIMIT} are read")
    text = file.read(length).decode("latin-1")
    dtype, order, shape = (pattern.search(text) for pattern in (_DTYPE, _ORDER, _SHAPE))
    if dtype is None or order is None or shape is None or len(text) != length:
        raise FileFormatError(f"{what} holds no plain numbers, or its header is damaged: {text[:NAMES_SHOWN].strip()}")
    try:
        kind = np.dtype("?" if dtype[2] == "b" else "".join(dtype.groups()))
    except TypeError as error:
        raise FileFormatError(f"{what} has the type {''.join(dtype.groups())!r}, which NumPy does not have") from error
    sizes = tuple(int(part) for part in shape[1].split(",") if part.strip())
    header = ArrayHeader(kind, sizes, order[1] == "True")
    begin = len(start) + width + length
    if len(sizes) > RANK_LIMIT or begin + header.nbytes != size:
        raise FileFormatError(
            f"{what} of type {kind} and shape {sizes} takes {header.nbytes} bytes, the file holds {size - begin}"
        )
    return header


def _read(file: IO[bytes], header: ArrayHeader, shape: tuple[int, ...]) -> Array:
    """The next elements, in the machine's byte order."""
    expected = prod(shape) * header.dtype.itemsize
    data = file.read(expected)
    if len(data) != expected:
        raise FileFormatError(f"{expected} bytes were announced, {len(data)} came: the file is truncated")
    flat = np.frombuffer(data, header.dtype).astype(header.dtype.newbyteorder("="), copy=False)
    return flat.reshape(shape, order="F" if header.is_fortran else "C")
