"""The exported bias: a bias as ONNX files store it, in int32.

::

    s   = fl(s_x * s_w)                   the unit, one per output channel
    b_q = round(b / s)                    in float64, half to even
    b'  = fl(b_q * s)                     the bias that the file has

Files keep a bias in float if a code exceeds int32, or if a unit is not a normal number. Gradients pass straight through
the rounding.
"""

from typing import Any

import torch
from torch import Tensor

__all__ = ["bias_codes", "exported_bias"]

MAX_BIAS_CODE = 2**31 - 1
SMALLEST_NORMAL = torch.finfo(torch.float32).smallest_normal


def bias_codes(bias: Tensor, unit: Tensor) -> Tensor | None:
    """Return the int32 codes of a bias, or None if files keep the bias in float.

    >>> bias_codes(torch.tensor([0.5, -0.26]), torch.tensor([0.1, 0.1]))
    tensor([ 5, -3], dtype=torch.int32)
    """
    if not bool((unit.abs() >= SMALLEST_NORMAL).all()):
        return None
    codes = torch.round(bias.double() / unit.double())
    return codes.to(torch.int32) if bool((codes.abs() <= MAX_BIAS_CODE).all()) else None


def exported_bias(bias: Tensor, unit: Tensor) -> Tensor:
    """Round a bias to multiples of the unit, as it is exported; the gradient passes unchanged."""
    rounded: Tensor = _ExportedBias.apply(bias, unit.detach())
    return rounded


class _ExportedBias(torch.autograd.Function):
    """Rounds a bias to the grid of its int32 codes."""

    generate_vmap_rule = True

    @staticmethod
    def forward(bias: Tensor, unit: Tensor) -> Tensor:
        codes = torch.round(bias.double() / unit.double())
        fits = (codes.abs() <= MAX_BIAS_CODE).all() & (unit.abs() >= SMALLEST_NORMAL).all()
        rounded = codes.to(torch.float32) * unit.to(torch.float32)
        return torch.where(fits, rounded, bias.to(torch.float32)).to(bias.dtype)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:
        return g, None
