"""Layers of a quantized file: each with the codes of its weight and the QuantizeLinear node of its input.

The file may come from any tool. Layers are nodes with weights, embedding lookups in quantized tables, and
activation-activation matmuls. Layer names come from the metadata if detent wrote the file, otherwise from the nodes.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from onnx import NodeProto

from detent.onnx_model.graph import DEQUANTIZE, MOVING, node_name, trace_back
from detent.onnx_model.layers import QUANTIZED_ALREADY, RECURRENT, TWO_ACTIVATIONS, all_nodes, layers_of
from detent.onnx_model.qdq_reader import QuantizedGraph, QuantizeNode, WeightCodes
from detent.onnx_model.sessions import kernels_of

__all__ = ["FileLayer", "Origin", "find_layers", "kernels_by_layer", "origin_of"]

Origin = Literal["onnx", "torch", "other"]

_PASSING = (*MOVING, "Identity", "MaxPool")  # operators that only move or select values
SUFFIX = ".weight"  # suffix of weight names in PyTorch


@dataclass(frozen=True, eq=False)
class FileLayer:
    """A layer of a quantized file."""

    name: str
    node: NodeProto
    weight: WeightCodes | None = None
    quantizer: QuantizeNode | None = None  # QuantizeLinear node of the layer's input
    float_weight: str = ""
    reason: str = ""  # why the layer is in float, if known
    result: str = ""  # float output of an integer matmul; "" for all other layers

    @property
    def is_dynamic(self) -> bool:
        """Whether the layer's input is quantized dynamically."""
        return self.weight is not None and self.weight.form == "integer"

    @property
    def is_quantized(self) -> bool:
        """Whether the layer's weight is quantized; for an activation-activation matmul, whether its input is."""
        return self.weight is not None or (self.quantizer is not None and not self.float_weight)

    @property
    def output(self) -> str:
        """Name of the layer's output tensor, or "" if there is no output."""
        return self.result or (self.node.output[0] if self.node.output else "")


def origin_of(artifact: QuantizedGraph) -> Origin:
    """Detect whether detent made the file from an ONNX model or from a PyTorch module, or another tool made it."""
    provenance = artifact.provenance
    if provenance is None:
        return "other"
    if provenance.data or provenance.source:  # qt.export_onnx does not write these
        return "onnx"
    nodes = {node_name(node) for node in artifact.graph.nodes}
    if not nodes.isdisjoint(provenance.weights.values()):  # qo.quantize records node names, which may end in .weight
        return "onnx"
    names = (*provenance.weights.values(), *provenance.activations.values())
    return "torch" if any(name.endswith((SUFFIX, "_quantizer")) for name in names) else "onnx"


def find_layers(artifact: QuantizedGraph) -> list[FileLayer]:
    """Return all layers, in the order of the graph."""
    return _Finder(artifact).layers()


class _Finder:
    def __init__(self, artifact: QuantizedGraph) -> None:
        self.graph = artifact.graph
        weights = [each for each in artifact.weights if not each.is_bias]
        self.by_output = {each.node.output[0]: each for each in weights if each.form != "integer"}
        self.by_node = {id(each.node): each for each in weights if each.form == "integer"}
        self.by_name = {each.name: each for each in weights}
        self.quantizers = {each.codes: each for each in artifact.quantize_nodes}
        provenance = artifact.provenance
        self.names = {} if provenance is None else provenance.weights
        self.suffix = SUFFIX if origin_of(artifact) == "torch" else ""
        self.taken: set[str] = set()

    def layers(self) -> list[FileLayer]:
        float_layers = {id(each.node): each for each in layers_of(self.graph)}
        main = {id(node) for node in self.graph.nodes}
        layers = []
        for node in self.graph.nodes:
            table = self._table(node)
            integer = self.by_node.get(id(node))
            is_layer = id(node) in float_layers and node.op_type not in RECURRENT
            if not is_layer and table is None and integer is None:
                continue
            line = float_layers.get(id(node))
            weight = table or integer or self._weight(node)
            quantizer = None if node.op_type == "Gather" else self._quantizer(node, weight)
            float_weight = line.weight if line is not None and weight is None else ""
            reason = "" if line is None or line.reason == QUANTIZED_ALREADY else line.reason
            if line is not None and line.second and weight is None and quantizer is None:
                reason = TWO_ACTIVATIONS
            result = "" if integer is None else self._float_result(node)
            layers.append(FileLayer(self._name(node, weight), node, weight, quantizer, float_weight, reason, result))
        return [*layers, *self._weight_only(main)]

    def _weight_only(self, main: set[int]) -> Iterator[FileLayer]:
        """Yield layers in subgraphs, and weights of recurrent layers."""
        for each in layers_of(self.graph):
            if each.is_recurrent or id(each.node) not in main:
                position = each.position
                weight = self.by_output.get(each.node.input[position]) if len(each.node.input) > position else None
                reason = "" if weight is not None else each.reason
                float_weight = "" if weight is not None else each.weight
                yield FileLayer(each.name, each.node, weight, None, float_weight, reason)
        nodes = {id(each.node) for each in all_nodes(self.graph.nodes) if each.outer is None}
        for key, weight in self.by_node.items():
            if key not in nodes:
                yield FileLayer(self.names.get(weight.name, weight.node_name), weight.node, weight)

    def _float_result(self, matmul: NodeProto) -> str:
        """Return the output of the Mul after an integer matmul, or of the Add of the bias that detent writes next."""
        cast = self.graph.consumers(matmul.output[0])[0]
        product: str = self.graph.consumers(cast.output[0])[0].output[0]
        is_own = product.startswith(f"{node_name(matmul)}_product")
        return str(self.graph.consumers(product)[0].output[0]) if is_own else product

    def _name(self, node: NodeProto, weight: WeightCodes | None) -> str:
        own = node_name(node)
        name = own if weight is None else self.names.get(weight.name, own).removesuffix(self.suffix)
        if not name or name in self.taken:
            name = own
        count = 1
        while name in self.taken:  # two nodes may have the same name
            count += 1
            name = f"{own}#{count}"
        self.taken.add(name)
        return name

    def _table(self, node: NodeProto) -> WeightCodes | None:
        """Return the embedding table of a Gather node that reads the table's codes or the dequantized table."""
        if node.op_type != "Gather":
            return None
        return self.by_name.get(node.input[0], self.by_output.get(node.input[0]))

    def _weight(self, node: NodeProto) -> WeightCodes | None:
        origins = (self._origin(name) for name in node.input[:2])
        return next((self.by_output[origin] for origin in origins if origin in self.by_output), None)

    def _quantizer(self, node: NodeProto, weight: WeightCodes | None) -> QuantizeNode | None:
        for name in node.input[:2]:
            origin = self._origin(name)
            producer = self.graph.producer(origin)
            is_weight = weight is not None and self.by_output.get(origin) is weight
            if producer is not None and producer.op_type == DEQUANTIZE and not is_weight:
                return self.quantizers.get(producer.input[0])
        return None

    def _origin(self, name: str) -> str:
        return trace_back(name, self.graph.producer, _PASSING)


def kernels_by_layer(artifact: QuantizedGraph, layers: list[FileLayer]) -> dict[str, str]:
    """Return a dict from each layer's name to the operator that runs the layer in ONNX Runtime on this machine."""
    nodes = {each.weight.name: node_name(each.node) for each in layers if each.weight is not None}
    # Kernels are looked up by node name, because names in the metadata may be missing, or may be names of modules.
    kernels = kernels_of(artifact.model, names=nodes)
    return {each.name: kernels[node_name(each.node)] for each in layers if node_name(each.node) in kernels}
