"""Batches of inputs for a model, from iterables, files and directories: read once, checked once, one at a time.

=================== ===========================================================================================
data                batches
=================== ===========================================================================================
an iterable         each a dict of arrays by input name, a tuple of arrays in the inputs' order, or one array
an .npz, an .npy    one array per input, its first axis counts samples: cut to the model's batch size
a directory of .npz one file per batch, in the order of their names
a directory of .npy the same for a model with one input
=================== ===========================================================================================

Arrays that ``numpy.savez`` named itself, arr_0, arr_1, ..., are the inputs in their order.

Files are untrusted: what a header claims is compared with the bytes that are there before anything is allocated, and
nothing is unpickled or evaluated. Arrays are read slice by slice along their first axis, and a subset skips to its
slices, so that neither memory nor time grows with batches that are not used.
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

__all__ = ["ArrayFile", "ArrayHeader", "BatchSource", "Batches", "InputInfo", "inputs_of", "open_batches"]

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

    def slices(self, step: int, numbers: Sequence[int] | None = None) -> Iterator[dict[str, Array]]:
        """Slices of ``step`` elements along the first axis, which all arrays share; the last one may be shorter.

        Args:
            step: elements of a slice.
            numbers: which slices, rising; None for all.
        """
        with self._open() as parts:
            if {name: header for name, (header, _) in parts.items()} != self.headers:
                raise FileFormatError("the file changed while it was being read")
            whole = {name: _read(file, head, head.shape) for name, (head, file) in parts.items() if head.is_fortran}
            starts = {name: file.tell() for name, (_, file) in parts.items()}
            length = min(header.shape[0] for header in self.headers.values())
            for number in range(-(-length // step)) if numbers is None else numbers:
                begin, end = number * step, min((number + 1) * step, length)
                arrays = {}
                for name, (header, file) in parts.items():
                    if header.is_fortran:
                        arrays[name] = whole[name][begin:end]
                    else:
                        row_bytes = prod(header.shape[1:]) * header.dtype.itemsize
                        file.seek(starts[name] + begin * row_bytes)
                        arrays[name] = _read(file, header, (end - begin, *header.shape[1:]))
                yield arrays


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


Feed = dict[str, Array]
Batch = Mapping[str, Any] | Sequence[Any] | Any
BatchSource = Iterable[Batch] | str | PathLike[str]
_LISTS = (tuple, list)


@dataclass(frozen=True)
class InputInfo:
    """What a model says of one of its inputs.

    Attributes:
        name: its name.
        dtype: of its elements.
        shape: its sizes, None for those that vary; None where not even the rank is known.

    >>> InputInfo("x", np.dtype("float32"), (None, 3)).check(np.dtype("float32"), (8, 4), "batch 0")
    Traceback (most recent call last):
    ...
    detent.errors.ShapeError: batch 0: input 'x' has shape (8, 4), the model takes (any, 3)
    """

    name: str
    dtype: np.dtype[Any]
    shape: tuple[int | None, ...] | None

    def check(self, dtype: np.dtype[Any], shape: tuple[int, ...], where: str) -> None:
        """Refuse arrays of another type or shape; ``where`` says whose they are.

        Raises:
            DtypeError: another type.
            ShapeError: another rank, another size of a fixed axis, or no elements along the first axis.
        """
        is_text = self.dtype == object and dtype.kind in "OUST"
        if dtype != self.dtype and not is_text:
            raise DtypeError(
                f"{where}: input {self.name!r} has dtype {dtype}, the model takes {self.dtype}: "
                f"convert it first, for example x.astype({self.dtype.name!r})"
            )
        wanted = self.shape
        if wanted is not None and (len(wanted) != len(shape) or _differ(wanted, shape)):
            sizes = ", ".join("any" if size is None else str(size) for size in wanted)
            raise ShapeError(f"{where}: input {self.name!r} has shape {shape}, the model takes ({sizes})")
        if shape and not shape[0]:
            raise ShapeError(f"{where}: input {self.name!r} has shape {shape}: there is nothing in it")


def _differ(wanted: tuple[int | None, ...], shape: tuple[int, ...]) -> bool:
    return any(size not in {None, found} for size, found in zip(wanted, shape, strict=True))


def inputs_of(model: ModelProto) -> list[InputInfo]:
    """The inputs that a caller has to give; those with an initializer are left out.

    Raises:
        UnsupportedError: an input that is no tensor.

    >>> from onnx import parser
    >>> inputs_of(parser.parse_model(
    ...     '<ir_version: 8, opset_import: ["" : 17]> g (float[N, 3] x) => (float[N, 3] y) { y = Abs(x) }'))
    [InputInfo(name='x', dtype=dtype('float32'), shape=(None, 3))]
    """
    given = {tensor.name for tensor in model.graph.initializer}
    found = []
    for value in model.graph.input:
        if value.name in given:
            continue
        if value.type.WhichOneof("value") != "tensor_type":
            raise UnsupportedError(f"input {value.name!r} is no tensor: only models that take tensors are run here")
        kind = value.type.tensor_type
        try:
            dtype = np.dtype(helper.tensor_dtype_to_np_dtype(kind.elem_type))
        except (KeyError, ValueError, TypeError) as error:
            raise UnsupportedError(f"input {value.name!r} has the unknown type {kind.elem_type}") from error
        shape = None
        if kind.HasField("shape"):  # some exporters write 0 or -1 for sizes that vary
            shape = tuple(axis.dim_value if axis.dim_value > 0 else None for axis in kind.shape.dim)
        found.append(InputInfo(value.name, dtype, shape))
    return found


class Batches:
    """Batches of a model's inputs, each checked when it is read; ``open_batches`` makes one.

    Args:
        source: batches in any form that ``open_batches`` accepts.
        inputs: the inputs of the model.
        is_repeatable: whether the source can be read again.
        count: how many batches the source has, None where that is not known.
        name: what messages call the source, before the number of the batch, which counts from 0.
        numbers: the batches of the source to use, rising; None for all.

    >>> x = InputInfo("x", np.dtype("float32"), (None,))
    >>> batches = Batches([np.float32([i]) for i in range(5)], [x], count=5)
    >>> odd = batches.subset([1, 3])
    >>> odd.count, [feed["x"].item() for feed in odd], [feed["x"].item() for feed in odd.first(1)]
    (2, [1.0, 3.0], [1.0])
    >>> len(list(batches.hashed())), batches.fingerprint()[:8]
    (5, 'b263a551')
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
        """Some of these batches; a pass over them reads no others of a file, directory or list.

        Args:
            numbers: which ones, rising from 0.

        Raises:
            SpecError: the data are an iterator, which can be read once.
        """
        if not self.is_repeatable:
            raise SpecError("data is an iterator, whose batches cannot be chosen: give a list, a file or a directory")
        chosen = numbers if self.numbers is None else [self.numbers[number] for number in numbers]
        return Batches(self._source, self.inputs, name=self._name, numbers=chosen)

    def first(self, count: int) -> "Batches":
        """The first batches, all where there are fewer or ``count`` is larger.

        Raises:
            SpecError: how many batches there are is not known.
        """
        if self.count is None:
            raise SpecError("the number of batches is not known: give a list, a file or a directory")
        return self.subset(range(min(count, self.count)))

    def first_samples(self, count: int) -> tuple[list[Feed], int]:
        """Batches that hold the first ``count`` samples along the first axis, and how many samples they hold.

        The last batch is cut where all inputs have as many samples and the model takes any number, and kept whole
        otherwise.

        >>> x = InputInfo("x", np.dtype("float32"), (None, 2))
        >>> feeds, count = open_batches([np.ones((4, 2), np.float32)] * 3, [x]).first_samples(6)
        >>> [feed["x"].shape for feed in feeds], count
        ([(4, 2), (2, 2)], 6)
        """
        feeds, total = list[Feed](), 0
        for feed in self:
            size = next((array.shape[0] for array in feed.values() if array.ndim), 1)
            is_cut = total + size > count and _can_cut(feed, self.inputs)
            feeds.append({name: array[: count - total] for name, array in feed.items()} if is_cut else feed)
            total += count - total if is_cut else size
            if total >= count:
                break
        return feeds, total

    def counted(self, progress: Callable[[int, int | None], None]) -> "Batches":
        """The same batches; each pass calls ``progress`` with the batches done and their number.

        >>> x = InputInfo("x", np.dtype("float32"), (None,))
        >>> len(list(open_batches([np.ones(2, np.float32)] * 2, [x]).counted(print)))
        1 2
        2 2
        2
        """
        counted = copy(self)
        counted._progress = progress
        return counted

    def check_first(self) -> Feed:
        """Check and return the first batch; the next pass still begins with it.

        Raises:
            SpecError: there is none.
            DtypeError, ShapeError, NaNError, RangeError: it does not fit the model.

        >>> Batches([], []).check_first()
        Traceback (most recent call last):
        ...
        detent.errors.SpecError: data holds no batches: give at least one
        """
        return self.peek(1)[0]

    def peek(self, count: int) -> list[Feed]:
        """Check and return the first batches, at most ``count``; the next pass still begins with them.

        >>> x = InputInfo("x", np.dtype("float32"), (None,))
        >>> len(Batches(iter([np.ones(2, np.float32)]), [x]).peek(4))
        1
        """
        rest = self._begun if self._begun is not None else self._start()
        batches = list(islice(rest, count))
        self._begun = chain(batches, rest)
        if not batches:
            raise SpecError(f"{self._name or 'data'} holds no batches: give at least one")
        return [self._check(batch, number) for number, batch in batches]

    def __iter__(self) -> Iterator[Feed]:
        rest, self._begun = self._begun if self._begun is not None else self._start(), None
        done = 0
        for done, (number, batch) in enumerate(rest, 1):
            yield self._check(batch, number)
            if self._progress is not None:
                self._progress(done, self.count)
        if not done:
            raise SpecError(f"{self._name or 'data'} holds no batches, perhaps because it was read before: give a list")

    def hashed(self) -> Iterator[Feed]:
        """Iterate over the batches, and hash them for ``fingerprint``."""
        digest = self._digest = hashlib.sha256()
        for feed in self:
            for name, array in sorted(feed.items()):
                digest.update(f"{name!r} {array.dtype} {array.shape}\n".encode())
                digest.update(_bytes_of(array))
            yield feed

    def fingerprint(self) -> str:
        """The sha256 of the names, types, shapes and elements that the last ``hashed`` pass has read.

        Raises:
            NotCalibratedError: no such pass has begun.

        >>> Batches([], []).fingerprint()
        Traceback (most recent call last):
        ...
        detent.errors.NotCalibratedError: the data have no fingerprint before they are read: iterate over hashed() first
        """
        if self._digest is None:
            raise NotCalibratedError("the data have no fingerprint before they are read: iterate over hashed() first")
        return str(self._digest.hexdigest())

    def _start(self) -> Iterator[tuple[int, Batch]]:
        if self._is_spent and not self.is_repeatable:
            raise SpecError(
                "data is an iterator and was read to its end: give a list, a file or a directory, which can be read "
                "again"
            )
        self._is_spent = True
        if self.numbers is None:
            return enumerate(self._source)
        return zip(self.numbers, _choose(self._source, self.numbers), strict=False)

    def _check(self, batch: Batch, number: int) -> Feed:
        where = f"{self._name} batch {number}".strip()
        given = _named(batch, self.inputs, where)
        feed = {}
        for info in self.inputs:
            array = _as_array(given[info.name], info, where)
            info.check(array.dtype, array.shape, where)
            _check_finite(array, info.name, where)
            feed[info.name] = array
        return feed


