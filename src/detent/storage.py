"""Storage: safetensors bytes and files, written atomically and read as untrusted input.

The safetensors package writes and reads the bytes. Before it reads, headers are checked here, and before memory is
allocated: duplicate keys, types, sizes, holes, overlaps and trailing bytes. Equal input gives equal bytes, so metadata
have at most one entry: the package writes several in random order.

A file is written under a temporary name, ``.<name>.<16 hex digits>``, and then renamed. While writing, the writer holds
a lock (``flock``) on the temporary file; if the process is killed, the system releases the lock. The next writer of the
same name removes temporary files that are not locked. The first four digits identify the machine, because on network
file systems the locks of other machines may be invisible. Temporary files of other machines are removed only a day
after their last change. Systems without ``flock`` remove no temporary files.
"""

import logging
import os
import platform
import re
import secrets
import stat
import tempfile
import time
from collections.abc import Container, Iterable, Mapping
from contextlib import suppress
from functools import cache
from hashlib import sha256
from math import prod
from pathlib import Path
from reprlib import repr as brief
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from detent.checks import SIZE_LIMIT, are_sizes
from detent.codec import MAX_CHARS_SHOWN, parse, reading, table
from detent.errors import DetentError, DtypeError, FileFormatError, SpecError
from detent.tables import counted

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

__all__ = ["dumps", "loads", "read", "write_atomic"]

_log = logging.getLogger(__name__)

Arrays = dict[str, NDArray[Any]]
HEADER_LIMIT = 1 << 24  # bytes
ELEMENT_LIMIT = SIZE_LIMIT >> 3  # elements of up to 8 bytes; NumPy rejects larger arrays, even if an axis is 0
FOREIGN_LIFETIME = 24 * 60 * 60  # seconds; no writer pauses longer
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
LENGTH_BYTES = 8  # of the length field; also the alignment of the header
ARRAY_TYPES: Mapping[str, int] = MappingProxyType({"U8": 1, "I8": 1, "I16": 2, "I32": 4, "I64": 8, "F32": 4, "F64": 8})
_OTHER_TYPES = {"BOOL": 1, "U16": 2, "U32": 4, "U64": 8, "F16": 2, "BF16": 2, "F8_E4M3": 1, "F8_E5M2": 1}
ITEM_BYTES: Mapping[str, int] = MappingProxyType(dict(ARRAY_TYPES) | _OTHER_TYPES)


class HeaderEntry(NamedTuple):
    """A tensor in the header of a safetensors file: its type, its shape, and the position of its data."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


def dumps(arrays: Mapping[str, NDArray[Any]], metadata: Mapping[str, str]) -> bytes:
    """Return arrays and at most one entry of metadata as a safetensors file; equal input gives equal bytes."""
    from safetensors.numpy import save  # noqa: PLC0415 - imported on use

    if len(metadata) > 1:
        raise SpecError(f"got {len(metadata)} entries of metadata, expected at most one: put them into one JSON text")
    contiguous = {name: np.asarray(array, array.dtype.newbyteorder("="), order="C") for name, array in arrays.items()}
    return save(contiguous, dict(metadata) or None)


def loads(data: bytes) -> tuple[Arrays, dict[str, str]]:
    """Return the arrays, which are read-only, and the metadata from the bytes of a safetensors file."""
    if not isinstance(data, bytes | bytearray | memoryview):
        raise DtypeError(
            f"got {type(data).__name__}, expected the bytes of a safetensors file: for a path, call storage.read(path)"
        )
    content = bytes(data)
    start = LENGTH_BYTES + header_length(content, len(content))
    _, metadata = read_header(content[LENGTH_BYTES:start], len(content) - start, ARRAY_TYPES)
    from safetensors import SafetensorError  # noqa: PLC0415 - imported on use
    from safetensors.numpy import load  # noqa: PLC0415 - imported on use

    try:
        arrays = load(content)
    except SafetensorError as error:
        raise FileFormatError(f"the safetensors package cannot read the file: {error}") from error
    for array in arrays.values():
        array.setflags(write=False)
    return arrays, metadata


def read_header(text: bytes, body: int, dtypes: Container[str]) -> tuple[dict[str, HeaderEntry], dict[str, str]]:
    """Check the header of a safetensors file; return its tensors in the order of their data, and its metadata.

    Args:
        text: the header, without its length.
        body: number of bytes after the header.
        dtypes: types that are allowed, such as "F32".
    """
    if not text.startswith(b"{"):
        raise FileFormatError("the header does not start with '{': the file is damaged, or not a safetensors file")
    with reading("the header is not valid JSON", keep=FileFormatError):
        header = parse(text.decode(), "the header", limit=HEADER_LIMIT)
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise FileFormatError(
            "the metadata must map strings to strings: the file is damaged, or not a safetensors file"
        )
    entries = {name: _checked_entry(name, entry, dtypes) for name, entry in header.items()}
    ordered = dict(sorted(entries.items(), key=lambda item: (item[1].begin, item[1].end)))
    position = 0
    for name, entry in ordered.items():
        label = f"tensor {name[:MAX_CHARS_SHOWN]!r}"
        if entry.begin != position:
            raise FileFormatError(
                f"{label} begins at byte {entry.begin}, expected {position}: the file has a hole or an overlap"
            )
        position = entry.end
        if entry.end > body:
            raise FileFormatError(
                f"{label} ends at byte {entry.end}, but the data end at byte {body}: the file is truncated"
            )
    if position != body:
        count = counted(body - position, "unexpected byte")
        raise FileFormatError(f"{count} after the last tensor: the file is damaged")
    return ordered, metadata


def read(path: str | os.PathLike[str]) -> tuple[Arrays, dict[str, str]]:
    """Return the arrays, which are read-only, and the metadata of a safetensors file."""
    try:
        return loads(Path(path).read_bytes())
    except FileFormatError as error:
        raise FileFormatError(f"{os.fspath(path)}: {error}") from error


def write_atomic(path: str | os.PathLike[str], data: bytes | Iterable[bytes]) -> None:
    """Write and sync a temporary file, then rename it to ``path``; readers see either the old file or the new one."""
    target = Path(path)
    _remove_leftovers(target)
    temporary = target.with_name(f".{target.name}.{_system()}{secrets.token_hex(6)}")
    try:
        with os.fdopen(_create_locked(temporary), "wb") as file:
            for part in (data,) if isinstance(data, bytes) else data:
                file.write(part)
            file.flush()
            os.fsync(file.fileno())
            if fcntl is None:
                file.close()  # Windows renames only closed files; other systems keep the file open, and so locked
            temporary.replace(target)
    except BaseException:
        with suppress(OSError):
            temporary.unlink()
        raise
    sync_directory(target.parent)
    _log.debug("wrote %s", target)


@cache
def _system() -> str:
    """Return four hex digits that identify this machine since its last boot; processes on it see each other's locks."""
    try:
        identity = BOOT_ID.read_bytes()
    except OSError:
        identity = platform.node().encode()
    return sha256(identity).hexdigest()[:4]


