"""Preparing: any model in the one form that planning reads.

Constants are initializers, whether the file has Constant nodes, constants computed from constants, or lists them among
the inputs; every node has a name of its own; what can be folded into a layer is; nothing that is read by nobody stays.
What the model computes stays the same, but for the last bits that folding changes.

Converting: a model in the operator set that its quantizers need.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import GraphProto, ModelProto, NodeProto, defs, helper, numpy_helper, version_converter

from detent.errors import UnsupportedError
from detent.onnx.batchnorm import fold
from detent.onnx_model.files import SAVE_LIMIT, ModelSource, load, nbytes_of
from detent.onnx_model.graph import MAIN, Graph, array_of, subgraphs
from detent.onnx_model.sessions import make_session

__all__ = ["convert", "needed_opset", "prepare"]

PER_AXIS, BLOCKED = 13, 21  # the first operator sets with quantizers of those kinds
NEWEST_IR = 10
CLOSE = 1e-5  # of the largest output: what another order of sums may change


def needed_opset(*, low_bits: bool) -> int:
    """The oldest operator set whose quantizers have channels, and with ``low_bits`` blocks, 4 and 16 bits, too.

    >>> needed_opset(low_bits=False), needed_opset(low_bits=True)
    (13, 21)
    """
    return BLOCKED if low_bits else PER_AXIS


def convert(model: ModelProto, opset: int, feed: Mapping[str, NDArray[Any]] | None = None) -> ModelProto:
    """The model in at least that operator set, with an IR version that runtimes read.

    Args:
        model: is not changed where it is old enough to be converted.
        opset: of ONNX's own operators; others are kept.
        feed: inputs on which the converted model is compared with the original.

    Raises:
        UnsupportedError: an operator cannot be converted, or computes something else afterwards.

    >>> from onnx import parser
    >>> made = parser.parse_model(
    ...     '<ir_version: 4, opset_import: ["" : 11]> g (float[1] x) => (float[1] y) { y = Relu(x) }')
    >>> Graph(convert(made, 13)).opset
    13
    """
    found = Graph(model).opset
    converted = model
    if found < opset:
        try:
            converted = version_converter.convert_version(model, opset)
        except Exception as error:
            raise UnsupportedError(
                f"the model has operator set {found}, its quantizers need {opset}, and it cannot be converted: {error}"
            ) from error
        present = {entry.domain for entry in converted.opset_import}
        for entry in model.opset_import:
            if entry.domain not in {*present, *MAIN}:
                converted.opset_import.add(domain=entry.domain, version=entry.version)
        converted.metadata_props.extend(
            each for each in model.metadata_props if each.key not in {old.key for old in converted.metadata_props}
        )
    converted.ir_version = min(max(converted.ir_version, 8 if opset < BLOCKED else NEWEST_IR), NEWEST_IR)
    if found < opset and feed is not None:
        _compare(model, converted, feed, (found, opset))
    return converted


def _compare(before: ModelProto, after: ModelProto, feed: Mapping[str, NDArray[Any]], opsets: tuple[int, int]) -> None:
    results = [make_session(each).run(None, dict(feed)) for each in (before, after)]
    for name, old, new in zip(Graph(before).outputs, *results, strict=True):
        if np.shape(old) == np.shape(new) and _close(np.asarray(old), np.asarray(new)):
            continue
        raise UnsupportedError(
            f"converted from operator set {opsets[0]} to {opsets[1]}, the model computes another {name!r}: between "
            f"these {', '.join(_changed(before, *opsets)) or 'no operators'} changed; export it with operator set "
            f"{opsets[1]}"
        )


def _changed(model: ModelProto, old: int, new: int) -> list[str]:
    """The operators of a model whose definition changed between two operator sets."""
    kinds = {node.op_type for node in model.graph.node if node.domain in MAIN}
    return sorted(kind for kind in kinds if old < defs.get_schema(kind, new).since_version <= new)


def _close(old: NDArray[Any], new: NDArray[Any]) -> bool:
    if old.dtype.kind != "f":
        return np.array_equal(old, new)
    scale = float(np.abs(old[np.isfinite(old)]).max(initial=0.0))
    return bool(np.allclose(old, new, rtol=0, atol=CLOSE * scale, equal_nan=True))


LARGEST_FOLDED = 1 << 26  # bytes of a constant that is computed from others
QUANTIZERS = ("QuantizeLinear", "DequantizeLinear", "DynamicQuantizeLinear", "QLinearConv", "QLinearMatMul", "QGemm")
_GROWING = ("Expand", "Tile", "ConstantOfShape", "Range", "Pad")
_RANDOM = ("RandomNormal", "RandomUniform", "RandomNormalLike", "RandomUniformLike", "Bernoulli", "Multinomial")


def prepare(
    source: ModelSource,
    *,
    low_bits: bool = False,
    feed: Mapping[str, NDArray[Any]] | None = None,
    force: bool = False,
) -> ModelProto:
    """A copy of a model in the form that can be planned.

    Args:
        source: a path or a model.
        low_bits: whether 4-bit, 16-bit or blocked quantizers will be written, which need operator set 21.
        feed: inputs on which the model is compared with the original, where it has to be converted.
        force: take models that are quantized already.

    Raises:
        UnsupportedError: it is quantized already, computes in float16, or cannot be converted.

    >>> from onnx import parser
    >>> made = prepare(parser.parse_model('''<ir_version: 8, opset_import: ["" : 17]>
    ...     g (float[1] x) => (float[1] y) { c = Constant<value = float {2.0}>() y = Mul(x, c) }'''))
    >>> [node.op_type for node in made.graph.node], made.graph.initializer[0].name, made.graph.node[0].name
    (['Mul'], 'c', 'Mul_y')
    """
    model = load(source)
    if model.functions:
        model = onnx.inliner.inline_local_functions(model)
    _refuse(model, force=force)
    graph = Graph(model)
    _take_inputs_out(graph)
    _constants_as_initializers(graph)
    model = convert(graph.finish(), needed_opset(low_bits=low_bits), feed)
    graph = Graph(model)
    _constants_as_initializers(graph)  # the converter makes some
    _name_nodes(graph)
    _drop_identities(graph)
    _compute_constants(graph)
    _turn_weights(graph)
    _flatten_biases(graph)
    fold(graph)
    graph.drop_unread()
    return _with_shapes(graph.finish())


def _refuse(model: ModelProto, *, force: bool) -> None:
    kinds = {node.op_type for node in model.graph.node}
    found = sorted(kinds & set(QUANTIZERS))
    if found and not force:
        raise UnsupportedError(
            f"the model is quantized already, it has {', '.join(found)}: quantize the float model it was made from, or "
            "give force=True (--allow-quantized) to quantize what is left of it in float"
        )
    halves = [tensor for tensor in model.graph.initializer if tensor.data_type in {10, 16}]
    if halves and not any(tensor.data_type == onnx.TensorProto.FLOAT for tensor in model.graph.initializer):
        name = onnx.TensorProto.DataType.Name(halves[0].data_type)
        raise UnsupportedError(
            f"the model computes in {name} ({halves[0].name!r} is such a tensor): export it in float32, which is what "
            "calibration measures and ONNX Runtime quantizes"
        )


def _take_inputs_out(graph: Graph) -> None:
    """Initializers are constants, listed among the inputs or not."""
    inputs = graph.model.graph.input
    kept = [value for value in inputs if value.name not in graph.constants]
    if len(kept) != len(inputs):
        kept = [onnx.ValueInfoProto.FromString(value.SerializeToString()) for value in kept]
        del inputs[:]
        inputs.extend(kept)


def _constants_as_initializers(graph: Graph) -> None:
    constants = [node for node in graph.nodes if node.op_type == "Constant" and node.domain in MAIN]
    for node in constants:
        tensor = _value(node)
        if tensor is not None:
            tensor.name = node.output[0]
            graph.constants[tensor.name] = tensor
    graph.remove([node for node in constants if node.output[0] in graph.constants])


def _value(node: NodeProto) -> onnx.TensorProto | None:
    for attribute in node.attribute:
        if attribute.name == "value":
            copy = onnx.TensorProto()
            copy.CopyFrom(attribute.t)
            return copy
        if attribute.name in {"value_float", "value_floats"}:
            return numpy_helper.from_array(np.asarray(helper.get_attribute_value(attribute), np.float32))
        if attribute.name in {"value_int", "value_ints"}:
            return numpy_helper.from_array(np.asarray(helper.get_attribute_value(attribute), np.int64))
    return None


def _name_nodes(graph: Graph) -> None:
    seen: set[str] = set()
    for node in graph.nodes:
        if not node.name or node.name in seen:
            node.name = graph.fresh(graph.node_name(node) if not node.name else node.name)
        seen.add(node.name)


def _drop_identities(graph: Graph) -> None:
    """Let readers of copies read the original."""
    for node in [each for each in graph.nodes if each.op_type == "Identity" and each.domain in MAIN]:
        old, new = node.output[0], node.input[0]
        if old in graph.outputs or old in graph.captured:
            continue
        graph.redirect(old, new, graph.consumers(old))
        graph.remove([node])


def _turn_weights(graph: Graph) -> None:
    """Store the weights of Gemm as MatMul's, inputs first: the one order whose blocks runtimes multiply with."""
    for node in graph.nodes:
        turned = [each for each in node.attribute if each.name == "transB" and each.i]
        if node.op_type != "Gemm" or not turned or node.input[1] not in graph.constants:
            continue
        weight = graph.array(node.input[1])
        if weight.dtype == np.float32:
            graph.give(node, 1, graph.add_constant(f"{node.input[1]}_turned", np.ascontiguousarray(weight.T)))
            turned[0].i = 0


