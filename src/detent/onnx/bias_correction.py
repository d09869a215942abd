"""Biases: the mean error of a layer's output, taken back by its bias (Nagel et al. 2019, "Data-Free Quantization").

Rounding errors of weights do not cancel where inputs have a mean, which is what a Relu gives them. What a layer's
channels are off by on average, on the samples, is added to its bias.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from detent.onnx.calibration import Calibration
from detent.onnx.graph_plan import GraphPlan, weight_params
from detent.onnx.layer_error import Probe, recorded_inputs
from detent.ops import fake_quantize
from detent.params import QuantParams

__all__ = ["corrected_biases"]

Array = NDArray[Any]
CHANNELS = {"Conv": 1, "Gemm": -1}


def corrected_biases(
    plan: GraphPlan, calibration: Calibration, params: Mapping[str, QuantParams], samples: int = 2
) -> dict[str, Array]:
    """The biases of layers that can have one, by the layers' names.

    Args:
        plan: what is quantized.
        calibration: for its samples.
        params: of activations, by tensor.
        samples: how many batches to average over.

    >>> import detent.onnx as qo
    >>> from onnx import parser
    >>> made = qo.plan(parser.parse_model('''<ir_version: 8, opset_import: ["" : 17]>
    ...     g (float[1,1] x) => (float[1,2] y) <float[1,2] w = {127.0, 0.6}> { [fc] y = Gemm(x, w) }'''), "w4a8")
    >>> seen = qo.calibrate(made, [np.float32([[2.0]])])
    >>> list(corrected_biases(made, seen, {}))
    ['fc']
    """
    lines = {line.name: line for line in plan.quantized if line.type in CHANNELS and line.weight is not None}
    if not lines:
        return {}
    sums: dict[str, Array] = {}
    probes = {name: Probe(plan.layers_by_name[name]) for name in lines}
    weights = {name: plan.graph.array(plan.layers_by_name[name].weight) for name in lines}
    coarse = {
        name: fake_quantize(weights[name], weight_params(weights[name], line.weight))
        for name, line in lines.items()
        if line.weight is not None
    }
    used = calibration.samples[:samples]
    for inputs in recorded_inputs(plan, lines, used):
        for name, x in inputs.items():
            incoming = params.get(plan.layers_by_name[name].data)
            seen = x if incoming is None else fake_quantize(x, incoming)
            off = probes[name].run(x, weights[name]) - probes[name].run(seen, coarse[name])
            axis = CHANNELS[lines[name].type] % off.ndim
            mean = off.mean(axis=tuple(i for i in range(off.ndim) if i != axis), dtype=np.float64)
            sums[name] = sums.get(name, 0.0) + mean / len(used)
    found = {}
    for name, shift in sums.items():
        bias = plan.layers_by_name[name].bias
        if not bias or bias in plan.graph.constants:
            before = plan.graph.array(bias) if bias else np.zeros(shift.shape, np.float32)
            if before.shape == shift.shape:
                found[name] = (before + shift).astype(np.float32)
    return found
