"""Products: linear maps and convolutions of fake quantized operands that keep for backward what the float ones keep.

A product of fake quantized tensors would keep the quantized copies, beside the originals that their neighbours keep
alive. These keep the originals alone, and quantize the input once more in backward, which is one pass over memory::

    forward   y  = product(fq(x), fq(w))                                    kept: x and w, as in the float model
    backward  gx = estimate(product_x(g, fq(w)), x),   gw = estimate(product_w(g, fq(x)), w)

A weight may be multiplied by a factor per channel before it is quantized and divided by it afterwards: this is how a
layer before a batch normalisation sees the very codes that the folded layer will have.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from detent.ste import Estimator, Identity
from detent.torch import eager
from detent.torch.operator import Values, gradient_of, learned_gradients, settled

__all__ = ["Convolution", "Linear", "Operand", "Product", "Weight", "product"]


class Product(Protocol):
    """A bilinear map with a bias.

    >>> a: Product = Linear()
    >>> gx, gw, gb = a.backward(torch.ones(1, 1), torch.ones(1, 2), torch.ones(1, 2), (True, True, False))
    >>> a.forward(torch.ones(1, 2), torch.ones(1, 2), None).item(), gx.tolist(), gb
    (2.0, [[1.0, 1.0]], None)
    """

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """The product."""
        ...

    def backward(
        self, g: Tensor, x: Tensor, weight: Tensor, needs: Sequence[bool]
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """The gradients of x, weight and bias, where needed."""
        ...


class Linear:
    """``x @ weight.T + bias``.

    >>> Linear().forward(torch.ones(1, 2), torch.ones(3, 2), None)
    tensor([[2., 2., 2.]])
    """

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """The product."""
        return F.linear(x, weight, bias)

    def backward(
        self, g: Tensor, x: Tensor, weight: Tensor, needs: Sequence[bool]
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """The gradients of x, weight and bias, where needed."""
        rows = g.reshape(-1, g.shape[-1])
        gx = (rows @ weight).view_as(x) if needs[0] else None
        gw = rows.t() @ x.reshape(-1, x.shape[-1]) if needs[1] else None
        return gx, gw, rows.sum(0) if needs[2] else None


@dataclass(frozen=True)
class Convolution:
    """A convolution with zeros around its input.

    >>> Convolution((1,), (0,), (1,)).forward(torch.ones(1, 1, 3), torch.ones(1, 1, 2), None)
    tensor([[[2., 2.]]])
    """

    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int = 1

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """The product."""
        convolve = (F.conv1d, F.conv2d, F.conv3d)[len(self.stride) - 1]  # which autocast knows
        return convolve(x, weight, bias, self.stride, self.padding, self.dilation, self.groups)

    def backward(
        self, g: Tensor, x: Tensor, weight: Tensor, needs: Sequence[bool]
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """The gradients of x, weight and bias, where needed."""
        sizes = [g.shape[1]] if needs[2] else None
        settings = (self.stride, self.padding, self.dilation, False, (0,) * len(self.stride), self.groups)
        found = torch.ops.aten.convolution_backward.default(g, x, weight, sizes, *settings, list(needs))
        return found[0], found[1], found[2]


class Operand(NamedTuple):
    """How an input is quantized; ``values`` None leaves it as it is.

    >>> Operand(None, Identity()).step
    0
    """

    values: Values | None
    ste: Estimator
    step: int = 0


class Weight(NamedTuple):
    """A quantized weight.

    Attributes:
        how: its parameters.
        factor: what it is multiplied by before it is quantized, and divided by afterwards.
        quantized: what enters the product.
        keep: whether that stays in memory anyway; else backward makes it anew.

    >>> Weight(Operand(None, Identity()), None, torch.ones(1)).keep
    False
    """

    how: Operand
    factor: Tensor | None
    quantized: Tensor
    keep: bool = False

    def again(self, weight: Tensor) -> Tensor:
        """What enters the product, made from the weight once more.

        >>> Weight(Operand(None, Identity()), None, torch.ones(1)).again(torch.ones(1))
        tensor([1.])
        """
        if self.how.values is None:
            return weight
        source = weight if self.factor is None else weight * self.factor
        quantized = eager.fake_quantize(source, self.how.values.params, self.how.step, "weight")
        return quantized if self.factor is None else quantized.div_(self.factor)


def product(kind: Product, x: Tensor, weight: Tensor, bias: Tensor | None, how: Operand, known: Weight) -> Tensor:
    """The product of plain tensors; ``known`` belongs to this very weight.

    >>> from detent.params import QuantParams
    >>> half = Values(QuantParams("int8", scale=0.5))
    >>> x, w = torch.tensor([[0.6]]), torch.tensor([[2.2]], requires_grad=True)
    >>> as_it_is = Weight(Operand(None, Identity()), None, w.detach())
    >>> y = product(Linear(), x, w, None, Operand(half, Identity()), as_it_is)
    >>> y.backward()
    >>> y.item(), w.grad.item()
    (1.100000023841858, 0.5)
    """
    shifts = [part for operand in (how, known.how) for part in _learned(operand)]
    y: Tensor = _Product.apply(x, weight, bias, *shifts, kind, how, known)
    return y


def _learned(operand: Operand) -> tuple[Tensor | None, Tensor | None]:
    return (None, None) if operand.values is None else (operand.values.scale, operand.values.zero_point)


def _settled(operand: Operand) -> Operand:
    return operand if operand.values is None else operand._replace(values=settled(operand.values))


_NOTHING = torch.empty(0)


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, *rest: Any) -> Tensor:
        *_, kind, how, known = rest
        how = _settled(how)
        ctx.save_for_backward(x, weight)
        kept = known if known.keep else known._replace(quantized=_NOTHING)
        ctx.call = kind, how, kept._replace(how=_settled(known.how))
        quantized = x if how.values is None else eager.fake_quantize(x, how.values.params, how.step, "input")
        y: Tensor = kind.forward(quantized, known.quantized, bias)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        kind, how, known = ctx.call
        x, weight = ctx.saved_tensors
        needs = ctx.needs_input_grad
        learns_x, learns_w = any(needs[3:5]), any(needs[5:7])
        quantized = x if how.values is None else eager.fake_quantize(x, how.values.params, how.step, "input")
        # Under autocast the forward product ran in g's type.
        wanted = needs[0] or learns_x, needs[1] or learns_w, needs[2]
        weights = known.quantized if known.keep else known.again(weight)
        gx, gw, gb = kind.backward(g, quantized.to(g.dtype), weights.to(g.dtype), wanted)
        of_x = _estimate(None if gx is None else gx.to(x.dtype), x, how, learn=learns_x)
        of_w = _estimate_weight(None if gw is None else gw.to(weight.dtype), weight, known, learn=learns_w)
        return of_x[0], of_w[0], gb, *of_x[1:], *of_w[1:], None, None, None


def _estimate_weight(
    g: Tensor | None, weight: Tensor, known: Weight, *, learn: bool
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    if g is None or known.factor is None or (isinstance(known.how.ste, Identity) and not learn):
        return _estimate(g, weight, known.how, learn=learn)
    gw, gs, gz = _estimate(g / known.factor, weight * known.factor, known.how, learn=learn)
    return None if gw is None else gw * known.factor, gs, gz


def _estimate(
    g: Tensor | None, x: Tensor, how: Operand, *, learn: bool
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """The gradients of x, scale and zero point, given that of the quantized x, whose memory is reused."""
    if g is None or how.values is None:
        return g, None, None
    params, ste = how.values.params, how.ste
    if not (how.values.is_learned and learn):
        return gradient_of(g, x, params, ste, how.step, reuse=True), None, None
    return learned_gradients(g, x, how.values, ste, how.step)
