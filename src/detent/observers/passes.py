"""Calibration of observers: pass batches to observers, show progress, save and resume, and estimate memory."""

import json
import logging
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple, TextIO, TypeVar
from zlib import crc32

import numpy as np
from numpy.typing import ArrayLike

from detent import storage
from detent.checks import as_integer, known_length
from detent.codec import parse, reading, table
from detent.error_places import at
from detent.errors import DetentError, DtypeError, FileFormatError, NotCalibratedError, ShapeError, StateError
from detent.observers.observer import Observer
from detent.tables import counted

__all__ = [
    "ResumableRun",
    "ResumeHeader",
    "batch_checksum",
    "budget",
    "calibrate",
    "check_observed",
    "load_resume_file",
    "save_resume_file",
]

_log = logging.getLogger(__name__)

Batch = ArrayLike | Mapping[str, ArrayLike]
Progress = bool | Callable[[int, int | None], object]
Watching = TypeVar("Watching", Observer, Mapping[str, Observer])
VERSION = 1
METADATA = "detent.calibration"
UNNAMED = "x"  # the name of an unnamed observer in a resume file
RESERVED = ("__metadata__", "total")  # reserved names in a safetensors header and in the result of ``budget``
BAR_CHARS, SECONDS_BETWEEN_UPDATES = 24, 0.1
SECONDS_BETWEEN_SAVES = 1.0  # if a run does not count batches


def calibrate(
    batches: Iterable[Batch],
    observers: Watching,
    *,
    progress: Progress = True,
    resume_file: str | PathLike[str] | None = None,
    every: int = 100,
) -> Watching:
    """Update the observers in place with every batch, and return the observers.

    The observers' state is saved in ``resume_file`` at regular intervals, at the end, and on an interrupt. The
    next run with this file, new observers and the same batches resumes after the last saved batch. It gives the same
    bits as an uninterrupted run.

    Args:
        batches: for one observer, arrays; for several observers, dicts ``{name: array}``.
        observers: one observer, or a dict ``{name: observer}``; arrays with other names are ignored.
        progress: whether to show a progress bar on a terminal, or a callback f(done, total); total is None if unknown.
        resume_file: file in which the state is saved, and from which the run resumes if the file exists.
        every: number of batches between two saves.

    Raises:
        NotCalibratedError: there are no batches, or an observer has observed no finite value.
        ShapeError: a batch has no array for an observer, or the scale shape differs from earlier batches.
        FileFormatError: the resume file was saved for different observers or batches.

    >>> import numpy as np
    >>> from detent.observers import MinMax
    >>> calibrate([np.array([1.0]), np.array([-2.0])], MinMax()).range()
    Range(lo=array(-2.), hi=array(1.))
    """
    is_single = isinstance(observers, Observer)
    named = _named(observers)
    step = as_integer("every", every, at_least=1)
    count, total = 0, known_length(batches)
    with ResumableRun(resume_file, named, step) as run:
        report = reporter(progress, "calibrating", "batches", run.saved.batches)
        for count, batch in enumerate(batches, start=1):
            if count <= run.saved.batches:
                if count == run.saved.batches:
                    run.check_mark(batch_checksum(batch, named, is_single=is_single))
                continue
            with run.update():
                _feed(count, batch, named, is_single=is_single)
            run.advance(count, batch_checksum(batch, named, is_single=is_single) if run.has_file else 0)
            report(count, total)
    if isinstance(report, ProgressBar):
        report.close()
    run.check_count(count)
    if not count:
        raise NotCalibratedError("there are no calibration batches: pass at least one batch")
    _log.info("calibrated %s with %s", counted(len(named), "observer"), counted(count, "batch"))
    check_observed(named, is_single=is_single)
    return observers


def check_observed(observers: Mapping[str, Observer], *, is_single: bool = False) -> None:
    """Raise NotCalibratedError if an observer has observed no finite value."""
    for name, observer in observers.items():
        try:
            Observer.range(observer)
        except NotCalibratedError as error:
            raise NotCalibratedError(f"{'' if is_single else f'{name!r}: '}{error}") from error


def _named(observers: object) -> Mapping[str, Observer]:
    if isinstance(observers, Observer):
        return {UNNAMED: observers}
    if not isinstance(observers, Mapping) or not all(isinstance(each, Observer) for each in observers.values()):
        raise DtypeError(f"got {observers!r}, expected an observer or a dict {{name: observer}}")
    for name in observers:
        if not isinstance(name, str) or not name or name in RESERVED:
            raise DtypeError(
                f"got {name!r} as an observer's name, expected non-empty text other than {', '.join(RESERVED)}"
            )
    return observers


