"""Operations and problems: what kernels compute. Vocabulary and numbers only, decided before any data is seen.

``OPERATIONS`` is the one table of operations. A new one is a row here, a function in ``reference`` and, to be fast, a
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
    """One operation: what it reads and returns, and what computes it.

    Attributes:
        inputs: the arrays it reads beside scale and zero point: "x" and "g" (data and gradient), "codes", "mask".
        outputs: the arrays it returns.
        reference: the reference function; its keyword arguments are named like the fields of a problem.
        native: the method of the extension's ``Runner``, which takes the inputs, scale, zero point and outputs.
        nan: its policies for NaN, the default first.
        has_estimator: whether a straight-through estimator decides where the gradient passes.
        needs_format: whether its result depends on the format of the codes.
    """

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    reference: Callable[..., Any]
    native: str
    nan: tuple[NaNPolicy, ...] = ("propagate",)
    has_estimator: bool = False
    needs_format: bool = True

    @cached_property
    def keywords(self) -> frozenset[str]:
        """The names of the arguments of the reference function that are not inputs."""
        return frozenset(signature(self.reference).parameters) - {*self.inputs, "xp"}


OPERATIONS: Mapping[str, Operation] = MappingProxyType(
    {
        "quantize": Operation(("x",), ("codes",), reference.quantize, "quantize", nan=("raise", "zero_point", "qmin")),
        "dequantize": Operation(("codes",), ("y",), reference.dequantize, "dequantize"),
        "fake_quantize": Operation(
            ("x",),
            ("y",),
            reference.fake_quantize,
            "fake_quantize",
            nan=("propagate", "raise", "zero_point", "qmin"),
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
    """The operation of that name.

    Raises:
        UnsupportedError: there is none.
    """
    operation = OPERATIONS.get(name)
    if operation is None:
        raise UnsupportedError(f"no kernel for operation {name!r}: expected one of {', '.join(sorted(OPERATIONS))}")
    return operation


@dataclass(frozen=True)
class Problem:
    """One operation on arrays of one shape, dtype and spec.

    Attributes:
        operation: the name of the public function.
        tiling: which elements share a scale.
        dtype: the name of the data's float type ("dequantize": of the result).
        spec: format, granularity and convention.
        ste: the straight-through estimator of a gradient; None for operations without one.
        nan: the policy for NaN.
    """

    operation: str
    tiling: Tiling
    dtype: str
    spec: QuantSpec
    ste: Estimator | None
    nan: NaNPolicy


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
