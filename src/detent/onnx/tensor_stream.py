"""Stream of the tensors that calibration observes, batch by batch; NaN is an error that names tensor and batch."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from numpy.typing import NDArray
from onnx import ModelProto

from detent.checks import refuse_nan
from detent.observers import Observer
from detent.onnx_model.sessions import Recorder

__all__ = ["TensorStream"]

Feed = dict[str, NDArray[Any]]
FLOAT_FAILS = "the float model computes NaN on this batch: fix the model, or remove the batch"


class TensorStream:
    """Iterable of dicts of tensors by name, one per batch; checks a batch for NaN after the caller has observed it.

    ``count`` is the number of batches, None if unknown. ``first`` is the number of the first batch, for messages.
    ``recorder`` runs the model; None makes a session for this stream.
    """

    def __init__(
        self,
        model: ModelProto,
        names: list[str],
        feeds: Iterable[Feed],
        observers: Mapping[str, Observer],
        count: int | None,
        first: int = 0,
        recorder: Recorder | None = None,
    ) -> None:
        self.model, self.names, self.feeds, self.observers = model, names, feeds, observers
        self.count, self.first, self.recorder = count, first, recorder

    def __len__(self) -> int:
        return self.count or 0

    def __iter__(self) -> Iterator[Feed]:
        order = {name: i for i, node in enumerate(self.model.graph.node) for name in node.output}
        names = sorted(self.names, key=lambda name: order.get(name, -1))
        before = {name: self.observers[name].nonfinite for name in names}
        recorder = self.recorder or Recorder(self.model, self.names)
        for number, tensors in enumerate(recorder.run(self.feeds), self.first):
            yield tensors
            for name, count in before.items():  # in graph order, so that the first tensor with NaN is named
                if self.observers[name].nonfinite > count:
                    refuse_nan(f"tensor {name!r} of batch {number}", tensors[name], FLOAT_FAILS)
                    before[name] = self.observers[name].nonfinite
            tensors.clear()  # free the tensors before the model runs on the next batch
