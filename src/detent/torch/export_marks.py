"""Marking: a copy of a prepared model in which every quantizer is a mark that an exporter carries along.

The copy runs as the model is shipped: in evaluation, with its batch normalisations folded in. A mark is an operator of
our own that names a quantizer. That of an activation takes the data; that of a weight takes nothing, so that no float
copy of the weight is exported. ``lowering`` puts codes and ONNX's own operators in their place.
"""

from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from detent.errors import StateError, UnsupportedError
from detent.tensor import QuantizedTensor
from detent.torch.batchnorm import Fold
from detent.torch.preparation import plan_of, quantized_state, quantizers_of, weight_layers
from detent.torch.quantized_layer import QuantizedLayer, QuantizedProduct
from detent.torch.quantizer import FakeQuantize

__all__ = ["DOMAIN", "Marked", "MarkedQuantizer", "MarkedWeight", "copy_to_ship", "mark"]

DOMAIN = "detent"
_Convolutions = nn.Conv1d | nn.Conv2d | nn.Conv3d


class MarkedQuantizer(FakeQuantize):
    """A quantizer that leaves its mark where it would quantize.

    Attributes:
        key: what the mark says: the name of the quantizer, or of the weight.
        of_weight: whether it is a weight's.

    >>> quantizer = MarkedQuantizer("int8")
    >>> quantizer.key, quantizer.of_weight = "fc.weight", True
    >>> quantizer(torch.ones(2, 3)).shape
    torch.Size([2, 3])
    """

    key: str
    of_weight: bool

    def forward(self, x: Tensor) -> Tensor:
        """The mark, of the shape and type of x; numbers come only from what is exported."""
        if not self.enabled:
            return x
        operator, inputs = ("Weight", ()) if self.of_weight else ("Activation", (x,))
        about: dict[str, Any] = {"key": self.key, "rank": x.ndim}
        made: Tensor = torch.onnx.ops.symbolic(
            f"{DOMAIN}::{operator}", inputs, about, dtype=x.dtype, shape=x.shape, version=1
        )
        return made


@dataclass(frozen=True)
class MarkedWeight:
    """A weight that has a mark.

    Attributes:
        tensor: its codes.
        depthwise: whether it belongs to a convolution of each channel by itself.

    >>> import detent as dt
    >>> MarkedWeight(dt.quantize(torch.ones(2).numpy(), dt.QuantParams.int8_symmetric())).depthwise
    False
    """

    tensor: QuantizedTensor
    depthwise: bool = False


@dataclass(frozen=True)
class Marked:
    """A marked model.

    Attributes:
        model: the copy.
        weights: by what their marks say.
        activations: quantizers, likewise.

    >>> import detent.torch as qt
    >>> list(mark(copy_to_ship(qt.prepare(nn.Sequential(nn.Linear(4, 2)), "w8a16"))).weights)
    ['0.weight']
    """

    model: nn.Module
    weights: dict[str, MarkedWeight]
    activations: dict[str, FakeQuantize]


def copy_to_ship(model: nn.Module) -> nn.Module:
    """A copy in evaluation mode on the CPU, which shares the model's parameters where these are there.

    Raises:
        StateError: the model is not prepared, or is being calibrated or delayed.
        UnsupportedError: it cannot be copied.

    >>> import detent.torch as qt
    >>> copy_to_ship(qt.prepare(nn.Sequential(nn.Linear(4, 2)), "w8a8")).training
    False
    """
    plan_of(model)
    parameters = list(model.parameters())
    if any(hasattr(each, "full_tensor") for each in parameters):
        raise UnsupportedError("the model is sharded: load its state into a model of one process, and export that")
    for quantizer in quantizers_of(model).values():
        if quantizer.is_passing:
            why = "qt.calibrating is on" if quantizer.is_calibrating else "its schedule delays it"
            raise StateError(f"{quantizer.label} lets data pass, because {why}: export when that is over")
    known: dict[int, Any] = {id(each.watcher): None for each in quantizers_of(model).values()}  # no copies of those
    here = all(each.device.type == "cpu" for each in (*parameters, *model.buffers()))
    if here:
        known |= {id(each): each for each in parameters}
    try:
        made = deepcopy(model, known).eval()
        return made if here else made.cpu()
    except (RuntimeError, TypeError) as error:
        raise UnsupportedError(f"the model cannot be copied: {error}") from error


@torch.no_grad()
def mark(model: nn.Module) -> Marked:
    """Fold the batch normalisations of a copy, and let its quantizers be marks.

    >>> import detent.torch as qt
    >>> sorted(mark(copy_to_ship(qt.prepare(nn.Sequential(nn.Linear(4, 2)), "w8a8"))).activations)
    ['0.input_quantizer']
    """
    state = quantized_state(model)
    weights: dict[str, MarkedWeight] = {}
    keys: dict[FakeQuantize, str] = {}
    for full, layer, _, quantizer in weight_layers(model):
        if quantizer.enabled and keys.setdefault(quantizer, full) == full:  # tied weights have one quantizer
            weights[full] = MarkedWeight(state[full], _is_depthwise(layer))
    activations = {}
    for name, quantizer in quantizers_of(model).items():
        if isinstance(quantizer, MarkedQuantizer):
            continue
        key = keys.get(quantizer, name)
        if quantizer not in keys:
            activations[name] = quantizer
        _become_mark(quantizer, key, of_weight=quantizer in keys)
    for module in model.modules():
        if isinstance(module, QuantizedProduct) and module.fold is not None:
            _fold(module, module.fold)
    return Marked(model, weights, activations)


def _become_mark(quantizer: FakeQuantize, key: str, *, of_weight: bool) -> None:
    vars(quantizer).update(key=key, of_weight=of_weight)
    quantizer.__class__ = MarkedQuantizer


def _is_depthwise(layer: QuantizedLayer) -> bool:
    if not isinstance(layer, _Convolutions):
        return False
    return layer.groups > 1 and layer.groups == layer.in_channels == layer.out_channels


def _fold(layer: QuantizedProduct, fold: Fold) -> None:
    """Make the normalisation's constants the layer's own."""
    if layer.quantizer("weight_quantizer") is None:
        layer.weight = nn.Parameter(fold.with_gain(layer.weight.detach()))
    layer.bias = nn.Parameter(fold.bias(layer.bias))
    fold.fuse()
    layer.fold = None
