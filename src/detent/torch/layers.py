"""Layers: which types of module have weights, which axis of a weight is the channel, how many inputs are data."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from torch import Tensor, nn

from detent.checks import as_integer
from detent.errors import SpecError
from detent.torch.products import Convolution, Linear, Product

__all__ = ["LayerKind", "Quantizer", "float_class_of", "kind_of", "register_layer", "runs_as_product"]


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
