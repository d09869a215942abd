"""Batches of model inputs from iterables, files and directories; a batch is read and checked when it is needed.

=================== ===========================================================================================
data                batches
=================== ===========================================================================================
an iterable         dicts of arrays by input name, tuples of arrays in input order, or single arrays
an .npz, an .npy    one array per input, with samples along the first axis; each array is cut into batches
a directory of .npz one file per batch, in the order of the file names
a directory of .npy one file per batch, for a model with one input
=================== ===========================================================================================

If arrays have the default names of ``numpy.savez`` (arr_0, arr_1, ...), arr_0 is the model's first input, and so on.

Files are untrusted: the sizes in headers are compared with the size of the file before memory is allocated, and nothing
is unpickled or evaluated. Arrays are read slice by slice along their first axis. ``Batches.subset`` reads only the
slices of the chosen batches.
"""

import hashlib
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import ExitStack, contextmanager
from copy import copy
from dataclasses import dataclass
from itertools import chain, islice
from math import prod
from os import PathLike, fspath
from pathlib import Path
from typing import IO, Any
from zipfile import ZIP_DEFLATED, ZIP_STORED, BadZipFile, ZipFile, ZipInfo

import numpy as np
from numpy.typing import NDArray
from onnx import ModelProto, helper

from detent.checks import first_index, refuse_nan
from detent.errors import (
    DtypeError,
    FileFormatError,
    NotCalibratedError,
    RangeError,
    ShapeError,
    SpecError,
    UnsupportedError,
    closest,
)

__all__ = [
    "ArrayFile",
    "BatchSource",
    "Batches",
    "InputInfo",
    "can_cut",
    "inputs_of",
    "open_batches",
    "samples_in",
    "update_digest",
]

Array = NDArray[Any]
Feed = dict[str, Array]
Batch = Mapping[str, Any] | Sequence[Any] | Any
BatchSource = Iterable[Batch] | str | PathLike[str]

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


# Files of arrays


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


# Inputs of a model


@dataclass(frozen=True)
class InputInfo:
    """One input of a model."""

    name: str
    dtype: np.dtype[Any]
    shape: tuple[int | None, ...] | None  # sizes that vary are None; an unknown shape is None

    def check(self, dtype: np.dtype[Any], shape: tuple[int, ...], where: str) -> None:
        """Raise DtypeError or ShapeError if an array does not fit this input; messages begin with ``where``."""
        is_text = self.dtype == object and dtype.kind in "OUST"
        if dtype != self.dtype and not is_text:
            raise DtypeError(
                f"{where}: input {self.name!r} has dtype {dtype}, but the model expects {self.dtype}: "
                f"convert it first, for example x.astype({self.dtype.name!r})"
            )
        expected = self.shape
        if expected is not None and (
            len(expected) != len(shape) or any(a not in {None, b} for a, b in zip(expected, shape, strict=True))
        ):
            sizes = ", ".join("any" if size is None else str(size) for size in expected)
            raise ShapeError(
                f"{where}: input {self.name!r} has shape {shape}, but the model expects ({sizes}): pass arrays of "
                "this shape"
            )
        if shape and not shape[0]:
            raise ShapeError(
                f"{where}: input {self.name!r} has shape {shape}, expected at least one sample: remove empty batches"
            )


def inputs_of(model: ModelProto) -> list[InputInfo]:
    """List the inputs that a caller must pass; inputs with an initializer are left out.

    Raises:
        UnsupportedError: an input is not a tensor.
    """
    initializers = {tensor.name for tensor in model.graph.initializer}
    inputs = []
    for value in model.graph.input:
        if value.name in initializers:
            continue
        if value.type.WhichOneof("value") != "tensor_type":
            raise UnsupportedError(
                f"input {value.name!r} is not a tensor, but only tensors are supported: export "
                "the model with tensor inputs"
            )
        kind = value.type.tensor_type
        try:
            dtype = np.dtype(helper.tensor_dtype_to_np_dtype(kind.elem_type))
        except (KeyError, ValueError, TypeError) as error:
            raise UnsupportedError(
                f"input {value.name!r} has the unknown type {kind.elem_type}: update onnx, or export the model again"
            ) from error
        shape = None
        if kind.HasField("shape"):  # some exporters write 0 or -1 for sizes that vary
            shape = tuple(axis.dim_value if axis.dim_value > 0 else None for axis in kind.shape.dim)
        inputs.append(InputInfo(value.name, dtype, shape))
    return inputs


# Batches


def samples_in(feed: Mapping[str, Array]) -> int:
    """Return the number of samples in a batch: the size of the first axis of the first input that has axes."""
    return next((array.shape[0] for array in feed.values() if array.ndim), 1)


