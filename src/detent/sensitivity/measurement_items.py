"""Sensitivity on an executor: workers run the model with some layers quantized, on some batches.

A ``RunnerRecord`` says how a worker makes the ``LayerRunner`` that the driver has: which files to read, and the options
of the measurement. A worker keeps its runner. An item is a candidate for some layers and a range of batches. The driver
adds up the noise of the batches in their order, so the result has the bits of one process.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import islice
from os import PathLike
from typing import NamedTuple

from detent.errors import SpecError, WorkerError
from detent.onnx.decisions import Decisions
from detent.onnx_model.batches import Batches, BatchSource, open_batches
from detent.onnx_model.data_files import DataFiles
from detent.onnx_model.files import LoadedModel
from detent.onnx_model.workspace import BatchPart, Workspace, ranges, read_model, runtime_environment
from detent.recipe import Recipe
from detent.sensitivity.bench import BatchNoise, OutputNoise, as_storage, as_widths
from detent.sensitivity.onnx_bench import OnnxLayerRunner, open_decisions, open_recipe
from detent.work_items import FileStamp, run_items, worker_name, workers_of

__all__ = ["RemoteRuns", "RunnerRecord"]

Options = Mapping[str, str]


class RunnerRecord(NamedTuple):
    """Description of a runner, from which a worker makes it.

    Attributes:
        model: file of the float model.
        data: the batches.
        digest: SHA-256 of the samples of the driver.
        samples: number of samples.
        target: name of the target.
        storage: how bytes are counted.
        skip: layers to leave out.
        recipe: the recipe as JSON; "" if decisions are measured.
        widths: candidates for weights; None measures the recipe.
        decisions: file with the decisions as JSON; None if a recipe is measured.
    """

    model: FileStamp
    data: BatchPart
    digest: str
    samples: int
    target: str
    storage: str
    skip: tuple[str, ...] = ()
    recipe: str = ""
    widths: tuple[str, ...] | None = None
    decisions: FileStamp | None = None

    @classmethod
    def of(  # noqa: PLR0913 - the fields of the record
        cls,
        workspace: Workspace,
        model: LoadedModel,
        data: BatchSource,
        runner: OnnxLayerRunner,
        recipe: Recipe | Decisions,
        *,
        samples: int,
        target: str,
        storage: str,
        skip: tuple[str, ...],
        widths: Sequence[str] | None,
    ) -> "RunnerRecord":
        """Describe a runner; a model, samples or decisions that are not in files are written to the workspace."""
        is_in_files = isinstance(data, str | PathLike | DataFiles) or (isinstance(data, Batches) and data.files)
        batches = workspace.in_files(open_batches(data if is_in_files else runner.feeds, model.inputs))
        if batches.files is None or batches.count is None:
            raise SpecError("data must be in files")
        numbers = tuple(range(batches.count) if batches.numbers is None else batches.numbers)
        part = BatchPart(batches.files, numbers, workspace.job)
        record = cls(workspace.add_model(model.proto), part, runner.digest, samples, target, storage, skip)
        if isinstance(recipe, Recipe):
            return record._replace(recipe=recipe.to_json(), widths=None if widths is None else tuple(widths))
        return record._replace(decisions=workspace.add_json(json.loads(recipe.to_json())))

    def open(self) -> OnnxLayerRunner:
        """Make the runner, and check its samples."""
        runner = self._open()
        if runner.digest != self.digest:
            raise WorkerError(
                f"worker {worker_name()} reads other data than the driver: {self.data.files.path} has SHA-256 "
                f"{runner.digest[:12]}..., expected {self.digest[:12]}...; give all nodes the same files"
            )
        return runner

    def _open(self) -> OnnxLayerRunner:
        path, storage = self.model.check(), as_storage(self.storage)
        data = self.data.open(read_model(self.model))
        if self.decisions is not None:
            decisions = Decisions.from_json(self.decisions.check().read_text(encoding="utf-8"))
            return open_decisions(path, data, decisions, self.samples, self.skip, storage)
        widths = None if self.widths is None else as_widths(self.widths)
        recipe = Recipe.from_json(self.recipe)
        return open_recipe(path, data, recipe, widths, self.samples, self.target, self.skip, storage)


class _RunItem(NamedTuple):
    runner: RunnerRecord
    options: tuple[tuple[str, str], ...]  # layers and their candidates
    start: int
    stop: int


@lru_cache(maxsize=1)
def _opened(record: RunnerRecord) -> tuple[OnnxLayerRunner, OutputNoise]:
    runner = record.open()
    return runner, OutputNoise(runner.names, runner.reference())


def _measure(item: _RunItem) -> list[BatchNoise]:
    """Measure the noise of some batches in a worker."""
    runner, output_noise = _opened(item.runner)
    outputs = runner.outputs(dict(item.options), range(item.start, item.stop))
    numbered = zip(range(item.start, item.stop), outputs, strict=True)
    return [output_noise.of_batch(number, each) for number, each in numbered]


class RemoteRuns:
    """Runs of the model on the workers of a workspace."""

    def __init__(self, workspace: Workspace, record: RunnerRecord) -> None:
        self._workspace, self._record = workspace, record

    def noises(self, candidates: Sequence[Options], output_noise: OutputNoise) -> Iterator[float]:
        """Yield the noise of each candidate. Few candidates are split by batches, so that every worker has work."""
        count, workers = output_noise.batches, workers_of(self._workspace.executor)
        size = count if len(candidates) >= workers else max(1, -(-count * len(candidates) // workers))
        spans = ranges(count, size)
        items = (
            _RunItem(self._record, tuple(options.items()), span.start, span.stop)
            for options in candidates
            for span in spans
        )
        results = run_items(self._workspace.executor, _measure, items, runtime_environment)
        for _ in candidates:
            parts = list(islice(results, len(spans)))
            yield output_noise.total(each for part in parts for each in part)
