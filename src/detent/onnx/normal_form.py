"""Normal form: the form into which ``qo.prepare`` brings a model before ``qo.plan`` plans it.

- Functions are inlined, and the opset is new enough for the Q/DQ nodes.
- Float16 models compute in float32; their inputs and outputs stay float16 (``half_precision``).
- All constants are initializers. This includes outputs of Constant nodes, outputs of nodes that read only constants,
  and constants that the model lists as inputs. Outputs that are larger than the constants they are computed from stay
  nodes, because they would enlarge the file.
- Every node has a unique name.
- Weights of layers in subgraphs are constants of the main graph (``subgraph_weights``).
- Batch norms, and constants that are added or multiplied after a layer, are folded into the layer. Constants that no
  node reads are removed.
- A Pad with zeros is merged into the convolutions that read it. Otherwise its output would need Q/DQ nodes of its own,
  and compute in float.
- A MatMul of 2-D data and the Add of its bias are merged into a Gemm. ONNX Runtime would merge them too, but then it
  would run the Gemm in float, because the bias is float. If the data has more axes, the bias gets three axes, which
  prevents the merge.

The outputs stay the same, except that folding may change their last bits. Data is needed only to check that converting
the opset does not change the outputs. ONNX Runtime computes the outputs of nodes that read only constants. Outputs
that another machine may round differently are returned, so that ``qo.rewrite`` can use the same values.
"""

from collections.abc import Collection, Mapping
from contextlib import suppress
from math import prod
from typing import Any, NamedTuple

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import GraphProto, ModelProto, NodeProto, defs, helper, numpy_helper, version_converter

from detent.errors import SpecError, UnsupportedError
from detent.onnx.batchnorm import fold
from detent.onnx.half_precision import is_float16, widen
from detent.onnx.subgraph_weights import hoist_weights
from detent.onnx_model.files import ModelSource, load
from detent.onnx_model.graph import BITS, MAIN, MOVING, QUANTIZERS, Graph, array_of, attribute_of, subgraphs
from detent.onnx_model.layers import WEIGHTED
from detent.onnx_model.sessions import array_outputs, make_session, ort_errors, without_weights

__all__ = ["NormalForm", "convert", "needed_opset", "prepare", "to_normal_form"]

PER_AXIS_OPSET = 13  # the first opset with per-channel Q/DQ nodes
BLOCKED_OPSET = 21  # the first opset with blocked, 4-bit and 16-bit Q/DQ nodes
UNLISTED_CONSTANTS_IR, NEWEST_IR = 4, 10  # first IR where initializers need not be inputs; newest IR that is written
MAX_CONVERSION_ERROR = 1e-5  # relative to the largest output; covers a different accumulation order


def needed_opset(*, low_bits: bool) -> int:
    """Return the oldest opset with per-channel Q/DQ nodes.

    With ``low_bits``, return the oldest opset that also has blocked, 4-bit and 16-bit Q/DQ nodes.
    """
    return BLOCKED_OPSET if low_bits else PER_AXIS_OPSET


def convert(
    model: ModelProto, opset: int, feed: Mapping[str, NDArray[Any]] | None = None, ir_version: int | None = None
) -> ModelProto:
    """Convert a model to ``opset`` if the model's opset is older, and set an IR version that runtimes can read."""
    own_opset = Graph(model).opset
    converted = model
    if own_opset < opset:
        try:
            converted = version_converter.convert_version(model, opset)
        except Exception as error:
            raise UnsupportedError(
                f"the model has opset {own_opset}, but Q/DQ nodes need opset {opset}, and onnx failed to convert the "
                f"model: export the model with opset {opset}. The error of onnx was: {error}"
            ) from error
        present = {entry.domain for entry in converted.opset_import}
        for entry in model.opset_import:
            if entry.domain not in {*present, *MAIN}:
                converted.opset_import.add(domain=entry.domain, version=entry.version)
        converted.metadata_props.extend(
            each for each in model.metadata_props if each.key not in {old.key for old in converted.metadata_props}
        )
    is_old = max(own_opset, opset) < BLOCKED_OPSET
    needed_ir = min(max(converted.ir_version, 8 if is_old else NEWEST_IR), NEWEST_IR)
    if ir_version not in {None, needed_ir}:
        raise SpecError(f"decisions: ir_version must be {needed_ir} for this model, got {ir_version}")
    converted.ir_version = needed_ir
    if own_opset < opset and feed is not None:
        _compare(model, converted, feed, (own_opset, opset))
    return converted