class Batches:
    """Batches of a model's inputs, each checked when it is read; made by ``open_batches``.

    ``count`` is the number of batches, None if the source has no length. Error messages begin with ``name`` and the
    index of the batch. ``numbers`` are the indices of the batches to use, in ascending order; None uses all batches.
    """

    def __init__(
        self,
        source: Iterable[Batch],
        inputs: Sequence[InputInfo],
        *,
        is_repeatable: bool = True,
        count: int | None = None,
        name: str = "",
        numbers: Sequence[int] | None = None,
    ) -> None:
        self.inputs = tuple(inputs)
        self.is_repeatable = is_repeatable
        self.count = count if numbers is None else len(numbers)
        self.numbers = numbers
        self._source, self._name = source, name
        self._begun: Iterator[tuple[int, Batch]] | None = None
        self._is_spent = False
        self._digest: Any = None
        self._progress: Callable[[int, int | None], None] | None = None

    def subset(self, numbers: Sequence[int]) -> "Batches":
        """Return the batches with the indices ``numbers``, which must be in ascending order.

        Batches with other indices are not read if the source allows access by index.
        """
        if not self.is_repeatable:
            raise SpecError("batches cannot be selected from an iterator: pass data as a list, a file or a directory")
        chosen = numbers if self.numbers is None else [self.numbers[number] for number in numbers]
        return Batches(self._source, self.inputs, name=self._name, numbers=chosen)

    def first(self, count: int) -> "Batches":
        """Return the first ``count`` batches, or all if there are fewer."""
        if self.count is None:
            raise SpecError("the number of batches is unknown: pass data as a list, a file or a directory")
        return self.subset(range(min(count, self.count)))

    def first_samples(self, count: int) -> tuple[list[Feed], int]:
        """Return batches that hold the first ``count`` samples, and the number of samples in these batches.

        The last batch is cut if its inputs have equally many samples and the model accepts any batch size. Otherwise
        the batches may hold more than ``count`` samples.
        """
        feeds, total = list[Feed](), 0
        for feed in self:
            size = samples_in(feed)
            is_cut = total + size > count and can_cut(feed, self.inputs)
            feeds.append({name: array[: count - total] for name, array in feed.items()} if is_cut else feed)
            total += count - total if is_cut else size
            if total >= count:
                break
        return feeds, total

    def counted(self, progress: Callable[[int, int | None], None]) -> "Batches":
        """Return a copy that calls ``progress(batches done, total)`` after each batch; an unknown total is None."""
        counted = copy(self)
        counted._progress, self._begun = progress, None  # if a pass has begun, only the copy continues it
        return counted

    def check_first(self) -> Feed:
        """Check and return the first batch; the next pass still begins with this batch."""
        return self.peek(1)[0]

    def peek(self, count: int) -> list[Feed]:
        """Check and return the first batches, at most ``count``; the next pass still begins with the first batch."""
        rest = self._begun if self._begun is not None else self._start()
        batches = list(islice(rest, count))
        self._begun = chain(batches, rest)
        if not batches:
            raise SpecError(f"{self._name or 'data'} holds no batches: pass at least one batch")
        return [self._check(batch, number) for number, batch in batches]

    def __iter__(self) -> Iterator[Feed]:
        rest, self._begun = self._begun if self._begun is not None else self._start(), None
        done = 0
        for done, (number, batch) in enumerate(rest, 1):
            yield self._check(batch, number)
            if self._progress is not None:
                self._progress(done, self.count)
        if not done:
            raise SpecError(
                f"{self._name or 'data'} holds no batches; if it is an iterator that was read before, pass a list"
            )

    def hashed(self) -> Iterator[Feed]:
        """Iterate over the batches, and update the hash that ``fingerprint`` returns."""
        digest = self._digest = hashlib.sha256()
        for feed in self:
            update_digest(digest, feed)
            yield feed

    def fingerprint(self) -> str:
        """Return the SHA-256 of all arrays that the last pass of ``hashed`` read: names, types, shapes and elements."""
        if self._digest is None:
            raise NotCalibratedError("data has no fingerprint before it is read: iterate over hashed() first")
        return str(self._digest.hexdigest())

    def _start(self) -> Iterator[tuple[int, Batch]]:
        if self._is_spent and not self.is_repeatable:
            raise SpecError(
                "data is an iterator that was already read: pass a list, a file or a directory, which can be read again"
            )
        self._is_spent = True
        if self.numbers is None:
            return enumerate(self._source)
        return zip(self.numbers, _choose(self._source, self.numbers), strict=False)

    def _check(self, batch: Batch, number: int) -> Feed:
        where = f"{self._name} batch {number}".strip()
        by_name = _by_name(batch, self.inputs, where)
        feed = {}
        for info in self.inputs:
            array = _as_array(by_name[info.name], info, where)
            info.check(array.dtype, array.shape, where)
            _check_finite(array, info.name, where)
            feed[info.name] = array
        return feed


