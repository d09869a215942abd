"""A case is one operation on one array, equal for all tools. A tool is one implementation of a case.

Data are normally distributed, ranges clip some values, zero points are not zero, and all codes occur. So no tool can
skip a step. For ``observe + fake_quantize`` the scale is a power of two, because tools round the last bit of a scale
differently.
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
PERIOD = 2**16  # number of random elements; larger arrays repeat these elements, to save time
Q8_0 = "dequantize Q8_0"


class SkippedError(Exception):
    """A tool does not support a case; the message says why."""


class DifferentError(Exception):
    """The result of a tool differs from the result of detent."""


@dataclass(frozen=True)
class Case:
    """One operation on one array.

    Attributes:
        operation: the operation, such as "fake_quantize" or "quantize int4".
        granularity: the granularity, as in a spec string.
        size: number of elements.
        dtype: float type of the array.
    """

    operation: str
    granularity: str = "tensor"
    size: int = 2**20
    dtype: str = "float32"

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the array."""
        return SHAPES[self.size]

    @property
    def real(self) -> np.dtype[Any]:
        """NumPy dtype of the array."""
        return DTYPES[self.dtype]

    @property
    def bits(self) -> int:
        """Bits per code."""
        return 4 if self.operation.endswith("int4") else 8

    @property
    def group(self) -> int | None:
        """Group size, or None."""
        return int(self.granularity[5:]) if self.granularity.startswith("group") else None

    def spec(self, convention: str = "onnx") -> dt.QuantSpec:
        """Spec of the case in one convention."""
        symmetry = "symmetric" if self.operation == Q8_0 else "affine"
        return dt.QuantSpec.parse(f"int{self.bits}/{self.granularity}/{symmetry}/{convention}")

    @cached_property
    def tiling(self) -> Tiling:
        """Tiling of the array into parameter sets."""
        return self.spec().granularity.tiling(self.shape)

    @cached_property
    def x(self) -> Array:
        """Input data."""
        values = _normal(0, self.shape)
        if self.operation == "observe + fake_quantize":
            lo, hi = -2.0, 255 / 64 - 2.0
            values = np.clip(values, lo, hi)
            values[:, 0], values[:, 1] = lo, hi
        return values.astype(self.real)

    @cached_property
    def g(self) -> Array:
        """Gradient of the output."""
        return _normal(1, self.shape).astype(self.real)

    def params(self, convention: str = "onnx") -> dt.QuantParams:
        """Scales and zero points, equal in all conventions."""
        width = np.linspace(0.0, 1.0, prod(self.tiling.scale_shape)).reshape(self.tiling.scale_shape)
        if self.operation == Q8_0:
            return dt.QuantParams(self.spec(convention), scale=(width + 1).astype(np.float16).astype(np.float32) / 64)
        params = dt.QuantParams.from_range(self.spec(), -2.0 - width, 3.0 - width)
        return dt.QuantParams(self.spec(convention), scale=params.scale, zero_point=params.zero_point)

    @cached_property
    def codes(self) -> Array:
        """Codes of the input data."""
        return dt.quantize(self.x, self.params()).codes

    @property
    def bytes(self) -> int:
        """Bytes that the operation reads and writes, without scales and zero points."""
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
    """Return normally distributed numbers, which repeat after PERIOD elements."""
    numbers = np.random.default_rng(seed).normal(size=min(prod(shape), PERIOD))
    return np.resize(numbers, shape)


@dataclass(frozen=True)
class Tool:
    """One implementation of a case.

    Attributes:
        name: name in the tables.
        run: function that computes the result, in preallocated memory if the tool supports that.
        answer: function that returns the result of the last run as arrays.
        convention: the convention that the result follows.
        prepare: function that is called before every sample and not timed.
    """

    name: str
    run: Callable[[], object]
    answer: Callable[[], list[Array]] | None = None
    convention: str = "onnx"
    prepare: Callable[[], object] = field(default=lambda: None)
