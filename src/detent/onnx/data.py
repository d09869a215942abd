"""Data: batches of inputs from iterables, files and folders, checked against a model before anything runs.

=================== ===========================================================================================
given               batches
=================== ===========================================================================================
an iterable         each a dict of arrays by input name, a tuple of arrays in the inputs' order, or one array
an .npz, an .npy    one array per input, its first axis counts samples: cut to the model's batch size
a folder of .npz    one per batch, in the order of their names
a folder of .npy    the same for a model with one input
=================== ===========================================================================================

Arrays that ``numpy.savez`` named itself, arr_0, arr_1, ..., stand for the inputs in their order.
"""

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass
from itertools import chain, islice
from os import PathLike, fspath
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from onnx import ModelProto, helper

from detent.errors import (
    DtypeError,
    FileFormatError,
    NaNError,
    NotCalibratedError,
    RangeError,
    ShapeError,
    SpecError,
    UnsupportedError,
    closest,
)
from detent.onnx.arrays import ArrayFile

__all__ = ["BatchSource", "Batches", "InputInfo", "inputs_of", "open_batches"]

Array = NDArray[Any]
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
    """Checked inputs, batch by batch; ``open_batches`` makes one.

    Args:
        source: batches as they were given.
        inputs: of the model.
        is_repeatable: whether the source can be read again.
        count: how many batches there are, None where that is not known.
        name: what messages call the source, before the number of the batch, which counts from 0.

    >>> x = InputInfo("x", np.dtype("float32"), (None,))
    >>> batches = Batches([np.ones(2, np.float32)], [x])
    >>> [feed["x"].shape for feed in batches], batches.is_repeatable, batches.fingerprint()[:8]
    ([(2,)], True, 'a3c4818a')
    """

    def __init__(
        self,
        source: Iterable[Batch],
        inputs: Sequence[InputInfo],
        *,
        is_repeatable: bool = True,
        count: int | None = None,
        name: str = "",
    ) -> None:
        self.inputs = tuple(inputs)
        self.is_repeatable = is_repeatable
        self.count = count
        self._source, self._name = source, name
        self._begun: Iterator[Batch] | None = None
        self._is_spent = False
        self._digest: Any = None

    def check_first(self) -> Feed:
        """The first batch, checked now; the next pass begins with it all the same.

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
        """The first batches, at most so many, checked now; the next pass begins with them all the same.

        >>> x = InputInfo("x", np.dtype("float32"), (None,))
        >>> len(Batches(iter([np.ones(2, np.float32)]), [x]).peek(4))
        1
        """
        rest = self._begun if self._begun is not None else self._start()
        given = list(islice(rest, count))
        self._begun = chain(given, rest)
        if not given:
            raise SpecError(f"{self._name or 'data'} holds no batches: give at least one")
        return [self._check(batch, number) for number, batch in enumerate(given)]

    def __iter__(self) -> Iterator[Feed]:
        rest, self._begun = self._begun if self._begun is not None else self._start(), None
        self._digest = hashlib.sha256()
        number = 0
        for number, batch in enumerate(rest, 1):
            feed = self._check(batch, number - 1)
            for name, array in sorted(feed.items()):
                self._digest.update(f"{name!r} {array.dtype} {array.shape}\n".encode())
                self._digest.update(_bytes_of(array))
            yield feed
        if not number:
            raise SpecError(f"{self._name or 'data'} holds no batches, perhaps because it was read before: give a list")

    def _start(self) -> Iterator[Batch]:
        if self._is_spent and not self.is_repeatable:
            raise SpecError(
                "data is an iterator and was read to its end: give a list, a file or a folder, which can be read again"
            )
        self._is_spent = True
        return iter(self._source)

    def fingerprint(self) -> str:
        """The sha256 of the names, types, shapes and elements that the last pass has seen.

        Raises:
            NotCalibratedError: no pass has begun.

        >>> Batches([], []).fingerprint()
        Traceback (most recent call last):
        ...
        detent.errors.NotCalibratedError: the data have no fingerprint before they are read: iterate over them first
        """
        if self._digest is None:
            raise NotCalibratedError("the data have no fingerprint before they are read: iterate over them first")
        return str(self._digest.hexdigest())

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
    is_nan = np.isnan(array)
    count = int(is_nan.sum())
    if count:
        first = tuple(int(i) for i in np.argwhere(is_nan)[0])
        message = f"{where}: input {name!r} holds {count} NaN of {array.size} elements, the first at index {first}"
        raise NaNError(f"{message}: mend the data, nothing can be calibrated with it", count, first)
    first = tuple(int(i) for i in np.argwhere(np.isinf(array))[0])
    raise RangeError(f"{where}: input {name!r} holds an infinite element at index {first}: use a large finite one")


def open_batches(data: BatchSource | None, inputs: Sequence[InputInfo], batch_size: int | None = None) -> Batches:
    """Batches of any kind of data, checked as far as can be without reading all of it.

    Args:
        data: see the table above.
        inputs: of the model.
        batch_size: how many samples of an .npz or .npy file make a batch; None for as many as the model demands, or 1.

    Raises:
        SpecError: no data, or other names than the model's.
        DtypeError, ShapeError: arrays of other types or shapes than the model's.
        FileFormatError: a damaged file.

    >>> x = InputInfo("x", np.dtype("float32"), (None, 2))
    >>> open_batches([np.zeros((1, 2))], [x])
    Traceback (most recent call last):
    ...
    detent.errors.DtypeError: batch 0: input 'x' has dtype float64, the model takes float32: convert it first, \
for example x.astype('float32')
    """
    if data is None:
        raise SpecError("data is None: give batches of the model's inputs, an .npz file or a folder of them")
    if isinstance(data, str | PathLike):
        path = Path(data)
        if path.is_dir():
            return _open_folder(path, inputs)
        return _open_samples(ArrayFile(path), inputs, batch_size)
    if isinstance(data, Mapping) or hasattr(data, "__array__") or not isinstance(data, Iterable):
        raise SpecError(f"data is of type {type(data).__name__}, expected a list of batches: for one batch give [data]")
    count = len(data) if isinstance(data, Sized) else None
    batches = Batches(data, inputs, is_repeatable=not isinstance(data, Iterator), count=count)
    batches.check_first()
    return batches


class _Repeated:
    """What a function yields, once more with each pass."""

    def __init__(self, start: Callable[[], Iterator[Batch]]) -> None:
        self._start = start

    def __iter__(self) -> Iterator[Batch]:
        return self._start()


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

    def read() -> Iterator[Batch]:
        for file in files:
            found, names = file.read(), _names_in(file, inputs)
            yield {info.name: found[names[info.name]] for info in inputs}

    return Batches(_Repeated(read), inputs, count=len(files), name=fspath(folder))


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

    def read() -> Iterator[Batch]:
        for part in file.slices(size):
            yield {info.name: part[names[info.name]] for info in inputs}

    return Batches(_Repeated(read), inputs, count=-(-length // size), name=where)


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
