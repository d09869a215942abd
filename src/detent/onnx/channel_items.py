"""Equalization and SmoothQuant on an executor: each worker compares strengths for some of the tensors.

A worker runs the model on all samples and records its own tensors, as one process does with all tensors. So there is
one item per worker.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

from numpy.typing import NDArray
from onnx import ModelProto

from detent.onnx import equalization, smoothquant
from detent.onnx_model.workspace import Workspace, read_arrays, read_model, runtime_environment
from detent.work_items import FileStamp, run_items

__all__ = ["compare_equalization", "compare_smoothing"]

Feed = dict[str, NDArray[Any]]
ItemT = TypeVar("ItemT")
ResultT = TypeVar("ResultT")


class _Recorded(NamedTuple):
    """The model that records tensors, the samples, and the limit on the bytes of activations in memory."""

    model: FileStamp
    samples: tuple[FileStamp, ...]
    memory_budget: int | None

    @classmethod
    def of(
        cls, workspace: Workspace, model: ModelProto, samples: Sequence[Feed], memory_budget: int | None
    ) -> "_Recorded":
        stamps = tuple(workspace.add_arrays(sample) for sample in samples)
        return cls(workspace.add_model(model), stamps, memory_budget)

    def feeds(self) -> list[Feed]:
        return [read_arrays(stamp) for stamp in self.samples]


class _EqualizationItem(NamedTuple):
    recorded: _Recorded
    tensors: tuple[equalization.TensorToEqualize, ...]


def _compare_equalization(item: _EqualizationItem) -> list[equalization.Strength | None]:
    """Compare strengths in a worker."""
    model, budget = read_model(item.recorded.model), item.recorded.memory_budget
    return equalization.compare_strengths(model, item.tensors, item.recorded.feeds(), budget)


def compare_equalization(
    workspace: Workspace, model: ModelProto, samples: Sequence[Feed], memory_budget: int | None
) -> equalization.Compare:
    """Return a function that does the work of ``equalization.compare_strengths`` on the workers."""

    def compare(tensors: Sequence[equalization.TensorToEqualize]) -> Iterator[equalization.Strength | None]:
        recorded = _Recorded.of(workspace, model, samples, memory_budget)
        return _run(workspace, _compare_equalization, tensors, lambda part: _EqualizationItem(recorded, part))

    return compare


class _SmoothingItem(NamedTuple):
    recorded: _Recorded
    tensors: tuple[smoothquant.TensorToSmooth, ...]
    seed: int


def _compare_smoothing(item: _SmoothingItem) -> list[smoothquant.Strength | None]:
    """Compare strengths in a worker."""
    model, budget = read_model(item.recorded.model), item.recorded.memory_budget
    return smoothquant.compare_strengths(model, item.tensors, item.recorded.feeds(), item.seed, budget)


def compare_smoothing(
    workspace: Workspace, model: ModelProto, samples: Sequence[Feed], seed: int, memory_budget: int | None
) -> smoothquant.Compare:
    """Return a function that does the work of ``smoothquant.compare_strengths`` on the workers."""

    def compare(tensors: Sequence[smoothquant.TensorToSmooth]) -> Iterator[smoothquant.Strength | None]:
        recorded = _Recorded.of(workspace, model, samples, memory_budget)
        return _run(workspace, _compare_smoothing, tensors, lambda part: _SmoothingItem(recorded, part, seed))

    return compare


def _run(
    workspace: Workspace,
    function: Callable[[ItemT], list[ResultT]],
    tensors: Sequence[Any],
    item_of: Callable[[tuple[Any, ...]], ItemT],
) -> Iterator[ResultT]:
    """Run one item per worker; yield the results in the order of the tensors."""
    items = [item_of(tuple(tensors[each.start : each.stop])) for each in workspace.shares(len(tensors))]
    for results in run_items(workspace.executor, function, items, runtime_environment):
        yield from results
