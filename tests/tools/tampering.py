"""Edits of quantized ONNX files, as an attacker or a broken tool would make them.

::

    for edit in EDITS:
        for site in edit.sites(model):
            changed = copy_of(model)
            names = edit.apply(changed, site, rng)

Each edit has a name, lists the places in a model that it can change, and changes one of them. It returns names of what
it changed (a node, a tensor, a field); a report should mention at least one of them. Some edits do not change the
outputs, and some make the file invalid; verification must reject all of them.

Every edit has three forms, by what happens to the decisions in the metadata: they stay, they are removed
(``without_decisions``), or their digests are recomputed to hide the edit (``with_matching_digests``). ``FORGERIES``
change the decisions themselves and, where possible, rewrite the source with them, which gives a consistent file.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from hashlib import sha256
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from onnx import AttributeProto, GraphProto, ModelProto, NodeProto, TensorProto, helper, numpy_helper, shape_inference

from detent.errors import DetentError
from detent.onnx.decisions import Decisions, Equalized, LayerDecision, QuantizerPlacement, RangeDecision, Smoothed
from detent.onnx.quantized_graph import float_form, write_quantizers
from detent.onnx.stored_decisions import read_decisions, to_metadata
from detent.onnx_model.graph import array_of, make_tensor, reads
from detent.onnx_model.provenance import KEY, Provenance, fields_of
from detent.spec import QuantSpec

__all__ = [
    "EDITS",
    "FORGERIES",
    "Edit",
    "Forgery",
    "copy_of",
    "decisions_of",
    "edits_by_name",
    "with_matching_digests",
    "without_decisions",
]

Array = NDArray[Any]
Site = Any
Names = tuple[str, ...]
ONE = np.float32(1)


class Edit(NamedTuple):
    """One kind of edit."""

    name: str
    sites: Callable[[ModelProto], list[Site]]
    apply: Callable[[ModelProto, Site, np.random.Generator], Names]


def copy_of(model: ModelProto) -> ModelProto:
    """Copy a model before an edit."""
    copy = ModelProto()
    copy.CopyFrom(model)
    return copy


EDITS: list[Edit] = []


def _edit(name: str, sites: Callable[[ModelProto], list[Site]]) -> Callable[..., Any]:
    """Register a function that applies an edit."""

    def register(apply: Callable[[ModelProto, Site, np.random.Generator], Names]) -> Any:
        EDITS.append(Edit(name, sites, apply))
        return apply

    return register


def edits_by_name() -> Mapping[str, Edit]:
    """All edits, by name."""
    return {edit.name: edit for edit in EDITS}


# Parts of a model


def _nodes(*ops: str) -> Callable[[ModelProto], list[Site]]:
    """Indices of the nodes with these operators, or of all nodes."""
    return lambda model: [i for i, node in enumerate(model.graph.node) if not ops or node.op_type in ops]


def _name(node: NodeProto) -> str:
    return node.name or f"{node.op_type}_{node.output[0]}"


def _about(node: NodeProto, *more: str) -> Names:
    return (_name(node), *node.output, *more)


def _readers(model: ModelProto, tensor: str) -> list[NodeProto]:
    return [node for node in model.graph.node if tensor in node.input]


def _initializer(model: ModelProto, name: str) -> TensorProto:
    return next(tensor for tensor in model.graph.initializer if tensor.name == name)


def _shapes(model: ModelProto) -> dict[str, tuple[int, tuple[Any, ...]]]:
    """Types and shapes of inputs and intermediate tensors of the main graph, by name."""
    inferred = shape_inference.infer_shapes(model).graph
    shapes = {}
    for value in (*inferred.value_info, *inferred.input, *inferred.output):
        kind = value.type.tensor_type
        if kind.HasField("shape"):
            shapes[value.name] = kind.elem_type, tuple(size.dim_param or size.dim_value for size in kind.shape.dim)
    return shapes


def _attribute(node: NodeProto, name: str) -> AttributeProto | None:
    return next((each for each in node.attribute if each.name == name), None)


def _set(node: NodeProto, name: str, value: Any) -> None:
    old = _attribute(node, name)
    if old is not None:
        node.attribute.remove(old)
    if value is not None:
        node.attribute.append(helper.make_attribute(name, value))


# Attributes: how the values of each operator change; None stands for a missing attribute


def _next(values: Sequence[Any], default: Any) -> Callable[..., Any]:
    """Next value in a cycle."""

    def change(value: Any, _rng: np.random.Generator) -> Any:
        value = default if value is None else value
        value = value.decode() if isinstance(value, bytes) else value
        return values[(values.index(value) + 1) % len(values)] if value in values else values[0]

    return change


def _one_more(count: int, default: int = 1) -> Callable[..., Any]:
    """Add 1 to one of several numbers."""

    def change(value: Any, rng: np.random.Generator) -> Any:
        values = [default] * count if value is None else list(value)
        values[int(rng.integers(len(values)))] += 1
        return values

    return change


def _times(factor: float, default: float) -> Callable[..., Any]:
    return lambda value, _rng: float(np.float32((default if value is None else value) * factor))


def _swapped_axes(value: Any, rng: np.random.Generator) -> Any:
    values = list(value)
    i = int(rng.integers(len(values) - 1))
    values[i], values[i + 1] = values[i + 1], values[i]
    return values


_WINDOW = {"kernel_shape": _one_more(2), "strides": _one_more(2), "dilations": _one_more(2), "pads": _one_more(4, 0)}
_PADDING = _next(["NOTSET", "SAME_UPPER", "SAME_LOWER", "VALID"], "NOTSET")
_CHANGED: dict[str, dict[str, Callable[..., Any]]] = {
    "Conv": {**_WINDOW, "group": _next([1, 2, 4, 8], 1), "auto_pad": _PADDING},
    "ConvTranspose": {
        **_WINDOW,
        "group": _next([1, 2, 4], 1),
        "output_padding": _one_more(2, 0),
        "auto_pad": _PADDING,
    },
    "MaxPool": {**_WINDOW, "ceil_mode": _next([0, 1], 0), "storage_order": _next([0, 1], 0), "auto_pad": _PADDING},
    "AveragePool": {
        **{name: _WINDOW[name] for name in ("kernel_shape", "strides", "pads")},
        "ceil_mode": _next([0, 1], 0),
        "count_include_pad": _next([0, 1], 0),
        "auto_pad": _PADDING,
    },
    "Gemm": {
        "alpha": _times(1.01, 1.0),
        "beta": _times(1.01, 1.0),
        "transA": _next([0, 1], 0),
        "transB": _next([0, 1], 0),
    },
    "Softmax": {"axis": _next([-1, 0, 1, 2], -1)},
    "Resize": {
        "mode": _next(["nearest", "linear", "cubic"], "nearest"),
        "coordinate_transformation_mode": _next(["asymmetric", "half_pixel", "align_corners"], "half_pixel"),
        "nearest_mode": _next(["round_prefer_floor", "floor", "ceil", "round_prefer_ceil"], "round_prefer_floor"),
        "cubic_coeff_a": _times(1.1, -0.75),
        "exclude_outside": _next([0, 1], 0),
        "extrapolation_value": lambda value, _rng: (value or 0.0) + 1.0,
    },
    "LayerNormalization": {"axis": _next([-1, 1, 2], -1), "epsilon": _times(100, 1e-5), "stash_type": _next([1, 0], 1)},
    "BatchNormalization": {"epsilon": _times(100, 1e-5), "momentum": _times(0.5, 0.9)},
    "LeakyRelu": {"alpha": _times(1.5, 0.01)},
    "Concat": {"axis": _next([0, 1, 2, 3], 1)},
    "Transpose": {"perm": _swapped_axes},
    "Gather": {"axis": _next([0, 1], 0)},
    "Flatten": {"axis": _next([0, 1, 2], 1)},
    "ReduceMean": {"keepdims": _next([0, 1], 1), "axes": lambda value, _rng: [each + 1 for each in value or [0]]},
    "Reshape": {"allowzero": _next([0, 1], 0)},
    "Cast": {"to": _next([TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.DOUBLE], TensorProto.FLOAT)},
    "DequantizeLinear": {"axis": _next([0, 1, 2], 1), "block_size": _next([0, 2, 4, 16, 32], 0)},
    "QuantizeLinear": {"axis": _next([0, 1, 2], 1), "saturate": _next([1, 0], 1)},
}


def _register_attribute(op: str, name: str, change: Callable[..., Any]) -> None:
    def sites(model: ModelProto) -> list[Site]:
        nodes = enumerate(model.graph.node)
        return [i for i, node in nodes if node.op_type == op and (name not in {"perm"} or _attribute(node, name))]

    def apply(model: ModelProto, site: Site, rng: np.random.Generator) -> Names:
        node = model.graph.node[site]
        old = _attribute(node, name)
        _set(node, name, change(None if old is None else helper.get_attribute_value(old), rng))
        return _about(node, f"attribute {name}")

    EDITS.append(Edit(f"{op}.{name}", sites, apply))


for _op, _attributes in _CHANGED.items():
    for _attribute_name, _change in _attributes.items():
        _register_attribute(_op, _attribute_name, _change)


@_edit("attribute removed", lambda model: [
    (i, each.name) for i, node in enumerate(model.graph.node) for each in node.attribute
])  # fmt: skip
def _remove_attribute(model: ModelProto, site: Site, _rng: np.random.Generator) -> Names:
    node = model.graph.node[site[0]]
    _set(node, site[1], None)
    return _about(node, f"attribute {site[1]}")


# Wiring


def _two_inputs(*ops: str) -> Callable[[ModelProto], list[Site]]:
    return lambda model: [
        i
        for i, node in enumerate(model.graph.node)
        if node.op_type in ops and len(node.input) > 1 and node.input[0] != node.input[1]
    ]


@_edit("inputs swapped", _two_inputs("Sub", "Div", "MatMul", "Add", "Mul", "Concat", "Greater", "Gather"))
def _swap_inputs(model: ModelProto, site: Site, _rng: np.random.Generator) -> Names:
    node = model.graph.node[site]
    node.input[0], node.input[1] = node.input[1], node.input[0]
    return _about(node)


def _same_shaped(model: ModelProto) -> list[Site]:
    """Inputs that could read an earlier tensor of the same type and shape."""
    shapes, sites, seen = _shapes(model), [], [value.name for value in model.graph.input]
    for i, node in enumerate(model.graph.node):
        for place, name in enumerate(node.input):
            others = [each for each in seen if each != name and name in shapes and shapes.get(each) == shapes[name]]
            if others:
                sites.append((i, place, others))
        seen += node.output
    return sites


@_edit("reads another tensor", _same_shaped)
def _read_another(model: ModelProto, site: Site, rng: np.random.Generator) -> Names:
    node = model.graph.node[site[0]]
    node.input[site[1]] = site[2][int(rng.integers(len(site[2])))]
    return _about(node)


@_edit("input removed", lambda model: [i for i, node in enumerate(model.graph.node) if len(node.input) > 2])
def _remove_input(model: ModelProto, site: Site, _rng: np.random.Generator) -> Names:
    node = model.graph.node[site]
    del node.input[-1]
    return _about(node)


def _results_of_one_shape(model: ModelProto) -> list[Site]:
    shapes, by_shape = _shapes(model), dict[Any, list[int]]()
    for i, node in enumerate(model.graph.node):
        if len(node.output) == 1 and node.output[0] in shapes:
            by_shape.setdefault(shapes[node.output[0]], []).append(i)
    return [(a, b) for places in by_shape.values() for a, b in pairwise(places)]


@_edit("results swapped", _results_of_one_shape)
def _swap_results(model: ModelProto, site: Site, _rng: np.random.Generator) -> Names:
    a, b = (model.graph.node[i] for i in site)
    a.output[0], b.output[0] = b.output[0], a.output[0]
    return (*_about(a), *_about(b))


@_edit("outputs swapped", lambda model: list(range(len(model.graph.output) - 1)))
def _swap_outputs(model: ModelProto, site: Site, _rng: np.random.Generator) -> Names:
    values = list(model.graph.output)
    values[site], values[site + 1] = values[site + 1], values[site]
    kept = [helper.make_value_info(value.name, value.type) for value in values]
    del model.graph.output[:]
    model.graph.output.extend(kept)
    return ("outputs",)


# Nodes


def _removable(*ops: str) -> Callable[[ModelProto], list[Site]]:
    return _nodes(*ops)


def _bypass(model: ModelProto, node: NodeProto) -> None:
    """Remove a node: its readers read its first input instead."""
    old, new = node.output[0], node.input[0]
    if old in {value.name for value in model.graph.output}:
        producer = next((each for each in model.graph.node if new in each.output), None)
        if producer is None:
            old, new = "", ""
        else:
            producer.output[list(producer.output).index(new)] = old
            old, new = new, old
    for each in model.graph.node:
        for i, name in enumerate(each.input):
            if name == old and old:
                each.input[i] = new
    model.graph.node.remove(node)


@_edit("activation removed", _removable("Relu", "Clip", "LeakyRelu", "Sigmoid", "Softmax", "Erf", "Max"))
def _remove_activation(model: ModelProto, site: Site, _rng: np.random.Generator) -> Names:
    node = model.graph.node[site]
    names = _about(node)
    _bypass(model, node)
    return names


@_edit("node removed", _nodes("Add", "Mul", "Sub", "Div", "MaxPool", "AveragePool", "Transpose", "LayerNormalization"))
def _remove_node(model: ModelProto, site: Site, _rng: np.random.Generator) -> Names:
    node = model.graph.node[site]
    names = _about(node)
    _bypass(model, node)
    return names


_OTHER_OPERATOR = {
    "Relu": "LeakyRelu",
    "LeakyRelu": "Relu",
    "Sigmoid": "Tanh",
    "Erf": "Tanh",
    "Add": "Sub",
    "Sub": "Add",
    "Mul": "Div",
    "Div": "Mul",
    "Softmax": "LogSoftmax",
    "Greater": "Less",
    "Max": "Min",
    "MaxPool": "AveragePool",
    "AveragePool": "MaxPool",
    "ReduceMean": "ReduceMax",
}


@_edit("another operator", _nodes(*_OTHER_OPERATOR))
def _replace_operator(model: ModelProto, site: Site, _rng: np.random.Generator) -> Names:
    node = model.graph.node[site]
    node.op_type = _OTHER_OPERATOR[node.op_type]
    for name in ("count_include_pad", "storage_order", "dilations"):
        _set(node, name, None)
    return _about(node)


@_edit("node before an output", lambda model: list(range(len(model.graph.output))))
def _insert_before_output(model: ModelProto, site: Site, rng: np.random.Generator) -> Names:
    name = model.graph.output[site].name
    producer = next(node for node in model.graph.node if name in node.output)
    producer.output[list(producer.output).index(name)] = f"{name}_before"
    for node in _readers(model, name):
        node.input[list(node.input).index(name)] = f"{name}_before"
    op = ("Neg", "Identity", "Relu")[int(rng.integers(3))]
    model.graph.node.append(helper.make_node(op, [f"{name}_before"], [name], name="inserted"))
    return ("inserted", *_about(producer))


@_edit("node between", lambda model: [
    (i, place)
    for i, node in enumerate(model.graph.node)
    for place, name in enumerate(node.input)
    if any(name in each.output for each in model.graph.node)
])  # fmt: skip
def _insert_between(model: ModelProto, site: Site, rng: np.random.Generator) -> Names:
    node = model.graph.node[site[0]]
    op = ("Identity", "Neg", "Abs")[int(rng.integers(3))]
    inserted = helper.make_node(op, [node.input[site[1]]], ["inserted_out"], name="inserted")
    node.input[site[1]] = "inserted_out"
    names = ("inserted", *_about(node))
    model.graph.node.insert(site[0], inserted)
    return names


@_edit("node duplicated", _nodes())
def _duplicate(model: ModelProto, site: Site, _rng: np.random.Generator) -> Names:
    node, twin = model.graph.node[site], NodeProto()
    twin.CopyFrom(node)
    twin.output[:] = [f"{name}_twin" for name in node.output]
    for reader in _readers(model, node.output[0])[:1]:
        reader.input[list(reader.input).index(node.output[0])] = twin.output[0]
    names = _about(node)
    model.graph.node.insert(site + 1, twin)
    return (*names, *twin.output)


def _independent(model: ModelProto) -> list[Site]:
    nodes = model.graph.node
    return [i for i in range(len(nodes) - 1) if not set(nodes[i].output) & set(reads(nodes[i + 1]))]


@_edit("nodes reordered", _independent)
def _reorder(model: ModelProto, site: Site, _rng: np.random.Generator) -> Names:
    first = NodeProto()
    first.CopyFrom(model.graph.node[site])
    model.graph.node[site].CopyFrom(model.graph.node[site + 1])
    model.graph.node[site + 1].CopyFrom(first)
    return ("wrong order of nodes", *_about(model.graph.node[site]), *_about(first))


@_edit("node renamed", _nodes())
def _rename(model: ModelProto, site: Site, _rng: np.random.Generator) -> Names:
    node = model.graph.node[site]
    names = _about(node)
    node.name = f"{node.name}_other"
    return (*names, node.name)


@_edit("another domain", _nodes("Relu", "Add", "Softmax", "QuantizeLinear", "DequantizeLinear", "Gelu"))
def _change_domain(model: ModelProto, site: Site, _rng: np.random.Generator) -> Names:
    node = model.graph.node[site]
    node.domain = "com.microsoft"
    if all(each.domain != "com.microsoft" for each in model.opset_import):
        model.opset_import.append(helper.make_opsetid("com.microsoft", 1))
    return _about(node, "opset_import")


# Q/DQ pairs


def _pairs(model: ModelProto) -> list[Site]:
    """Indices of each Q/DQ pair: a QuantizeLinear node and the DequantizeLinear node that alone reads it."""
    places = {each.output[0]: i for i, each in enumerate(model.graph.node) if each.output}
    pairs = []
    for i, node in enumerate(model.graph.node):
        if node.op_type == "DequantizeLinear" and node.input[0] in places:
            before = model.graph.node[places[node.input[0]]]
            if before.op_type == "QuantizeLinear" and len(_readers(model, before.output[0])) == 1:
                pairs.append((places[node.input[0]], i))
    return pairs


@_edit("pair removed", _pairs)
def _remove_pair(model: ModelProto, site: Site, _rng: np.random.Generator) -> Names:
    quantize, dequantize = (model.graph.node[i] for i in site)
    names = (*_about(quantize), *_about(dequantize))
    _bypass(model, dequantize)
    _bypass(model, quantize)
    return names


@_edit("pair bypassed", _pairs)
def _bypass_pair(model: ModelProto, site: Site, rng: np.random.Generator) -> Names:
    quantize, dequantize = (model.graph.node[i] for i in site)
    readers = _readers(model, dequantize.output[0])
    if not readers:
        return _remove_pair(model, site, rng)
    reader = readers[int(rng.integers(len(readers)))]
    reader.input[list(reader.input).index(dequantize.output[0])] = quantize.input[0]
    return _about(reader)


_MOVED_OVER = {"Relu", "Clip", "MaxPool", "Transpose", "LeakyRelu"}


@_edit("pair moved", lambda model: [
    site
    for site in _pairs(model)
    if any(
        each.op_type in _MOVED_OVER and model.graph.node[site[0]].input[0] in each.output
        for each in model.graph.node
    )
])  # fmt: skip
def _move_pair(model: ModelProto, site: Site, _rng: np.random.Generator) -> Names:
    quantize, dequantize = (model.graph.node[i] for i in site)
    before = next(each for each in model.graph.node if quantize.input[0] in each.output)
    after, old, result = dequantize.output[0], before.input[0], before.output[0]
    before.output[0], dequantize.output[0] = after, f"{after}_moved"
    quantize.input[0], before.input[0] = old, f"{after}_moved"
    for reader in model.graph.node:
        for i, name in enumerate(reader.input):
            if name == result:
                reader.input[i] = after
    moved = [NodeProto() for _ in range(2)]
    for copy, node in zip(moved, (quantize, dequantize), strict=True):
        copy.CopyFrom(node)
        model.graph.node.remove(node)
    place = list(model.graph.node).index(before)
    for copy in reversed(moved):
        model.graph.node.insert(place, copy)
    return (*_about(moved[0]), *_about(moved[1]), *_about(before))


@_edit("pair with another scale", lambda model: [
    (*site, other) for site in _pairs(model) for other, _ in _pairs(model)
    if model.graph.node[other].input[1] != model.graph.node[site[0]].input[1]
])  # fmt: skip
def _share_scale(model: ModelProto, site: Site, _rng: np.random.Generator) -> Names:
    quantize, dequantize, other = (model.graph.node[i] for i in site)
    for node in (quantize, dequantize):
        node.input[1:] = other.input[1:]
    return (*_about(quantize), *_about(dequantize))


@_edit("dequantized by another scale", lambda model: [
    (site[1], other) for site in _pairs(model) for other, _ in _pairs(model)
    if model.graph.node[other].input[1] != model.graph.node[site[1]].input[1]
])  # fmt: skip
def _other_dequantization(model: ModelProto, site: Site, _rng: np.random.Generator) -> Names:
    node, other = (model.graph.node[i] for i in site)
    node.input[1] = other.input[1]
    return _about(node)


@_edit("pair twice", _pairs)
def _repeat_pair(model: ModelProto, site: Site, _rng: np.random.Generator) -> Names:
    quantize, dequantize = (model.graph.node[i] for i in site)
    again = helper.make_node("QuantizeLinear", [dequantize.output[0], *quantize.input[1:]], ["again_q"], name="again_Q")
    back = helper.make_node("DequantizeLinear", ["again_q", *quantize.input[1:]], ["again"], name="again_DQ")
    for reader in _readers(model, dequantize.output[0]):
        reader.input[list(reader.input).index(dequantize.output[0])] = "again"
    names = ("again", *_about(dequantize))
    for node in (back, again):
        model.graph.node.insert(site[1] + 1, node)
    return names


@_edit("dynamic quantization undone", _nodes("MatMulInteger"))
def _undo_dynamic(model: ModelProto, site: Site, _rng: np.random.Generator) -> Names:
    """Multiply the float input by the dequantized weight, which gives nearly the same output."""
    node = model.graph.node[site]
    quantizer = next(each for each in model.graph.node if node.input[0] in each.output)
    cast = _readers(model, node.output[0])[0]
    product = _readers(model, cast.output[0])[0]
    scales = next(each for each in model.graph.node if product.input[1] in each.output)
    codes, scale = (array_of(_initializer(model, name)) for name in (node.input[1], scales.input[1]))
    model.graph.initializer.append(make_tensor("undone", codes.astype(np.float32) * scale))
    names = _about(node)
    product.CopyFrom(helper.make_node("MatMul", [quantizer.input[0], "undone"], product.output, name=node.name))
    for each in (node, cast, scales):
        model.graph.node.remove(each)
    return names


# Constants


def _roles(model: ModelProto) -> dict[str, str]:
    """Role of each constant: codes, scale, zero point, or number (read by other operators)."""
    roles = {}
    dynamic = {node.output[1] for node in model.graph.node if node.op_type == "DynamicQuantizeLinear"}
    for node in model.graph.node:
        for place, name in enumerate(node.input):
            role = "scale" if node.op_type == "Mul" and not dynamic.isdisjoint(node.input) else "number"
            if node.op_type == "MatMulInteger":
                role = ("codes", "codes", "zero point", "zero point")[place]
            if node.op_type in {"QuantizeLinear", "DequantizeLinear"}:
                role = ("codes", "scale", "zero point")[min(place, 2)]
            roles.setdefault(name, role)
    return roles


def _constants(*roles: str, kinds: Sequence[int] = ()) -> Callable[[ModelProto], list[Site]]:
    def sites(model: ModelProto) -> list[Site]:
        roles_by_name = _roles(model)
        return [
            tensor.name
            for tensor in model.graph.initializer
            if roles_by_name.get(tensor.name) in roles
            and (not kinds or tensor.data_type in kinds)
            and np.prod(tensor.dims)
        ]

    return sites


def _store(model: ModelProto, name: str, values: Array) -> Names:
    tensor = _initializer(model, name)
    tensor.CopyFrom(make_tensor(name, values, tensor.data_type))
    return (name,)


def _element(values: Array, rng: np.random.Generator) -> tuple[int, ...]:
    return tuple(int(i) for i in np.unravel_index(int(rng.integers(values.size)), values.shape))


SMALL_INTEGERS = (TensorProto.INT8, TensorProto.UINT8, TensorProto.INT4, TensorProto.UINT4)


@_edit("code", _constants("codes", "number", kinds=SMALL_INTEGERS))
def _change_code(model: ModelProto, site: Site, rng: np.random.Generator) -> Names:
    values = np.array(array_of(_initializer(model, site)))
    values[_element(values, rng)] ^= 1
    return _store(model, site, values)


@_edit("codes negated", _constants("codes", kinds=(TensorProto.INT8,)))
def _negate_codes(model: ModelProto, site: Site, _rng: np.random.Generator) -> Names:
    values = np.array(array_of(_initializer(model, site)))
    return _store(model, site, np.where(values == -128, values, -values) + (values == 0))


@_edit("bias code", _constants("codes", kinds=(TensorProto.INT32,)))
def _change_bias(model: ModelProto, site: Site, rng: np.random.Generator) -> Names:
    values = np.array(array_of(_initializer(model, site)))
    values[_element(values, rng)] += int(rng.choice([1, 1000, -100000]))
    return _store(model, site, values)


@_edit("scale by an ulp", _constants("scale", kinds=(TensorProto.FLOAT,)))
@_edit("float constant by an ulp", _constants("number", kinds=(TensorProto.FLOAT,)))
def _next_float(model: ModelProto, site: Site, rng: np.random.Generator) -> Names:
    values = np.array(array_of(_initializer(model, site)))
    at = _element(values, rng)
    values[at] = np.nextafter(values[at], np.float32(np.inf))
    return _store(model, site, values)


@_edit("scale doubled", _constants("scale", kinds=(TensorProto.FLOAT,)))
def _double_scale(model: ModelProto, site: Site, rng: np.random.Generator) -> Names:
    values = np.array(array_of(_initializer(model, site)))
    values[_element(values, rng)] *= 2
    return _store(model, site, values)


@_edit("zero point", _constants("zero point"))
def _change_zero_point(model: ModelProto, site: Site, rng: np.random.Generator) -> Names:
    values = np.array(array_of(_initializer(model, site)))
    if values.dtype.kind not in "iu":
        values = values.astype(np.float32) + ONE
    else:
        at = _element(values, rng)
        values[at] ^= 1
    return _store(model, site, values)


@_edit("float constant", _constants("number", kinds=(TensorProto.FLOAT,)))
def _change_float(model: ModelProto, site: Site, rng: np.random.Generator) -> Names:
    values = np.array(array_of(_initializer(model, site)))
    values[_element(values, rng)] += np.float32(rng.choice([0.5, -0.25, 3.0]))
    return _store(model, site, values)


@_edit("sign of zero", lambda model: [
    name for name in _constants("number", kinds=(TensorProto.FLOAT,))(model)
    if (array_of(_initializer(model, name)) == 0).any()
])  # fmt: skip
def _negative_zero(model: ModelProto, site: Site, _rng: np.random.Generator) -> Names:
    values = np.array(array_of(_initializer(model, site)))
    return _store(model, site, np.where(values == 0, -values, values))


@_edit("integer constant", _constants("number", kinds=(TensorProto.INT64, TensorProto.INT32)))
def _change_integer(model: ModelProto, site: Site, rng: np.random.Generator) -> Names:
    values = np.array(array_of(_initializer(model, site)))
    values[_element(values, rng)] += 1
    return _store(model, site, values)


def _of_one_shape(model: ModelProto) -> list[Site]:
    by_shape: dict[Any, list[str]] = {}
    for tensor in model.graph.initializer:
        by_shape.setdefault((tensor.data_type, *tensor.dims), []).append(tensor.name)
    pairs = [pair for names in by_shape.values() for pair in pairwise(names)]
    return [
        (a, b)
        for a, b in pairs
        if array_of(_initializer(model, a)).tobytes() != array_of(_initializer(model, b)).tobytes()
    ]


@_edit("constants swapped", _of_one_shape)
def _swap_constants(model: ModelProto, site: Site, _rng: np.random.Generator) -> Names:
    a, b = (_initializer(model, name) for name in site)
    a.name, b.name = b.name, a.name
    return tuple(site)


@_edit("constant reshaped", lambda model: [
    tensor.name for tensor in model.graph.initializer if len(tensor.dims) > 1 and tensor.dims[0] != tensor.dims[1]
])  # fmt: skip
def _reshape_constant(model: ModelProto, site: Site, _rng: np.random.Generator) -> Names:
    tensor = _initializer(model, site)
    dims = list(tensor.dims)
    tensor.dims[:] = [dims[1], dims[0], *dims[2:]]
    return (site, "weight_scale must have shape")


@_edit("constant of another type", _constants("zero point", "codes", kinds=(TensorProto.INT8, TensorProto.UINT8)))
def _retype_constant(model: ModelProto, site: Site, _rng: np.random.Generator) -> Names:
    tensor = _initializer(model, site)
    tensor.data_type = TensorProto.UINT8 if tensor.data_type == TensorProto.INT8 else TensorProto.INT8
    return (site, "type", *(_name(node) for node in _readers(model, site)))


@_edit("constant added", lambda model: [0])
def _add_constant(model: ModelProto, _site: Site, _rng: np.random.Generator) -> Names:
    model.graph.initializer.append(numpy_helper.from_array(np.float32([1, 2]), "nobody_reads_it"))
    return ("nobody_reads_it",)


@_edit("constant as an input", lambda model: [tensor.name for tensor in model.graph.initializer])
def _open_constant(model: ModelProto, site: Site, _rng: np.random.Generator) -> Names:
    tensor = _initializer(model, site)
    model.graph.input.append(helper.make_tensor_value_info(site, tensor.data_type, list(tensor.dims)))
    return (site, "inputs")


@_edit("constant computed", _constants("number", kinds=(TensorProto.FLOAT,)))
def _compute_constant(model: ModelProto, site: Site, _rng: np.random.Generator) -> Names:
    tensor = TensorProto()
    tensor.CopyFrom(_initializer(model, site))
    model.graph.initializer.remove(_initializer(model, site))
    model.graph.node.insert(0, helper.make_node("Constant", [], [site], name="computed", value=tensor))
    return ("computed", site)


# The model as a whole


@_edit("opset", lambda model: [i for i, each in enumerate(model.opset_import) if each.domain in {"", "ai.onnx"}])
def _change_opset(model: ModelProto, site: Site, rng: np.random.Generator) -> Names:
    model.opset_import[site].version += int(rng.choice([-1, 1]))
    return ("opset", "opset_import")


@_edit("opset added", lambda model: [0])
def _add_opset(model: ModelProto, _site: Site, _rng: np.random.Generator) -> Names:
    model.opset_import.append(helper.make_opsetid("some.domain", 1))
    return ("opset_import",)


@_edit("IR version", lambda model: [0])
def _change_ir(model: ModelProto, _site: Site, _rng: np.random.Generator) -> Names:
    model.ir_version += 1 if model.ir_version < 10 else -1
    return ("ir_version",)


def _ends(model: ModelProto) -> list[Site]:
    parts = (("input", model.graph.input), ("output", model.graph.output))
    return [(part, i) for part, values in parts for i in range(len(values))]


@_edit("type of an input or output", _ends)
def _change_type(model: ModelProto, site: Site, _rng: np.random.Generator) -> Names:
    value = getattr(model.graph, site[0])[site[1]]
    kind = value.type.tensor_type
    kind.elem_type = TensorProto.INT32 if kind.elem_type == TensorProto.INT64 else TensorProto.DOUBLE
    return (value.name,)


@_edit("shape of an input or output", lambda model: [
    (part, i) for part, i in _ends(model)
    if len(getattr(model.graph, part)[i].type.tensor_type.shape.dim)
])  # fmt: skip
def _change_shape(model: ModelProto, site: Site, rng: np.random.Generator) -> Names:
    value = getattr(model.graph, site[0])[site[1]]
    sizes = value.type.tensor_type.shape.dim
    size = sizes[int(rng.integers(len(sizes)))]
    if size.HasField("dim_value"):
        size.dim_value += 1
    else:
        size.dim_value = 5
    return (value.name,)


@_edit("axis of an input or output opened", lambda model: [
    (part, i) for part, i in _ends(model)
    if any(size.HasField("dim_value") for size in getattr(model.graph, part)[i].type.tensor_type.shape.dim)
])  # fmt: skip
def _open_axis(model: ModelProto, site: Site, _rng: np.random.Generator) -> Names:
    value = getattr(model.graph, site[0])[site[1]]
    size = next(each for each in value.type.tensor_type.shape.dim if each.HasField("dim_value"))
    size.dim_param = "any"
    return (value.name,)


@_edit("output renamed", lambda model: list(range(len(model.graph.output))))
def _rename_output(model: ModelProto, site: Site, _rng: np.random.Generator) -> Names:
    old = model.graph.output[site].name
    for node in model.graph.node:
        for names in (node.input, node.output):
            for i, name in enumerate(names):
                if name == old:
                    names[i] = f"{old}_other"
    model.graph.output[site].name = f"{old}_other"
    return (old, "outputs")


@_edit("output added", lambda model: [
    i for i, node in enumerate(model.graph.node)
    if node.output[0] not in {value.name for value in model.graph.output}
])  # fmt: skip
def _add_output(model: ModelProto, site: Site, _rng: np.random.Generator) -> Names:
    name = model.graph.node[site].output[0]
    kind, _shape = _shapes(model).get(name, (TensorProto.FLOAT, ()))
    model.graph.output.append(helper.make_tensor_value_info(name, kind, None))
    return (name, "outputs")


@_edit("value with a false shape", _nodes())
def _false_shape(model: ModelProto, site: Site, _rng: np.random.Generator) -> Names:
    name = model.graph.node[site].output[0]
    model.graph.value_info.append(helper.make_tensor_value_info(name, TensorProto.FLOAT, [1, 7]))
    return ("value_info", name)


@_edit("function added", lambda model: [0])
def _add_function(model: ModelProto, _site: Site, _rng: np.random.Generator) -> Names:
    body = [helper.make_node("Neg", ["a"], ["b"])]
    model.functions.append(helper.make_function("some.domain", "Nothing", ["a"], ["b"], body, list(model.opset_import)))
    model.opset_import.append(helper.make_opsetid("some.domain", 1))
    return ("functions", "opset_import")


@_edit("function in place of an operator", _nodes("Relu", "Softmax", "Erf", "LeakyRelu", "Sigmoid"))
def _use_function(model: ModelProto, site: Site, _rng: np.random.Generator) -> Names:
    node = model.graph.node[site]
    body = [helper.make_node("Neg", ["a"], ["b"])]
    imports = [helper.make_opsetid("", each.version) for each in model.opset_import if each.domain in {"", "ai.onnx"}]
    model.functions.append(helper.make_function("some.domain", node.op_type, ["a"], ["b"], body, imports))
    model.opset_import.append(helper.make_opsetid("some.domain", 1))
    del node.attribute[:]
    node.domain = "some.domain"
    return _about(node, "functions", "opset_import")


@_edit("quantization annotation", lambda model: [0] if len(model.graph.node) else [])
def _annotate(model: ModelProto, _site: Site, _rng: np.random.Generator) -> Names:
    annotation = model.graph.quantization_annotation.add(tensor_name=model.graph.node[0].output[0])
    annotation.quant_parameter_tensor_names.add(key="SCALE_TENSOR", value=model.graph.initializer[0].name)
    return ("quantization_annotation",)


@_edit("graph renamed", lambda model: [0])
def _rename_graph(model: ModelProto, _site: Site, _rng: np.random.Generator) -> Names:
    model.graph.name += "_other"
    return ("graph name",)


# Subgraphs of If and Loop


def _subgraphs(model: ModelProto) -> Iterator[tuple[int, str, GraphProto]]:
    for i, node in enumerate(model.graph.node):
        for each in node.attribute:
            if each.type == AttributeProto.GRAPH:
                yield i, each.name, each.g


def _subgraph_of(model: ModelProto, site: Site) -> GraphProto:
    attribute = _attribute(model.graph.node[site[0]], site[1])
    assert attribute is not None
    return attribute.g


@_edit("constant of a subgraph", lambda model: [
    (i, name, k) for i, name, subgraph in _subgraphs(model) for k, tensor in enumerate(subgraph.initializer)
    if tensor.data_type == TensorProto.FLOAT
])  # fmt: skip
def _change_inner_constant(model: ModelProto, site: Site, rng: np.random.Generator) -> Names:
    tensor = _subgraph_of(model, site).initializer[site[2]]
    values = np.array(array_of(tensor))
    values[_element(values, rng)] += ONE
    tensor.CopyFrom(make_tensor(tensor.name, values, tensor.data_type))
    return (tensor.name,)


@_edit("operator of a subgraph", lambda model: [
    (i, name, k) for i, name, subgraph in _subgraphs(model) for k, node in enumerate(subgraph.node)
    if node.op_type in _OTHER_OPERATOR
])  # fmt: skip
def _change_inner_operator(model: ModelProto, site: Site, _rng: np.random.Generator) -> Names:
    node = _subgraph_of(model, site).node[site[2]]
    node.op_type = _OTHER_OPERATOR[node.op_type]
    return _about(node)


@_edit("attribute of a subgraph", lambda model: [
    (i, name, k) for i, name, subgraph in _subgraphs(model) for k, node in enumerate(subgraph.node)
    if any(each.type == AttributeProto.FLOAT for each in node.attribute)
])  # fmt: skip
def _change_inner_attribute(model: ModelProto, site: Site, _rng: np.random.Generator) -> Names:
    node = _subgraph_of(model, site).node[site[2]]
    next(each for each in node.attribute if each.type == AttributeProto.FLOAT).f *= 2
    return _about(node)


@_edit("subgraphs swapped", _nodes("If"))
def _swap_subgraphs(model: ModelProto, site: Site, _rng: np.random.Generator) -> Names:
    node = model.graph.node[site]
    a, b = (each for each in node.attribute if each.type == AttributeProto.GRAPH)
    a.name, b.name = b.name, a.name
    return _about(node, "then_branch", "else_branch")


# Metadata


def _metadata(model: ModelProto) -> dict[str, Any]:
    return next((fields_of(each.value) for each in model.metadata_props if each.key == KEY), {})


def _write_metadata(model: ModelProto, entry: Mapping[str, Any]) -> None:
    for each in model.metadata_props:
        if each.key == KEY:
            each.value = json.dumps(entry, sort_keys=True, separators=(",", ":"))


def _fields_of_metadata(model: ModelProto) -> list[Site]:
    """Paths of metadata fields: the source digest, and the names of weights and activations."""
    entry = _metadata(model)
    fields = [("source",)] if entry.get("source") else []
    return fields + [(part, name) for part in ("weights", "activations") for name in entry.get(part, {})]


@_edit("metadata", _fields_of_metadata)
def _change_metadata(model: ModelProto, site: Site, _rng: np.random.Generator) -> Names:
    entry = _metadata(model)
    holder = entry
    for name in site[:-1]:
        holder = holder[name]
    holder[site[-1]] = "0" * 32 if site == ("source",) else "another_name"
    _write_metadata(model, entry)
    return ("metadata", "the decisions", "digest", "constant", "decisions", site[0])


@_edit("metadata removed", lambda model: [0] if _metadata(model) else [])
def _remove_metadata(model: ModelProto, _site: Site, _rng: np.random.Generator) -> Names:
    for each in list(model.metadata_props):
        if each.key == KEY:
            model.metadata_props.remove(each)
    return ("no decisions", "not replayed")


# The other two forms


def without_decisions(model: ModelProto) -> ModelProto:
    """Copy of the model without the decisions in its metadata."""
    copy, entry = copy_of(model), _metadata(model)
    entry.pop("decisions", None)
    _write_metadata(copy, entry)
    return copy


def with_matching_digests(model: ModelProto) -> ModelProto:
    """Copy of the model whose decisions have digests of its present constants."""
    copy, entry = copy_of(model), _metadata(model)
    tensors = {tensor.name: tensor for tensor in model.graph.initializer}

    def refresh(value: Any) -> None:
        if isinstance(value, dict):
            tensor = tensors.get(value["initializer"]) if isinstance(value.get("initializer"), str) else None
            if tensor is not None and "digest" in value:
                values = np.ascontiguousarray(array_of(tensor))
                values = values.astype(np.int32) if values.dtype.itemsize == 1 else values  # zero points
                value["digest"] = sha256(values.tobytes()).hexdigest()[:8]
            for each in value.values():
                refresh(each)
        elif isinstance(value, list):
            for each in value:
                refresh(each)

    refresh(entry)
    _write_metadata(copy, entry)
    return copy


# Forged decisions


class Forgery(NamedTuple):
    """A forged set of decisions: ``change`` returns None if there is nothing to change.

    ``admissible`` tells whether the result is a valid quantization of the same source; None if that depends on values.
    """

    name: str
    change: Callable[[Decisions, np.random.Generator], Decisions | None]
    admissible: bool | None

    def apply(self, source: ModelProto, model: ModelProto, rng: np.random.Generator) -> ModelProto | None:
        """Rewrite the source with the forged decisions; if they are rejected, only replace the metadata."""
        forged = self.change(decisions_of(model), rng)
        if forged is None:
            return None
        try:
            return write_quantizers(float_form(source, forged), forged)
        except DetentError:
            copy, entry = copy_of(model), _metadata(model)
            entry["decisions"] = to_metadata(forged, model)
            entry["target"], entry["source"] = forged.target, forged.source
            _write_metadata(copy, entry)
            return copy


FORGERIES: list[Forgery] = []


def _forgery(name: str, *, admissible: bool | None) -> Callable[..., Any]:
    def register(change: Callable[[Decisions, np.random.Generator], Decisions | None]) -> Any:
        FORGERIES.append(Forgery(name, change, admissible))
        return change

    return register


def decisions_of(model: ModelProto) -> Decisions:
    """Decisions in the metadata of a file."""
    provenance = Provenance.read(model)
    assert provenance is not None
    decisions = read_decisions(model, provenance).decisions
    assert decisions is not None
    return decisions


def _pick(values: Sequence[Any], rng: np.random.Generator) -> Any:
    return values[int(rng.integers(len(values)))] if values else None


def _with_layer(decisions: Decisions, layer: str, **fields: Any) -> Decisions:
    layers = tuple(replace(each, **fields) if each.name == layer else each for each in decisions.layers)
    return replace(decisions, layers=layers)


def _with_changed(decisions: Decisions, kind: str, line: Any, **fields: Any) -> Decisions:
    """Change one entry of a kind of decisions, such as "smoothed"."""
    lines = tuple(replace(each, **fields) if each is line else each for each in getattr(decisions, kind))
    return replace(decisions, **{kind: lines})


def _quantized(decisions: Decisions, rng: np.random.Generator, condition: Any = lambda _: True) -> LayerDecision | None:
    layers = [each for each in decisions.layers if each.is_quantized and condition(each)]
    layer: LayerDecision | None = _pick(layers, rng)
    return layer


def _with_range(decisions: Decisions, rng: np.random.Generator, change: Any) -> Decisions | None:
    group = _pick(list(decisions.ranges), rng)
    if group is None:
        return None
    # Corrected biases are codes in units of the scale, so they are dropped with it.
    layers = tuple(
        replace(each, bias=None, input_range=None) if each.is_quantized else each for each in decisions.layers
    )
    ranges = {**decisions.ranges, group: change(decisions.ranges[group])}
    return replace(decisions, ranges=ranges, layers=layers)


@_forgery("activation scale", admissible=True)
def _forge_scale(decisions: Decisions, rng: np.random.Generator) -> Decisions | None:
    factor = np.float32(rng.choice([0.5, 1.5, 4.0]))
    return _with_range(decisions, rng, lambda each: replace(each, scale=float(np.float32(each.scale) * factor)))


@_forgery("activation scale in a subgraph", admissible=False)
def _own_scale(decisions: Decisions, _rng: np.random.Generator) -> Decisions | None:
    own = [each for each in decisions.layers if each.own_range is not None]
    if not own or own[0].own_range is None:
        return None
    changed = replace(own[0], own_range=replace(own[0].own_range, scale=2 * own[0].own_range.scale))
    return replace(decisions, layers=tuple(changed if each is own[0] else each for each in decisions.layers))


@_forgery("activation zero point", admissible=True)
def _forge_zero_point(decisions: Decisions, rng: np.random.Generator) -> Decisions | None:
    return _with_range(decisions, rng, lambda each: replace(each, zero_point=each.zero_point ^ 1))


@_forgery("activation scale alone", admissible=False)
def _forge_scale_alone(decisions: Decisions, rng: np.random.Generator) -> Decisions | None:
    """Multiply a scale by 16 and keep the corrected biases, which are codes in units of the old scale."""
    groups = {each.tensor: each.group for each in decisions.placements}
    biased = _quantized(decisions, rng, lambda each: each.bias is not None and each.bias.dtype == np.int32)
    if biased is None or not groups:
        return None
    ranges = {name: replace(each, scale=float(np.float32(each.scale) * 16)) for name, each in decisions.ranges.items()}
    return replace(decisions, ranges=ranges)


@_forgery("weight scale", admissible=False)
def _forge_weight_scale(decisions: Decisions, rng: np.random.Generator) -> Decisions | None:
    line = _quantized(decisions, rng, lambda each: each.weight.bits >= 8)
    factor = np.float32(rng.choice([0.5, 2.0, 1 + 1e-6]))
    return None if line is None else _with_layer(decisions, line.name, weight_scale=line.weight_scale * factor)


@_forgery("weight scale of few bits", admissible=None)
def _forge_low_scale(decisions: Decisions, rng: np.random.Generator) -> Decisions | None:
    line = _quantized(decisions, rng, lambda each: each.weight.bits < 8)
    factor = np.float32(rng.choice([0.2, 0.95, 1.05, 3.0]))
    return None if line is None else _with_layer(decisions, line.name, weight_scale=line.weight_scale * factor)


@_forgery("weight zero point", admissible=False)
def _forge_weight_zero_point(decisions: Decisions, rng: np.random.Generator) -> Decisions | None:
    line = _quantized(decisions, rng, lambda each: not each.weight.symmetric)
    if line is None or line.weight_zero_point is None:
        return None
    return _with_layer(decisions, line.name, weight_zero_point=np.asarray(line.weight_zero_point) ^ 1)


@_forgery("bias beyond its bound", admissible=False)
def _forge_bias(decisions: Decisions, rng: np.random.Generator) -> Decisions | None:
    line = _quantized(decisions, rng, lambda each: each.bias is not None)
    if line is None:
        return None
    offset = np.int32(1 << 24) if line.bias.dtype == np.int32 else np.float32(50)
    return _with_layer(decisions, line.name, bias=line.bias + offset)


@_forgery("bias within its bound", admissible=None)
def _forge_bias_little(decisions: Decisions, rng: np.random.Generator) -> Decisions | None:
    line = _quantized(decisions, rng, lambda each: each.bias is not None)
    if line is None:
        return None
    offset = np.int32(1) if line.bias.dtype == np.int32 else np.float32(1e-6)
    return _with_layer(decisions, line.name, bias=line.bias + offset)


@_forgery("bias in another unit", admissible=False)
def _forge_bias_dtype(decisions: Decisions, rng: np.random.Generator) -> Decisions | None:
    line = _quantized(decisions, rng, lambda each: each.bias is not None and each.bias.dtype == np.int32)
    return None if line is None else _with_layer(decisions, line.name, bias=np.float32(line.bias))


@_forgery("layer kept in float", admissible=True)
def _forge_float(decisions: Decisions, rng: np.random.Generator) -> Decisions | None:
    line = _quantized(decisions, rng)
    if line is None or sum(each.is_quantized for each in decisions.layers) == 1:  # nothing quantized is rejected
        return None
    return decisions.with_layers_in_float([line.name], "by request")


@_forgery("layer dropped", admissible=False)
def _forge_missing(decisions: Decisions, rng: np.random.Generator) -> Decisions | None:
    line = _pick(decisions.layers, rng)
    return None if line is None else replace(decisions, layers=tuple(x for x in decisions.layers if x is not line))


@_forgery("layer of another name", admissible=False)
def _forge_name(decisions: Decisions, rng: np.random.Generator) -> Decisions | None:
    line = _pick(decisions.layers, rng)
    return None if line is None else _with_layer(decisions, line.name, name=f"{line.name}_other")


@_forgery("float layer quantized by wrong scales", admissible=False)
def _forge_quantized(decisions: Decisions, rng: np.random.Generator) -> Decisions | None:
    line = _pick([each for each in decisions.layers if not each.is_quantized], rng)
    if line is None:
        return None
    scale = np.asarray(0.37, np.float32), np.asarray(0, np.int32)
    return _with_layer(
        decisions, line.name, reason="", weight=QuantSpec("int8"), weight_scale=scale[0], weight_zero_point=scale[1]
    )


@_forgery("factors of equalization", admissible=None)
def _forge_equalization(decisions: Decisions, rng: np.random.Generator) -> Decisions | None:
    line: Equalized | None = _pick(decisions.equalized, rng)
    if line is None:
        return None
    factors = np.clip(line.factors * np.float32(0.7), np.float32(1e-3), ONE)
    return _with_changed(decisions, "equalized", line, factors=factors)


@_forgery("factors of smoothing", admissible=None)
def _forge_smoothing(decisions: Decisions, rng: np.random.Generator) -> Decisions | None:
    line: Smoothed | None = _pick(decisions.smoothed, rng)
    if line is None:
        return None
    factors = np.clip(line.factors * np.float32(1.3), np.float32(1e-4), np.float32(1e4))
    return _with_changed(decisions, "smoothed", line, factors=factors)


@_forgery("smoothing of other layers", admissible=False)
def _forge_smoothed_layers(decisions: Decisions, rng: np.random.Generator) -> Decisions | None:
    line: Smoothed | None = _pick(decisions.smoothed, rng)
    if line is None:
        return None
    others = [each.name for each in decisions.layers if each.name not in line.layers]
    changed = replace(line, layers=(*line.layers[1:], _pick(others, rng)))
    return replace(decisions, smoothed=tuple(changed if each is line else each for each in decisions.smoothed))


@_forgery("smoothing of one layer of several", admissible=False)
def _forge_partial_smoothing(decisions: Decisions, rng: np.random.Generator) -> Decisions | None:
    line: Smoothed | None = _pick([each for each in decisions.smoothed if len(each.layers) > 1], rng)
    if line is None:
        return None
    changed = replace(line, layers=line.layers[1:])
    return replace(decisions, smoothed=tuple(changed if each is line else each for each in decisions.smoothed))


@_forgery("equalization given up", admissible=None)
def _forge_no_factors(decisions: Decisions, _rng: np.random.Generator) -> Decisions | None:
    if not (decisions.equalized or decisions.smoothed):
        return None
    return replace(decisions, equalized=(), smoothed=())


def _without_placement(decisions: Decisions, tensor: str) -> Decisions:
    placements = tuple(each for each in decisions.placements if each.tensor != tensor)
    groups = {each.group for each in placements if not each.source_tensor}
    return replace(decisions, placements=placements, ranges={k: v for k, v in decisions.ranges.items() if k in groups})


@_forgery("placement dropped", admissible=None)
def _forge_dropped(decisions: Decisions, rng: np.random.Generator) -> Decisions | None:
    groups = [each.group for each in decisions.placements if each.group != each.tensor]
    sources = [each.source_tensor for each in decisions.placements]
    line = _pick([each for each in decisions.placements if each.tensor not in (*groups, *sources)], rng)
    return None if line is None else _without_placement(decisions, line.tensor)


@_forgery("placement of a tensor that is not there", admissible=False)
def _forge_placement(decisions: Decisions, rng: np.random.Generator) -> Decisions | None:
    spec = QuantSpec.parse("uint8/tensor/affine")
    added = QuantizerPlacement("nowhere", spec, "nowhere")
    ranges = {**decisions.ranges, "nowhere": RangeDecision(0.5, 3)}
    return replace(decisions, placements=(*decisions.placements, added), ranges=ranges)


@_forgery("readers of a placement", admissible=None)
def _forge_readers(decisions: Decisions, rng: np.random.Generator) -> Decisions | None:
    line = _pick([each for each in decisions.placements if len(each.readers) > 1], rng)
    if line is None:
        return None
    changed = replace(line, readers=line.readers[:1])
    return replace(decisions, placements=tuple(changed if each is line else each for each in decisions.placements))


@_forgery("scaled placement with another factor", admissible=False)
def _forge_factor(decisions: Decisions, rng: np.random.Generator) -> Decisions | None:
    line = _pick([each for each in decisions.placements if each.source_tensor], rng)
    if line is None:
        return None
    changed = replace(line, factor=line.factor * 2)
    return replace(decisions, placements=tuple(changed if each is line else each for each in decisions.placements))


@_forgery("computed constant by many ulp", admissible=False)
def _forge_constant(decisions: Decisions, rng: np.random.Generator) -> Decisions | None:
    name = _pick(list(decisions.constants), rng)
    if name is None:
        return None
    values = np.array(decisions.constants[name])
    return replace(decisions, constants={**decisions.constants, name: values * np.asarray(1.001, values.dtype)})


@_forgery("computed constant by an ulp", admissible=True)
def _forge_constant_little(decisions: Decisions, rng: np.random.Generator) -> Decisions | None:
    name = _pick(list(decisions.constants), rng)
    if name is None:
        return None
    values = np.array(decisions.constants[name])
    return replace(decisions, constants={**decisions.constants, name: np.nextafter(values, np.inf, dtype=values.dtype)})


@_forgery("constant that is not computed", admissible=False)
def _forge_unknown_constant(decisions: Decisions, _rng: np.random.Generator) -> Decisions | None:
    return replace(decisions, constants={**decisions.constants, "nowhere": np.float32([1.0])})


@_forgery("digest of another source", admissible=False)
def _forge_source(decisions: Decisions, _rng: np.random.Generator) -> Decisions | None:
    return replace(decisions, source="0" * 32)


@_forgery("no digest of the source", admissible=True)
def _forge_no_source(decisions: Decisions, _rng: np.random.Generator) -> Decisions | None:
    return replace(decisions, source="")


@_forgery("opset", admissible=None)
def _forge_opset(decisions: Decisions, rng: np.random.Generator) -> Decisions | None:
    return replace(decisions, opset=decisions.opset + int(rng.choice([-1, 1, 2])))


@_forgery("target", admissible=None)
def _forge_target(decisions: Decisions, _rng: np.random.Generator) -> Decisions | None:
    return replace(decisions, target="openvino" if decisions.target != "openvino" else "onnxruntime")


@_forgery("bias with a forged range", admissible=None)
def _forge_range_of_bias(decisions: Decisions, rng: np.random.Generator) -> Decisions | None:
    """Forge a wrong bias together with an observed range wide enough to allow it."""
    line = _quantized(decisions, rng, lambda each: each.bias is not None)
    if line is None:
        return None
    offset = np.int32(1 << 24) if line.bias.dtype == np.int32 else np.float32(50)
    wide = (-1e9, 1e9)
    ranges = {name: replace(each, observed_range=wide) for name, each in decisions.ranges.items()}
    given = wide if line.bias.dtype == np.float32 else None
    return _with_layer(replace(decisions, ranges=ranges), line.name, bias=line.bias + offset, input_range=given)


@_forgery("spec of a weight", admissible=None)
def _forge_weight_spec(decisions: Decisions, rng: np.random.Generator) -> Decisions | None:
    line = _quantized(decisions, rng, lambda each: each.weight.bits >= 8 and each.weight.symmetric)
    if line is None:
        return None
    spec = line.weight.replace(qmin=-1, qmax=1) if rng.random() < 0.5 else line.weight.replace(rounding="floor")
    factor = np.float32(127) if spec.qmax == 1 else ONE
    return _with_layer(decisions, line.name, weight=spec, weight_scale=line.weight_scale * factor)


@_forgery("spec of an activation that files cannot hold", admissible=False)
def _forge_rounding(decisions: Decisions, rng: np.random.Generator) -> Decisions | None:
    if not decisions.placements:
        return None
    rounding = str(rng.choice(["floor", "half_away", "stochastic"]))
    placements = tuple(replace(each, spec=each.spec.replace(rounding=rounding)) for each in decisions.placements)
    return replace(decisions, placements=placements)


@_forgery("smoothing folded or not", admissible=False)
def _forge_folded(decisions: Decisions, rng: np.random.Generator) -> Decisions | None:
    line: Smoothed | None = _pick(decisions.smoothed, rng)
    if line is None:
        return None
    return _with_changed(decisions, "smoothed", line, folded=not line.folded)


@_forgery("equalization of another tensor", admissible=False)
def _forge_equalized_tensor(decisions: Decisions, rng: np.random.Generator) -> Decisions | None:
    names = [each.name for each in decisions.layers]
    tensor = _pick([each.tensor for each in decisions.placements], rng)
    if tensor is None or len(names) < 2:
        return None
    factors = np.full(8, 0.5, np.float32)
    added = Equalized(tensor, _pick(names, rng), (_pick(names, rng),), factors, 1.0, 1.0)
    return replace(decisions, equalized=(*(each for each in decisions.equalized if each.tensor != tensor), added))