def _choose(source: Iterable[Batch], numbers: Sequence[int]) -> Iterator[Batch]:
    """Yield the batches with the indices ``numbers``; a source with access by index reads only these batches."""
    if isinstance(source, _FileBatches):
        return source.read(numbers)
    if isinstance(source, Sequence):
        return (source[number] for number in numbers)
    chosen, end = {*numbers}, max(numbers, default=-1) + 1
    return (batch for number, batch in enumerate(islice(source, end)) if number in chosen)


def can_cut(feed: Feed, inputs: Sequence[InputInfo]) -> bool:
    """Return whether a batch can be cut along the first axis, and the model accepts the parts."""
    lengths = {array.shape[:1] for array in feed.values()}
    return len(lengths) == 1 and all(info.shape is None or info.shape[:1] == (None,) for info in inputs)


def update_digest(digest: "hashlib._Hash", feed: Mapping[str, Array]) -> None:
    """Add the names, types, shapes and elements of a batch to a hash."""
    for name, array in sorted(feed.items()):
        digest.update(f"{name!r} {array.dtype} {array.shape}\n".encode())
        digest.update(_bytes_of(array))


def _bytes_of(array: Array) -> memoryview | bytes:
    if array.dtype == object or array.dtype.kind in "UST":
        return repr(array.tolist()).encode()
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data


def _by_name(batch: Batch, inputs: Sequence[InputInfo], where: str) -> Mapping[str, Any]:
    names = [info.name for info in inputs]
    if isinstance(batch, Mapping):
        _check_names(list(batch), names, where)
        return batch
    parts = batch if isinstance(batch, tuple | list) else (batch,)
    if len(parts) != len(names):
        raise SpecError(
            f"{where}: the number of arrays must be {len(names)}, got {len(parts)}: "
            f"pass a dict with the keys {', '.join(names)}"
        )
    return dict(zip(names, parts, strict=True))


def _check_names(batch_names: Sequence[Any], names: Sequence[str], where: str) -> None:
    unknown = [name for name in batch_names if name not in names]
    if unknown:
        hint = closest(str(unknown[0]), names)
        raise SpecError(f"{where}: the model has no input {unknown[0]!r}{hint} its inputs are {', '.join(names)}")
    missing = [name for name in names if name not in batch_names]
    if missing:
        raise SpecError(f"{where} has no array for {', '.join(missing)}: pass an array for each input")


