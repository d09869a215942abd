"""Work items: independent parts of a job, which run on any ``concurrent.futures.Executor``.

A heavy job is a map over items, followed by a merge. An item is a small description: paths of files, names, ranges of
numbers. Models and arrays do not pass through the executor; workers read them from the files that the item names. A
worker keeps what it has read, so the next item on the same files starts at once.

``run_items`` yields the results in the order of the items, whatever the number of workers. At most ``window`` items
are in flight, so the memory of the driver does not grow with the number of items. The driver is the process that
submits the items.

Results of ONNX Runtime depend on its version and on the CPU. So every item has the driver's ``Environment``, and a
worker with another environment refuses the item. In the same way, a worker refuses a file whose digest differs from
the digest that the driver saw under the same path (``FileStamp``).
"""

import hashlib
import logging
import os
import socket
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import BrokenExecutor, CancelledError, Executor, Future
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from pathlib import Path
from pickle import PicklingError
from typing import Any, Generic, TypeVar

from detent.error_places import place_of
from detent.errors import DetentError, SpecError, WorkerError

__all__ = ["Environment", "FileStamp", "WorkDone", "as_executor", "run_items", "worker_name"]

_log = logging.getLogger(__name__)

ItemT = TypeVar("ItemT")
ResultT = TypeVar("ResultT")
ITEMS_PER_WORKER = 4  # items in flight per worker: one runs, the others hide the latency of the executor
DEFAULT_WORKERS = 8  # if an executor does not say how many workers it has
CHUNK_BYTES = 1 << 20
SECONDS_TO_APPEAR = 5.0  # in which a worker must see a file that the driver has written
WorkDone = Callable[[int, str], object]  # f(items done, name of the worker that ran the last one)


@dataclass(frozen=True)
class Environment:
    """Facts about a process that change the bits of results, such as versions and the CPU level.

    ``facts`` are pairs of a name and a value.

    >>> driver, worker = Environment((("onnxruntime", "1.31.1"),)), Environment((("onnxruntime", "1.30.0"),))
    >>> driver.differences(worker)
    ['onnxruntime 1.30.0, but 1.31.1 on the driver']
    """

    facts: tuple[tuple[str, str], ...]

    def differences(self, worker: "Environment") -> list[str]:
        """List what differs between this environment, that of the driver, and the environment of a worker."""
        there = dict(worker.facts)
        return [
            f"{name} {there.get(name, 'missing')}, but {value} on the driver"
            for name, value in self.facts
            if there.get(name) != value
        ]


@dataclass(frozen=True)
class FileStamp:
    """A file that workers read: its path, its size in bytes and its SHA-256.

    ``parts`` are files that belong to it, such as the external data of a model.

    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp(), "a.npz")
    >>> _ = path.write_bytes(b"12")
    >>> stamp = FileStamp.of(path)
    >>> stamp.nbytes, stamp.check() == path
    (2, True)
    """

    path: str
    nbytes: int
    sha256: str
    parts: tuple["FileStamp", ...] = ()

    @classmethod
    def of(cls, path: str | os.PathLike[str], parts: Iterable[str | os.PathLike[str]] = ()) -> "FileStamp":
        """Read a file and its parts, and return the stamp."""
        absolute = Path(path).absolute()
        stamps = tuple(cls.of(part) for part in parts)
        return cls(os.fspath(absolute), absolute.stat().st_size, _sha256(absolute), stamps)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "FileStamp":
        """Return the stamp that ``dataclasses.asdict`` converted to plain values."""
        return cls(**{**values, "parts": tuple(cls.from_dict(part) for part in values["parts"])})

    def check(self) -> Path:
        """Return the path if this process sees the same file and parts; a file that was checked is not read again.

        A file that is missing or incomplete is awaited for some seconds: on network file systems, a new file appears
        on other nodes with a delay.

        Raises:
            WorkerError: there is no such file, or it has another digest.
        """
        for part in self.parts:
            part.check()
        self._wait()
        return self._checked()

    def _wait(self) -> None:
        """Wait until the file has its size, but not for long."""
        path, wait, end = Path(self.path), 0.05, time.monotonic() + SECONDS_TO_APPEAR
        while not _has_size(path, self.nbytes) and time.monotonic() < end:
            time.sleep(wait)
            wait = min(2 * wait, 1.0)
            with suppress(OSError):
                list(path.parent.iterdir())  # makes network file systems ask the server again

    def _checked(self) -> Path:
        path = Path(self.path)
        try:
            status = path.stat()
        except PermissionError as error:
            raise WorkerError(
                f"worker {worker_name()} may not read {self.path}: run workers as the user of the driver"
            ) from error
        except OSError as error:
            raise WorkerError(
                f"worker {worker_name()} cannot read {self.path} ({error.strerror}): use a directory that all nodes "
                "see, or name one as work_directory="
            ) from error
        seen = _cached_sha256(self.path, status.st_size, status.st_mtime_ns)
        if seen != self.sha256:
            raise WorkerError(
                f"worker {worker_name()} sees another file at {self.path}: SHA-256 {seen[:12]}..., but "
                f"{self.sha256[:12]}... on the driver; give all nodes the same file"
            )
        return path


def _has_size(path: Path, nbytes: int) -> bool:
    try:
        return path.stat().st_size == nbytes
    except FileNotFoundError:
        return False
    except OSError:
        return True  # waiting does not help, and reading the file says what is wrong


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


@lru_cache(maxsize=256)
def _cached_sha256(path: str, nbytes: int, mtime_ns: int) -> str:  # noqa: ARG001 - parts of the cache key
    return _sha256(Path(path))