def _compare(before: ModelProto, after: ModelProto, feed: Mapping[str, NDArray[Any]], opsets: tuple[int, int]) -> None:
    names = array_outputs(before)
    with ort_errors():
        results = [make_session(each).run(names, dict(feed)) if names else [] for each in (before, after)]
    for name, old, new in zip(names, *results, strict=True):
        if np.shape(old) == np.shape(new) and _close(np.asarray(old), np.asarray(new)):
            continue
        raise UnsupportedError(
            f"converting opset {opsets[0]} to {opsets[1]} changes output {name!r}: export the model with opset "
            f"{opsets[1]}. Operators whose definition changed: {', '.join(_changed(before, *opsets)) or 'none'}"
        )


def _changed(model: ModelProto, old: int, new: int) -> list[str]:
    """List the operators of a model whose definition changed between two opsets."""
    kinds = {node.op_type for node in model.graph.node if node.domain in MAIN}
    return sorted(kind for kind in kinds if old < defs.get_schema(kind, new).since_version <= new)


def _close(old: NDArray[Any], new: NDArray[Any]) -> bool:
    if old.dtype.kind != "f":
        return np.array_equal(old, new)
    scale = float(np.abs(old[np.isfinite(old)]).max(initial=0.0))
    return bool(np.allclose(old, new, rtol=0, atol=MAX_CONVERSION_ERROR * scale, equal_nan=True))


MASK_VALUE = 1e30  # larger values are attention masks, not terms of sums
MAX_ULP = 4  # largest difference between constants that two machines compute
MIN_GROWN_BYTES = 4096  # smaller results are stored even if they are larger than what they are computed from
MAX_FILLED = 64  # elements of a ConstantOfShape that becomes a constant
MAX_FOLDED_BYTES = 1 << 26  # bytes that constant nodes may read in total; above, they stay in the graph
QUANTIZED = (*QUANTIZERS, "DynamicQuantizeLinear", "QLinearConv", "QLinearMatMul", "QGemm")
_GROWING = ("Expand", "Tile", "ConstantOfShape", "Range", "Pad")
_EXACT = (  # operators that move data, or round each element once as in IEEE 754
    *(*MOVING, "Identity", "Split", "Concat", "Gather"),
    *("GatherElements", "GatherND", "Shape", "Size", "Cast", "Where", "Equal", "Less", "Greater", "Not", "And", "Or"),
    *("Add", "Sub", "Mul", "Div", "Neg", "Abs", "Max", "Min", "Relu", "Floor", "Ceil", "Clip", "Sign", "Trilu"),
    *("ReduceMax", "ReduceMin", "OneHot", "EyeLike"),
)
_ADDING = ("MatMul", "Gemm", "Conv", "CumSum", "Einsum", "Reduce", "Softmax", "LogSoftmax", "LayerNorm")  # prefixes
_NO_TENSORS = ("SequenceConstruct", "SequenceInsert", "SequenceErase", "SplitToSequence", "Optional")
_RANDOM = ("RandomNormal", "RandomUniform", "RandomNormalLike", "RandomUniformLike", "Bernoulli", "Multinomial")


def prepare(
    source: ModelSource,
    *,
    low_bits: bool = False,
    feed: Mapping[str, NDArray[Any]] | None = None,
    force: bool = False,
) -> ModelProto:
    """Return a copy of a model in the form that ``qo.plan`` needs: unique names, batch norms folded, a recent opset.

    Args:
        source: a path or a model.
        low_bits: True for 4-bit, 16-bit or per-group Q/DQ nodes, which need opset 21.
        feed: model inputs by name. If the opset is converted, the model runs on these inputs before and after the
            conversion, and the outputs are compared.
        force: accept a model that is already quantized.

    Raises:
        UnsupportedError: the model is already quantized, computes in bfloat16, or cannot be converted.

    >>> from onnx import parser
    >>> prepared = prepare(parser.parse_model('''<ir_version: 8, opset_import: ["" : 17]>
    ...     g (float[1] x) => (float[1] y) { c = Constant<value = float {2.0}>() y = Mul(x, c) }'''))
    >>> [node.op_type for node in prepared.graph.node], prepared.graph.initializer[0].name, prepared.graph.node[0].name
    (['Mul'], 'c', 'Mul_y')
    """
    return to_normal_form(load(source), needed_opset(low_bits=low_bits), feed=feed, force=force).model