def _feed(number: int, batch: Batch, observers: Mapping[str, Observer], *, is_single: bool) -> None:
    if not is_single:
        if not isinstance(batch, Mapping):
            raise ShapeError(
                f"batch {number} is of type {type(batch).__name__}, expected a dict {{name: array}} for "
                f"{list(observers)!r}"
            )
        missing = [name for name in observers if name not in batch]
        if missing:
            raise ShapeError(
                f"batch {number} has the arrays {list(batch)!r}, but no array {missing[0]!r}: add an array for this "
                "observer, or remove the observer"
            )
    for name, observer in observers.items():
        try:
            with at("tensor", name):
                observer.observe(batch if is_single else batch[name])  # type: ignore[arg-type, call-overload, index]
        except DetentError as error:
            raise type(error)(f"{'' if is_single else f'{name!r} in '}batch {number}: {error}") from error


def batch_checksum(batch: Batch, observers: Iterable[str], *, is_single: bool) -> int:
    """Return a checksum of the observed arrays in a batch."""
    checksum = 0
    for name in observers:
        array = np.ascontiguousarray(batch if is_single else batch[name])  # type: ignore[call-overload, index]
        checksum = crc32(array.view(np.uint8).data if array.size else b"", checksum)
    return checksum


def budget(observers: Mapping[str, Observer], shapes: Mapping[str, tuple[int, ...]]) -> dict[str, int]:
    """Return the largest size in bytes of each observer's state, by name, and the sum as ``"total"``.

    >>> from detent.observers import MinMax, Percentile
    >>> budget({"a": MinMax(), "b": Percentile()}, {"a": (8, 16), "b": (8, 16)})
    {'a': 16, 'b': 130640, 'total': 130656}
    """
    named = _named(observers)
    missing = [name for name in named if name not in shapes]
    if missing:
        raise ShapeError(f"got shapes for {list(shapes)!r}, but no shape for observer {missing[0]!r}: add this shape")
    sizes = {name: observer.max_nbytes(shapes[name]) for name, observer in named.items()}
    return {**sizes, "total": sum(sizes.values())}


def reporter(
    progress: Callable[[int, int], object] | Progress | None, verb: str, unit: str, done: int = 0
) -> Callable[[int, int | None], object]:
    """Return the callback f(done, total) that reports progress.

    If ``progress`` is callable, it is the callback. If ``progress`` is True or None and stderr is a terminal, the
    callback shows a progress bar. Otherwise the callback does nothing.
    """
    if callable(progress):
        return progress  # type: ignore[return-value]  # callers that know the total always pass it
    shown = (progress is None or progress) and sys.stderr.isatty()
    return ProgressBar(sys.stderr, verb, unit, done) if shown else lambda _done, _total: None


class ProgressBar:
    """Progress on one line of a terminal, updated at most ten times a second."""

    def __init__(self, stream: TextIO, verb: str, unit: str, done: int) -> None:
        self.stream, self.verb, self.unit, self.before = stream, verb, unit, done
        self.start, self.last, self.is_open = time.monotonic(), 0.0, True

    def __call__(self, done: int, total: int | None) -> None:
        now = time.monotonic()
        if not self.is_open or (now - self.last < SECONDS_BETWEEN_UPDATES and done != total):
            return
        self.last, speed = now, (done - self.before) / max(now - self.start, 1e-9)
        filled = BAR_CHARS * done // total if total else 0
        bar = f"[{'#' * filled}{'.' * (BAR_CHARS - filled)}] {done}/{total}" if total else f"{done}"
        self.stream.write(f"\r{self.verb} {bar} {self.unit}, {speed:.1f}/s")
        self.stream.flush()
        if done == total:
            self.close()

    def close(self) -> None:
        """End the line of the terminal; later calls do nothing."""
        if self.is_open:
            self.stream.write("\n")
            self.stream.flush()
        self.is_open = False


class ResumeHeader(NamedTuple):
    """Header of a resume file: the number of observed batches, and a checksum of the last one."""

    batches: int
    mark: int  # checksum of the last batch


