"""Mismatches between an expected model and a file: nodes, attributes, tensors, fields.

Everything is compared except texts that no runtime reads: doc strings, metadata of other tools and the producer's name.
Constants are compared by value, regardless of how they are stored.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from google.protobuf.message import Message
from numpy.typing import NDArray
from onnx import AttributeProto, GraphProto, ModelProto, NodeProto, TensorProto, ValueInfoProto, helper

from detent.checks import first_index
from detent.errors import FileFormatError
from detent.onnx_model.files import without_initializers
from detent.onnx_model.graph import array_of, node_name
from detent.onnx_model.provenance import KEY, fields_of
from detent.verification.verify_report import Difference, element

__all__ = ["compared_constants", "differences"]

Array = NDArray[Any]
MAX_CHARS_SHOWN = 60  # longer values are truncated in messages


def differences(expected: ModelProto, got: ModelProto) -> Iterator[Difference]:
    """Yield the mismatches between an expected and a given model, most important first."""
    yield from _versions(expected, got)
    yield from _values("input", expected.graph.input, got.graph.input)
    yield from _values("output", expected.graph.output, got.graph.output)
    yield from _nodes(expected.graph.node, got.graph.node, "")
    yield from _constants(expected.graph.initializer, got.graph.initializer)
    yield from _rest(expected, got)


def compared_constants(model: ModelProto) -> int:
    """Count the elements of all constants."""
    return sum(int(np.prod(tensor.dims)) for tensor in model.graph.initializer)


def _difference(node: str, tensor: str, cause: str, expected: object, got: object) -> Difference:
    return Difference.of(node, tensor, cause, _text(expected), _text(got))


def _text(value: object) -> str | float | int | None:
    if value is None or isinstance(value, int | float):
        return value
    text = str(value)
    return text if len(text) <= MAX_CHARS_SHOWN else f"{text[:MAX_CHARS_SHOWN]}..."


def _versions(expected: ModelProto, got: ModelProto) -> Iterator[Difference]:
    if expected.ir_version != got.ir_version:
        yield _difference("the model", "ir_version", "wrong version", expected.ir_version, got.ir_version)
    opsets = [sorted((each.domain, each.version) for each in model.opset_import) for model in (expected, got)]
    if opsets[0] != opsets[1]:
        yield _difference("the model", "opset_import", "wrong opset", opsets[0], opsets[1])


def _values(
    role: str, expected: Sequence[ValueInfoProto], got: Sequence[ValueInfoProto], where: str = ""
) -> Iterator[Difference]:
    names = [[value.name for value in values] for values in (expected, got)]
    if names[0] != names[1]:
        yield _difference(where or "the model", f"{role}s", f"wrong {role}s", names[0], names[1])
        return
    for old, new in zip(expected, got, strict=True):
        if _bytes(old.type) != _bytes(new.type):
            yield _difference(f"{where}{role} {old.name}", "type", "wrong type or shape", _type(old), _type(new))


def _type(value: ValueInfoProto) -> str:
    kind = value.type.tensor_type
    sizes = [size.dim_param or (size.dim_value if size.HasField("dim_value") else "?") for size in kind.shape.dim]
    return f"{TensorProto.DataType.Name(kind.elem_type)}[{', '.join(map(str, sizes))}]"


def _nodes(expected: Sequence[NodeProto], got: Sequence[NodeProto], where: str) -> Iterator[Difference]:
    if len(expected) == len(got) and all(_same_node(*pair) for pair in zip(expected, got, strict=True)):
        return
    ours, theirs = ({_key(node): node for node in nodes} for nodes in (expected, got))
    count = 0
    for node in expected:
        other = theirs.get(_key(node))
        if other is None:
            yield _difference(f"{where}{node_name(node)}", "node", "missing", node.op_type, None)
        elif not _same_node(node, other):
            yield from _node(node, other, where)
        else:
            continue
        count += 1
    seen: set[tuple[str, ...]] = set()
    for node in got:
        if _key(node) not in ours or _key(node) in seen:
            yield _difference(f"{where}{node_name(node)}", "node", "added", None, node.op_type)
            count += 1
        seen.add(_key(node))
    if not count:
        at = next(i for i, (a, b) in enumerate(zip(expected, got, strict=True)) if not _same_node(a, b))
        yield _difference(
            f"{where}node {at}", "order", "wrong order of nodes", node_name(expected[at]), node_name(got[at])
        )


def _key(node: NodeProto) -> tuple[str, ...]:
    """Return the identity of a node: its name, or its outputs if it has no name."""
    return (node.name,) if node.name else ("", *node.output)


def _same_node(a: NodeProto, b: NodeProto) -> bool:
    return _bytes(a) == _bytes(b) or not any(True for _ in _node(a, b, ""))


def _node(expected: NodeProto, got: NodeProto, where: str) -> Iterator[Difference]:
    name = f"{where}{node_name(expected)}"
    for field in ("op_type", "domain", "name", "overload"):
        if getattr(expected, field) != getattr(got, field):
            yield _difference(name, field, "changed", getattr(expected, field), getattr(got, field))
    for field in ("input", "output"):
        old, new = list(getattr(expected, field)), list(getattr(got, field))
        if old != new:
            at = next(
                (i for i, pair in enumerate(zip(old, new, strict=False)) if pair[0] != pair[1]), min(len(old), len(new))
            )
            names = [values[at] if at < len(values) else None for values in (old, new)]
            yield _difference(name, f"{field} {at}", f"wrong {field}", *names)
    yield from _attributes(expected, got, name)


def _attributes(expected: NodeProto, got: NodeProto, name: str) -> Iterator[Difference]:
    ours, theirs = ({each.name: each for each in node.attribute} for node in (expected, got))
    if len(got.attribute) != len(theirs):
        yield _difference(name, "attribute", "duplicate attribute", len(ours), len(got.attribute))
    for key in [*ours, *(key for key in theirs if key not in ours)]:
        old, new = ours.get(key), theirs.get(key)
        if old is not None and new is not None and old.type == new.type == AttributeProto.GRAPH:
            yield from _subgraph(old.g, new.g, f"{name}/{key}/")
        elif _content(old) != _content(new):
            yield _difference(name, f"attribute {key}", "changed", _shown(old), _shown(new))


def _subgraph(expected: GraphProto, got: GraphProto, where: str) -> Iterator[Difference]:
    mismatches = [
        *_values("input", expected.input, got.input, where),
        *_values("output", expected.output, got.output, where),
        *_nodes(expected.node, got.node, where),
        *_constants(expected.initializer, got.initializer, where),
    ]
    yield from mismatches
    fields = ("value_info", "sparse_initializer", "quantization_annotation")
    for field in fields if not mismatches else ():
        old, new = ([_bytes(each) for each in getattr(graph, field)] for graph in (expected, got))
        if old != new:
            yield _difference(where, field, "changed", f"{len(old)} entries", f"{len(new)} entries")


def _content(attribute: AttributeProto | None) -> bytes:
    if attribute is None:
        return b"missing"
    if attribute.type == AttributeProto.TENSOR:
        return b"tensor" + _facts(attribute.t) + array_of(attribute.t).tobytes()
    return _bytes(attribute)


def _shown(attribute: AttributeProto | None) -> Any:  # noqa: ANN401 - a value of any type
    if attribute is None:
        return None
    try:
        value = helper.get_attribute_value(attribute)
    except ValueError:
        return "an attribute without a type"
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else value


def _constants(expected: Sequence[TensorProto], got: Sequence[TensorProto], where: str = "") -> Iterator[Difference]:
    theirs: dict[str, TensorProto] = {}
    for tensor in got:
        if tensor.name in theirs:
            yield _difference(f"{where}constant {tensor.name}", tensor.name, "duplicate constant", 1, 2)
        theirs[tensor.name] = tensor
    for tensor in expected:
        other = theirs.pop(tensor.name, None)
        if other is None:
            yield _difference(f"{where}constant {tensor.name}", tensor.name, "missing", list(tensor.dims), None)
        else:
            yield from _constant(tensor, other, where)
    for name, tensor in theirs.items():
        yield _difference(f"{where}constant {name}", name, "added", None, list(tensor.dims))


def _facts(tensor: TensorProto) -> bytes:
    return repr((tensor.data_type, list(tensor.dims))).encode()


def _constant(expected: TensorProto, got: TensorProto, where: str) -> Iterator[Difference]:
    name = f"{where}constant {expected.name}"
    if _facts(expected) != _facts(got):
        types = [f"{TensorProto.DataType.Name(each.data_type)}{list(each.dims)}" for each in (expected, got)]
        yield _difference(name, expected.name, "wrong type or shape", *types)
        return
    if expected.HasField("raw_data") and got.HasField("raw_data") and expected.raw_data == got.raw_data:
        return
    old, new = array_of(expected), array_of(got)
    wrong = _differing(old, new)
    if wrong.any():
        index = first_index(np.atleast_1d(wrong))[: old.ndim]
        count = int(np.count_nonzero(wrong))
        cause = f"{count} of {wrong.size} values changed" if wrong.size > 1 else "changed"
        yield Difference.of(name, expected.name, cause, element(old[index]), element(new[index]), index)


def _differing(a: Array, b: Array) -> Array:
    if a.dtype == object:
        return np.asarray(a != b)
    size = a.dtype.itemsize
    parts = [np.ascontiguousarray(each).reshape(*each.shape, 1).view(np.uint8) for each in (a, b)]
    if size == 1:
        return np.asarray(parts[0] != parts[1]).reshape(a.shape)
    return np.asarray((parts[0] != parts[1]).any(axis=-1))


def _rest(expected: ModelProto, got: ModelProto) -> Iterator[Difference]:
    """Compare the remaining fields of two models, and detent's entry in their metadata."""
    models = [without_initializers(model) for model in (expected, got)]
    graphs = [model.graph for model in models]
    for field in ("value_info", "sparse_initializer", "quantization_annotation"):
        old, new = ([_bytes(each) for each in getattr(graph, field)] for graph in graphs)
        if old != new:
            yield _difference("the model", field, "changed", f"{len(old)} entries", f"{len(new)} entries")
    if graphs[0].name != graphs[1].name:
        yield _difference("the model", "graph name", "changed", graphs[0].name, graphs[1].name)
    for field in ("functions", "training_info", "configuration"):
        old, new = ([_bytes(each) for each in getattr(model, field, ())] for model in models)
        if old != new:
            yield _difference("the model", field, "changed", f"{len(old)} entries", f"{len(new)} entries")
    texts = [next((each.value for each in model.metadata_props if each.key == KEY), "{}") for model in models]
    if texts[0] == texts[1]:
        return
    try:
        entries = [fields_of(text) for text in texts]
    except FileFormatError:
        yield _difference("the model", f"metadata {KEY!r}", "changed", *texts)
        return
    for field in sorted(entries[0].keys() | entries[1].keys()):
        parts = [entry.get(field) for entry in entries]
        if parts[0] != parts[1]:
            yield _difference("the model", f"metadata {KEY!r}, {field}", "changed", *_first_unequal(*parts))


def _first_unequal(old: Any, new: Any) -> tuple[object, object]:  # noqa: ANN401 - JSON
    """Return the first pair of entries that differ between two JSON values."""
    if isinstance(old, dict) and isinstance(new, dict):
        for key in sorted(old.keys() | new.keys()):
            if old.get(key) != new.get(key):
                return _first_unequal(old.get(key), new.get(key))
    if isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        return next((_first_unequal(*pair) for pair in zip(old, new, strict=True) if pair[0] != pair[1]), (old, new))
    return old, new


def _bytes(message: Message) -> bytes:
    return bytes(message.SerializeToString(deterministic=True))
