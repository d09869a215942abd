"""Workspace: files that the workers of a job read, and the descriptions of these files.

A job on an executor sends no models and no arrays. It writes the model, as it is before quantization, and its samples
to a directory that all workers see, and sends the paths. The directory is removed at the end of the job.

Calibration data in files are read by the workers themselves. Data in memory are written to the workspace first, but
only if the caller names its directory.
"""

import json
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
from numpy.typing import NDArray
from onnx import ModelProto

from detent import __version__
from detent.errors import SpecError
from detent.kernels import capabilities
from detent.onnx_model.batches import Batches, open_batches
from detent.onnx_model.data_files import DataFiles
from detent.onnx_model.files import load, save
from detent.onnx_model.model_inputs import InputInfo, inputs_of
from detent.onnx_model.targets import has_vnni
from detent.storage import write_atomic
from detent.work_items import Environment, FileStamp, as_executor, workers_of

__all__ = [
    "BatchPart",
    "Workspace",
    "open_workspace",
    "ranges",
    "read_arrays",
    "read_model",
    "runtime_environment",
    "write_arrays",
]

Feed = dict[str, NDArray[Any]]
MODELS_KEPT, DATA_KEPT, ARRAYS_KEPT = 2, 4, 64  # what a worker keeps in memory between items
PARTS_PER_WORKER = 8  # parts are small enough to share the work


@lru_cache(maxsize=1)
def runtime_environment() -> Environment:
    """Return what changes the bits of float results: versions of packages, and the CPU."""
    caps = capabilities()
    packages = (np, onnx, ort)
    return Environment(
        (
            ("detent", __version__),
            *((each.__name__, str(each.__version__)) for each in packages),
            ("machine", caps.machine),
            ("CPU level", caps.level),
            ("VNNI", str(has_vnni())),
        )
    )


@dataclass(frozen=True)
class BatchPart:
    """Some batches of data in files: how to open the files, and the numbers of the batches.

    ``job`` is the name of the job: a worker opens the files again for each job, because they may have changed.
    """

    files: DataFiles
    numbers: tuple[int, ...]
    job: str

    def open(self, model: ModelProto) -> Batches:
        """Open these batches as inputs of a model; the files stay open for the next part of the job."""
        return _opened(self.files, tuple(inputs_of(model)), self.job).subset(self.numbers)


@lru_cache(maxsize=DATA_KEPT)
def _opened(files: DataFiles, inputs: tuple[InputInfo, ...], job: str) -> Batches:  # noqa: ARG001 - the cache key
    return open_batches(files, inputs)


@lru_cache(maxsize=MODELS_KEPT)
def read_model(stamp: FileStamp) -> ModelProto:
    """Read a model of a workspace; workers keep it."""
    return load(stamp.check())


@lru_cache(maxsize=ARRAYS_KEPT)
def read_arrays(stamp: FileStamp) -> Feed:
    """Read the arrays of a sample; workers keep them."""
    with np.load(stamp.check(), allow_pickle=False) as arrays:
        return dict(arrays)


