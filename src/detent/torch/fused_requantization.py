"""Fused requantization of tensors: codes that are rounded once from the sums of an integer product.

ONNX Runtime fuses a quantizer into the integer layer before it, so the quantizer's codes come from the sums, not from
the layer's output. In evaluation, the layer computes these codes (``integer_product``). In training and with gradients,
the quantizer computes them, because its scale may depend on the layer's output. It finds the sums again in its input::

    sum  = round(fl(x * fl(1 / s)))                          if fl(sum * s) = x; s is the unit of the channel
    code = clamp(round(fl(sum * m)) + z_y),    m = fl(s / s_y)

This holds for sums below 2^21, and after operators that move values or a ReLU. For all other elements, codes are those
of the plain quantizer. The two rules differ by at most one code, at ties. Masks and gradients are those of the plain
quantizer.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from detent import kernels
from detent.formats import BYTE
from detent.granularity import PerTensor
from detent.spec import QuantSpec
from detent.torch.arrays import order_of, to_array
from detent.torch.integer_product import Requantization

__all__ = ["SumUnits", "Units", "follow_sums", "follow_sums_traced"]


class Units:
    """Units of the sums of a layer's output, one per channel: of the last axis, or of axis 1."""

    __slots__ = ("channels_are_last", "tensor")

    def __init__(self, tensor: Tensor, *, channels_are_last: bool) -> None:
        self.tensor, self.channels_are_last = tensor, channels_are_last


class SumUnits:
    """The link between an integer layer and the quantizer that ONNX Runtime fuses into it.

    In each pass, the layer writes the units of its output, or None if its output is not ``fl(sum * s)``. With
    ``after_relu``, ONNX Runtime fuses only quantizers whose smallest code has the value 0.
    """

    def __init__(self, *, after_relu: bool = False) -> None:
        self.after_relu = after_relu
        self.units: Units | None = None

    @classmethod
    def for_quantizer(cls, spec: QuantSpec, *, after_relu: bool = False) -> "SumUnits | None":
        """Make a link to a quantizer, or return None if its codes cannot be those of an integer kernel."""
        is_integer = spec.format.is_integer and spec.bits <= BYTE and spec.rounding.kind == "half_even"
        return cls(after_relu=after_relu) if is_integer and spec.granularity == PerTensor() else None

    def units_for(self, x: Tensor, to: Requantization) -> Units | None:
        """Return the units of x, or None if its codes do not come from sums."""
        if self.units is None or x.dtype != torch.float32:
            return None
        return None if self.after_relu and to.zero_point != to.qmin else self.units

    def take(self, x: Tensor) -> Units | None:
        """Return the units of x for compiled code, and forget them, so that they are not an output of the graph."""
        units, self.units = self.units, None
        return units if x.dtype == torch.float32 else None

    def __reduce__(self) -> tuple[Any, ...]:
        return _new_link, (self.after_relu,)  # units belong to one pass


def _new_link(after_relu: bool) -> SumUnits:
    return SumUnits(after_relu=after_relu)


def follow_sums(x: Tensor, out: Tensor, units: Units, to: Requantization) -> None:
    """Overwrite codes or fake-quantized values of x with those of fused requantization.

    ``out`` has the memory order of x, and codes of one byte or float32 values.
    """
    order = order_of(x, _ANY_ORDER)
    run = _run_length(x.shape, order.axes, units)
    if run:
        arrays = to_array(order.lay(x)), to_array(units.tensor), run, to_array(order.lay(out))
        kernels.requantize(*arrays, scale=float(to.scale), zero_point=to.zero_point, qmin=to.qmin, qmax=to.qmax)


def _run_length(shape: torch.Size, axes: tuple[int, ...] | None, units: Units) -> int:
    """Return how many elements of a channel follow each other in memory; 0 if channels cannot be told apart."""
    if units.channels_are_last:
        return 1 if axes is None else 0
    if axes is not None:
        return 1 if axes == (0, *range(2, len(shape)), 1) else 0
    per_row, rest = divmod(shape[1:].numel(), units.tensor.numel())
    return 0 if rest else per_row


def follow_sums_traced(
    y: Tensor, x: Tensor, units: Units, link: SumUnits, scale: Tensor, zero_point: Tensor, spec: QuantSpec
) -> Tensor:
    """Return ``follow_sums`` of the fake-quantized y in compiled code; gradients go to y."""
    settings = [int(spec.qmin), int(spec.qmax), int(link.after_relu), int(units.channels_are_last)]
    followed: Tensor = _followed(y, x, units.tensor, scale, zero_point, settings)
    return followed


@torch.library.custom_op("detent::follow_sums", mutates_args=())
def _followed(
    y: Tensor, x: Tensor, units: Tensor, scale: Tensor, zero_point: Tensor, settings: Sequence[int]
) -> Tensor:
    qmin, qmax, after_relu, channels_are_last = settings
    out = y.clone()
    whole = int(zero_point.item())
    if out.stride() == x.stride() and not (after_relu and whole != qmin):
        of_channels = Units(units.contiguous(), channels_are_last=bool(channels_are_last))
        follow_sums(x, out, of_channels, Requantization(np.float32(scale.item()), whole, qmin, qmax))
    return out


_ANY_ORDER = QuantSpec("int8")


@_followed.register_fake
def _(y: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(y)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    pass


def _gradients(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ARG001 - the signature is torch's
    return g, *(None,) * 5


_followed.register_autograd(_gradients, setup_context=_setup)
