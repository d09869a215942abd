"""Level 2: the file beside its source from end to end, in each way to run it.

=================== ==========================================================================
GraphCheck          ONNX Runtime, the file as written or as optimized; codes and outputs
SessionCheck        ONNX Runtime with settings of its own; outputs
OpenVinoCheck       OpenVINO in its own process; outputs, as codes too where they are quantized
=================== ==========================================================================

Codes may differ here though every quantizer is right: another accumulation order changes the last bits of sums, biases
are rounded to the scale of integer sums, and a value next to a rounding boundary falls on its other side. Later layers
then start from different inputs.
"""

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from onnx import ModelProto

from detent.metrics import OutputComparison
from detent.onnx_model import make_session
from detent.onnx_model.graph import DEQUANTIZE, attribute_of, trace_back
from detent.onnx_model.qdq_reader import QuantizedGraph
from detent.onnx_model.sessions import Reading, ort_errors, written_name
from detent.verification.codes import steps_between
from detent.verification.openvino import OpenVino
from detent.verification.source import Reference
from detent.verification.verify_report import EndToEnd

__all__ = [
    "ORDER",
    "CurrentBatch",
    "FusedCodes",
    "GraphCheck",
    "OpenVinoCheck",
    "OutputCheck",
    "SessionCheck",
    "find_codes",
]

Array = NDArray[Any]
ORDER = "sums in another order"
MOVED = "move values across the boundary of two codes"
LATER = ", and later layers start from what differs"
_FUSED = ("Relu", "Clip")


class OutputCheck:
    """One way to run a file, beside its source; causes are what may move values, so that codes differ."""

    def __init__(self, names: Sequence[str], causes: Sequence[str] = (ORDER,)) -> None:
        self._outputs, self._causes = OutputComparison(names), tuple(causes)
        self._codes = [0, 0, 0]
        self._first: str | None = None
        self.notes = self._outputs.notes

    def add_outputs(self, expected: Sequence[Array], got: Sequence[Array]) -> None:
        """Add the outputs of a batch."""
        self._outputs.add(expected, got)

    def add_codes(self, node: str, expected: Array, got: Array) -> None:
        """Add the codes of a node for a batch."""
        if expected.shape != got.shape:
            self.notes[f"the codes of {node} have shape {got.shape}, expected {expected.shape}: not compared"] = None
            return
        if got.dtype.kind == "f" or expected.dtype.kind not in "iu":
            expected, got = expected.astype(np.float32), got.astype(np.float32)
        if expected.dtype != got.dtype:
            expected, got = expected.astype(np.float64), got.astype(np.float64)
        differing = int(np.count_nonzero(expected != got))
        steps = steps_between(expected, got) if differing else 0
        self._codes = [self._codes[0] + got.size, self._codes[1] + differing, max(self._codes[2], steps)]
        if differing and self._first is None:
            self._first = node

    def result(self) -> EndToEnd:
        """The metrics over all batches."""
        compared, differing, steps = self._codes
        cause = f"{', '.join(self._causes)}: they {MOVED}{LATER if steps > 1 else ''}" if differing else ""
        sqnr_db, agreement = self._outputs.sqnr_db, self._outputs.agreement
        return EndToEnd(compared, differing, steps, self._first, sqnr_db, agreement, cause)


@dataclass
class CurrentBatch:
    """The batch that runs now: what the source gives for it, and what the file as written gave."""

    reference: Reference = field(default_factory=lambda: Reference([]))
    codes: dict[str, Array] = field(default_factory=dict)  # of the file as written, by node
    outputs: list[Array] = field(default_factory=list)


class FusedCodes(NamedTuple):
    """A tensor of codes in an optimized graph, and whether its channels are its last axis."""

    tensor: str
    channels_last: bool