class ResumableRun:
    """Observers whose state is saved while batches are observed; a context.

    When the context ends, also by an error or an interrupt, the state is saved once more, except in the middle of
    ``update``: after resuming, some observers would observe the last batches twice.

    Attributes:
        saved: header of the resume file from which the observers were loaded; 0 batches without such a file.
    """

    def __init__(
        self, resume_file: str | PathLike[str] | None, observers: Mapping[str, Observer], every: int | None = None
    ) -> None:
        """Load the observers, if there is a resume file. ``every`` counts batches; None saves once a second."""
        self._path = None if resume_file is None else Path(resume_file)
        self._observers, self._every = observers, every
        self.saved = ResumeHeader(0, 0)
        if self._path is not None and self._path.exists():
            self.saved = load_resume_file(self._path, observers)
        self._header, self._is_complete, self._last_save = self.saved, True, time.monotonic()

    @property
    def has_file(self) -> bool:
        """Whether the state is saved, so that ``advance`` needs the checksum of the last batch."""
        return self._path is not None

    def __enter__(self) -> "ResumableRun":
        return self

    def __exit__(self, *_error: object) -> None:
        if self._is_complete and self._header != self.saved:
            self._save()

    @contextmanager
    def update(self) -> Iterator[None]:
        """Context in which the observers observe one or more batches; if it fails, the state is not saved."""
        self._is_complete = False
        yield
        self._is_complete = True

    def advance(self, batches: int, mark: int) -> None:
        """Note the number of observed batches and the checksum of the last one; save the state if it is time."""
        self._header = ResumeHeader(batches, mark)
        if self._every is not None:
            is_due = batches % self._every == 0
        else:
            is_due = time.monotonic() - self._last_save > SECONDS_BETWEEN_SAVES
        if is_due:
            self._save()

    def _save(self) -> None:
        if self._path is not None:
            save_resume_file(self._path, self._observers, self._header)
            self._last_save = time.monotonic()

    def check_mark(self, mark: int) -> None:
        """Check that the last saved batch is the same batch of the data."""
        if mark != self.saved.mark:
            raise FileFormatError(
                f"batch {self.saved.batches} differs from the last batch saved in {self._path}: pass the same batches, "
                "or delete the file"
            )

    def check_count(self, batches: int) -> None:
        """Check that the data have at least the batches that were saved."""
        if batches < self.saved.batches:
            raise FileFormatError(
                f"got {counted(batches, 'batch')}, but {self._path} was saved after "
                f"{counted(self.saved.batches, 'batch')}: pass the same batches, or delete the file"
            )


def save_resume_file(path: Path, observers: Mapping[str, Observer], header: ResumeHeader) -> None:
    """Write the observers' state to a resume file; an existing file is replaced atomically."""
    arrays: dict[str, Any] = {
        name: np.frombuffer(observer.to_bytes(), np.uint8) for name, observer in observers.items()
    }
    metadata = json.dumps({"version": VERSION, **header._asdict()})
    storage.write_atomic(path, storage.dumps(arrays, {METADATA: metadata}))


def load_resume_file(path: Path, observers: Mapping[str, Observer]) -> ResumeHeader:
    """Load the observers' state from the resume file, and return the header of the file."""
    arrays, metadata = storage.read(path)
    with reading(f"{path} is not a calibration resume file"):
        data = parse(metadata[METADATA], f"the entry {METADATA!r} of {path}")
        entries = table(data, f"the resume file {path}", ResumeHeader._fields, version=VERSION)
        done = as_integer("batches", entries["batches"], at_least=1, error=FileFormatError)
        mark = as_integer("mark", entries["mark"], at_least=0, error=FileFormatError)
        if set(arrays) != set(observers):
            raise FileFormatError(
                f"the file has observers {sorted(arrays)!r}, expected {sorted(observers)!r}: pass the same observers, "
                "or a new file"
            )
        saved = {name: type(observers[name]).from_bytes(arrays[name].tobytes()) for name in observers}
    for name, observer in observers.items():
        if not observer.is_like(saved[name]):
            raise FileFormatError(
                f"{path} has {saved[name]!r} for {name!r}, expected {observer!r}: pass the same observers, or a new "
                "file"
            )
        if observer.count or observer.nonfinite:
            raise StateError(f"observer {name!r} has already observed data: pass a new observer to resume from {path}")
    for name, observer in observers.items():
        observer.load_state_dict(saved[name].state_dict())
    _log.info("resuming after batch %d, from %s", done, path)
    return ResumeHeader(done, mark)
