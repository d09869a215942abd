"""Eager mode: native kernels run the operations of ``detent.ops`` on plain tensors in CPU memory, without copies.

Results have the memory order of x. No gradients are recorded. Arguments are not checked: to check that parameters fit
x, call ``check``.
"""

from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from detent import kernels
from detent.kernels import Problem, minmax, observe
from detent.kernels.native_kernel import NativeKernel
from detent.params import QuantParams
from detent.plan import Plan, find_plan
from detent.scale_rule import Parameters
from detent.spec import QuantSpec
from detent.ste import Custom, Estimator
from detent.torch.arrays import FLOAT_TYPES, Order, Slot, borrow, borrow_as, order_of, to_array, to_tensor

__all__ = [
    "backward",
    "bounds",
    "check",
    "dequantize",
    "fake_quantize",
    "fake_quantize_dynamic",
    "fake_quantize_masked",
    "learned_backward",
    "masked_backward",
    "quantize",
    "quantize_masked",
]

Array = NDArray[Any]


def check(x: Tensor, params: QuantParams) -> None:
    """Raise unless the parameters fit x."""
    _plan("fake_quantize", x, params.spec).check_params(params)


def fake_quantize(x: Tensor, params: QuantParams, step: int = 0, slot: Slot | None = None) -> Tensor:
    """Fake-quantize x into new memory, or into scratch memory if ``slot`` is given."""
    order = order_of(x, params.spec)
    data = order.lay(x)
    y = borrow(slot, data)
    _plan("fake_quantize", data, order.spec).run(to_array(data), params, out=to_array(y), step=step)
    return order.restore(y)


def quantize(x: Tensor, params: QuantParams) -> Tensor:
    """Quantize x to codes of one byte, in the memory order of x; a NaN in x is an error."""
    order = order_of(x, params.spec)
    data = order.lay(x)
    codes = _new_codes(data, params.spec)
    _plan("quantize", data, order.spec).run(to_array(data), params, out=to_array(codes))
    return order.restore(codes)


