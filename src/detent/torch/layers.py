"""Layers: which module types have weights, and the product (matmul or convolution) that each computes.

A product of fake-quantized tensors in plain autograd would save the quantized copies for backward, next to the
originals that their neighbors keep alive. ``product`` saves the originals only and quantizes again in backward, which
is one pass over memory::

    forward   y  = product(fq(x), fq(w))                                    saved: x and w, as in the float model
    backward  gx = estimate(product_x(g, fq(w)), x),   gw = estimate(product_w(g, fq(x)), w)

where ``estimate`` is the straight-through estimator. Other layers, which run their own forward on quantized weights,
and tensors that native kernels cannot read are handled in ``quantized_layer``.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from detent.checks import as_integer
from detent.errors import SpecError
from detent.ste import Estimator, Identity
from detent.torch import eager
from detent.torch.arrays import Slot
from detent.torch.batchnorm import running_weight
from detent.torch.operator import (
    Values,
    apply,
    gradient_of,
    is_differentiated_twice,
    learned_gradients,
    refuse_second_derivatives,
)

__all__ = [
    "Convolution",
    "LayerKind",
    "Linear",
    "Operand",
    "Product",
    "QuantizedWeight",
    "Quantizer",
    "float_class_of",
    "kind_of",
    "product",
    "register_layer",
    "runs_as_product",
]

Gradients = tuple[Tensor | None, Tensor | None, Tensor | None]


class Product(Protocol):
    """A bilinear map with a bias."""

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """The product."""

    def backward(self, g: Tensor, x: Tensor, weight: Tensor, needs: Sequence[bool]) -> Gradients:
        """The gradients of x, weight and bias, where needed."""


class Linear:
    """``x @ weight.T + bias``."""

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """The product."""
        return F.linear(x, weight, bias)

    def backward(self, g: Tensor, x: Tensor, weight: Tensor, needs: Sequence[bool]) -> Gradients:
        """The gradients of x, weight and bias, where needed."""
        rows = g.reshape(-1, g.shape[-1])
        gx = (rows @ weight).view_as(x) if needs[0] else None
        gw = rows.t() @ x.reshape(-1, x.shape[-1]) if needs[1] else None
        return gx, gw, rows.sum(0) if needs[2] else None


@dataclass(frozen=True)
class Convolution:
    """A convolution with zero padding."""

    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int = 1

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """The product."""
        convolve = (F.conv1d, F.conv2d, F.conv3d)[len(self.stride) - 1]  # the functions that autocast handles
        return convolve(x, weight, bias, self.stride, self.padding, self.dilation, self.groups)

    def backward(self, g: Tensor, x: Tensor, weight: Tensor, needs: Sequence[bool]) -> Gradients:
        """The gradients of x, weight and bias, where needed."""
        sizes = [g.shape[1]] if needs[2] else None
        settings = (self.stride, self.padding, self.dilation, False, (0,) * len(self.stride), self.groups)
        gx, gw, gb = torch.ops.aten.convolution_backward.default(g, x, weight, sizes, *settings, list(needs))
        return gx, gw, gb


class Quantizer(nn.Module):
    """Quantizes data at a place of your choice, for operations that are not layers: matmul, add, cat.

    Data pass unchanged until ``qt.prepare`` gives it the ``input`` spec of the rule that matches it.

    >>> import torch
    >>> Quantizer()(torch.tensor([0.3]))
    tensor([0.3000])
    """

    def forward(self, x: Tensor) -> Tensor:
        """Return x; quantized once prepared."""
        return x


@dataclass(frozen=True, eq=False)
class LayerKind:
    """What preparation needs to know of a type of layer."""

    weights: Mapping[str, int]  # names, each with the axis of its output channels, which rules call 0
    inputs: int = 1  # leading arguments of forward that are float data
    shares_input: bool = False  # one quantizer for all inputs, which often are one tensor
    product: Callable[[Any], Product] | None = None  # None runs the module's own forward
    names: Callable[[Any], Iterator[str]] | None = None  # for a varying number of weights

    def weight_names(self, module: nn.Module) -> list[str]:
        """The names of this module's weights."""
        names = self.weights if self.names is None else self.names(module)
        return [name for name in names if isinstance(module._parameters.get(name), nn.Parameter)]

    def axis(self, name: str) -> int:
        """The output-channel axis of a weight."""
        return self.weights.get(name, 0)

    def input_names(self) -> list[str]:
        """The names of its input quantizers."""
        count = min(self.inputs, 1) if self.shares_input else self.inputs
        return [f"input{'' if i == 0 else i + 1}_quantizer" for i in range(count)]


