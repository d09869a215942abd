"""Calibrate: feed batches to observers, with progress, a resume file and a memory budget."""

import json
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sized
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple, TextIO, TypeVar
from zlib import crc32

import numpy as np
from numpy.typing import ArrayLike

from detent import storage
from detent.checks import as_integer
from detent.codec import parse, reading, table
from detent.errors import DetentError, DtypeError, FileFormatError, NotCalibratedError, ShapeError, StateError
from detent.observers.observer import Observer

__all__ = ["budget", "calibrate"]

Batch = ArrayLike | Mapping[str, ArrayLike]
Progress = bool | Callable[[int, int | None], object]
Watching = TypeVar("Watching", Observer, Mapping[str, Observer])
VERSION = 1
METADATA = "detent.calibration"
ALONE = "x"  # the name of an observer that came without one
RESERVED = ("__metadata__", "total")
BAR_WIDTH, SECONDS_BETWEEN = 24, 0.1


def calibrate(
    batches: Iterable[Batch],
    observers: Watching,
    *,
    progress: Progress = True,
    resume_file: str | PathLike[str] | None = None,
    every: int = 100,
) -> Watching:
    """Feed every batch to the observers, which are changed and returned.

    The state is saved in ``resume_file`` after ``every`` batches, at the end, and on an interrupt. The next run with
    that file, fresh observers and the same batches resumes there and gives the same bits as an uninterrupted run.

    Args:
        batches: arrays for one observer, ``{name: array}`` for several.
        observers: one, or one per name; a batch may hold more names than are observed.
        progress: whether to show a bar on a terminal, or a function of the batches done and their total or None.
        resume_file: the file to save state in, and to resume from if it exists.
        every: batches from one save to the next.

    Raises:
        NotCalibratedError: there was no batch, or an observer has seen nothing finite.
        ShapeError: a batch lacks a name, or an array falls into other sets than those before it.
        FileFormatError: the resume file was saved for different observers or batches.

    >>> import numpy as np
    >>> from detent.observers import MinMax
    >>> calibrate([np.array([1.0]), np.array([-2.0])], MinMax()).range()
    Range(lo=array(-2.), hi=array(1.))
    """
    alone = isinstance(observers, Observer)
    named = _named(observers)
    step = as_integer("every", every, at_least=1)
    path = None if resume_file is None else Path(resume_file)
    saved = _load(path, named) if path is not None and path.exists() else _ResumeHeader(0, 0)
    total = len(batches) if isinstance(batches, Sized) else None
    report = reporter(progress, "calibrating", "batches", saved.batches)
    count, mark, is_complete = 0, saved.mark, True
    try:
        for count, batch in enumerate(batches, start=1):
            if count <= saved.batches:
                if count == saved.batches and _mark(batch, named, alone=alone) != saved.mark:
                    raise FileFormatError(f"batch {count} is not the one that {path} ends with: remove the file")
                continue
            is_complete = False
            _feed(count, batch, named, alone=alone)
            is_complete = True
            if path is not None:
                mark = _mark(batch, named, alone=alone)
                if count % step == 0:
                    _save(path, named, _ResumeHeader(count, mark))
            report(count, total)
    finally:
        # After a batch that only some have seen, the file stays as it was: the batch must not be seen twice.
        if path is not None and is_complete and count > saved.batches:
            _save(path, named, _ResumeHeader(count, mark))
    if isinstance(report, ProgressBar):
        report.close()
    if count < saved.batches:
        raise FileFormatError(f"{path} holds {saved.batches} batches and only {count} came: remove the file")
    if not count:
        raise NotCalibratedError("there was no batch to calibrate with: give at least one")
    for name, observer in named.items():
        try:
            Observer.range(observer)
        except NotCalibratedError as error:
            raise NotCalibratedError(f"{'' if alone else f'{name!r}: '}{error}") from error
    return observers


def _named(observers: object) -> Mapping[str, Observer]:
    if isinstance(observers, Observer):
        return {ALONE: observers}
    if not isinstance(observers, Mapping) or not all(isinstance(one, Observer) for one in observers.values()):
        raise DtypeError(f"observers are one observer or {{name: observer}}, got {observers!r}")
    for name in observers:
        if not isinstance(name, str) or not name or name in RESERVED:
            raise DtypeError(f"an observer's name is text other than {', '.join(RESERVED)}, got {name!r}")
    return observers


def _feed(number: int, batch: Batch, observers: Mapping[str, Observer], *, alone: bool) -> None:
    if not alone:
        if not isinstance(batch, Mapping):
            raise ShapeError(
                f"batch {number} is {type(batch).__name__}, expected {{name: array}} for {list(observers)!r}"
            )
        missing = [name for name in observers if name not in batch]
        if missing:
            raise ShapeError(f"batch {number} has no {missing[0]!r}, only {list(batch)!r}")
    for name, observer in observers.items():
        try:
            observer.observe(batch if alone else batch[name])  # type: ignore[arg-type, call-overload, index]
        except DetentError as error:
            raise type(error)(f"{'' if alone else f'{name!r} in '}batch {number}: {error}") from error


