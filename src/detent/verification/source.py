"""Source: the model that a file is compared with, in ONNX (``onnx_source``) or prepared (``torch_source``)."""

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
    """Results of a source for one batch.

    Attributes:
        outputs: in the order of the file's outputs.
        codes: activation codes by the file's QuantizeLinear nodes, as the file stores them; missing where the source
            does not quantize.
    """

    outputs: list[Array]
    codes: dict[str, Array] = field(default_factory=dict)


@dataclass(frozen=True)
class Expected:
    """A quantizer of the source.

    Attributes:
        params: its parameters.
        shift: offset that the file adds to its codes.
        x: the file's tensor that it quantizes.
    """

    params: QuantParams
    shift: int
    x: str


class SourceSegments(Protocol):
    """A source cut into segments at its quantizers, each run on the file's codes."""

    checks_quantizers: bool  # whether codes must match detent's bit for bit, as level 1 checks them

    @property
    def readers(self) -> tuple[tuple[str, str], ...]:
        """Nodes whose codes a run needs, with the tensors of these codes."""
        ...

    def run(self, feeds: Mapping[str, Array], codes: Mapping[str, Array], outputs: Sequence[Array]) -> None:
        """Run a batch, and compare with the file's codes (by node) and outputs."""
        ...

    def result(self) -> Segments:
        """Return the result over all batches."""
        ...


class Source(Protocol):
    """The model that a file was made from."""

    can_match_weights: bool  # whether every weight of the file can be matched with one of the source
    names: Mapping[str, str]  # weight of the source by the file's constant of codes
    notes: dict[str, None]  # parts that were not compared
    causes: list[str]  # intended reasons why the file's sums differ from the source's
    tally: Tally  # counts of the segments

    @property
    def is_same(self) -> bool:
        """Whether source and file are the same model, so there is nothing to run."""
        ...

    @property
    def flaw(self) -> Difference | None:
        """The first decision out of bounds; segments are built from decisions, so they would not reveal it."""
        ...

    def replay(self) -> Replay:
        """Make the file again from this source, and compare."""
        ...

    @property
    def segments(self) -> "SourceSegments | None":
        """The source by segments; None without a replay."""
        ...

    def weights(self) -> dict[str, QuantizedTensor]:
        """Return the quantized weights by name."""
        ...

    def bias(self, weight: str) -> Array | None:
        """Return the bias of the layer of a weight; None if it cannot be compared."""
        ...

    def absent_weights(self, missing: Mapping[str, QuantizedTensor]) -> dict[str, QuantizedTensor]:
        """Return those of the missing weights that the runs so far have used."""
        ...

    def absent_quantizers(self) -> list[str]:
        """Return activation quantizers that the runs so far have used and the file lacks."""
        ...

    def expected(self, quantizer: QuantizeNode) -> Expected | None:
        """Return the source's quantizer for a node of the file; None if it does not quantize the tensor."""
        ...

    def run(self, feeds: Mapping[str, Array]) -> Reference:
        """Run a batch."""
        ...