def find_codes(artifact: QuantizedGraph, optimized: ModelProto) -> dict[str, FusedCodes]:
    """Find the codes of QuantizeLinear nodes in the optimized graph, as far as they are still there, by node.

    Many keep their name. Convolutions with their channels last give theirs under the name of the convolution, with
    their axes in another order; they are found through the node they were: ``conv1``, now ``conv1_token_3``.
    """
    written = {name for node in optimized.graph.node for name in node.output}
    channels_last = {
        written_name(node.name): node.output[0]
        for node in optimized.graph.node
        if attribute_of(node, "channels_last", 0) and node.name
    }
    fused = {}
    for quantizer in artifact.quantize_nodes:
        if quantizer.codes in written:
            fused[quantizer.node] = FusedCodes(quantizer.codes, channels_last=False)
            continue
        maker = artifact.graph.producer(trace_back(quantizer.x, artifact.graph.producer, _FUSED))
        if maker is not None and maker.name in channels_last:
            fused[quantizer.node] = FusedCodes(channels_last[maker.name], channels_last=True)
    return fused


class GraphCheck(OutputCheck):
    """A graph of the file in ONNX Runtime, as written or optimized, beside the source."""

    def __init__(
        self,
        artifact: QuantizedGraph,
        batch: CurrentBatch,
        causes: Sequence[str],
        codes: Mapping[str, FusedCodes],
        *,
        is_written: bool = False,
    ) -> None:
        super().__init__(artifact.graph.outputs, causes)
        self._names, self._batch, self._where, self._is_written = artifact.graph.outputs, batch, codes, is_written
        self.keep: Set[str] = frozenset()  # nodes whose codes other graphs are compared with

    def readings(self) -> list[Reading]:
        """The codes of each node, then the outputs."""
        codes = [Reading((where.tensor,), partial(self._take_codes, node)) for node, where in self._where.items()]
        return [*codes, Reading(tuple(self._names), self._take_outputs)]

    def _take_codes(self, node: str, arrays: Mapping[str, Array]) -> None:
        where = self._where[node]
        codes = np.moveaxis(arrays[where.tensor], -1, 1) if where.channels_last else arrays[where.tensor]
        expected = self._batch.reference.codes.get(node)
        if expected is None and not self._is_written:
            expected = self._batch.codes.get(node)
        if expected is not None:
            self.add_codes(node, expected, codes)
        if self._is_written and node in self.keep:
            self._batch.codes[node] = codes

    def _take_outputs(self, arrays: Mapping[str, Array]) -> None:
        outputs = [arrays[name] for name in self._names]
        self.add_outputs(self._batch.reference.outputs, outputs)
        if self._is_written:
            self._batch.outputs = outputs


class SessionCheck(OutputCheck):
    """The outputs of the file in a session with settings of its own, beside the source's."""

    def __init__(self, artifact: QuantizedGraph, batch: CurrentBatch, config: Mapping[str, str]) -> None:
        super().__init__(artifact.graph.outputs)
        self._batch, self._session = batch, make_session(artifact.model, config=config)

    def run(self, feeds: Mapping[str, Array]) -> None:
        """Run a batch."""
        with ort_errors():
            outputs = self._session.run(None, dict(feeds))
        self.add_outputs(self._batch.reference.outputs, outputs)


class OpenVinoCheck(OutputCheck):
    """The outputs of the file in OpenVINO, beside the source's; as codes, beside those of ONNX Runtime."""

    def __init__(self, artifact: QuantizedGraph, batch: CurrentBatch) -> None:
        self._openvino = OpenVino(artifact.model)
        super().__init__(artifact.graph.outputs, [ORDER, "multiplication where ONNX divides"])
        self._graph, self._batch = artifact.graph, batch

    def start(self, feeds: Mapping[str, Array]) -> None:
        """Start to run a batch."""
        self._openvino.start(feeds)

    def compare(self) -> None:
        """Compare the outputs for the batch, after the file as written ran."""
        outputs = self._openvino.outputs()
        self.add_outputs(self._batch.reference.outputs, outputs)
        for name, here, there in zip(self._graph.outputs, self._batch.outputs, outputs, strict=True):
            scale = self._output_scale(name)
            if scale is not None:
                self.add_codes(name, np.rint(here / scale), np.rint(there / scale))

    def _output_scale(self, name: str) -> Array | None:
        """The scale of an output that is dequantized by one scale."""
        node, graph = self._graph.producer(name), self._graph
        if node is None or node.op_type != DEQUANTIZE or node.input[1] not in graph.constants:
            return None
        scale = graph.array(node.input[1])
        return scale.reshape(()) if scale.size == 1 else None

    def close(self) -> None:
        """End its process."""
        self._openvino.close()
