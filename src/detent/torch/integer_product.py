"""Integer products: the forward pass of a layer as a product of codes, with the bits that ONNX Runtime computes.

::

    A = sum_k (x_k - z) * w_k                 exact, in int32: x and w are codes, z is the zero point of x
    s = fl(s_x * s_w)                         one per output channel
    y = fl(fl(A + b_q) * s)                   Conv, and Linear with rows as input: b_q = round(b / s), the exported bias
    y = fl(fl(A * s) + b)                     other Linear layers, whose exported bias is float

``fl`` rounds to float32. The sums have no rounding errors, so a row of a batch has the same result in every batch, with
any number of threads, and on every machine. ``integer_probe`` decides which kernels multiply. Where PyTorch's int8
kernels are not exact, codes are multiplied as floats: float32 holds sums of up to 2^24 exactly, float64 all sums.

If the output is quantized next, and ONNX Runtime fuses this into the layer, the codes come from the sums
(``requantize``), not from y. The rule is called fused requantization::

    q = clamp(round(fl(fl(A + b_q) * m)) + z_y),    m = fl(s / s_y)
"""

from typing import NamedTuple, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from detent.kernels import scale_sums
from detent.params import QuantParams
from detent.torch.arrays import to_array
from detent.torch.exported_bias import bias_codes
from detent.torch.integer_probe import Settings, convolve_codes, integer_kernels, multiply_codes, pack_convolution

__all__ = [
    "MAX_TERMS",
    "SIGNED_SHIFT",
    "InputCodes",
    "Requantization",
    "WeightCodes",
    "input_codes",
    "integer_product",
]

MAX_TERMS = 33_155  # 255 * 127 * 33155 is half of the int32 range; the bias has the other half
MAX_EXACT_FLOAT32 = 1 << 24  # float32 holds all integers up to this number
SIGNED_SHIFT = 128  # makes signed codes unsigned, as kernels need them
_FLAT = 2  # axes of the input of a Linear layer that is exported as Gemm


class Convolving(Protocol):
    """Settings of a convolution."""

    @property
    def stride(self) -> tuple[int, ...]: ...
    @property
    def padding(self) -> tuple[int, ...]: ...
    @property
    def dilation(self) -> tuple[int, ...]: ...
    @property
    def groups(self) -> int: ...


class InputCodes(NamedTuple):
    """Unsigned codes of an input, in the input's memory order, with scale and zero point."""

    codes: Tensor
    scale: np.float32
    zero_point: int


class Requantization(NamedTuple):
    """Parameters of the quantizer that ONNX Runtime fuses into a layer."""

    scale: np.float32
    zero_point: int
    qmin: int
    qmax: int

    @classmethod
    def of(cls, params: QuantParams) -> "Requantization":
        """Take the parameters of a per-tensor quantizer."""
        spec = params.spec
        return cls(np.float32(params.scale), int(params.zero_point), int(spec.qmin), int(spec.qmax))


class WeightCodes:
    """Codes of a weight (int8, output channels first), with one scale per output channel.

    ``float_bias`` says that a batch norm follows, so the layer's own bias is not exported and is not rounded. The forms
    that kernels read are made when they are first needed.
    """

    __slots__ = ("_column_sums", "_key", "_packed", "codes", "float_bias", "scale")

    def __init__(self, codes: Tensor, scale: Tensor, *, float_bias: bool = False) -> None:
        self.codes = codes
        self.float_bias = float_bias
        self.scale = scale.expand(codes.shape[0]).contiguous()
        self._column_sums: Tensor | None = None
        self._packed: Tensor | None = None
        self._key: object = None

    @property
    def column_sums(self) -> Tensor:
        """Sum of the codes of each output channel."""
        if self._column_sums is None:
            self._column_sums = self.codes.flatten(1).sum(1, dtype=torch.int32)
        return self._column_sums

    def dequantized(self, dtype: torch.dtype) -> Tensor:
        """Return the values of the codes."""
        return (self.codes * self.scale.reshape(-1, *(1,) * (self.codes.ndim - 1))).to(dtype)

    def packed(self, zero_point: int, settings: Settings, x_shape: tuple[int, ...]) -> Tensor:
        """Codes of a convolution's weight, as ``convolve_codes`` reads them."""
        key = zero_point, settings, x_shape
        if self._packed is None or self._key != key:
            self._packed, self._key = pack_convolution(self.codes.contiguous(), zero_point, settings, x_shape), key
        return self._packed


def input_codes(codes: Tensor, params: QuantParams) -> InputCodes:
    """Combine codes of one byte with their parameters; signed codes are shifted in place."""
    shift = SIGNED_SHIFT if params.spec.format.signed else 0
    codes = codes.view(torch.uint8).bitwise_xor_(SIGNED_SHIFT) if shift else codes
    return InputCodes(codes, np.float32(params.scale), int(params.zero_point) + shift)


