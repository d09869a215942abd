"""Batches of model inputs from iterables, files and directories; a batch is read and checked when it is needed.

=================== ===========================================================================================
data                batches
=================== ===========================================================================================
an iterable         dicts of arrays by input name, tuples of arrays in input order, or single arrays
a callable          it returns such an iterable, and is called once per pass
a data loader       tensors, tuples or dicts of tensors; labels are kept apart
NumPy files         see ``array_data``
images              see ``image_data``
.wav files          see ``sound_data``
a .txt file         see ``text_data``
=================== ===========================================================================================

A tuple with one array more than the model has inputs ends with labels, as in (images, labels). So does a pair whose
first part is a tuple, list or dict. A dict has its labels under a name such as "labels". Labels are not passed to the
model; ``Batches.labels`` has them.
"""

import hashlib
import logging
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import replace
from itertools import chain, islice
from os import PathLike, fspath
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from detent.checks import first_index, known_length, refuse_nan
from detent.errors import DtypeError, FileFormatError, NotCalibratedError, RangeError, SpecError
from detent.onnx_model import array_data, image_data, sound_data, text_data
from detent.onnx_model.data_files import DataFiles, DataListing, FileBatches, list_files
from detent.onnx_model.model_inputs import Array, Feed, InputInfo, check_input_names

__all__ = ["KINDS", "BatchSource", "Batches", "DataKind", "can_cut", "digest_of", "open_batches", "samples_in"]

_log = logging.getLogger(__name__)

Batch = Mapping[str, Any] | Sequence[Any] | Any
BatchSource = Iterable[Batch] | Callable[[], Iterable[Batch]] | DataFiles | str | PathLike[str]
_LABELS = re.compile("labels?|targets?|y", re.IGNORECASE)  # names of labels in a dict


class DataKind(NamedTuple):
    """A kind of files: its name, the suffixes of its files, and the function that opens them."""

    name: str
    suffixes: frozenset[str]
    open: Callable[[DataFiles, DataListing, Sequence[InputInfo]], FileBatches]
    has_classes: bool = False  # files may be in sub-directories by class
    in_directories: bool = True


ARRAYS = DataKind(".npz or .npy files", array_data.SUFFIXES, array_data.open_arrays)
KINDS = (
    ARRAYS,
    DataKind("images", image_data.SUFFIXES, image_data.open_images, has_classes=True),
    DataKind(".wav files", sound_data.SUFFIXES, sound_data.open_sounds, has_classes=True),
    DataKind(".txt files", text_data.SUFFIXES, text_data.open_texts, in_directories=False),
)


def samples_in(feed: Mapping[str, Array]) -> int:
    """Return the number of samples in a batch: the size of the first axis of the first input that has axes."""
    return next((array.shape[0] for array in feed.values() if array.ndim), 1)


