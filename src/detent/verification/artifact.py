"""Artifact: the quantized file under test, with its quantizers and its weights found."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from onnx import NodeProto, TensorProto

from detent.errors import DetentError, UnsupportedError
from detent.onnx_model import Graph, Provenance, Quantization, load, read_quantization
from detent.onnx_model.files import ModelSource
from detent.onnx_model.graph import element_range, subgraphs

__all__ = ["Artifact", "FileWeight", "Site", "is_bias"]

Array = NDArray[Any]
_PASSING = ("Gather", "Transpose", "Reshape", "Identity", "Squeeze", "Unsqueeze", "Flatten", "Slice", "Cast")


@dataclass(frozen=True, eq=False)
class Site:
    """A QuantizeLinear node whose parameters are constants.

    Attributes:
        node: its name.
        x: the tensor that it quantizes.
        unclipped: what that was before a Clip, x itself where there is none.
        codes: its result.
        how: the parameters in the file.
        scale, zero_point: the names of these in the file.

    >>> Site("Q", "x", "x", "q", Quantization(np.float32(1), np.array(0), 2), "s", "z").how.kind
    2
    """

    node: str
    x: str
    unclipped: str
    codes: str
    how: Quantization
    scale: str
    zero_point: str


@dataclass(frozen=True, eq=False)
class FileWeight:
    """Codes of the file and a node that makes numbers of them.

    Attributes:
        name: the initializer.
        node: a DequantizeLinear node, or the Mul of a table whose rows bring their scales.
        how: its parameters.
        direct: whether the node reads the initializer itself, and not a part of it or another shape.
        constants: the names of scale and zero point in the file.

    >>> FileWeight("w", NodeProto(name="DQ"), Quantization(np.float32(1), np.array(0), 2)).direct
    True
    """

    name: str
    node: NodeProto
    how: Quantization
    direct: bool = True
    constants: tuple[str, str] = ("", "")


class Artifact:
    """A quantized ONNX model.

    Args:
        source: a path or a model.

    Raises:
        UnsupportedError: it holds no quantizers.

    >>> from onnx import parser
    >>> made = parser.parse_model('''<ir_version: 10, opset_import: ["" : 21]>
    ...     g (float[N] x) => (float[N] y) <float s = {0.5}, uint8 z = {3}>
    ...     { q = QuantizeLinear(x, s, z) y = DequantizeLinear(q, s, z) }''')
    >>> artifact = Artifact(made)
    >>> [site.codes for site in artifact.sites], artifact.weights, artifact.kinds
    (['q'], [], {'q': 2})
    """

    def __init__(self, source: ModelSource) -> None:
        self.model = load(source)
        self.graph = Graph(self.model)
        self.provenance = Provenance.read(self.model)
        self.notes: list[str] = []
        self.sites = list(self._find_sites())
        self.weights = [*self._find_weights(), *self._find_tables()]
        inner = sum(_is_quantizer(node) for each in self.graph.nodes for node in _inner_nodes(each))
        if inner:
            self.notes.append(f"{inner} quantizers in the bodies of If, Loop or Scan are not compared")
        if not (self.sites or self.weights or inner or self.notes):
            raise UnsupportedError(
                "the artifact has no QuantizeLinear or DequantizeLinear node: give the quantized model as artifact, "
                "and what it was made from as source"
            )

    @property
    def kinds(self) -> dict[str, int]:
        """The element types of codes."""
        return {site.codes: site.how.kind for site in self.sites}

    def _find_sites(self) -> Iterator[Site]:
        for node in self.graph.nodes:
            if node.op_type != "QuantizeLinear":
                continue
            name = self.graph.node_name(node)
            how = self._read(node, node.input[0])
            if how is None:
                continue
            x = node.input[0]
            before = self.graph.producer(x)
            unclipped = before.input[0] if before is not None and before.op_type == "Clip" else x
            zero_point = node.input[2] if len(node.input) > 2 else ""
            yield Site(name, x, unclipped, node.output[0], how, node.input[1], zero_point)

    def _find_weights(self) -> Iterator[FileWeight]:
        for node in self.graph.nodes:
            if node.op_type != "DequantizeLinear":
                continue
            name, direct = self._origin(node.input[0])
            if name is None:
                continue
            how = self._read(node, name)
            if how is None:
                continue
            names = [*node.input[1:], ""]
            yield FileWeight(name, node, how, direct, (names[0], names[1]))

    def _read(self, node: NodeProto, codes: str) -> Quantization | None:
        """The parameters of a node; where they cannot be read, a note says why."""
        called, why = self.graph.node_name(node), "its parameters are computed as the model runs"
        try:
            how = read_quantization(node, self.graph.constants, lambda _: self.graph.kind(codes))
        except DetentError as error:
            how, why = None, str(error)
        if how is None:
            self.notes.append(f"{called} was not compared: {why}")
        return how

    def _origin(self, name: str) -> tuple[str | None, bool]:
        """The constant behind a tensor of codes, and whether it is that constant itself."""
        direct = True
        while name not in self.graph.constants:
            node = self.graph.producer(name)
            if node is None or node.op_type not in _PASSING:
                return None, False
            name, direct = node.input[0], False
        return name, direct

    def _find_tables(self) -> Iterator[FileWeight]:
        """Tables whose rows are picked with their scales: (Cast(Gather(codes)) - Gather(zero)) * Gather(scale)."""
        for name in {} if self.provenance is None else self.provenance.weights:
            if name not in self.graph.constants:
                continue
            for node in self.graph.consumers(name):
                found = self._table(name, node) if node.op_type == "Gather" else None
                if found is not None:
                    yield found

    def _table(self, name: str, node: NodeProto) -> FileWeight | None:
        scale = zero = None
        while node.op_type != "Mul":
            readers = self.graph.consumers(node.output[0])
            if len(readers) != 1 or readers[0].op_type not in {"Cast", "Reshape", "Sub", "Mul"}:
                return None
            before, node = node.output[0], readers[0]
            if node.op_type in {"Sub", "Mul"}:
                other = self._origin(next((each for each in node.input if each != before), ""))[0]
                scale, zero = (other, zero) if node.op_type == "Mul" else (scale, other)
        if scale is None:
            return None
        scales, kind = self.graph.array(scale), self.graph.kind(name)
        zeros = np.zeros(scales.shape, np.int64) if zero is None else self.graph.array(zero).astype(np.int64)
        width = self.graph.constants[name].dims[-1]
        if scales.ndim == 1:
            how = Quantization(scales, zeros, kind, 0, 0, *element_range(kind))
        else:
            how = Quantization(scales, zeros, kind, -1, -(-width // scales.shape[-1]), *element_range(kind))
        return FileWeight(name, node, how, direct=False, constants=(scale, zero or ""))

    def name_of(self, weight: FileWeight) -> str:
        """What a DequantizeLinear node is called.

        >>> from onnx import parser
        >>> artifact = Artifact(parser.parse_model('''<ir_version: 10, opset_import: ["" : 21]>
        ...     g (float[2] x) => (float[2] y) <float s = {0.5}, uint8[2] w = {3, 4}, uint8 z = {3}>
        ...     { v = DequantizeLinear(w, s, z) y = Add(x, v) }'''))
        >>> artifact.name_of(artifact.weights[0])
        'DequantizeLinear_v'
        """
        return self.graph.node_name(weight.node)


def _is_quantizer(node: NodeProto) -> bool:
    return node.op_type in {"QuantizeLinear", "DequantizeLinear"}


def _inner_nodes(node: NodeProto) -> Iterator[NodeProto]:
    for graph in subgraphs(node):
        for each in graph.node:
            yield each
            yield from _inner_nodes(each)


def is_bias(weight: FileWeight) -> bool:
    """Whether codes are those of a bias.

    >>> is_bias(FileWeight("b", NodeProto(), Quantization(np.float32(1), np.array(0), TensorProto.INT32)))
    True
    """
    return weight.how.kind == TensorProto.INT32
