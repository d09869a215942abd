"""Tidying: an exported model without what only its exporter needs, and with what runtimes and readers expect."""

import re
from collections.abc import Iterator

from onnx import GraphProto, ModelProto, ValueInfoProto, inliner

from detent.onnx_model.graph import subgraphs
from detent.torch.marking import DOMAIN

__all__ = ["clean", "settle"]

IR_VERSION = 10
BATCH = "batch"
_TORCHS_OWN = re.compile(r"s\d+")  # the name of a size that nobody has named


def clean(model: ModelProto) -> ModelProto:
    """The model without functions, and without notes, which hold paths of source files.

    >>> from onnx import parser
    >>> made = parser.parse_model(
    ...     '<ir_version: 10, opset_import: ["" : 21]> g (float[1] x) => (float[1] y) { y = Abs(x) }')
    >>> made.graph.node[0].doc_string = "line 3 of /home/me/model.py"
    >>> clean(made).graph.node[0].doc_string
    ''
    """
    if model.functions:
        model = inliner.inline_local_functions(model)
    del model.metadata_props[:]
    for graph in _graphs(model.graph):
        for part in (graph, *graph.node, *graph.input, *graph.output, *graph.value_info, *graph.initializer):
            del part.metadata_props[:]
            part.ClearField("doc_string")
    return model


def _graphs(graph: GraphProto) -> Iterator[GraphProto]:
    yield graph
    for node in graph.node:
        for body in subgraphs(node):
            yield from _graphs(body)


def settle(model: ModelProto, version: str) -> ModelProto:
    """The model with versions that runtimes take, a name for axis 0, and no shapes of tensors that are gone.

    Args:
        model: is changed in place.
        version: detent's.

    >>> from onnx import parser
    >>> made = parser.parse_model('''<ir_version: 12, opset_import: ["" : 21, "detent" : 1]>
    ...     g (float[s77] x) => (float[s77] y) { y = Abs(x) }''')
    >>> settle(made, "1.0").ir_version, len(made.opset_import), _sizes(made.graph.output[0])
    (10, 1, ['batch'])
    """
    graph = model.graph
    kept = [(entry.domain, entry.version) for entry in model.opset_import if entry.domain != DOMAIN]
    del model.opset_import[:], graph.value_info[:]
    for domain, number in kept:
        model.opset_import.add(domain=domain, version=number)
    model.ir_version = min(model.ir_version, IR_VERSION)
    model.producer_name, model.producer_version = "detent", version
    symbols = {size for value in graph.input for size in _sizes(value)[:1] if _TORCHS_OWN.fullmatch(size)}
    if len(symbols) == 1:
        word = re.compile(rf"\b{re.escape(symbols.pop())}\b")
        for value in (*graph.input, *graph.output):
            for size in value.type.tensor_type.shape.dim:
                if size.dim_param:
                    size.dim_param = word.sub(BATCH, size.dim_param)
    return model


def _sizes(value: ValueInfoProto) -> list[str]:
    """The names of the sizes that vary, "" for those that do not."""
    return [size.dim_param for size in value.type.tensor_type.shape.dim]