class Workspace:
    """An executor, and a directory for the files that its workers read; made by ``open_workspace``."""

    def __init__(self, executor: Executor, directory: Path, *, is_named: bool) -> None:
        self.executor, self.directory, self._is_named = executor, directory, is_named
        self._count = 0
        # By identity; the objects are kept alive.
        self._written: dict[int, tuple[object, FileStamp]] = {}
        self._spilled: dict[int, tuple[Batches, Batches]] = {}

    @property
    def job(self) -> str:
        """Name of the job, unique on this machine."""
        return self.directory.name

    def add_model(self, model: ModelProto) -> FileStamp:
        """Write a model, unless this object was written before; a model must not change after it was written."""
        return self._once(model, lambda: self.add_trial(model))

    def add_trial(self, model: ModelProto) -> FileStamp:
        """Write a model that is used once; ``remove`` removes it."""
        path = self._new(".onnx")
        save(model, path)
        return FileStamp.of(path, sorted(self.directory.glob(f"{path.name}.*")))  # external data

    def remove(self, stamp: FileStamp) -> None:
        """Remove a file that no item needs any more."""
        for each in (stamp, *stamp.parts):
            Path(each.path).unlink(missing_ok=True)

    def add_arrays(self, feed: Feed) -> FileStamp:
        """Write the arrays of a batch or a sample, unless this object was written before."""

        def write() -> FileStamp:
            path = self._new(".npz")
            write_arrays(path, feed)
            return FileStamp.of(path)

        return self._once(feed, write)

    def add_json(self, value: object) -> FileStamp:
        """Write plain values."""
        path = self._new(".json")
        write_atomic(path, json.dumps(value).encode())
        return FileStamp.of(path)

    def _once(self, value: object, write: Callable[[], FileStamp]) -> FileStamp:
        if id(value) not in self._written:
            self._written[id(value)] = value, write()
        return self._written[id(value)][1]

    def in_files(self, batches: Batches) -> Batches:
        """Return batches that workers can read; data in memory are written to the directory, if the caller named it.

        Raises:
            SpecError: the data are in memory, and the caller named no directory.
        """
        if id(batches) in self._spilled:
            return self._spilled[id(batches)][1]
        if batches.files is not None:
            path, tokenizer = Path(batches.files.path).absolute(), batches.files.tokenizer
            tokenizer = None if tokenizer is None else Path(tokenizer).absolute()
            batches.files = replace(batches.files, path=path, tokenizer=tokenizer)
            return batches
        if not self._is_named:
            raise SpecError(
                "data is in memory, but workers read files: pass a file or a directory as data, or name a directory "
                "that all workers see as work_directory=, to which the batches are written"
            )
        directory = self._new("-data")
        directory.mkdir()
        for number, feed in enumerate(batches):
            write_arrays(directory / f"batch-{number:09d}.npz", feed)
        spilled = open_batches(DataFiles(directory), batches.inputs)
        self._spilled[id(batches)] = batches, spilled
        return spilled

    def parts(self, batches: Batches, max_batches: int) -> list[BatchPart]:
        """Split batches in files into parts of at most ``max_batches``, 8 per worker if there are enough batches."""
        if batches.files is None:
            raise SpecError("data must be in files: call Workspace.in_files first")
        numbers = list(range(batches.count or 0) if batches.numbers is None else batches.numbers)
        share = -(-len(numbers) // (PARTS_PER_WORKER * workers_of(self.executor)))
        spans = ranges(len(numbers), max(1, min(share, max_batches)))
        return [BatchPart(batches.files, tuple(numbers[each.start : each.stop]), self.job) for each in spans]

    def shares(self, count: int) -> Sequence[range]:
        """Split ``count`` things into one range per worker."""
        return ranges(count, max(1, -(-count // workers_of(self.executor))))

    def _new(self, suffix: str) -> Path:
        self._count += 1
        return self.directory / f"{self._count:04d}{suffix}"


def write_arrays(path: Path, feed: Feed) -> None:
    """Write arrays to an .npz file, and sync it, so that other nodes see the whole file."""
    unsupported = [name for name, array in feed.items() if array.dtype == object]
    if unsupported:
        raise SpecError(
            f"tensor {unsupported[0]!r} holds texts, which cannot be written for workers: pass data in files"
        )
    with path.open("wb") as file:
        np.savez(file, **feed)  # type: ignore[arg-type]  # the stubs confuse array names with allow_pickle
        file.flush()
        os.fsync(file.fileno())


@contextmanager
def open_workspace(
    executor: object, directory: str | PathLike[str] | None, model_path: Path | None
) -> Iterator[Workspace | None]:
    """Make a directory for the files of a job, and remove it at the end; yield None without an executor.

    Args:
        executor: None, or an executor.
        directory: the directory that the caller names; None for the directory of the model.
        model_path: the path of the model, None for a model in memory.

    Raises:
        SpecError: there is no directory, or no file can be written to it.
    """
    if executor is None:
        if directory is not None:
            raise SpecError("got work_directory= without executor=: it is used only by workers; omit it")
        yield None
        return
    checked = as_executor(executor)
    parent = Path(directory) if directory is not None else None if model_path is None else model_path.absolute().parent
    if parent is None:
        raise SpecError(
            "the model is in memory, but workers read files: pass its path, or name a directory that all workers see "
            "as work_directory="
        )
    try:
        # Workers may still read a file of an item that nobody waits for.
        temporary = tempfile.TemporaryDirectory(
            prefix=".detent-work-", dir=parent.absolute(), ignore_cleanup_errors=True
        )
    except OSError as error:
        raise SpecError(
            f"cannot write to {parent} ({error.strerror}): name another directory that all workers see as "
            "work_directory="
        ) from error
    with temporary as path:
        yield Workspace(checked, Path(path), is_named=directory is not None)


def ranges(count: int, size: int) -> Sequence[range]:
    """Split ``count`` batches into ranges of ``size`` batches.

    >>> ranges(5, 2)
    [range(0, 2), range(2, 4), range(4, 5)]
    """
    return [range(begin, min(begin + size, count)) for begin in range(0, count, size)]