def _mark(batch: Batch, observers: Mapping[str, Observer], *, alone: bool) -> int:
    """A checksum of what the observers see of a batch."""
    checksum = 0
    for name in observers:
        array = np.ascontiguousarray(batch if alone else batch[name])  # type: ignore[call-overload, index]
        checksum = crc32(array.view(np.uint8).data if array.size else b"", checksum)
    return checksum


def budget(observers: Mapping[str, Observer], shapes: Mapping[str, tuple[int, ...]]) -> dict[str, int]:
    """How many bytes the observers can take at most, by name and as a ``"total"``; batches do not add to it.

    >>> from detent.observers import MinMax, Percentile
    >>> budget({"a": MinMax(), "b": Percentile()}, {"a": (8, 16), "b": (8, 16)})
    {'a': 16, 'b': 130640, 'total': 130656}
    """
    named = _named(observers)
    missing = [name for name in named if name not in shapes]
    if missing:
        raise ShapeError(f"no shape was given for {missing[0]!r}, only for {list(shapes)!r}")
    sizes = {name: observer.max_nbytes(shapes[name]) for name, observer in named.items()}
    return {**sizes, "total": sum(sizes.values())}


def reporter(
    progress: Callable[[int, int], object] | Progress | None, verb: str, unit: str, done: int = 0
) -> Callable[[int, int | None], object]:
    """A function of what is done and of the total: ``progress`` itself, a bar if it is True or None, or nothing."""
    if callable(progress):
        return progress  # type: ignore[return-value]  # callers that know the total always give it
    shown = (progress is None or progress) and sys.stderr.isatty()
    return ProgressBar(sys.stderr, verb, unit, done) if shown else lambda _done, _total: None


class ProgressBar:
    """A line on a terminal, written at most ten times a second, and ended once all is done."""

    def __init__(self, stream: TextIO, verb: str, unit: str, done: int) -> None:
        self.stream, self.verb, self.unit, self.before = stream, verb, unit, done
        self.start, self.last, self.is_open = time.monotonic(), 0.0, True

    def __call__(self, done: int, total: int | None) -> None:
        now = time.monotonic()
        if not self.is_open or (now - self.last < SECONDS_BETWEEN and done != total):
            return
        self.last, speed = now, (done - self.before) / max(now - self.start, 1e-9)
        filled = BAR_WIDTH * done // total if total else 0
        bar = f"[{'#' * filled}{'.' * (BAR_WIDTH - filled)}] {done}/{total}" if total else f"{done}"
        self.stream.write(f"\r{self.verb} {bar} {self.unit}, {speed:.1f}/s")
        self.stream.flush()
        if done == total:
            self.close()

    def close(self) -> None:
        """End the line, once."""
        if self.is_open:
            self.stream.write("\n")
            self.stream.flush()
        self.is_open = False


class _ResumeHeader(NamedTuple):
    batches: int
    mark: int  # the checksum of the last batch


def _save(path: Path, observers: Mapping[str, Observer], header: _ResumeHeader) -> None:
    arrays: dict[str, Any] = {
        name: np.frombuffer(observer.to_bytes(), np.uint8) for name, observer in observers.items()
    }
    metadata = json.dumps({"version": VERSION, **header._asdict()})
    storage.write_atomic(path, storage.dumps(arrays, {METADATA: metadata}))


def _load(path: Path, observers: Mapping[str, Observer]) -> _ResumeHeader:
    """Bring the observers to the state of the file."""
    arrays, metadata = storage.read(path)
    with reading(f"{path} is not a calibration resume file"):
        data = parse(metadata[METADATA], f"the entry {METADATA!r} of {path}")
        entries = table(data, f"the resume file {path}", _ResumeHeader._fields, version=VERSION)
        done = as_integer("batches", entries["batches"], at_least=1, error=FileFormatError)
        mark = as_integer("mark", entries["mark"], at_least=0, error=FileFormatError)
        if set(arrays) != set(observers):
            raise FileFormatError(f"{path} holds {sorted(arrays)!r}, the observers are {sorted(observers)!r}")
        saved = {name: type(observers[name]).from_bytes(arrays[name].tobytes()) for name in observers}
    for name, observer in observers.items():
        if not observer.is_like(saved[name]):
            raise FileFormatError(f"{path} holds {saved[name]!r} for {name!r}, not {observer!r}: use another file")
        if observer.count or observer.nonfinite:
            raise StateError(f"{name!r} has observed {observer.count} values: go on from {path} with a fresh observer")
    for name, observer in observers.items():
        observer.load_state_dict(saved[name].state_dict())
    return _ResumeHeader(done, mark)
