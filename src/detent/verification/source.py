"""Source: the model that a file is compared with.

The source is an ONNX model (``onnx_source``) or a model prepared by ``qt.prepare`` (``torch_source``).
"""

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
        outputs: output arrays, in the order of the file's outputs.
        codes: maps names of the file's QuantizeLinear nodes to the source's codes, shifted as in the file. A node is
            left out if the source does not quantize its tensor.
    """

    outputs: list[Array]
    codes: dict[str, Array] = field(default_factory=dict)


@dataclass(frozen=True)
class Expected:
    """A quantizer of the source.

    Attributes:
        params: scale and zero point of the quantizer.
        shift: offset that the file adds to the codes.
        x: name of the tensor in the file that is quantized.
    """

    params: QuantParams
    shift: int
    x: str


class SourceSegments(Protocol):
    """A source that is cut into segments at its quantizers; each segment runs on the file's codes."""

    checks_quantizers: bool  # whether ``run`` compares codes bit for bit; level 1 then skips them

    @property
    def readers(self) -> tuple[tuple[str, str], ...]:
        """Return (node name, output name) of each QuantizeLinear node whose codes are an argument of ``run``."""
        ...

    def run(self, feeds: Mapping[str, Array], codes: Mapping[str, Array], outputs: Sequence[Array]) -> None:
        """Run the segments on a batch; compare the results with the file's ``codes`` and ``outputs``.

        ``codes`` has the codes of QuantizeLinear nodes by node name, and the outputs of DynamicQuantizeLinear nodes by
        tensor name.
        """
        ...

    def result(self) -> Segments:
        """Return the result over all batches."""
        ...


class Source(Protocol):
    """The model that a file was made from."""

    can_match_weights: bool  # whether each weight of the file should have a counterpart in the source
    names: Mapping[str, str]  # maps names of codes in the file to names of weights in the source
    notes: dict[str, None]  # messages about parts that were not compared
    causes: list[str]  # known reasons why sums in the file differ from sums in the source
    tally: Tally  # counts of the codes that segments compared

    @property
    def is_same(self) -> bool:
        """Whether source and file are the same model, so there is nothing to run."""
        ...

    @property
    def flaw(self) -> Difference | None:
        """The first decision that is out of bounds, or None if all decisions are within bounds.

        Segments use the decisions, so they cannot detect a wrong decision.
        """
        ...

    def replay(self) -> Replay:
        """Make the file again from this source, and compare the result with the file."""
        ...

    @property
    def segments(self) -> "SourceSegments | None":
        """The source, cut into segments, or None if the file does not record where to cut."""
        ...

    def weights(self) -> dict[str, QuantizedTensor]:
        """Map names to quantized weights."""
        ...

    def bias(self, weight: str) -> Array | None:
        """Return the bias of the layer that has this weight, or None if the bias cannot be compared."""
        ...

    def absent_weights(self, missing: Mapping[str, QuantizedTensor]) -> dict[str, QuantizedTensor]:
        """Return the weights in ``missing`` that were used in the runs so far."""
        ...

    def absent_quantizers(self) -> list[str]:
        """Return the activation quantizers that were used in the runs so far and are not in the file."""
        ...

    def expected(self, quantizer: QuantizeNode) -> Expected | None:
        """Return the source's quantizer for a node of the file, or None if the source does not quantize the tensor."""
        ...

    def run(self, feeds: Mapping[str, Array]) -> Reference:
        """Run the source on a batch."""
        ...
