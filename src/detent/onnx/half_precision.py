"""Float16 models: ``widen`` turns them into float32 models, and ``store_float16`` stores float parts in float16 again.

A widened model still has inputs and outputs of float16.

Weights and constants become float32, which is exact. Nodes then compute in float32, so results differ from those of
the float16 model by the rounding of its activations. A Cast after each float16 input and before each float16 output
keeps the interface of the model.

A quantized file needs this because the integer kernels of ONNX Runtime return float32, and because ONNX Runtime has few
float16 kernels for CPUs: it runs most nodes of a float16 model in float32, too. bfloat16 is not supported.

``store_float16`` is for the size of the file. A constant becomes float16 if every value is exact in it, and a Cast
turns it into float32 again. ONNX Runtime runs such Casts once, when it loads the model. So no output changes, and
inference takes no more time.
"""

from collections.abc import Iterable, Set
from math import prod

import numpy as np
from onnx import AttributeProto, GraphProto, ModelProto, NodeProto, TensorProto, ValueInfoProto, helper

from detent.onnx_model.graph import Graph, array_of, attribute_of, make_tensor, rename_tensors, subgraphs

__all__ = ["is_float16", "store_float16", "widen"]

MIN_ELEMENTS = 64  # of a constant; for fewer, the Cast node takes as many bytes as float16 saves
HALF, FLOAT = TensorProto.FLOAT16, TensorProto.FLOAT
# Attributes that hold the element type of a node's output.
_TYPE_ATTRIBUTES = ("to", "dtype", "output_datatype", "softmax_precision")


def is_float16(model: ModelProto) -> bool:
    """Return whether a model stores or computes float16 tensors, in its graph or a subgraph."""
    return _has_halves(model.graph)


def _has_halves(graph: GraphProto) -> bool:
    if any(tensor.data_type == HALF for tensor in graph.initializer):
        return True
    if any(_kind(value) == HALF for value in (*graph.input, *graph.output)):
        return True
    return any(_writes_halves(node) or any(map(_has_halves, subgraphs(node))) for node in graph.node)


def _writes_halves(node: NodeProto) -> bool:
    return any(_is_half(attribute) for attribute in node.attribute)


def _is_half(attribute: AttributeProto) -> bool:
    if attribute.type == AttributeProto.TENSOR:
        return attribute.t.data_type == HALF
    return attribute.type == AttributeProto.INT and attribute.name in _TYPE_ATTRIBUTES and attribute.i == HALF


def widen(model: ModelProto) -> ModelProto:
    """Change a float16 model to float32 in place, and return it; inputs and outputs keep their types.

    >>> from onnx import parser
    >>> model = widen(parser.parse_model('''<ir_version: 8, opset_import: ["" : 17]>
    ...     g (float16[1] x) => (float16[1] y) { c = Constant<value = float16 {2}>() y = Mul(x, c) }'''))
    >>> [node.op_type for node in model.graph.node], model.graph.output[0].type.tensor_type.elem_type == HALF
    (['Constant', 'Cast', 'Mul', 'Cast'], True)
    """
    graph = Graph(model)
    halves = {value.name for value in (*model.graph.input, *model.graph.output) if _kind(value) == HALF}
    inputs = [name for name in graph.inputs if name in halves and not _is_cast_only(graph, name)]
    border = {name for name in graph.outputs if name in halves and _is_border(graph, name)}
    outputs = [name for name in graph.outputs if name in halves - border]
    interface = {*graph.inputs, *graph.outputs}
    _widen_graph(model.graph, interface, border)
    graph.refresh()
    _add_casts(graph, inputs, outputs)
    return model


def _is_cast_only(graph: Graph, name: str) -> bool:
    """Return whether all nodes that read a float16 input cast it to float32."""
    return all(node.op_type == "Cast" and attribute_of(node, "to") == FLOAT for node in graph.consumers(name))


def _is_border(graph: Graph, name: str) -> bool:
    """Return whether a float16 output comes from a Cast, and only the caller of the model reads it."""
    producer = graph.producer(name)
    return producer is not None and producer.op_type == "Cast" and not graph.consumers(name)


def _widen_graph(graph: GraphProto, interface: Set[str] = frozenset(), border: Set[str] = frozenset()) -> None:
    """Widen a graph; keep the types of tensors in ``interface``, and the Casts that compute tensors in ``border``."""
    for tensor in graph.initializer:
        _widen_tensor(tensor)
    for value in (*graph.value_info, *graph.input, *graph.output):
        if _kind(value) == HALF and value.name not in interface:
            value.type.tensor_type.elem_type = FLOAT
    for node in graph.node:
        if not border.isdisjoint(node.output):
            continue
        for attribute in node.attribute:
            if attribute.type == AttributeProto.TENSOR:
                _widen_tensor(attribute.t)
            elif _is_half(attribute):
                attribute.i = FLOAT
        for body in subgraphs(node):
            _widen_graph(body)


def _widen_tensor(tensor: TensorProto) -> None:
    if tensor.data_type == HALF:
        tensor.CopyFrom(make_tensor(tensor.name, array_of(tensor).astype(np.float32)))


def _add_casts(graph: Graph, inputs: Iterable[str], outputs: Iterable[str]) -> None:
    """Insert Casts from float16 to float32 after ``inputs``, and from float32 to float16 before ``outputs``."""
    for name in inputs:
        wide = graph.fresh(f"{name}_float32")
        rename_tensors(graph.consumers(name), {name: wide})
        graph.insert([helper.make_node("Cast", [name], [wide], name=graph.fresh(f"{wide}_cast"), to=FLOAT)])
    graph.finish()
    for name in outputs:
        if name in graph.inputs:  # the model returns its input
            continue
        wide = graph.fresh(f"{name}_float32")
        rename_tensors(graph.consumers(name), {name: wide})
        if name in graph.constants:
            graph.constants[wide] = make_tensor(wide, graph.array(name))
            del graph.constants[name]
        else:
            graph.rename(name, wide)
        graph.insert([helper.make_node("Cast", [wide], [name], name=graph.fresh(f"{wide}_cast"), to=HALF)])
    graph.finish()


def store_float16(graph: Graph, names: Iterable[str]) -> None:
    """Store constants of a graph in float16, followed by a Cast, if that is exact; ``names`` are the candidates."""
    for name in names:
        tensor = graph.constants.get(name)
        if tensor is None or tensor.data_type != FLOAT or prod(tensor.dims) < MIN_ELEMENTS:
            continue
        values = graph.array(name)
        with np.errstate(over="ignore", invalid="ignore"):
            halves = values.astype(np.float16)
        if halves.astype(np.float32).tobytes() != values.tobytes():
            continue
        del graph.constants[name]
        stored = graph.add_constant(f"{name}_float16", halves)
        graph.insert([helper.make_node("Cast", [stored], [name], name=graph.fresh(f"{name}_cast"), to=FLOAT)])


def _kind(value: ValueInfoProto) -> int:
    return value.type.tensor_type.elem_type
