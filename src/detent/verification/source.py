"""Source: what a file is compared with, an ONNX model (``onnx_source``) or a prepared one (``torch_source``)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from numpy.typing import NDArray

from detent.onnx_model.qdq_reader import QuantizeNode
from detent.params import QuantParams
from detent.tensor import QuantizedTensor
from detent.verification.tally import Tally
from detent.verification.verify_report import Difference, Replay, Segments

__all__ = ["Expected", "Reference", "Source", "SourceSegments"]

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


class SourceSegments(Protocol):
    """A source that runs between quantizers, each part fed the file's codes."""

    checks_quantizers: bool  # whether codes are compared with detent's, to the bit

    @property
    def readers(self) -> tuple[tuple[str, str], ...]:
        """The nodes whose codes a run needs, with the tensors of these codes."""
        ...

    def run(self, feeds: Mapping[str, Array], codes: Mapping[str, Array], outputs: Sequence[Array]) -> None:
        """Compare a batch with the file's codes, by node, and with its outputs."""
        ...

    def result(self) -> Segments:
        """What all batches have shown."""
        ...


class Source(Protocol):
    """What a file was made from."""

    knows_weights: bool  # whether it knows every weight that the file may hold
    names: Mapping[str, str]  # the file's constants of codes, and the weights of the source that they are
    notes: dict[str, None]  # what was not compared
    causes: list[str]  # what makes the file's sums differ from the source's, by intention
    tally: Tally  # of segments

    @property
    def is_same(self) -> bool:
        """Whether source and file are one model, which leaves nothing to run."""
        ...

    @property
    def flaw(self) -> Difference | None:
        """The first decision of the file that is wrong: segments follow from decisions, and would agree with it."""
        ...

    def replay(self) -> Replay:
        """The file beside what this source gives by the file's decisions."""
        ...

    @property
    def segments(self) -> "SourceSegments | None":
        """The source by segments, after a replay; None where there was none."""
        ...

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
