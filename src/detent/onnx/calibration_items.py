"""Calibration on an executor: workers observe parts of the data, and the driver merges the observers.

Two maps over the batches:

- A survey reads each batch and returns hashes, from which the driver chooses the samples of the accuracy passes.
- Calibration runs the model on each batch once, on one worker, and returns the state of the observers. Layers in
  subgraphs need one more run.

Observers count values, so merging their states in any order gives the bits of one process. The driver merges them in
the order of the data, and saves the merged state to the resume file. So a run that is interrupted can be resumed with
another number of workers, or without an executor. (The observers of recipes do not depend on the order of the data;
moving averages, which do, are not among them.)
"""

import hashlib
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from os import PathLike
from threading import Lock
from typing import Any, NamedTuple

from numpy.typing import NDArray
from onnx import ModelProto

from detent.error_places import at
from detent.errors import WorkerError
from detent.observers import Observer
from detent.observers.passes import ProgressBar, ResumableRun, batch_checksum, check_observed, reporter
from detent.onnx.quality_warnings import DataSummary
from detent.onnx.samples import BatchFacts
from detent.onnx.subgraph_ranges import batch_ranges, merged_ranges
from detent.onnx.tensor_stream import TensorStream
from detent.onnx_model.batches import Batches, digest_of
from detent.onnx_model.sessions import Recorder
from detent.onnx_model.workspace import BatchPart, Workspace, read_model, runtime_environment
from detent.rule import get_observer_spec
from detent.work_items import FileStamp, run_items, worker_name

__all__ = ["Survey", "observe_on_executor", "subgraph_ranges_on_executor", "survey_data"]

_log = logging.getLogger(__name__)

Feed = dict[str, NDArray[Any]]
Progress = bool | Callable[[int, int | None], object]
MAX_ITEM_BATCHES = 64  # items are small enough to resume in the middle
SESSIONS_KEPT = 2  # by a worker
_lock = Lock()


@dataclass(frozen=True)
class Survey:
    """Facts about all batches: hashes, number of samples and ranges of inputs."""

    facts: tuple[BatchFacts, ...]
    summary: DataSummary

    @property
    def fingerprint(self) -> str:
        """The SHA-256 that ``Batches.fingerprint`` returns after a pass over the data."""
        digest = hashlib.sha256()
        for fact in self.facts:
            digest.update(fact.digest)
        return digest.hexdigest()


class _SurveyItem(NamedTuple):
    model: FileStamp
    part: BatchPart


def _survey(item: _SurveyItem) -> tuple[list[BatchFacts], DataSummary]:
    """Read some batches in a worker; return their hashes, and their ranges."""
    batches, summary, facts = item.part.open(read_model(item.model)), DataSummary(), []
    for feed in batches:
        summary.add(feed)
        facts.append(BatchFacts.of(feed, batches.inputs))
    return facts, summary


def survey_data(workspace: Workspace, model: FileStamp, batches: Batches) -> Survey:
    """Read all batches on the workers."""
    facts, summary = list[BatchFacts](), DataSummary()
    items = [_SurveyItem(model, part) for part in workspace.parts(batches, MAX_ITEM_BATCHES)]
    for some, each in run_items(workspace.executor, _survey, items, runtime_environment):
        facts += some
        summary.merge(each)
    return Survey(tuple(facts), summary)


class _ObserveItem(NamedTuple):
    """Batches to observe. ``first`` is the position of the first one, ``digests`` are the hashes of the survey."""

    model: FileStamp
    part: BatchPart
    first: int
    digests: tuple[bytes, ...]
    observers: tuple[tuple[str, str], ...]  # tensor names, and observers as text
    has_checksum: bool


def _observe(item: _ObserveItem) -> tuple[dict[str, bytes], int]:
    """Observe some batches in a worker; return the observers' states, and a checksum of the last batch."""
    model = read_model(item.model)
    observers = {name: get_observer_spec(text).make() for name, text in item.observers}
    feeds, names = _checked(item, model), tuple(observers)
    with _lock:  # in a pool of threads, several items may need the first session
        recorder = _recorder(item.model, names)
    stream = TensorStream(model, list(names), feeds, observers, len(item.digests), item.first, recorder)
    checksum = 0
    for number, tensors in enumerate(stream, 1):
        for name, observer in observers.items():
            with at("tensor", name):
                observer.observe(tensors[name])
        if item.has_checksum and number == len(item.digests):
            checksum = batch_checksum(tensors, observers, is_single=False)
    return {name: observer.to_bytes() for name, observer in observers.items()}, checksum


