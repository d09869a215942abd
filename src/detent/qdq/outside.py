"""Outside: data of tensors that lie in files beside the model.

Such a file must be a plain one in the model's folder or below it, reached by no link and known by no other name:
otherwise a model could bring the contents of any file of the reader's into the next file that is written.
"""

import os
import stat
from math import prod
from pathlib import Path, PurePosixPath, PureWindowsPath

from onnx import TensorProto

from detent.errors import FileFormatError
from detent.qdq.tensors import BITS

__all__ = ["Outside", "element_count"]

TIES = 4  # tensors may share bytes, but a small file must not fill the memory
SHOWN = 200  # letters of a name in a message
_KEYS = frozenset({"location", "offset", "length", "checksum"})


class Outside:
    """The folder of a model.

    Args:
        folder: where the model is, None for one in memory.

    >>> tensor = TensorProto(name="w", data_type=TensorProto.FLOAT, dims=[2], data_location=TensorProto.EXTERNAL)
    >>> _ = tensor.external_data.add(key="location", value="../w.data")
    >>> Outside(Path()).fetch(tensor)
    Traceback (most recent call last):
    ...
    detent.errors.FileFormatError: lies in '../w.data', expected a file beside the model
    """

    def __init__(self, folder: Path | None) -> None:
        self.folder = folder
        self._claimed: dict[Path, int] = {}

    def fetch(self, tensor: TensorProto) -> None:
        """Bring the data of a tensor that lie outside into it.

        Raises:
            FileFormatError: they are not there, others than expected, or where they must not be.
        """
        if tensor.data_location != TensorProto.EXTERNAL:
            return
        if self.folder is None:
            raise FileFormatError("lies outside of a model that is in memory: give the model's path")
        if tensor.data_type not in BITS:
            raise FileFormatError(f"lies outside and has data type {tensor.data_type}")
        entries = {entry.key: entry.value for entry in tensor.external_data if entry.key in _KEYS}
        expected = -(-element_count(tensor) * BITS[tensor.data_type] // 8)
        offset, length = _number(entries, "offset", 0), _number(entries, "length", expected)
        if length != expected:
            raise FileFormatError(f"takes {expected} bytes, its entry says {length} at {offset}")
        tensor.raw_data = self._read(self.folder, entries.get("location", ""), offset, length)
        tensor.ClearField("external_data")
        tensor.ClearField("data_location")

    def _read(self, folder: Path, location: str, offset: int, length: int) -> bytes:
        shown = repr(location[:SHOWN])
        try:
            path = _inside(folder, location)
            handle = os.open(path, os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0))
            try:
                self._check_file(path, shown, os.fstat(handle), offset + length, length)
                with os.fdopen(handle, "rb", closefd=False) as file:
                    file.seek(offset)
                    return file.read(length)
            finally:
                os.close(handle)
        except OSError as error:
            raise FileFormatError(f"lies in {shown}, which cannot be read: {error.strerror}") from error

    def _check_file(self, path: Path, shown: str, about: os.stat_result, end: int, length: int) -> None:
        if not stat.S_ISREG(about.st_mode):
            raise FileFormatError(f"lies in {shown}, which is no plain file")
        if about.st_nlink != 1:
            raise FileFormatError(f"lies in {shown}, which has other names, too (hard links): copy it")
        if end > about.st_size:
            raise FileFormatError(f"ends at byte {end} of {shown}, which has {about.st_size}")
        self._claimed[path] = self._claimed.get(path, 0) + length
        if self._claimed[path] > TIES * about.st_size:
            raise FileFormatError(f"takes, with others, more than {TIES} times the bytes of {shown}")


def element_count(tensor: TensorProto) -> int:
    """How many elements a tensor's shape announces.

    >>> element_count(TensorProto(dims=[2, 3]))
    6
    """
    if any(size < 0 for size in tensor.dims):
        raise FileFormatError(f"has the shape {list(tensor.dims)}")
    return prod(tensor.dims)


def _number(entries: dict[str, str], key: str, default: int) -> int:
    text = entries.get(key, str(default))
    if not (text.isascii() and text.isdigit() and len(text) < 20):
        raise FileFormatError(f"has the {key} {text[:SHOWN]!r}, expected a number of bytes")
    return int(text)


def _inside(folder: Path, location: str) -> Path:
    """A path in that folder, or below it, without links."""
    parts = PurePosixPath(location).parts
    strange = any(letter in location for letter in "\\\0") or PureWindowsPath(location).drive or location[:1] == "/"
    if not parts or strange or ".." in parts:
        raise FileFormatError(f"lies in {location[:SHOWN]!r}, expected a file beside the model")
    path = folder
    for part in parts:
        path = path / part
        if path.is_symlink():
            raise FileFormatError(f"lies in {location[:SHOWN]!r}, where {part!r} is a symbolic link")
    return path
