"""Probe of the integer kernels: whether PyTorch's int8 matmul and convolution are exact on this machine.

On CPUs with VNNI or AMX, the kernels add products of codes in int32. On other CPUs they add two products in an int16
accumulator, which saturates without an error. Flags of the CPU do not tell which kernel runs: an environment variable
can select another one. So the first integer layer of a process multiplies codes with the largest possible products
(255 * 127, 255 * -128), and compares the sums with exact ones. The operators are not part of PyTorch's public
interface. If one is missing, or has another signature, its kernel counts as not exact.

Where a kernel is not exact, codes are multiplied as floats (``integer_product``), which gives the same sums.
"""

from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["IntegerKernels", "Settings", "convolve_codes", "integer_kernels", "multiply_codes", "pack_convolution"]

Sizes = tuple[int, ...]
Settings = tuple[Sizes, Sizes, Sizes, int]  # stride, padding, dilation, groups
MATMUL_SHAPES = ((1, 3, 1), (5, 64, 17), (33, 130, 48), (64, 256, 64))  # rows, terms, columns
_ONE = torch.ones(1)  # packing does not use scales, and would read one scale per channel one by one
# Samples, input channels, size of the picture, output channels, size of the kernel, groups.
CONV_SHAPES = (
    *((1, 3, 5, 4, 3, 1), (2, 16, 8, 16, 3, 1), (2, 64, 7, 32, 1, 1)),
    *((1, 16, 6, 16, 3, 16), (1, 16, 6, 32, 3, 4)),
)


class IntegerKernels(NamedTuple):
    """Which kernels are exact on this machine.

    Attributes:
        matmul: whether the int8 matmul is exact.
        convolution: whether the int8 convolution is exact.
        float_convolution: whether float32 convolutions of small integers are exact, in any accumulation order.
    """

    matmul: bool
    convolution: bool
    float_convolution: bool

    @property
    def note(self) -> str:
        """Which kernels multiply codes, as text."""
        if self.matmul and self.convolution:
            return "int8 kernels"
        if not (self.matmul or self.convolution):
            return "float kernels, because the int8 kernels of this machine are not exact"
        exact, other = ("matmul", "convolution") if self.matmul else ("convolution", "matmul")
        return f"the int8 {exact}, and float kernels for the {other}, whose int8 kernel is not exact here"


def multiply_codes(x: Tensor, weight: Tensor) -> Tensor:
    """Multiply uint8 codes [M, K] by int8 codes [N, K]; return the int32 sums [M, N]."""
    return torch._int_mm(x, weight.t())


def pack_convolution(weight: Tensor, zero_point: int, settings: Settings, x_shape: Sizes) -> Tensor:
    """Arrange int8 codes of a convolution's weight as ``convolve_codes`` reads them; the result is opaque."""
    layout = (*map(_listed, settings), list(x_shape))
    packed: Tensor = torch.ops.onednn.qconv_prepack(weight, _ONE, 1.0, zero_point, *layout)
    return packed


def convolve_codes(
    x: Tensor,
    zero_point: int,
    packed: Tensor,
    scale: Tensor,
    bias: Tensor | None,
    settings: Settings,
    zeros: Tensor | None = None,
) -> Tensor:
    """Convolve uint8 codes with packed int8 codes; return ``float32(sum) * scale [+ bias]``, in channels-last order.

    ``settings`` are stride, padding, dilation and groups. Padding has the value 0, which is the code ``zero_point``.
    ``zeros`` are int32 zeros of the scale's shape; without them, they are made.
    """
    zeros = torch.zeros(scale.shape, dtype=torch.int32) if zeros is None else zeros
    output: tuple[object, ...] = (1.0, 0, torch.float32, "none", [], "")
    call = (x, 1.0, zero_point, packed, scale, zeros, bias, *map(_listed, settings), *output)
    y: Tensor = torch.ops.onednn.qconv_pointwise(*call)
    return y


def _listed(value: object) -> object:
    return list(value) if isinstance(value, tuple) else value


@lru_cache(maxsize=1)
def integer_kernels() -> IntegerKernels:
    """Return which kernels are exact; the first call runs the probe, which takes some milliseconds."""
    with torch.no_grad():
        checks = (_matmul_is_exact, _convolution_is_exact, _float_convolution_is_exact)
        return IntegerKernels(*map(_holds, checks))


def _holds(check: Callable[[], bool]) -> bool:
    try:
        return check()
    except (AttributeError, RuntimeError, TypeError, ValueError):  # the operator is missing, or has another signature
        return False


def _codes(shape: Sizes, pattern: int, dtype: torch.dtype) -> Tensor:
    """Return extreme codes: all of one sign, alternating signs, or alternating runs."""
    count = torch.Size(shape).numel()
    low, high = (0, 255) if dtype == torch.uint8 else (-128, 127)
    index = torch.arange(count)
    if dtype == torch.uint8:
        uniform, mixed, first_mixed = high, index % 3 == 0, 2
    else:
        uniform, mixed, first_mixed = (high, low)[pattern % 2], index % 4 < 2, 3
    values = torch.full((count,), uniform) if pattern < first_mixed else torch.where(mixed, low, high)
    return values.to(dtype).reshape(shape)


def _matmul_is_exact() -> bool:
    for rows, terms, columns in MATMUL_SHAPES:
        for pattern in range(4):
            x, w = _codes((rows, terms), pattern, torch.uint8), _codes((columns, terms), pattern, torch.int8)
            if not torch.equal(multiply_codes(x, w).double(), x.double() @ w.double().t()):
                return False
    return True


def _convolutions(check: Callable[[Tensor, Tensor, Settings], Tensor], zero_point: int) -> bool:
    for samples, channels, size, outputs, kernel, groups in CONV_SHAPES:
        settings = ((1, 1), (kernel // 2,) * 2, (1, 1), groups)
        for pattern in range(4):
            x = _codes((samples, channels, size, size), pattern, torch.uint8)
            w = _codes((outputs, channels // groups, kernel, kernel), pattern, torch.int8)
            exact = F.conv2d(x.double() - zero_point, w.double(), None, *settings)
            if not torch.equal(check(x, w, settings).double(), exact):
                return False
    return True


def _convolution_is_exact() -> bool:
    def convolve(x: Tensor, w: Tensor, settings: Settings) -> Tensor:
        laid = x.contiguous(memory_format=torch.channels_last)
        packed = pack_convolution(w, 3, settings, tuple(x.shape))
        return convolve_codes(laid, 3, packed, torch.ones(w.shape[0]), None, settings)

    return _convolutions(convolve, 3)


def _float_convolution_is_exact() -> bool:
    return _convolutions(lambda x, w, settings: F.conv2d(x.float() - 3, w.float(), None, *settings), 3)
