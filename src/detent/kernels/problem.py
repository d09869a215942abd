"""Operations and problems: descriptions of what a kernel computes, without data.

``OPERATIONS`` lists all operations. A new operation is a row here, a function in ``reference`` and, to be fast, a
method of the extension's ``Runner``.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from inspect import signature
from types import MappingProxyType
from typing import Any, Literal, Protocol, TypeAlias

from numpy.typing import NDArray

from detent.errors import UnsupportedError
from detent.granularity import Tiling
from detent.kernels import reference
from detent.spec import QuantSpec
from detent.ste import Estimator

__all__ = ["OPERATIONS", "Kernel", "NaNPolicy", "Operation", "Problem", "Result", "find_operation"]

Array = NDArray[Any]
Result: TypeAlias = Array | tuple[Array, Array] | tuple[Array, Array, Array]
NaNPolicy = Literal["raise", "propagate", "zero_point", "qmin"]


@dataclass(frozen=True)
class Operation:
    """Operation of kernels: its inputs, outputs and implementations."""

    inputs: tuple[str, ...]  # besides scale and zero point: "x" and "g" (data and gradient), "codes", "mask"
    outputs: tuple[str, ...]
    reference: Callable[..., Any]  # its keyword arguments have the names of a problem's fields
    native: str  # method of the extension's Runner, with arguments inputs, scale, zero point and outputs
    nan: tuple[NaNPolicy, ...] = ("propagate",)  # valid policies, the default first
    has_estimator: bool = False
    needs_format: bool = True

    @cached_property
    def keywords(self) -> frozenset[str]:
        """The keyword arguments of the reference function."""
        return frozenset(signature(self.reference).parameters) - {*self.inputs, "xp"}


OPERATIONS: Mapping[str, Operation] = MappingProxyType(
    {
        "quantize": Operation(("x",), ("codes",), reference.quantize, "quantize", nan=("raise", "zero_point", "qmin")),
        "dequantize": Operation(("codes",), ("y",), reference.dequantize, "dequantize"),
        "fake_quantize": Operation(
            ("x",), ("y",), reference.fake_quantize, "fake_quantize", nan=("propagate", "raise", "zero_point", "qmin")
        ),
        "fake_quantize_masked": Operation(
            ("x",), ("y", "mask"), reference.fake_quantize_masked, "fake_quantize_masked", has_estimator=True
        ),
        "quantize_backward": Operation(
            ("g", "x"), ("gx",), reference.quantize_backward, "backward", has_estimator=True
        ),
        "dequantize_backward": Operation(
            ("g",), ("gx",), reference.dequantize_backward, "dequantize_backward", needs_format=False
        ),
        "fake_quantize_backward": Operation(
            ("g", "x"), ("gx",), reference.fake_quantize_backward, "backward", has_estimator=True
        ),
        "fake_quantize_masked_backward": Operation(
            ("g", "mask"), ("gx",), reference.masked_backward, "masked_backward", needs_format=False
        ),
        "fake_quantize_learned_backward": Operation(
            ("g", "x"), ("gx", "gs", "gz"), reference.fake_quantize_learned_backward, "learned", has_estimator=True
        ),
    }
)


def find_operation(name: str) -> Operation:
    """Look up an operation by name."""
    operation = OPERATIONS.get(name)
    if operation is None:
        raise UnsupportedError(f"unknown operation {name!r}: expected one of {', '.join(sorted(OPERATIONS))}")
    return operation


@dataclass(frozen=True)
class Problem:
    """Operation on arrays of one shape, dtype and spec."""

    operation: str
    tiling: Tiling
    dtype: str  # of the data; for "dequantize", of the result
    spec: QuantSpec
    ste: Estimator | None
    nan: NaNPolicy


class Kernel(Protocol):
    """Implementation of one problem."""

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
        """Run on checked arrays; scale and zero point have the compute type. The result is ``out`` unless None."""
        ...