class NormalForm(NamedTuple):
    """A model from ``to_normal_form``, and its computed constants that another machine may round differently."""

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
    """Convert a model from ``load`` to the form that the module docstring defines; may change the model in place."""
    if model.functions:
        model = onnx.inliner.inline_local_functions(model)
    _check_supported(model, force=force)
    graph = Graph(_in_float32(model) if is_float16(model) else model)
    _drop_constant_inputs(graph)
    _constants_as_initializers(graph)
    graph = Graph(convert(graph.finish(), opset, feed, ir_version))
    _constants_as_initializers(graph)  # the converter adds Constant nodes
    _name_nodes(graph)
    _drop_identities(graph)
    computed = _compute_constants(graph, constants)
    hoist_weights(graph, _run_alone)
    _merge_pads(graph)
    _transpose_weights(graph)
    _flatten_biases(graph)
    fold(graph)
    graph.drop_unread()
    shaped = Graph(_with_shapes(graph.finish()))
    if not _merge_biases(shaped):
        return NormalForm(shaped.model, computed)
    _flatten_biases(shaped)
    shaped.drop_unread()
    return NormalForm(shaped.finish(), computed)


def _check_supported(model: ModelProto, *, force: bool) -> None:
    kinds = {node.op_type for node in model.graph.node}
    present = sorted(kinds & set(QUANTIZED))
    if present and not force:
        raise UnsupportedError(
            f"the model is already quantized (it has {', '.join(present)} nodes): quantize the float model instead, or "
            "pass force=True (--allow-quantized) to quantize the remaining float layers"
        )
    weights = {tensor.data_type: tensor.name for tensor in model.graph.initializer}
    if onnx.TensorProto.BFLOAT16 in weights and onnx.TensorProto.FLOAT not in weights:
        raise UnsupportedError(
            f"the model computes in bfloat16 (tensor {weights[onnx.TensorProto.BFLOAT16]!r}), expected float32 or "
            "float16: export it in float32"
        )


def _in_float32(model: ModelProto) -> ModelProto:
    """Widen a float16 model; a Cast whose input and output are float32 becomes an Identity, which is dropped later."""
    graph = Graph(_with_shapes(widen(model)))
    for node in graph.nodes:
        is_cast = node.op_type == "Cast" and node.domain in MAIN
        if is_cast and attribute_of(node, "to") == graph.kind(node.input[0]) == onnx.TensorProto.FLOAT:
            node.op_type = "Identity"
            del node.attribute[:]
    return graph.finish()


def _drop_constant_inputs(graph: Graph) -> None:
    """Remove initializers from the model's inputs, where IR versions before 4 had to list them."""
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
    """Remove Identity nodes whose output is neither a model output nor read by a subgraph."""
    copies = [node for node in graph.nodes if node.op_type == "Identity" and node.domain in MAIN]
    needed = graph.captured.union(graph.outputs)
    unneeded = [node for node in copies if node.output[0] not in needed]
    for node in unneeded:
        graph.redirect(node.output[0], node.input[0], graph.consumers(node.output[0]))
    graph.remove(unneeded)


def _merge_pads(graph: Graph) -> None:
    """Merge each Pad with zeros into the convolutions that read its output, and remove each Pad of width 0."""
    for node in [each for each in graph.nodes if each.op_type == "Pad" and each.domain in MAIN]:
        source, result = node.input[0], node.output[0]
        readers, pads = graph.consumers(result), _zero_pads(graph, node)
        if pads is None or result in graph.outputs or result in graph.captured:
            continue
        if pads.any():
            if not all(_can_pad(graph, reader, result, pads) for reader in readers):
                continue
            for reader in readers:
                _add_pads(reader, pads[:, 2:])
        graph.redirect(result, source, readers)
        graph.remove([node])