def _as_array(value: Any, info: InputInfo, where: str) -> Array:  # noqa: ANN401 - callers may pass anything
    if not hasattr(value, "__array__"):
        raise DtypeError(
            f"{where}: input {info.name!r} is of type {type(value).__name__}, expected an array of {info.dtype}"
        )
    try:
        return np.asarray(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise DtypeError(f"{where}: input {info.name!r} cannot be converted to a NumPy array: {error}") from error


def _check_finite(array: Array, name: str, where: str) -> None:
    if not any(word in array.dtype.name for word in ("float", "complex")) or bool(np.isfinite(array).all()):
        return
    refuse_nan(f"{where}: input {name!r}", array, "clean the data")
    first = first_index(np.isinf(array))
    raise RangeError(f"{where}: input {name!r} is infinite at index {first}: replace infinity by a large finite value")


def open_batches(data: BatchSource | None, inputs: Sequence[InputInfo], batch_size: int | None = None) -> Batches:
    """Open any kind of data as batches, and check as much as possible without reading all data.

    A ``Batches`` object for the same inputs is returned unchanged. ``batch_size`` applies to .npz and .npy files; None
    uses the batch size that the model fixes, or 1 if the model accepts any batch size. Possible errors are SpecError,
    DtypeError, ShapeError, NaNError, RangeError and FileFormatError.
    """
    if data is None:
        raise SpecError("data is missing: pass batches of the model's inputs, an .npz file or a directory")
    if isinstance(data, Batches) and data.inputs == tuple(inputs):
        return data  # already checked against these inputs
    if isinstance(data, str | PathLike):
        path = Path(data)
        return _open_directory(path, inputs) if path.is_dir() else _open_file(ArrayFile(path), inputs, batch_size)
    if isinstance(data, Mapping) or hasattr(data, "__array__") or not isinstance(data, Iterable):
        raise SpecError(
            f"data must be a list of batches, a file or a directory, got {type(data).__name__}: for one batch, "
            "pass [data]"
        )
    is_repeatable = data.is_repeatable if isinstance(data, Batches) else not isinstance(data, Iterator)
    count = data.count if isinstance(data, Batches) else len(data) if isinstance(data, Sized) else None
    batches = Batches(data, inputs, is_repeatable=is_repeatable, count=count)
    batches.check_first()
    return batches


class _FileBatches:
    """Batches in files; ``read(numbers)`` yields the batches with these indices, and ``read(None)`` all batches."""

    def __init__(self, read: Callable[[Sequence[int] | None], Iterator[Batch]]) -> None:
        self.read = read

    def __iter__(self) -> Iterator[Batch]:
        return self.read(None)


def _open_directory(directory: Path, inputs: Sequence[InputInfo]) -> Batches:
    paths = sorted(path for path in directory.iterdir() if path.suffix in {".npz", ".npy"})
    if len({path.suffix for path in paths}) != 1:
        raise SpecError(
            f"{fspath(directory)} holds {len(paths)} .npz and .npy files: expected only .npz or only .npy files, "
            "one per batch"
        )
    files = [ArrayFile(path) for path in paths]
    for file in files:
        names = _names_in(file, inputs)
        for info in inputs:
            header = file.headers[names[info.name]]
            info.check(header.dtype.newbyteorder("="), header.shape, fspath(file.path))

    def read(numbers: Sequence[int] | None) -> Iterator[Batch]:
        for file in files if numbers is None else (files[number] for number in numbers):
            arrays, names = file.read(), _names_in(file, inputs)
            yield {info.name: arrays[names[info.name]] for info in inputs}

    return Batches(_FileBatches(read), inputs, count=len(files), name=fspath(directory))


def _open_file(file: ArrayFile, inputs: Sequence[InputInfo], batch_size: int | None) -> Batches:
    where = fspath(file.path)
    names = _names_in(file, inputs)
    headers = {info.name: file.headers[names[info.name]] for info in inputs}
    lengths = {name: header.shape[0] if header.shape else 0 for name, header in headers.items()}
    length = min(lengths.values(), default=0)
    if not length or max(lengths.values()) != length:
        raise ShapeError(
            f"{where}: the arrays hold {lengths} samples, expected the same number of samples in each array, and at "
            "least 1"
        )
    size = _batch_size(inputs, batch_size, length, where)
    for info in inputs:
        header = headers[info.name]
        info.check(header.dtype.newbyteorder("="), (size, *header.shape[1:]), where)

    def read(numbers: Sequence[int] | None) -> Iterator[Batch]:
        for part in file.slices(size, numbers):
            yield {info.name: part[names[info.name]] for info in inputs}

    return Batches(_FileBatches(read), inputs, count=-(-length // size), name=where)


def _batch_size(inputs: Sequence[InputInfo], requested: int | None, length: int, where: str) -> int:
    """Choose the number of samples per batch: the size that the model fixes, or the requested size, or 1."""
    fixed = {info.shape[0] if info.shape else 0 for info in inputs if info.shape is not None} - {None}
    if len(fixed) > 1 or 0 in fixed:
        raise ShapeError(
            f"{where}: the inputs share no batch axis, so the file cannot be split into samples: "
            "pass a directory with one .npz per batch"
        )
    size = next((int(size) for size in fixed if size), requested or 1)
    if requested not in {None, size} or size < 1:
        raise ShapeError(f"{where}: got a batch size of {requested}, but the model expects {size}: omit the batch size")
    if fixed and length % size:
        raise ShapeError(
            f"{where}: the number of samples, {length}, must be a multiple of the model's batch size, {size}: "
            f"remove {length % size} of the samples, or add {size - length % size}"
        )
    return size


def _names_in(file: ArrayFile, inputs: Sequence[InputInfo]) -> dict[str, str]:
    """Map each input to the name of its array in a file."""
    names, stored, where = [info.name for info in inputs], list(file.headers), fspath(file.path)
    unnamed = [""] if file.path.suffix == ".npy" else [f"arr_{i}" for i in range(len(names))]
    if {*stored} != {*names} and sorted(stored) == sorted(unnamed) and len(stored) == len(names):
        return dict(zip(names, unnamed, strict=True))
    if stored == [""]:
        raise FileFormatError(f"{where} holds one array, but the model's inputs are {', '.join(names)}: use .npz files")
    _check_names(stored, names, where)
    return dict(zip(names, names, strict=True))
