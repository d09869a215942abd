"""The quantized graph: ``qo.rewrite`` makes it from decisions, and ``qo.insert`` makes it from a plan.

``rewrite`` needs no data and searches nothing. It brings the model into the form that ``normal_form`` describes. It
applies the factors of cross-layer equalization and SmoothQuant, and inserts Q/DQ pairs for activations. Then it stores
weights as codes and biases as int32 codes, adds the Max nodes of ``ort_workarounds``, and writes the metadata. A layer
whose input is quantized dynamically becomes a MatMulInteger.

Every step depends only on the model and its decisions. This includes new names, which are numbered in the order of
insertion. So the same model and decisions give the same bytes. If a new version of detent changes these bytes, it also
changes ``decisions.REWRITE_VERSION``.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import ModelProto, NodeProto, TensorProto

from detent import __version__
from detent.errors import NotCalibratedError, SpecError, UnsupportedError
from detent.granularity import PerGroup
from detent.onnx import equalization, smoothquant
from detent.onnx.bias_correction import CorrectedBias
from detent.onnx.calibration import Calibration, choose_params, range_decisions
from detent.onnx.decisions import MAX_BIAS_CODE, Decisions, LayerDecision, QuantizerPlacement
from detent.onnx.graph_plan import GraphPlan, LayerPlan, activation_problem, dynamic_problem, weight_problem
from detent.onnx.half_precision import store_float16
from detent.onnx.normal_form import needed_opset, to_normal_form
from detent.onnx.stored_decisions import to_metadata
from detent.onnx_model.files import ModelSource, copied, load, load_model
from detent.onnx_model.graph import DEQUANTIZE, INTEGER_MATMUL, QUANTIZE, Graph, clear_notes
from detent.onnx_model.layers import Layer, layers_of
from detent.onnx_model.ort_workarounds import guard_float, guard_pools, share_floats
from detent.onnx_model.provenance import Provenance
from detent.onnx_model.qdq_writer import DynamicCodes, Names, QdqParams, QdqWriter, gather, integer_matmul, stored_codes
from detent.onnx_model.targets import Container, Target, get_target
from detent.ops import quantize
from detent.params import QuantParams
from detent.spec import QuantSpec, reads_bytes

__all__ = [
    "bias_codes",
    "bias_scale",
    "check_fits",
    "float_form",
    "insert",
    "layer_decisions",
    "own_nodes",
    "placed",
    "readers_of",
    "replace_layer",
    "rewrite",
    "stays_float",
    "write_quantizers",
]

Array = NDArray[Any]

MIN_TABLE_BITS = 8  # of embeddings: Gather supports no smaller type
ROOMY_BIAS_CODE = 1 << 30  # leaves half of the int32 accumulator to the sum of products


def rewrite(model: ModelSource, decisions: Decisions) -> ModelProto:
    """Apply decisions to their float model, and return the quantized model.

    Args:
        model: the float model that the decisions are for, as a path or a ModelProto; it is not changed.
        decisions: decisions from ``qo.decide``, or an edited copy.

    Raises:
        SpecError, ParamsError: a decision does not fit the model; the message names the decision.
        FileFormatError, UnsupportedError: the model is invalid or not supported.

    >>> import detent.onnx as qo
    >>> from onnx import parser
    >>> model = parser.parse_model('''<ir_version: 8, opset_import: ["" : 17]>
    ...     g (float[1,1] x) => (float[1,1] y) <float[1,1] w = {3.0}> { [fc] y = MatMul(x, w) }''')
    >>> decisions = qo.decide(model, recipe="w8a16")
    >>> [node.op_type for node in qo.rewrite(model, decisions).graph.node]
    ['DequantizeLinear', 'MatMul']
    """
    return write_quantizers(float_form(model, decisions), decisions)


def float_form(model: ModelSource, decisions: Decisions) -> ModelProto:
    """Return a copy of the float model in normal form, with the factors of equalization and SmoothQuant applied."""
    if not isinstance(decisions, Decisions):
        raise SpecError(f"decisions must be a qo.Decisions, got {type(decisions).__name__}: call qo.decide")
    original = load_model(model)
    if decisions.source and decisions.source != original.digest:
        raise SpecError(
            f"the model has digest {original.digest}, but the decisions are for a model with digest "
            f"{decisions.source}: pass that model, or call qo.decide again"
        )
    _check_opset(original.proto, decisions)
    prepared = to_normal_form(
        load(original) if original is model else original.proto,
        decisions.opset,
        ir_version=decisions.ir_version,
        constants=decisions.constants,
        force=True,
    ).model
    return smoothquant.apply(equalization.apply(prepared, decisions.equalized), decisions.smoothed)


def _check_opset(model: ModelProto, decisions: Decisions) -> None:
    """Reject an opset that ``qo.decide`` would not choose for this model."""
    own_opset = Graph(model).opset
    allowed = {max(own_opset, needed_opset(low_bits=low_bits)) for low_bits in (False, True)}
    if decisions.opset not in allowed:
        raise SpecError(f"decisions: opset must be one of {sorted(allowed)} for this model, got {decisions.opset}")
    if own_opset < decisions.opset and decisions.onnx_version and decisions.onnx_version != onnx.__version__:
        raise UnsupportedError(
            f"onnx {onnx.__version__} is installed, but onnx {decisions.onnx_version} converted the model from opset "
            f"{own_opset} to {decisions.opset}, and results may differ: install onnx "
            f"{decisions.onnx_version}, or call qo.decide again"
        )


def insert(
    plan: GraphPlan,
    calibration: Calibration | None = None,
    *,
    params: Mapping[str, QuantParams] | None = None,
    biases: Mapping[str, Array] | None = None,
    source: str = "",
    options: str = "",
) -> ModelProto:
    """Apply a plan to its model, and return the quantized model.

    If ``qo.prepare`` made the plan's model, the decisions are stored in the metadata, where ``dt.verify`` reads them.

    Args:
        plan: the plan; its model is not changed.
        calibration: result of ``qo.calibrate``; needed if the plan quantizes activations.
        params: parameters by tensor name; they replace parameters from the calibration.
        biases: biases by layer name; they replace biases of the model.
        source: digest of the float model, for the metadata.
        options: the options of ``qo.decide`` as JSON, for the metadata.

    Raises:
        NotCalibratedError: the plan quantizes activations, and ``calibration`` is missing.

    >>> from onnx import parser
    >>> import detent.onnx as qo
    >>> plan = qo.plan(parser.parse_model('''<ir_version: 8, opset_import: ["" : 17]>
    ...     g (float[1,1] x) => (float[1,1] y) <float[1,1] w = {3.0}> { [fc] y = MatMul(x, w) }'''), "w8a16")
    >>> [node.op_type for node in qo.insert(plan).graph.node]
    ['DequantizeLinear', 'MatMul']
    """
    placements = plan.placements(None if calibration is None else calibration.ranges)
    chosen = {} if calibration is None else choose_params(placements, calibration)
    placements, chosen = placed(plan, placements, chosen | dict(params or {}))
    decisions = Decisions(
        written_by=__version__,
        target=plan.target.name,
        opset=plan.graph.opset,
        ir_version=plan.model.ir_version,
        source=source,
        data="" if calibration is None else calibration.fingerprint,
        recipe=plan.recipe.to_json(),
        options=options,
        placements=tuple(placements),
        ranges=range_decisions(chosen, calibration),
    )
    corrected = {name: CorrectedBias(np.asarray(bias)) for name, bias in (biases or {}).items()}
    layers = layer_decisions(plan, decisions.tensor_params(), corrected)
    return write_quantizers(
        copied(plan.model), replace(decisions, layers=layers), is_replayed=_is_normal_form(plan.model)
    )


def _is_normal_form(model: ModelProto) -> bool:
    """Whether ``to_normal_form``, the first step of ``rewrite``, would leave a model unchanged."""
    again = to_normal_form(copied(model), Graph(model).opset, force=True).model
    parts = [(each.graph.node, each.graph.initializer, each.opset_import) for each in (model, again)]
    return parts[0] == parts[1] and model.ir_version == again.ir_version


def placed(
    plan: GraphPlan, placements: Iterable[QuantizerPlacement], params: Mapping[str, QuantParams]
) -> tuple[list[QuantizerPlacement], dict[str, QuantParams]]:
    """Return the placements with the spec of their group, and the parameters of each group."""
    specs: dict[str, QuantSpec] = {}
    with_specs, used = [], {}
    for each in placements:
        if each.source_tensor:
            spec = specs[each.source_tensor]
        elif each.group != each.tensor:
            spec = specs[each.group]
        elif each.group in params:
            used[each.group] = params[each.group]
            spec = params[each.group].spec
        else:
            raise NotCalibratedError(
                f"recipe {plan.recipe.name or plan.recipe!r} quantizes activations and needs a calibration: call "
                "qo.calibrate first, or use a weight-only recipe such as 'w8a16'"
            )
        specs[each.tensor] = spec
        with_specs.append(replace(each, spec=spec))
    return with_specs, used


def layer_decisions(
    plan: GraphPlan, tensor_params: Mapping[str, QuantParams], biases: Mapping[str, CorrectedBias]
) -> tuple[LayerDecision, ...]:
    """Convert the rows of a plan to decisions, one per layer name."""
    chosen: dict[str, LayerDecision] = {}
    for line in plan.layers:
        if line.name not in chosen or line.is_quantized:  # float layers in branches of an If may share names
            chosen[line.name] = _layer_decision(plan, line, tensor_params, biases.get(line.name))
    return tuple(chosen.values())


def _layer_decision(
    plan: GraphPlan, line: LayerPlan, tensor_params: Mapping[str, QuantParams], corrected: CorrectedBias | None
) -> LayerDecision:
    if line.weight is None:
        return LayerDecision(line.name, line.reason, input=line.input)
    layer, params = plan.layers_by_name[line.name], plan.weight_params(line)
    incoming = tensor_params.get(layer.data) if line.input is not None else None
    own = plan.graph.array(layer.bias) if layer.bias in plan.graph.constants else None
    bias = own if corrected is None else corrected.bias
    if bias is not None and incoming is not None:
        params = _widened(params, bias, incoming)
    replaced = None if corrected is None else corrected.bias
    if replaced is not None and incoming is not None:
        scale = bias_scale(incoming, params)
        replaced = replaced if stays_float(replaced, scale) else bias_codes(replaced, scale)
    observed = None if corrected is None or replaced is None or replaced.dtype == np.int32 else corrected.input_range
    rank = None
    if layer.node.op_type == "Gather" and isinstance(line.weight.granularity, PerGroup):
        rank = len(plan.graph.shape(layer.data) or ())
    stored = params.scale, params.zero_point, replaced
    input_spec = None if layer.is_weight_only and line.own_range is None else line.input
    decision = LayerDecision(line.name, "", line.weight, input_spec, *stored, observed, rank, line.dynamic_input)
    return decision if line.own_range is None else replace(decision, own_range=line.own_range)


def bias_scale(incoming: QuantParams, weight: QuantParams) -> Array:
    """Compute the scale of a layer's bias codes: the input scale times the weight scale."""
    return np.asarray(np.float32(incoming.scale) * np.asarray(weight.scale, np.float32), np.float32)


