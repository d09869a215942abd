"""Computed weights: weights that a layer computes from other parameters before it uses them.

=================================== ========================================== =========================================
source                              parameters                                 the layer computes its weight
=================================== ========================================== =========================================
torch.nn.utils.parametrize          parametrizations.weight.original           whenever the attribute is read
(weight_norm, spectral_norm,        (or original0, original1)
orthogonal, your own)
torch.nn.utils.prune                weight_orig, with the buffer weight_mask   in a forward pre-hook, as an attribute
torch.nn.utils.weight_norm          weight_g, weight_v                         in a forward pre-hook, as an attribute
torch.nn.utils.spectral_norm        weight_orig                                in a forward pre-hook, as an attribute
=================================== ========================================== =========================================

The computed weight is quantized, and its gradient flows back to the parameters. A layer reads its weight once per
forward pass, because spectral norm changes its state at each reading in training. All other code reads a weight through
``current_weight``, which computes the weight again and changes no state.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized
from torch.nn.utils.prune import BasePruningMethod
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

__all__ = [
    "current_weight",
    "has_weight",
    "is_computed",
    "store_computed_weights",
    "unparametrized",
    "weight_for_forward",
    "weight_owner",
]


def is_computed(module: nn.Module, name: str) -> bool:
    """Return whether the module computes this weight from other parameters."""
    return is_parametrized(module, name) or isinstance(vars(module).get(name), Tensor)


def has_weight(module: nn.Module, name: str) -> bool:
    """Return whether the module has this weight, as a parameter or as a computed weight."""
    return isinstance(module._parameters.get(name), nn.Parameter) or is_computed(module, name)


def weight_owner(module: nn.Module, name: str) -> object:
    """Return what tied weights share: the parameter, or the module if it computes the weight, which is never tied."""
    parameter = module._parameters.get(name)
    return module if parameter is None else parameter


def weight_for_forward(module: nn.Module, name: str) -> Tensor:
    """Return the float weight for a forward pass; a computed weight has a gradient function."""
    if name in module._parameters:
        return module._parameters[name]  # type: ignore[return-value]  # None for a weight that the layer does not have
    if is_parametrized(module, name):
        computed: Tensor = module.parametrizations[name]()  # type: ignore[index,operator]  # a ModuleDict
        return computed
    weight: Tensor = vars(module)[name]  # computed by a forward pre-hook
    return weight


@torch.no_grad()
def current_weight(module: nn.Module, name: str) -> Tensor:
    """Return the float weight that the current parameters give, without a gradient and without a change of state."""
    parameter = module._parameters.get(name)
    if parameter is not None:
        return parameter.detach()
    if is_parametrized(module, name):
        parametrizations: nn.Module = module.parametrizations[name]  # type: ignore[index,assignment]  # a ModuleDict
        modes = {each: each.training for each in parametrizations.modules()}
        try:
            computed: Tensor = parametrizations.eval()()  # spectral norm iterates in training only
        finally:
            for each, mode in modes.items():
                each.training = mode
        return computed.detach()
    for hook in module._forward_pre_hooks.values():
        weight = _from_hook(hook, module, name)
        if weight is not None:
            return weight.detach()
    plain: Tensor = vars(module)[name]
    return plain.detach()


def _from_hook(hook: Any, module: nn.Module, name: str) -> Tensor | None:
    """Return the weight that a hook of torch.nn.utils computes, or None if the hook does not compute this weight."""
    if _name_of(hook) != name:
        return None
    if isinstance(hook, BasePruningMethod):
        weight: Tensor = hook.apply_mask(module)
    elif isinstance(hook, WeightNorm):
        weight = hook.compute_weight(module)
    else:
        weight = hook.compute_weight(module, do_power_iteration=False)
    return weight


def _name_of(hook: Any) -> str | None:
    """Return the name of the weight that a hook of torch.nn.utils computes, or None for any other hook."""
    if isinstance(hook, BasePruningMethod):
        return hook._tensor_name
    return hook.name if isinstance(hook, WeightNorm | SpectralNorm) else None


@torch.no_grad()
def store_computed_weights(module: nn.Module) -> bool:
    """Turn the computed weights of a module into parameters, in place; return whether the module was parametrized.

    The caller changes the class of a parametrized module, whose attributes would otherwise be computed as before.
    """
    hooks = {
        key: weight_name
        for key, hook in module._forward_pre_hooks.items()
        if (weight_name := _name_of(hook)) is not None
    }
    was_parametrized = is_parametrized(module)
    names = [*module.parametrizations] if was_parametrized else []  # type: ignore[misc]  # a ModuleDict
    weights = {name: current_weight(module, name) for name in (*names, *hooks.values())}
    for key in hooks:
        del module._forward_pre_hooks[key]
    if was_parametrized:
        del module._modules["parametrizations"]
    for name, weight in weights.items():
        vars(module).pop(name, None)
        module._parameters[name] = nn.Parameter(weight, requires_grad=False)
    return was_parametrized


def unparametrized(layer: type[nn.Module]) -> type[nn.Module]:
    """Return the class that a module had before ``torch.nn.utils.parametrize`` changed it."""
    while layer.__name__.startswith("Parametrized") and "__getstate__" in vars(layer):
        layer = layer.__bases__[0]
    return layer
