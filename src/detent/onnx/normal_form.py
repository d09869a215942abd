"""Any model in the one form that plans are made for: ``qo.prepare``.

Functions are inlined; the opset is one that has the quantizers; constants are initializers, whether the file has
Constant nodes, constants computed from constants, or lists them among the inputs; every node has a name of its own;
batch norm and constants after a layer are folded into it; unread constants are dropped. What the model computes stays
the same, but for the last bits that folding changes.

No data are needed: inputs only serve to compare a converted model with the original. ONNX Runtime computes constants;
those that another machine may round differently are handed out, so that ``qo.rewrite`` can put them back.
"""

from collections.abc import Collection, Mapping
from contextlib import suppress
from typing import Any, NamedTuple

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import GraphProto, ModelProto, NodeProto, defs, helper, numpy_helper, version_converter

from detent.errors import SpecError, UnsupportedError
from detent.onnx.batchnorm import fold
from detent.onnx_model.files import ModelSource, load
from detent.onnx_model.graph import MAIN, MOVING, QUANTIZERS, Graph, array_of, subgraphs
from detent.onnx_model.sessions import array_outputs, make_session, ort_errors, without_weights

__all__ = ["NormalForm", "convert", "needed_opset", "prepare", "to_normal_form"]

PER_AXIS, BLOCKED = 13, 21  # the first operator sets with quantizers of those kinds
UNLISTED_CONSTANTS_IR, NEWEST_IR = 4, 10
CLOSE = 1e-5  # of the largest output: what another order of sums may change


def needed_opset(*, low_bits: bool) -> int:
    """The oldest operator set whose quantizers have channels, and with ``low_bits`` blocks, 4 and 16 bits, too."""
    return BLOCKED if low_bits else PER_AXIS


def convert(
    model: ModelProto, opset: int, feed: Mapping[str, NDArray[Any]] | None = None, ir_version: int | None = None
) -> ModelProto:
    """The model in at least that operator set, with an IR version that runtimes read."""
    own = Graph(model).opset
    converted = model
    if own < opset:
        try:
            converted = version_converter.convert_version(model, opset)
        except Exception as error:
            raise UnsupportedError(
                f"the model has operator set {own}, its quantizers need {opset}, and it cannot be converted: {error}"
            ) from error
        present = {entry.domain for entry in converted.opset_import}
        for entry in model.opset_import:
            if entry.domain not in {*present, *MAIN}:
                converted.opset_import.add(domain=entry.domain, version=entry.version)
        converted.metadata_props.extend(
            each for each in model.metadata_props if each.key not in {old.key for old in converted.metadata_props}
        )
    needed_ir = min(max(converted.ir_version, 8 if opset < BLOCKED else NEWEST_IR), NEWEST_IR)
    if ir_version not in {None, needed_ir}:
        raise SpecError(f"decisions: ir_version must be {needed_ir} for this model, got {ir_version}")
    converted.ir_version = needed_ir
    if own < opset and feed is not None:
        _compare(model, converted, feed, (own, opset))
    return converted


def _compare(before: ModelProto, after: ModelProto, feed: Mapping[str, NDArray[Any]], opsets: tuple[int, int]) -> None:
    names = array_outputs(before)
    with ort_errors():
        results = [make_session(each).run(names, dict(feed)) if names else [] for each in (before, after)]
    for name, old, new in zip(names, *results, strict=True):
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


LARGEST_TERM = 1e30  # numbers beyond it are masks, not terms of sums
MAX_ULP = 4  # by which a computed constant may differ on another machine
LARGEST_FOLDED = 1 << 26  # bytes of a constant that is computed from others
QUANTIZED = (*QUANTIZERS, "DynamicQuantizeLinear", "QLinearConv", "QLinearMatMul", "QGemm")
_GROWING = ("Expand", "Tile", "ConstantOfShape", "Range", "Pad")
_EXACT = (  # operators that move data, or round each element once as IEEE 754 says
    *(*MOVING, "Identity", "Split", "Concat", "Gather"),
    *("GatherElements", "GatherND", "Shape", "Size", "Cast", "Where", "Equal", "Less", "Greater", "Not", "And", "Or"),
    *("Add", "Sub", "Mul", "Div", "Neg", "Abs", "Max", "Min", "Relu", "Floor", "Ceil", "Clip", "Sign", "Trilu"),
    *("ReduceMax", "ReduceMin", "OneHot", "EyeLike"),
)
_ADDING = ("MatMul", "Gemm", "Conv", "CumSum", "Einsum", "Reduce", "Softmax", "LogSoftmax", "LayerNorm")  # beginnings
_NO_TENSORS = ("SequenceConstruct", "SequenceInsert", "SequenceErase", "SplitToSequence", "Optional")
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
    return to_normal_form(load(source), needed_opset(low_bits=low_bits), feed=feed, force=force).model


