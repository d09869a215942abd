"""Inserting: quantizers written into a graph, as its plan says and its data have shown."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray
from onnx import ModelProto, NodeProto, TensorProto, helper

from detent import __version__
from detent.errors import NotCalibratedError
from detent.onnx.calibration import Calibration, choose_params
from detent.onnx.graph_plan import GraphPlan, LayerPlan, weight_params
from detent.onnx.ort_workarounds import guard_float, share_floats
from detent.onnx.placement import Place
from detent.onnx_model.graph import Graph
from detent.onnx_model.layers import Layer
from detent.onnx_model.provenance import Provenance
from detent.onnx_model.qdq_writer import Quantization, dequantize_node, gather, needs_clip, quantize_node
from detent.onnx_model.targets import Container
from detent.ops import quantize
from detent.params import QuantParams

__all__ = ["insert"]

Array = NDArray[Any]
EIGHT = 8
LARGEST_BIAS = (1 << 31) - 1
ROOMY_BIAS = 1 << 30  # leaves as much for the sum of products, which is added in the same 32 bits


@dataclass
class _Stored:
    """The constants of a quantized weight, and what they are dequantized to."""

    names: tuple[str, str, str]
    how: Quantization
    back: str = ""


@dataclass
class _Writer:
    """What is written so far."""

    plan: GraphPlan
    graph: Graph
    weights: dict[str, str]
    activations: dict[str, str]
    scales: dict[str, QuantParams]  # of the data that come to a node
    constants: dict[str, tuple[str, str]]  # scale and zero point of a group
    groups: dict[str, QuantParams]
    codes: dict[str, str]
    places: list[Place] = field(default_factory=list)
    stored: dict[tuple[str, QuantParams, Container], _Stored] = field(default_factory=dict)


def insert(
    plan: GraphPlan,
    calibration: Calibration | None = None,
    *,
    params: Mapping[str, QuantParams] | None = None,
    biases: Mapping[str, Array] | None = None,
    source: str = "",
    options: str = "",
) -> ModelProto:
    """The quantized model.

    Args:
        plan: what is quantized; its model is not changed.
        calibration: what the data have shown; needed where activations are quantized.
        params: parameters of tensors, by name, in place of those that ``choose_params`` finds.
        biases: of layers, by name, in place of their own.
        source, options: what the file says of the model it was made from and of the call, see ``Provenance``.

    Raises:
        NotCalibratedError: activations are quantized, and there is no calibration.

    >>> from onnx import parser
    >>> import detent.onnx as qo
    >>> made = qo.plan(parser.parse_model('''<ir_version: 8, opset_import: ["" : 17]>
    ...     g (float[1,1] x) => (float[1,1] y) <float[1,1] w = {3.0}> { [fc] y = MatMul(x, w) }'''), "w8a16")
    >>> [node.op_type for node in qo.insert(made).graph.node]
    ['DequantizeLinear', 'MatMul']
    """
    model = ModelProto()
    model.CopyFrom(plan.model)
    writer = _Writer(plan, Graph(model), {}, {}, {}, {}, {}, {})
    ranges = None if calibration is None else calibration.ranges
    known = dict(params or {}) if calibration is None else choose_params(plan, calibration) | dict(params or {})
    writer.places = plan.places(ranges)
    for place in writer.places:
        if place.origin:
            _write_scaled(writer, place)
            continue
        given = known.get(place.group, writer.groups.get(place.group))
        if given is None:
            raise NotCalibratedError(
                f"recipe {plan.recipe.name or plan.recipe!r} quantizes activations: calibrate with data first, or use "
                "a weight-only recipe such as 'w8a16'"
            )
        _write_activation(writer, place, given)
    by_name = {node.name: node for node in writer.graph.nodes}
    for line in plan.quantized:
        _write_layer(writer, line, plan.found[line.name], by_name[line.name], (biases or {}).get(line.name))
    guard_float(writer.graph)
    share_floats(writer.graph)
    writer.graph.drop_unread()
    finished = writer.graph.finish()
    del finished.graph.value_info[:]  # inferred shapes, which runtimes infer again; a tenth of a small file
    recipe = plan.recipe.to_json()
    data = "" if calibration is None else calibration.fingerprint
    about = Provenance(writer.weights, writer.activations, plan.target.name, recipe, __version__, data, source, options)
    about.write(finished)
    return finished


def _write_activation(writer: _Writer, place: Place, params: QuantParams) -> None:
    graph, tensor = writer.graph, place.tensor
    writer.groups[place.group] = params
    how = Quantization.of(params, writer.plan.target.activation_container(params.spec.format), 0)
    readers = [
        node for node in graph.consumers(tensor) if place.is_chained or graph.node_name(node) in set(place.readers)
    ]
    if place.group not in writer.constants:
        scale = graph.add_constant(f"{place.group}_scale", how.scale)
        zero = graph.add_constant(f"{place.group}_zero_point", how.zero_point, how.kind)
        writer.constants[place.group] = scale, zero
    scale, zero = writer.constants[place.group]
    source = tensor
    nodes = []
    if needs_clip(how):
        source = graph.fresh(f"{tensor}_clipped")
        nodes.append(_clip(graph, tensor, source, params))
    codes, back = graph.fresh(f"{tensor}_codes"), graph.fresh(f"{tensor}_dequantized")
    nodes += [quantize_node(source, scale, zero, codes, how), dequantize_node(codes, scale, zero, back, how)]
    graph.redirect(tensor, back, readers)
    graph.insert(nodes)
    writer.codes[tensor] = codes
    writer.activations[nodes[-2].name] = tensor
    for node in readers:
        if not (len(node.input) > 1 and node.input[0] != back):  # it reads these data in another place
            writer.scales[node.name] = params
    for name in place.constants:
        _write_number(graph, name, place.tensor)


def _write_scaled(writer: _Writer, place: Place) -> None:
    """Dequantize the codes of another tensor by a scale of their own, in place of a product with a constant."""
    graph, source = writer.graph, writer.groups[_group_of(writer, place.origin)]
    params = QuantParams(source.spec, np.float32(source.scale * np.float64(place.factor)), source.zero_point)
    how = Quantization.of(params, writer.plan.target.activation_container(params.spec.format), 0)
    writer.groups[place.group] = params
    scale = graph.add_constant(f"{place.tensor}_scale", how.scale)
    zero = graph.add_constant(f"{place.tensor}_zero_point", how.zero_point, how.kind)
    writer.constants[place.group] = scale, zero
    back = graph.fresh(f"{place.tensor}_dequantized")
    readers, producer = graph.consumers(place.tensor), graph.producer(place.tensor)
    graph.redirect(place.tensor, back, readers)
    graph.remove([] if producer is None else [producer])
    graph.insert([dequantize_node(writer.codes[place.origin], scale, zero, back, how)])
    for node in readers:
        writer.scales[node.name] = params


def _group_of(writer: _Writer, tensor: str) -> str:
    return next(place.group for place in writer.places if place.tensor == tensor)


def _write_number(graph: Graph, name: str, result: str) -> None:
    """Let the node that makes a tensor read a constant number as a code: the number itself is the scale."""
    value = np.float32(graph.array(name).item())
    scale, code, zero = (abs(value), value > 0, value < 0) if value else (np.float32(1), 0, 0)
    shape = tuple(graph.constants[name].dims)
    how = Quantization(np.asarray(scale), np.asarray(int(zero)), TensorProto.UINT8)
    names = [
        graph.add_constant(f"{name}_code", np.full(shape, int(code)), TensorProto.UINT8),
        graph.add_constant(f"{name}_scale", how.scale),
        graph.add_constant(f"{name}_zero_point", how.zero_point, TensorProto.UINT8),
    ]
    back = graph.fresh(f"{name}_dequantized")
    node = graph.producer(result)
    while node is not None and name not in node.input:  # behind the Relu or Clip
        node = graph.producer(node.input[0])
    if node is not None:
        graph.redirect(name, back, [node])
        graph.insert([dequantize_node(names[0], names[1], names[2], back, how)])


def _clip(graph: Graph, tensor: str, result: str, params: QuantParams) -> NodeProto:
    """A Clip to the codes in use, of which the type has more."""
    ends = [
        graph.add_constant(
            f"{tensor}_{name}", np.asarray((np.float32(code) - params.zero_point) * params.scale, np.float32)
        )
        for name, code in (("least", params.spec.qmin), ("most", params.spec.qmax))
    ]
    return helper.make_node("Clip", [tensor, *ends], [result], name=f"{result}_node")


def _write_layer(writer: _Writer, line: LayerPlan, layer: Layer, node: NodeProto, corrected: Array | None) -> None:
    graph, target = writer.graph, writer.plan.target
    if line.weight is None:
        return
    weight = graph.array(layer.weight)
    params = weight_params(weight, line.weight)
    incoming = writer.scales.get(line.name) if line.input is not None else None
    bias = graph.array(layer.bias) if layer.bias in graph.constants else None
    if corrected is not None:
        bias = corrected
        graph.give(node, 2, graph.add_constant(f"{layer.name}_bias", corrected))
    if bias is not None and incoming is not None:
        params = _widened(params, bias, incoming)
    if layer.node.op_type == "Gather":
        container = target.weight_container(params.spec.format, depthwise=True, least=EIGHT)
        stored = _store(writer, layer, weight, params, container)
        nodes = gather(graph, node, stored.names, stored.how, weight.shape, graph.fresh(f"{layer.weight}_rows"))
        graph.remove([node])
        graph.insert(nodes)
        return
    least = EIGHT if layer.node.op_type in {"Conv", "ConvTranspose"} else 4
    container = target.weight_container(params.spec.format, depthwise=layer.depthwise, least=least)
    stored = _store(writer, layer, weight, params, container)
    if not stored.back:
        stored.back = graph.fresh(f"{layer.weight}_dequantized")
        graph.insert([dequantize_node(*stored.names, stored.back, stored.how)])
    graph.give(node, 1, stored.back)
    if bias is not None and incoming is not None:
        _write_bias(graph, node, layer, bias, np.float32(incoming.scale) * stored.how.scale)


def _store(writer: _Writer, layer: Layer, weight: Array, params: QuantParams, container: Container) -> _Stored:
    """The constants of a weight; layers that share it share them."""
    key = layer.weight, params, container
    if key in writer.stored:
        return writer.stored[key]
    graph, codes = writer.graph, quantize(weight, params).codes
    if params.spec.format.is_integer:
        codes = codes.astype(np.int32) + container.shift
    how = Quantization.of(params, container, weight.ndim)
    name = graph.add_constant(f"{layer.weight}_codes", codes, container.kind)
    scale = graph.add_constant(f"{layer.weight}_scale", how.scale)
    zero = graph.add_constant(f"{layer.weight}_zero_point", how.zero_point, how.kind)
    writer.weights[name] = layer.name
    writer.stored[key] = _Stored((name, scale, zero), how)
    return writer.stored[key]


def _widened(params: QuantParams, bias: Array, incoming: QuantParams) -> QuantParams:
    """Weight scales so wide that bias and products add up in 32 bits, and that both scales' product is normal."""
    least = np.abs(bias.astype(np.float64)) / (float(incoming.scale) * ROOMY_BIAS)
    least = np.maximum(least, 2 * float(np.finfo(np.float32).smallest_normal) / float(incoming.scale))
    least = least if params.scale.ndim else least.max(initial=0.0)
    if least.shape != params.scale.shape or (least <= params.scale).all():
        return params
    wider = np.nextafter(least.astype(np.float32), np.float32(np.inf))
    return QuantParams(params.spec, np.maximum(params.scale, wider), params.zero_point)


def _write_bias(graph: Graph, node: NodeProto, layer: Layer, bias: Array, scale: Array) -> None:
    if scale.ndim and scale.shape != bias.shape:
        return
    codes = np.clip(np.rint(bias.astype(np.float64) / scale), -LARGEST_BIAS, LARGEST_BIAS)
    how = Quantization(np.asarray(scale, np.float32), np.zeros(scale.shape), TensorProto.INT32, 0)
    stem = layer.bias or f"{layer.name}_bias"
    names = [
        graph.add_constant(f"{stem}_codes", codes, TensorProto.INT32),
        graph.add_constant(f"{stem}_scale", how.scale),
    ]
    back = graph.fresh(f"{stem}_dequantized")
    graph.insert([dequantize_node(names[0], names[1], None, back, how)])
    graph.give(node, 2, back)
