"""Untrained scales: a warning at the first optimizer step if no optimizer contains the learned scales.

An optimizer constructed before ``qt.prepare`` contains only the weights, because learned scales did not exist yet.
A hook runs after each optimizer step, until a step updates a layer whose learned scales have gradients. If no optimizer
contains these scales at that time, nothing trains them, and the hook warns. The hook ignores steps that a gradient
scaler skips, and scales that are frozen or have no gradient yet.
"""

import gc
import warnings
from collections.abc import Iterator
from typing import Any
from weakref import WeakSet

import torch
from torch import nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from detent.torch.quantized_layer import QuantizedLayer
from detent.torch.quantizer import FakeQuantize

__all__ = ["warn_if_untrained"]

_undecided: WeakSet[nn.Module] = WeakSet()  # prepared models that were not checked yet
_hooks: list[Any] = []


def warn_if_untrained(model: nn.Module) -> None:
    """Warn at an optimizer step, once, if the learned scales of this model are in no optimizer."""
    if not any(isinstance(each, FakeQuantize) and each.is_learned for each in model.modules()):
        return
    _undecided.add(model)
    if not _hooks:
        _hooks.append(register_optimizer_step_post_hook(_after_step))


def _after_step(optimizer: Optimizer, *_: object) -> None:
    if torch.compiler.is_compiling():
        return
    stepped = set(_parameters_of(optimizer))
    for model in list(_undecided):
        scales = dict(_scales_of(model, stepped))
        if not any(each.grad is not None and bool(each.grad.any()) for each in scales.values()):
            continue
        _undecided.discard(model)
        missing = {name: each for name, each in scales.items() if id(each) not in stepped}
        if missing:
            trained = {each for other in _all_optimizers() for each in _parameters_of(other)}
            missing = {name: each for name, each in missing.items() if id(each) not in trained}
        if missing:
            warnings.warn(
                f"no optimizer trains {len(missing)} learned scales and zero points (first: "
                f"{next(iter(missing))!r}). Construct the optimizer after qt.prepare, or add the parameters: "
                'optimizer.add_param_group({"params": [p for n, p in model.named_parameters() '
                'if n.endswith("_shift")]}). '
                "To keep the scales constant, call requires_grad_(False) on these parameters.",
                stacklevel=3,
            )
    if not _undecided:
        while _hooks:
            _hooks.pop().remove()


def _scales_of(model: nn.Module, stepped: set[int]) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield the learned scales and zero points, unless frozen, of layers that have a parameter in ``stepped``."""
    for prefix, layer in model.named_modules():
        if not isinstance(layer, QuantizedLayer) or all(id(each) not in stepped for each in layer.parameters(False)):
            continue
        for child, quantizer in layer.named_children():
            if isinstance(quantizer, FakeQuantize):
                for name, parameter in quantizer.named_parameters(recurse=False):
                    if parameter.requires_grad:
                        yield ".".join(part for part in (prefix, child, name) if part), parameter


def _parameters_of(optimizer: Optimizer) -> Iterator[int]:
    return (id(each) for group in optimizer.param_groups for each in group["params"])


def _all_optimizers() -> list[Optimizer]:
    """Return all optimizers of the process, including those that have not stepped yet."""
    return [each for each in gc.get_objects() if issubclass(type(each), Optimizer)]