class NormalForm(NamedTuple):
    """A model in the form that plans are made for, and the computed constants that cannot be recomputed to the bit."""

    model: ModelProto
    constants: Mapping[str, NDArray[Any]]


def to_normal_form(
    model: ModelProto,
    opset: int,
    *,
    ir_version: int | None = None,
    constants: Mapping[str, NDArray[Any]] | None = None,
    feed: Mapping[str, NDArray[Any]] | None = None,
    force: bool = False,
) -> NormalForm:
    """Bring a checked model, which is changed, into the form that plans are made for."""
    if model.functions:
        model = onnx.inliner.inline_local_functions(model)
    _refuse(model, force=force)
    graph = Graph(model)
    _take_inputs_out(graph)
    _constants_as_initializers(graph)
    graph = Graph(convert(graph.finish(), opset, feed, ir_version))
    _constants_as_initializers(graph)  # the converter makes some
    _name_nodes(graph)
    _drop_identities(graph)
    computed = _compute_constants(graph, constants)
    _turn_weights(graph)
    _flatten_biases(graph)
    fold(graph)
    graph.drop_unread()
    return NormalForm(_with_shapes(graph.finish()), computed)


def _refuse(model: ModelProto, *, force: bool) -> None:
    kinds = {node.op_type for node in model.graph.node}
    present = sorted(kinds & set(QUANTIZED))
    if present and not force:
        raise UnsupportedError(
            f"the model is quantized already, it has {', '.join(present)}: quantize the float model it was made from, "
            "or give force=True (--allow-quantized) to quantize what is left of it in float"
        )
    halves = [tensor for tensor in model.graph.initializer if tensor.data_type in {10, 16}]
    if halves and not any(tensor.data_type == onnx.TensorProto.FLOAT for tensor in model.graph.initializer):
        name = onnx.TensorProto.DataType.Name(halves[0].data_type)
        raise UnsupportedError(
            f"the model computes in {name} ({halves[0].name!r} is such a tensor): export it in float32, which is what "
            "calibration measures and ONNX Runtime quantizes"
        )


def _take_inputs_out(graph: Graph) -> None:
    """Initializers are constants, listed among the inputs or not; before IR version 4 they had to be listed."""
    inputs = graph.model.graph.input
    graph.model.ir_version = max(graph.model.ir_version, UNLISTED_CONSTANTS_IR)
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
    copies = [node for node in graph.nodes if node.op_type == "Identity" and node.domain in MAIN]
    needed = graph.captured.union(graph.outputs)
    unneeded = [node for node in copies if node.output[0] not in needed]
    for node in unneeded:
        graph.redirect(node.output[0], node.input[0], graph.consumers(node.output[0]))
    graph.remove(unneeded)


def _turn_weights(graph: Graph) -> None:
    """Store the weights of Gemm as MatMul's, inputs first: the one order whose blocks runtimes multiply with."""
    for node in graph.nodes:
        turned = [each for each in node.attribute if each.name == "transB" and each.i]
        if node.op_type != "Gemm" or not turned or node.input[1] not in graph.constants:
            continue
        weight = graph.array(node.input[1])
        if weight.dtype == np.float32:
            graph.set_input(node, 1, graph.add_constant(f"{node.input[1]}_turned", np.ascontiguousarray(weight.T)))
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
                graph.set_input(node, 2, graph.add_constant(f"{node.input[2]}_flat", flat))


def _compute_constants(graph: Graph, given: Mapping[str, NDArray[Any]] | None) -> dict[str, NDArray[Any]]:
    """Replace nodes that read nothing but constants by what they compute; returns what may round differently elsewhere.

    ``given`` holds such values of another run, which are used instead.
    """
    nodes = _constant_nodes(graph)
    inside = {id(node) for node in nodes}
    results = sorted({name for node in nodes for name in node.output if name})
    read = [
        name
        for name in results
        if name in graph.outputs or any(id(reader) not in inside for reader in graph.consumers(name))
    ]
    values = _evaluate(graph, nodes, [name for name in read if name not in graph.outputs])
    inexact = _inexact_results(nodes)
    computed = {name: value for name, value in values.items() if name in inexact and _is_float(value)}
    _check_given(given, computed, _adding_results(nodes))
    values.update(given or {})
    for name, value in values.items():
        graph.constants[name] = numpy_helper.from_array(value, name)
    needed = {name for name in read if name not in values}  # outputs, and what could not be computed
    for node in reversed(nodes):
        if needed & set(node.output):
            needed.update(name for name in node.input if name not in values)
    graph.remove([node for node in nodes if not needed & set(node.output)])
    return computed if given is None else dict(given)