def _flatten_biases(graph: Graph) -> None:
    """Give every constant bias of a Gemm one number per output, which integer kernels expect."""
    for node in graph.nodes:
        if node.op_type != "Gemm" or len(node.input) < 3 or node.input[2] not in graph.constants:
            continue
        bias, weight = graph.array(node.input[2]), graph.shape(node.input[1])
        if bias.ndim != 1 or (weight is not None and bias.shape != weight[1:]):
            row = bias.ndim < 2 or bias.shape[0] == 1
            if row and bias.dtype == np.float32 and weight is not None and weight[1] is not None:
                flat = np.broadcast_to(bias.ravel(), weight[1]).copy()
                graph.give(node, 2, graph.add_constant(f"{node.input[2]}_flat", flat))


def _compute_constants(graph: Graph) -> None:
    """Replace nodes that read nothing but constants by what they compute."""
    known, found = set(graph.constants), []
    for node in graph.nodes:
        fixed = node.op_type not in {*_RANDOM, *_GROWING, *QUANTIZERS} and not any(subgraphs(node))
        fixed = fixed and node.domain in MAIN
        if fixed and node.input and all(name in known or not name for name in node.input):
            found.append(node)
            known.update(node.output)
    if not found:
        return
    inside = {name for node in found for name in node.output if name}
    wanted = [
        name
        for name in sorted(inside)
        if name in graph.outputs or any(id(reader) not in {id(n) for n in found} for reader in graph.consumers(name))
    ]
    values = _evaluate(graph, found, wanted)
    if values is None:
        return
    keep = {name for name in wanted if name in graph.outputs}
    for name, value in values.items():
        if name not in keep:
            graph.constants[name] = numpy_helper.from_array(value, name)
    graph.remove([node for node in found if not keep & set(node.output)])


def _evaluate(graph: Graph, nodes: list[NodeProto], wanted: list[str]) -> dict[str, NDArray[Any]] | None:
    """What some nodes compute; None where that would be too large, or cannot be computed alone."""
    read = {name for node in nodes for name in node.input if name in graph.constants}
    part = GraphProto(name="constants", node=nodes, initializer=[graph.constants[name] for name in sorted(read)])
    part.output.extend(helper.make_empty_tensor_value_info(name) for name in wanted)
    model = ModelProto(graph=part, ir_version=graph.model.ir_version, opset_import=graph.model.opset_import)
    if sum(array_of(graph.constants[name]).nbytes for name in read) > LARGEST_FOLDED:
        return None
    try:
        results = make_session(model, optimise=False).run(None, {})
    except (UnsupportedError, RuntimeError):
        return None
    return {name: np.asarray(value) for name, value in zip(wanted, results, strict=True)}


def _with_shapes(model: ModelProto) -> ModelProto:
    try:
        if nbytes_of(model) > SAVE_LIMIT:
            return model
        return onnx.shape_inference.infer_shapes(model, data_prop=True)
    except Exception:  # noqa: BLE001 - shapes help to explain plans, and are needed for nothing else
        return model
