"""Operations and problems: descriptions of what a kernel computes, without data.

``OPERATIONS`` lists all operations. A new operation needs a row here and a function in ``reference``. For a native
kernel, it also needs a method of the extension module's ``Runner``.
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
    """An operation that kernels implement: its inputs, outputs and implementations."""

    inputs: tuple[str, ...]  # each "x" (data), "g" (gradient), "codes" or "mask"; without scale and zero point
    outputs: tuple[str, ...]
    reference: Callable[..., Any]  # its keyword arguments are named like the fields of a problem
    native: str  # name of the Runner's method; its arguments are inputs, scale, zero point, outputs
    nan: tuple[NaNPolicy, ...] = ("propagate",)  # valid policies, the default first
    has_estimator: bool = False
    needs_format: bool = True

    @cached_property
    def keywords(self) -> frozenset[str]:
        """The names of the reference function's keyword arguments."""
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
    dtype: str  # dtype of the data; for "dequantize", of the result
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
        """Run the kernel on checked arrays; scale and zero point have the compute type. Write to ``out`` if given."""
        ...
