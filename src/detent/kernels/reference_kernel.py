"""The reference backend: NumPy arrays through the reference functions, for every problem there is."""

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from detent._checks import refuse_nan
from detent.kernels import reference
from detent.kernels.problem import Problem, Result
from detent.packing import pack

__all__ = ["REFERENCE", "ReferenceKernel"]

Array = NDArray[Any]
_FORWARD = frozenset({"spec", "step", "fill"})
_BACKWARD = frozenset({"spec", "step", "ste"})

# Each operation's function, and the keyword arguments it takes beside the tiling.
REFERENCE: Mapping[str, tuple[Callable[..., Any], frozenset[str]]] = MappingProxyType(
    {
        "quantize": (reference.quantize, _FORWARD),
        "dequantize": (reference.dequantize, frozenset({"spec", "dtype"})),
        "fake_quantize": (reference.fake_quantize, _FORWARD),
        "quantize_backward": (reference.quantize_backward, _BACKWARD),
        "dequantize_backward": (reference.dequantize_backward, frozenset()),
        "fake_quantize_backward": (reference.fake_quantize_backward, _BACKWARD),
        "fake_quantize_learned_backward": (reference.fake_quantize_learned_backward, _BACKWARD | {"grad_scale"}),
    }
)


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
        arrays = [_bit_patterns(array).reshape(self._shape) for array in inputs]
        everything = {
            "spec": problem.spec,
            "step": step,
            "ste": problem.ste,
            "fill": problem.nan if problem.nan in {"zero_point", "qmin"} else None,
            "grad_scale": grad_scale,
            "dtype": _dtype(problem.dtype),
        }
        options = {name: everything[name] for name in self._wanted}
        numbers = (scale,) if problem.operation == "dequantize_backward" else (scale, zero_point)
        with np.errstate(all="ignore"):
            result = self._function(*arrays, *numbers, tiling=self._tiling, **options)
        if isinstance(result, tuple):
            gx, gs, gz = result
            return gx.reshape(problem.tiling.shape), np.asarray(gs), np.asarray(gz)
        return self._deliver(np.asarray(result).reshape(problem.tiling.shape), out)

    def _deliver(self, values: Array, out: Array | None) -> Array:
        """The result in the format's storage type, and in the caller's array where there is one, packed if that is."""
        form = self.problem.spec.format
        if self.problem.operation == "quantize" and form.kind == "float":
            values = values.view(_dtype(form.storage))
        if out is None:
            return values
        packed = out.dtype != values.dtype or out.shape != values.shape
        np.copyto(out, pack(values, form.bits) if packed else values)
        return out


def _dtype(name: str) -> np.dtype[Any]:
    return np.dtype(getattr(ml_dtypes, name, None) or name)


def _bit_patterns(array: Array) -> Array:
    """One-byte floats, which are codes, as uint8; anything else as it is."""
    return array.view(np.uint8) if array.dtype.itemsize == 1 and array.dtype.kind not in "iu" else array
