"""OnnxSource: an ONNX model, float or quantized, with which a file is compared."""

from collections.abc import Mapping
from functools import cached_property, partial
from typing import Any

from numpy.typing import NDArray

from detent.errors import UnsupportedError
from detent.onnx_model import LoadedModel, make_session
from detent.onnx_model.qdq_reader import QuantizedGraph, QuantizeNode
from detent.onnx_model.sessions import Probe, Reading, ort_errors
from detent.tensor import QuantizedTensor
from detent.verification.replay import ReplayedModel, replay
from detent.verification.segments import SegmentCheck
from detent.verification.source import Expected, Reference, SourceSegments
from detent.verification.tally import Tally
from detent.verification.verify_report import Difference, Replay

__all__ = ["OnnxSource"]

Array = NDArray[Any]


class OnnxSource:
    """An ONNX model, float or quantized, with which a file is compared."""

    can_match_weights = False

    def __init__(self, model: LoadedModel, quantized: QuantizedGraph | None, artifact: QuantizedGraph) -> None:
        self.model, self._quantized = model, quantized
        quantizers = {} if quantized is None else {each.node: each for each in quantized.quantize_nodes}
        shared = [each.node for each in artifact.quantize_nodes if each.node in quantizers]
        self._quantizers = {node: quantizers[node] for node in shared}
        weights = () if quantized is None else quantized.weights
        self._weights = [each for each in weights if each.direct and not each.is_bias]
        self.names: Mapping[str, str] = {weight.name: weight.name for weight in self._weights}
        self.notes: dict[str, None] = {}
        self.causes: list[str] = []
        self._session: Any = None
        self._reference = Reference([])
        self._probe = self._make_probe() if self._quantizers else None
        self._artifact, self.tally = artifact, Tally()
        self._replayed: ReplayedModel | None = None

    def replay(self) -> Replay:
        """Rewrite this model with the file's decisions, and compare the result with the file."""
        self._replayed = replay(self.model, self._artifact)
        return self._replayed.result

    @property
    def is_same(self) -> bool:
        """Whether the file is a copy of this model."""
        return self._replayed is not None and self._replayed.is_same

    @property
    def flaw(self) -> Difference | None:
        """The first decision of the file that is out of bounds, or None if all decisions are within bounds."""
        return None if self._replayed is None else next(iter(self._replayed.flaws), None)

    @cached_property
    def segments(self) -> SourceSegments | None:
        """The check that runs this model segment by segment, or None if the file was not replayed."""
        replayed = self._replayed
        if replayed is None or replayed.float_graph is None or replayed.decisions is None:
            return None
        return SegmentCheck(replayed.float_graph, replayed.decisions, self._artifact, self.tally)

    def _make_probe(self) -> Probe:
        outputs = self.model.outputs

        def take_outputs(arrays: Mapping[str, Array]) -> None:
            self._reference.outputs = [arrays[name] for name in outputs]

        def take_codes(quantizer: QuantizeNode, arrays: Mapping[str, Array]) -> None:
            self._reference.codes[quantizer.node] = arrays[quantizer.codes]

        quantizers = self._quantizers.values()
        readings = [Reading((each.codes,), partial(take_codes, each)) for each in quantizers]
        kinds = {each.codes: each.qparams.kind for each in quantizers}
        return Probe(self.model.proto, [*readings, Reading(outputs, take_outputs)], kinds=kinds)

    def weights(self) -> dict[str, QuantizedTensor]:
        """Map names to the weights of a quantized source; the result is empty for a float source."""
        return {
            weight.name: QuantizedTensor.from_codes(weight.codes, weight.qparams.params(weight.codes.shape))
            for weight in self._weights
        }

    def bias(self, weight: str) -> Array | None:  # noqa: ARG002 - the protocol requires it
        """Return None: batch norm folding and bias correction change biases, so biases cannot be compared."""
        return None

    def absent_weights(self, missing: Mapping[str, QuantizedTensor]) -> dict[str, QuantizedTensor]:  # noqa: ARG002
        """Return an empty dict, because the file defines which weights are quantized."""
        return {}

    def absent_quantizers(self) -> list[str]:
        """Return an empty list, because the file defines which activations are quantized."""
        return []

    def expected(self, quantizer: QuantizeNode) -> Expected | None:
        """Return the parameters of the source's QuantizeLinear node that has the name of ``quantizer``.

        Returns None if the source has no such node, or if the node is per-channel and the shape of its input is
        unknown.
        """
        own = self._quantizers.get(quantizer.node)
        if own is None or self._quantized is None:
            return None
        shape = self._quantized.graph.shape(own.x)
        if shape is None and own.qparams.scale.ndim:
            return None
        sizes = (1, 1) if shape is None else tuple(size or 1 for size in shape)
        return Expected(own.qparams.params(sizes or (1, 1)), 0, quantizer.x)

    def run(self, feeds: Mapping[str, Array]) -> Reference:
        """Run a batch; return the outputs, and the codes of QuantizeLinear nodes that are also in the file."""
        names = self._artifact.graph.outputs
        if self.model.outputs != tuple(names):
            raise UnsupportedError(
                f"the file has outputs {list(names)}, but the source has outputs {list(self.model.outputs)}: pass "
                "the model from which the file was made as source="
            )
        if self._probe is not None:
            self._reference = Reference([])
            self._probe.run(feeds)
            return self._reference
        if self._session is None:
            self._session = make_session(self.model)
        with ort_errors():
            return Reference(list(self._session.run(None, dict(feeds))))