class Batches:
    """Batches of a model's inputs, each checked when it is read; made by ``open_batches``.

    ``count`` is the number of batches, None if the source has no length. Error messages begin with ``name`` and the
    index of the batch. ``numbers`` are the indices of the batches to use, in ascending order; None uses all batches.
    ``classes`` are the names of the classes of image and sound directories. ``files`` describes data in files, so that
    another process can open the same batches; None for data in memory.
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
        classes: Sequence[str] = (),
        note: str = "",
        files: DataFiles | None = None,
    ) -> None:
        self.inputs = tuple(inputs)
        self.files = files
        self.is_repeatable = is_repeatable
        self.count = count if numbers is None else len(numbers)
        self.numbers = numbers
        self.classes = tuple(classes)
        self._source, self._name = source, name
        # Subsets and copies share these two. Keys are the indices of batches in the source, and notes.
        self._labels: dict[int, Array] = {}
        self._notes: dict[str, None] = {}
        if note:
            self.add_note(note)
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
        subset = Batches(
            self._source, self.inputs, name=self._name, numbers=chosen, classes=self.classes, files=self.files
        )
        subset._labels, subset._notes = self._labels, self._notes
        return subset

    def with_count(self) -> "Batches":
        """Return these batches with a known ``count``; a source without a length is read once.

        Raises:
            SpecError: the source has no length and can be read only once.
        """
        if self.count is not None:
            return self
        if not self.is_repeatable:
            raise SpecError(
                "data cannot be split, because it can be read only once: pass a list, a file, a directory, or a "
                "callable that returns an iterator"
            )
        return self.subset(range(sum(1 for _ in self)))

    @property
    def labels(self) -> Array | None:
        """Labels of all samples in these batches, in order; None without labels.

        Labels of a directory are the numbers of its classes, known at once. Labels of other data are known after all
        batches were read.
        """
        numbers = self.numbers if self.numbers is not None else range(self.count or len(self._labels))
        if not numbers or not all(number in self._labels for number in numbers):
            return None
        return np.concatenate([self._labels[number] for number in numbers])

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes for the user: preprocessing, and conversions of types in the batches read so far."""
        return tuple(self._notes)

    def add_note(self, note: str) -> None:
        """Add a note for the user, unless it exists; subsets and copies of these batches have it, too."""
        if note not in self._notes:
            self._notes[note] = None
            _log.info("%s", note)

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
            digest.update(digest_of(feed))
            yield feed

    def fingerprint(self) -> str:
        """Return the SHA-256 of the digests of all batches that the last pass of ``hashed`` read."""
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
        by_name, labels = _by_name(batch, self.inputs, where)
        feed = {}
        for info in self.inputs:
            array = _as_array(by_name[info.name], info, where)
            info.check(array.dtype, array.shape, where)
            _check_finite(array, info.name, where)
            feed[info.name] = info.convert(array, where)
            if feed[info.name].dtype != array.dtype:
                verb = "rounded" if array.dtype.kind == "f" else "converted"
                self.add_note(f"data: input {info.name!r} {verb} from {array.dtype} to {info.dtype}")
        if labels is not None:
            self._keep_labels(labels, number, samples_in(feed))
        return feed

    def _keep_labels(self, labels: object, number: int, samples: int) -> None:
        """Keep labels that are an array with one element or row per sample."""
        array = _array_of(labels)
        if array is not None and array.shape[:1] == (samples,):
            self._labels[number] = array


def _choose(source: Iterable[Batch], numbers: Sequence[int]) -> Iterator[Batch]:
    """Yield the batches with the indices ``numbers``; a source with access by index reads only these batches."""
    if isinstance(source, FileBatches):
        return source.read(numbers)
    if isinstance(source, Sequence):
        return (source[number] for number in numbers)
    chosen, end = {*numbers}, max(numbers, default=-1) + 1
    return (batch for number, batch in enumerate(islice(source, end)) if number in chosen)


def can_cut(feed: Feed, inputs: Sequence[InputInfo]) -> bool:
    """Return whether a batch can be cut along the first axis, and the model accepts the parts."""
    lengths = {array.shape[:1] for array in feed.values()}
    return len(lengths) == 1 and all(info.shape is None or info.shape[:1] == (None,) for info in inputs)


def digest_of(feed: Mapping[str, Array]) -> bytes:
    """Return the SHA-256 of a batch: names, types, shapes and elements."""
    digest = hashlib.sha256()
    for name, array in sorted(feed.items()):
        digest.update(f"{name!r} {array.dtype} {array.shape}\n".encode())
        digest.update(_bytes_of(array))
    return digest.digest()


def _bytes_of(array: Array) -> memoryview | bytes:
    if array.dtype == object or array.dtype.kind in "UST":
        return repr(array.tolist()).encode()
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data


def _by_name(batch: Batch, inputs: Sequence[InputInfo], where: str) -> tuple[Mapping[str, Any], object]:
    """Return the arrays of a batch by input name, and its labels or None."""
    names = [info.name for info in inputs]
    if isinstance(batch, Mapping):
        extra = [name for name in batch if name not in names]
        has_labels = len(extra) == 1 and len(batch) == len(names) + 1 and _LABELS.fullmatch(str(extra[0]))
        check_input_names([name for name in batch if not has_labels or name in names], names, where)
        return batch, batch[extra[0]] if has_labels else None
    parts = batch if isinstance(batch, tuple | list) else (batch,)
    if len(parts) == 2 and isinstance(parts[0], Mapping | tuple | list):  # (inputs, labels)
        return _by_name(parts[0], inputs, where)[0], parts[1]
    if len(parts) not in {len(names), len(names) + 1}:
        raise SpecError(
            f"{where}: the number of arrays must be {len(names)}, or one more for labels, got {len(parts)}: "
            f"pass a dict with the keys {', '.join(names)}"
        )
    labels = parts[-1] if len(parts) > len(names) else None
    return dict(zip(names, parts, strict=False)), labels


def _array_of(value: object) -> Array | None:
    """Convert a tensor of any library to an array; return None if this is not possible."""
    if not hasattr(value, "__array__"):
        value = value.numpy() if callable(getattr(value, "numpy", None)) else value  # type: ignore[attr-defined]
    try:
        array = np.asarray(value) if hasattr(value, "__array__") else None
    except (TypeError, ValueError, RuntimeError):
        return None
    return array