def stays_float(bias: Array, scale: Array) -> bool:
    """Whether a bias stays float, because the weight has neither a single scale nor one scale per channel."""
    return bool(scale.ndim) and scale.shape != bias.shape


def bias_codes(bias: Array, scale: Array) -> Array:
    """Quantize a bias to int32 codes."""
    codes = np.clip(np.rint(bias.astype(np.float64) / scale), -MAX_BIAS_CODE, MAX_BIAS_CODE)
    return np.asarray(codes, np.int32)


def _widened(params: QuantParams, bias: Array, incoming: QuantParams) -> QuantParams:
    """Enlarge weight scales until bias plus products fit into int32, and the bias scale is a normal float32."""
    minimum = np.abs(bias.astype(np.float64)) / (float(incoming.scale) * ROOMY_BIAS_CODE)
    minimum = np.maximum(minimum, 2 * float(np.finfo(np.float32).smallest_normal) / float(incoming.scale))
    minimum = minimum if params.scale.ndim else minimum.max(initial=0.0)
    if minimum.shape != params.scale.shape or (minimum <= params.scale).all():
        return params
    wider = np.nextafter(minimum.astype(np.float32), np.float32(np.inf))
    return QuantParams(params.spec, np.maximum(params.scale, wider), params.zero_point)