def _zero_pads(graph: Graph, node: NodeProto) -> NDArray[np.int64] | None:
    """Return the widths by which a Pad extends each axis with zeros, as (2, axes); None if it does something else."""
    inputs = [*node.input, "", ""][1:4]
    fixed = [name in graph.constants or not name for name in inputs]
    if not all(fixed) or not inputs[0] or attribute_of(node, "mode", b"constant") != b"constant":
        return None
    pads = graph.array(inputs[0]).reshape(2, -1)
    value = graph.array(inputs[1]) if inputs[1] else np.zeros(())
    if inputs[2]:  # the axes to extend
        shape, axes = graph.shape(node.input[0]), graph.array(inputs[2])
        if shape is None:
            return None
        widths = np.zeros((2, len(shape)), np.int64)
        widths[:, axes] = pads
        pads = widths
    return None if value.any() or (pads < 0).any() else pads


def _can_pad(graph: Graph, reader: NodeProto, name: str, pads: NDArray[np.int64]) -> bool:
    """Return whether a node is a convolution that can extend its input ``name`` itself."""
    is_conv = reader.op_type == "Conv" and list(reader.input).count(name) == 1 and reader.input[0] == name
    has_pads = attribute_of(reader, "auto_pad", b"NOTSET") == b"NOTSET"
    shape = graph.shape(reader.input[1]) if is_conv else None
    return has_pads and shape is not None and len(shape) == pads.shape[1] and not pads[:, :2].any()


def _add_pads(conv: NodeProto, pads: NDArray[np.int64]) -> None:
    old = [each for each in conv.attribute if each.name == "pads"]
    total = pads.ravel() + (np.asarray(old[0].ints) if old else 0)
    for each in old:
        conv.attribute.remove(each)
    conv.attribute.append(helper.make_attribute("pads", total.tolist()))


def _transpose_weights(graph: Graph) -> None:
    """Store Gemm weights in the layout of MatMul, (inputs, outputs); runtimes need this for per-group scales."""
    for node in graph.nodes:
        transposed = [each for each in node.attribute if each.name == "transB" and each.i]
        if node.op_type != "Gemm" or not transposed or node.input[1] not in graph.constants:
            continue
        weight = graph.array(node.input[1])
        if weight.dtype == np.float32:
            graph.set_input(node, 1, graph.add_constant(f"{node.input[1]}_turned", np.ascontiguousarray(weight.T)))
            transposed[0].i = 0


def _flatten_biases(graph: Graph) -> None:
    """Broadcast each constant Gemm bias to one value per output, as integer kernels expect."""
    for node in graph.nodes:
        if node.op_type != "Gemm" or len(node.input) < 3 or node.input[2] not in graph.constants:
            continue
        bias, weight = graph.array(node.input[2]), graph.shape(node.input[1])
        if bias.ndim != 1 or (weight is not None and bias.shape != weight[1:]):
            row = bias.ndim < 2 or bias.shape[0] == 1
            if row and bias.dtype == np.float32 and weight is not None and weight[1] is not None:
                flat = np.broadcast_to(bias.ravel(), weight[1]).copy()
                graph.set_input(node, 2, graph.add_constant(f"{node.input[2]}_flat", flat))


def _merge_biases(graph: Graph) -> bool:
    """Merge each MatMul of 2-D data with the Add of its bias into a Gemm; return whether the graph changed.

    ONNX Runtime also merges a MatMul of data with more axes, if the sizes of these axes are known. The merged layer
    would run in float. So the bias gets three axes, which prevents the merge.
    """
    changed = False
    for node in [each for each in graph.nodes if each.op_type == "MatMul" and each.domain in MAIN]:
        shape, add = graph.shape(node.input[0]), _bias_after(graph, node)
        if shape is None or len(shape) < 2 or add is None:
            continue
        position = 0 if add.input[1] == node.output[0] else 1
        bias = add.input[position]
        if len(shape) == 2:
            graph.remove([node, add])
            names = [node.input[0], node.input[1], bias]
            graph.insert([helper.make_node("Gemm", names, [add.output[0]], name=node.name)])
        else:
            row = graph.array(bias).reshape(1, 1, -1)
            graph.set_input(add, position, graph.add_constant(f"{bias}_row", row))
        changed = True
    return changed


def _bias_after(graph: Graph, node: NodeProto) -> NodeProto | None:
    """Return the only reader of a MatMul if it adds a constant bias and the weight is constant, otherwise None."""
    weight, result = node.input[1], node.output[0]
    readers = graph.consumers(result)
    is_inner = len(readers) == 1 and result not in graph.outputs and result not in graph.captured
    if weight not in graph.constants or graph.kind(weight) != onnx.TensorProto.FLOAT or not is_inner:
        return None
    (add,) = readers
    others = [name for name in add.input if name != result]
    columns = graph.constants[weight].dims[-1]
    if add.op_type != "Add" or len(others) != 1 or others[0] not in graph.constants:
        return None
    return add if list(graph.constants[others[0]].dims) in ([columns], [1, columns]) else None


