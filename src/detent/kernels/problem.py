"""Problem: what a kernel is chosen and made for. Vocabulary and numbers only, decided before any data is seen."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeAlias

from numpy.typing import NDArray

from detent.granularity import Tiling
from detent.spec import QuantSpec
from detent.ste import Estimator

__all__ = ["Kernel", "Problem", "Result"]

Array = NDArray[Any]
Result: TypeAlias = Array | tuple[Array, Array] | tuple[Array, Array, Array]


@dataclass(frozen=True)
class Problem:
    """One operation on arrays of one shape, dtype and spec.

    Attributes:
        operation: the name of the public function.
        tiling: how the data falls into sets.
        dtype: the name of the data's float type ("dequantize": of the result).
        spec: how.
        ste: the estimator of a gradient; None for operations without one.
        nan: the policy for NaN.

    >>> from detent.granularity import PerTensor
    >>> Problem("quantize", PerTensor().tiling((4,)), "float32", QuantSpec("int8"), None, "raise").tiling.sets
    1
    """

    operation: str
    tiling: Tiling
    dtype: str
    spec: QuantSpec
    ste: Estimator | None
    nan: Literal["raise", "propagate", "zero_point", "qmin"]


class Kernel(Protocol):
    """One implementation of one problem."""

    backend: str

    def run(
        self,
        inputs: Sequence[Array],
        scale: Array,
        zero_point: Array,
        out: Array | None,
        step: int,
        grad_scale: float | None,
    ) -> Result:
        """Run on checked arrays; scale and zero point have the compute type. The result is ``out`` where given."""
        ...
