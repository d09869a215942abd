"""Source: what a file is compared with; and ``OnnxSource``, an ONNX model as one, float or quantized itself."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

from numpy.typing import NDArray

from detent.onnx_model import LoadedModel, make_session
from detent.onnx_model.qdq_reader import QuantizedGraph, QuantizeNode
from detent.onnx_model.sessions import Probe, Reading, ort_errors
from detent.params import QuantParams
from detent.tensor import QuantizedTensor

__all__ = ["Expected", "OnnxSource", "Reference", "Source"]

Array = NDArray[Any]


@dataclass
class Reference:
    """What a source gives for one batch.

    Outputs are in the order of the file's. Codes of activations are by the file's QuantizeLinear nodes and in the
    file's numbers, where the source knows them.
    """

    outputs: list[Array]
    codes: dict[str, Array] = field(default_factory=dict)


@dataclass(frozen=True)
class Expected:
    """A quantizer of the source: its parameters, what the file adds to its codes, the file's tensor that it gets."""

    params: QuantParams
    shift: int
    x: str


class Source(Protocol):
    """What a file was made from."""

    knows_weights: bool  # whether it knows every weight that the file may hold
    names: Mapping[str, str]  # the file's constants of codes, and the weights of the source that they are
    notes: dict[str, None]  # what was not compared
    causes: list[str]  # what makes the file's sums differ from the source's, by intention

    def weights(self) -> dict[str, QuantizedTensor]:
        """The quantized weights by name."""
        ...

    def bias(self, weight: str) -> Array | None:
        """The bias of the layer that a weight belongs to."""
        ...

    def absent_weights(self, missing: Mapping[str, QuantizedTensor]) -> dict[str, QuantizedTensor]:
        """Those of the weights that a file lacks which took part in the runs so far."""
        ...

    def absent_quantizers(self) -> list[str]:
        """Quantizers of activations that took part in the runs so far and that no node of the file is."""
        ...

    def expected(self, quantizer: QuantizeNode) -> Expected | None:
        """The source's quantizer that a node is; None where only the file knows it."""
        ...

    def run(self, feeds: Mapping[str, Array]) -> Reference:
        """The outputs for a batch."""
        ...


class OnnxSource:
    """An ONNX model: float, or quantized itself."""

    knows_weights = False

    def __init__(self, model: LoadedModel, quantized: QuantizedGraph | None, artifact: QuantizedGraph) -> None:
        self.model, self._quantized = model, quantized
        self.is_float = quantized is None
        own = {} if quantized is None else {each.node: each for each in quantized.quantize_nodes}
        self._quantizers = {each.node: own[each.node] for each in artifact.quantize_nodes if each.node in own}
        weights = () if quantized is None else quantized.weights
        self._weights = [each for each in weights if each.direct and not each.is_bias]
        self.names: Mapping[str, str] = {weight.name: weight.name for weight in self._weights}
        self.notes: dict[str, None] = {}
        self.causes: list[str] = []
        self._session: Any = None
        self._reference = Reference([])
        self._probe = self._make_probe() if self._quantizers else None

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
        """Those of a quantized source; none of a float model, whose weights folding and smoothing change."""
        return {
            weight.name: QuantizedTensor.from_codes(weight.codes, weight.qparams.params(weight.codes.shape))
            for weight in self._weights
        }

    def bias(self, weight: str) -> Array | None:  # noqa: ARG002 - of every source
        """Always None: folding and correction change biases."""
        return None

    def absent_weights(self, missing: Mapping[str, QuantizedTensor]) -> dict[str, QuantizedTensor]:  # noqa: ARG002
        """Always empty: the file decides what is quantized."""
        return {}

    def absent_quantizers(self) -> list[str]:
        """Always empty: the file decides what is quantized."""
        return []

    def expected(self, quantizer: QuantizeNode) -> Expected | None:
        """The quantizer of the same node, where the source is quantized itself."""
        own = self._quantizers.get(quantizer.node)
        if own is None or self._quantized is None:
            return None
        shape = self._quantized.graph.shape(own.x)
        if shape is None and own.qparams.scale.ndim:
            return None
        known = (1, 1) if shape is None else tuple(size or 1 for size in shape)
        return Expected(own.qparams.params(known or (1, 1)), 0, quantizer.x)

    def run(self, feeds: Mapping[str, Array]) -> Reference:
        """The outputs, and the codes of nodes that the file has as well."""
        if self._probe is not None:
            self._reference = Reference([])
            self._probe.run(feeds)
            return self._reference
        if self._session is None:
            self._session = make_session(self.model)
        with ort_errors():
            return Reference(list(self._session.run(None, dict(feeds))))
