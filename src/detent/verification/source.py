"""Source: what a file is compared with, and what a source has to say; and the ONNX model as one."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from numpy.typing import NDArray
from onnx import ModelProto

from detent.onnx_model import QdqParams, make_session
from detent.onnx_model.qdq_reader import QuantizedGraph, QuantizeNode
from detent.onnx_model.sessions import Probe, Reading
from detent.params import QuantParams
from detent.tensor import QuantizedTensor

__all__ = ["Expected", "OnnxSource", "Reference", "Source"]

Array = NDArray[Any]


@dataclass
class Reference:
    """What a source gives for one batch.

    Attributes:
        outputs: in the order of the file's.
        codes: of activations by the file's QuantizeLinear nodes, in the file's numbers, where the source knows them.

    >>> Reference([]).codes
    {}
    """

    outputs: list[Array]
    codes: dict[str, Array] = field(default_factory=dict)


@dataclass(frozen=True)
class Expected:
    """What a source says of one quantizer.

    Attributes:
        params: its parameters.
        shift: what the file adds to its codes.
        x: the tensor of the file that it quantizes.

    >>> Expected(QuantParams.int8_symmetric(), 128, "x").shift
    128
    """

    params: QuantParams
    shift: int
    x: str


class Source(Protocol):
    """What a file was made from.

    Attributes:
        knows_weights: whether it knows every weight that the file may hold.
        names: the file's constants of codes, and the weights of the source that they are.
        notes: what was not compared.
        causes: what makes the file's sums others than the source's, by intention.
    """

    knows_weights: bool
    names: Mapping[str, str]
    notes: dict[str, None]
    causes: list[str]

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

    def expected(self, site: QuantizeNode) -> Expected | None:
        """The quantizer behind a node; None where only the file knows it."""
        ...

    def run(self, feeds: Mapping[str, Array]) -> Reference:
        """The outputs for a batch."""
        ...


class OnnxSource:
    """An ONNX model: float, or quantized itself.

    Args:
        model: the source, as an ``QuantizedGraph`` where it is quantized.
        artifact: the file.

    >>> from onnx import parser
    >>> from detent.onnx_model.qdq_reader import open_quantized
    >>> import numpy as np
    >>> made = parser.parse_model('''<ir_version: 10, opset_import: ["" : 21]>
    ...     g (float[N] x) => (float[N] y) <float s = {0.5}, uint8 z = {3}>
    ...     { q = QuantizeLinear(x, s, z) y = DequantizeLinear(q, s, z) }''')
    >>> source = OnnxSource(open_quantized(made), open_quantized(made))
    >>> found = source.run({"x": np.float32([1.2])})
    >>> found.outputs, found.codes["QuantizeLinear_q"], list(source.weights()), source.absent_weights({})
    ([array([1.], dtype=float32)], array([5], dtype=uint8), [], {})
    >>> source.expected(open_quantized(made).quantize_nodes[0]).x, source.is_float
    ('x', False)
    """

    knows_weights = False

    def __init__(self, model: Any, artifact: QuantizedGraph) -> None:  # noqa: ANN401 - a QuantizedGraph or a ModelProto
        self._quantized = model if isinstance(model, QuantizedGraph) else None
        self._proto: ModelProto = model.model if isinstance(model, QuantizedGraph) else model
        sites = {site.node: site for site in self._quantized.quantize_nodes} if self._quantized is not None else {}
        self._sites = {site.node: sites[site.node] for site in artifact.quantize_nodes if site.node in sites}
        self.names: Mapping[str, str] = (
            {}
            if self._quantized is None
            else {
                weight.name: weight.name for weight in self._quantized.weights if weight.direct and not weight.is_bias
            }
        )
        self._session: Any = None
        self.notes: dict[str, None] = {}
        self.causes: list[str] = []
        self._found = Reference([])
        self._probe = self._make_probe() if self._sites else None

    @property
    def model(self) -> ModelProto:
        """The model itself."""
        return self._proto

    @property
    def is_float(self) -> bool:
        """Whether it has no quantizers of its own, which could be compared."""
        return self._quantized is None

    def _make_probe(self) -> Probe:
        outputs = tuple(value.name for value in self._proto.graph.output)

        def take_outputs(arrays: Mapping[str, Array]) -> None:
            self._found.outputs = [arrays[name] for name in outputs]

        def taker(site: QuantizeNode) -> Reading:
            def take(arrays: Mapping[str, Array]) -> None:
                self._found.codes[site.node] = arrays[site.codes]

            return Reading((site.codes,), take)

        readings = [*(taker(site) for site in self._sites.values()), Reading(outputs, take_outputs)]
        return Probe(self._proto, readings, kinds={site.codes: site.qparams.kind for site in self._sites.values()})

    def weights(self) -> dict[str, QuantizedTensor]:
        """Those of a quantized source; nothing of a float model, whose weights folding and smoothing change."""
        found: dict[str, QuantizedTensor] = {}
        own = self._quantized
        for weight in () if own is None else own.weights:
            if own is not None and weight.name in self.names:
                codes = weight.codes
                found[weight.name] = QuantizedTensor.from_codes(codes, weight.qparams.params(codes.shape))
        return found

    def bias(self, weight: str) -> Array | None:  # noqa: ARG002 - of every source
        """Nothing: folding and correction change biases."""
        return None

    def absent_weights(self, missing: Mapping[str, QuantizedTensor]) -> dict[str, QuantizedTensor]:  # noqa: ARG002
        """Nothing: what is quantized is the file's decision."""
        return {}

    def absent_quantizers(self) -> list[str]:
        """Nothing, likewise."""
        return []

    def expected(self, site: QuantizeNode) -> Expected | None:
        """The quantizer of the same node, where the source is quantized itself."""
        own = self._sites.get(site.node)
        if own is None:
            return None
        how: QdqParams = own.qparams
        shape = self._proto_shape(own.x)
        if shape is None and how.scale.ndim:
            return None
        return Expected(how.params(shape or (1, 1)), 0, site.x)

    def _proto_shape(self, name: str) -> tuple[int, ...] | None:
        shape = None if self._quantized is None else self._quantized.graph.shape(name)
        return None if shape is None else tuple(size or 1 for size in shape)

    def run(self, feeds: Mapping[str, Array]) -> Reference:
        """The outputs, and the codes of nodes that the file has as well."""
        if self._probe is not None:
            self._found = Reference([])
            self._probe.run(feeds)
            return self._found
        if self._session is None:
            self._session = make_session(self._proto)
        return Reference(list(self._session.run(None, dict(feeds))))