def _choose(source: Iterable[Batch], numbers: Sequence[int]) -> Iterator[Batch]:
    """Read some batches of a source, by seeking where it can seek."""
    if isinstance(source, _FileBatches):
        return source.read(numbers)
    if isinstance(source, Sequence):
        return (source[number] for number in numbers)
    chosen, end = {*numbers}, max(numbers, default=-1) + 1
    return (batch for number, batch in enumerate(islice(source, end)) if number in chosen)


def _can_cut(feed: Feed, inputs: Sequence[InputInfo]) -> bool:
    if len({array.shape[:1] for array in feed.values()}) != 1:
        return False
    return all(info.shape is None or (bool(info.shape) and info.shape[0] is None) for info in inputs)


def _bytes_of(array: Array) -> memoryview | bytes:
    if array.dtype == object or array.dtype.kind in "UST":
        return repr(array.tolist()).encode()
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data


def _named(batch: Batch, inputs: Sequence[InputInfo], where: str) -> Mapping[str, Any]:
    names = [info.name for info in inputs]
    if isinstance(batch, Mapping):
        _check_names(list(batch), names, where)
        return batch
    parts = batch if isinstance(batch, _LISTS) else (batch,)
    if len(parts) != len(names):
        raise SpecError(
            f"{where} has {len(parts)} arrays, the model takes {len(names)}: give a dict with {', '.join(names)}"
        )
    return dict(zip(names, parts, strict=True))