def quantize_masked(x: Tensor, params: QuantParams, ste: Estimator) -> tuple[Tensor, Tensor] | None:
    """Quantize x to codes of one byte, with the mask of ``fake_quantize_masked``; None if no kernel supports this.

    The codes have the memory order of x, and the mask that of the codes. A NaN in x gives None, too.
    """
    order = order_of(x, params.spec)
    data = order.lay(x)
    codes, mask = _new_codes(data, params.spec), np.empty(-(-data.numel() // 8), np.uint8)
    tiling = order.spec.granularity.tiling(tuple(data.shape))
    problem = Problem("fake_quantize_masked", tiling, FLOAT_TYPES[x.dtype], order.spec, ste, "propagate")
    arrays = params.compute_arrays("float64" if x.dtype == torch.float64 else "float32")
    saw_nan = kernels.quantize_masked(problem, to_array(data), *arrays, to_array(codes), mask)
    return (order.restore(codes), to_tensor(mask)) if saw_nan is False else None


def dequantize(codes: Tensor, params: QuantParams, dtype: torch.dtype, slot: Slot | None = None) -> Tensor:
    """Dequantize codes of one byte, in their memory order."""
    order = order_of(codes, params.spec)
    data = order.lay(codes)
    y = borrow_as(slot, data.shape, dtype)
    plan = find_plan("dequantize", tuple(data.shape), FLOAT_TYPES[dtype], order.spec)
    plan.run(to_array(data), params, out=to_array(y))
    return order.restore(y)


def fake_quantize_masked(x: Tensor, params: QuantParams, ste: Estimator, step: int = 0) -> tuple[Tensor, Tensor, Order]:
    """Fake-quantize x; return the result, a mask, and the memory order of both.

    The mask has one bit per element, which is 1 if the gradient of the element passes.
    """
    order = order_of(x, params.spec)
    data = order.lay(x)
    y = torch.empty_like(data)
    plan = _plan("fake_quantize_masked", data, order.spec, ste)
    _, mask = cast("tuple[Array, Array]", plan.run(to_array(data), params, out=to_array(y), step=step))
    return order.restore(y), to_tensor(mask), order


def masked_backward(g: Tensor, mask: Tensor, order: Order, params: QuantParams) -> Tensor:
    """Return the gradient of x, given the output gradient g and the mask of ``fake_quantize_masked``."""
    gradient = order.lay(g)
    gx = torch.empty_like(gradient)
    plan = _plan("fake_quantize_masked_backward", gradient, order.spec)
    plan.run(to_array(gradient), to_array(mask), params, out=to_array(gx))
    return order.restore(gx)


def backward(
    g: Tensor, x: Tensor, params: QuantParams, ste: Estimator, step: int = 0, *, reuse: bool = False
) -> Tensor:
    """Return the gradient of x, given the output gradient g; ``reuse`` permits overwriting g."""
    order = order_of(x, params.spec)
    data, gradient = order.lay(x), order.lay(g)
    gx = gradient if reuse else torch.empty_like(gradient)
    plan = _plan("fake_quantize_backward", data, order.spec, ste)
    plan.run(to_array(gradient), to_array(data), params, out=to_array(gx), step=step)
    return order.restore(gx)


def learned_backward(
    g: Tensor, x: Tensor, params: QuantParams, ste: Estimator, step: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of x, scale and zero point; sums add elements in C order, whatever the memory order of x."""
    order = order_of(x, params.spec)
    images = order.images(x.shape) if x.dtype == torch.float32 and not isinstance(ste, Custom) else None
    if images is not None:
        data, gradient = order.lay(x), order.lay(g)
        kernel = _plan("fake_quantize_learned_backward", data, order.spec, ste).kernel
        if isinstance(kernel, NativeKernel):
            arrays = to_array(gradient), to_array(data)
            parts = kernel.run_channels_last(arrays, *params.compute_arrays("float32"), images)
            gx, gs, gz = map(to_tensor, parts)
            return order.restore(gx), gs, gz
    data, gradient = x.contiguous(), g.contiguous()
    plan = _plan("fake_quantize_learned_backward", data, params.spec, ste)
    gradients = plan.run(to_array(gradient), to_array(data), params, step=step)
    gx, gs, gz = (to_tensor(part) for part in cast("tuple[Array, Array, Array]", gradients))
    return gx, gs, gz


def bounds(x: Tensor, spec: QuantSpec) -> tuple[Array, Array, int]:
    """Return the smallest and largest finite element of each parameter set, and the number of non-finite elements."""
    order = order_of(x, spec)
    data = order.lay(x)
    return minmax(to_array(data), order.spec.granularity.tiling(tuple(data.shape)))


def fake_quantize_dynamic(
    x: Tensor, spec: QuantSpec, slot: Slot | None = None, *, to_codes: bool = False
) -> tuple[Tensor, QuantParams, int] | None:
    """Compute the range of x and fake-quantize x, in one pass over memory; ``to_codes`` quantizes instead.

    Returns the fake-quantized x or the codes, the parameters, and the number of non-finite elements. Returns None if
    no kernel supports the spec and the type of x.
    """
    order = order_of(x, spec)
    data = order.lay(x)
    y = _new_codes(data, spec) if to_codes else borrow(slot, data)
    tiling = order.spec.granularity.tiling(tuple(data.shape))
    problem = Problem("fake_quantize", tiling, FLOAT_TYPES[x.dtype], order.spec, None, "propagate")
    observed = observe(problem, to_array(data), to_array(y), to_codes=to_codes)
    if observed is None:
        return None
    lo, hi, scale, zero_point, nonfinite = observed
    params = QuantParams.trusted(spec, Parameters(scale, zero_point.astype("int32")), lo, hi)
    return order.restore(y), params, nonfinite


def _new_codes(data: Tensor, spec: QuantSpec) -> Tensor:
    return torch.empty(data.shape, dtype=torch.int8 if spec.format.signed else torch.uint8)


def _plan(operation: str, data: Tensor, spec: QuantSpec, ste: Estimator | None = None) -> Plan:
    return find_plan(operation, tuple(data.shape), FLOAT_TYPES[data.dtype], spec, ste)
