"""NativeKernel: the C++ kernel for a problem, an implementation of the protocol ``Kernel``.

For each method of the extension module's ``Runner``, a method of the same name here allocates the result, packs codes
and checks for NaN.
"""

from collections.abc import Callable, Sequence
from functools import cached_property
from math import sqrt
from typing import Any

import numpy as np
from numpy.typing import NDArray

from detent.checks import FLOATS, refuse_nan
from detent.formats import BYTE, MAX_BITS
from detent.kernels.native import BYTES, PACKED, WORDS, is_ready, make_runner, ready
from detent.kernels.problem import OPERATIONS, Problem, Result
from detent.kernels.reductions import pack_bits, unpack_bits
from detent.kernels.reference.sets import counts
from detent.spec import code_dtype

__all__ = ["NativeKernel"]

Array = NDArray[Any]


class NativeKernel:
    """C++ kernel for a problem."""

    backend = "native"

    def __init__(self, problem: Problem) -> None:
        operation, bits = OPERATIONS[problem.operation], problem.spec.bits
        self.problem = problem
        self._shape = problem.tiling.shape
        self._codes = code_dtype(problem.spec)
        self._result = self._codes if "codes" in operation.outputs else FLOATS[problem.dtype]
        self._runner = make_runner(problem, BYTES if bits <= BYTE else WORDS)
        # Codes of 8 and 16 bits need no packing. Codes of 9 to 15 bits are packed in Python, fewer bits in the kernel.
        self._packed = None
        if bits <= BYTE or bits == MAX_BITS:
            self._packed = self._runner if bits in {BYTE, MAX_BITS} else make_runner(problem, PACKED)
        # an unbound method, because a bound method would make a reference cycle
        self._launch: Callable[..., Result] = getattr(NativeKernel, f"_{operation.native}")
        self._is_learned = operation.native == "learned"

    def run(
        self,
        inputs: Sequence[Array],
        scale: Array,
        zero_point: Array,
        out: Array | None,
        step: int,  # noqa: ARG002 - no native kernel rounds stochastically
        grad_scale: float | None,
    ) -> Result:
        """Run the kernel on arrays that were checked."""
        if self._is_learned:
            return self._learned(inputs, scale, zero_point, grad_scale)
        if out is None:
            return self._launch(self, inputs, scale, zero_point, np.empty(self._shape, self._result))
        if is_ready(out):
            return self._launch(self, inputs, scale, zero_point, out)
        result = self._launch(self, inputs, scale, zero_point, np.empty(out.shape, out.dtype))
        np.copyto(out, result[0] if isinstance(result, tuple) else result)
        return (out, *result[1:]) if isinstance(result, tuple) else out

    def _quantize(self, inputs: Sequence[Array], scale: Array, zero_point: Array, out: Array) -> Array:
        runner = self._runner
        if out.shape != self._shape or out.dtype != self._result:
            if self._packed is None:
                codes = self._quantize(inputs, scale, zero_point, np.empty(self._shape, self._result))
                np.copyto(out, pack_bits(codes.reshape(-1), self.problem.spec.bits))
                return out
            runner = self._packed
        if runner.quantize(ready(inputs[0]), scale, zero_point, ready(out)) and self.problem.nan == "raise":
            refuse_nan("x", inputs[0])
        return out

    def _dequantize(self, inputs: Sequence[Array], scale: Array, zero_point: Array, out: Array) -> Array:
        codes, runner = inputs[0], self._runner
        if codes.shape != self._shape or codes.dtype != self._codes:
            if self._packed is None:
                spec = self.problem.spec
                codes = unpack_bits(codes, spec.bits, out.size, signed=spec.format.signed)
            else:
                runner = self._packed
        runner.dequantize(ready(codes), scale, zero_point, ready(out))
        return out

    def _fake_quantize(self, inputs: Sequence[Array], scale: Array, zero_point: Array, out: Array) -> Array:
        if self._runner.fake_quantize(ready(inputs[0]), scale, zero_point, ready(out)) and self.problem.nan == "raise":
            refuse_nan("x", inputs[0])
        return out

    def _fake_quantize_masked(
        self, inputs: Sequence[Array], scale: Array, zero_point: Array, out: Array
    ) -> tuple[Array, Array]:
        mask = np.empty(-(-out.size // BYTE), np.uint8)
        self._runner.fake_quantize_masked(ready(inputs[0]), scale, zero_point, ready(out), mask)
        return out, mask

    def _backward(self, inputs: Sequence[Array], scale: Array, zero_point: Array, out: Array) -> Array:
        self._runner.backward(ready(inputs[0]), ready(inputs[1]), scale, zero_point, ready(out))
        return out

    def _dequantize_backward(self, inputs: Sequence[Array], scale: Array, zero_point: Array, out: Array) -> Array:
        self._runner.dequantize_backward(ready(inputs[0]), scale, zero_point, ready(out))
        return out

    def _masked_backward(self, inputs: Sequence[Array], scale: Array, zero_point: Array, out: Array) -> Array:  # noqa: ARG002
        self._runner.masked_backward(ready(inputs[0]), ready(inputs[1]), ready(out))
        return out

    def run_channels_last(
        self, inputs: Sequence[Array], scale: Array, zero_point: Array, images: tuple[int, int]
    ) -> tuple[Array, Array, Array]:
        """Compute the gradients of x and of learned parameters for channels-last arrays; sums add in C order.

        ``images`` has the points and the channels of an image. Arrays have the shape (images, points, channels), or a
        shape with more axes in place of points; each parameter set has whole images.
        """
        return self._learned(inputs, scale, zero_point, None, images)

    def _learned(
        self,
        inputs: Sequence[Array],
        scale: Array,
        zero_point: Array,
        grad_scale: float | None,
        images: tuple[int, int] = (0, 0),
    ) -> tuple[Array, Array, Array]:
        gx = self._backward(inputs, scale, zero_point, np.empty(self._shape, self._result))
        of_scale, of_zero_point = np.zeros(scale.shape), np.zeros(scale.shape)
        self._runner.learned(ready(inputs[0]), ready(inputs[1]), scale, zero_point, of_scale, of_zero_point, *images)
        factor = self._default_factor if grad_scale is None else grad_scale
        with np.errstate(all="ignore"):
            gs, gz = ((sums * factor).astype(scale.dtype) for sums in (of_scale, of_zero_point))
        return gx, np.asarray(gs), np.asarray(gz) if self.problem.spec.format.is_integer else np.zeros_like(scale)

    @cached_property
    def _default_factor(self) -> Array:
        """The factor ``1 / sqrt(N * max(|qmax|, 1))`` for each parameter set of N elements."""
        weight, sizes = max(abs(self.problem.spec.qmax), 1), np.asarray(counts(self.problem.tiling))
        different, which = np.unique(sizes, return_inverse=True)
        factors = np.asarray([1.0 / sqrt(max(int(size), 1) * weight) for size in different])
        return np.asarray(factors[which].reshape(self.problem.tiling.scale_shape))
