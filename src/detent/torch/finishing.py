"""Finishing: no more updates, and the quantized weights as they are shipped."""

import torch
from torch import nn

from detent.tensor import QuantizedTensor
from detent.torch.batchnorm import QuantizedNorm
from detent.torch.preparation import plan_of, quantizers_of
from detent.torch.running import QuantizedLayer, QuantizedProduct

__all__ = ["freeze", "quantized_state"]


def freeze(model: nn.Module) -> nn.Module:
    """No more updates: scales and statistics stay, and batch normalisations become part of the layers before them.

    Args:
        model: a prepared model, calibrated or trained.

    Raises:
        StateError: the model is not prepared.
        NotCalibratedError: a quantizer has no parameters.

    >>> import detent.torch as qt
    >>> model = qt.prepare(nn.Sequential(nn.Linear(4, 2)), "w8a16")
    >>> qt.freeze(model)[0].weight_quantizer.observing
    False
    """
    plan_of(model)
    for quantizer in quantizers_of(model).values():
        quantizer.observing = False
        for parameter in quantizer.parameters(recurse=False):
            parameter.requires_grad_(False)
    for module in model.modules():
        if isinstance(module, QuantizedNorm):
            module.frozen = True
        if isinstance(module, QuantizedProduct) and module.fold is not None:
            module.fold.fuse()
    return model


@torch.no_grad()
def quantized_state(model: nn.Module) -> dict[str, QuantizedTensor]:
    """The quantized weights by their full names, with batch normalisations folded in, as they are shipped.

    >>> import detent.torch as qt
    >>> state = qt.quantized_state(qt.prepare(nn.Sequential(nn.Linear(4, 2)), "w4a16-g32"))
    >>> list(state)
    []
    """
    plan_of(model)
    found: dict[str, QuantizedTensor] = {}
    for prefix, layer in model.named_modules():
        if not isinstance(layer, QuantizedLayer):
            continue
        for name in layer.kind.weight_names(layer):
            quantizer = layer.quantizer(f"{name}_quantizer")
            if quantizer is None:
                continue
            found[f"{prefix}.{name}".lstrip(".")] = layer.shipped(name)
    return found