def write_quantizers(model: ModelProto, decisions: Decisions, *, is_replayed: bool = True) -> ModelProto:
    """Insert Q/DQ nodes into ``model``, in place.

    If ``is_replayed``, the decisions are stored in the metadata of ``model``, where ``dt.verify`` reads them.
    """
    graph, target = Graph(model), get_target(decisions.target)
    layers = check_fits(graph, decisions)
    own_constants = [name for name in graph.constants if name not in decisions.constants]
    writer = _Writer(graph, target, decisions)
    for placement in decisions.placements:
        if placement.source_tensor:
            writer.write_scaled(placement)
        else:
            writer.write_activation(placement)
    for line in decisions.layers:
        if line.weight is not None:
            writer.write_layer(line, layers[line.name])
    guard_float(graph, [line.name for line in decisions.layers if line.is_quantized and line.input is None])
    if target.runtime == "onnxruntime":
        guard_pools(graph)
    share_floats(graph)
    _share_zero_points(graph)
    graph.drop_unread()
    if decisions.float16:
        store_float16(graph, own_constants)
    finished = graph.finish()
    del finished.graph.value_info[:]  # inferred shapes take a tenth of a small file, and runtimes infer them again
    clear_notes(finished.graph)
    Provenance(
        writer.weight_names,
        writer.activation_names,
        target.name,
        decisions.recipe,
        decisions.written_by,
        decisions.data,
        decisions.source,
        decisions.options,
        to_metadata(decisions, finished) if is_replayed else None,
    ).write(finished)
    return finished


