"""Integer products in compiled code: ``torch.ops.detent.multiply_quantized``.

Compilers cannot trace the native kernels. The operator is one node of a graph, which runs them. Its inputs are
fake-quantized tensors and their scales, from which it recovers the codes exactly. So gradients of scales and clipped
values come from fake quantization, which compilers trace and fuse, and the operator has only the gradients of a matmul
or convolution. Outputs have the bits of eager mode, if scales are equal.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from detent.torch.arrays import is_channels_last
from detent.torch.integer_product import SIGNED_SHIFT, InputCodes, Requantization, WeightCodes, integer_product
from detent.torch.layers import Convolution, Linear

__all__ = ["multiply_quantized"]


@torch.library.custom_op("detent::multiply_quantized", mutates_args=())
def multiply_quantized(  # noqa: PLR0913, PLR0917 - operators have no keyword-only tensors
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    x_scale: Tensor,
    x_zero_point: Tensor,
    w_scale: Tensor,
    signed: bool,
    settings: Sequence[int],
    float_bias: bool,
    y_scale: Tensor | None = None,
    y_zero_point: Tensor | None = None,
    y_range: Sequence[int] | None = None,
) -> Tensor:
    """Multiply fake-quantized tensors as products of their codes.

    Args:
        x: fake-quantized input, with one scale.
        weight: fake-quantized weight, with one scale per output channel.
        bias: float bias, or None.
        x_scale: scale of x.
        x_zero_point: zero point of x.
        w_scale: scales of the weight.
        signed: whether codes of x are signed.
        settings: stride, padding and dilation of a convolution, one after the other, then its groups; empty for a
            Linear layer.
        float_bias: whether the bias is added in float.
        y_scale: scale of the quantizer that ONNX Runtime fuses into the layer, or None.
        y_zero_point: zero point of that quantizer.
        y_range: smallest and largest code of that quantizer; a third number means that a ReLU comes before it.

    >>> x, w, one = torch.tensor([[0.5, 1.0]]), torch.tensor([[2.0, -4.0]]), torch.ones(1)
    >>> torch.ops.detent.multiply_quantized(x, w, None, one / 2, torch.zeros(1), one, False, [], False)
    tensor([[-3.]])
    """
    zero_point = int(x_zero_point) + (SIGNED_SHIFT if signed else 0)
    codes = (x / x_scale).round_().add_(zero_point).to(torch.uint8)
    scale = w_scale.to(torch.float32)
    units = scale.reshape(-1, *(1,) * (weight.ndim - 1)) if scale.numel() > 1 else scale
    coded = WeightCodes((weight / units).round_().to(torch.int8), scale, float_bias=float_bias)
    kind = _convolution(settings)
    requantization = _requantization(y_scale, y_zero_point, y_range)
    channels_last = is_channels_last(x) or is_channels_last(weight)
    inputs = InputCodes(codes, np.float32(x_scale.item()), zero_point)
    y = integer_product(inputs, coded, bias, kind, requantization, channels_last=channels_last)
    return y.contiguous(memory_format=torch.channels_last) if channels_last and y.ndim == _PICTURES else y.contiguous()


_PICTURES = 4  # axes


def _convolution(settings: Sequence[int]) -> Convolution | None:
    if not settings:
        return None
    *sizes, groups = settings
    rank = len(sizes) // 3
    return Convolution(tuple(sizes[:rank]), tuple(sizes[rank : 2 * rank]), tuple(sizes[2 * rank :]), groups=groups)


def _requantization(
    scale: Tensor | None, zero_point: Tensor | None, y_range: Sequence[int] | None
) -> Requantization | None:
    if scale is None or zero_point is None or y_range is None or not bool(torch.isfinite(scale).all()):
        return None
    low, high, *after_relu = y_range
    if after_relu and int(zero_point) != low:
        return None  # ONNX Runtime keeps the ReLU, and does not fuse the quantizer
    return Requantization(np.float32(scale.item()), int(zero_point), low, high)


@multiply_quantized.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor | None, *rest: Any) -> Tensor:
    kind = _convolution(rest[4])
    return F.linear(x, weight, bias) if kind is None else kind.forward(x, weight, bias)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:  # noqa: ARG001 - the signature is torch's
    x, weight, bias, *_ = inputs
    ctx.save_for_backward(x, weight)
    ctx.settings, ctx.has_bias = inputs[7], bias is not None


def _gradients(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
    x, weight = ctx.saved_tensors
    kind = _convolution(ctx.settings) or Linear()
    needs = ctx.needs_input_grad[0], ctx.needs_input_grad[1], ctx.has_bias and ctx.needs_input_grad[2]
    return *kind.backward(g, x, weight, needs), *(None,) * 9


multiply_quantized.register_autograd(_gradients, setup_context=_setup)
