"""Layers: for each module type, its weights and the matmul or convolution that it computes.

Plain autograd would save the fake-quantized inputs of a matmul for backward, in addition to the original inputs, which
other layers keep alive. ``matmul`` saves only the original inputs. It quantizes them again in backward, which takes one
pass over memory::

    forward   y  = matmul(fq(x), fq(w))                                    saved: x and w, as in the float model
    backward  gx = ste(matmul_x(g, fq(w)), x),   gw = ste(matmul_w(g, fq(x)), w)

Here ``fq`` is fake quantization, ``ste`` is the straight-through estimator, and a convolution counts as a matmul.
``quantized_layer`` handles layers that run their own forward on quantized weights, and tensors that native kernels
cannot read.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from detent.checks import as_integer
from detent.errors import NaNError, SpecError, UnsupportedError
from detent.ste import Estimator, Identity
from detent.torch import eager
from detent.torch.arrays import Slot, is_channels_last, order_of
from detent.torch.batchnorm import unfused_weight
from detent.torch.computed_weights import has_weight
from detent.torch.fused_requantization import Units, follow_sums
from detent.torch.integer_product import InputCodes, Requantization, WeightCodes, input_codes, integer_product
from detent.torch.operator import (
    Values,
    apply,
    check_second_derivatives,
    gradient_of,
    is_differentiated_twice,
    learned_gradients,
)

__all__ = [
    "Convolution",
    "LayerKind",
    "Linear",
    "Matmul",
    "Operand",
    "QuantizedWeight",
    "Quantizer",
    "float_class_of",
    "kind_of",
    "matmul",
    "matmul_gradients",
    "multiply_codes",
    "register_layer",
    "runs_as_matmul",
]

Gradients = tuple[Tensor | None, Tensor | None, Tensor | None]


class Matmul(Protocol):
    """A matmul or convolution with a bias."""

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Compute the output."""

    def backward(self, g: Tensor, x: Tensor, weight: Tensor, needs: Sequence[bool]) -> Gradients:
        """Compute the gradients of x, weight and bias; a gradient that is not needed is None."""


class Linear:
    """The matmul ``x @ weight.T + bias``."""

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Compute the output."""
        return F.linear(x, weight, bias)

    def backward(self, g: Tensor, x: Tensor, weight: Tensor, needs: Sequence[bool]) -> Gradients:
        """Compute the gradients of x, weight and bias; a gradient that is not needed is None."""
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
        """Compute the output."""
        convolve = (F.conv1d, F.conv2d, F.conv3d)[len(self.stride) - 1]  # autocast handles these functions
        return convolve(x, weight, bias, self.stride, self.padding, self.dilation, self.groups)

    def backward(self, g: Tensor, x: Tensor, weight: Tensor, needs: Sequence[bool]) -> Gradients:
        """Compute the gradients of x, weight and bias; a gradient that is not needed is None."""
        sizes = [g.shape[1]] if needs[2] else None
        settings = (self.stride, self.padding, self.dilation, False, (0,) * len(self.stride), self.groups)
        gx, gw, gb = torch.ops.aten.convolution_backward.default(g, x, weight, sizes, *settings, list(needs))
        return gx, gw, gb


class Quantizer(nn.Module):
    """Placeholder for a quantizer: call it on the input of an operation that is not a layer, such as matmul or add.

    Data pass unchanged until ``qt.prepare`` gives the module the ``input`` spec of the matching rule.

    >>> import torch
    >>> Quantizer()(torch.tensor([0.3]))
    tensor([0.3000])
    """

    def forward(self, x: Tensor) -> Tensor:
        """Return x unchanged; after ``qt.prepare``, return the fake-quantized x."""
        return x


@dataclass(frozen=True, eq=False)
class LayerKind:
    """Weights, inputs and computation of a layer type."""

    weights: Mapping[str, int]  # weight name -> output-channel axis, which a rule calls axis 0
    inputs: int = 1  # number of leading arguments of forward that are float data
    shares_input: bool = False  # whether all inputs share one quantizer; they are often the same tensor
    matmul: Callable[[Any], Matmul] | None = None  # if None, the module's own forward runs
    names: Callable[[Any], Iterator[str]] | None = None  # yields the weight names, if their number varies

    def weight_names(self, module: nn.Module) -> list[str]:
        """Return the names of this module's weights."""
        names = self.weights if self.names is None else self.names(module)
        return [name for name in names if has_weight(module, name)]

    def axis(self, name: str) -> int:
        """Return the output-channel axis of a weight."""
        return self.weights.get(name, 0)

    def input_names(self) -> list[str]:
        """Return the names of the input quantizers."""
        count = min(self.inputs, 1) if self.shares_input else self.inputs
        return [f"input{'' if i == 0 else i + 1}_quantizer" for i in range(count)]