def _share_zero_points(graph: Graph) -> None:
    """Store equal zero points once; most zero points of a model are 0."""
    names: dict[tuple[int, tuple[int, ...], bytes], str] = {}
    for node in graph.nodes:
        position = {QUANTIZE: 2, DEQUANTIZE: 2, INTEGER_MATMUL: 3}.get(node.op_type, len(node.input))
        if len(node.input) <= position or node.input[position] not in graph.constants:
            continue
        tensor = graph.constants[node.input[position]]
        values = graph.array(node.input[position])
        key = tensor.data_type, tuple(tensor.dims), values.tobytes()
        if key not in names:
            names[key] = graph.add_constant("zero_point", values, tensor.data_type)
        graph.set_input(node, position, names[key])


def check_fits(graph: Graph, decisions: Decisions) -> dict[str, Layer]:
    """Check that decisions fit the graph of a model, and return the layers of the graph by name."""
    layers = {layer.name: layer for layer in layers_of(graph)}
    _check_layers(graph, layers, decisions)
    for each in decisions.placements:
        problem = _placement_problem(graph, each)
        if problem:
            raise SpecError(f"placement of {each.tensor!r}: {problem}")
    return layers


def _check_layers(graph: Graph, layers: Mapping[str, Layer], decisions: Decisions) -> None:
    """Reject unknown or missing layers in decisions, and layer decisions that cannot be applied."""
    names = {each.name for each in decisions.layers}
    if names != set(layers):
        unknown, missing = sorted(names - set(layers)), sorted(set(layers) - names)
        raise SpecError(
            f"decisions do not fit the model (unknown layers: {unknown}, missing: {missing}): call qo.decide again"
        )
    tensors = {each.tensor: each for each in decisions.placements}
    for each in decisions.layers:
        layer, problem = layers[each.name], ""
        if layer.second:
            problem = _matmul_problem(layer, each, tensors)
        elif each.is_activation_matmul:
            problem = "weight must be a spec, because the layer is not a matmul of two activations"
        elif each.is_quantized:
            problem = _layer_problem(graph, layer, each, tensors, get_target(decisions.target))
        if problem:
            raise SpecError(f"layer {each.name!r}: {problem}")


def _layer_problem(
    graph: Graph, layer: Layer, line: LayerDecision, placements: Mapping[str, QuantizerPlacement], target: Target
) -> str:
    """Explain why a decision cannot be applied to a layer; "" if it can."""
    params = line.weight_params
    problem = layer.reason or weight_problem(params.spec, layer, target)
    if problem:
        return problem
    expected = params.spec.granularity.tiling(layer.shape).scale_shape
    if params.scale.shape != expected:
        return f"weight_scale must have shape {expected}, got {params.scale.shape}"
    problem = _input_problem(layer, line, placements.get(layer.data), target)
    if problem:
        return problem
    if line.bias is not None and (problem := _bias_problem(graph, layer, line.bias, params)):
        return problem
    is_grouped_table = layer.node.op_type == "Gather" and isinstance(params.spec.granularity, PerGroup)
    if (line.index_rank is not None) != is_grouped_table:
        return "index_rank must be a number for a Gather with per-group scales, and None for any other layer"
    indices = graph.shape(layer.data)
    if line.index_rank is not None and indices is not None and line.index_rank != len(indices):
        return f"index_rank must be {len(indices)}, the rank of the layer's indices, got {line.index_rank}"
    return ""


