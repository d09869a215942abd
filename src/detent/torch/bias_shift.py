"""Bias correction of a PyTorch model: cancels the mean error of each output channel of a layer.

The method is from Nagel et al. 2019, "Data-Free Quantization". Rounding errors of weights do not cancel if inputs have
a nonzero mean, as after a ReLU. The mean error ``d`` of a layer is measured with float inputs, so that the errors of
earlier layers do not count::

    bias         -= d         layers without a batch norm; a missing bias is created
    running_mean += d         if a batch norm is folded into the layer: what training would learn
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from detent.torch.calibration import passing
from detent.torch.computed_weights import current_weight
from detent.torch.parameter_changes import ParameterChanges
from detent.torch.quantized_layer import QuantizedMatmul
from detent.torch.quantizer import FakeQuantize

__all__ = ["correct", "mean_errors"]


def mean_errors(model: nn.Module, run: Callable[[], object]) -> dict[str, Tensor]:
    """Measure the mean error of each output channel, by layer name; ``run`` runs the model on samples."""
    sums: dict[str, Tensor] = {}
    counts: dict[str, int] = {}

    def hook_for(name: str) -> Callable[[nn.Module, tuple[Any, ...], Tensor], None]:
        def hook(layer: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
            if not output.numel():
                return
            error = (_quantized_output(layer, args) - output).double()
            axis = error.ndim - 1 if isinstance(layer, nn.Linear) else error.ndim - _weight_of(layer).ndim + 1
            rows = error.movedim(axis, -1).reshape(-1, error.shape[axis])
            sums[name] = sums.get(name, 0.0) + rows.sum(0)
            counts[name] = counts.get(name, 0) + len(rows)

        return hook

    layers = {name: each for name, each in model.named_modules() if isinstance(each, QuantizedMatmul)}
    handles = [layer.register_forward_hook(hook_for(name)) for name, layer in layers.items()]
    try:
        with passing(model):
            run()
    finally:
        for handle in handles:
            handle.remove()
    return {name: each / counts[name] for name, each in sums.items() if bool(torch.isfinite(each).all())}


def _weight_of(layer: nn.Module) -> Tensor:
    return current_weight(layer, "weight")


def _quantized_output(layer: nn.Module, args: tuple[Any, ...]) -> Tensor:
    """Compute the output of a layer with its own quantizers, while data pass all other quantizers unchanged."""
    quantizers = [each for each in layer.children() if isinstance(each, FakeQuantize)]
    for quantizer in quantizers:
        quantizer.stop_calibration()
    try:
        output: Tensor = layer.forward(*args)
    finally:
        for quantizer in quantizers:
            quantizer.start_calibration(None)
    return output


def correct(model: nn.Module, errors: Mapping[str, Tensor], changes: ParameterChanges) -> None:
    """Correct the mean errors of layers."""
    for name, error in errors.items():
        layer = model.get_submodule(name)
        fold = layer.fold if isinstance(layer, QuantizedMatmul) else None
        if fold is not None:
            mean: Tensor = fold.norm.running_mean  # type: ignore[assignment]  # find_folds skips norms without
            changes.set(fold.norm, "running_mean", mean.double() + error)
        else:
            bias = layer._parameters["bias"]
            changes.set(layer, "bias", -error if bias is None else bias.double() - error)