def _convolution(module: Any) -> Product:
    padding = module.padding
    if module.padding_mode != "zeros" or isinstance(padding, str):
        padding = (0,) * len(module.stride)  # the layer pads its input before
    return Convolution(module.stride, padding, module.dilation, groups=module.groups)


def _recurrent(module: Any) -> Iterator[str]:
    return (name for name in module._flat_weights_names if name.startswith("weight"))


_ATTENTION = dict.fromkeys(("in_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight"), 0)
_KINDS: dict[type[nn.Module], LayerKind] = {
    Quantizer: LayerKind({}),
    nn.Linear: LayerKind({"weight": 0}, product=lambda _: Linear()),
    nn.modules.linear.NonDynamicallyQuantizableLinear: LayerKind({"weight": 0}, inputs=0),  # inside attention
    nn.Bilinear: LayerKind({"weight": 0}, inputs=2),
    **dict.fromkeys((nn.Conv1d, nn.Conv2d, nn.Conv3d), LayerKind({"weight": 0}, product=_convolution)),
    **dict.fromkeys((nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d), LayerKind({"weight": 1})),
    **dict.fromkeys((nn.Embedding, nn.EmbeddingBag), LayerKind({"weight": 0}, inputs=0)),
    nn.MultiheadAttention: LayerKind(_ATTENTION, inputs=3, shares_input=True),
    **dict.fromkeys((nn.LSTM, nn.GRU, nn.RNN), LayerKind({}, inputs=0, names=_recurrent)),
}


def register_layer(
    layer: type[nn.Module], weights: Mapping[str, int] | tuple[str, ...], *, inputs: int = 1
) -> type[nn.Module]:
    """Let ``qt.prepare`` quantize a layer of your own.

    Args:
        layer: the class; its subclasses count too, unless they are registered themselves.
        weights: the attributes that are weights, with their output-channel axis (0 for a plain tuple).
        inputs: how many leading arguments of forward are float data to quantize.

    >>> import torch
    >>> class Scale(torch.nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.gain = torch.nn.Parameter(torch.ones(3))
    ...     def forward(self, x):
    ...         return x * self.gain
    >>> register_layer(Scale, ("gain",)) is Scale
    True
    """
    if not (isinstance(layer, type) and issubclass(layer, nn.Module)):
        raise SpecError(f"register_layer takes a class derived from torch.nn.Module, got {layer!r}")
    if isinstance(weights, str):
        raise SpecError(f"weights are several names, got the text {weights!r}: write ({weights!r},)")
    named = dict(weights) if isinstance(weights, Mapping) else dict.fromkeys(weights, 0)
    _KINDS[layer] = LayerKind(MappingProxyType(named), as_integer("inputs", inputs, at_least=0))
    return layer


def float_class_of(module: nn.Module) -> type[nn.Module]:
    """The class of a module before preparation."""
    return getattr(type(module), "float_class", type(module))


def kind_of(layer: nn.Module | type[nn.Module]) -> LayerKind | None:
    """The kind of the nearest registered class, or None."""
    bases = (layer if isinstance(layer, type) else type(layer)).__mro__
    return next((_KINDS[base] for base in bases if base in _KINDS), None)


def runs_as_product(layer: type[nn.Module]) -> bool:
    """Whether a class computes exactly the product of its registered class: no forward of its own."""
    base = next((each for each in layer.__mro__ if each in _KINDS), None)
    if base is None or _KINDS[base].product is None:
        return False
    return all(getattr(layer, name, None) is getattr(base, name, None) for name in ("forward", "_conv_forward"))


class Operand(NamedTuple):
    """How one operand of a product is quantized."""

    values: Values | None  # whose params hold the learned values; None: stays float
    ste: Estimator
    step: int = 0  # the counter of stochastic rounding

    def quantize(self, x: Tensor, slot: Slot) -> Tensor:
        """Fake-quantize x into scratch memory."""
        return x if self.values is None else eager.fake_quantize(x, self.values.params, self.step, slot)

    def quantize_again(self, x: Tensor) -> Tensor:
        """Fake-quantize x, differentiable in x."""
        return x if self.values is None else apply(x, Values(self.values.params), self.ste, self.step)

    def for_backward(self) -> "Operand":
        """The operand without tensors of a graph, which backward may keep."""
        if self.values is None or not self.values.is_learned:
            return self
        return self._replace(values=self.values.without_graph())

    def learned(self) -> tuple[Tensor | None, Tensor | None]:
        """The trained scale and zero point."""
        return (None, None) if self.values is None else (self.values.scale, self.values.zero_point)