def _matmul_problem(layer: Layer, line: LayerDecision, placements: Mapping[str, QuantizerPlacement]) -> str:
    """Explain why a decision cannot be applied to a matmul of two activations; "" if it can."""
    reading = [name for name in layer.activations if name in placements and line.name in placements[name].readers]
    if not line.is_quantized:
        return f"it is kept in float, but reads codes of {reading[0]!r}: remove it from readers=" if reading else ""
    if line.input is None or not line.is_activation_matmul:
        return "a matmul of two activations must have input=, and no weight, bias or dynamic input"
    if activation_problem(line.input):
        return activation_problem(line.input)
    missing = [
        name
        for name in layer.activations
        if name not in placements or not (placements[name].is_read_by_all or name in reading)
    ]
    if missing:
        return (
            f"input= is a spec, but {missing[0]!r} has no placement for this layer: add a placement, add the layer to "
            "the placement's readers=, or keep the layer in float"
        )
    return ""


def _input_problem(layer: Layer, line: LayerDecision, placement: QuantizerPlacement | None, target: Target) -> str:
    """Explain why the input of a layer cannot be quantized as decided; "" if it can."""
    if layer.is_weight_only and line.has_quantized_input and not layer.has_integer_form:
        return "input and dynamic_input must be None, because only the weight of this layer can be quantized"
    if (line.own_range is not None) != (layer.is_weight_only and line.input is not None):
        return "own_range must be a range if input= is a spec and the layer is in a subgraph, and otherwise None"
    if line.dynamic_input is not None and target.runtime != "onnxruntime":
        return f"dynamic_input must be None, because target {target.name!r} does not support dynamic quantization"
    if line.dynamic_input is not None:
        return dynamic_problem(line.dynamic_input, line.weight_params.spec, layer)
    if line.input is None:
        return ""
    if activation_problem(line.input) or line.own_range is not None:
        return activation_problem(line.input)
    if placement is None or not (placement.is_read_by_all or line.name in placement.readers):
        return (
            f"input= is a spec, but the layer's input {layer.data!r} has no placement for this layer: "
            "add a placement, add the layer to the placement's readers=, or set input=None"
        )
    return ""


def _bias_problem(graph: Graph, layer: Layer, bias: Array, params: QuantParams) -> str:
    """Explain why a corrected bias cannot replace the bias of a layer; "" if it can."""
    channels = (layer.shape[layer.axis],)
    if layer.node.op_type not in {"Conv", "Gemm"} or (layer.bias and layer.bias not in graph.constants):
        return "bias must be None, because only a Conv or Gemm with a constant bias or no bias can get a new bias"
    if bias.shape != channels:
        return f"bias must have shape {channels}, got {bias.shape}"
    if bias.dtype == np.int32 and params.scale.ndim and params.scale.shape != channels:
        shape = params.scale.shape
        return f"bias must be float32, got int32: the weight scales have shape {shape}, not one scale per channel"
    return ""


def readers_of(graph: Graph, placement: QuantizerPlacement) -> list[NodeProto]:
    """Return the nodes that read a tensor's quantized values."""
    names = set(placement.readers)
    nodes = graph.consumers(placement.tensor)
    return [node for node in nodes if placement.is_read_by_all or graph.node_name(node) in names]


def _placement_problem(graph: Graph, placement: QuantizerPlacement) -> str:
    """Explain why a Q/DQ pair cannot follow the tensor of a placement; "" if it can."""
    if problem := activation_problem(placement.spec):
        return problem
    tensor, producer = placement.tensor, graph.producer(placement.tensor)
    if producer is None and tensor not in graph.inputs:
        return "the model has no such tensor: remove the placement"
    if graph.kind(tensor) not in {TensorProto.UNDEFINED, TensorProto.FLOAT}:
        kind = TensorProto.DataType.Name(graph.kind(tensor))
        return f"expected a FLOAT tensor, got {kind}: remove the placement"
    names = {graph.node_name(node) for node in graph.consumers(tensor)}
    wrong_readers = sorted(set(placement.readers) - names)
    if wrong_readers:
        return f"nodes {wrong_readers} do not read this tensor: remove them from readers="
    for name in placement.constants:
        if name not in graph.constants or int(np.prod(graph.constants[name].dims)) != 1:
            return f"{name!r} is not a scalar constant: remove it from constants="
        if _reader_of_scalar(graph, name, tensor) is None:
            return f"the operator that computes this tensor does not read {name!r}: remove it from constants="
    if placement.source_tensor:
        return _scaled_problem(graph, placement, producer)
    return ""


