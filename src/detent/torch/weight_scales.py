"""Weight scales: parameters of weight quantizers, from the float weights that are exported.

Weights are known without data. So with a mode that starts at the least error (``Learned(start="mse")``, the default at
4 bits and fewer), ``qt.prepare`` sets the scales of weights, and sets them again if a checkpoint of the float model is
loaded afterwards. Calibration sets the scales of all weights.
"""

from collections.abc import Iterable

import torch

from detent.rule import ObserverSpec, get_observer_spec
from detent.scale_mode import Learned, PerBatch
from detent.torch.arrays import on_cpu, to_array
from detent.torch.quantized_layer import QuantizedLayer
from detent.torch.quantizer import FakeQuantize

__all__ = ["MINMAX_BITS", "WeightLayer", "observer_spec_for", "set_weight_scales", "starts_in_preparation"]

MINMAX_BITS = 8  # with this many bits or more, the default is the min-max range; with fewer, clipping reduces the error
WeightLayer = tuple[str, QuantizedLayer, str, FakeQuantize]  # full name, layer, weight name, quantizer


def observer_spec_for(quantizer: FakeQuantize, default: ObserverSpec | None) -> ObserverSpec:
    """Return the observer of a quantizer: that of its rule, otherwise the default, otherwise one for its bit width."""
    by_bits = "minmax" if quantizer.spec.bits >= MINMAX_BITS else "mse"
    return quantizer.observer or default or get_observer_spec(by_bits)


@torch.no_grad()
def set_weight_scales(weights: Iterable[WeightLayer], observer: ObserverSpec | None = None) -> None:
    """Set the parameters of weight quantizers from the current weights; disabled quantizers are skipped."""
    for _, layer, name, quantizer in weights:
        if not quantizer.enabled:
            continue
        is_dynamic = isinstance(quantizer.mode, PerBatch)
        chosen = get_observer_spec("minmax") if is_dynamic else observer_spec_for(quantizer, observer)
        weight = to_array(on_cpu(layer.float_weight(name)))
        quantizer.set_params(chosen.params_of(weight, quantizer.spec))


def starts_in_preparation(quantizer: FakeQuantize) -> bool:
    """Return whether ``qt.prepare`` sets the parameters of this weight quantizer."""
    return isinstance(quantizer.mode, Learned) and quantizer.mode.start == "mse"
