"""Calibration: ranges from data, by forward passes that only observe.

Quantizers of activations observe batches; those of weights take the range of the weight as it is exported. By default
the range is min-max for 8 bits and more, and MSE-optimal below.
"""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from detent.errors import StateError
from detent.observers import Observer
from detent.rule import ObserverSpec, get_observer_spec
from detent.scale_mode import PerBatch
from detent.torch.arrays import on_cpu, to_array
from detent.torch.distributed import merge_observers, without_collectives
from detent.torch.preparation import evaluating, is_frozen, plan_of, quantizers_of, weight_layers
from detent.torch.quantizer import FakeQuantize

__all__ = ["calibrating", "initialize_weights"]

BYTE = 8


@contextmanager
def calibrating(model: nn.Module, observer: str | ObserverSpec | Observer | None = None) -> Iterator[nn.Module]:
    """Let forward passes only observe; on leaving, quantizers take the ranges they have seen.

    Inside, the model computes in float, in evaluation mode and without gradients. Where ``torch.distributed`` runs,
    what all processes have seen is merged on leaving, once: every process has to get there. An exception leaves the
    model as it was.

    Args:
        model: a prepared model.
        observer: the observer of quantizers whose rule names none: "minmax", "mse", "percentile(0.1, 99.9)",
            "entropy". By default minmax for 8 bits and more, mse below.

    Raises:
        StateError: the model is not prepared.
        NaNError: data with NaN reached a quantizer.

    >>> import detent.torch as qt
    >>> model = qt.prepare(nn.Sequential(nn.Linear(4, 2)), "w8a8")
    >>> with qt.calibrating(model):
    ...     _ = model(torch.linspace(-1, 1, 8).reshape(2, 4))
    >>> model[0].input_quantizer.zero_point
    tensor(127, dtype=torch.int32)
    """
    plan_of(model)
    if is_frozen(model):
        raise StateError(
            "the model is frozen, and freezing is final: qt.unprepare and qt.prepare it to calibrate again"
        )
    default = None if observer is None else get_observer_spec(observer)
    quantizers, weights = quantizers_of(model), {quantizer for *_, quantizer in weight_layers(model)}
    try:
        for quantizer in quantizers.values():
            needs_data = quantizer not in weights and not isinstance(quantizer.mode, PerBatch)
            quantizer.start_calibration(_observer_for(quantizer, default) if needs_data else None)
        with torch.no_grad(), evaluating(model), without_collectives(model):
            yield model
        observers = {
            name: each.observer_in_use for name, each in quantizers.items() if each.observer_in_use is not None
        }
        merged = merge_observers(observers, model)
    finally:
        for quantizer in quantizers.values():
            quantizer.stop_calibration()
    unseen = []
    for name, merged_observer in merged.items():
        if merged_observer.count:
            quantizers[name].set_params(merged_observer.params(quantizers[name].spec))
        elif quantizers[name].enabled and not quantizers[name].is_initialized:
            unseen.append(name)
    initialize_weights(model, default)
    if unseen:
        shown = ", ".join(unseen[:5]) + (", ..." if len(unseen) > 5 else "")
        warnings.warn(
            f"{len(unseen)} quantizers saw no data and have no parameters: {shown}. Evaluation will fail if data "
            "reaches them: calibrate with data that does",
            stacklevel=3,
        )


def _observer_for(quantizer: FakeQuantize, default: ObserverSpec | None) -> Observer:
    spec = quantizer.observer or default or get_observer_spec("minmax" if quantizer.spec.bits >= BYTE else "mse")
    return spec.make(quantizer.spec.granularity)


@torch.no_grad()
def initialize_weights(model: nn.Module, observer: ObserverSpec | None = None) -> None:
    """Give every weight's quantizer the parameters of the weight as it is now.

    >>> import detent.torch as qt
    >>> model = qt.prepare(nn.Sequential(nn.Linear(4, 2)), "w8a16")
    >>> initialize_weights(model)
    >>> model[0].weight_quantizer.is_initialized
    True
    """
    for _, layer, name, quantizer in weight_layers(model):
        if not quantizer.enabled:
            continue
        weight = to_array(on_cpu(layer.float_weight(name)))
        if isinstance(quantizer.mode, PerBatch):
            weight_observer = get_observer_spec("minmax").make(quantizer.spec.granularity)
        else:
            weight_observer = _observer_for(quantizer, observer)
        quantizer.set_params(weight_observer.observe(weight).params(quantizer.spec))