def _reader_of_scalar(graph: Graph, name: str, result: str) -> NodeProto | None:
    """Find the node that reads a constant and computes a tensor, directly or before a Relu or Clip."""
    node = graph.producer(result)
    while node is not None and name not in node.input and node.op_type in {"Relu", "Clip"}:
        node = graph.producer(node.input[0])
    return node if node is not None and name in node.input else None


def _scaled_problem(graph: Graph, placement: QuantizerPlacement, producer: NodeProto | None) -> str:
    """Explain why a tensor cannot share the codes of its source tensor; "" if it can."""
    if producer is None or producer.op_type not in {"Mul", "Div"} or placement.source_tensor not in producer.input:
        return f"this tensor is not {placement.source_tensor!r} times a scalar constant: set source_tensor=''"
    others = [name for name in producer.input if name != placement.source_tensor]
    if len(others) != 1 or others[0] not in graph.constants or int(np.prod(graph.constants[others[0]].dims)) != 1:
        return f"this tensor is not {placement.source_tensor!r} times a scalar constant: set source_tensor=''"
    value = float(graph.array(others[0]).item())
    if producer.op_type == "Div" and (producer.input[0] != placement.source_tensor or not value):
        return f"this tensor is not {placement.source_tensor!r} divided by a nonzero constant: set source_tensor=''"
    factor = value if producer.op_type == "Mul" else 1 / value
    return "" if placement.factor == factor else f"factor must be {factor!r}, got {placement.factor!r}"


def own_nodes(
    writer: QdqWriter, line: LayerDecision, layer: Layer, target: Target, weight: Names, qparams: QdqParams
) -> list[NodeProto]:
    """Make the nodes that replace a MatMul in a subgraph, or one that shares its weight with a subgraph.

    They quantize the layer's input for this layer only. ``weight`` and ``qparams`` belong to the layer's weight.
    """
    graph, node, x = writer.graph, layer.node, layer.node.input[0]
    if line.own_range is None or line.input is None:
        quantize_x, codes = writer.dynamic(x)
        return [quantize_x, *integer_matmul(graph, node, codes, weight, qparams)]
    params = line.own_range.params(line.input)
    x_qparams = QdqParams.of(params, target.activation_container(params.spec.format), 0)
    stem = graph.fresh(f"{layer.name}_input")
    pair = writer.pair(x, stem, writer.parameters(stem, x_qparams), x_qparams)
    dequantized = graph.fresh(f"{layer.name}_weight_dq")
    dequantize_weight = writer.dequantized(weight, dequantized, layer.weight, qparams)
    copy = NodeProto()
    copy.CopyFrom(node)
    copy.input[:] = [pair.dequantized, dequantized]
    return [*pair.nodes, dequantize_weight, copy]


def replace_layer(graph: Graph, layer: Layer, nodes: Sequence[NodeProto]) -> None:
    """Put nodes in the place of a layer's node, in the main graph or in a subgraph."""
    if layer.outer is not None:
        graph.replace_in_subgraph(layer.node, nodes, layer.outer)
        return
    graph.remove([layer.node])
    graph.insert(nodes)


@dataclass
class _StoredWeight:
    """Names of a quantized weight's codes, scale and zero point, and of its dequantized tensor."""

    names: tuple[str, str, str]
    qparams: QdqParams
    dequantized: str = ""