def integer_product(
    x: InputCodes,
    weight: WeightCodes,
    bias: Tensor | None,
    convolution: Convolving | None,
    requantization: Requantization | None = None,
    *,
    channels_last: bool = False,
) -> Tensor:
    """Multiply codes, and return float32 outputs.

    Args:
        x: the input's codes.
        weight: the weight's codes.
        bias: float bias, or None.
        convolution: settings of the convolution; None multiplies like a Linear layer.
        requantization: if given, the output is fake-quantized with the codes of fused requantization.
        channels_last: whether the output of a convolution is in channels-last order, instead of C order.
    """
    scale = weight.scale * float(x.scale)
    is_gemm = convolution is not None or x.codes.ndim == _FLAT
    codes = bias_codes(bias.detach(), scale) if bias is not None and is_gemm and not weight.float_bias else None
    added = None if bias is None or codes is not None else bias.detach().to(torch.float32)
    if convolution is None:
        rows = x.codes.reshape(-1, x.codes.shape[-1])
        sums, offset = _matmul_sums(rows, x.zero_point, weight, codes)
        y = _finish(sums, offset, scale, added, requantization)
        assert y is not None  # noqa: S101 - the sums are int32, or small enough for float32
        return y.reshape(*x.codes.shape[:-1], y.shape[-1])
    y = _convolve(x, weight, scale, codes, added, convolution, requantization)
    return y if channels_last else y.contiguous()


def _matmul_sums(x: Tensor, zero_point: int, weight: WeightCodes, codes: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return sums [M, N], and an offset per column that must be added to them."""
    zeros = torch.zeros(weight.scale.shape, dtype=torch.int32)
    if integer_kernels().matmul:
        offset = zeros if codes is None else codes
        if zero_point:
            offset = offset - zero_point * weight.column_sums
        return multiply_codes(x.contiguous(), weight.codes), offset
    dtype = _float_type(weight, x.shape[1])
    sums = (x.to(dtype) - zero_point) @ weight.codes.to(dtype).t()
    return _as_sums(sums), zeros if codes is None else codes


def _float_type(weight: WeightCodes, terms: int) -> torch.dtype:
    """Return a float type that holds sums of ``terms`` products exactly, in any accumulation order."""
    largest = int(weight.codes.abs().max()) if weight.codes.numel() else 0
    return torch.float32 if 255 * largest * terms <= MAX_EXACT_FLOAT32 else torch.float64


def _as_sums(sums: Tensor) -> Tensor:
    return sums.to(torch.int32) if sums.dtype == torch.float64 else sums


def _finish(
    sums: Tensor, offset: Tensor, scale: Tensor, bias: Tensor | None, requantization: Requantization | None
) -> Tensor | None:
    """Scale sums whose last axis is the output channel, in place; return None if a sum is too large to be exact."""
    if requantization is not None and bias is None:
        if sums.is_floating_point() and bool((sums.abs() >= MAX_EXACT_FLOAT32).any()):
            return None
        return _requantized(sums, offset, scale, requantization)
    y = sums.view(torch.float32)
    shift = None if bias is None else to_array(bias)
    return y if scale_sums(to_array(sums), to_array(offset), to_array(scale), shift, to_array(y)) else None


def _requantized(sums: Tensor, offset: Tensor, scale: Tensor, to: Requantization) -> Tensor:
    whole = (sums.to(torch.int32) + offset).to(torch.float32)
    codes = (whole * (scale / float(to.scale))).round_().add_(to.zero_point).clamp_(to.qmin, to.qmax)
    return codes.sub_(to.zero_point).mul_(float(to.scale))


def _convolve(
    x: InputCodes,
    weight: WeightCodes,
    scale: Tensor,
    codes: Tensor | None,
    bias: Tensor | None,
    convolution: Convolving,
    requantization: Requantization | None,
) -> Tensor:
    settings = convolution.stride, convolution.padding, convolution.dilation, convolution.groups
    has_kernel = integer_kernels().convolution
    if has_kernel and codes is None and requantization is None:
        packed = weight.packed(x.zero_point, settings, tuple(x.codes.shape))
        return convolve_codes(x.codes, x.zero_point, packed, scale, bias, settings)
    offset = torch.zeros(scale.shape, dtype=torch.int32) if codes is None else codes
    rest = offset, scale, bias, requantization
    y = _finish(_int8_sums(x, weight, settings), *rest) if has_kernel else None
    if y is None:
        y = _finish(_float_sums(x, weight, settings), *rest)
    if y is None:  # float32 has rounded a sum
        y = _finish(_float_sums(x, weight, settings, torch.float64), *rest)
    assert y is not None  # noqa: S101 - sums from float64 are exact
    return y.movedim(-1, 1)


def _int8_sums(x: InputCodes, weight: WeightCodes, settings: Settings) -> Tensor:
    """Return the sums of a convolution as float32, with the channels on the last axis."""
    packed = weight.packed(x.zero_point, settings, tuple(x.codes.shape))
    sums = convolve_codes(x.codes, x.zero_point, packed, torch.ones_like(weight.scale), None, settings)
    return sums.movedim(1, -1).contiguous()


def _float_sums(x: InputCodes, weight: WeightCodes, settings: Settings, dtype: torch.dtype | None = None) -> Tensor:
    """Return the sums of a convolution, computed in floats, with the channels on the last axis."""
    if dtype is None:
        dtype = _float_type(weight, weight.codes[0].numel()) if integer_kernels().float_convolution else torch.float64
    convolve = (F.conv1d, F.conv2d, F.conv3d)[len(settings[0]) - 1]
    sums = convolve(x.codes.to(dtype) - x.zero_point, weight.codes.to(dtype), None, *settings)
    return _as_sums(sums).movedim(1, -1).contiguous()