def _convolution(module: Any) -> Matmul:
    padding = module.padding
    if module.padding_mode != "zeros" or isinstance(padding, str):
        padding = (0,) * len(module.stride)  # QuantizedMatmul pads the input before the convolution
    return Convolution(module.stride, padding, module.dilation, groups=module.groups)


def _recurrent(module: Any) -> Iterator[str]:
    return (name for name in module._flat_weights_names if name.startswith("weight"))


_ATTENTION = dict.fromkeys(("in_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight"), 0)
_KINDS: dict[type[nn.Module], LayerKind] = {
    Quantizer: LayerKind({}),
    nn.Linear: LayerKind({"weight": 0}, matmul=lambda _: Linear()),
    nn.modules.linear.NonDynamicallyQuantizableLinear: LayerKind(
        {"weight": 0}, inputs=0
    ),  # the class of the output projection in nn.MultiheadAttention
    nn.Bilinear: LayerKind({"weight": 0}, inputs=2),
    **dict.fromkeys((nn.Conv1d, nn.Conv2d, nn.Conv3d), LayerKind({"weight": 0}, matmul=_convolution)),
    **dict.fromkeys((nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d), LayerKind({"weight": 1})),
    **dict.fromkeys((nn.Embedding, nn.EmbeddingBag), LayerKind({"weight": 0}, inputs=0)),
    nn.MultiheadAttention: LayerKind(_ATTENTION, inputs=3, shares_input=True),
    **dict.fromkeys((nn.LSTM, nn.GRU, nn.RNN), LayerKind({}, inputs=0, names=_recurrent)),
    **dict.fromkeys((nn.LSTMCell, nn.GRUCell, nn.RNNCell), LayerKind({"weight_ih": 0, "weight_hh": 0}, inputs=0)),
}