def _check_names(given: Sequence[Any], names: Sequence[str], where: str) -> None:
    unknown = [name for name in given if name not in names]
    if unknown:
        hint = closest(str(unknown[0]), names)
        raise SpecError(f"{where}: the model has no input {unknown[0]!r}{hint} it takes {', '.join(names)}")
    missing = [name for name in names if name not in given]
    if missing:
        raise SpecError(f"{where} holds nothing for the inputs {', '.join(missing)}: give arrays for all")


def _as_array(value: Any, info: InputInfo, where: str) -> Array:  # noqa: ANN401 - whatever callers give
    if not hasattr(value, "__array__"):
        raise DtypeError(
            f"{where}: input {info.name!r} is of type {type(value).__name__}, expected an array of {info.dtype}"
        )
    try:
        return np.asarray(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise DtypeError(f"{where}: input {info.name!r} cannot be made a NumPy array: {error}") from error


def _check_finite(array: Array, name: str, where: str) -> None:
    if not any(word in array.dtype.name for word in ("float", "complex")) or bool(np.isfinite(array).all()):
        return
    refuse_nan(f"{where}: input {name!r}", array, "mend the data, nothing can be calibrated with it")
    first = first_index(np.isinf(array))
    raise RangeError(f"{where}: input {name!r} holds an infinite element at index {first}: use a large finite one")


def open_batches(data: BatchSource | None, inputs: Sequence[InputInfo], batch_size: int | None = None) -> Batches:
    """Open any kind of data as batches, checked as far as possible without reading all of it.

    Args:
        data: see the table above; ``Batches`` for the same inputs are returned as they are.
        inputs: the inputs of the model.
        batch_size: samples of an .npz or .npy file per batch; None for as many as the model fixes, or 1.

    Raises:
        SpecError: no data, or names that are not the model's.
        DtypeError, ShapeError: arrays that do not have the model's types or shapes.
        FileFormatError: a damaged file.

    >>> x = InputInfo("x", np.dtype("float32"), (None, 2))
    >>> open_batches([np.zeros((1, 2))], [x])
    Traceback (most recent call last):
    ...
    detent.errors.DtypeError: batch 0: input 'x' has dtype float64, the model takes float32: convert it first, \
for example x.astype('float32')
    """
    if data is None:
        raise SpecError("data is None: give batches of the model's inputs, an .npz file or a directory of them")
    if isinstance(data, Batches) and data.inputs == tuple(inputs):
        return data  # checked against these inputs already
    if isinstance(data, str | PathLike):
        path = Path(data)
        if path.is_dir():
            return _open_folder(path, inputs)
        return _open_samples(ArrayFile(path), inputs, batch_size)
    if isinstance(data, Mapping) or hasattr(data, "__array__") or not isinstance(data, Iterable):
        raise SpecError(f"data is of type {type(data).__name__}, expected a list of batches: for one batch give [data]")
    is_repeatable = data.is_repeatable if isinstance(data, Batches) else not isinstance(data, Iterator)
    count = data.count if isinstance(data, Batches) else len(data) if isinstance(data, Sized) else None
    batches = Batches(data, inputs, is_repeatable=is_repeatable, count=count)
    batches.check_first()
    return batches


class _FileBatches:
    """Batches that a function reads from files: all of them, or those with some numbers."""

    def __init__(self, read: Callable[[Sequence[int] | None], Iterator[Batch]]) -> None:
        self.read = read

    def __iter__(self) -> Iterator[Batch]:
        return self.read(None)


def _open_folder(folder: Path, inputs: Sequence[InputInfo]) -> Batches:
    paths = sorted(path for path in folder.iterdir() if path.suffix in {".npz", ".npy"})
    if len({path.suffix for path in paths}) != 1:
        raise SpecError(f"{fspath(folder)} holds {len(paths)} files of NumPy: give it .npz files, or .npy files")
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

    return Batches(_FileBatches(read), inputs, count=len(files), name=fspath(folder))


def _open_samples(file: ArrayFile, inputs: Sequence[InputInfo], batch_size: int | None) -> Batches:
    where = fspath(file.path)
    names = _names_in(file, inputs)
    headers = {info.name: file.headers[names[info.name]] for info in inputs}
    lengths = {name: header.shape[0] if header.shape else 0 for name, header in headers.items()}
    length = min(lengths.values(), default=0)
    if not length or max(lengths.values()) != length:
        raise ShapeError(f"{where} holds {lengths} samples: the first axes of all arrays must be equal, and not 0")
    size = _batch_size(inputs, batch_size, length, where)
    for info in inputs:
        header = headers[info.name]
        info.check(header.dtype.newbyteorder("="), (size, *header.shape[1:]), where)

    def read(numbers: Sequence[int] | None) -> Iterator[Batch]:
        for part in file.slices(size, numbers):
            yield {info.name: part[names[info.name]] for info in inputs}

    return Batches(_FileBatches(read), inputs, count=-(-length // size), name=where)


def _batch_size(inputs: Sequence[InputInfo], wanted: int | None, length: int, where: str) -> int:
    """How many samples a batch has: what the model fixes, else what is asked for, else 1."""
    fixed = {info.shape[0] if info.shape else 0 for info in inputs if info.shape is not None} - {None}
    if len(fixed) > 1 or 0 in fixed:
        raise ShapeError(
            f"{where}: the model's inputs have no first axis in common, so that samples cannot be told: "
            "give a folder with one .npz per batch"
        )
    size = next((int(size) for size in fixed if size), wanted or 1)
    if wanted not in {None, size} or size < 1:
        raise ShapeError(f"{where}: batches of {wanted} samples were asked for, the model takes {size}")
    if fixed and length % size:
        raise ShapeError(f"{where} holds {length} samples, the model takes {size} at a time: leave {length % size} out")
    return size


def _names_in(file: ArrayFile, inputs: Sequence[InputInfo]) -> dict[str, str]:
    """The names of the inputs' arrays in a file."""
    names, found, where = [info.name for info in inputs], list(file.headers), fspath(file.path)
    unnamed = [""] if file.path.suffix == ".npy" else [f"arr_{i}" for i in range(len(names))]
    if {*found} != {*names} and sorted(found) == sorted(unnamed) and len(found) == len(names):
        return dict(zip(names, unnamed, strict=True))
    if found == [""]:
        raise FileFormatError(f"{where} holds one array, the model takes {', '.join(names)}: use .npz files")
    _check_names(found, names, where)
    return dict(zip(names, names, strict=True))
