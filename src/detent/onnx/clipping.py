"""Clipping: which activations may lose their outliers.

The range of least error of a tensor is not always that of its layer: large values may be few, and count for much. So
each tensor that layers read has the range under which these layers' outputs are closest to float. Tensors that reach
an output of the model without another layer keep all that was seen: a detector whose scores are clipped has a better
signal-to-noise ratio, and no detections.
"""

from collections import defaultdict
from collections.abc import Iterable

from detent.observers import MinMax
from detent.onnx.calibrating import Calibration
from detent.onnx.inserting import activation_params
from detent.onnx.placing import Place
from detent.onnx.planning import GraphPlan
from detent.onnx.probing import Probe, noise, recorded_inputs
from detent.ops import fake_quantize
from detent.qdq.graph import Graph
from detent.qdq.order import reads

__all__ = ["choose_clipped"]

SAMPLES = 1
GAIN = 0.98  # clipping must make something better


def choose_clipped(plan: GraphPlan, calibration: Calibration, samples: int = SAMPLES) -> set[str]:
    """The tensors for which the range of the observer is taken, not all that was seen.

    Args:
        plan: what is quantized.
        calibration: what the data have shown.
        samples: how many batches the layers are compared on.

    >>> import numpy as np, detent.onnx as qo
    >>> from onnx import parser
    >>> made = qo.plan(parser.parse_model('''<ir_version: 8, opset_import: ["" : 17]>
    ...     g (float[1,1] x) => (float[1,1] y) <float[1,1] w = {3.0}> { [fc] y = MatMul(x, w) }'''))
    >>> choose_clipped(made, qo.calibrate(made, [np.float32([[2.0]])]))
    set()
    """
    places = plan.places(calibration.ranges)
    leaving = _leaving(plan.graph, [plan.found[layer.name].node.output[0] for layer in plan.quantized])
    free = [place for place in places if place.group == place.tensor and not place.origin]
    free = [
        place for place in free if not isinstance(calibration.observers[calibration.source(place.group)[0]], MinMax)
    ]
    readers = defaultdict(list)
    for layer in plan.quantized:
        if layer.input is not None:
            readers[plan.found[layer.name].data].append(layer.name)
    chosen = {place.group for place in free if place.tensor not in leaving and not readers[place.tensor]}
    judged = [place for place in free if place.tensor not in leaving and readers[place.tensor]]
    return chosen | _judge(plan, calibration, judged, readers, samples)


def _judge(
    plan: GraphPlan, calibration: Calibration, places: list[Place], readers: dict[str, list[str]], samples: int
) -> set[str]:
    ways = {
        place.tensor: [activation_params(place, calibration, clipped=clipped) for clipped in (False, True)]
        for place in places
    }
    errors = {tensor: [0.0, 0.0] for tensor in ways}
    names = [name for tensor in ways for name in readers[tensor]]
    probes = {name: Probe(plan.found[name]) for name in names}
    for inputs in recorded_inputs(plan, names, calibration.samples[:samples]):
        for tensor, params in ways.items():
            for name in readers[tensor]:
                x, weight = inputs[name], plan.graph.array(plan.found[name].weight)
                reference = probes[name].run(x, weight)
                for i, way in enumerate(params):
                    errors[tensor][i] += noise(reference, probes[name].run(fake_quantize(x, way), weight))
    return {tensor for tensor, (whole, clipped) in errors.items() if clipped < GAIN * whole}


def _leaving(graph: Graph, stops: Iterable[str]) -> set[str]:
    """The tensors that reach an output of the model without passing another layer."""
    made_by_layers = set(stops)
    found = set(graph.outputs)
    for node in reversed(graph.nodes):
        if found & set(node.output) and not made_by_layers & set(node.output) and node.op_type != "Shape":
            found.update(reads(node))
    return found
