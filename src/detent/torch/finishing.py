"""Finishing: no more updates, and the quantized weights as they are shipped."""

import torch
from torch import nn

from detent.errors import StateError
from detent.tensor import QuantizedTensor
from detent.torch.batchnorm import QuantizedNorm
from detent.torch.preparation import mark_frozen, plan_of, quantizers_of, weight_layers
from detent.torch.running import QuantizedProduct

__all__ = ["freeze", "quantized_state"]


def freeze(model: nn.Module) -> nn.Module:
    """No more updates: scales and statistics stay, and batch normalisations become part of the layers before them.

    Args:
        model: a prepared model, calibrated or trained.

    Raises:
        StateError: the model is not prepared, or a folded batch normalisation was replaced since.

    >>> import detent.torch as qt
    >>> model = qt.prepare(nn.Sequential(nn.Linear(4, 2)), "w8a16")
    >>> qt.freeze(model)[0].weight_quantizer.observing
    False
    """
    plan_of(model)
    _check_folds(model)
    mark_frozen(model)
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
    _check_folds(model)
    return {full: layer.shipped(name) for full, layer, name, quantizer in weight_layers(model) if quantizer.enabled}


def _check_folds(model: nn.Module) -> None:
    present = set(model.modules())
    for name, layer in model.named_modules():
        if isinstance(layer, QuantizedProduct) and layer.fold is not None and layer.fold.norm not in present:
            raise StateError(
                f"the batch normalisation that is folded into {name} was replaced after qt.prepare: replace it first, "
                "SyncBatchNorm.convert_sync_batchnorm included, and prepare the model then"
            )