class QuantizedWeight(NamedTuple):
    """A weight as it enters a product."""

    operand: Operand
    factor: Tensor | None  # of the batch norm after the layer, see ``running_weight``
    tensor: Tensor  # the quantized weight
    keep: bool = False  # the tensor stays in memory anyway; else backward quantizes again

    def requantize(self, weight: Tensor) -> Tensor:
        """Compute ``tensor`` from the float weight again, in scratch memory."""
        return running_weight(weight, self.factor, lambda w: self.operand.quantize(w, "weight"), in_place=True)

    def quantize_again(self, weight: Tensor) -> Tensor:
        """``requantize``, differentiable in the float weight; a constant stays one."""
        if self.keep and self.operand.values is None:
            return weight
        return running_weight(weight, self.factor, self.operand.quantize_again)


def product(
    kind: Product, x: Tensor, weight: Tensor, bias: Tensor | None, operand: Operand, quantized: QuantizedWeight
) -> Tensor:
    """The product of x, quantized by ``operand``, and the quantized weight; the float weight receives the gradient."""
    learned = *operand.learned(), *quantized.operand.learned()
    y: Tensor = _Product.apply(x, weight, bias, *learned, kind, operand, quantized)
    return y


_NOTHING = torch.empty(0)


class _Product(torch.autograd.Function):
    """Inputs: x, weight, bias; scale and zero point of x and of the weight, where learned; kind and both operands."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, *rest: Any) -> Tensor:
        *_, kind, operand, quantized = rest
        operand = operand.for_backward()
        ctx.save_for_backward(x, weight)
        kept = quantized if quantized.keep else quantized._replace(tensor=_NOTHING)
        ctx.call = kind, operand, kept._replace(operand=quantized.operand.for_backward())
        y: Tensor = kind.forward(operand.quantize(x, "input"), quantized.tensor, bias)
        return y

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        kind, operand, quantized = ctx.call
        x, weight = ctx.saved_tensors
        needs = ctx.needs_input_grad
        learns_x, learns_w = any(needs[3:5]), any(needs[5:7])
        if is_differentiated_twice():
            x_values, w_values = operand.quantize_again(x), quantized.quantize_again(weight)
        else:
            x_values = operand.quantize(x, "input")
            w_values = quantized.tensor if quantized.keep else quantized.requantize(weight)
        # under autocast the forward product ran in g's type
        needed = needs[0] or learns_x, needs[1] or learns_w, needs[2]
        gx, gw, gb = kind.backward(g, x_values.to(g.dtype), w_values.to(g.dtype), needed)
        of_x = _estimate(None if gx is None else gx.to(x.dtype), x, operand, learn=learns_x)
        of_w = _estimate_weight(None if gw is None else gw.to(weight.dtype), weight, quantized, learn=learns_w)
        return of_x[0], of_w[0], gb, *of_x[1:], *of_w[1:], None, None, None


def _estimate(g: Tensor | None, x: Tensor, operand: Operand, *, learn: bool) -> Gradients:
    """The gradients of x, scale and zero point, given that of the quantized x, which is overwritten."""
    if g is None or operand.values is None:
        return g, None, None
    params, ste = operand.values.params, operand.ste
    if not (operand.values.is_learned and learn):
        return gradient_of(g, x, params, ste, operand.step, reuse=True), None, None
    if is_differentiated_twice():
        refuse_second_derivatives(ste, learned=True)
    return learned_gradients(g, x, operand.values, ste, operand.step)


def _estimate_weight(g: Tensor | None, weight: Tensor, quantized: QuantizedWeight, *, learn: bool) -> Gradients:
    """``_estimate`` through ``fq(w * f) / f``."""
    operand, factor = quantized.operand, quantized.factor
    if g is None or factor is None or (isinstance(operand.ste, Identity) and not learn):
        return _estimate(g, weight, operand, learn=learn)
    gw, gs, gz = _estimate(g / factor, weight * factor, operand, learn=learn)
    return None if gw is None else gw * factor, gs, gz
