"""Case: one operation on one array, with the numbers every contestant gets; Contestant: one way to compute it.

Data are normal, ranges clip a little of it, zero points are not zero and no code is left out, so that nobody can skip
a step. ``observe`` gets data whose scale is a power of two, because systems may round a scale's last bit differently.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

import detent as dt
from detent.granularity import Tiling

Array = NDArray[Any]
SHAPES = {1000: (10, 100), 2**16: (256, 256), 2**20: (1024, 1024), 2**24: (4096, 4096)}
DTYPES = {
    "float32": np.dtype("float32"),
    "float16": np.dtype("float16"),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float64": np.dtype("float64"),
}
REPEATED = 2**16
Q8_0 = "dequantize Q8_0"


class SkippedError(Exception):
    """A peer that cannot take part in a case, and why."""


class DifferentError(Exception):
    """A contestant whose answer is not detent's."""


@dataclass(frozen=True)
class Case:
    """One operation on one array.

    Attributes:
        operation: a row of the budget, such as "fake_quantize" or "quantize int4".
        granularity: as in a spec's string.
        size: the number of elements.
        dtype: the float type.
    """

    operation: str
    granularity: str = "tensor"
    size: int = 2**20
    dtype: str = "float32"

    @property
    def shape(self) -> tuple[int, ...]:
        """The array's shape."""
        return SHAPES[self.size]

    @property
    def real(self) -> np.dtype[Any]:
        """The array's dtype."""
        return DTYPES[self.dtype]

    @property
    def bits(self) -> int:
        """The width of a code."""
        return 4 if self.operation.endswith("int4") else 8

    @property
    def group(self) -> int | None:
        """The size of a group, or None."""
        return int(self.granularity[5:]) if self.granularity.startswith("group") else None

    def spec(self, convention: str = "onnx") -> dt.QuantSpec:
        """How to quantize, by the rules of one system."""
        symmetry = "symmetric" if self.operation == Q8_0 else "affine"
        return dt.QuantSpec.parse(f"int{self.bits}/{self.granularity}/{symmetry}/{convention}")

    @cached_property
    def tiling(self) -> Tiling:
        """Which elements share a scale."""
        return self.spec().granularity.tiling(self.shape)

    @cached_property
    def x(self) -> Array:
        """The data."""
        values = _normal(0, self.shape)
        if self.operation == "observe + fake_quantize":
            low, high = -2.0, 255 / 64 - 2.0
            values = np.clip(values, low, high)
            values[:, 0], values[:, 1] = low, high
        return values.astype(self.real)

    @cached_property
    def g(self) -> Array:
        """The gradient of the result."""
        return _normal(1, self.shape).astype(self.real)

    def params(self, convention: str = "onnx") -> dt.QuantParams:
        """Scales and zero points; the same numbers for every convention."""
        width = np.linspace(0.0, 1.0, prod(self.tiling.scale_shape)).reshape(self.tiling.scale_shape)
        if self.operation == Q8_0:
            return dt.QuantParams(self.spec(convention), scale=(width + 1).astype(np.float16).astype(np.float32) / 64)
        made = dt.QuantParams.from_range(self.spec(), -2.0 - width, 3.0 - width)
        return dt.QuantParams(self.spec(convention), scale=made.scale, zero_point=made.zero_point)

    @cached_property
    def codes(self) -> Array:
        """The data's codes."""
        return dt.quantize(self.x, self.params()).codes

    @property
    def bytes(self) -> int:
        """How many bytes the operation has to read and write, its parameters left out."""
        item, code = self.real.itemsize, self.bits / 8
        per_element = {
            "fake_quantize": 2 * item,
            "dequantize": code + item,
            "fake_quantize_backward": 3 * item,
            "min-max": item,
            "observe + fake_quantize": 3 * item,
            Q8_0: code + item,
        }.get(self.operation, item + code)
        return int(self.size * per_element)


def _normal(seed: int, shape: tuple[int, ...]) -> Array:
    """Normal numbers, repeated beyond 2^16 of them to save time."""
    numbers = np.random.default_rng(seed).normal(size=min(prod(shape), REPEATED))
    return np.resize(numbers, shape)


@dataclass(frozen=True)
class Contestant:
    """One way to compute a case.

    Attributes:
        name: who.
        run: computes the answer into memory made beforehand, where the peer allows it.
        answer: the answer of the last run, as arrays.
        convention: whose rules the answer follows.
        prepare: called before every sample, untimed.
    """

    name: str
    run: Callable[[], object]
    answer: Callable[[], list[Array]] | None = None
    convention: str = "onnx"
    prepare: Callable[[], object] = field(default=lambda: None)
