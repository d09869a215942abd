"""The reference backend: NumPy arrays through the reference functions, for every problem there is."""

from collections.abc import Callable, Mapping, Sequence
from math import prod
from types import MappingProxyType
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from detent.checks import refuse_nan
from detent.kernels import reference
from detent.kernels.problem import Problem, Result
from detent.kernels.reductions import pack_bits, unpack_bits

__all__ = ["REFERENCE", "ReferenceKernel"]

Array = NDArray[Any]
_FORWARD = frozenset({"tiling", "spec", "step", "fill"})
_BACKWARD = frozenset({"tiling", "spec", "step", "ste"})

# Each operation's function, and the keyword arguments it takes.
REFERENCE: Mapping[str, tuple[Callable[..., Any], frozenset[str]]] = MappingProxyType(
    {
        "quantize": (reference.quantize, _FORWARD),
        "dequantize": (reference.dequantize, frozenset({"tiling", "spec", "dtype"})),
        "fake_quantize": (reference.fake_quantize, _FORWARD),
        "quantize_backward": (reference.quantize_backward, _BACKWARD),
        "dequantize_backward": (reference.dequantize_backward, frozenset({"tiling"})),
        "fake_quantize_backward": (reference.fake_quantize_backward, _BACKWARD),
        "fake_quantize_masked": (reference.fake_quantize_masked, _BACKWARD),
        "fake_quantize_masked_backward": (reference.masked_backward, frozenset()),
        "fake_quantize_learned_backward": (reference.fake_quantize_learned_backward, _BACKWARD | {"grad_scale"}),
    }
)

# How many of scale and zero point an operation takes, where it is not both.
_NUMBERS: Mapping[str, int] = MappingProxyType({"dequantize_backward": 1, "fake_quantize_masked_backward": 0})


class ReferenceKernel:
    """The slow and obvious implementation of a problem.

    >>> import numpy as np
    >>> from detent.granularity import PerTensor
    >>> from detent.spec import QuantSpec
    >>> problem = Problem("fake_quantize", PerTensor().tiling((2,)), "float64", QuantSpec("int8"), None, "propagate")
    >>> ReferenceKernel(problem).run([np.array([0.4, 1.6])], np.array(1.0), np.array(0.0), None, 0, None)
    array([0., 2.])
    """

    backend = "reference"

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self._function, self._wanted = REFERENCE[problem.operation]
        # 0-d arrays run as 1-d: NumPy turns 0-d results into scalars.
        self._shape = problem.tiling.shape or (1,)
        self._tiling = problem.tiling if problem.tiling.shape else problem.spec.granularity.tiling((1,))

    def run(
        self,
        inputs: Sequence[Array],
        scale: Array,
        zero_point: Array,
        out: Array | None,
        step: int,
        grad_scale: float | None,
    ) -> Result:
        """Run on checked arrays.

        >>> ReferenceKernel.backend
        'reference'
        """
        problem = self.problem
        if problem.nan == "raise":
            refuse_nan("x", inputs[0])
        arrays = [self._operand(array) for array in inputs]
        everything = {
            "tiling": self._tiling,
            "spec": problem.spec,
            "step": step,
            "ste": problem.ste,
            "fill": problem.nan if problem.nan in {"zero_point", "qmin"} else None,
            "grad_scale": grad_scale,
            "dtype": _dtype(problem.dtype),
        }
        options = {name: everything[name] for name in self._wanted}
        numbers = (scale, zero_point)[: _NUMBERS.get(problem.operation, 2)]
        with np.errstate(all="ignore"):
            result = self._function(*arrays, *numbers, **options)
        if not isinstance(result, tuple):
            return self._deliver(result, out)
        if problem.operation == "fake_quantize_masked":
            y, mask = result
            return self._deliver(y, out), np.packbits(mask.reshape(-1), bitorder="little")
        gx, gs, gz = result
        return gx.reshape(problem.tiling.shape), np.asarray(gs), np.asarray(gz)

    def _operand(self, array: Array) -> Array:
        """An input in the data's shape: packed codes unpacked, packed masks as booleans."""
        spec, shape = self.problem.spec, self.problem.tiling.shape
        if self.problem.operation == "dequantize":
            stored = _dtype(spec.format.storage)
            if array.shape != shape or array.dtype != stored:
                signed = spec.format.is_integer and spec.format.signed
                array = unpack_bits(array, spec.bits, prod(shape), signed=signed)
        elif self.problem.operation == "fake_quantize_masked_backward" and array.dtype == np.uint8:
            array = np.unpackbits(array, count=prod(shape), bitorder="little").astype(np.bool_)
        # One-byte floats are codes: their bits.
        bits = array.view(np.uint8) if array.dtype.itemsize == 1 and array.dtype.kind not in "iub" else array
        return bits.reshape(self._shape)

    def _deliver(self, result: Array, out: Array | None) -> Array:
        """The result in the format's storage type, and in the caller's array where there is one, packed if that is."""
        values = np.asarray(result).reshape(self.problem.tiling.shape)
        form = self.problem.spec.format
        if self.problem.operation == "quantize" and form.kind == "float":
            values = values.view(_dtype(form.storage))
        if out is None:
            return values
        packed = out.dtype != values.dtype or out.shape != values.shape
        np.copyto(out, pack_bits(np.ascontiguousarray(values).reshape(-1), form.bits) if packed else values)
        return out


def _dtype(name: str) -> np.dtype[Any]:
    return np.dtype(getattr(ml_dtypes, name, None) or name)
