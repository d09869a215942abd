"""Level 2: compares the file with its source end to end, in each runtime. Differences do not fail the verification.

=================== ==================================================================================
GraphCheck          compares codes and outputs of ONNX Runtime, with or without graph optimizations
SessionCheck        compares outputs of ONNX Runtime, run with an additional session option
OpenVinoCheck       compares outputs of OpenVINO in a subprocess, and codes of quantized outputs
=================== ==================================================================================

Codes may differ here although every quantizer is right. A different accumulation order changes the last bits of sums,
and biases are rounded to multiples of input scale times weight scale. A value next to a rounding boundary then gets the
neighboring code, and the difference propagates to later layers.
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
from detent.verification.codes import code_distance
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
ORDER = "the accumulation order differs"
EFFECT = "values next to a rounding boundary change by one code"
PROPAGATED = ", and the difference propagates to later layers"
_FUSED = ("Relu", "Clip")


class OutputCheck:
    """Comparison of the source with the file in one runtime; ``causes`` are reasons why codes may differ."""

    def __init__(self, names: Sequence[str], causes: Sequence[str] = (ORDER,)) -> None:
        self._outputs, self._causes = OutputComparison(names, ("in the source", "in the file")), tuple(causes)
        self._codes = [0, 0, 0]  # number compared, number that differ, largest difference
        self._first: str | None = None  # node
        self._code_notes: dict[str, None] = {}

    @property
    def notes(self) -> dict[str, None]:
        """Messages about outputs and codes that were not compared."""
        return {**self._outputs.notes, **self._code_notes}

    def add_outputs(self, expected: Sequence[Array], got: Sequence[Array]) -> None:
        """Add the outputs of the source (``expected``) and of the file (``got``) for a batch."""
        self._outputs.add(expected, got)

    def add_codes(self, node: str, expected: Array, got: Array) -> None:
        """Add the codes of a node in the source (``expected``) and in the file (``got``) for a batch."""
        if expected.shape != got.shape:
            self._code_notes[
                f"codes of {node} were not compared: their shape is {got.shape}, expected {expected.shape}"
            ] = None
            return
        if got.dtype.kind == "f" or expected.dtype.kind not in "iu":
            expected, got = expected.astype(np.float32), got.astype(np.float32)
        if expected.dtype != got.dtype:
            expected, got = expected.astype(np.float64), got.astype(np.float64)
        differing = int(np.count_nonzero(expected != got))
        distance = code_distance(expected, got) if differing else 0
        self._codes = [self._codes[0] + got.size, self._codes[1] + differing, max(self._codes[2], distance)]
        if differing and self._first is None:
            self._first = node

    def result(self) -> EndToEnd:
        """Return the metrics over all batches."""
        compared, differing, distance = self._codes
        cause = f"{', '.join(self._causes)}: {EFFECT}{PROPAGATED if distance > 1 else ''}" if differing else ""
        sqnr_db, agreement = self._outputs.sqnr_db, self._outputs.agreement
        return EndToEnd(compared, differing, distance, self._first, sqnr_db, agreement, cause)


@dataclass
class CurrentBatch:
    """Results of the current batch.

    Attributes:
        reference: outputs and codes of the source.
        codes: maps the name of each QuantizeLinear node to its codes in the file as written, and the name of each
            output of a DynamicQuantizeLinear node to its values.
        outputs: outputs of the file as written.
    """

    reference: Reference = field(default_factory=lambda: Reference([]))
    codes: dict[str, Array] = field(default_factory=dict)
    outputs: list[Array] = field(default_factory=list)


class FusedCodes(NamedTuple):
    """Name of a tensor of codes in an optimized graph, and whether its last axis is the channel axis."""

    tensor: str
    channels_last: bool


def find_codes(artifact: QuantizedGraph, optimized: ModelProto) -> dict[str, FusedCodes]:
    """Map each QuantizeLinear node of the file to the tensor of the optimized graph that holds the node's codes.

    Most tensors of codes keep their name. A channels-last convolution outputs codes itself, with permuted axes. This
    convolution is found by its original name: ``conv1`` becomes ``conv1_token_3``. Nodes whose codes the optimized
    graph does not have are left out.
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
    """Comparison of the source with the file in ONNX Runtime, by codes and outputs.

    If ``is_written``, ONNX Runtime runs the graph as it is in the file, else the graph that it optimized.
    """

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
        self._names, self._batch, self._codes_by_node = artifact.graph.outputs, batch, codes
        self._is_written = is_written
        self.keep: Set[str] = frozenset()  # nodes whose codes other checks need

    def readings(self) -> list[Reading]:
        """Return one reading per node for its codes, then one reading for the outputs."""
        codes = [Reading((each.tensor,), partial(self._take_codes, node)) for node, each in self._codes_by_node.items()]
        return [*codes, Reading(tuple(self._names), self._take_outputs)]

    def _take_codes(self, node: str, arrays: Mapping[str, Array]) -> None:
        tensor, channels_last = self._codes_by_node[node]
        codes = np.moveaxis(arrays[tensor], -1, 1) if channels_last else arrays[tensor]
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
    """Comparison of the source's outputs with the file's outputs in ONNX Runtime with session options ``config``."""

    def __init__(self, artifact: QuantizedGraph, batch: CurrentBatch, config: Mapping[str, str]) -> None:
        super().__init__(artifact.graph.outputs)
        self._batch, self._session = batch, make_session(artifact.model, config=config)

    def run(self, feeds: Mapping[str, Array]) -> None:
        """Run the file on a batch, and compare its outputs with the source's outputs."""
        with ort_errors():
            outputs = self._session.run(None, dict(feeds))
        self.add_outputs(self._batch.reference.outputs, outputs)


class OpenVinoCheck(OutputCheck):
    """Comparison of the file's outputs in OpenVINO with the source's outputs.

    If outputs are quantized, their codes are also compared with the codes in ONNX Runtime.
    """

    def __init__(self, artifact: QuantizedGraph, batch: CurrentBatch) -> None:
        self._openvino = OpenVino(artifact.model)
        super().__init__(artifact.graph.outputs, [ORDER, "OpenVINO multiplies by 1 / scale where ONNX divides"])
        self._graph, self._batch = artifact.graph, batch

    def start(self, feeds: Mapping[str, Array]) -> None:
        """Start running a batch in the subprocess."""
        self._openvino.start(feeds)

    def compare(self) -> None:
        """Compare the outputs of the batch; call this method after ONNX Runtime has run the file as written."""
        outputs = self._openvino.outputs()
        self.add_outputs(self._batch.reference.outputs, outputs)
        for name, here, there in zip(self._graph.outputs, self._batch.outputs, outputs, strict=True):
            scale = self._output_scale(name)
            if scale is not None:
                self.add_codes(name, np.rint(here / scale), np.rint(there / scale))

    def _output_scale(self, name: str) -> Array | None:
        """Return the scale of a model output that is dequantized per tensor, or None for all other outputs."""
        node, graph = self._graph.producer(name), self._graph
        if node is None or node.op_type != DEQUANTIZE or node.input[1] not in graph.constants:
            return None
        scale = graph.array(node.input[1])
        return scale.reshape(()) if scale.size == 1 else None

    def close(self) -> None:
        """End the subprocess."""
        self._openvino.close()
