"""Export marks: custom operators that stand for the quantizers in an exported copy of a prepared model.

A mark contains the full name of a weight or of an activation quantizer. The copy is in evaluation mode, and its batch
norms are folded. The mark of an activation has the data as input. The mark of a weight has no input, so that no float
copy of the weight is exported. ``export_graph`` replaces marks by codes and Q/DQ nodes.
"""

from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from detent.errors import StateError, UnsupportedError
from detent.tensor import QuantizedTensor
from detent.torch.batchnorm import Fold
from detent.torch.computed_weights import store_computed_weights, unparametrized
from detent.torch.preparation import onnx_weights, plan_of, quantizers_of, set_class, weight_layers
from detent.torch.quantized_layer import QuantizedLayer, QuantizedMatmul, quantized_class
from detent.torch.quantizer import FakeQuantize

__all__ = ["DOMAIN", "Marked", "MarkedQuantizer", "MarkedWeight", "copy_for_export", "fold_in", "mark"]

DOMAIN = "detent"
_Convolutions = nn.Conv1d | nn.Conv2d | nn.Conv3d


class MarkedQuantizer(FakeQuantize):
    """A quantizer that inserts an export mark into the graph instead of quantizing."""

    key: str  # full name of the weight, or of the activation quantizer
    of_weight: bool

    def forward(self, x: Tensor) -> Tensor:
        """Insert the mark; its output has the shape and dtype of x, but undefined values."""
        if not self.enabled:
            return x
        operator, inputs = ("Weight", ()) if self.of_weight else ("Activation", (x,))
        attributes: dict[str, Any] = {"key": self.key, "rank": x.ndim}
        result: Tensor = torch.onnx.ops.symbolic(
            f"{DOMAIN}::{operator}", inputs, attributes, dtype=x.dtype, shape=x.shape, version=1
        )
        return result


@dataclass(frozen=True)
class MarkedWeight:
    """The codes of a marked weight."""

    tensor: QuantizedTensor
    depthwise: bool = False  # whether the layer is a depthwise convolution


@dataclass(frozen=True)
class Marked:
    """A marked copy of a model, and dicts from full names to its weights and to its activation quantizers."""

    model: nn.Module
    weights: dict[str, MarkedWeight]
    activations: dict[str, FakeQuantize]


def copy_for_export(model: nn.Module) -> nn.Module:
    """Copy a model to the CPU, in evaluation mode; if the model is on the CPU, the copy shares its parameters."""
    plan_of(model)
    parameters = list(model.parameters())
    if any(hasattr(each, "full_tensor") for each in parameters):
        raise UnsupportedError(
            "the model is sharded: load its state into a model in a single process, and export that model"
        )
    for quantizer in quantizers_of(model).values():
        if quantizer.is_passing:
            cause = "qt.calibrating" if quantizer.is_calibrating else "the delay of qt.Schedule"
            raise StateError(f"{quantizer.label} does not quantize during {cause}: export the model afterwards")
    memo: dict[int, Any] = {id(each.watcher): None for each in quantizers_of(model).values()}  # watchers are not copied
    is_on_cpu = all(each.device.type == "cpu" for each in (*parameters, *model.buffers()))
    if is_on_cpu:
        memo |= {id(each): each for each in parameters}
    try:
        copy = deepcopy(model, memo).eval()
    except (RuntimeError, TypeError) as error:
        raise UnsupportedError(
            f"the model cannot be copied for export: {error}. Change the model so that copy.deepcopy(model) works"
        ) from error
    for module in copy.modules():
        if isinstance(module, QuantizedLayer) and store_computed_weights(module):
            set_class(module, _class_without_parametrization(module))
    return copy if is_on_cpu else copy.cpu()


def _class_without_parametrization(module: QuantizedLayer) -> type[nn.Module]:
    own = unparametrized(type(module))  # parametrized after qt.prepare
    return own if own is not type(module) else quantized_class(unparametrized(module.float_class))


@torch.no_grad()
def mark(model: nn.Module) -> Marked:
    """Fold the batch norms of a copied model, and turn its quantizers into marks, in place."""
    state = onnx_weights(model)
    weights: dict[str, MarkedWeight] = {}
    keys: dict[FakeQuantize, str] = {}
    for full, layer, _, quantizer in weight_layers(model):
        if quantizer.enabled and keys.setdefault(quantizer, full) == full:  # tied weights share one quantizer
            weights[full] = MarkedWeight(state[full], _is_depthwise(layer))
    activations = {}
    for name, quantizer in quantizers_of(model).items():
        if isinstance(quantizer, MarkedQuantizer):
            continue
        key = keys.get(quantizer, name)
        if quantizer not in keys:
            activations[name] = quantizer
        vars(quantizer).update(key=key, of_weight=quantizer in keys)
        quantizer.__class__ = MarkedQuantizer
    for module in model.modules():
        if isinstance(module, QuantizedMatmul) and module.fold is not None:
            fold_in(module, module.fold)
    return Marked(model, weights, activations)


def _is_depthwise(layer: QuantizedLayer) -> bool:
    from detent.onnx_model.graph import is_depthwise  # noqa: PLC0415 - imports onnx

    if not isinstance(layer, _Convolutions):
        return False
    return is_depthwise(layer.groups, (layer.out_channels, layer.in_channels // layer.groups))


def fold_in(layer: QuantizedMatmul, fold: Fold) -> None:
    """Fold the batch norm into the layer's bias, and also into the layer's weight if this weight is not quantized."""
    if layer.quantizer("weight_quantizer") is None:
        layer.weight = nn.Parameter(fold.with_gain(layer.weight.detach()))
    layer.bias = nn.Parameter(fold.bias(layer.bias))
    fold.fuse()
    layer.fold = None
