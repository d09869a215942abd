"""Bias correction: changes a layer's bias to cancel the mean error of each output channel.

The method is from Nagel et al. 2019, "Data-Free Quantization". Rounding errors of weights do not cancel if inputs have
a nonzero mean, as after a Relu. The mean error is measured on samples of the calibration data. If the layer's input is
quantized, ``qo.rewrite`` stores the bias as int32 codes.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from detent.error_places import at
from detent.onnx.graph_plan import GraphPlan
from detent.onnx.layer_error import IsolatedLayers
from detent.ops import fake_quantize
from detent.params import QuantParams

__all__ = ["CorrectedBias", "corrected_biases"]

Array = NDArray[Any]
CHANNEL_AXES = {"Conv": 1, "Gemm": -1}  # channel axis of the output, by operator


class CorrectedBias(NamedTuple):
    """Corrected bias of a layer, and the range of the layer's input in the samples if the input is float."""

    bias: Array
    input_range: tuple[float, float] | None = None


def corrected_biases(
    plan: GraphPlan, params: Mapping[str, QuantParams], isolated: IsolatedLayers, samples: int
) -> dict[str, CorrectedBias]:
    """Return the corrected biases of the plan's Conv and Gemm layers, by layer name.

    ``params`` maps tensor names to the parameters of quantized tensors. ``samples`` is the number of samples on which
    the mean errors are measured.
    """
    lines = {line.name: line for line in plan.quantized if line.type in CHANNEL_AXES}
    layers = {name: plan.layers_by_name[name] for name in lines}
    layers = {name: layer for name, layer in layers.items() if not layer.is_weight_only}
    lines = {name: lines[name] for name in layers}
    if not lines:
        return {}
    weights = {name: plan.graph.array(layer.weight) for name, layer in layers.items()}
    rounded: dict[str, Array] = {}
    for name, line in lines.items():
        with at("layer", name):
            rounded[name] = fake_quantize(weights[name], plan.weight_params(line))
    shifts: dict[str, list[Array]] = {}  # mean errors, by layer
    ranges: dict[str, tuple[float, float]] = {}
    for sample in range(samples):
        inputs = isolated.inputs(sample)
        for name in lines:
            x, incoming = inputs[name], params.get(layers[name].data)
            if not x.size:  # for example, no row was selected in this sample
                continue
            with at("layer", name):
                quantized = x if incoming is None else fake_quantize(x, incoming)
                if incoming is None:
                    lo, hi = ranges.get(name, (np.inf, -np.inf))
                    ranges[name] = min(lo, float(x.min())), max(hi, float(x.max()))
                error = isolated.run(name, x, weights[name]) - isolated.run(name, quantized, rounded[name])
                axis = CHANNEL_AXES[lines[name].type] % error.ndim
                mean = error.mean(axis=tuple(i for i in range(error.ndim) if i != axis), dtype=np.float64)
                shifts.setdefault(name, []).append(mean)
    biases = {}
    for name, means in shifts.items():
        shift, bias = np.mean(means, axis=0), layers[name].bias
        if not bias or bias in plan.graph.constants:
            before = plan.graph.array(bias) if bias else np.zeros(shift.shape, np.float32)
            if before.shape == shift.shape:
                biases[name] = CorrectedBias((before + shift).astype(np.float32), ranges.get(name))
    return biases