def register_layer(
    layer: type[nn.Module], weights: Mapping[str, int] | tuple[str, ...], *, inputs: int = 1
) -> type[nn.Module]:
    """Register your own layer class, so that ``qt.prepare`` quantizes layers of this class.

    Args:
        layer: the class; subclasses that are not registered themselves are included.
        weights: a dict from the attribute name of each weight to its output-channel axis, or a tuple of attribute names
            if this axis is 0.
        inputs: number of leading arguments of forward that are float data to quantize.

    Returns:
        The class.

    Raises:
        SpecError: ``layer`` is not a module class, or ``weights`` is a string.

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
        raise SpecError(f"got {layer!r} for layer, expected a class derived from torch.nn.Module")
    if isinstance(weights, str):
        raise SpecError(f"got the string {weights!r} for weights, expected a tuple of names: write ({weights!r},)")
    axes = dict(weights) if isinstance(weights, Mapping) else dict.fromkeys(weights, 0)
    _KINDS[layer] = LayerKind(MappingProxyType(axes), as_integer("inputs", inputs, at_least=0))
    return layer


def float_class_of(module: nn.Module) -> type[nn.Module]:
    """Return the class that a module had before preparation."""
    return getattr(type(module), "float_class", type(module))


def kind_of(layer: nn.Module | type[nn.Module]) -> LayerKind | None:
    """Return the ``LayerKind`` of a class or its nearest registered base class, or None if neither is registered."""
    bases = (layer if isinstance(layer, type) else type(layer)).__mro__
    return next((_KINDS[base] for base in bases if base in _KINDS), None)


def runs_as_matmul(layer: type[nn.Module]) -> bool:
    """Return whether a class computes exactly the matmul of its registered base class, without its own forward."""
    base = next((each for each in layer.__mro__ if each in _KINDS), None)
    if base is None or _KINDS[base].matmul is None:
        return False
    return all(getattr(layer, name, None) is getattr(base, name, None) for name in ("forward", "_conv_forward"))


class Operand(NamedTuple):
    """Quantization settings for one operand of a matmul."""

    values: Values | None  # None if the operand stays float
    ste: Estimator
    step: int = 0  # counter of stochastic rounding
    keeps_codes: bool = False  # whether integer products save codes and a mask for backward, instead of x
    units: Units | None = None  # if given, x is the output of an integer layer, and codes are rounded from its sums

    def quantize(self, x: Tensor, slot: Slot) -> Tensor:
        """Fake-quantize x into scratch memory."""
        if self.values is None:
            return x
        y = eager.fake_quantize(x, self.values.params, self.step, slot)
        if self.units is not None:
            follow_sums(x, y, self.units, Requantization.of(self.values.params))
        return y

    def codes(self, x: Tensor) -> InputCodes:
        """Quantize x to unsigned codes of one byte; a NaN in x is an error, because it has no code."""
        assert self.values is not None  # noqa: S101 - integer layers quantize their input
        params = self.values.params
        codes = eager.quantize(x.detach(), params)
        if self.units is not None:
            follow_sums(x, codes, self.units, Requantization.of(params))
        return input_codes(codes, params)

    def quantize_again(self, x: Tensor) -> Tensor:
        """Fake-quantize x again in backward, differentiably in x, for second derivatives."""
        return x if self.values is None else apply(x, Values(self.values.params), self.ste, self.step)

    def codes_and_mask(self, x: Tensor) -> tuple[Tensor, Tensor] | None:
        """Quantize x to what backward keeps instead of x; None if backward keeps x."""
        if not self.keeps_codes or self.values is None:
            return None
        kept = eager.quantize_masked(x.detach(), self.values.params, self.ste)
        if kept is not None and self.units is not None:
            follow_sums(x, kept[0], self.units, Requantization.of(self.values.params))
        return kept

    def for_backward(self) -> "Operand":
        """Return a copy of the operand for backward that contains no tensors of the autograd graph."""
        if self.values is None or not self.values.is_learned:
            return self
        return self._replace(values=self.values.without_graph())

    def learned(self) -> tuple[Tensor | None, Tensor | None]:
        """Return the learned scale and the learned zero point; a value that is not learned is None."""
        return (None, None) if self.values is None else (self.values.scale, self.values.zero_point)


class QuantizedWeight(NamedTuple):
    """A quantized weight as an operand of a matmul."""

    operand: Operand
    factor: Tensor | None  # factor of a folded batch norm, see ``unfused_weight``
    tensor: Tensor  # the fake-quantized weight
    keep: bool = False  # whether ``tensor`` stays in memory; if not, backward computes it again
    codes: WeightCodes | None = None  # if given, forward multiplies codes; ``tensor`` is then only for backward
    scale: Tensor | None = None  # scale of the exported bias is x_scale times this; None if the bias is not rounded

    def requantize(self, weight: Tensor) -> Tensor:
        """Compute ``tensor`` again from the float weight, in scratch memory."""
        return unfused_weight(weight, self.factor, lambda w: self.operand.quantize(w, "weight"), in_place=True)

    def quantize_again(self, weight: Tensor) -> Tensor:
        """Requantize differentiably, for second derivatives; return a constant weight unchanged."""
        if self.keep and self.operand.values is None:
            return weight
        return unfused_weight(weight, self.factor, self.operand.quantize_again)


def matmul(
    kind: Matmul, x: Tensor, weight: Tensor, bias: Tensor | None, operand: Operand, quantized: QuantizedWeight
) -> Tensor:
    """Multiply the fake-quantized x by the quantized weight; the float ``weight`` receives the gradient."""
    learned = *operand.learned(), *quantized.operand.learned()
    y: Tensor = _QuantizedMatmul.apply(x, weight, bias, *learned, kind, operand, quantized)
    return y


def multiply_codes(
    kind: Matmul,
    x: Tensor,
    weight: Tensor,
    operand: Operand,
    codes: WeightCodes,
    bias: Tensor | None,
    requantization: Requantization | None = None,
    x_codes: Tensor | None = None,
) -> Tensor:
    """Multiply the codes of x by the codes of the weight, without gradients; see ``integer_product``.

    The output has the memory format that a float convolution of x and ``weight`` has.
    """
    assert operand.values is not None  # noqa: S101 - integer layers quantize their input
    convolution = kind if isinstance(kind, Convolution) else None
    channels_last = convolution is not None and (is_channels_last(x) or is_channels_last(weight))
    try:
        coded = operand.codes(x) if x_codes is None else input_codes(x_codes, operand.values.params)
        y = integer_product(coded, codes, bias, convolution, requantization, channels_last=channels_last)
    except NaNError:  # NaN has no code: floats show it in the output
        y = kind.forward(operand.quantize(x, "input"), codes.dequantized(x.dtype), bias)
    return y.to(torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else x.dtype)


_EMPTY = torch.empty(0)


class _QuantizedMatmul(torch.autograd.Function):
    """The autograd function of ``matmul``.

    The inputs are x, weight and bias, then scale and zero point of x, then scale and zero point of the weight. A scale
    or zero point that is not learned is None. The last inputs are ``kind``, ``operand`` and ``quantized``.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, *rest: Any) -> Tensor:
        *_, kind, operand, quantized = rest
        operand = operand.for_backward()
        ctx.save_for_backward(x, weight)
        kept = quantized._replace(codes=None) if quantized.keep else quantized._replace(tensor=_EMPTY, codes=None)
        ctx.call = kind, operand, kept._replace(operand=quantized.operand.for_backward())
        if quantized.codes is not None:
            kept_codes = operand.codes_and_mask(x)
            if kept_codes is not None:
                ctx.save_for_backward(*kept_codes, weight)
                ctx.x_dtype = x.dtype
            return multiply_codes(
                kind, x, weight, operand, quantized.codes, bias, None, None if kept_codes is None else kept_codes[0]
            )
        y: Tensor = kind.forward(operand.quantize(x, "input"), quantized.tensor, bias)
        return y

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        kind, operand, quantized = ctx.call
        *saved, weight = ctx.saved_tensors
        if len(saved) > 1:
            codes, mask = saved
            return _backward_from_codes(ctx, g, codes, mask, weight)
        (x,) = saved
        gradients = matmul_gradients(kind, g, x, weight, operand, quantized, ctx.needs_input_grad)
        return *gradients, None, None, None


