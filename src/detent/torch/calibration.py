"""Calibration: set scales from the ranges that forward passes observe.

Activation quantizers observe the calibration batches. Weight quantizers use the range of the exported weight.
"""

import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType

import torch
from torch import nn

from detent.errors import StateError
from detent.observers import Observer
from detent.rule import ObserverSpec, get_observer_spec
from detent.scale_mode import PerBatch
from detent.tables import counted
from detent.torch.distributed import merge_observers, without_collectives
from detent.torch.preparation import evaluating, is_frozen, plan_of, quantizers_of, weight_layers
from detent.torch.weight_scales import observer_spec_for, set_weight_scales

__all__ = ["calibrating", "initialize_weights", "passing", "warn_unseen"]

MAX_NAMES_SHOWN = 5


@contextmanager
def calibrating(model: nn.Module, observer: str | ObserverSpec | Observer | None = None) -> Iterator[nn.Module]:
    """Calibrate a model: forward passes in this context observe ranges, from which the scales are set on exit.

    In the context, the model computes in float, in evaluation mode and without gradients. Under ``torch.distributed``,
    the observers of all processes are merged on exit, so every process must leave the context. If the body raises an
    exception, the model stays unchanged. Contexts can be nested, for the same model or for parts of the model. Each
    context observes all forward passes inside it.

    Args:
        model: a prepared model.
        observer: "minmax", "mse", "percentile(0.1, 99.9)" or "entropy", for quantizers whose rule sets no observer.
            None means "minmax" for 8 bits or more, and "mse" for fewer bits.

    Yields:
        The model.

    Raises:
        StateError: the model is not prepared, or is frozen.
        NaNError: the input of a quantizer contains NaN.

    >>> import detent.torch as qt
    >>> model = qt.prepare(nn.Sequential(nn.Linear(4, 2)), "w8a8")
    >>> with qt.calibrating(model):
    ...     _ = model(torch.linspace(-1, 1, 8).reshape(2, 4))
    >>> model[0].input_quantizer.zero_point
    tensor(127, dtype=torch.int32)
    """
    plan_of(model)
    if is_frozen(model):
        raise StateError("a frozen model cannot be calibrated: call qt.unprepare and qt.prepare, and then calibrate")
    default = None if observer is None else get_observer_spec(observer)
    quantizers, weights = quantizers_of(model), {quantizer for *_, quantizer in weight_layers(model)}
    observers = {
        name: None
        if quantizer in weights or isinstance(quantizer.mode, PerBatch)
        else observer_spec_for(quantizer, default).make(quantizer.spec.granularity)
        for name, quantizer in quantizers.items()
    }
    with passing(model, observers):
        with without_collectives(model):
            yield model
        merged = merge_observers({name: each for name, each in observers.items() if each is not None}, model)
    unseen = []
    for name, merged_observer in merged.items():
        if merged_observer.count:
            quantizers[name].set_params(merged_observer.params(quantizers[name].spec))
        elif quantizers[name].enabled and not quantizers[name].is_initialized:
            unseen.append(name)
    initialize_weights(model, default)
    warn_unseen(unseen, stacklevel=4)


def warn_unseen(names: Sequence[str], stacklevel: int) -> None:
    """Warn of quantizers that calibration data did not reach."""
    if names:
        shown = ", ".join(names[:MAX_NAMES_SHOWN]) + (", ..." if len(names) > MAX_NAMES_SHOWN else "")
        warnings.warn(
            f"no calibration data reached {counted(len(names), 'quantizer')}: {shown}. In evaluation, a quantizer "
            "without parameters raises an error: calibrate with batches that reach every quantizer",
            stacklevel=stacklevel,
        )


@contextmanager
def passing(model: nn.Module, observers: Mapping[str, Observer | None] = MappingProxyType({})) -> Iterator[None]:
    """Let data pass all quantizers unchanged, in evaluation mode and without gradients; observers observe the data."""
    quantizers = quantizers_of(model)
    for name, quantizer in quantizers.items():
        quantizer.start_calibration(observers.get(name))
    try:
        with torch.no_grad(), evaluating(model):
            yield
    finally:
        for quantizer in quantizers.values():
            quantizer.stop_calibration()


def initialize_weights(
    model: nn.Module, observer: ObserverSpec | None = None, layers: Collection[nn.Module] | None = None
) -> None:
    """Set the parameters of weight quantizers from the current weights, in some layers, or in all if it is None."""
    set_weight_scales((each for each in weight_layers(model) if layers is None or each[1] in layers), observer)
