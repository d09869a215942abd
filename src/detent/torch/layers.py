"""Products: linear maps and convolutions of fake quantized operands that keep for backward what the float ones keep.

A product of fake quantized tensors would keep the quantized copies, beside the originals that their neighbours keep
alive. These keep the originals alone, and quantize the input once more in backward, which is one pass over memory::

    forward   y  = product(fq(x), fq(w))                                    kept: x and w, as in the float model
    backward  gx = estimate(product_x(g, fq(w)), x),   gw = estimate(product_w(g, fq(x)), w)

A weight may be multiplied by a factor per channel before it is quantized and divided by it afterwards: this is how a
layer before a batch normalisation sees the very codes that the folded layer will have.

Layers: which types of module have weights, which axis of a weight is the channel, how many inputs are data.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from detent.checks import as_integer
from detent.errors import SpecError
from detent.ste import Estimator, Identity
from detent.torch import eager
from detent.torch.operator import Values, gradient_of, learned_gradients, settled

__all__ = [
    "Convolution",
    "LayerKind",
    "Linear",
    "Operand",
    "Product",
    "Quantizer",
    "Weight",
    "float_class_of",
    "kind_of",
    "product",
    "register_layer",
    "runs_as_product",
]


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


class Quantizer(nn.Module):
    """A place where data are quantized, for operations that are no layers: matmul, add, cat.

    It lets data pass until ``qt.prepare`` gives it the ``input`` spec of the rule that matches it.

    >>> import torch
    >>> Quantizer()(torch.tensor([0.3]))
    tensor([0.3000])
    """

    def forward(self, x: Tensor) -> Tensor:
        """Data as they are; quantized once prepared."""
        return x


@dataclass(frozen=True, eq=False)
class LayerKind:
    """What preparation needs to know of a type of layer.

    Attributes:
        weights: the names of its weights, and for each the axis that rules call 0: the output channels.
        inputs: how many leading arguments of forward are float data.
        shares_input: all inputs have one quantizer, because they are often one tensor.
        product: makes the product that the layer is, from the module; None runs the module's own forward.
        names: for layers with a varying number of weights, their names.

    >>> LayerKind({"weight": 0}).weight_names(nn.Linear(2, 2))
    ['weight']
    """

    weights: Mapping[str, int]
    inputs: int = 1
    shares_input: bool = False
    product: Callable[[Any], Product] | None = None
    names: Callable[[Any], Iterator[str]] | None = None

    def weight_names(self, module: nn.Module) -> list[str]:
        """The names of this module's weights; recurrent layers have as many as they have levels."""
        names = self.weights if self.names is None else self.names(module)
        return [name for name in names if isinstance(module._parameters.get(name), nn.Parameter)]

    def axis(self, name: str) -> int:
        """The axis of a weight's output channels.

        >>> kind_of(nn.ConvTranspose2d(2, 3, 1)).axis("weight")
        1
        """
        return self.weights.get(name, 0)

    def input_names(self) -> list[str]:
        """The names of the quantizers of its inputs.

        >>> LayerKind({}, inputs=2).input_names()
        ['input_quantizer', 'input2_quantizer']
        """
        count = min(self.inputs, 1) if self.shares_input else self.inputs
        return [f"input{'' if i == 0 else i + 1}_quantizer" for i in range(count)]


def _convolution(module: Any) -> Product:
    padding = module.padding
    if module.padding_mode != "zeros" or isinstance(padding, str):
        padding = (0,) * len(module.stride)  # the input is padded before
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
        layer: the class; its subclasses count, too, unless they are registered themselves.
        weights: the attributes that are weights, with the axis of their output channels (0 for a plain tuple).
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
    """The class of a module before it was prepared.

    >>> float_class_of(nn.ReLU())
    <class 'torch.nn.modules.activation.ReLU'>
    """
    return getattr(type(module), "float_class", type(module))


def kind_of(layer: nn.Module | type[nn.Module]) -> LayerKind | None:
    """What is known of a type of module, by its nearest registered class.

    >>> kind_of(nn.ReLU()) is None
    True
    """
    bases = (layer if isinstance(layer, type) else type(layer)).__mro__
    return next((_KINDS[base] for base in bases if base in _KINDS), None)


def runs_as_product(layer: type[nn.Module]) -> bool:
    """Whether a class computes the product of its registered class and nothing else: a forward of its own has to run.

    >>> runs_as_product(nn.Linear), runs_as_product(nn.Embedding)
    (True, False)
    """
    base = next((each for each in layer.__mro__ if each in _KINDS), None)
    if base is None or _KINDS[base].product is None:
        return False
    return all(getattr(layer, name, None) is getattr(base, name, None) for name in ("forward", "_conv_forward"))