@lru_cache(maxsize=SESSIONS_KEPT)
def _recorder(stamp: FileStamp, names: tuple[str, ...]) -> Recorder:
    return Recorder(read_model(stamp), names, threads=1)


def _checked(item: _ObserveItem, model: ModelProto) -> Iterator[Feed]:
    """Yield the batches of an item, and check that they are those of the survey."""
    for number, (feed, digest) in enumerate(zip(item.part.open(model), item.digests, strict=True), item.first):
        seen = digest_of(feed)
        if seen != digest:
            raise WorkerError(
                f"worker {worker_name()} reads other data than the worker before it: batch {number} of "
                f"{item.part.files.path} has SHA-256 {seen.hex()[:12]}..., expected {digest.hex()[:12]}...; give all "
                "nodes the same files"
            )
        yield feed


@dataclass(frozen=True)
class _Pass:
    """One pass over the data: makes the items that observe some tensors."""

    workspace: Workspace
    model: FileStamp
    batches: Batches
    survey: Survey
    observers: tuple[tuple[str, str], ...]
    has_checksum: bool

    def items(self, first: int, count: int) -> list[_ObserveItem]:
        """Return the items of ``count`` batches from position ``first`` on."""
        chosen = self.batches.subset(range(first, first + count))
        items = []
        for part in self.workspace.parts(chosen, MAX_ITEM_BATCHES):
            stop = first + len(part.numbers)
            digests = tuple(fact.digest for fact in self.survey.facts[first:stop])
            items.append(_ObserveItem(self.model, part, first, digests, self.observers, self.has_checksum))
            first = stop
        return items

    def run(self, items: Sequence[_ObserveItem]) -> Iterator[tuple[dict[str, bytes], int]]:
        """Run items on the workers; yield the states of the observers, and the checksum of the last batch."""
        return run_items(self.workspace.executor, _observe, items, runtime_environment)

    def check_resumed(self, resumed: ResumableRun) -> None:
        """Check that the data have the batches of a resume file; a worker reads the last one."""
        count = resumed.saved.batches
        resumed.check_count(len(self.survey.facts))
        if count:
            ((_, checksum),) = self.run(self.items(count - 1, 1))
            resumed.check_mark(checksum)


def observe_on_executor(
    workspace: Workspace,
    model: FileStamp,
    batches: Batches,
    survey: Survey,
    observers: Mapping[str, Observer],
    specs: Mapping[str, str],
    progress: Progress,
    resume_file: str | PathLike[str] | None,
) -> None:
    """Observe all batches on the workers, and merge the results into ``observers``.

    ``specs`` has the text of each observer, by tensor name.
    """
    total, described = len(survey.facts), tuple((name, specs[name]) for name in observers)
    with ResumableRun(resume_file, observers) as resumed:
        one_pass = _Pass(workspace, model, batches, survey, described, resumed.has_file)
        one_pass.check_resumed(resumed)
        report = reporter(progress, "calibrating", "batches", resumed.saved.batches)
        items = one_pass.items(resumed.saved.batches, total - resumed.saved.batches)
        for item, (states, checksum) in zip(items, one_pass.run(items), strict=True):
            parts = {name: type(each).from_bytes(states[name]) for name, each in observers.items()}
            with resumed.update():
                for name, observer in observers.items():
                    observer.merge(parts[name])
            done = item.first + len(item.digests)
            resumed.advance(done, checksum)
            report(done, total)
    if isinstance(report, ProgressBar):
        report.close()
    check_observed(observers)


class _SubgraphItem(NamedTuple):
    """Batches on which the inputs of layers in subgraphs are observed."""

    model: FileStamp
    part: BatchPart
    layers: tuple[str, ...]


def _observe_subgraphs(item: _SubgraphItem) -> dict[str, tuple[float, float]]:
    """Observe some batches in a worker."""
    model = read_model(item.model)
    return batch_ranges(model, item.layers, item.part.open(model))


def subgraph_ranges_on_executor(
    workspace: Workspace, model: ModelProto, layers: Iterable[str], batches: Batches
) -> dict[str, tuple[float, float]]:
    """Do the work of ``subgraph_ranges.observe_ranges`` on the workers."""
    stamp, names = workspace.add_model(model), tuple(layers)
    items = [_SubgraphItem(stamp, part, names) for part in workspace.parts(batches, MAX_ITEM_BATCHES)]
    return merged_ranges(run_items(workspace.executor, _observe_subgraphs, items, runtime_environment))