def _constant_nodes(graph: Graph) -> list[NodeProto]:
    """The nodes that read nothing but constants, and can be computed once."""
    known, nodes = set(graph.constants), []
    for node in graph.nodes:
        fixed = node.op_type not in {*_RANDOM, *_GROWING, *_NO_TENSORS, *QUANTIZED} and not any(subgraphs(node))
        fixed = fixed and node.domain in MAIN
        if fixed and node.input and all(name in known or not name for name in node.input):
            nodes.append(node)
            known.update(node.output)
    return nodes


def _inexact_results(nodes: list[NodeProto]) -> set[str]:
    """The results that another machine, or another number of threads, may round differently."""
    inexact: set[str] = set()
    for node in nodes:
        if node.op_type not in _EXACT or inexact & set(node.input):
            inexact.update(node.output)
    return inexact


def _is_float(value: NDArray[Any]) -> bool:
    return value.dtype in (np.float32, np.float64)


def _adding_results(nodes: list[NodeProto]) -> set[str]:
    """The results that sums take part in, whose order may be another one elsewhere."""
    adding: set[str] = set()
    for node in nodes:
        if node.op_type.startswith(_ADDING) or adding & set(node.input):
            adding.update(node.output)
    return adding


def _check_given(
    given: Mapping[str, NDArray[Any]] | None, computed: Mapping[str, NDArray[Any]], adding: Collection[str]
) -> None:
    """Refuse constants of decisions that are not those that this model computes."""
    if given is None:
        return
    if set(given) != set(computed):
        unknown, missing = sorted(set(given) - set(computed)), sorted(set(computed) - set(given))
        raise SpecError(f"decisions: constants do not fit the model: unknown {unknown}, missing {missing}")
    for name, value in given.items():
        here = computed[name]
        if (value.dtype, value.shape) != (here.dtype, here.shape):
            raise SpecError(
                f"decisions: constant {name!r} must be {here.dtype} of shape {here.shape}, got {value.dtype} of shape "
                f"{value.shape}"
            )
        if not _is_rounded(here, value, adds=name in adding):
            raise SpecError(f"decisions: constant {name!r} must be what the model computes, within {MAX_ULP} ulp")


def _is_rounded(here: NDArray[Any], value: NDArray[Any], *, adds: bool) -> bool:
    """Whether values are computed ones, but for the last bits; of sums, for what another order may change."""
    finite = np.isfinite(here)
    if not np.array_equal(value[~finite], here[~finite], equal_nan=True) or not np.isfinite(value[finite]).all():
        return False
    old, new = here[finite].astype(np.float64), value[finite].astype(np.float64)
    size = np.abs(old)
    if adds:  # terms of a sum may be larger than the sum
        size = np.maximum(size, size[size < LARGEST_TERM].max(initial=0.0) / 2)
    return bool((np.abs(new - old) <= MAX_ULP * np.finfo(here.dtype).eps * size).all())


def _evaluate(graph: Graph, nodes: list[NodeProto], outputs: list[str]) -> dict[str, NDArray[Any]]:
    """What some nodes compute, by name, without what would be too large or cannot be computed alone."""
    read = {name for node in nodes for name in node.input if name in graph.constants}
    if not outputs or sum(array_of(graph.constants[name]).nbytes for name in read) > LARGEST_FOLDED:
        return {}
    part = GraphProto(name="constants", node=nodes, initializer=[graph.constants[name] for name in sorted(read)])
    model = ModelProto(graph=part, ir_version=graph.model.ir_version, opset_import=graph.model.opset_import)
    try:
        return _run_alone(model, outputs)
    except UnsupportedError:
        values: dict[str, NDArray[Any]] = {}
        for name in outputs:  # one that fails does not keep others from being computed
            with suppress(UnsupportedError):
                values |= _run_alone(model, [name])
        return values


def _run_alone(model: ModelProto, outputs: list[str]) -> dict[str, NDArray[Any]]:
    """The outputs of a model without inputs."""
    del model.graph.output[:]
    model.graph.output.extend(helper.make_empty_tensor_value_info(name) for name in outputs)
    with ort_errors():
        results = make_session(model, optimize=False).run(None, {})
    return {name: np.asarray(value) for name, value in zip(outputs, results, strict=True)}


def _with_shapes(model: ModelProto) -> ModelProto:
    lean, _ = without_weights(model)  # inference copies a model twice
    try:
        inferred = onnx.shape_inference.infer_shapes(lean, data_prop=True)
    except Exception:  # noqa: BLE001 - shapes help to explain plans, and are needed for nothing else
        return model
    for name in ("node", "input", "output", "value_info"):  # nodes too: bodies have shapes of their own
        model.graph.ClearField(name)
        getattr(model.graph, name).extend(getattr(inferred.graph, name))
    return model