def _compute_constants(graph: Graph, decided: Mapping[str, NDArray[Any]] | None) -> dict[str, NDArray[Any]]:
    """Replace nodes that read only constants by the results of these nodes.

    Returns the results that another machine may round differently. ``decided`` are such results from existing
    decisions; they replace the computed ones.
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
    grown = _grown(graph, nodes, values)
    values = {name: value for name, value in values.items() if name not in grown}
    inexact = _inexact_results(nodes)
    computed = {name: value for name, value in values.items() if name in inexact and _is_float(value)}
    _check_decided(decided, computed, _adding_results(nodes))
    values.update(decided or {})
    for name, value in values.items():
        graph.constants[name] = numpy_helper.from_array(value, name)
    needed = {name for name in read if name not in values}  # model outputs, and results that could not be computed
    for node in reversed(nodes):
        if needed & set(node.output):
            needed.update(name for name in node.input if name not in values)
    graph.remove([node for node in nodes if not needed & set(node.output)])
    return computed if decided is None else dict(decided)


def _constant_nodes(graph: Graph) -> list[NodeProto]:
    """Find the nodes that read only constants and can be computed ahead of time."""
    constants, nodes = set(graph.constants), []
    for node in graph.nodes:
        is_growing = node.op_type in _GROWING and not _fills_few(graph, node)
        fixed = node.op_type not in {*_RANDOM, *_NO_TENSORS, *QUANTIZED} and not is_growing
        fixed = fixed and node.domain in MAIN and not any(subgraphs(node))
        if fixed and node.input and all(name in constants or not name for name in node.input):
            nodes.append(node)
            constants.update(node.output)
    return nodes


def _fills_few(graph: Graph, node: NodeProto) -> bool:
    """Return whether a node is a ConstantOfShape of few elements; exporters write it for the widths of a Pad."""
    is_fill = node.op_type == "ConstantOfShape" and node.input[0] in graph.constants
    return is_fill and prod(graph.array(node.input[0]).tolist()) <= MAX_FILLED


def _grown(graph: Graph, nodes: list[NodeProto], values: Mapping[str, NDArray[Any]]) -> set[str]:
    """Find results that would enlarge the file: they are larger than the constants from which they are computed.

    Weights and biases of layers are not among them, because they are stored as codes.
    """
    sources: dict[str, set[str]] = {name: {name} for name in graph.constants}
    sizes = {name: prod(tensor.dims) * BITS.get(tensor.data_type, 0) // 8 for name, tensor in graph.constants.items()}
    for node in nodes:
        read = set[str]().union(*(sources[name] for name in node.input if name))
        sources.update((name, read) for name in node.output)
    grown = set()
    for name, value in values.items():
        before = sum(sizes[each] for each in sources[name])
        is_weight = any(node.op_type in WEIGHTED for node in graph.consumers(name))
        if value.nbytes > max(before, MIN_GROWN_BYTES) and not is_weight:
            grown.add(name)
    return grown


def _inexact_results(nodes: list[NodeProto]) -> set[str]:
    """Find the results that another machine, or a different number of threads, may round differently."""
    inexact: set[str] = set()
    for node in nodes:
        if node.op_type not in _EXACT or inexact & set(node.input):
            inexact.update(node.output)
    return inexact


def _is_float(value: NDArray[Any]) -> bool:
    return value.dtype in (np.float32, np.float64)


def _adding_results(nodes: list[NodeProto]) -> set[str]:
    """Find the results of sums, whose accumulation order may differ on another machine."""
    adding: set[str] = set()
    for node in nodes:
        if node.op_type.startswith(_ADDING) or adding & set(node.input):
            adding.update(node.output)
    return adding


def _check_decided(
    decided: Mapping[str, NDArray[Any]] | None, computed: Mapping[str, NDArray[Any]], adding: Collection[str]
) -> None:
    """Reject constants in decisions if they differ from the constants that this model computes."""
    if decided is None:
        return
    if set(decided) != set(computed):
        unknown, missing = sorted(set(decided) - set(computed)), sorted(set(computed) - set(decided))
        raise SpecError(
            f"decisions do not fit the model (unknown constants: {unknown}, missing: {missing}): call qo.decide again"
        )
    for name, value in decided.items():
        expected = computed[name]
        if (value.dtype, value.shape) != (expected.dtype, expected.shape):
            raise SpecError(
                f"decisions: constant {name!r} must be {expected.dtype} of shape {expected.shape}, got {value.dtype} "
                f"of shape {value.shape}"
            )
        if not _is_rounded(expected, value, adds=name in adding):
            raise SpecError(
                f"decisions: constant {name!r} must equal the tensor of this name in the model, up to {MAX_ULP} ulp: "
                "call qo.decide again"
            )


def _is_rounded(computed: NDArray[Any], value: NDArray[Any], *, adds: bool) -> bool:
    """Return whether ``value`` equals ``computed`` up to rounding; sums may also differ by their accumulation order."""
    finite = np.isfinite(computed)
    if not np.array_equal(value[~finite], computed[~finite], equal_nan=True) or not np.isfinite(value[finite]).all():
        return False
    old, new = computed[finite].astype(np.float64), value[finite].astype(np.float64)
    size = np.abs(old)
    if adds:  # terms of a sum may be larger than the sum
        size = np.maximum(size, size[size < MASK_VALUE].max(initial=0.0) / 2)
    return bool((np.abs(new - old) <= MAX_ULP * np.finfo(computed.dtype).eps * size).all())


def _evaluate(graph: Graph, nodes: list[NodeProto], outputs: list[str]) -> dict[str, NDArray[Any]]:
    """Compute outputs of constant nodes, except outputs that fail; return {} if the nodes read too many bytes."""
    read = {name for node in nodes for name in node.input if name in graph.constants}
    if not outputs or sum(array_of(graph.constants[name]).nbytes for name in read) > MAX_FOLDED_BYTES:
        return {}
    part = GraphProto(name="constants", node=nodes, initializer=[graph.constants[name] for name in sorted(read)])
    model = ModelProto(graph=part, ir_version=graph.model.ir_version, opset_import=graph.model.opset_import)
    try:
        return _run_alone(model, outputs)
    except UnsupportedError:
        values: dict[str, NDArray[Any]] = {}
        for name in outputs:  # one by one: a failure must not affect the others
            with suppress(UnsupportedError):
                values |= _run_alone(model, [name])
        return values


def _run_alone(model: ModelProto, outputs: list[str]) -> dict[str, NDArray[Any]]:
    """Run a model that has no inputs, and return the named outputs."""
    del model.graph.output[:]
    model.graph.output.extend(helper.make_empty_tensor_value_info(name) for name in outputs)
    with ort_errors():
        results = make_session(model, optimize=False).run(None, {})
    return {name: np.asarray(value) for name, value in zip(outputs, results, strict=True)}


def _with_shapes(model: ModelProto) -> ModelProto:
    """Infer shapes, in place; where they depend on computed sizes, infer at least the number of axes."""
    _infer_shapes(model)
    while ranks := _reshaped_ranks(Graph(model)):
        model.graph.value_info.extend(ranks)
        _infer_shapes(model)
    return model


def _reshaped_ranks(graph: Graph) -> list[onnx.ValueInfoProto]:
    """Return the number of axes of Reshape outputs for which shape inference found none."""
    ranks = []
    for node in graph.nodes:
        if node.op_type != "Reshape" or node.domain not in MAIN or graph.shape(node.output[0]) is not None:
            continue
        sizes, kind = graph.shape(node.input[1]), graph.kind(node.input[0])
        if sizes is not None and len(sizes) == 1 and sizes[0] is not None and kind != onnx.TensorProto.UNDEFINED:
            ranks.append(helper.make_tensor_value_info(node.output[0], kind, [None] * sizes[0]))
    return ranks


def _infer_shapes(model: ModelProto) -> None:
    lean, _ = without_weights(model)  # shape inference copies a model twice
    try:
        inferred = onnx.shape_inference.infer_shapes(lean, data_prop=True)
    except Exception:  # noqa: BLE001 - shapes only help to explain plans
        return
    for name in ("node", "input", "output", "value_info"):  # nodes too, because their subgraphs hold shapes
        model.graph.ClearField(name)
        getattr(model.graph, name).extend(getattr(inferred.graph, name))
