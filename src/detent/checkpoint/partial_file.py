"""PartialFile: an output file in the making, and the journal that says which rows it already has.

The partial file is ``.<name>.<job>.partial`` beside the target, with its final size from the start. ``<job>`` is a
random number, so a worker of an earlier job that still runs cannot write into the file. The journal,
``.<name>.journal``, has one JSON line that identifies the job and its partial file, and then a line per finished item:
tensor, first row, end row, CRC-32. A line is written after the data it describes were synced, so a job that was killed,
or whose machine lost power, goes on after the last line. When a job goes on, it compares every checksum with the data.

The journal is locked while a job runs: two jobs cannot write the same target.
"""

import errno
import json
import logging
import os
import re
import secrets
import shutil
import time
import zlib
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from detent.checkpoint.row_items import Bytes, ItemDone, RowItem, write_at
from detent.checkpoint_files.gguf_writer import GgufLayout
from detent.errors import DetentError, SpecError, WorkerError
from detent.storage import sync_directory
from detent.tables import bytes_text

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

__all__ = ["PartialFile"]

_log = logging.getLogger(__name__)
SECONDS_BETWEEN_SYNCS = 0.5  # work that is lost at most if the job is killed
SPARE_BYTES = 1 << 20  # for the journal and the directory
CHUNK_BYTES = 1 << 22
MAX_LINE = 1 << 16
Interval = tuple[int, int]


class _Journal:
    """The journal of a partial file: JSON lines, locked while the job runs."""

    def __init__(self, path: Path, target: Path) -> None:
        self.path, self._file = path, path.open("a+b")
        while not self._is_locked(target):  # another job removed the journal before it was locked
            self._file.close()
            self._file = path.open("a+b")

    def _is_locked(self, target: Path) -> bool:
        """Lock the file; return False if the file is no longer the journal."""
        if fcntl is None:
            return True
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            self._file.close()
            raise SpecError(f"another job is writing {target}: wait until it ends, or choose another output") from error
        except OSError:  # a file system without locks
            _log.debug("%s cannot be locked", self.path)
            return True
        try:
            return os.path.samestat(os.fstat(self._file.fileno()), self.path.stat())
        except FileNotFoundError:
            return False

    def read(self) -> list[dict[str, Any]]:
        """Return the lines up to the first that is damaged, such as one cut off by a crash; remove the rest."""
        self._file.seek(0)
        lines, end = [], 0
        while line := self._file.readline(MAX_LINE):
            try:
                value = json.loads(line) if line.endswith(b"\n") else None
            except ValueError:
                break
            if not isinstance(value, dict):
                break
            lines.append(value)
            end += len(line)
        self._file.truncate(end)
        return lines

    def clear(self) -> None:
        self._file.truncate(0)

    def append(self, lines: list[dict[str, Any]]) -> None:
        """Write lines, and sync them."""
        self._file.write(b"".join(json.dumps(line).encode() + b"\n" for line in lines))
        self._file.flush()
        os.fsync(self._file.fileno())

    @property
    def is_closed(self) -> bool:
        return self._file.closed

    def close(self) -> None:
        self._file.close()


