"""Learned parameters: scale and zero point as small shifts from the values that data gave.

With the scale itself as the parameter, one step of Adam at 1e-3 can be a tenth of it, and an 8-bit model collapses. A
shift is measured in what it shifts::

    scale      = initial * max(1 + scale_shift, 2^-10)                          one step of 1e-3 is 0.1 %
    zero point = initial + (qmax - qmin) * zero_point_shift                     one step of 1e-3 is 0.1 % of the range

Shifts start at 0, so that weight decay pulls towards the calibrated values, and exist with their final shapes before
there is any data, so that an optimizer may be built at any time. Their gradients are the LSQ and LSQ+ ones over the
unit of each, which under SGD gives the relative step that LSQ gives; optimizers like Adam see no difference.
"""

from typing import Any

import torch
from torch import Tensor

from detent.spec import QuantSpec

__all__ = ["shifted_scale", "shifted_zero_point"]

SMALLEST = 2.0**-10


def shifted_scale(initial: Tensor, shift: Tensor) -> Tensor:
    """The scale, differentiable in its shift.

    >>> shifted_scale(torch.tensor([0.5]), torch.tensor([0.25]))
    tensor([0.6250])
    """
    scale: Tensor = _Scale.apply(initial, shift)
    return scale


def shifted_zero_point(initial: Tensor, shift: Tensor, scale: Tensor, spec: QuantSpec) -> Tensor:
    """The zero point before rounding, differentiable in its shift.

    >>> shifted_zero_point(torch.tensor([3]), torch.tensor([0.1]), torch.tensor([0.5]), QuantSpec("uint8"))
    tensor([28.5000])
    """
    zero_point: Tensor = _ZeroPoint.apply(initial, shift, scale, spec.qmax - spec.qmin)
    return zero_point


class _Scale(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(initial: Tensor, shift: Tensor) -> Tensor:
        return initial * (1.0 + shift.to(initial.dtype)).clamp(min=SMALLEST)  # FSDP may lend it in half precision

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(inputs[0])

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[None, Tensor]:
        (initial,) = ctx.saved_tensors
        return None, g / initial


class _ZeroPoint(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(initial: Tensor, shift: Tensor, scale: Tensor, span: float) -> Tensor:
        return initial + span * shift.to(scale.dtype)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor, float], output: Tensor) -> None:
        ctx.save_for_backward(inputs[2])
        ctx.span = inputs[3]

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[None, Tensor, None, None]:
        (scale,) = ctx.saved_tensors
        return None, g / (ctx.span * scale * scale), None, None
