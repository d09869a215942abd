"""The reference backend: runs every problem on NumPy arrays with the reference functions."""

from collections.abc import Sequence
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from detent.checks import FLOATS, refuse_nan
from detent.kernels.problem import OPERATIONS, Problem, Result
from detent.kernels.reductions import pack_bits, unpack_bits
from detent.spec import code_dtype

__all__ = ["ReferenceKernel"]

Array = NDArray[Any]


class ReferenceKernel:
    """Kernel that runs a problem with its reference function."""

    backend = "reference"

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.operation = OPERATIONS[problem.operation]
        # Treat 0-d arrays as 1-d, because NumPy turns 0-d results into scalars.
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
        """Run the kernel on arrays that were checked."""
        problem, operation = self.problem, self.operation
        if problem.nan == "raise":
            refuse_nan("x", inputs[0])
        arrays = [self._operand(array) for array in inputs]
        arguments = {
            "scale": scale,
            "zero_point": zero_point,
            "tiling": self._tiling,
            "spec": problem.spec,
            "step": step,
            "ste": problem.ste,
            "fill": problem.nan if problem.nan in {"zero_point", "qmin"} else None,
            "grad_scale": grad_scale,
            "dtype": FLOATS[problem.dtype],
        }
        with np.errstate(all="ignore"):
            result = operation.reference(*arrays, **{name: arguments[name] for name in operation.keywords})
        if len(operation.outputs) == 1:
            return self._deliver(result, out)
        if "mask" in operation.outputs:
            y, mask = result
            return self._deliver(y, out), np.packbits(mask.reshape(-1), bitorder="little")
        gx, gs, gz = result
        return gx.reshape(problem.tiling.shape), np.asarray(gs), np.asarray(gz)

    def _operand(self, array: Array) -> Array:
        """Convert an input to the data's shape: unpack packed codes, and unpack masks to booleans."""
        spec, shape = self.problem.spec, self.problem.tiling.shape
        if "codes" in self.operation.inputs:
            if array.shape != shape or array.dtype != code_dtype(spec):
                signed = spec.format.is_integer and spec.format.signed
                array = unpack_bits(array, spec.bits, prod(shape), signed=signed)
        elif "mask" in self.operation.inputs and array.dtype == np.uint8:
            array = np.unpackbits(array, count=prod(shape), bitorder="little").astype(np.bool_)
        # Floats of one byte are codes, and are passed as their bits.
        bits = array.view(np.uint8) if array.dtype.itemsize == 1 and array.dtype.kind not in "iub" else array
        return bits.reshape(self._shape)

    def _deliver(self, result: Array, out: Array | None) -> Array:
        """Convert the result to the format's storage type, pack it if ``out`` is packed, and copy it to ``out``."""
        values = np.asarray(result).reshape(self.problem.tiling.shape)
        spec = self.problem.spec
        if "codes" in self.operation.outputs and spec.format.kind == "float":
            values = values.view(code_dtype(spec))
        if out is None:
            return values
        packed = out.dtype != values.dtype or out.shape != values.shape
        np.copyto(out, pack_bits(np.ascontiguousarray(values).reshape(-1), spec.bits) if packed else values)
        return out
