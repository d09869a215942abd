"""Anatomy: the layers of a quantized file, each with its weight and the quantizer of its input, whoever wrote it."""

from dataclasses import dataclass
from typing import Literal

from onnx import NodeProto

from detent.onnx_model import Provenance
from detent.onnx_model.layers import layers_of
from detent.onnx_model.sessions import kernels_of
from detent.verification.artifact import Artifact, FileWeight, Site, is_bias

__all__ = ["FoundLayer", "Origin", "find_layers", "kernels_by_layer", "origin_of", "own_clip"]

Origin = Literal["onnx", "torch", "other"]

# What moves numbers about and leaves them as they are; pools pick some of them.
_PASSING = ("Flatten", "Identity", "MaxPool", "Reshape", "Slice", "Squeeze", "Transpose", "Unsqueeze")
ALREADY = "its weight is quantized already"
SUFFIX = ".weight"


@dataclass(frozen=True, eq=False)
class FoundLayer:
    """A layer of the file.

    Attributes:
        name: of its module or node.
        node: its node.
        weight: codes of its weight, None where that is float or there is none.
        site: the quantizer of what comes in.
        float_weight: the name of a weight in float, "" otherwise.
        reason: why it is float, as far as the file tells.

    >>> FoundLayer("fc", NodeProto(op_type="MatMul")).is_quantized
    False
    """

    name: str
    node: NodeProto
    weight: FileWeight | None = None
    site: Site | None = None
    float_weight: str = ""
    reason: str = ""

    @property
    def is_quantized(self) -> bool:
        """Whether its weight is, or the input of a product of two activations."""
        return self.weight is not None or (self.site is not None and not self.float_weight)

    @property
    def output(self) -> str:
        """The tensor that it makes."""
        return self.node.output[0] if self.node.output else ""


def origin_of(artifact: Artifact) -> Origin:
    """What the file was made from: an ONNX file, a PyTorch module, or something that it does not tell.

    >>> from onnx import parser
    >>> made = parser.parse_model('''<ir_version: 10, opset_import: ["" : 21]>
    ...     g (float[1,2] x) => (float[1,1] y) <float s = {0.5}, int8[2,1] w = {3, 4}, int8 z = {0}>
    ...     { v = DequantizeLinear(w, s, z) y = MatMul(x, v) }''')
    >>> made.graph.node[1].name = "fc.weight"
    >>> found = [origin_of(Artifact(made))]
    >>> for name in ("fc.weight", "0.weight"):  # the node, or a parameter of a module
    ...     Provenance({"w": name}).write(made)
    ...     found.append(origin_of(Artifact(made)))
    >>> found
    ['other', 'onnx', 'torch']
    """
    about = artifact.provenance
    if about is None:
        return "other"
    if about.data or getattr(about, "source", ""):  # no export of a module knows them
        return "onnx"
    nodes = {artifact.graph.node_name(node) for node in artifact.graph.nodes}
    if not nodes.isdisjoint(about.weights.values()):  # a node may be called anything, fc.weight as well
        return "onnx"
    names = (*about.weights.values(), *about.activations.values())
    return "torch" if any(name.endswith((SUFFIX, "_quantizer")) for name in names) else "onnx"


def find_layers(artifact: Artifact) -> list[FoundLayer]:
    """All layers, in the order of the graph.

    >>> from onnx import parser
    >>> [layer] = find_layers(Artifact(parser.parse_model('''<ir_version: 10, opset_import: ["" : 21]>
    ...     g (float[1,2] x) => (float[1,1] y) <float s = {0.5}, int8[2,1] w = {3, 4}, int8 z = {0}>
    ...     { v = DequantizeLinear(w, s, z) [fc] y = MatMul(x, v) }''')))
    >>> layer.name, layer.weight.name, layer.site, layer.output
    ('fc', 'w', None, 'y')
    """
    return _Finder(artifact).layers()