def worker_name() -> str:
    """Return the name of this process: host and process id."""
    return f"{socket.gethostname()}:{os.getpid()}"


@dataclass(frozen=True)
class _Outcome(Generic[ResultT]):
    """Outcome of an item: a result or an error, and the name of the worker."""

    worker: str
    result: ResultT | None = None
    error: DetentError | None = None


def _run_item(
    function: Callable[[ItemT], ResultT],
    environment: Environment,
    here: Callable[[], Environment],
    item: ItemT,
    ticket: tuple[str, int],  # noqa: ARG001 - makes every call different
) -> _Outcome[ResultT]:
    """Run one item in a worker. Errors are returned, because executors cannot transport every exception.

    ``ticket`` is unique, because Dask takes two calls with equal arguments for one, and cancels both together.
    """
    name = worker_name()
    try:
        differences = environment.differences(here())
        if differences:
            raise WorkerError(f"worker {name} has {'; '.join(differences)}: give all nodes the same software and CPU")
        return _Outcome(name, function(item))
    except DetentError as error:
        return _Outcome(name, error=error)
    except Exception as error:  # noqa: BLE001 - passed on to the driver
        where = f" at {place}" if (place := place_of(error)) else ""
        return _Outcome(name, error=WorkerError(f"worker {name} failed{where} with {type(error).__name__}: {error}"))


def as_executor(executor: object) -> Executor:
    """Check that a value has the interface of ``concurrent.futures.Executor``.

    >>> as_executor(2)
    Traceback (most recent call last):
    ...
    detent.errors.SpecError: got executor=2, expected an object with the method submit, such as \
concurrent.futures.ProcessPoolExecutor(2)
    """
    if not callable(getattr(executor, "submit", None)):
        raise SpecError(
            f"got executor={executor!r}, expected an object with the method submit, such as "
            "concurrent.futures.ProcessPoolExecutor(2)"
        )
    return executor  # type: ignore[return-value]


def run_items(
    executor: Executor,
    function: Callable[[ItemT], ResultT],
    items: Iterable[ItemT],
    environment: Callable[[], Environment],
    *,
    window: int | None = None,
    on_done: WorkDone | None = None,
) -> Iterator[ResultT]:
    """Run ``function`` on all items; yield the results in the order of the items.

    Args:
        executor: an executor whose workers can import detent.
        function: a function of a module, so that workers can import it.
        items: small descriptions of the work; read as needed.
        environment: returns the environment of the calling process; a function of a module. An item runs only where
            the environment equals that of the driver.
        window: number of items in flight; None for 4 per worker.
        on_done: callback after each item.

    Raises:
        WorkerError: a worker died, is different from the driver, or does not see a file.
        DetentError: the error of the first item that failed. Items that were not started do not run.

    >>> from concurrent.futures import ThreadPoolExecutor
    >>> with ThreadPoolExecutor(2) as pool:
    ...     list(run_items(pool, len, ["a", "bb", ""], lambda: Environment(())))
    [1, 2, 0]
    """
    driver, rest, flying = environment(), enumerate(items), deque[Future[Any]]()
    run = uuid.uuid4().hex
    check = getattr(executor, "check_workers", None)  # of our own executors, which can ask all nodes at once
    if check is not None:
        check(environment)
    size = window if window is not None else ITEMS_PER_WORKER * workers_of(executor)

    def submit(count: int) -> None:
        for number, item in islice(rest, count):
            with _executor_errors(executor):
                flying.append(executor.submit(_run_item, function, driver, environment, item, (run, number)))

    done = 0
    try:
        submit(size)
        while flying:
            with _executor_errors(executor):
                outcome: _Outcome[ResultT] = flying[0].result()
            flying.popleft()
            if outcome.error is not None:
                raise outcome.error
            submit(1)
            done += 1
            if on_done is not None:
                on_done(done, outcome.worker)
            yield outcome.result  # type: ignore[misc]  # None only if the function returns None
    finally:
        for future in flying:
            future.cancel()


class _executor_errors:  # noqa: N801 - used as a context manager function
    """Context that converts the errors of an executor to WorkerError."""

    def __init__(self, executor: Executor) -> None:
        self._name = type(executor).__name__

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None or isinstance(error, DetentError) or not isinstance(error, Exception):
            return
        if isinstance(error, BrokenExecutor):
            raise WorkerError(
                f"a worker of {self._name} died, perhaps because memory ran out: run the job again with fewer workers; "
                "calibration goes on if it has a resume_file"
            ) from error
        if isinstance(error, CancelledError):
            raise WorkerError(f"{self._name} dropped the work: the executor was shut down") from error
        if isinstance(error, PicklingError | TypeError | AttributeError):
            raise WorkerError(f"{self._name} cannot send work to its workers: {_first_line(error)}") from error
        raise WorkerError(f"{self._name} failed with {type(error).__name__}: {_first_line(error)}") from error


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else "no message"


def workers_of(executor: Executor) -> int:
    """Return the number of workers of an executor, or a guess if the executor does not say it.

    The executor of a Dask client has no such number, but its client counts the threads of the cluster.

    >>> from concurrent.futures import ThreadPoolExecutor
    >>> workers_of(ThreadPoolExecutor(3))
    3
    """
    for name in ("workers", "num_workers", "_max_workers"):
        count = getattr(executor, name, None)
        if isinstance(count, int) and count > 0:
            return count
    threads = getattr(getattr(executor, "_client", None), "nthreads", None)
    return (sum(threads().values()) if callable(threads) else 0) or DEFAULT_WORKERS