def _create_locked(temporary: Path) -> int:
    """Create a file with default permissions, and lock it if the file system supports locks."""
    while True:
        handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        if fcntl is not None:
            with suppress(OSError):
                fcntl.flock(handle, fcntl.LOCK_EX)
        if temporary.exists():
            return handle
        os.close(handle)  # another writer removed the file before it was locked


def _remove_leftovers(target: Path) -> None:
    """Remove temporary files that killed writers of ``target`` left, also for its ONNX external data."""
    if fcntl is None:
        return
    ours = re.compile(rf"{re.escape(f'.{target.name}.')}(?:[0-9a-f]{{12}}\.data\.)?[0-9a-f]{{16}}")
    with suppress(OSError):  # a missing directory is reported by the write that follows
        for temporary in [path for path in target.parent.iterdir() if ours.fullmatch(path.name)]:
            with suppress(OSError):
                _remove_unlocked(temporary)


def _remove_unlocked(temporary: Path) -> None:
    """Remove a temporary file, unless another machine may still use it; raise OSError if a process has locked it."""
    handle = os.open(temporary, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        status = os.fstat(handle)
        is_ours = temporary.name[-16:].startswith(_system())
        if stat.S_ISREG(status.st_mode) and (is_ours or time.time() - status.st_mtime > FOREIGN_LIFETIME):
            temporary.unlink()
    finally:
        os.close(handle)


def check_directory(
    path: str | os.PathLike[str], *, writable: bool = True, error: type[DetentError] = FileFormatError
) -> Path:
    """Check that the directory exists and is writable, so that an error is raised before minutes of work."""
    directory = Path(path)
    if not directory.is_dir():
        raise error(f"{directory} is not a directory: create it, or choose another directory")
    if writable:
        try:
            with tempfile.TemporaryFile(dir=directory):
                pass
        except OSError as fault:
            raise error(
                f"{directory} cannot be written to ({fault.strerror}): choose another directory, or make it writable"
            ) from fault
    return directory


def sync_directory(directory: Path) -> None:
    with suppress(OSError):  # some systems cannot sync a directory; the file is already synced
        handle = os.open(directory, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def header_length(start: bytes, size: int) -> int:
    """Return the length of a safetensors header from the first bytes of a file with ``size`` bytes."""
    if len(start) < LENGTH_BYTES:
        raise FileFormatError(
            f"got {len(start)} bytes, expected at least {LENGTH_BYTES} for the header's length: not a safetensors file"
        )
    length = int.from_bytes(start[:LENGTH_BYTES], "little")
    if length > min(HEADER_LIMIT, size - LENGTH_BYTES):
        raise FileFormatError(
            f"got a header length of {length} bytes, expected at most {min(HEADER_LIMIT, size - LENGTH_BYTES)}: the "
            "file is truncated or not a safetensors file"
        )
    return length


def _checked_entry(name: str, entry: object, dtypes: Container[str]) -> HeaderEntry:
    """Return the entry of a tensor; check that its offsets match its shape."""
    label = f"tensor {name[:MAX_CHARS_SHOWN]!r}"
    fields = table(entry, label, ("dtype", "shape", "data_offsets"))
    dtype, shape, offsets = fields["dtype"], fields["shape"], fields["data_offsets"]
    if not isinstance(dtype, str) or dtype not in dtypes or dtype not in ITEM_BYTES:
        names = ", ".join(name for name in ITEM_BYTES if name in dtypes)
        raise FileFormatError(f"{label} has dtype {brief(dtype)}, expected one of {names}")
    if not are_sizes(shape) or prod(max(size, 1) for size in shape) >= ELEMENT_LIMIT:
        raise FileFormatError(f"{label} has shape {brief(shape)}, expected a list of sizes")
    if not are_sizes(offsets) or len(offsets) != 2:
        raise FileFormatError(f"{label} has data_offsets {brief(offsets)}, expected [begin, end]")
    begin, end = offsets
    expected = prod(shape) * ITEM_BYTES[dtype]
    if end - begin != expected:
        raise FileFormatError(
            f"{label} of {dtype} {shape} needs {expected} bytes, but its data_offsets span {end - begin}"
        )
    return HeaderEntry(dtype, tuple(shape), begin, end)