class PartialFile:
    """Output file in the making; a context manager that keeps the file if the job is interrupted.

    Args:
        target: path of the finished file.
        layout: header, positions and size.
        identity: JSON-ready values that identify the job; a partial file of another job is discarded.
        resume: whether to go on with a partial file of the same job.

    Raises:
        SpecError: the disk has too little space, or another job writes the same target.
    """

    def __init__(self, target: Path, layout: GgufLayout, identity: dict[str, Any], *, resume: bool = True) -> None:
        self.target, self._layout, self._resume = target, layout, resume
        self._identity = {**identity, "layout": layout.digest, "nbytes": layout.nbytes}
        self._done: dict[int, list[Interval]] = {}
        self._unsynced: list[ItemDone] = []
        self._last_sync = time.monotonic()
        self.resumed_nbytes = 0
        self.warnings: tuple[str, ...] = ()  # of items that an earlier run has written
        self._journal = _Journal(target.with_name(f".{target.name}.journal"), target)
        try:
            lines = self._journal.read()
            self.path = self._recorded_path(lines) or self._new_path()
            if lines and self._is_same_job(lines[0]):
                self._go_on(lines[1:])
            else:
                self._start()
        except BaseException:
            self._journal.close()
            raise

    def __enter__(self) -> "PartialFile":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._journal.is_closed:
            return  # finished
        with suppress(OSError):
            self._sync()
        # The same input would fail again, so there is nothing to go on with.
        if not self._resume or (isinstance(error, DetentError) and not isinstance(error, WorkerError)):
            self._discard()
        self._journal.close()

    def _new_path(self) -> Path:
        return self.target.with_name(f".{self.target.name}.{secrets.token_hex(8)}.partial")

    def _recorded_path(self, lines: list[dict[str, Any]]) -> Path | None:
        """Return the path of the partial file that the journal names."""
        name = lines[0].get("partial") if lines else None
        pattern = rf"\.{re.escape(self.target.name)}\.[0-9a-f]{{16}}\.partial"
        return self.target.with_name(name) if isinstance(name, str) and re.fullmatch(pattern, name) else None

    def _is_same_job(self, first: dict[str, Any]) -> bool:
        if not self._resume or not self.path.is_file() or self.path.stat().st_size != self._layout.nbytes:
            return False
        if {key: value for key, value in first.items() if key != "partial"} != self._identity:
            _log.warning("%s belongs to another job: starting again", self.path)
            return False
        return True

    def _start(self) -> None:
        """Begin a new partial file: write the first line of the journal, reserve the space, write the header."""
        with suppress(FileNotFoundError):
            self.path.unlink()
        self._journal.clear()
        self.path = self._new_path()
        try:
            _check_space(self.target.parent, self._layout.nbytes)
            self._journal.append([{**self._identity, "partial": self.path.name}])
            with self.path.open("xb") as file:
                _reserve(file, self._layout.nbytes)
                file.write(self._layout.header)
                file.flush()
                os.fsync(file.fileno())
        except BaseException:
            self._discard()
            raise

    def _go_on(self, lines: list[dict[str, Any]]) -> None:
        """Accept items of an earlier run whose bytes have the recorded checksum."""
        accepted = []
        with self.path.open("rb") as file:
            if file.read(len(self._layout.header)) != self._layout.header:
                self._start()
                return
            for line in lines:
                done = _checked_line(line, self._layout)
                if done is not None and self._checksum(file, done) == done.checksum:
                    accepted.append(done)
        for done in accepted:
            self._mark(done)
        self.resumed_nbytes = sum(
            (high - low) * self._layout.tensors[index].row_bytes
            for index, intervals in self._done.items()
            for low, high in intervals
        )
        self.warnings = tuple(dict.fromkeys(done.warning for done in accepted if done.warning))
        _log.info("resuming %s: %s are done", self.path, bytes_text(self.resumed_nbytes))

    def _checksum(self, file: IO[bytes], done: ItemDone) -> int:
        tensor, checksum = self._layout.tensors[done.tensor], 0
        rest = (done.stop - done.start) * tensor.row_bytes
        file.seek(tensor.offset + done.start * tensor.row_bytes)
        while rest and (data := file.read(min(rest, CHUNK_BYTES))):
            checksum = zlib.crc32(data, checksum)
            rest -= len(data)
        return checksum

    def has(self, item: RowItem) -> bool:
        """Return whether an earlier run has written all rows of an item."""
        return any(low <= item.start and item.stop <= high for low, high in self._done.get(item.tensor, ()))

    def write(self, item: RowItem, data: Bytes) -> None:
        """Write the bytes of an item at their position."""
        try:
            write_at(self.path, item.offset, data)
        except OSError as error:
            raise disk_error(error, self.path) from error

    def record(self, done: ItemDone) -> None:
        """Note that the rows of an item are written; sync now and then."""
        self._unsynced.append(done)
        self._mark(done)
        if time.monotonic() - self._last_sync > SECONDS_BETWEEN_SYNCS:
            self._sync()

    def _mark(self, done: ItemDone) -> None:
        intervals = self._done.setdefault(done.tensor, [])
        intervals.append((done.start, done.stop))
        intervals.sort()
        merged = [intervals[0]]
        for low, high in intervals[1:]:
            if low <= merged[-1][1]:
                merged[-1] = merged[-1][0], max(high, merged[-1][1])
            else:
                merged.append((low, high))
        self._done[done.tensor] = merged

    def _sync(self) -> None:
        """Sync the data, then append the lines that describe them."""
        if self._unsynced:
            with self.path.open("r+b") as file:
                os.fsync(file.fileno())
            self._journal.append([_line(done) for done in self._unsynced])
        self._unsynced, self._last_sync = [], time.monotonic()

    def finish(self) -> None:
        """Check that all rows are written, sync, rename to the target, and remove the journal."""
        for index, tensor in enumerate(self._layout.tensors):
            if self._done.get(index) != [(0, tensor.rows)]:
                raise WorkerError(f"{self.path} lacks rows of tensor {tensor.name}: run the job again")
        with self.path.open("r+b") as file:
            os.fsync(file.fileno())
        self.path.replace(self.target)
        sync_directory(self.target.parent)
        with suppress(OSError):
            self._journal.path.unlink()
        self._journal.close()

    def _discard(self) -> None:
        for path in (self.path, self._journal.path):
            with suppress(OSError):
                path.unlink()


def disk_error(error: OSError, path: Path) -> DetentError | OSError:
    """Return a WorkerError that says how to go on if the disk is full, and other errors unchanged."""
    if error.errno not in {errno.ENOSPC, errno.EDQUOT}:
        return error
    return WorkerError(f"the disk is full: {path} is kept; free some space, then run the same job again to go on")


def _line(done: ItemDone) -> dict[str, Any]:
    line = {"tensor": done.tensor, "start": done.start, "stop": done.stop, "crc32": done.checksum}
    return line | ({"warning": done.warning} if done.warning else {})


def _checked_line(line: dict[str, Any], layout: GgufLayout) -> ItemDone | None:
    values = [line.get(key) for key in ("tensor", "start", "stop", "crc32")]
    if not all(type(value) is int for value in values):
        return None
    tensor, start, stop, checksum = (int(value) for value in values)  # type: ignore[arg-type]  # integers
    done = ItemDone(tensor, start, stop, checksum, str(line.get("warning", "")))
    if not 0 <= done.tensor < len(layout.tensors):
        return None
    return done if 0 <= done.start < done.stop <= layout.tensors[done.tensor].rows else None


def _check_space(directory: Path, needed: int) -> None:
    free = shutil.disk_usage(directory).free
    if free < needed + SPARE_BYTES:
        raise SpecError(
            f"the file needs {bytes_text(needed)}, but {directory} has only {bytes_text(free)} free: free some space, "
            "or choose another directory"
        )


def _reserve(file: IO[bytes], nbytes: int) -> None:
    """Give the file its size; reserve the blocks if the file system can, so that the disk cannot become full later."""
    reserve = getattr(os, "posix_fallocate", None)
    if reserve is not None:
        try:
            reserve(file.fileno(), 0, nbytes)
        except OSError as error:
            if error.errno == errno.ENOSPC:
                raise SpecError(
                    f"the file needs {bytes_text(nbytes)}, but the disk has less: free some space, or choose another "
                    "directory"
                ) from error
        else:
            return
    file.truncate(nbytes)
