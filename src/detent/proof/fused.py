"""Fused: where the codes of a file's quantizers are in the graph that ONNX Runtime makes of it.

Many keep their name. Convolutions with their channels last give theirs under the name of the convolution, with their
axes in another order; they are found through the node they were: ``conv1``, now ``conv1_token_3``.
"""

import re
from typing import NamedTuple

from onnx import ModelProto, NodeProto

from detent.onnx_model import Graph
from detent.onnx_model.graph import attribute_of
from detent.proof.artifact import Artifact

__all__ = ["Found", "find_codes"]

_SUFFIX = re.compile(r"(_token_\d+|_nhwc)+$")
_PASSING = ("Relu", "Clip")


class Found(NamedTuple):
    """A tensor of codes in an optimised graph.

    Attributes:
        tensor: its name.
        channels_last: whether its channels are its last axis.

    >>> Found("conv1", channels_last=True).tensor
    'conv1'
    """

    tensor: str
    channels_last: bool


def find_codes(artifact: Artifact, optimised: ModelProto) -> dict[str, Found]:
    """The codes of QuantizeLinear nodes by node, as far as they are still there.

    >>> from onnx import parser
    >>> made = Artifact(parser.parse_model('''<ir_version: 10, opset_import: ["" : 21]>
    ...     g (float[N] x) => (float[N] y) <float s = {0.5}, uint8 z = {3}>
    ...     { q = QuantizeLinear(x, s, z) y = DequantizeLinear(q, s, z) }'''))
    >>> find_codes(made, made.model)
    {'QuantizeLinear_q': Found(tensor='q', channels_last=False)}
    """
    written = {name for node in optimised.graph.node for name in node.output}
    last = {
        _SUFFIX.sub("", node.name): node.output[0]
        for node in optimised.graph.node
        if attribute_of(node, "channels_last", 0) and node.name
    }
    found = {}
    for site in artifact.sites:
        if site.codes in written:
            found[site.node] = Found(site.codes, channels_last=False)
            continue
        origin = _origin(artifact.graph, site.x)
        if origin is not None and origin.name in last:
            found[site.node] = Found(last[origin.name], channels_last=True)
    return found


def _origin(graph: Graph, name: str) -> NodeProto | None:
    """The node whose result is quantized, past what is fused into it."""
    node = graph.producer(name)
    while node is not None and node.op_type in _PASSING:
        node = graph.producer(node.input[0])
    return node