class _Finder:
    def __init__(self, artifact: Artifact) -> None:
        self.artifact, self.graph = artifact, artifact.graph
        weights = [each for each in artifact.weights if not is_bias(each)]
        self.by_output = {each.node.output[0]: each for each in weights}
        self.by_codes = {each.name: each for each in weights}
        self.sites = {site.codes: site for site in artifact.sites}
        provenance = artifact.provenance
        self.names = {} if provenance is None else provenance.weights
        self.suffix = SUFFIX if origin_of(artifact) == "torch" else ""
        self.taken: set[str] = set()

    def layers(self) -> list[FoundLayer]:
        listed = {id(each.node): each for each in layers_of(self.graph)}
        inner = [each for each in listed.values() if not any(each.node is node for node in self.graph.nodes)]
        found = []
        for node in self.graph.nodes:
            table = self._table(node)
            if id(node) not in listed and table is None:
                continue
            line = listed.get(id(node))
            weight = table or self._weight(node)
            site = None if node.op_type == "Gather" else self._site(node, weight)
            plain = line.weight if line is not None and weight is None else ""
            reason = "" if line is None or line.reason == ALREADY else line.reason
            found.append(FoundLayer(self._name(node, weight), node, weight, site, plain, reason))
        found += [FoundLayer(each.name, each.node, reason=each.reason) for each in inner]
        return found

    def _name(self, node: NodeProto, weight: FileWeight | None) -> str:
        own = self.graph.node_name(node)
        name = own if weight is None else self.names.get(weight.name, own).removesuffix(self.suffix)
        if not name or name in self.taken:
            name = own
        count = 1
        while name in self.taken:  # files may have two nodes of one name
            count += 1
            name = f"{own}#{count}"
        self.taken.add(name)
        return name

    def _table(self, node: NodeProto) -> FileWeight | None:
        """Codes of which rows are looked up, before or after they become numbers."""
        if node.op_type != "Gather":
            return None
        return self.by_codes.get(node.input[0], self.by_output.get(node.input[0]))

    def _weight(self, node: NodeProto) -> FileWeight | None:
        return next((found for name in node.input[:2] if (found := self.by_output.get(self._origin(name)))), None)

    def _site(self, node: NodeProto, weight: FileWeight | None) -> Site | None:
        for name in node.input[:2]:
            origin = self._origin(name)
            made = self.graph.producer(origin)
            if made is not None and made.op_type == "DequantizeLinear" and self.by_output.get(origin) is not weight:
                return self.sites.get(made.input[0])
            if made is not None and made.op_type == "DequantizeLinear" and weight is None:
                return self.sites.get(made.input[0])
        return None

    def _origin(self, name: str) -> str:
        """The tensor before all that only moves numbers about."""
        node = self.graph.producer(name)
        while node is not None and node.op_type in _PASSING:
            name = node.input[0]
            node = self.graph.producer(name)
        return name


def kernels_by_layer(artifact: Artifact, layers: list[FoundLayer]) -> dict[str, str]:
    """The operator that computes each layer in ONNX Runtime on this machine; the metadata in memory are changed.

    >>> from onnx import parser
    >>> artifact = Artifact(parser.parse_model('''<ir_version: 10, opset_import: ["" : 21]>
    ...     g (float[1,2] x) => (float[1,1] y) <float s = {0.5}, int8[2,1] w = {3, 4}, int8 z = {0}>
    ...     { v = DequantizeLinear(w, s, z) [fc] y = MatMul(x, v) }'''))
    >>> kernels_by_layer(artifact, find_layers(artifact)) in ({'fc': 'MatMul'}, {'fc': 'MatMulNBits'})
    True
    """
    nodes = {each.weight.name: artifact.graph.node_name(each.node) for each in layers if each.weight is not None}
    # Kernels are found by the names in the metadata, which other programs do not write, and PyTorch's are modules.
    Provenance(weights=nodes).write(artifact.model)
    found = kernels_of(artifact.model)
    return {
        each.name: found[artifact.graph.node_name(each.node)]
        for each in layers
        if artifact.graph.node_name(each.node) in found
    }


def own_clip(artifact: Artifact, site: Site) -> bool:
    """Whether the Clip before a quantizer is part of it: it has fewer codes than its type then.

    >>> from onnx import parser
    >>> artifact = Artifact(parser.parse_model('''<ir_version: 10, opset_import: ["" : 21]>
    ...     g (float[N] x) => (float[N] y) <float s = {0.5}, uint8 z = {3}, float a = {0}, float b = {2}>
    ...     { t = Clip(x, a, b) q = QuantizeLinear(t, s, z) y = DequantizeLinear(q, s, z) }'''))
    >>> own_clip(artifact, artifact.sites[0])
    False
    """
    return artifact.provenance is not None and site.unclipped != site.x and "_clipped" in site.x