class _Writer:
    """Writer of Q/DQ nodes into a graph; keeps the parameters and names that later nodes need."""

    def __init__(self, graph: Graph, target: Target, decisions: Decisions) -> None:
        self.graph, self.target, self._writer = graph, target, QdqWriter(graph)
        self.weight_names: dict[str, str] = {}
        self.activation_names: dict[str, str] = {}
        self._tensor_params = decisions.tensor_params()
        self._input_params: dict[str, QuantParams] = {}  # parameters of a node's input, by node name
        self._group_constants: dict[str, tuple[str, str]] = {}  # names of scale and zero point, by group
        self._codes: dict[str, str] = {}  # name of the codes, by tensor name
        self._dynamic: dict[str, DynamicCodes] = {}  # outputs of DynamicQuantizeLinear, by tensor name
        self._stored: dict[tuple[str, QuantParams, Container], _StoredWeight] = {}
        self._constants: dict[tuple[str, QuantParams, int, int], str] = {}  # name of a weight's codes

    def write_activation(self, placement: QuantizerPlacement) -> None:
        """Insert a Q/DQ pair after a tensor."""
        graph, tensor = self.graph, placement.tensor
        params = self._tensor_params[tensor]
        qparams = QdqParams.of(params, self.target.activation_container(params.spec.format), 0)
        readers = readers_of(graph, placement)
        if placement.group not in self._group_constants:
            self._group_constants[placement.group] = self._writer.parameters(placement.group, qparams)
        is_output = tensor in graph.outputs and placement.is_read_by_all
        source = graph.fresh(f"{tensor}_float") if is_output else tensor
        pair = self._writer.pair(source, tensor, self._group_constants[placement.group], qparams)
        if is_output:  # the dequantized tensor becomes the model's output
            graph.rename(tensor, source)
            pair.nodes[-1].output[0] = tensor
            pair = pair._replace(dequantized=tensor)
        graph.redirect(tensor, pair.dequantized, readers)
        graph.insert(pair.nodes)
        self._codes[tensor] = pair.codes
        self.activation_names[pair.nodes[-2].name] = tensor
        for node in readers:
            if not (len(node.input) > 1 and node.input[0] != pair.dequantized):  # the tensor is the first input
                self._input_params[node.name] = params
        for name in placement.constants:
            self._write_scalar(name, placement.tensor)

    def write_scaled(self, placement: QuantizerPlacement) -> None:
        """Replace a multiplication by a constant: dequantize the input's codes with the scale of the output instead."""
        graph, tensor = self.graph, placement.tensor
        params = self._tensor_params[tensor]
        qparams = QdqParams.of(params, self.target.activation_container(params.spec.format), 0)
        scale, zero = self._group_constants[placement.group] = self._writer.parameters(tensor, qparams)
        dequantized = graph.fresh(f"{tensor}_dq")
        readers, producer = graph.consumers(tensor), graph.producer(tensor)
        graph.redirect(tensor, dequantized, readers)
        graph.remove([] if producer is None else [producer])
        codes = self._codes[tensor] = self._codes[placement.source_tensor]
        graph.insert([self._writer.dequantized((codes, scale, zero), dequantized, tensor, qparams)])
        for node in readers:
            self._input_params[node.name] = params

    def write_layer(self, line: LayerDecision, layer: Layer) -> None:
        """Store a layer's weight as codes; if the layer's input is quantized, store the bias as codes, too."""
        graph, node, params = self.graph, layer.node, line.weight_params
        bias = graph.array(layer.bias) if layer.bias in graph.constants else None
        if line.bias is not None:
            bias = line.bias
        if bias is not None and bias is line.bias and bias.dtype == np.float32:
            graph.set_input(node, 2, graph.add_constant(f"{layer.name}_bias", bias))
        if layer.node.op_type == "Gather":
            self._write_table(line, layer, node)
            return
        if layer.is_weight_only and not line.has_quantized_input:
            self._write_product(params, layer)
            return
        is_dynamic = line.dynamic_input is not None
        input_spec = line.dynamic_input if is_dynamic else line.input
        as_bytes = reads_bytes(node.op_type, params.spec, 0 if input_spec is None else input_spec.bits)
        container = self.target.weight_container(params.spec, depthwise=layer.depthwise, as_bytes=as_bytes)
        stored = self._store(layer, params, container)
        if line.own_range is not None or (is_dynamic and layer.outer is not None):
            replace_layer(graph, layer, own_nodes(self._writer, line, layer, self.target, stored.names, stored.qparams))
            return
        if is_dynamic:
            self._write_dynamic(stored, layer, node)
            return
        if not stored.dequantized:
            stored.dequantized = graph.fresh(f"{layer.weight}_dq")
            graph.insert([self._writer.dequantized(stored.names, stored.dequantized, layer.weight, stored.qparams)])
        graph.set_input(node, 1, stored.dequantized)
        incoming = self._input_params.get(line.name) if line.input is not None else None
        if bias is not None and incoming is not None:
            self._write_bias(node, layer, bias, bias_scale(incoming, params))

    def _write_product(self, params: QuantParams, layer: Layer) -> None:
        """Dequantize a weight by Cast and Mul, which ONNX Runtime computes once, when it loads the model.

        ONNX Runtime would compute a DequantizeLinear in every run, and in every step of a loop.
        """
        container = self.target.weight_container(params.spec, depthwise=True)
        key = layer.weight, params, container
        if key not in self._stored:
            weight = self.graph.array(layer.weight)
            qparams = QdqParams.of(params, container, weight.ndim)
            codes = stored_codes(quantize(weight, params).codes, params, qparams)
            nodes, names = self._writer.product(layer.weight, codes, qparams)
            self.graph.insert(nodes)
            self.weight_names[names[0]] = layer.name
            self._stored[key] = _StoredWeight(names, qparams, nodes[-1].output[0])
        layer.set_weight(self.graph, self._stored[key].dequantized)

    def _write_dynamic(self, stored: _StoredWeight, layer: Layer, node: NodeProto) -> None:
        """Replace a matmul by a MatMulInteger; layers that read the same tensor share its DynamicQuantizeLinear."""
        graph, x = self.graph, node.input[0]
        if x not in self._dynamic:
            quantize_x, self._dynamic[x] = self._writer.dynamic(x)
            graph.insert([quantize_x])
            self.activation_names[quantize_x.name] = layer.data
        nodes = integer_matmul(graph, node, self._dynamic[x], stored.names, stored.qparams)
        graph.remove([node])
        graph.insert(nodes)

    def _write_bias(self, node: NodeProto, layer: Layer, bias: Array, scale: Array) -> None:
        if stays_float(bias, scale):
            return
        codes = bias if bias.dtype == np.int32 else bias_codes(bias, scale)
        dequantize, dequantized = self._writer.bias(layer.bias or f"{layer.name}_bias", codes, scale)
        self.graph.insert([dequantize])
        self.graph.set_input(node, 2, dequantized)

    def _write_scalar(self, name: str, result: str) -> None:
        """Store a scalar as a code with the scalar's magnitude as the scale, for the node that computes ``result``."""
        graph, value = self.graph, np.float32(self.graph.array(name).item())
        scale, code, zero = (abs(value), value > 0, value < 0) if value else (np.float32(1), 0, 0)
        shape = tuple(graph.constants[name].dims)
        qparams = QdqParams(np.asarray(scale), np.asarray(int(zero)), TensorProto.UINT8)
        code_name = graph.add_constant(f"{name}_code", np.full(shape, int(code)), TensorProto.UINT8)
        names = code_name, *self._writer.parameters(name, qparams)
        dequantized = graph.fresh(f"{name}_dq")
        node = _reader_of_scalar(graph, name, result)
        if node is not None:
            graph.redirect(name, dequantized, [node])
            graph.insert([self._writer.dequantized(names, dequantized, name, qparams)])

    def _write_table(self, line: LayerDecision, layer: Layer, node: NodeProto) -> None:
        """Replace a Gather of float rows by a Gather of codes."""
        params, graph = line.weight_params, self.graph
        container = self.target.weight_container(params.spec, depthwise=True, min_bits=MIN_TABLE_BITS)
        stored = self._store(layer, params, container)
        stem = graph.fresh(f"{layer.weight}_rows")
        nodes = gather(graph, node, stored.names, stored.qparams, layer.shape, stem, line.index_rank)
        graph.remove([node])
        graph.insert(nodes)

    def _store(self, layer: Layer, params: QuantParams, container: Container) -> _StoredWeight:
        """Add the constants of a weight to the graph; layers that share the weight share these constants.

        If only some of these layers read the codes in bytes, the zero points have two types, but the codes are shared.
        """
        key = layer.weight, params, container
        if key in self._stored:
            return self._stored[key]
        weight = self.graph.array(layer.weight)
        qparams = QdqParams.of(params, container, weight.ndim)
        shared = self._constants.get((layer.weight, params, container.kind, container.shift))
        if shared is None:
            codes = stored_codes(quantize(weight, params).codes, params, qparams)
            names = self._writer.codes(layer.weight, codes, qparams)
            self._constants[layer.weight, params, container.kind, container.shift] = names[0]
        else:
            names = shared, *self._writer.parameters(layer.weight, qparams)
        self.weight_names.setdefault(names[0], layer.name)
        nodes, codes_read = self._writer.widened(names[0], layer.weight, qparams)
        self.graph.insert(nodes)
        self._stored[key] = _StoredWeight((codes_read, *names[1:]), qparams)
        return self._stored[key]