def matmul_gradients(
    kind: Matmul,
    g: Tensor,
    x: Tensor,
    weight: Tensor,
    operand: Operand,
    quantized: QuantizedWeight,
    needs: Sequence[bool],
) -> tuple[Tensor | None, ...]:
    """Compute the gradients of x, weight, bias, and scale and zero point of x and of the weight.

    ``needs`` says which of these gradients are needed. If autograd records this pass, they are differentiable.
    """
    learns_x, learns_w = any(needs[3:5]), any(needs[5:7])  # whether learned values need gradients
    if is_differentiated_twice():
        x_values, w_values = operand.quantize_again(x), quantized.quantize_again(weight)
    else:
        x_values = operand.quantize(x, "input")
        w_values = quantized.tensor if quantized.keep else quantized.requantize(weight)
    # under autocast, the forward matmul ran in the dtype of g
    needed = needs[0] or learns_x, needs[1] or learns_w, needs[2]
    gx, gw, gb = kind.backward(g, x_values.to(g.dtype), w_values.to(g.dtype), needed)
    of_x = _ste_gradients(None if gx is None else gx.to(x.dtype), x, operand, learn=learns_x)
    of_w = _ste_weight_gradients(None if gw is None else gw.to(weight.dtype), weight, quantized, learn=learns_w)
    return of_x[0], of_w[0], gb, *of_x[1:], *of_w[1:]


def _backward_from_codes(ctx: Any, g: Tensor, codes: Tensor, mask: Tensor, weight: Tensor) -> tuple[Tensor | None, ...]:
    """Compute the gradients of ``_QuantizedMatmul`` from codes and a mask, with the bits that x would give."""
    kind, operand, quantized = ctx.call
    needs = ctx.needs_input_grad
    if is_differentiated_twice():
        raise UnsupportedError("layers that keep codes have no second derivatives: use qt.prepare(..., memory='float')")
    params = operand.values.params
    x_values = eager.dequantize(codes, params, ctx.x_dtype, "input")
    w_values = quantized.tensor if quantized.keep else quantized.requantize(weight)
    learns_w = any(needs[5:7])
    gx, gw, gb = kind.backward(
        g, x_values.to(g.dtype), w_values.to(g.dtype), (needs[0], needs[1] or learns_w, needs[2])
    )
    if gx is not None:
        gx = eager.masked_backward(gx.to(ctx.x_dtype), mask, order_of(codes, params.spec), params)
    of_w = _ste_weight_gradients(None if gw is None else gw.to(weight.dtype), weight, quantized, learn=learns_w)
    return gx, of_w[0], gb, None, None, *of_w[1:], None, None, None


def _ste_gradients(g: Tensor | None, x: Tensor, operand: Operand, *, learn: bool) -> Gradients:
    """Compute the gradients of x, scale and zero point from the gradient g of the quantized x; may overwrite g."""
    if g is None or operand.values is None:
        return g, None, None
    params, ste = operand.values.params, operand.ste
    if not (operand.values.is_learned and learn):
        return gradient_of(g, x, params, ste, operand.step, reuse=True), None, None
    if is_differentiated_twice():
        check_second_derivatives(ste, learned=True)
    return learned_gradients(g, x, operand.values, ste, operand.step)


def _ste_weight_gradients(g: Tensor | None, weight: Tensor, quantized: QuantizedWeight, *, learn: bool) -> Gradients:
    """Compute the gradients of weight w, scale and zero point from the gradient g of ``fq(w * f) / f``."""
    operand, factor = quantized.operand, quantized.factor
    if g is None or factor is None or (isinstance(operand.ste, Identity) and not learn):
        return _ste_gradients(g, weight, operand, learn=learn)
    gw, gs, gz = _ste_gradients(g / factor, weight * factor, operand, learn=learn)
    return None if gw is None else gw * factor, gs, gz