def _as_array(value: Any, info: InputInfo, where: str) -> Array:  # noqa: ANN401 - callers may pass anything
    if not hasattr(value, "__array__") and callable(getattr(value, "numpy", None)):
        value = value.numpy()
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

    A ``Batches`` object for the same inputs is returned unchanged. ``batch_size`` applies to files; None uses the batch
    size that the model fixes, or 1 if the model accepts any batch size. Possible errors are SpecError, DtypeError,
    ShapeError, NaNError, RangeError, FileFormatError, and UnsupportedError if a package is missing.
    """
    if data is None:
        raise SpecError("data is missing: pass batches of the model's inputs, an .npz file or a directory")
    if isinstance(data, Batches):
        return data if data.inputs == tuple(inputs) else _reopened(data, inputs)
    if isinstance(data, str | PathLike | DataFiles):
        files = data if isinstance(data, DataFiles) else DataFiles(data)
        return _open_files(files if batch_size is None else replace(files, batch_size=batch_size), inputs)
    source = data if isinstance(data, Iterable) or not callable(data) else _Calls(data)
    if isinstance(source, Mapping) or hasattr(source, "__array__") or not isinstance(source, Iterable):
        raise SpecError(
            f"data must be a list of batches, a callable, a file or a directory, got {type(data).__name__}: for one "
            "batch, pass [data]"
        )
    count = known_length(source)
    batches = Batches(source, inputs, is_repeatable=not isinstance(source, Iterator), count=count)
    if type(getattr(source, "sampler", None)).__name__ == "RandomSampler":
        batches.add_note("data: the loader shuffles in every pass, so results vary: pass a loader with shuffle=False")
    batches.check_first()
    return batches


class _Calls:
    """Batches from a callable, which is called once per pass."""

    def __init__(self, function: Callable[[], Iterable[Batch]]) -> None:
        self._function = function

    def __iter__(self) -> Iterator[Batch]:
        batches = self._function()
        if not isinstance(batches, Iterable) or isinstance(batches, Mapping) or hasattr(batches, "__array__"):
            raise SpecError(
                f"data() returned {type(batches).__name__}, expected an iterator of batches: return iter([batch, ...])"
            )
        return iter(batches)


def _reopened(data: Batches, inputs: Sequence[InputInfo]) -> Batches:
    """Return batches that are checked against the inputs of another model."""
    batches = Batches(data, inputs, is_repeatable=data.is_repeatable, count=data.count, classes=data.classes)
    batches._notes = data._notes
    if data.labels is not None and data.count is not None:
        numbers = data.numbers if data.numbers is not None else range(data.count)
        batches._labels = {i: data._labels[number] for i, number in enumerate(numbers)}
    batches.check_first()
    return batches


def _open_files(files: DataFiles, inputs: Sequence[InputInfo]) -> Batches:
    """Open files with the module for their kind."""
    root = Path(files.path)
    kind = _kind_in(root) if root.is_dir() else _kind_of(root)
    opened = kind.open(files, _listing(root, kind), inputs)
    batches = Batches(
        opened, inputs, count=opened.count, name=opened.name, classes=opened.classes, note=opened.note, files=files
    )
    batches._labels = dict(enumerate(opened.labels))
    return batches


def _kind_of(path: Path) -> DataKind:
    if not path.is_file():
        raise FileFormatError(f"{fspath(path)}: there is no such file")
    return next((kind for kind in KINDS if path.suffix.lower() in kind.suffixes), ARRAYS)


def _kind_in(directory: Path) -> DataKind:
    """Return the kind of the files in a directory."""
    kinds = [kind for kind in KINDS if kind.in_directories and _listing(directory, kind).paths]
    if len(kinds) == 1:
        return kinds[0]
    names = [kind.name for kind in KINDS if kind.in_directories]
    if kinds:
        raise SpecError(
            f"{fspath(directory)} holds {' and '.join(kind.name for kind in kinds)}: expected files of one kind"
        )
    raise SpecError(f"{fspath(directory)} holds no data: expected {', '.join(names)}")


def _listing(root: Path, kind: DataKind) -> DataListing:
    if kind.has_classes or not root.is_dir():
        return list_files(root, kind.suffixes)
    return DataListing(root, tuple(sorted(path for path in root.iterdir() if path.suffix in kind.suffixes)))
