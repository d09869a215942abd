"""Outputs of models on an executor: workers run a model on some batches, and write its outputs to files.

The driver reads the outputs of all batches in the order of the data, because a metric needs all of them at once. The
files are removed after they are read.
"""

import os
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple
from uuid import uuid4

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray
from onnx import ModelProto

from detent.onnx_model.batches import Batches, samples_in
from detent.onnx_model.sessions import make_session, ort_errors
from detent.onnx_model.workspace import BatchPart, Workspace, read_model, runtime_environment, write_arrays
from detent.work_items import FileStamp, run_items

__all__ = ["BatchOutputs", "RemoteOutputs"]

Array = NDArray[Any]
MAX_ITEM_BATCHES = 16
SESSIONS_KEPT = 2  # by a worker


class BatchOutputs(NamedTuple):
    """Outputs of one batch, in the order of their names, and the number of samples in the batch."""

    arrays: Sequence[Array]
    samples: int


class _OutputItem(NamedTuple):
    """Batches to run a model on. Outputs are written to a new file in ``directory``."""

    model: FileStamp
    part: BatchPart
    names: tuple[str, ...]
    directory: str


class _Written(NamedTuple):
    """File with the outputs of an item, and the number of samples of each batch."""

    file: FileStamp
    samples: tuple[int, ...]


def _run(item: _OutputItem) -> _Written:
    """Run a model on some batches in a worker."""
    session, arrays, samples = _session(item.model), dict[str, Array](), list[int]()
    for number, feed in enumerate(item.part.open(read_model(item.model))):
        with ort_errors():
            outputs = session.run(list(item.names), feed)
        arrays |= {f"{number}.{place}": array for place, array in enumerate(outputs)}
        samples.append(samples_in(feed))
    path = Path(item.directory, f"outputs-{uuid4().hex}.npz")
    write_arrays(path, arrays)
    return _Written(FileStamp.of(path), tuple(samples))


@lru_cache(maxsize=SESSIONS_KEPT)
def _session(stamp: FileStamp) -> ort.InferenceSession:
    return make_session(read_model(stamp), threads=1)


class RemoteOutputs:
    """Runs of models on all batches by the workers of a workspace."""

    def __init__(self, workspace: Workspace, names: Sequence[str], batches: Batches) -> None:
        self._workspace, self._names = workspace, tuple(names)
        self._parts = workspace.parts(workspace.in_files(batches), MAX_ITEM_BATCHES)

    def run(self, models: Iterable[ModelProto]) -> Iterator[Iterator[BatchOutputs]]:
        """Yield the outputs of each model, batch by batch. The outputs of a model must be read before the next ones.

        While the outputs of a model are read, workers run the next models.
        """
        written: deque[FileStamp] = deque()
        results = run_items(self._workspace.executor, _run, self._items(models, written), runtime_environment)
        for first in results:
            yield self._outputs(first, results)
            self._workspace.remove(written.popleft())

    def _items(self, models: Iterable[ModelProto], written: deque[FileStamp]) -> Iterator[_OutputItem]:
        for model in models:
            stamp = self._workspace.add_trial(model)
            written.append(stamp)
            for part in self._parts:
                yield _OutputItem(stamp, part, self._names, os.fspath(self._workspace.directory))

    def _outputs(self, first: _Written, rest: Iterator[_Written]) -> Iterator[BatchOutputs]:
        each = first
        for number in range(len(self._parts)):
            each = next(rest) if number else first
            with np.load(each.file.check(), allow_pickle=False) as arrays:
                for batch, samples in enumerate(each.samples):
                    yield BatchOutputs([arrays[f"{batch}.{place}"] for place in range(len(self._names))], samples)
            self._workspace.remove(each.file)
